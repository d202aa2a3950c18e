"""The phrase of `data` and `eval` lines that names samples: where they come from, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...grammar.codes import BAD_VALUE
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import listed
from ...grammar.source import Span
from ...grammar.syntax import Item, Number, String
from ...grammar.usage import Arguments
from .directive import Literal, check_callable, check_known, check_literals, read_literals

TOKEN_TYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
"""The types that the numbers of a token file may have."""
ORDER = "[shuffle] [split X] "
_OPTIONS = f"{ORDER}[workers N]"
SAMPLE_FORMS = {
    "bytes": f"bytes GLOBS [pack] {_OPTIONS}",
    "tokens": f"tokens GLOBS [dtype TYPE] [pack] [end N] {_OPTIONS}",
    "dataset": f"dataset CALLABLE [ARGS] [pack] {_OPTIONS}",
    "folder": f"folder FILE [pack] {_OPTIONS}",
    "synthetic": "synthetic",
    "callable": "CALLABLE [ARGS] [workers N]",
}
"""The forms of the phrase, by name. Those of samples with an end have an ``ORDER``."""


@dataclass(frozen=True, slots=True)
class SamplesSaid:
    """The values of the phrase. ``names`` are globs, or a folder; ``split`` is the share of samples that is kept for
    evaluation."""

    form: str
    names: tuple[str, ...]
    callable: str | None
    values: tuple[tuple[str, Literal], ...]
    dtype: str | None = None
    shuffle: bool = False
    split: float = 0.0
    workers: int = 0
    pack: bool = False
    end: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return the values as a manifest has them; options that the line leaves out are left out."""
        options = {"dtype": self.dtype, "shuffle": self.shuffle, "split": self.split, "workers": self.workers,
                   "pack": self.pack, "end": self.end}  # fmt: skip
        facts = {
            "form": self.form,
            "names": list(self.names),
            "callable": self.callable,
            "arguments": dict(self.values),
        }
        return facts | {
            name: value for name, value in options.items() if value or (name == "end" and value is not None)
        }


def usages(lead: str = "") -> list[str]:
    """Return the usage of each form, for a line that has the word ``lead`` before the phrase.

    >>> usages("data")[-1]
    'data CALLABLE [ARGS] [workers N]'
    """
    return [f"{lead} {text}".lstrip() for text in SAMPLE_FORMS.values()]


def slot_of(form: str, lead: str) -> str:
    """Return the name of the argument that a form has and others do not."""
    if form == "callable":
        return lead or form
    return f"{lead} {form}".lstrip()


def form_of(arguments: Arguments, lead: str = "") -> str:
    """Return the name of the form of a line's phrase, "" if the line has none."""
    return next((form for form in SAMPLE_FORMS if slot_of(form, lead) in arguments), "")


def read_samples(arguments: Arguments, lead: str = "") -> SamplesSaid | None:
    """Return the values of a line's phrase of samples, None if it has no such phrase."""
    form = form_of(arguments, lead)
    if not form:
        return None
    texts = tuple(item.text for item in samples_items(arguments, lead))
    is_code = form in ("callable", "dataset")
    return SamplesSaid(
        form,
        () if is_code else texts,
        next(iter(texts), None) if is_code else None,
        read_literals(arguments.bindings("args")),
        arguments.text("dtype") or None,
        "shuffle" in arguments,
        float(arguments.number("split", 0.0)),
        int(arguments.number("workers", 0)),
        "pack" in arguments,
        int(arguments.number("end", 0)) if "end" in arguments else None,
    )


def samples_items(arguments: Arguments, lead: str = "") -> tuple[String, ...]:
    """Return the strings of the phrase, with their places: globs, a folder's name, or the name of a callable."""
    return tuple(item for item in arguments.items(slot_of(form_of(arguments, lead), lead)) if isinstance(item, String))


def samples_span(arguments: Arguments, text: str, lead: str = "") -> Span:
    """Return the place of one of the strings of the phrase, of its only string, or of the line."""
    items = samples_items(arguments, lead)
    return next((item.span for item in items if item.text == text or len(items) == 1), arguments.statement.span)


def check_samples(arguments: Arguments, lead: str = "") -> Iterator[Diagnostic]:
    """Yield the errors of the phrase that the plan alone can tell."""
    form = form_of(arguments, lead)
    if form in ("callable", "dataset"):
        yield from check_callable(arguments, slot_of(form, lead))
        yield from check_literals(arguments, "args")
    for item in samples_items(arguments, lead):
        if not item.text.strip():
            kind, example = ("folder", "wiki") if form == "folder" else ("glob", "texts/*.txt")
            yield Diagnostic(BAD_VALUE, f"the {kind} is empty", Label(item.span), help=f'write as `"{example}"`')
    message = f"`{arguments.text('dtype')}` is not a type of the numbers of a token file"
    yield from check_known(arguments.word("dtype"), TOKEN_TYPES, message, f"types are {listed(TOKEN_TYPES)}")
    if "end" in arguments and "pack" not in arguments:
        message = "`end` is the token that ends a document, and has a meaning only with `pack`"
        yield Diagnostic(BAD_VALUE, message, Label(arguments.span("end")), help="add `pack`, or remove `end`")
    limits: Mapping[str, tuple[bool, str]] = {
        "split": (0 < arguments.number("split", 0.5) < 1, "a share between 0 and 1, as 0.05"),
        "workers": (1 <= arguments.number("workers", 1) <= 256, "from 1 to 256"),
        "end": (arguments.number("end", 0) >= 0, "0 or more"),
    }
    for name, (holds, wanted) in limits.items():
        numbers: list[Item] = [item for item in arguments.items(name) if isinstance(item, Number)]
        if numbers and not holds:
            message = f"`{name}` is {numbers[0].span.text}: it must be {wanted}"
            yield Diagnostic(BAD_VALUE, message, Label(numbers[0].span), help=f"write a number that is {wanted}")
