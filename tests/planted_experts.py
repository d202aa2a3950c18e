"""Planted bugs of experts: tokens, counts, combine weights, ranks and gradients that are not those of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.packed_rows import EXCHANGE
from parc.compiler.layout.placement import Split, TensorType, along
from parc.compiler.ops.rules.experts import EXPERTS_RULES
from parc.compiler.program.program import Function, Line, Ref, Value
from tests.planted_builds import AUXILIARY_BUILD, EXPERT_BUILDS, GoodBuild, good_build, judge
from tests.planted_conversions import both, collectives, swapped_in, with_binding
from tests.planted_rows import Row
from tests.planted_sites import Mutant, Programs, Site, sites, through, with_argument, with_function
from tests.planted_types import carried

_EXPERTS, _TOP = 8, 2  # of the models in these builds


def _chosen(value: Value) -> bool:
    """Return whether a value says which experts are chosen for which tokens."""
    return value.type.dtype is torch.bool and len(value.type.shape) == 2 and value.type.shape[0] == _EXPERTS


def _packed(function: Function, name: str) -> bool:
    return function.values()[name].type.packed is not None


_OTHERWISE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("aten.flip.default", ([0],)), ("aten.logical_not.default", ()),
    ("aten.roll.default", ([1], [0])), ("aten.roll.default", ([1], [1])),
)  # fmt: skip


def wrong_experts(build: GoodBuild) -> Iterator[Mutant]:
    """Choose other experts: in the router, for all readers of what is chosen, or for one of them."""
    kind, programs = "send a token to the wrong expert", build.case.programs
    for action in ("F", "B"):
        for function in programs[action].functions:
            for value in function.values().values():
                for op, args in _OTHERWISE if _chosen(value) else ():
                    changed = through(function, value.name, [(op, args, torch.bool)])
                    yield Mutant(kind, f"{action}: {value.name} by {op}", with_function(programs, action, changed))
    for site in sites(programs, lambda line: line.op.startswith("parc."), "F", "B"):
        values = site.function.values()
        for place, item in enumerate(site.line.args):
            if isinstance(item, Ref) and _chosen(values[item.name]):
                other = replace(values[item.name], name="other_experts", binding=None)
                made = Line((other,), "aten.flip.default", (Ref(item.name), [0]), (), site.line.origin)
                reader = with_argument(site.line, place, Ref(other.name))
                yield Mutant(kind, site.named(f"flip argument {place} of"), site.replaced(made, reader))
    for site in sites(programs, "aten.topk.default", "F"):
        least = replace(site.line, args=(*site.line.args[:2], -1, False))
        yield Mutant(kind, "the least likely", site.replaced(least))
        (_, index), function = site.line.results, site.function
        assert index is not None
        next_one = [("aten.add.Tensor", (1,), torch.int64), ("aten.remainder.Scalar", (_EXPERTS,), torch.int64)]
        for what, steps in (("next to", next_one), ("exchanged", [("aten.flip.default", ([1],), torch.int64)])):
            yield Mutant(
                kind, f"{what} {index.name}", with_function(programs, "F", through(function, index.name, steps))
            )


def miscounted(build: GoodBuild) -> Iterator[Mutant]:
    """Count one expert of a token too many or too few: in one line, with its type, or everywhere."""
    kind, programs = "be off by one in a count", build.case.programs
    for by in (-1, 1):
        for site in sites(programs, lambda line: line.op in EXPERTS_RULES and isinstance(line.args[-1], int)):
            line = with_argument(site.line, len(site.line.args) - 1, _TOP + by)
            yield Mutant(kind, site.named(f"{_TOP + by} for"), site.replaced(line))
            typed = replace(line, results=tuple(value and _counted(value, by) for value in line.results))
            yield Mutant(kind, site.named(f"{_TOP + by} in the type too for"), site.replaced(typed))
        yield Mutant(kind, f"{_TOP + by} everywhere", {name: _recounted(programs, name, by) for name in programs})
        for site in sites(programs, "aten.topk.default", "F"):
            yield Mutant(kind, f"the best {_TOP + by}", site.replaced(with_argument(site.line, 1, _TOP + by)))


def _counted(value: Value, by: int) -> Value:
    packed = value.type.packed
    return value if packed is None else replace(value, type=replace(value.type, packed=(packed[0] + by, packed[1])))


def _recounted(programs: Programs, action: str, by: int) -> Any:
    functions = []
    for function in programs[action].functions:
        lines = []
        for line in function.lines:
            counts = line.op in EXPERTS_RULES and isinstance(line.args[-1], int)
            changed = with_argument(line, len(line.args) - 1, line.args[-1] + by) if counts else line
            lines.append(replace(changed, results=tuple(value and _counted(value, by) for value in line.results)))
        parameters = tuple(_counted(value, by) for value in function.parameters)
        functions.append(replace(function, parameters=parameters, lines=tuple(lines)))
    return replace(programs[action], functions=tuple(functions))


def wrong_weights(build: GoodBuild) -> Iterator[Mutant]:
    """Lose the weights by which experts' results are combined, or apply them twice; in backward too."""
    kind, programs = "lose or repeat combine weights", build.case.programs
    for site in sites(programs, "aten.mul.Tensor", "F", "B"):
        rows = [name for name in site.line.uses if _packed(site.function, name)]
        widths = {name: site.function.values()[name].type.shape[1] for name in rows}
        weights = next((name for name in rows if widths[name] == 1), None)
        if weights is None or max(widths.values()) == 1:
            continue
        rest = next(name for name in rows if name != weights)
        yield Mutant(kind, site.named("leave out"), site.replaced(read=rest))
        again = replace(site.result, name="weighted_again")
        twice = Line((again,), site.line.op, (Ref(site.result.name), Ref(weights)), (), site.line.origin)
        yield Mutant(kind, site.named("twice"), site.replaced(site.line, twice, read=again.name))
    for site in sites(programs, lambda line: line.op in ("parc.pick.default", "parc.unpick.default"), "F", "B"):
        for factor in (0.0, 2.0):
            changed = through(site.function, site.result.name, [("aten.mul.Scalar", (factor,), torch.float32)])
            yield Mutant(kind, site.named(f"times {factor}"), with_function(programs, site.action, changed))


