"""Planted bugs that no generic mutator makes: in several places at once, or with types that are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from parc.compiler.layout.collectives import COLLECTIVES, WAIT
from parc.compiler.ops.rules.experts import EXPERTS_RULES
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Line, Ref, Value
from tests.planted_builds import GoodBuild
from tests.planted_edits import Programs, stacked, with_argument, with_function, with_main
from tests.planted_mutators import Change, Changes, Mutant, Row, Site, derived, rows, sites

_ROUND = "parc.round_int8"


def unreduced(programs: Programs, gradient: Binding) -> Programs:
    """Run REDUCE without one gradient, its sum and its part of the norm."""
    main = programs["REDUCE"].main
    gone = {value.name for value in main.parameters if value.binding == gradient}
    rest = []
    for line in main.lines:
        if line.op == "aten.stack.default" and gone & set(line.uses):
            items = [item for item in line.args[0] if item.name not in gone]
            rest.append(stacked(line, items))
        elif gone & set(line.uses):
            gone.add(line.made[0].name)
        else:
            rest.append(line)
    parameters = tuple(value for value in main.parameters if value.binding != gradient)
    returns = tuple(pair for pair in main.returns if pair[0] != gradient)
    return with_main(programs, "REDUCE", parameters=parameters, lines=tuple(rest), returns=returns)


def _unreturned(row: Row) -> Programs:
    return unreduced(row.put(), row.key)


def _gradients_left_out(programs: Programs) -> Iterator[tuple[str, Change]]:
    for row in rows(programs) if "REDUCE" in programs else ():
        if row.name == "B" and row.field == "returns" and row.key.kind == "gradient":
            yield "leave out a gradient", (str(row.key), partial(_unreturned, row))


def _next_part(site: Site) -> Changes:
    """Give every rank the part of the next one, with types that are right; or repeat a rank's own part."""
    line, mesh = site.line, site.programs[site.action].mesh
    axis, dim, *_ = line.args[1:]
    size = mesh.size(axis) if line.op != "parc.all_reduce" and axis in mesh.names else 1
    if line.op == "parc.reduce_scatter" and size > 1 and len(site.operand.shape) == 3:
        whole = COLLECTIVES["parc.all_reduce"].result(site.operand, mesh, (axis,))
        summed, turned = Value("summed", whole), Value("turned", whole)
        changed = (
            replace(line, results=(summed,), op="parc.all_reduce", args=(site.source, axis)),
            Line((turned,), "aten.roll.default", (Ref("summed"), [whole.shape[dim] // size], [dim]), (), line.origin),
            replace(line, op="parc.shard", args=(Ref("turned"), *line.args[1:])),
        )
        yield "the next rank's part for", lambda: site.replaced(*changed)
    if line.op == "parc.all_gather" and size > 1:
        own = replace(line, op="aten.cat.default", args=([site.source] * size, dim), kwargs=())
        yield from derived("repeat the own part for", lambda: site.replaced(own), site.programs)


def _of_other_experts(site: Site) -> Changes:
    """Let one reader of what is chosen see other experts."""
    known = site.function.values()
    for place, item in enumerate(site.line.args):
        if isinstance(item, Ref) and known[item.name].type.dtype is torch.bool:
            other = replace(known[item.name], name="other_experts", binding=None)
            flipped = Line((other,), "aten.flip.default", (item, [0]), (), site.line.origin)
            reader = with_argument(site.line, place, Ref(other.name))
            yield f"flip argument {place} of", partial(site.replaced, flipped, reader)


def _miscounted(programs: Programs) -> Iterator[tuple[str, Change]]:
    """Count one expert of a token too many or too few everywhere."""
    if any(sites(programs, lambda line: line.op in EXPERTS_RULES)):
        for more in (-1, 1):
            everywhere = {name: _recounted(programs, name, more) for name in programs}
            yield "be off by one in a count", (f"{more} everywhere", partial(dict, everywhere))


def _recounted(programs: Programs, action: str, more: int) -> Any:
    def counted(value: Value | None) -> Any:
        packed = value.type.packed if value is not None else None
        if value is None or packed is None:
            return value
        return replace(value, type=replace(value.type, packed=(packed[0] + more, packed[1])))

    functions = []
    for function in programs[action].functions:
        recounted = []
        for line in function.lines:
            counts = line.op in EXPERTS_RULES and isinstance(line.args[-1], int)
            changed = with_argument(line, len(line.args) - 1, line.args[-1] + more) if counts else line
            recounted.append(replace(changed, results=tuple(map(counted, line.results))))
        parameters = tuple(map(counted, function.parameters))
        functions.append(replace(function, parameters=parameters, lines=tuple(recounted)))
    return replace(programs[action], functions=tuple(functions))


def _summed_too(site: Site) -> Changes:
    """Sum a gradient of experts over axes in the backward already."""
    mesh = site.programs[site.action].mesh
    for axes in (*mesh.names, ",".join(mesh.names)):
        placement = site.result.type.placement.replace(dict.fromkeys(axes.split(","), "I"))
        for type_ in (site.result.type, replace(site.result.type, placement=placement)):
            make = partial(site.then, "parc.all_reduce", Ref(site.result.name), axes, type_=type_)
            yield from derived(f"over {axes} in backward as {type_.text(mesh)}", make, site.programs)


def _rounded(site: Site) -> Changes:
    """Round a summed gradient of which nothing is kept, or what ranks of a node sum."""
    line, function, to = site.line, site.function, "aten._to_copy.default"
    summed = any(name == site.result.name for key, name in function.returns if key.kind == "gradient")
    if summed and line.kwargs == () and site.result.type.shape:
        yield "round", lambda: site.then(_ROUND, Ref(site.result.name), "", 0, 1)
    if line.op != "parc.reduce_scatter" or line.args[1] != "dp_1":
        return
    wait = next(one for one in function.lines if one.op == WAIT and one.uses == (site.result.name,))
    source, result = function.values()[line.uses[0]], wait.made[0]
    sent = Value(f"{result.name}_sent", replace(source.type, dtype=torch.float16))
    half = Value(f"{result.name}_half", replace(result.type, dtype=torch.float16))
    rounded = Value(f"{result.name}_rounded", source.type)
    narrow = (
        Line((sent,), to, (Ref(source.name),), (("dtype", torch.float16),), line.origin),
        replace(line, results=(half,), args=(Ref(sent.name), *line.args[1:]), kwargs=()),
        Line((result,), to, (Ref(half.name),), (("dtype", result.type.dtype),), line.origin),
    )
    packed = (
        Line((rounded,), _ROUND, line.args, (), line.origin),
        replace(line, op=f"{line.op}_int8", results=(result,), args=(Ref(rounded.name), *line.args[1:]), kwargs=()),
    )
    for what, changed in (("float16", narrow), ("int8", packed)):
        rest = [one for one in function.lines[site.index + 1 :] if one is not wait]
        body = replace(function, lines=(*function.lines[: site.index], *changed, *rest))
        yield f"{what} in a node for", partial(with_function, site.programs, site.action, body)


_LINES = (
    ("take another rank's part", lambda line: line.op in ("parc.reduce_scatter", "parc.all_gather"), _next_part),
    ("send a token to the wrong expert", lambda line: line.op.startswith("parc.expert"), _of_other_experts),
    ("sum experts' gradients too early", lambda line: line.op == "parc.expert_outer.default", _summed_too),
)


def specials(build: GoodBuild) -> Iterator[Mutant]:
    """Yield these bugs of a build of one role."""
    for kind, wanted, change in _LINES:
        for site in sites(build.programs, wanted):
            for what, make in change(site):
                yield Mutant(kind, f"{site.action} {site.line.op}", f"{what} {site.result.name}", make)
    for find in (_gradients_left_out, _miscounted):
        for kind, (what, make) in find(build.programs):
            yield Mutant(kind, kind, what, make)


def roundings(build: GoodBuild) -> Iterator[Mutant]:
    """Yield roundings of sums of gradients that nothing asks for."""
    for site in sites(build.programs, lambda line: bool(line.made), "B", "REDUCE"):
        if site.function in build.programs[site.action].mains:
            for what, make in _rounded(site):
                yield Mutant("round what nothing asks for", f"{site.action} {what}", f"{what} {site.result.name}", make)
