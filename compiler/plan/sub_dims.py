"""The cuts of mesh axes in a dim of known size: sub-dims inferred, divisibility checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ...grammar.codes_plan import NOT_PADDED, PARTS_UNKNOWN, UNEVEN_SHARD, WRONG_SUB_DIMS
from ...grammar.diagnostics import Diagnostic, Label
from ..layout.mesh import Mesh
from ..layout.stretches import Outer, joined_stretches
from .layouts import DimLayout, Factor


@dataclass(frozen=True, slots=True)
class DimSplit:
    """The split of one dim of size D over one axis: see the dim as ``(outer, D / outer)`` and split the second part.

    The sub-dim that is split begins after ``start`` parts, and consists of groups of ``inner`` entries.
    """

    axis: str
    outer: Outer
    start: int = 1
    inner: int = 1
    pad: bool = False  # whether the sub-dim may be made longer


Pieces = Callable[[], tuple[int, ...]]
"""A function that returns the sizes into which the model itself takes a dim apart; empty if it does not."""


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
    parts that the layout leaves open are those of ``pieces``. With ``pad`` a sub-dim need not divide; None says that
    this dim cannot be made longer. ``loose``: whether a sub-dim that may be made longer divides is not asked.
    """
    label = label or Label(layout.span)
    if not size:
        return Diagnostic(WRONG_SUB_DIMS, f"{what} has no entries", label, help="split a dim that has some")
    if not layout.more:
        return _cut_product(layout, size, mesh, what, label, pad, loose)
    if layout.pad:
        help_ = "give parts that divide, or leave `pad` out"
        return Diagnostic(
            NOT_PADDED, f"{what} consists of parts that follow each other, which cannot be padded", label, help=help_
        )
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
        found = _cut_product(product, part, mesh, f"a part of {what}", label, None)
        if isinstance(found, Diagnostic):
            return found
        for one in found:
            assert isinstance(one.outer, int)
            cuts.setdefault(one.axis, []).append((part, one.outer))
    return [DimSplit(axis, joined_stretches(parts)) for axis, parts in cuts.items()]


def _with_sizes(terms: Sequence[tuple[Factor, ...]]) -> list[tuple[Factor, ...]]:
    """Return sub-dims with their sizes. Sub-dims of one name have one size: a size given once holds for all."""
    known = {factor.name: factor.size for term in terms for factor in term if factor.name and factor.size}
    return [tuple(replace(f, size=f.size or known.get(f.name or "")) for f in term) for term in terms]


def _term_sizes(terms: Sequence[tuple[Factor, ...]], size: int, pieces: Pieces) -> Sequence[int] | None:
    """Return the size of each part: as given, or the rest for the one part without a size, or as the model has them."""
    known = [math.prod(factor.size or 1 for factor in term) for term in terms]
    missing = [[factor.name for factor in term if factor.size is None] for term in terms]
    names = {name for found in missing for name in found}
    rest = size - sum(part for part, found in zip(known, missing, strict=True) if not found)
    if not names:
        return known if rest == 0 else None
    if len(names) == 1 and None not in names and all(len(found) <= 1 for found in missing):
        unit = sum(part for part, found in zip(known, missing, strict=True) if found)
        if rest > 0 and rest % unit == 0:
            return [part * (rest // unit if found else 1) for part, found in zip(known, missing, strict=True)]
        return None
    found = pieces()
    fits = len(found) == len(terms) and sum(found) == size
    return found if fits and all(part % less == 0 for part, less in zip(found, known, strict=True)) else None


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
    """Return the multiples of ``unit`` next to a size that is none, below and above.

    >>> multiples(50257, 4), multiples(3, 4)
    ([50256, 50260], [4])
    """
    return [multiple for multiple in (size // unit * unit, -(-size // unit) * unit) if multiple > 0]


def uneven(what: str, size: int, axes: Iterable[str], mesh: Mesh, label: Label, *, may_pad: bool = False) -> Diagnostic:
    """Return the error that ``size`` entries do not divide over axes; it states the constraint."""
    named = [axis for axis in axes if mesh.size(axis) > 1]
    ways = math.prod(mesh.size(axis) for axis in named)
    by = " × ".join(f"{axis}={mesh.size(axis)}" for axis in named)
    near = multiples(size, ways)
    ways_out = "say `pad`, or split another dim" if may_pad else "or split another dim"
    help_ = f"choose a multiple of {ways}, such as {' or '.join(map(str, near))}, {ways_out}"
    return Diagnostic(UNEVEN_SHARD, f"{what}, which do not divide by {by}", label, help=help_)
