"""Structures: a plan compiled for a short model on a few ranks, whose programs tell the time and the memory of whole
models on many meshes.

Of a pipeline it has four stages: the first, two in the middle with two and three blocks, and the last. What a block
adds is the difference of those in the middle; what the first and the last stage have beside blocks follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

from parc.compiler.analysis.communication import placed_messages
from parc.compiler.analysis.liveness import Liveness, local_bytes
from parc.compiler.build.build import Build
from parc.compiler.clock.programs import InFlight
from parc.compiler.clock.sweeps import SweptLinks, SweptProgram
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.sweep import SizeSweep, greatest
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import (
    ACTIONS,
    BACKWARD,
    FORWARD,
    Action,
    one_step,
    phases_of,
)
from parc.compiler.program.binding import PARAMETERS, Binding
from parc.compiler.program.program import Program
from parc.compiler.program.roles import Role
from parc.report import action_peaks_of, states_of
from parc.searching.played import PlayedSchedule, RankMoments, moments_of, sums_twice
from parc.step_time import update_seconds

STAGES, MIDDLE = 4, (2, 3)
"""The stages of a structure with a pipeline, and the blocks of those in the middle."""
SHORT = 2, 3
"""The blocks of the two models of a structure without a pipeline."""


class PerLayer(NamedTuple):
    """A quantity of a stage or a role: what it is without blocks, what a block adds, and what the first and the last
    stage have more."""

    base: Any
    layer: Any
    first: Any = 0.0
    last: Any = 0.0

    @classmethod
    def of(cls, values: Sequence[Any]) -> PerLayer:
        """Return it from its values for the four stages of a structure, or for two whole models."""
        if len(values) == len(SHORT):
            layer = (values[1] - values[0]) / (SHORT[1] - SHORT[0])
            return cls(values[0] - SHORT[0] * layer, layer)
        layer = (values[2] - values[1]) / (MIDDLE[1] - MIDDLE[0])
        base = values[1] - MIDDLE[0] * layer
        return cls(base, layer, values[0] - base - layer, values[3] - base - layer)

    def at(self, layers: Any, first: int, last: int) -> Any:
        """Return it for a stage, or a role, of so many blocks."""
        return self.base + layers * self.layer + first * self.first + last * self.last


@dataclass
class SweptStep:
    """The quantities of a structure on the meshes of a sweep, by name. Those of work are of one action of a stage;
    ``before`` and ``after`` are a role's seconds before and behind all work, ``update`` a part of the latter."""

    work: Mapping[str, PerLayer]
    first: PerLayer
    """The seconds that the first forward waits for weights that are on their way."""
    last: PerLayer
    """The seconds that the last backward takes longer than the others."""
    before: PerLayer
    after: PerLayer
    update: PerLayer
    send: Any
    """The seconds of a message between stages."""
    held: PerLayer
    """The bytes of a role's training state beside sums of gradients."""
    unsharded: PerLayer
    """The bytes of unsharded weights among these: a role that begins forwards of the next step has them twice."""
    gradients: PerLayer
    """The bytes of a stage's sums of gradients. A role that begins backwards of the next step has them twice."""
    saved: PerLayer
    """The bytes that a stage saves for the backward of a microbatch."""
    deferred: PerLayer
    """The bytes that the first phase of a backward hands to the second."""
    peaks: Mapping[str, PerLayer]
    """The most bytes that a stage's work of each kind holds beside state, what it saved itself included; under
    ``BETWEEN`` those of a role's actions before and behind all work."""
    exposed: PerLayer
    """The seconds in which a forward and a backward wait for messages."""
    short: Mapping[str, Any]
    """For each axis, the places in which some dim does not divide by its ranks."""
    uneven: Mapping[str, Any]
    """For each axis, the places in which the batch does not."""


class ShortBuild(NamedTuple):
    """A plan compiled for a short model, and the build of it."""

    plan: Plan
    build: Build


