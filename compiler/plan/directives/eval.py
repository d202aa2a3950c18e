"""``eval``: programs that evaluate the model, when a run does, and on which samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.diagnostics import Diagnostic
from ..directive import ONE_OR_MORE, Directive, Scope, argument
from ..samples_said import SAMPLE_FORMS, SamplesSaid, check_samples, read_samples, slot_of, usages

_LEAD = "data"


@dataclass(frozen=True)
class Eval(Directive):
    """The build also has programs that evaluate the model: forward only, with the model in `eval()`. There is no
    dropout, and BatchNorm uses its running statistics. `session.evaluate(batch)` runs them.

    `every N`: `parc run` evaluates after every N steps; `--eval-every` sets another N. The number is `eval_loss` in
    the metrics of that step: the loss of the first `batches N` batches, 100 without that, as if they were one batch.
    Each batch counts by its targets that are not ignored, or by the sum of its mask; if the loss counts nothing, by its
    samples. If the loss has several terms, those of the first term with a count decide, so the number may differ a
    little from that of one batch. If there are fewer samples, all are read, none twice. If the last of them are fewer
    than a batch, they are completed by samples whose targets are ignored. If that would change the loss, they are left
    out, and `parc run` says so.

    `data …`: the samples, in the forms of the `data` line. Without this clause the samples come from the plan's own
    `data` line. If that line has a `split`, evaluation reads the share that the split holds back. If it has none,
    evaluation reads the first samples of the training data.

    parc captures the model in `eval()` separately. It makes and checks the programs of an evaluation like those of a
    step, with the same placements. The model in `eval()` may read fewer parameters than in training, but no others. A
    plan without this line has no such programs, and builds in less time.
    """

    USAGE = "eval " + " | ".join(" ".join(f"[every N] {text} [batches N]".split()) for text in ("", *usages(_LEAD)))
    LEAD = _LEAD
    """The word of the line before its phrase of samples."""
    LIMITS = (("every", ONE_OR_MORE), ("batches", ONE_OR_MORE))
    TRAINING = (
        ("every", "counts steps"), ("batches", "counts those of a loss"),
        *((slot_of(form, _LEAD), "names samples of a loss") for form in SAMPLE_FORMS),
    )  # fmt: skip

    every: int | None = argument(lambda line: int(line.number("every", 0)) or None)
    batches: int | None = argument(lambda line: int(line.number("batches", 0)) or None)
    samples: SamplesSaid | None = argument(lambda line: read_samples(line, _LEAD))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        yield from check_samples(self.arguments, self.LEAD)
