"""Estimates for all choices of an open plan. Choices that differ in sizes alone share a structure, which is compiled
once for a short model on a few ranks. Its programs tell the time and the memory of each."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, permutations
from typing import Any, NamedTuple

import numpy as np
import torch

from parc.compiler.capture.model_code import target_hashes
from parc.compiler.clock.cluster import Cluster
from parc.compiler.clock.links import Links
from parc.compiler.clock.sweeps import SweptLinks, sweep_over
from parc.compiler.layout.mesh import Mesh, UnevenNodes, node_levels
from parc.compiler.layout.placement import Split
from parc.compiler.layout.sweep import Lanes
from parc.compiler.plan.open_plan import OpenChoice, OpenPlan
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import BACKWARD, FORWARD
from parc.compiler.schedules import V_SHAPES
from parc.compiler.sizes.size_range import BATCH
from parc.compiling.build_cache import BuildCache
from parc.compiling.driver import Captures, at_largest, compile_with, task_lines
from parc.grammar.bounded import real_path
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from parc.grammar.syntax import Number, Var, Word
from parc.searching.played import PlayedSchedule, even_cuts, played
from parc.searching.pricing import Figures, Rejected, effect_of, over_memory, rejected
from parc.searching.shorter import Layers
from parc.searching.structure import (
    MIDDLE,
    SHORT,
    STAGES,
    LayoutTime,
    PerLayer,
    ShortBuild,
    Structure,
    SweptStep,
    one_stage,
    pipeline,
)

_PRIMES = (17, 19, 23, 29, 31, 37, 41)
"""Factors of a structure's samples. One that divides no dim of the model shows which dims are those of the batch."""
_MICROBATCHES = 4
"""The microbatches of a structure with a pipeline."""
_MOST_WORKERS = 16
_BUCKETS = 4
"""The buckets of a block from which on their number is nearly that of its bytes."""
_FEWEST = 16
"""The fewest choices for which structures are worth their compilation."""


@dataclass(frozen=True)
class Estimate:
    """A choice with the figures by which it may be chosen, the order of its mesh, and the blocks of each stage."""

    choice: OpenChoice
    order: tuple[str, ...]
    figures: Figures
    cuts: tuple[int, ...] = ()


AxisSizes = tuple[tuple[str, int], ...]
"""The ranks along each axis, in the order of a plan's mesh."""


class LayoutSizes(NamedTuple):
    """The sizes of a choice: the ranks along each axis, the microbatches, and, with a pipeline, its schedule and the
    stages of a rank."""

    axes: AxisSizes
    microbatches: int
    schedule: str
    chunks: int


class StructureKey(NamedTuple):
    """The facts that choices of one structure share: the values of names that are no sizes, the axes of several ranks,
    and those whose sizes count. With ``single`` a step has one microbatch: sums of gradients are not held before it."""

    values: tuple[tuple[str, str], ...]
    several: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...] = ()
    single: bool = False


SizedChoice = tuple[OpenChoice, LayoutSizes]
Rejection = tuple[OpenChoice, Rejected]


class _Place(NamedTuple):
    """A place of a sweep: the ranks along each axis, the microbatches, and the links in one order of the mesh."""

    axes: AxisSizes
    microbatches: int
    order: tuple[str, ...]
    links: Links


