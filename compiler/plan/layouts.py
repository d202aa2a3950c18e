"""Placements as lines write them: layouts, weights split by a style, and the cuts of a dim of known size by its
layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...grammar.codes import (
    AXIS_TWICE,
    BAD_VALUE,
    NOT_PADDED,
    PARTS_UNKNOWN,
    UNEVEN_SHARD,
    WRONG_DIM,
    WRONG_KIND,
    WRONG_SUB_DIMS,
)
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.source import Span
from ...grammar.syntax import KIND_NAMES, Call, Dim, Ellipsis, Group, Item, Layout, Number, Setting, SplitItem, Word
from ...grammar.usage import Arguments
from ..layout.mesh import Mesh
from ..layout.stretches import Outer, joined_stretches
from .directive import Directive, Scope, argument

KEEP_GATHERED = "keep gathered"


@dataclass(frozen=True, slots=True)
class Factor:
    """A sub-dim: its name and global size if they are written, and the axes that split it, major first."""

    name: str | None
    size: int | None
    axes: tuple[Word, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class DimLayout:
    """The layout of one dim as a product of sub-dims, major first; most dims are one sub-dim. ``rest``: it stands for
    any number of whole dims. ``more`` are further products: the dim is then the concatenation of all products, each
    split over the same axes."""

    factors: tuple[Factor, ...]
    span: Span
    rest: bool = False
    more: tuple[tuple[Factor, ...], ...] = ()
    pad: bool = False
    """True where the dim may be padded if its splits do not divide it."""

    @property
    def axes(self) -> tuple[Word, ...]:
        """The axes that split the dim."""
        return tuple(axis for factor in self.factors for axis in factor.axes)


@dataclass(frozen=True)
class Fix(Directive):
    """Values by name or pattern, placed on every axis: split as ``dims`` says, whole on all other axes.

    ``dims`` is None for values that are whole on every axis.
    """

    ONCE = False

    where: tuple[Word, ...] = argument(lambda line: tuple(_value_names(line)))
    """The names; a value inside the model is a word of its own, as ``out(blocks.*)``."""
    dims: tuple[DimLayout, ...] | None = argument(lambda line: _read_placement(line)[0])

    gathered: bool = argument(lambda line: KEEP_GATHERED in line)
    """True where backward keeps what was all-gathered for products in forward."""

    @property
    def axes(self) -> tuple[Word, ...]:
        """The axes that split a dim."""
        return tuple(axis for dim in self.dims or () for axis in dim.axes)

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from _read_placement(self.arguments)[1]
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

    where: tuple[Word, ...] = argument(lambda line: line.words("where"))
    axis: Word = argument(lambda line: line.word("over"))
    rows: DimLayout | None = argument(lambda line: _read_rows(line)[0])
    pad: bool = argument(lambda line: "pad" in line)

    @property
    def style(self) -> str:
        """``column``, ``row``, ``vocab`` or ``experts``."""
        return self.verb

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        yield from scope.check_axis(self.axis, of_views=True)
        rows, errors = _read_rows(self.arguments)
        yield from errors
        if rows is not None and not errors:
            yield from _check_rows(rows, self.axis)


def _value_names(arguments: Arguments) -> Iterator[Word]:
    """Yield the names of a line, with calls written as words without spaces."""
    for item in arguments.items("values"):
        if isinstance(item, Call):
            names = (part.text for part in item.arguments if isinstance(part, Word | Number))
            yield Word(f"{item.name}({','.join(names)})", item.span)
        elif isinstance(item, Word | Number):
            yield Word(item.text, item.span)


def _read_placement(arguments: Arguments) -> tuple[tuple[DimLayout, ...] | None, tuple[Diagnostic, ...]]:
    return next((read_layout(item) for item in arguments.items("layout") if isinstance(item, Layout)), (None, ()))


def _read_rows(arguments: Arguments) -> tuple[DimLayout | None, tuple[Diagnostic, ...]]:
    return next((read_sub_dims(item) for item in arguments.items("rows") if isinstance(item, Group)), (None, ()))


def read_layout(layout: Layout) -> tuple[tuple[DimLayout, ...], tuple[Diagnostic, ...]]:
    """Return the dims of a layout, and its errors that hold for any tensor."""
    dims: list[DimLayout] = []
    diagnostics: list[Diagnostic] = []
    for dim in layout.dims:
        dim_layout, errors = read_dim(dim)
        dims.append(dim_layout)
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
        layout = DimLayout((), dim.span, rest=True, pad=pad)
    elif isinstance(first, Group):
        layout, more_errors = read_sub_dims(first)
        layout, errors = replace(layout, pad=pad), [*errors, *more_errors]
    else:
        factor = _factor(first)
        if factor is None:
            errors.append(_not_a_dim(first))
        elif factor.size is not None and factor.size < 1:
            errors.append(_no_size(factor))
        layout = DimLayout((factor,) if factor else (), dim.span, pad=pad)
    if pad and not layout.axes and not errors:
        message = "`pad` on a dim that nothing splits"
        help_ = "write it after a dim that an axis splits, as `[V/tp pad, _]`"
        errors.append(Diagnostic(NOT_PADDED, message, Label(words[0].span), help=help_))
    return layout, tuple(errors)


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
    """Find the error of sub-dims that are not split over this axis alone."""
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


# ---- cuts of a dim of known size: open sizes inferred, divisibility checked


@dataclass(frozen=True, slots=True)
class DimSplit:
    """The split of one dim of size D over one axis: the dim is seen as ``(outer, D / outer)``, and the second part is
    split.

    The sub-dim that is split begins after ``start`` parts, and consists of groups of ``inner`` entries.
    """

    axis: str
    outer: Outer
    start: int = 1
    inner: int = 1
    pad: bool = False  # whether the sub-dim may be padded


Pieces = Callable[[], tuple[int, ...]]
"""A function that returns the sizes of the pieces into which the model itself splits a dim; empty if it does not."""


def cut_dims(
    layout: DimLayout,
    size: int,
    mesh: Mesh,
    what: str,
    label: Label | None = None,
    pieces: Pieces = tuple,
    *,
    pad: bool | None = None,
    loose: bool = False,
) -> list[DimSplit] | Diagnostic:
    """Return the cuts that a dim's layout makes in a dim of ``size``, major first, or the reason why it cannot.

    ``what`` names the dim in messages; ``label`` is where they point, the dim's layout if it is left out. Sizes of
    parts that the layout leaves open are those of ``pieces``. With ``pad`` a sub-dim need not divide; None: this dim
    cannot be padded. ``loose``: a sub-dim that can be padded need not divide either.
    """
    label = label or Label(layout.span)
    if not size:
        return Diagnostic(WRONG_SUB_DIMS, f"{what} has no entries", label, help="split a dim that has some")
    if not layout.more:
        return _cut_product(layout, size, mesh, what, label, pad, loose)
    if layout.pad:
        message = f"{what} consists of parts that follow each other, which cannot be padded"
        return Diagnostic(NOT_PADDED, message, label, help="give parts that divide, or leave `pad` out")
    terms = _with_sizes((layout.factors, *layout.more))
    sizes = _term_sizes(terms, size, pieces)
    if sizes is None:
        known = " + ".join(map(str, pieces()))
        message = f"{what} has {size} entries, and the sizes of its parts "
        message += f"are not those at which the model cuts it: {known}" if known else "are not known"
        help_ = "give sizes that make up the whole, as in `(h/tp=4 d=16 + g/tp=2 d + g/tp d)`"
        return Diagnostic(PARTS_UNKNOWN, message, label, help=help_)
    cuts: dict[str, list[tuple[int, int]]] = {}
    for term, part in zip(terms, sizes, strict=True):
        product = DimLayout(term, term[0].span.to(term[-1].span))
        splits = _cut_product(product, part, mesh, f"a part of {what}", label, None)
        if isinstance(splits, Diagnostic):
            return splits
        for split in splits:
            assert isinstance(split.outer, int)
            cuts.setdefault(split.axis, []).append((part, split.outer))
    return [DimSplit(axis, joined_stretches(parts)) for axis, parts in cuts.items()]


def _with_sizes(terms: Sequence[tuple[Factor, ...]]) -> list[tuple[Factor, ...]]:
    """Return sub-dims with sizes by name: a size that is written once holds for all sub-dims of that name."""
    known = {factor.name: factor.size for term in terms for factor in term if factor.name and factor.size}
    return [tuple(replace(f, size=f.size or known.get(f.name or "")) for f in term) for term in terms]


def _term_sizes(terms: Sequence[tuple[Factor, ...]], size: int, pieces: Pieces) -> Sequence[int] | None:
    """Return the size of each part: as written, or from the rest that one open name must fill, or those of the model's
    own pieces."""
    known = [math.prod(factor.size or 1 for factor in term) for term in terms]
    missing = [[factor.name for factor in term if factor.size is None] for term in terms]
    names = {name for open_names in missing for name in open_names}
    rest = size - sum(part for part, open_names in zip(known, missing, strict=True) if not open_names)
    if not names:
        return known if rest == 0 else None
    if len(names) == 1 and None not in names and all(len(open_names) <= 1 for open_names in missing):
        unit = sum(part for part, open_names in zip(known, missing, strict=True) if open_names)
        if rest > 0 and rest % unit == 0:
            repeats = [rest // unit if open_names else 1 for open_names in missing]
            return [part * count for part, count in zip(known, repeats, strict=True)]
        return None
    sizes = pieces()
    fits = len(sizes) == len(terms) and sum(sizes) == size
    return sizes if fits and all(part % unit == 0 for part, unit in zip(sizes, known, strict=True)) else None


def _cut_product(
    layout: DimLayout, size: int, mesh: Mesh, what: str, label: Label, pad: bool | None, loose: bool = False
) -> list[DimSplit] | Diagnostic:
    sizes = [factor.size for factor in layout.factors]
    known = math.prod(part for part in sizes if part is not None)
    unknown = sizes.count(None)
    if size % known or (not unknown and known != size):
        product_text = " × ".join(str(part) for part in sizes if part is not None)
        message = (
            f"{what} has {size} entries, which are not {f'a multiple of {product_text}' if unknown else product_text}"
        )
        help_ = f"give sub-dims whose product is {size}"
        return Diagnostic(WRONG_SUB_DIMS, message, label, help=help_)
    if unknown == 1:
        sizes = [size // known if part is None else part for part in sizes]
    cuts: list[DimSplit] = []
    for at, factor in enumerate(layout.factors):
        before = [part for part in sizes[:at] if part is not None]
        if factor.axes and len(before) < at:
            message = f"the sub-dims before `{factor.span.text}` have no size"
            help_ = "give all sizes but one, as `h=8`"
            return Diagnostic(WRONG_SUB_DIMS, message, Label(factor.span), help=help_)
        outer = math.prod(before)
        part = sizes[at] or size // outer
        ways = math.prod(mesh.size(axis.text) for axis in factor.axes)
        if part % ways and not pad and not (loose and pad is not None):
            inner = f" in its sub-dim `{factor.span.text}`" if len(layout.factors) > 1 else ""
            named = [axis.text for axis in factor.axes]
            return uneven(f"{what} has {part} entries{inner}", part, named, mesh, label, may_pad=pad is not None)
        start, inside = outer, size // (outer * part)
        for axis in factor.axes:
            cuts.append(DimSplit(axis.text, outer, start, inside, bool(pad)))
            outer *= mesh.size(axis.text)
    return cuts


def multiples(size: int, unit: int) -> list[int]:
    """Return the nearest multiples of ``unit`` below and above a size that is not one.

    >>> multiples(50257, 4), multiples(3, 4)
    ([50256, 50260], [4])
    """
    return [multiple for multiple in (size // unit * unit, -(-size // unit) * unit) if multiple > 0]


def uneven(what: str, size: int, axes: Iterable[str], mesh: Mesh, label: Label, *, may_pad: bool = False) -> Diagnostic:
    """Return the error that ``size`` entries do not divide over axes, with the multiples that would."""
    named = [axis for axis in axes if mesh.size(axis) > 1]
    ways = math.prod(mesh.size(axis) for axis in named)
    by = " × ".join(f"{axis}={mesh.size(axis)}" for axis in named)
    near = multiples(size, ways)
    ways_out = "say `pad`, or split another dim" if may_pad else "or split another dim"
    help_ = f"choose a multiple of {ways}, such as {' or '.join(map(str, near))}, {ways_out}"
    return Diagnostic(UNEVEN_SHARD, f"{what}, which do not divide by {by}", label, help=help_)