def of_other_ranks(build: GoodBuild) -> Iterator[Mutant]:
    """Compute with the experts of another rank: tokens go one rank further, or over another axis, or a rank takes other
    experts."""
    kind, programs, mesh = "compute with experts of another rank", build.case.programs, build.case.mesh
    half = _EXPERTS // mesh.size("ep")
    for function in programs["F"].functions:
        for line in function.lines:
            for value in line.made:
                if _chosen(value) and line.op not in COLLECTIVES:
                    further = through(function, value.name, [("aten.roll.default", ([half], [0]), torch.bool)])
                    yield Mutant(kind, f"{value.name}, a rank further", with_function(programs, "F", further))
    others = [axis for axis in mesh.names if axis not in mesh.parts("ep")]
    for site in collectives(programs):
        chosen = any(_chosen(site.function.values()[name]) for name in site.line.uses)
        for axes in (*others, ",".join(mesh.names)) if chosen else ():
            if axes == site.line.args[1]:
                continue
            yield from swapped_in(kind, "put", site, site.line.op, (axes, *site.line.args[2:]))
    for value in programs["F"].main.parameters:
        if _of_experts(value.type, mesh):
            placement = value.type.placement.replace(along(mesh.parts("ep"), Split(0, 2), mesh))
            moved = replace(value.type, placement=placement)
            if not placement.nests(moved.shape, mesh):  # a rank has one expert or two
                continue
            here = with_binding(programs, ("F",), value.binding, moved)
            yield from both(kind, f"F takes {value.binding} two by two", here, programs)
            everywhere = carried(with_binding(programs, tuple(programs), value.binding, moved), programs)
            yield Mutant(kind, f"all take {value.binding} two by two", everywhere)


def _of_experts(type_: TensorType, mesh: Mesh) -> bool:
    """Return whether a type is that of weights of experts, or their gradients."""
    split = type_.placement.as_one(mesh.parts("ep"), mesh) == Split(0)
    return len(type_.shape) == 3 and type_.shape[0] == _EXPERTS and split


def wrong_replicas(build: GoodBuild) -> Iterator[Mutant]:
    """Sum the gradients of experts over ranks that hold other experts or the same sum, or not over all replicas."""
    kind, programs, mesh = "sum experts' gradients over wrong ranks", build.case.programs, build.case.mesh
    for site in collectives(programs):
        if site.action not in ("B", "REDUCE") or site.operand.packed is not None or not _of_experts(site.operand, mesh):
            continue
        yield from both(kind, site.named("leave out"), site.replaced(read=site.source.name), programs)
        for axes in (*mesh.names, ",".join(mesh.names)):
            if axes != site.line.args[1]:
                yield from swapped_in(kind, "put", site, site.line.op, (axes, *site.line.args[2:]))
    for site in sites(programs, "parc.expert_outer.default", "B"):
        for axes in (*mesh.names, ",".join(mesh.names)):
            yield from _summed_too(site, axes, kind)