@dataclass
class Estimator:
    """The estimates of the choices of an open plan whose model has many equal blocks. ``example`` is the plan of one
    choice."""

    plan: OpenPlan
    example: Plan
    layers: Layers
    cluster: Cluster
    keep_order: bool = False
    cache: BuildCache = field(default_factory=BuildCache.of_user)
    _captures: dict[int, Captures] = field(default_factory=dict)
    _splitting: dict[str, bool] = field(default_factory=dict)
    """The axes of the structures so far, each True where weights are split over it as they are computed with."""

    @classmethod
    def serves(cls, plan: OpenPlan, example: Plan) -> bool:
        """Return whether estimates say something of a plan: its stages are balanced, and nothing in it depends on where
        ranks lie on nodes."""
        stages = all(line.balanced for line in example.stages) and len(example.stages) <= 1
        placed = example.views or example.hierarchical or any(line.within for line in example.zero)
        fit = any(line.fit is not None for line in example.recompute)
        table = example.schedule is not None and bool(example.schedule.table)
        return stages and not (placed or fit or table) and plan.combinations >= _FEWEST

    @property
    def pipe(self) -> str:
        """The axis of the pipeline, "" without one."""
        return self.example.stages[0].axis.text if self.example.stages else ""

    # ---- choices, by structure

    def sizes_of(self, choice: OpenChoice) -> LayoutSizes:
        """Return the sizes of a choice."""
        axes = {name: _number(choice.get(str(size), size)) for name, size in self.plan.axes.items()}
        axes = {name: axes.get(name, size) for name, size in self.example.mesh.axes}
        line = self.example.schedule
        if line is None:
            return LayoutSizes(tuple(axes.items()), 1, "", 1)
        words = self._schedule_words
        microbatches = _number(choice.get(words.get("microbatches", ""), line.microbatches))
        if axes.get(self.pipe, 1) == 1:
            return LayoutSizes(tuple(axes.items()), microbatches, "", 1)
        name = choice.get(words.get("", ""), line.name)
        chunks = _number(
            choice.get(words.get("chunks", ""), line.arguments.number("chunks", 2 if name in V_SHAPES else 1))
        )
        return LayoutSizes(tuple(axes.items()), microbatches, name, chunks)

    @cached_property
    def _schedule_words(self) -> Mapping[str, str]:
        """The open names of the schedule's line, by the word before them, "" for that of the schedule."""
        names: dict[str, str] = {}
        for statement in self.plan.statements:
            if statement.verb.text != "schedule":
                continue
            before = ""
            for phrase in statement.phrases:
                item = phrase.items[0]
                if isinstance(item, Var):
                    names[before] = item.name
                before = item.text if isinstance(item, Word | Number) else ""
        return names

    @cached_property
    def _size_names(self) -> frozenset[str]:
        """The open names that are sizes."""
        return frozenset({str(size) for size in self.plan.axes.values()} | {*self._schedule_words.values()})

    def effect(self, key: StructureKey) -> tuple[str, ...]:
        """Return what the plan of a structure does, the same for structures that do the same.

        Raises:
            PlanError: it is no plan.
        """
        return effect_of(self._plan(key, _PRIMES[0])[0])

    def key_of(self, choice: OpenChoice, sizes: LayoutSizes, fixed: Mapping[str, int] | None = None) -> StructureKey:
        """Return the structure of a choice."""
        values = tuple((name, value) for name, value in choice.items() if name not in self._size_names)
        several = tuple(axis for axis, size in sizes.axes if size > 1)
        return StructureKey(values, several, tuple((fixed or {}).items()), sizes.microbatches == 1)

    def misfit(self, sizes: LayoutSizes) -> Rejected | None:
        """Return the reason why sizes are those of no plan, if it can be told without the model."""
        ranks = dict(sizes.axes)
        if self.batch % sizes.microbatches:
            return Rejected("batch", f"{self.batch} samples do not divide into {sizes.microbatches} microbatches")
        if self.pipe and ranks[self.pipe] > 1:
            stages = ranks[self.pipe] * sizes.chunks
            if stages > self.layers.number - self.layers.unlike:
                return Rejected("stages", f"{stages} stages of {self.layers.number} blocks")
            schedule = played(sizes.schedule, stages, sizes.microbatches, sizes.chunks)
            if isinstance(schedule, str):
                return Rejected("schedule", schedule)
        return None

    # ---- structures

    def structure(self, key: StructureKey, shrink: float = 1.0) -> Structure:
        """Compile a structure. Weights of the plans that it stands for are smaller than its own by a factor, so its
        buckets are larger by as much.

        Raises:
            PlanError: it is no plan.
        """
        staged, first = self.pipe in key.several, self.layers.unlike
        counts = (first + sum(MIDDLE) + 2,) if staged else tuple(first + count for count in SHORT)
        for prime in _PRIMES:
            plan, samples = self._plan(key, prime, shrink)
            shorts = [self._short(self._captured(count), plan) for count in counts]
            dims = {dim for one in shorts for type_ in one.build.types.values() for dim in type_.shape}
            if all(dim % samples for dim in dims if dim):
                break
        storing = {self.pipe, *(line.axis.text for line in self.example.zero)}
        placed = [type_.placement.items() for type_ in shorts[0].build.types.values()]
        split = {axis for items in placed for axis, kind in items if isinstance(kind, Split)}
        self._splitting.update((axis, axis in split - storing) for axis in key.several)
        return Structure(shorts, samples)

    def _by_weights(
        self, key: StructureKey, choices: Sequence[SizedChoice]
    ) -> Iterator[tuple[float, Sequence[SizedChoice]]]:
        """Yield choices with the factor by which their weights are smaller than those of their structure. Where a block
        fills several buckets, all together with that of most: some more or fewer buckets change little.

        Raises:
            PlanError: the structure is no plan.
        """
        if not self._splitting.keys() >= {*key.several}:
            self.structure(key)
        free = [axis for axis in key.several if self._splitting[axis] and axis not in dict(key.fixed)]
        shrinks = [math.prod(dict(sizes.axes)[axis] / 2 for axis in free) for _, sizes in choices]
        if self._block_bytes / (max(shrinks) * 2 ** len(free)) > _BUCKETS * self.example.bucket:
            yield float(np.median(shrinks)), choices
            return
        for shrink in dict.fromkeys(shrinks):
            yield shrink, [choice for choice, factor in zip(choices, shrinks, strict=True) if factor == shrink]

    @cached_property
    def _block_bytes(self) -> int:
        """The bytes of a block's weights."""
        recorded, _, _ = self._captured(self.layers.unlike + SHORT[0]).at(at_largest(self.example))
        block = self.layers.name(self.layers.unlike) + "."
        named = recorded.module.named_parameters()
        return sum(weight.numel() * weight.element_size() for name, weight in named if name.startswith(block))

    def _plan(self, key: StructureKey, prime: int, shrink: float = 1.0) -> tuple[Plan, int]:
        """Return the plan of a structure, and the samples of its microbatches: so many for each of its ranks.

        Raises:
            PlanError: it is no plan.
        """
        staged, fixed = self.pipe in key.several, dict(key.fixed)
        axes: dict[str, int] = {}
        for name, size in self.plan.axes.items():
            axes[name] = fixed.get(name, 2 if name in key.several else 1) if isinstance(size, str) else size
        if staged:
            axes[self.pipe] = STAGES
        microbatches = _MICROBATCHES if staged else 1 if key.single else 2
        lines: dict[str, Sequence[str]] = {"budget": (), "expect": (), "forbid": ()}
        if self.example.schedule is not None:
            words = "1f1b " if self.example.stages else ""
            more = f" accumulate {self.example.accumulate}" if self.example.accumulate != "fp32" else ""
            lines["schedule"] = [f"schedule {words}microbatches {microbatches}{more}"]
        if staged:
            first = self.layers.unlike + 1
            places = (first, first + MIDDLE[0], first + sum(MIDDLE))
            lines["stage balanced"] = [f"stage before {', '.join(map(self.layers.name, places))} over {self.pipe}"]
        names = {size: str(axes[axis]) for axis, size in self.plan.axes.items() if isinstance(size, str)}
        choice = dict(key.values) | names
        choice |= {let.name: let.values[0].span.text for let in self.plan.lets if let.name not in choice and let.values}
        samples = prime * 2 ** sum(axis != self.pipe for axis in axes)
        if any(samples % size for axis, size in axes.items() if axis != self.pipe):
            samples *= math.prod(fixed.values())
        opened = replace(self.plan, batch=samples * microbatches)
        plan = opened.read(opened.closed(choice, lines=lines, mesh=axes))
        if shrink != 1.0:
            lines["bucket"] = [f"bucket {max(1, int(plan.bucket * shrink) // 1000)}KB"]
            plan = opened.read(opened.closed(choice, lines=lines, mesh=axes))
        return plan, samples

    def _short(self, captures: Captures, plan: Plan) -> ShortBuild:
        """Return the build of a plan for a captured model, from the cache if it has it."""
        plan = at_largest(plan)
        recorded, captured, _ = captures.at(plan)
        model = (
            f"{name} {parameter.shape} {parameter.dtype}" for name, parameter in recorded.module.named_parameters()
        )
        parts = (plan.text(), self._code, str(captured.graph), *model)
        build = self.cache.build(parts, captures.folder, lambda: compile_with(captures, plan))
        return ShortBuild(plan, build)

    @cached_property
    def _code(self) -> str:
        """The hashes of the code that the plan's callables reach."""
        folder = self._captured(self.layers.unlike + SHORT[0]).folder
        return str(target_hashes(task_lines(self.example).sources, folder))

    def _captured(self, layers: int) -> Captures:
        if layers not in self._captures:
            assert self.plan.source.path is not None
            folder = real_path(self.plan.source.path).parent
            self._captures[layers] = Captures(folder, {self.layers.argument: layers})
        return self._captures[layers]

    # ---- estimates

    def closed(self, estimate: Estimate) -> Source:
        """Return the plan that an estimate is of, with its cuts as lines."""
        lines: dict[str, Sequence[str]] = {}
        if estimate.cuts:
            ends = [self.layers.unlike + end for end in accumulate(estimate.cuts[:-1])]
            blocks = ", ".join(map(self.layers.name, ends))
            lines["stage balanced"] = [f"stage     before {blocks} over {self.pipe}  # balanced by predicted times"]
        return self.plan.closed(estimate.choice, estimate.order, lines)

    def estimates(self, key: StructureKey, choices: Sequence[SizedChoice]) -> tuple[list[Estimate], list[Rejection]]:
        """Return the estimates of choices of one structure, one for each order of the mesh that is another; and those
        that do not fit, with the reason."""
        estimates, rejections = list[Estimate](), list[Rejection]()
        try:
            groups = list(self._by_weights(key, choices))
        except PlanError as error:
            return [], [(choice, rejected(error)) for choice, _ in choices]
        for shrink, members in groups:
            try:
                more, others = self._estimates(key, self.structure(key, shrink), members)
            except PlanError as error:
                more, others = [], [(choice, rejected(error)) for choice, _ in members]
            estimates += more
            rejections += others
        return estimates, rejections

    def _estimates(
        self, key: StructureKey, structure: Structure, choices: Sequence[SizedChoice]
    ) -> tuple[list[Estimate], list[Rejection]]:
        """Return the estimates of choices from one structure's programs, and those that do not fit."""
        orders = {axes: [*self._placed(structure, axes)] for axes in dict.fromkeys(sizes.axes for _, sizes in choices)}
        places = [_Place(axes, microbatches, order, links)
                  for axes, microbatches in dict.fromkeys(sizes[:2] for _, sizes in choices)
                  for order, links in orders[axes]]  # fmt: skip
        step = self._swept(structure, key, places)
        lanes: dict[tuple[object, int], list[int]] = {}
        for at, place in enumerate(places):
            lanes.setdefault(place[:2], []).append(at)
        result: list[Estimate] = []
        rejections: dict[int, Rejection] = {}
        alike: dict[tuple[int, int, str, int], list[tuple[OpenChoice, int]]] = {}
        apart: dict[StructureKey, list[SizedChoice]] = {}
        for choice, sizes in choices:
            ranks, fixed, at = dict(sizes.axes), dict(key.fixed), lanes[sizes[:2]][0]
            odd = next((axis for axis, places in step.uneven.items() if places[at]), None)
            wrong = {axis: ranks[axis] for axis, places in step.short.items()
                     if axis in key.several and axis not in fixed and places[at]}  # fmt: skip
            if odd is not None:
                words = (
                    f"{self.batch / sizes.microbatches:g} samples of a microbatch do not divide by {odd}={ranks[odd]}"
                )
                rejections[id(choice)] = choice, Rejected("batch", words)
            elif wrong:
                apart.setdefault(self.key_of(choice, sizes, fixed | wrong), []).append((choice, sizes))
            else:
                timed = alike.setdefault((ranks.get(self.pipe, 1), *sizes[1:]), [])
                timed += [(choice, at) for at in lanes[sizes[:2]]]
        for (pipe, microbatches, name, chunks), timed in alike.items():
            time, cuts = self._timed(step, np.array([at for _, at in timed]), pipe, microbatches, name, chunks)
            for number, (choice, at) in enumerate(timed):
                figures = self._figures(time, number, structure)
                if reason := over_memory(figures, self.example, self.cluster):
                    rejections[id(choice)] = choice, reason
                else:
                    result.append(Estimate(choice, places[at].order, figures, cuts[number]))
        several = [*rejections.values()]
        for of_size, members in apart.items():
            estimates, more = self.estimates(of_size, members)
            result += estimates
            several += more
        return result, several

    @property
    def batch(self) -> int:
        """The samples of a step."""
        sizes = self.example.sizes
        return self.plan.batch or (sizes[BATCH].high if BATCH in sizes else 1)

    def _swept(self, structure: Structure, key: StructureKey, places: Sequence[_Place]) -> SweptStep:
        """Return the quantities of a structure's step at places."""
        axes = {axis: np.array([float(dict(place.axes)[axis]) for place in places]) for axis in key.several}
        samples = np.array([self.batch / place.microbatches for place in places])
        storing = {line.axis.text for line in self.example.zero}
        mesh = structure.mesh
        sweep = sweep_over(mesh, axes, structure.samples, samples, structure.padded, storing)
        return structure.swept(sweep, SweptLinks.of([place.links for place in places]))

    def _placed(self, structure: Structure, axes: AxisSizes) -> Iterator[tuple[tuple[str, ...], Links]]:
        """Yield the orders of a mesh, one of those in which all groups lie on nodes alike."""
        mesh = self._mesh(structure, axes)
        node = self.example.node.ranks if self.example.node is not None else self.cluster.ranks
        names = tuple(axis for axis, _ in axes)
        cluster = self.cluster.shared_by(min(mesh.world, node))
        seen = set[object]()
        orders = [names] if self.keep_order else [names, *permutations(names)]
        for order in orders:
            with suppress(UnevenNodes):
                if order != names:
                    node_levels(Mesh(tuple((axis, dict(axes)[axis]) for axis in order)), node)
                links = Links(mesh, cluster, node, mesh.spread(order))
                place = tuple(links.place(axes) for axes in structure.groups)
                if place not in seen:
                    seen.add(place)
                    yield order, links

    def _mesh(self, structure: Structure, axes: AxisSizes) -> Mesh:
        """Return the mesh of sizes, with axes factored as those of the structure."""
        shape = structure.mesh
        mesh = Mesh(axes)
        factors = {axis: [shape.size(part) for part in shape.parts(axis)] for axis, _ in shape.factored}
        return mesh.factor(factors) if factors else mesh

    def _timed(
        self, step: SweptStep, lanes: Lanes, pipe: int, microbatches: int, name: str, chunks: int
    ) -> tuple[LayoutTime, Sequence[tuple[int, ...]]]:
        """Return the time and the memory at some places of a sweep, and the blocks of each stage there."""
        blocks = self.layers.number - self.layers.unlike

        def of(part: PerLayer) -> PerLayer:
            return PerLayer(*(_lanes(value, lanes) for value in part))

        parts: dict[str, Any] = {
            name: of(value) if isinstance(value, PerLayer) else _lanes(value, lanes)
            for name, value in vars(step).items() if name not in ("work", "peaks", "short", "uneven")
        }  # fmt: skip
        work = {kind: of(part) for kind, part in step.work.items()}
        at = replace(step, work=work, peaks={kind: of(part) for kind, part in step.peaks.items()}, **parts)
        if pipe == 1:
            return one_stage(at, blocks, microbatches), [() for _ in lanes]
        stages = pipe * chunks
        schedule = played(name, stages, microbatches, chunks)
        assert isinstance(schedule, PlayedSchedule), schedule
        layer = work[FORWARD].layer + work[BACKWARD].layer
        last = stages - 1
        ends = ((stage == 0, stage == last) for stage in range(stages))
        extra = [(work[FORWARD].at(0, *end) + work[BACKWARD].at(0, *end)) / layer for end in ends]
        beside = np.array([np.broadcast_to(one, lanes.shape) for one in extra]).T.round(2).tolist()
        cuts = [even_cuts(blocks, tuple(row), schedule.ranks) for row in beside]
        return pipeline(at, [*np.array(cuts, float).T], schedule, microbatches), cuts

    def _figures(self, time: LayoutTime, number: int, structure: Structure) -> Figures:
        seconds, bubble, exposed, update, memory = (float(np.broadcast_to(v, time.seconds.shape)[number]) for v in time)
        parts: dict[str, Any] = {
            "bubble": bubble,
            "exposed": exposed,
            "optimizer": update,
            "work": seconds - bubble - exposed - update,
        }
        return Figures(seconds, parts, 0.0, int(memory) + self._framework(structure), self._framework(structure))

    def _framework(self, structure: Structure) -> int:
        """Return the framework's own bytes on a device."""
        framework = self.cluster.framework
        return int(framework.context + len(structure.groups) * framework.communicator)


