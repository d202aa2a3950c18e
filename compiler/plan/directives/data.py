"""``data``: the source of samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes_language import MISSING_ARGUMENT, UNEXPECTED_ARGUMENT
from ....grammar.diagnostics import Diagnostic, Label, PlanError
from ....grammar.nearest import did_you_mean, listed
from ....grammar.parse import parse
from ....grammar.source import Source, Span
from ....grammar.usage import parse_usage
from ..directive import Directive, Scope, argument
from ..samples_said import ENDLESS, SAMPLE_FORMS, SamplesSaid, check_samples, read_samples, usages


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
    """Return what the words of a ``data`` line say as the value of an ``option``; a name needs no quotes there.

    Raises:
        PlanError: they are no such words.
    """
    split = words.replace('"', " ").split()
    first = split[0] if split else ""
    if ":" not in first and first not in {*SAMPLE_FORMS} - {"callable"}:
        raise PlanError([_no_form(words, first, option)])
    at = int(first in SAMPLE_FORMS)
    if '"' not in words and at < len(split):
        words = " ".join([*split[:at], f'"{split[at]}"', *split[at + 1 :]])
    statements, wrong = parse(Source(option, f"data {words}"))
    arguments, faults = parse_usage(Data.USAGE).match(statements[0]) if statements else (None, ())
    errors = [*wrong, *faults, *(check_samples(arguments) if arguments is not None else ())]
    if errors or arguments is None:
        raise PlanError(errors)
    return Data.read(arguments).said


def _no_form(words: str, first: str, option: str) -> Diagnostic:
    """Return the error of words whose ``first`` is not a form of samples, with the forms of samples that have an
    end."""
    known = {form: " ".join(text.split()[:2]) for form, text in SAMPLE_FORMS.items() if form not in ENDLESS}
    help_ = f"forms are {listed(known.values())}"
    if not first:
        return Diagnostic(MISSING_ARGUMENT, f"`{option}` names no samples", help=help_)
    at = words.index(first)
    message, rest = f"`{first}` is not a form of samples", words[at + len(first) :].strip()
    if first == "data":
        message = f"`data` begins a plan's line, and is left out in `{option}`"
        help_ = f"write `{rest}`" if rest else help_
    elif "." in first or "/" in first:
        message = f"nothing says what `{first}` holds"
        help_ = f"write a form before it: {help_}; `dataset` takes a function, which may read any file"
    elif meant := did_you_mean(first, known):
        help_ += f"; {meant}"
    label = Label(Span(Source(option, words), at, at + len(first)))
    return Diagnostic(UNEXPECTED_ARGUMENT, message, label, help=help_)
