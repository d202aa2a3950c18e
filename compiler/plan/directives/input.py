"""``input``: one tensor of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ....grammar.codes import BAD_VALUE, MISSING_STATEMENT, WRONG_KIND
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.nearest import did_you_mean, listed
from ....grammar.syntax import Item, Layout, Number, Word
from ...sizes.size_range import LARGEST_SIZE
from ..directive import Directive, Scope, argument, check_known
from .sizes import Sizes

INPUT_DTYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
_OTHER_NAMES = {
    "long": "int64", "int": "int64", "i64": "int64", "float": "float32", "half": "float16", "double": "float64",
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32", "byte": "uint8",
} | {name: name for name in INPUT_DTYPES}  # fmt: skip
"""The types by their names in other tools."""


@dataclass(frozen=True)
class Input(Directive):
    """A tensor of every batch: its name, its type, and its dims, each a name from `sizes` or a number.

    An input goes to the parameter of the model's forward that has its name, or the name after `as`; the order of
    `input` lines does not matter. If forward has no such parameter, the input goes to the loss alone if the loss names
    it; else into forward's `**kwargs`, with a note. If forward takes any number of tensors, as `*xs`, all inputs `as
    xs` go there, in the plan's order. If it takes a dictionary or a tuple, `as batch.tokens` and `as batch.0` are
    entries of these. Types are bool, uint8, int32, int64, float16, bfloat16, float32 and float64.
    """

    USAGE = "input NAME [as PATH] TYPE LAYOUT"
    ONCE = False

    name: str = argument(lambda line: line.text("name"))
    parameter: str = argument(lambda line: line.text("as", line.text("name")))
    dtype: str = argument(lambda line: line.text("type"))
    dims: tuple[str | int, ...] = argument(lambda line: tuple(_declared_dims(line.items("layout"))))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if self.dtype not in INPUT_DTYPES:
            message = f"`{self.dtype}` is not a type of an input"
            meant = _OTHER_NAMES.get(self.dtype.removeprefix("torch."), self.dtype)
            near = did_you_mean(meant, INPUT_DTYPES, f"types are {listed(INPUT_DTYPES)}")
            help_ = f"write `{meant}`" if meant in INPUT_DTYPES else near
            yield Diagnostic(BAD_VALUE, message, Label(self.arguments.span("type")), help=help_)
        known = {binding.name.text for sizes in scope.all(Sizes) for binding in sizes.arguments.bindings("name")}
        (layout,) = self.arguments.items("layout")
        assert isinstance(layout, Layout)
        for dim in layout.dims:
            item = dim.items[0]
            if len(dim.items) > 1 or not isinstance(item, Word | Number) or item.text == "_":
                message = "a dim of an input is the name of a size or a number"
                yield Diagnostic(WRONG_KIND, message, Label(dim.span), help="write names, as `[B, S]`")
            elif isinstance(item, Number) and (not item.is_integer or item.value < 1):
                message = f"a dim of size {item.text}"
                yield Diagnostic(BAD_VALUE, message, Label(item.span), help="sizes are whole numbers, 1 or more")
            elif isinstance(item, Word) and item.text not in known and "sizes" not in scope.broken:
                message = f"no size is given for `{item.text}`"
                help_ = did_you_mean(item.text, known, f"add `{item.text}=...` to the `sizes` line")
                yield Diagnostic(MISSING_STATEMENT, message, Label(item.span), help=help_)
        sizes = {name: size.high for line in scope.all(Sizes) for name, size in line.ranges}
        entries = prod(dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in self.dims)
        if entries > LARGEST_SIZE:
            message = f"`{self.name}` has {entries:,} entries a step, and inputs go to {LARGEST_SIZE:,}"
            yield Diagnostic(BAD_VALUE, message, Label(layout.span), help="choose smaller sizes")


def check_dim(scope: Scope, dim: Word) -> Iterator[Diagnostic]:
    """An error if no input has a dim of this name."""
    dims = dict.fromkeys(dim for line in scope.all(Input) for dim in line.dims if isinstance(dim, str))
    yield from check_known(dim, dims, f"no input has a dim `{dim.text}`", f"inputs have {listed(dims)}")


def _declared_dims(layouts: Iterable[Item]) -> Iterator[str | int]:
    for layout in layouts:
        for dim in layout.dims if isinstance(layout, Layout) else ():
            item = dim.items[0]
            if isinstance(item, Word):
                yield item.text
            elif isinstance(item, Number) and item.is_integer:
                yield int(item.value)