def _lanes(value: Any, lanes: Lanes) -> Any:
    """Return the numbers of a sweep at some places."""
    return value[lanes] if isinstance(value, np.ndarray) and value.ndim else value


def _number(value: object) -> int:
    """Return a whole number from its text; 1 for another one."""
    text = str(value)
    return int(text) if text.isdecimal() else 1


# ---- several processes


_shared: tuple[Estimator, Sequence[tuple[StructureKey, Sequence[SizedChoice]]]] | None = None
"""The work of the processes of a search, which they take over when they are forked."""


def each_structure(
    estimator: Estimator, structures: Mapping[StructureKey, Sequence[SizedChoice]]
) -> Iterator[tuple[int, list[Estimate], list[Rejection]]]:
    """Yield the estimates of each structure as they come, with the number of its choices: one process for each core."""
    global _shared
    workers = min(len(structures), len(os.sched_getaffinity(0)), _MOST_WORKERS)
    if workers <= 1:
        yield from ((len(members), *estimator.estimates(key, members)) for key, members in structures.items())
        return
    with suppress(PlanError):  # the captured model is shared, and over which axes weights are split
        estimator.structure(max(structures, key=lambda key: len(key.several)))
    _shared = estimator, [*structures.items()]
    with multiprocessing.get_context("fork").Pool(workers, _begin) as pool:
        yield from pool.imap_unordered(_of_shared, range(len(structures)))
    _shared = None


def _begin() -> None:
    """Begin a process: it computes on its own core alone, and leaves Ctrl-C to the one that asked for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _of_shared(number: int) -> tuple[int, list[Estimate], list[Rejection]]:
    assert _shared is not None
    estimator, structures = _shared
    key, members = structures[number]
    return len(members), *estimator.estimates(key, members)
