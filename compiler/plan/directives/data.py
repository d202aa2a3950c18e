"""``data``: the source of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import UNEXPECTED_ARGUMENT
from ....grammar.diagnostics import Diagnostic, Label, PlanError
from ....grammar.nearest import did_you_mean, listed
from ....grammar.parse import parse
from ....grammar.source import Source, Span
from ....grammar.usage import parse_usage
from ..directive import Directive, Scope, argument
from ..samples_said import ORDER, SAMPLE_FORMS, SamplesSaid, check_samples, read_samples, usages


@dataclass(frozen=True)
class Data(Directive):
    """The source of samples, and their order. The page on data, [data.md](data.md), has examples of each form.

    `bytes "GLOB", "GLOB"`: the bytes of text files as tokens. Globs are relative to the plan's folder; `{stdlib}` in
    one is the folder of the running Python's standard library. The input named `tokens` gets the bytes, and the input
    named `targets` the byte after each. Without these names the first whole-number input that the loss does not use
    gets the bytes, and the first that the loss uses gets the targets. Bytes go to 255: a model of text has 256 rows and
    classes, or as many as the files' letters need. Samples of bytes are always shuffled.

    `tokens "GLOB"`: files of tokens, which are mapped into memory and never read whole: `.npy`, Megatron's `.bin` with
    its `.idx`, or a bare `.bin` as nanoGPT writes it, whose type `dtype uint16` says. Inputs get them as they get
    bytes.

    `dataset "package.module:name" (name=value)` or `dataset "./file.py:name"`: a callable that is called once, with the
    arguments, and returns a `torch.utils.data.Dataset`, or anything else with `__getitem__` and `__len__`, or an
    iterable of samples or of batches. A sample is a dict by the names of inputs, without the dim of the batch, or a
    tuple in the order of the `input` lines.

    `folder "DIR"`: a dataset that Hugging Face's `datasets` has saved (`dataset.save_to_disk("DIR")`), or a file of
    JSON with an object a line; its columns are named as the inputs.

    `"package.module:name" (name=value)` or `"./file.py:name"`: a callable that gets the global number of a sample (and
    the arguments). It returns a dict of tensors, its inputs by name, without the dim of the batch: `{"picture":
    picture, "label": torch.tensor(3)}`. `parc check` and `parc build` look at sample 0, if it can be made.

    `synthetic`: random samples for a first run and for measuring. They are drawn from `seed` and each sample's number,
    so that every mesh trains on the same. Whole numbers are below the count of rows that they look up, or of classes of
    the loss, and 0 or 1 where nothing says so. Real numbers are normal.

    `shuffle`: every epoch has another order, which `seed` and the epoch's number choose. `split 0.05` keeps this share
    of the samples, evenly spread, for evaluation. `workers N`: as many processes of each rank read samples ahead.
    `pack`: samples are documents of any length, which are joined and cut to the length of the input; the first token
    of a following document is no target (it is the loss's ignored class). In `tokens`, `end N` is the token that ends a
    document, where no `.idx` says it. Attention still sees the end of the document before.
    """

    USAGE = f"data {' | '.join(usages())}"
    LEAD = ""
    """The word of the line before its phrase of samples."""

    samples: SamplesSaid | None = argument(read_samples)

    @property
    def said(self) -> SamplesSaid:
        """The samples as the line says them."""
        assert self.samples is not None, "a line that matches the usage has one of its forms"
        return self.samples

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from check_samples(self.arguments)


def read_words(words: str, option: str) -> SamplesSaid:
    """Return the samples of a command-line ``option`` whose value is written like a ``data`` line, without shuffling.
    The word ``data`` and the quotes around a name may be left out.

    Raises:
        PlanError: the value is not written so, or its samples have no end.
    """
    words, verb = words.strip().removeprefix("data "), option.strip("-")
    forms = {form: text.replace(ORDER, "") for form, text in SAMPLE_FORMS.items() if ORDER in text}
    first, *others = words.replace('"', " ").split() or [""]
    if first and first not in forms:
        shown = listed((" ".join(text.split()[:2]) for text in forms.values()), "or")
        help_ = f"begin with a form: {shown}; `dataset` takes a function, which may read any file"
        message = f"`{option}` takes samples with an end, and `{first}` is none of their forms"
        at = words.index(first)
        label = Label(Span(Source(option, words), at, at + len(first)))
        raise PlanError([Diagnostic(UNEXPECTED_ARGUMENT, message, label, help=did_you_mean(first, forms, help_))])
    if '"' not in words and others:
        words = " ".join([first, f'"{others[0]}"', *others[1:]])
    statements, wrong = parse(Source(option, f"{verb} {words}"))
    usage, errors = parse_usage(f"{verb} {' | '.join(forms.values())}"), list(wrong)
    for statement in statements:
        arguments, faults = usage.match(statement)
        errors += faults
        errors += () if arguments is None else check_samples(arguments)
        if not errors and arguments is not None:
            return Data.read(arguments).said
    raise PlanError(errors)