@dataclass
class Structure:
    """A plan compiled for a short model, or for two where there is no pipeline. ``samples`` is the batch of a
    microbatch in its programs."""

    shorts: Sequence[ShortBuild]
    samples: int

    @property
    def staged(self) -> bool:
        """True where the structure has a pipeline."""
        return len(self.shorts) == 1

    @property
    def mesh(self) -> Mesh:
        """The mesh of its programs, with axes factored."""
        return self.shorts[0].build.mesh

    @property
    def padded(self) -> bool:
        """True where parameters are padded to multiples of the ranks."""
        return any(short.build.manifest["padding"] for short in self.shorts)

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """The groups of axes that messages travel over."""
        return sorted({
            short.build.mesh.spread(placed.message.axes)
            for short, role in self._roles() for _, placed in placed_messages(role)
        })  # fmt: skip

    def _roles(self) -> list[tuple[ShortBuild, Role]]:
        """Return the roles in the order of their stages, each with the plan and the build that it is from."""
        return [(short, role) for short in self.shorts for role in short.build.roles.values()]

    def swept(self, sweep: SizeSweep, links: SweptLinks) -> SweptStep:
        """Return the quantities of a step on the meshes of a sweep."""
        parts = [self._part(short, role, sweep, links) for short, role in self._roles()]
        _complete([part.work for part in parts])
        work = {kind: PerLayer.of([part.work[kind] for part in parts]) for kind in parts[0].work}
        both = next((part for part in parts if not isinstance(part.deferred, float)), None)
        for part in parts if both is not None else ():
            if isinstance(part.deferred, float):  # the first stage has no second phase in the structure
                assert both is not None
                part.deferred = part.saved * (both.deferred / both.saved)
        names = (one.name for one in fields(SweptStep) if one.type == PerLayer.__name__)
        per_layer = {name: PerLayer.of([getattr(part, name) for part in parts]) for name in names}
        return SweptStep(
            work=work,
            send=parts[0].send,
            peaks=self._peaks(parts, sweep),
            short=dict(sweep.short),
            uneven=dict(sweep.uneven),
            **per_layer,
        )

    def _part(self, short: ShortBuild, role: Role, sweep: SizeSweep, links: SweptLinks) -> _RoleParts:
        clocks = {key: SweptProgram(program, sweep, links) for key, program in role.programs.items()}
        swept = replace(role, programs={key: clock.program for key, clock in clocks.items()})
        stage = role.stages[0]
        parts = _RoleParts()
        arriving: Mapping[Binding, InFlight] = {}
        seen = False
        actions = one_step(role.actions)
        lasts = {action.kind: action for action in actions if action.works}
        for action in actions:
            key = action.program_in(role.programs)
            if action.works:
                seen = True
                if action.kind in parts.work:
                    continue
                clock = clocks[key]
                time = clock.run(clock.program.main)
                parts.work[action.kind] = time.seconds
                if action.kind in (FORWARD, BACKWARD, phases_of(BACKWARD)[0]):
                    parts.exposed = parts.exposed + time.spent.parts["exposed"]
                if action.kind == FORWARD:
                    late = clock.run(clock.program.main, _needed(arriving, clock.program))
                    parts.first = late.seconds - time.seconds
                continue
            if action.message is not None or key not in clocks:
                continue
            clock = clocks[key]
            if not seen:
                time = clock.run(clock.program.main)
                parts.before = parts.before + time.seconds
                arriving = {**arriving, **time.left}
        arriving = {}
        for kind, action in lasts.items():
            clock = clocks[action.program_in(role.programs)]
            if action.accumulates and clock.program.last is not None:
                time = clock.run(clock.program.last)
                parts.last = parts.last + time.seconds - parts.work[kind]
                arriving = {**arriving, **time.left}
        for action in actions:
            key = action.program_in(role.programs)
            if action.works or action.message is not None or ACTIONS[action.kind].place != "after" or key not in clocks:
                continue
            clock = clocks[key]
            time = clock.run(clock.program.main, _needed(arriving, clock.program))
            parts.after = parts.after + time.seconds
        parts.update = update_seconds(short.build, short.plan, swept, links.cluster)
        parts.after = parts.after + parts.update
        states = states_of(short.build, short.plan, swept)
        parts.held = sum((sum(sizes.values()) - sizes["gradients"] for sizes in states.values()), start=0.0)
        parts.unsharded = sum((sizes["weights"] for sizes in states.values()), start=0.0)
        parts.gradients = sum((sizes["gradients"] for sizes in states.values()), start=0.0)
        key = Action(stage, FORWARD).program_in(role.programs)
        forward = clocks[key].program
        parts.saved = _saved_bytes(role.programs[key], forward)
        key = Action(stage, phases_of(BACKWARD)[0]).program_in(role.programs)
        if key in role.programs:
            parts.deferred = _saved_bytes(role.programs[key], clocks[key].program)
        parts.made, parts.weights = _made_bytes(forward), _weight_bytes(forward, sweep)
        parts.send = self._send(forward, role, links)
        return parts

    def _send(self, forward: Program, role: Role, links: SweptLinks) -> Any:
        values = forward.main.values()
        size = sum(local_bytes(values[name].type, forward) for name in forward.main.returned("sent").values())
        return links.send_along(role.axis, size) if role.axis and not isinstance(size, int) else 0.0

    def _peaks(self, parts: Sequence[_RoleParts], sweep: SizeSweep) -> dict[str, PerLayer]:
        """Return the peaks by kind of work. They are estimated where activations are largest beside weights, and where
        they are smallest; between these places they are taken as a sum of parts in proportion to what a forward makes
        and to its weights."""
        peaks: list[dict[str, Any]] = []
        for (short, role), part in zip(self._roles(), parts, strict=True):
            made, weights = np.broadcast_arrays(part.made, part.weights)
            share = made / np.maximum(weights, 1.0)
            places = sorted({int(share.argmin()), int(share.argmax())})
            both = np.array([[made[at], weights[at]] for at in places])
            of_places = [_peaks_at(short, role, sweep.one(at)) for at in places]
            inverse = np.linalg.pinv(both / both.max(axis=0)) / both.max(axis=0)[:, None]
            peaks.append({})
            for kind in of_places[0]:
                at_places = np.array([peak[kind] for peak in of_places])
                factors = inverse @ at_places
                peaks[-1][kind] = np.maximum(made * factors[0] + weights * factors[1], at_places.min())
        phases = phases_of(BACKWARD)
        for of_role in peaks:
            if BACKWARD not in of_role:
                of_role[BACKWARD] = greatest(*(of_role[kind] for kind in phases))
            for kind in phases:
                of_role.setdefault(kind, of_role[BACKWARD])
        return {kind: PerLayer.of([of_role[kind] for of_role in peaks]) for kind in peaks[0]}


