"""Planted bugs of what the roles of a pipeline sum, and of what two of its stages return."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from parc.compiler.layout.placement import TensorType
from parc.compiler.program.binding import SCALE, Binding
from parc.compiler.program.program import Line, Ref, Value

from .planted_stages import Bugs, Files, changed_main

ROLES = ("pp0.REDUCE", "pp1.REDUCE")
AMONG, CAST = "parc.all_reduce_among", "aten._to_copy.default"


def before(programs: Files) -> Bugs:
    """One role scales or rounds its part of a gradient before roles sum it, or counts it in the norm."""
    scale = next(v for p in programs.values() for v in p.main.parameters if v.binding == SCALE)
    for name in ROLES:
        main, values = programs[name].main, programs[name].main.values()
        given = main.parameters if any(v.binding == SCALE for v in main.parameters) else (*main.parameters, scale)
        own = next(v.name for v in given if v.binding == SCALE)
        summed: dict[str, str] = {}
        for at, line in enumerate(main.lines):
            earlier, later, operand = main.lines[:at], main.lines[at + 1 :], next(iter(line.uses()), "")
            if line.op == AMONG and values[operand].type.shape:
                summed.update((v.name, operand) for v in line.results if v is not None)
                type_ = values[operand].type
                last = Line(line.results, line.op, (Ref("again"), *line.args[1:]), line.kwargs, line.origin)
                again = Line((Value("again", type_),), "aten.mul.Tensor", (Ref(operand), Ref(own)))
                lines = (*earlier, again, last, *later)
                yield f"{name} scales {operand} again", changed_main(programs, name, parameters=given, lines=lines)
                narrow = TensorType(torch.bfloat16, type_.shape, type_.placement)
                down = Line((Value("narrow", narrow),), CAST, (Ref(operand),), (("dtype", torch.bfloat16),))
                again = Line((Value("again", type_),), CAST, (Ref("narrow"),), (("dtype", type_.dtype),))
                lines = (*earlier, down, again, last, *later)
                yield f"{name} rounds {operand}", changed_main(programs, name, lines=lines)
            if line.op == "parc.square_sum.default" and operand in summed:
                early = Line(line.results, line.op, (Ref(summed[operand]),), line.kwargs, line.origin)
                lines = (*earlier, early, *later)
                yield f"{name} counts {operand} before its sum", changed_main(programs, name, lines=lines)


def mixed(programs: Files) -> Bugs:
    """Gradients of different parameters are summed, and the sum is passed on as it is or summed again."""
    alone: list[dict[str, tuple[Binding, str]]] = []
    for name in ROLES:
        main = programs[name].main
        met = {v.name for line in main.lines if line.op == AMONG for v in line.results if v is not None}
        ends = [(key, value) for key, value in main.returns if key.kind == "gradient" and value not in met]
        alone.append({str(main.values()[value].type): (key, value) for key, value in ends})
    for text in sorted(alone[0].keys() & alone[1].keys()):
        for op, args in ((AMONG, ("pp", [0, 1])), ("aten.mul.Scalar", (1.0,))):
            made = programs
            for name, found in zip(ROLES, alone, strict=True):
                main, (key, value) = programs[name].main, found[text]
                type_ = main.values()[value].type
                met_line = Line((Value("met", type_),), AMONG, (Ref(value), "pp", [0, 1]))
                lines = (*main.lines, met_line, Line((Value("again", type_),), op, (Ref("met"), *args)))
                returns = tuple((k, "again" if k == key else v) for k, v in main.returns)
                made = changed_main(made, name, lines=lines, returns=returns)
            yield f"{alone[0][text]} and {alone[1][text]} are summed, then {op}", made


def twice(programs: Files) -> Bugs:
    """What one stage returns, the last that it can be handed to returns too."""
    for kind, far in (("F", 1), ("B", -1)):
        work = {int(name[5:-2]): name for name in programs if name.endswith(f".{kind}")}
        for stage, name in work.items():
            for key, value in programs[name].main.returns:
                if key.kind in ("sent", "saved") or stage + far not in work:
                    continue
                made, last = programs, stage
                given = Value(value, programs[name].main.values()[value].type, Binding("received", value))
                while last + far in work:
                    last += far
                    giver, taker = made[work[last - far]].main, made[work[last]].main
                    made = changed_main(
                        made, work[last - far], returns=(*giver.returns, (Binding("sent", value), value))
                    )
                    made = changed_main(made, work[last], parameters=(*taker.parameters, given))
                end = made[work[last]].main
                if key not in dict(end.returns):
                    returns = (*end.returns, (key, value))
                    yield f"{work[last]} returns {key} too", changed_main(made, work[last], returns=returns)


SUMS: Mapping[str, Callable[[Files], Bugs]] = {bug.__name__: bug for bug in (before, mixed, twice)}
