"""Placements that directives ask for before the model is known: layouts, and splits by a weight's style."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...grammar.codes_plan import AXIS_TWICE, BAD_VALUE, NOT_PADDED, PARTS_UNKNOWN, WRONG_DIM, WRONG_KIND
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.source import Span
from ...grammar.syntax import KIND_NAMES, Call, Dim, Ellipsis, Group, Item, Layout, Number, Setting, SplitItem, Word
from ...grammar.usage import Arguments
from .directive import Directive, Scope, argument

KEEP_GATHERED = "keep gathered"


@dataclass(frozen=True, slots=True)
class Factor:
    """A sub-dim: its name and global size where they are given, and the axes that split it, major first."""

    name: str | None
    size: int | None
    axes: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class DimLayout:
    """The layout of one dim as a product of sub-dims, major first; most have one. ``rest`` stands for any number of
    whole dims. ``more`` are further products: the dim then holds all products one after the other, all split over the
    same axes."""

    factors: tuple[Factor, ...]
    span: Span
    rest: bool = False
    more: tuple[tuple[Factor, ...], ...] = ()
    pad: bool = False
    """True where the dim may become longer if its splits do not divide it."""

    @property
    def axes(self) -> tuple[Word, ...]:
        """The axes that split the dim."""
        return tuple(axis for factor in self.factors for axis in factor.axes)


@dataclass(frozen=True)
class Fix(Directive):
    """Values by name or pattern, placed on every axis; on axes that ``dims`` does not name they are whole.

    ``dims`` is None for values that are whole on every axis.
    """

    ONCE = False

    where: tuple[Word, ...] = argument(lambda given: tuple(_values(given)))
    """The names; a value inside the model is a word of its own, as ``out(blocks.*)``."""
    dims: tuple[DimLayout, ...] | None = argument(lambda given: _placed(given)[0])

    gathered: bool = argument(lambda given: KEEP_GATHERED in given)
    """True where backward keeps what products gather of values inside the model."""

    @property
    def axes(self) -> tuple[Word, ...]:
        """The axes that split a dim."""
        return tuple(axis for dim in self.dims or () for axis in dim.axes)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from _placed(self.arguments)[1]
        tensors = [word for word in self.where if not word.text.endswith(")")]
        if self.gathered and tensors:
            message = f"`{KEEP_GATHERED}` is for values inside the model, and `{tensors[0].text}` is not one"
            help_ = "leave it out: stored tensors are there in backward"
            yield Diagnostic(BAD_VALUE, message, Label(tensors[0].span), help=help_)
        for axis in self.axes:
            yield from scope.check_axis(axis, of_views=True)


@dataclass(frozen=True)
class SplitWeights(Directive):
    """Weights of modules (or weights by name), split over one axis along the dim that ``style`` picks."""

    ONCE = False

    where: tuple[Word, ...] = argument(lambda given: given.words("where"))
    axis: Word = argument(lambda given: given.word("over"))
    rows: DimLayout | None = argument(lambda given: _rows(given)[0])
    pad: bool = argument(lambda given: "pad" in given)

    @property
    def style(self) -> str:
        """``column``, ``row``, ``vocab`` or ``experts``."""
        return self.verb

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        yield from scope.check_axis(self.axis, of_views=True)
        rows, errors = _rows(self.arguments)
        yield from errors
        if rows is not None and not errors:
            yield from _check_rows(rows, self.axis)


def _values(given: Arguments) -> Iterator[Word]:
    """Yield the names of a line, with calls written as words without spaces."""
    for item in given.items("values"):
        if isinstance(item, Call):
            names = (part.text for part in item.arguments if isinstance(part, Word | Number))
            yield Word(f"{item.name}({','.join(names)})", item.span)
        elif isinstance(item, Word | Number):
            yield Word(item.text, item.span)


def _placed(given: Arguments) -> tuple[tuple[DimLayout, ...] | None, tuple[Diagnostic, ...]]:
    return next((read_layout(item) for item in given.items("layout") if isinstance(item, Layout)), (None, ()))


def _rows(given: Arguments) -> tuple[DimLayout | None, tuple[Diagnostic, ...]]:
    return next((read_sub_dims(item) for item in given.items("rows") if isinstance(item, Group)), (None, ()))


def read_layout(layout: Layout) -> tuple[tuple[DimLayout, ...], tuple[Diagnostic, ...]]:
    """Return the dims of a layout, and its errors that hold for any tensor."""
    dims: list[DimLayout] = []
    diagnostics: list[Diagnostic] = []
    for dim in layout.dims:
        read, errors = read_dim(dim)
        dims.append(read)
        diagnostics.extend(errors)
    rests = [dim for dim in dims if dim.rest]
    if len(rests) > 1:
        related = (Label(rests[0].span, "the first"),)
        message = "a layout has `...` twice"
        diagnostics.append(Diagnostic(WRONG_DIM, message, Label(rests[1].span), related, help="write `_` for one dim"))
    diagnostics.extend(_repeated(tuple(axis for dim in dims for axis in dim.axes)))
    return tuple(dims), tuple(diagnostics)


def read_dim(dim: Dim) -> tuple[DimLayout, tuple[Diagnostic, ...]]:
    """Return one entry of a layout, and its errors."""
    first, *more = dim.items
    words = [item for item in more if isinstance(item, Word) and item.text == "pad"]
    help_ = "separate dims by commas, and put sub-dims in parentheses"
    errors = [Diagnostic(WRONG_KIND, "a dim has one name", Label(item.span), help=help_) for item in more
              if item not in words]  # fmt: skip
    pad = bool(words)
    if isinstance(first, Ellipsis):
        read = DimLayout((), dim.span, rest=True, pad=pad)
    elif isinstance(first, Group):
        read, more_errors = read_sub_dims(first)
        read, errors = replace(read, pad=pad), [*errors, *more_errors]
    else:
        factor = _factor(first)
        if factor is None:
            errors.append(_not_a_dim(first))
        elif factor.size is not None and factor.size < 1:
            errors.append(_no_size(factor))
        read = DimLayout((factor,) if factor else (), dim.span, pad=pad)
    if pad and not read.axes and not errors:
        message = "`pad` on a dim that nothing splits"
        help_ = "write it after a dim that an axis splits, as `[V/tp pad, _]`"
        errors.append(Diagnostic(NOT_PADDED, message, Label(words[0].span), help=help_))
    return read, tuple(errors)


def read_sub_dims(group: Group) -> tuple[DimLayout, tuple[Diagnostic, ...]]:
    """Return the sub-dims in parentheses, major first, and their errors."""
    errors: list[Diagnostic] = []
    terms: list[tuple[Factor, ...]] = []
    for term in group.terms:
        items = [item for phrase in term for item in phrase.items]
        factors = [(item, _factor(item)) for item in items]
        errors += [_not_a_dim(item) for item, factor in factors if factor is None]
        terms.append(tuple(factor for _, factor in factors if factor is not None))
    if not any(terms) and not errors:
        help_ = "write sub-dims, as `(3 h/tp d)`"
        errors.append(Diagnostic(WRONG_KIND, "the parentheses are empty", Label(group.span), help=help_))
    for factor in (factor for term in terms for factor in term):
        if factor.size is not None and factor.size < 1:
            errors.append(_no_size(factor))
    layout = DimLayout(terms[0] if terms else (), group.span, more=tuple(terms[1:]))
    axes = [[axis.text for factor in term for axis in factor.axes] for term in terms]
    for part, part_axes in zip(terms[1:], axes[1:], strict=True):
        if part_axes != axes[0] and part:
            split, other = (" and ".join(f"`{axis}`" for axis in one) or "nothing" for one in (axes[0], part_axes))
            message = f"the first part is split over {split}, this one over {other}"
            help_ = "every part is split over the same axes, as in `(h/tp d + g/tp d)`"
            errors.append(Diagnostic(PARTS_UNKNOWN, message, Label(part[0].span.to(part[-1].span)), help=help_))
    return layout, tuple(errors)


def _no_size(factor: Factor) -> Diagnostic:
    message = f"a sub-dim of size {factor.size}"
    return Diagnostic(BAD_VALUE, message, Label(factor.span), help="sizes are 1 or more")


def _check_rows(rows: DimLayout, axis: Word) -> Iterator[Diagnostic]:
    """Find the error of sub-dims of which not exactly one is split, over this axis alone."""
    yield from _repeated(rows.axes)
    other = next((name for name in rows.axes if name.text != axis.text), None)
    if other is not None:
        message = f"the rows are split over `{other.text}`, the line over `{axis.text}`"
        related = (Label(axis.span, "the line's axis"),)
        help_ = "name the same axis, or use `shard` to split over several"
        yield Diagnostic(BAD_VALUE, message, Label(other.span), related, help=help_)
    elif not rows.axes:
        help_ = f"write `/{axis.text}` after the sub-dim that is split, as `(3 h/{axis.text} d)`"
        yield Diagnostic(BAD_VALUE, "no sub-dim is split", Label(rows.span), help=help_)


def _factor(item: Item) -> Factor | None:
    if isinstance(item, Word):
        return Factor(None if item.text == "_" else item.text, None, (), item.span)
    if isinstance(item, Number) and item.is_integer:
        return Factor(None, int(item.value), (), item.span)
    if isinstance(item, Setting) and isinstance(item.value, Number) and item.value.is_integer:
        return Factor(item.name.text, int(item.value.value), (), item.span)
    if isinstance(item, SplitItem) and (item.size is None or (isinstance(item.size, Number) and item.size.is_integer)):
        name = item.name.text if item.name is not None and item.name.text != "_" else None
        size = int(item.size.value) if isinstance(item.size, Number) else None
        return Factor(name, size, tuple(axis for axis in item.axes if isinstance(axis, Word)), item.span)
    return None


def _not_a_dim(item: Item) -> Diagnostic:
    message, help_ = f"{KIND_NAMES[type(item)]} is not a dim", "write `_`, `NAME/axis`, `name=size` or sub-dims in `()`"
    return Diagnostic(WRONG_KIND, message, Label(item.span), help=help_)


def _repeated(axes: tuple[Word, ...]) -> Iterator[Diagnostic]:
    first: dict[str, Word] = {}
    for axis in axes:
        if axis.text in first:
            message = f"the axis `{axis.text}` is used twice on one tensor"
            related = (Label(first[axis.text].span, "used here first"),)
            help_ = "an axis can split only one dim of a tensor, once: remove one of them"
            yield Diagnostic(AXIS_TWICE, message, Label(axis.span), related, help=help_)
        first.setdefault(axis.text, axis)