BETWEEN = ""
"""The kind of the moments of a step in which no work runs."""


def _peaks_at(short: ShortBuild, role: Role, place: SizeSweep) -> dict[str, float]:
    """Return the most bytes of a role's work of each kind on one mesh, beside state and what is held for other
    microbatches."""
    swept = replace(role, programs={key: replace(program, mesh=place) for key, program in role.programs.items()})
    states = states_of(short.build, short.plan, swept).values()
    gradients = sum(sizes["gradients"] for sizes in states)
    state = sum(sum(sizes.values()) + role.overlaps * sizes["weights"] for sizes in states)
    state += gradients * (sums_twice(role.actions) - 1)
    sizes = [0.0, 0.0, gradients]
    for at, kind in enumerate((FORWARD, phases_of(BACKWARD)[0])):
        key = Action(role.stages[0], kind).program_in(swept.programs)
        if key in swept.programs:
            sizes[at] = _saved_bytes(swept.programs[key], swept.programs[key])
    peaks = action_peaks_of(short.build, short.plan, swept)
    result: dict[str, float] = {}
    for action, held in moments_of(role.actions):
        others = sum(number * size for counts in held.values() for number, size in zip(counts, sizes, strict=True))
        kind = action.kind if action.works else BETWEEN
        result[kind] = max(result.get(kind, -inf), peaks.get(action, 0) - state - others)
    return result


@dataclass
class _RoleParts:
    """The quantities of one role of a structure."""

    work: dict[str, Any] = field(default_factory=dict)
    first: Any = 0.0
    last: Any = 0.0
    before: Any = 0.0
    after: Any = 0.0
    update: Any = 0.0
    held: Any = 0.0
    unsharded: Any = 0.0
    gradients: Any = 0.0
    saved: Any = 0.0
    deferred: Any = 0.0
    made: Any = 0.0
    weights: Any = 0.0
    send: Any = 0.0
    exposed: Any = 0.0


def _complete(works: Sequence[dict[str, Any]]) -> None:
    """Give every stage the times of whole backwards and of their phases, of which it may have only one: a whole
    backward takes what its phases do, and the first stage's phases are as long in proportion as those of the second."""
    phases = phases_of(BACKWARD)
    for work in works:
        if BACKWARD not in work and all(kind in work for kind in phases):
            work[BACKWARD] = sum(work[kind] for kind in phases)
    both = next((work for work in works if all(kind in work for kind in phases)), None)
    for work in works if both is not None else ():
        for kind in phases:
            assert both is not None
            work.setdefault(kind, work[BACKWARD] * (both[kind] / sum(both[phase] for phase in phases)))


def _needed(arriving: Mapping[Binding, InFlight], program: Program) -> dict[Binding, InFlight]:
    """Return the messages under way that a program's main function awaits."""
    bindings = {value.binding for value in program.main.parameters}
    return {key: message for key, message in arriving.items() if key in bindings}


def _saved_bytes(program: Program, swept: Program) -> Any:
    """Return the bytes that a program keeps for a later one of its microbatch, each storage once; on the meshes of the
    same program as it is ``swept``."""
    main = program.main
    root = Liveness(program).root(main)
    seen = {root[value.name] for value in main.parameters if value.binding is not None and value.name in root}
    values, total = main.values(), 0.0
    for binding, name in main.returns:
        if binding.home == "stage" and root.get(name, name) not in seen:
            seen.add(root.get(name, name))
            total = total + local_bytes(values[name].type, swept)
    return total


