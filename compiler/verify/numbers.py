"""Numbers at all sizes that a plan declares: what programs compute with is what the captured graph computes with.

Shapes follow from one another, so each size in a type or an argument is proved by what it makes of the sizes before it
(``verify_sizes``). A factor, a divisor, a bound or an offset makes no shape: one that is right at the sizes that are
looked at may be anything between them. So it must be, as an expression, a number of the captured graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..layout.collectives import COLLECTIVES
from ..program.program import REFERENCE_FILE, Origin, Program
from ..sizes.template import ShapeFault, Template, expressions_of, parted

_CALL = re.compile(r"    (.+?) = ([\w.]+)\((.*)\)  # ")
_MADE = ("saved ", "received ", "input ", "buffer ")
_LIST = re.compile(r"\[[^\[\]]*\]")
_MOVE_BY = {"aten.roll.default", "aten.constant_pad_nd.default"}
"""Operators whose lists say where values go, which no shape shows."""


def number_faults(template: Template, programs: Mapping[str, Program]) -> Iterator[ShapeFault]:
    """Numbers of programs that are none of the captured graph's; and what is bound to a role with other sizes than it
    has there, or where it is made, of ``programs`` at sizes at which no two expressions are equal."""
    reference = template.texts.get(REFERENCE_FILE, "")
    known = set().union(*(expressions_of(call[3]) for call in map(_CALL.match, reference.split("\n")) if call))
    known |= {replace(number, size=number.size.times(-1)) for number in known if not number.kind}  # their backwards
    for file, text in template.texts.items():
        for row in text.split("\n") if file != REFERENCE_FILE and "{" in text else ():
            call = _CALL.match(row)
            if call is None or call[2] in COLLECTIVES:
                continue
            words = call[3] if call[2] in _MOVE_BY else _LIST.sub("", call[3])
            for other in sorted(map(str, expressions_of(words) - known)):
                origin = Origin.parse(parted(row)[1] or "- -")
                message = f"{call[2]} computes with {other}, which is no number of the captured graph"
                yield ShapeFault(file, call[1], origin.module, origin.plan, message, divides=False)
    yield from _role_faults(programs)


def _role_faults(programs: Mapping[str, Program]) -> Iterator[ShapeFault]:
    """Parameters of programs that have other sizes than the captured graph's inputs, or the results of others, have."""
    reference = programs.get(REFERENCE_FILE)
    if reference is None:
        return
    shapes = {value.role: value.type.shape for function in reference.functions for value in function.parameters}
    for program in programs.values():
        values = program.main.values()
        for key, name in program.main.returns:
            kind, _, word = key.partition(" ")
            if kind in ("saved", "sent"):  # what a stage saves it reads itself
                place = f"{program.role} {key}" if kind == "saved" else f"{program.action} received {word}"
                shapes[place] = values[name].type.shape
    for file, program in programs.items():
        for value in program.main.parameters if program is not reference else ():
            places = (value.role, f"{program.role} {value.role}", f"{program.action} {value.role}")
            made = [shapes[place] for place in places if place in shapes]
            if value.role.startswith(_MADE) and made[:1] != [value.type.shape]:
                message = f"`{value.role}` has other sizes where it is made"
                yield ShapeFault(file, value.name, "", 0, message, divides=False)
