"""Planted bugs of the sums among a pipeline's roles, and of the values that two of its stages return."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from parc.compiler.program.binding import SCALE, Binding
from parc.compiler.program.program import Line, Ref, Value

from .planted_sites import Mutants, Programs, sites, through, with_argument, with_function, with_main
from .planted_stages import AMONG

ROLES = ("pp0.REDUCE", "pp1.REDUCE")


def before(programs: Programs) -> Mutants:
    """Let one role scale or round its part of a gradient before roles sum it, or count it in the norm."""
    scale = next(v for p in programs.values() for v in p.main.parameters if v.binding == SCALE)
    for name in ROLES:
        main = programs[name].main
        given = main.parameters if any(v.binding == SCALE for v in main.parameters) else (*main.parameters, scale)
        own = next(v.name for v in given if v.binding == SCALE)
        summed: dict[str, str] = {}
        for site in sites(programs, AMONG, name):
            operand, type_ = site.source.name, site.operand
            if type_.shape:
                summed[site.result.name] = operand
                last = with_argument(site.line, 0, Ref("again"))
                again = Line((Value("again", type_),), "aten.mul.Tensor", (Ref(operand), Ref(own)))
                scaled = with_main(site.replaced(again, last), name, parameters=given)
                yield f"{name} scales {operand} again", scaled
                steps = [("aten._to_copy.default", (), dtype) for dtype in (torch.bfloat16, type_.dtype)]
                yield f"{name} rounds {operand}", with_function(programs, name, through(main, operand, steps))
        for site in sites(programs, "parc.square_sum.default", name):
            if site.source.name in summed:
                early = with_argument(site.line, 0, Ref(summed[site.source.name]))
                yield f"{name} counts {site.source.name} before its sum", site.replaced(early)


def mixed(programs: Programs) -> Mutants:
    """Sum gradients of different parameters, and pass the sum on as it is, or summed again."""
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
                made = with_main(made, name, lines=lines, returns=returns)
            yield f"{alone[0][text]} and {alone[1][text]} are summed, then {op}", made


def twice(programs: Programs) -> Mutants:
    """Let the last stage that a returned value can reach return it too, beside the stage that made it."""
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
                    made = with_main(made, work[last - far], returns=(*giver.returns, (Binding("sent", value), value)))
                    made = with_main(made, work[last], parameters=(*taker.parameters, given))
                end = made[work[last]].main
                if key not in dict(end.returns):
                    returns = (*end.returns, (key, value))
                    yield f"{work[last]} returns {key} too", with_main(made, work[last], returns=returns)


SUMS: Mapping[str, Callable[[Programs], Mutants]] = {bug.__name__: bug for bug in (before, mixed, twice)}
