"""Rings: attention whose keys and values are gathered becomes ring attention.

    k1 = all_gather(k, 'cp', 2, 1); v1 = all_gather(v, 'cp', 2, 1); out, lse = attention(q, k1, v1, …)
    out, lse = ring_attention(q, 'cp', k, v, …)

Partition inserted the gathers. Here they and their attention become one line; in backward, also the reduce-scatters of
gradients behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...compiler.layout.collectives import RINGS, SEQUENCE
from ...compiler.layout.mesh import Mesh
from ...compiler.program.program import Function, Line
from ...compiler.program.rewriter import Rewriter
from ...compiler.program.roles import Programs
from ...compiler.resolve.in_graph import RING_METHODS, ContextLine

_RING_OF = {row.attention: (op, row) for op, row in RINGS.items()}
"""The ring of each attention operator."""
_ENDS = ("parc.all_gather", "parc.reduce_scatter")
"""The collectives before and behind an attention that its ring takes over."""


def ring_attention(programs: Programs, lines: Sequence[ContextLine]) -> Programs:
    """The pass of rings. It takes the programs of a role, and returns them with ring attention where ``context`` lines
    ask for it."""
    rings = [line for line in lines if line.method in RING_METHODS]
    if not rings:
        return programs
    return {
        key: replace(program, functions=tuple(_in_rings(one, program.mesh, rings) for one in program.functions))
        for key, program in programs.items()
    }


@dataclass(frozen=True, slots=True)
class _Ring:
    """An attention that can be a ring, with the gathers of its keys and values, the reduce-scatters of their gradients
    in backward, and the line that replaces all of these."""

    attention: Line
    gathers: tuple[Line, ...]
    sums: tuple[Line, ...]
    line: Line


def _in_rings(function: Function, mesh: Mesh, lines: Sequence[ContextLine]) -> Function:
    """Return a function with a ring for each attention whose gathered keys no other line reads."""
    returned = {name for _, name in function.returns}
    candidates = (_ring_of(line, function, mesh, lines) for line in function.lines if line.op in _RING_OF)
    rings = [ring for ring in candidates if ring is not None]
    while True:
        attentions = {id(ring.attention) for ring in rings}
        whole = [ring for ring in rings for name in (one.made[0].name for one in ring.gathers)
                 if name in returned or not attentions.issuperset(map(id, function.readers[name]))]  # fmt: skip
        if not whole:
            break
        rings = [ring for ring in rings if ring not in whole]
    rewriter = Rewriter(mesh, function)
    for ring in rings:
        rewriter.replace(ring.attention, ring.line)
        rewriter.drop((*ring.gathers, *ring.sums))
    return rewriter.function()


def _ring_of(line: Line, function: Function, mesh: Mesh, lines: Sequence[ContextLine]) -> _Ring | None:
    """Return the ring of an attention; None where its keys are not gathered over the axis of a line."""
    op, row = _RING_OF[line.op]
    names = [item.name for item in line.args[row.keys : row.keys + 2]]
    gathers = tuple(function.makers[name] for name in names if name in function.makers)
    gradients = [value for value in line.results[1:] if row.carries_gradients and value is not None]
    sums = tuple(function.readers[value.name][0] for value in gradients)
    over = {one.args[1] for one in (*gathers, *sums) if one.op in _ENDS and one.args[2] == SEQUENCE}
    causes = {",".join(mesh.parts(ring.axis)): ring.line for ring in lines if ring.names(line)}
    if len(gathers) < 2 or len(gradients) != 2 * row.carries_gradients or len(over) != 1 or not over <= causes.keys():
        return None
    if any(one.op not in _ENDS for one in (*gathers, *sums)):
        return None
    args = list(line.args)
    args[row.keys : row.keys + 2] = (one.args[0] for one in gathers)
    results = (line.results[0], *(one.results[0] for one in sums)) if row.carries_gradients else line.results
    (axes,) = over
    origin = replace(line.origin, plan=causes[axes])
    return _Ring(line, gathers, sums, replace(line, results=results, op=op, args=row.line(axes, args), origin=origin))