def _summed_too(site: Site, axes: str, kind: str) -> Iterator[Mutant]:
    """Yield the site's result summed over axes in the backward already."""
    placement = site.result.type.placement.replace(dict.fromkeys(axes.split(","), "I"))
    for type_ in (site.result.type, replace(site.result.type, placement=placement)):
        more = Value("summed_too", type_)
        line = Line((more,), "parc.all_reduce", (Ref(site.result.name), axes), (), site.line.origin)
        changed = site.replaced(site.line, line, read=more.name)
        what = site.named(f"over {axes} in backward, as {type_.text(site.programs['B'].mesh)},")
        yield from both(kind, what, changed, site.programs)


def mismatched(build: GoodBuild) -> Iterator[Mutant]:
    """Cut rows otherwise than what says which are there, before an exchange, after it, or in an operator between."""
    kind, programs = "split rows otherwise than their counts", build.case.programs
    for site in sites(programs, EXCHANGE):
        source, *options = site.line.args
        *cut, before, after = options
        for what, pair in (("turn", (after, before)), ("once", (before, before)), ("again", (after, after))):
            yield Mutant(
                kind, site.named(f"{what} the counts of"), site.replaced(replace(site.line, args=(source, *cut, *pair)))
            )
        for outers in ((cut[4], cut[2]), *((a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8))):
            if outers != (cut[2], cut[4]):
                args = (cut[0], cut[1], outers[0], cut[3], outers[1], before, after)
                yield from swapped_in(kind, "put", site, EXCHANGE, args)
        yield from swapped_in(kind, "put", site, "parc.all_to_all", cut)
    for site in sites(programs, lambda line: line.op in EXPERTS_RULES):
        values = site.function.values()
        known = [*site.function.parameters, *(v for line in site.function.lines[: site.index] for v in line.made)]
        for place, item in enumerate(site.line.args):
            for other in known if isinstance(item, Ref) and _chosen(values[item.name]) else ():
                if _chosen(other) and other.name != item.name:
                    changed = site.replaced(with_argument(site.line, place, Ref(other.name)))
                    yield from both(kind, site.named(f"{other.name} for {item.name} in"), changed, programs)


def local_auxiliary(build: GoodBuild) -> Iterator[Mutant]:
    """Make the loss that balances experts from each rank's own tokens, or those of some ranks; or lose its weight."""
    kind, programs = "keep an auxiliary loss local", build.case.programs
    for site in collectives(programs):
        if site.action != "F" or site.line.origin.module:
            continue
        yield from both(kind, site.named("leave out"), site.replaced(read=site.source.name), programs)
        alias = replace(site.line, op="aten.alias.default", args=(site.source,))
        yield Mutant(kind, site.named("pass through"), site.replaced(alias))
        for axes in build.case.mesh.names:
            yield from swapped_in(kind, "put", site, site.line.op, (axes, *site.line.args[2:]))
    for site in sites(programs, lambda line: line.op.startswith("aten.mul.") and 0.01 in line.args[1:], "F"):
        for factor in (0.02, 1.0, 0.0):
            yield Mutant(kind, site.named(f"{factor} for"), site.replaced(with_argument(site.line, 1, factor)))


CLASSES = (wrong_experts, miscounted, wrong_weights, of_other_ranks, wrong_replicas, mismatched)


def expert_rows(share: int = 1) -> dict[str, Row]:
    """Judge the mutants of builds with experts over ranks, or one of ``share`` in each class."""
    rows: dict[str, Row] = {}
    for name, classes in {**dict.fromkeys(EXPERT_BUILDS, CLASSES), AUXILIARY_BUILD: (local_auxiliary,)}.items():
        build = good_build(name)
        for make in classes:
            for at, mutant in enumerate(make(build)):
                if at % share == 0:
                    verdict = judge(build, mutant.programs)
                    what = f"{name}: {mutant.what}"
                    rows.setdefault(mutant.kind, Row()).note(what, verdict.check, verdict.by_types)
    return rows