def _weight_bytes(program: Program, sweep: SizeSweep) -> Any:
    """Return the bytes of the weights that a forward computes with on the meshes of a sweep, gathered if they are
    stored in parts."""
    gathered = replace(sweep, sizes={**sweep.sizes, **dict.fromkeys(sweep.storing & sweep.sizes.keys(), 1.0)})
    weights, whole = program.main.bound(*PARAMETERS, "weight").values(), replace(program, mesh=gathered)
    return sum((local_bytes(value.type, whole) for value in weights), start=0.0)


def _made_bytes(program: Program) -> Any:
    """Return the bytes of all results of a forward's lines, those of each block once."""
    lines = (line for function in program.functions for line in function.lines if not line.calls_function)
    return sum((local_bytes(value.type, program) for line in lines for value in line.made), start=0.0)


# ---- a whole step


class LayoutTime(NamedTuple):
    """The seconds, the bubble of the longest rank, its waits, the update, and the bytes of the fullest rank: arrays."""

    seconds: Any
    bubble: Any
    exposed: Any
    update: Any
    memory: Any


def one_stage(step: SweptStep, layers: int, microbatches: int) -> LayoutTime:
    """Return the time and the memory of plans without a pipeline."""
    forward, backward = step.work[FORWARD].at(layers, True, True), step.work[BACKWARD].at(layers, True, True)
    edges = sum(part.at(layers, True, True) for part in (step.before, step.first, step.last, step.after))
    seconds = edges + microbatches * (forward + backward)
    between, while_forward, while_backward = (
        step.peaks[kind].at(layers, True, True) for kind in (BETWEEN, FORWARD, BACKWARD)
    )
    sums = step.gradients.at(layers, True, True)
    most = greatest(between + sums, while_forward + (microbatches > 1) * sums, while_backward + sums)
    memory = step.held.at(layers, True, True) + most
    exposed = microbatches * step.exposed.at(layers, True, True)
    return LayoutTime(seconds, 0.0 * seconds, exposed, step.update.at(layers, True, True), memory)


def pipeline(step: SweptStep, cuts: Sequence[Any], schedule: PlayedSchedule, microbatches: int) -> LayoutTime:
    """Return the time and the memory of plans with a pipeline: ``cuts`` are the blocks of each stage."""
    stages = len(cuts)

    def of_stage(part: PerLayer, stage: int) -> Any:
        return part.at(cuts[stage], stage == 0, stage == stages - 1)

    def of_rank(part: PerLayer, moments: RankMoments) -> Any:
        layers = sum(cuts[stage] for stage in moments.stages)
        return part.at(layers, 0 in moments.stages, stages - 1 in moments.stages)

    each = schedule.moments
    seconds = {(stage, kind): of_stage(part, stage) for stage in range(stages) for kind, part in step.work.items()}
    begun = [of_rank(step.before, rank) + of_stage(step.first, rank.stages[0]) for rank in each]
    after = [of_rank(step.last, rank) + of_rank(step.after, rank) for rank in each]
    ends = schedule.ends(seconds, step.send, begun)
    total = greatest(*(end + more for end, more in zip(ends, after, strict=True)))
    busy = greatest(*(
        start + end + sum(count * seconds[work] for work, count in works.items())
        for start, end, works in zip(begun, after, schedule.works, strict=True)
    ))  # fmt: skip
    peaks = {  # those of the first and the last stage are of one block, in which less is under way
        (stage, kind): greatest(of_stage(part, stage), part.at(cuts[stage], 0, 0))
        for stage in range(stages) for kind, part in step.peaks.items()
    }  # fmt: skip
    sizes = {
        stage: (of_stage(step.saved, stage), of_stage(step.deferred, stage), of_stage(step.gradients, stage))
        for stage in range(stages)
    }
    held = [
        of_rank(step.held, rank) + rank.ahead * of_rank(step.unsharded, rank)
        + rank.sums_twice * of_rank(step.gradients, rank)
        + greatest(of_rank(step.peaks[BETWEEN], rank) + of_rank(step.gradients, rank), rank.most(peaks, sizes))
        for rank in each
    ]  # fmt: skip
    exposed = (microbatches * sum(of_stage(step.exposed, stage) for stage in rank.stages) for rank in each)
    update = greatest(*(of_rank(step.update, rank) for rank in each))
    return LayoutTime(total, total - busy, greatest(*exposed), update, greatest(*held))
