"""Planted bugs of the loss scale: gradients that are not divided by it, or twice; ranks that may not agree on a step
that is skipped; and state that is not that of the next step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import torch

from parc.compiler.layout.placement import Placement
from parc.compiler.program.actions import AVERAGING, BACKWARD, REDUCE, RESCALE, SCALING
from parc.compiler.program.binding import SCALE, UNSCALE, Binding
from parc.compiler.program.program import Line, Ref
from parc.compiler.program.step_values import LOSS_SCALE
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, Site, sites, with_argument, with_lines, with_main


def _named(build: GoodBuild, action: str, binding: Binding) -> str:
    """Return the name of a program's parameter, "" if it has none of the binding."""
    main = build.case.programs[action].main if action in build.case.programs else None
    found = [value.name for value in main.parameters if value.binding == binding] if main is not None else []
    return next(iter(found), "")


def _again(site: Site, number: str) -> Line:
    return Line((replace(site.result, name="again"),), "aten.mul.Tensor", (Ref(site.result.name), Ref(number)))


def unscaled(build: GoodBuild) -> Iterator[Mutant]:
    """Forget to divide a gradient, or the loss, by the loss scale, or do it twice."""
    programs = build.case.programs
    if not (unscale := _named(build, REDUCE, UNSCALE)):
        return
    for site in sites(programs, lambda line: unscale in line.uses, AVERAGING, REDUCE):
        yield Mutant("unscale forgotten", site.named("leave out"), site.replaced(read=site.source.name))
        twice = site.replaced(site.line, _again(site, unscale), read="again")
        yield Mutant("unscale twice", site.named("repeat"), twice)
    returns = dict(programs[SCALING].main.returns)
    loss_scale = _named(build, SCALING, LOSS_SCALE)
    for what, changed in {
        "returns the loss scale for one over it": {**returns, UNSCALE: loss_scale},
        "returns one over the loss scale for the scale": {**returns, SCALE: returns[UNSCALE]},
        "exchanges both": {SCALE: returns[UNSCALE], UNSCALE: returns[SCALE]},
    }.items():
        yield Mutant("unscale forgotten", f"SCALE {what}", with_main(programs, SCALING, returns=tuple(changed.items())))
    for site in sites(programs, "aten.mul.Tensor", SCALING):
        yield Mutant("unscale twice", site.named("leave out"), site.replaced(read=site.source.name))
        twice = site.replaced(site.line, _again(site, loss_scale), read="again")
        yield Mutant("unscale forgotten", site.named("repeat"), twice)
    scale, main = _named(build, BACKWARD, SCALE), programs[BACKWARD].main
    for at, line in enumerate(main.lines):
        if scale in line.uses:
            value = next(value for value in main.parameters if value.name == scale)
            square = Line((replace(value, name="square", binding=None),), "aten.mul.Tensor", (Ref(scale), Ref(scale)))
            args = tuple(Ref("square") if item == Ref(scale) else item for item in line.args)
            lines = (*main.lines[:at], square, replace(line, args=args), *main.lines[at + 1 :])
            yield Mutant("unscale forgotten", "B scales twice", with_main(programs, BACKWARD, lines=lines))


def disagreed(build: GoodBuild) -> Iterator[Mutant]:
    """Decide on a skipped step by numbers that may differ from rank to rank, too early, twice, or never."""
    kind, programs = "skip not agreed", build.case.programs
    if RESCALE not in programs:
        return
    mesh, main = programs[RESCALE].mesh, programs[RESCALE].main
    for at, value in enumerate(main.parameters):
        for axis in mesh.names:
            partial = replace(value, type=replace(value.type, placement=Placement.of(mesh, {axis: "P"})))
            parameters = (*main.parameters[:at], partial, *main.parameters[at + 1 :])
            changed = with_main(programs, RESCALE, parameters=parameters)
            yield Mutant(kind, f"RESCALE reads {value.binding} partial over {axis}", changed)
    for binding in (Binding("loss"), Binding("gradient", "norm"), Binding("state", "norm")):
        parameters = (replace(main.parameters[0], binding=binding), *main.parameters[1:])
        yield Mutant(kind, f"RESCALE reads {binding}", with_main(programs, RESCALE, parameters=parameters))
    actions = list(build.case.actions)
    (rescale,) = (action for action in actions if action.kind == RESCALE)
    rest = [action for action in actions if action != rescale]
    reduce = [action.kind for action in rest].index(REDUCE)
    ends = {"before the norm": reduce, "first": 0, "after the update": len(rest)}
    for when, at in ends.items():
        yield Mutant(kind, f"RESCALE {when}", programs, [*rest[:at], rescale, *rest[at:]])
    yield Mutant(kind, "no RESCALE", programs, rest)
    yield Mutant(kind, "RESCALE twice", programs, [*actions, rescale])
    yield Mutant(kind, "no RESCALE at all", {k: p for k, p in programs.items() if k != RESCALE}, rest)


def misstated(build: GoodBuild) -> Iterator[Mutant]:
    """Return another number for a number of the state, or make it otherwise."""
    kind, programs = "state returned wrong", build.case.programs
    if RESCALE not in programs:
        return
    main = programs[RESCALE].main
    (line,) = main.lines
    keys, names = zip(*main.returns, strict=True)
    before = {value.binding: value.name for value in main.parameters}
    choices = {f"as {order}": order for order in permutations(names) if order != names}
    choices |= {f"{key} as it was": tuple(before[key] if key == other else name for other, name in main.returns)
                for key in keys}  # fmt: skip
    for what, order in choices.items():
        returns = tuple(zip(keys, order, strict=True))
        yield Mutant(kind, f"RESCALE returns {what}", with_main(programs, RESCALE, returns=returns))
    for at, (key, _) in enumerate(main.returns):
        returns = (*main.returns[:at], *main.returns[at + 1 :])
        yield Mutant(kind, f"RESCALE leaves out {key}", with_main(programs, RESCALE, returns=returns))
    for order in permutations(line.args[:4]):
        if order != line.args[:4]:
            changed = replace(line, args=(*order, *line.args[4:]))
            yield Mutant(kind, f"RESCALE of {order}", with_lines(programs, RESCALE, {0: changed}))
    for at, number in ((4, 2.5), (4, 1.0), (5, 1.0), (5, 0.25), (6, 1999), (6, 1)):
        changed = with_argument(line, at, number)
        yield Mutant(kind, f"RESCALE with {number} at {at}", with_lines(programs, RESCALE, {0: changed}))
    for at, value in enumerate(main.parameters):
        wide = replace(value, type=replace(value.type, dtype=torch.float64))
        parameters = (*main.parameters[:at], wide, *main.parameters[at + 1 :])
        yield Mutant(kind, f"{value.binding} in float64", with_main(programs, RESCALE, parameters=parameters))
    scaling = programs[SCALING].main
    parameters = tuple(replace(value, binding=Binding("state", "good_steps")) if value.binding == LOSS_SCALE else value
                       for value in scaling.parameters)  # fmt: skip
    yield Mutant(kind, "SCALE reads good_steps", with_main(programs, SCALING, parameters=parameters))


SCALES = (unscaled, disagreed, misstated)
