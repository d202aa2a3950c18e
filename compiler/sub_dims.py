"""Where mesh axes cut a dim of known size: sub-dims inferred, divisibility checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..grammar.codes_placement import UNEVEN_SHARD, WRONG_SUB_DIMS
from ..grammar.diagnostics import Diagnostic, Label
from .constraints import DimLayout
from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis on a dim of size D: see the dim as ``(outer, D / outer)`` and split the second part."""

    axis: str
    outer: int


def cut(layout: DimLayout, size: int, mesh: Mesh, what: str, label: Label | None = None) -> list[Cut] | Diagnostic:
    """The cuts that a dim's layout makes on a dim of ``size``, major first, or why it cannot.

    ``what`` names the dim in messages; ``label`` is where they point, the dim's layout if it is left out.
    """
    label = label or Label(layout.span)
    sizes = [factor.size for factor in layout.factors]
    known = math.prod(part for part in sizes if part is not None)
    unknown = sizes.count(None)
    if size % known or (not unknown and known != size):
        made = " × ".join(str(part) for part in sizes if part is not None)
        message = f"{what} has {size} entries, which are not {f'a multiple of {made}' if unknown else made}"
        help_ = f"give sub-dims whose product is {size}"
        return Diagnostic(WRONG_SUB_DIMS, message, label, help=help_)
    if unknown == 1:
        sizes = [size // known if part is None else part for part in sizes]
    cuts: list[Cut] = []
    for at, factor in enumerate(layout.factors):
        before = [part for part in sizes[:at] if part is not None]
        if factor.axes and len(before) < at:
            message = f"the sub-dims before `{factor.span.text}` have no size"
            help_ = "give all sizes but one, as `h=8`"
            return Diagnostic(WRONG_SUB_DIMS, message, Label(factor.span), help=help_)
        outer = math.prod(before)
        part = sizes[at] if sizes[at] is not None else size // outer
        ways = math.prod(mesh.size(axis.text) for axis in factor.axes)
        if part is not None and part % ways:
            inner = f" in its sub-dim `{factor.span.text}`" if len(layout.factors) > 1 else ""
            return uneven(f"{what} has {part} entries{inner}", part, [axis.text for axis in factor.axes], mesh, label)
        for axis in factor.axes:
            cuts.append(Cut(axis.text, outer))
            outer *= mesh.size(axis.text)
    return cuts


def uneven(what: str, size: int, axes: Iterable[str], mesh: Mesh, label: Label) -> Diagnostic:
    """The error that ``size`` entries do not divide over axes; states the constraint."""
    named = [axis for axis in axes if mesh.size(axis) > 1]
    ways = math.prod(mesh.size(axis) for axis in named)
    by = " × ".join(f"{axis}={mesh.size(axis)}" for axis in named)
    near = [multiple for multiple in (size // ways * ways, -(-size // ways) * ways) if multiple > 0]
    help_ = f"choose a multiple of {ways}, such as {' or '.join(map(str, near))}, or split another dim"
    return Diagnostic(UNEVEN_SHARD, f"{what}, which do not divide by {by}", label, help=help_)
