"""Cuts in a captured graph: the beginnings of stages, the stage of every operator, and cuts that are not possible."""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise

from torch import fx

from ...grammar.codes_plan import BACKWARD_FLOW, EMPTY_STAGE, NO_PLACE, STATE_CYCLE, TOO_MANY_STAGES
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.source import Span
from ..capture.capture import Captured
from ..capture.node_facts import noted
from ..capture.reach import computed_anywhere
from ..plan.plan import Plan
from ..schedules import EARLY
from .balance import balance, operations_of, piece_of
from .names import PlanNames
from .stage_lines import StageCut, find_cuts, stage_count

_NUMBERED_MODULE = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def cuts_of(plan: Plan, names: PlanNames, captured: Captured) -> tuple[StageCut, ...]:
    """Return the cuts of a plan's ``stage`` lines, in the order of the graph, one fewer than there are stages. There
    are none without such lines, and where their axis has one rank.

    Raises:
        PlanError: the lines do not fit the model.
    """
    named, errors = find_cuts(plan, names)
    if errors:
        raise PlanError(errors)
    count = stage_count(plan)
    if count == 1:
        return ()
    view = _View(captured)
    if plan.stages[0].balanced:
        return _balanced(plan, captured, view)
    for check in (_without_place, _backwards):
        if errors := [*check(named, view)]:
            raise PlanError(errors)
    cuts = tuple(sorted(named, key=view.begin))
    if errors := [*_empty(cuts, view)] or [*_cycles(cuts, captured, view)]:
        raise PlanError(errors)
    return cuts


def stage_of_nodes(captured: Captured, cuts: Sequence[StageCut]) -> dict[fx.Node, int]:
    """Return the stage of every operator of the captured graph: the number of cuts before it.

    What is made of inputs alone (positions, masks, rotary tables) belongs to the first stage that reads it.

    Raises:
        KeyError: a cut's module runs no operator.
    """
    view = _View(captured)
    begins = sorted(map(view.begin, cuts))
    stages: dict[fx.Node, int] = {}
    for index, node in reversed([*enumerate(view.nodes)]):
        here = bisect_right(begins, index)
        readers = [] if node in view.held else [stages[user] for user in node.users if user in stages]
        stages[node] = min(readers, default=here)
    return {node: stages[node] for node in view.nodes}


class _View:
    """A graph's operators in order, with those that are held where they stand, and the places of modules."""

    def __init__(self, captured: Captured) -> None:
        self.nodes = [node for node in captured.graph.nodes if node.op == "call_function"]
        self.held = set(self.nodes) - computed_anywhere(captured.graph, captured.updates)
        """The operators that parameters reach, or buffers that the forward updates; all others can be computed
        anywhere."""
        self.ends: dict[str, tuple[int, int]] = {}
        """The first and the last held operator of every module, the whole model (``""``) included."""
        self.work = [0]
        """The number of held operators before each node, views not counted."""
        for index, node in enumerate(self.nodes):
            held = node in self.held
            self.work.append(self.work[-1] + (held and operations_of(node) > 0))
            if held:
                for module in _modules_around(noted(node).origin.module):
                    first, _ = self.ends.get(module, (index, index))
                    self.ends[module] = first, index

    def begin(self, cut: StageCut) -> int:
        """Return the number of the operator before which a cut lies. A cut never separates the results of one call."""
        first, last = self.ends[cut.module]
        index = last + 1 if cut.after else first
        while index < len(self.nodes) and self.nodes[index].target is operator.getitem:
            index += 1
        return index

    def works(self, module: str) -> bool:
        """Return whether a module computes with values that depend on parameters."""
        first, last = self.ends.get(module, (0, -1))
        return self.work[first] < self.work[last + 1]

    def crossings(self) -> list[int]:
        """Count, for each operator, the held values that are made before it and read by it or after it."""
        index = {node: at for at, node in enumerate(self.nodes)}
        change = [0] * (len(self.nodes) + 2)
        for node in index.keys() & self.held:
            last = max((index.get(user, len(self.nodes)) for user in node.users), default=index[node])
            change[index[node] + 1] += 1
            change[last + 1] -= 1
        return [*accumulate(change)]


def _modules_around(module: str) -> Iterator[str]:
    """Yield a module and all modules that contain it."""
    yield ""
    parts = module.split(".") if module else []
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _without_place(cuts: Iterable[StageCut], view: _View) -> Iterator[Diagnostic]:
    """Return an error for each module that computes nothing, or only values that could be computed anywhere."""
    for cut in cuts:
        if not view.works(cut.module):
            message = f"`{cut.module}` computes nothing with a weight, so there is no place to cut"
            yield Diagnostic(NO_PLACE, message, Label(cut.span), help="name a module that runs before or after it")


def _backwards(cuts: Sequence[StageCut], view: _View) -> Iterator[Diagnostic]:
    """Return an error for each name or pattern on a line whose cut comes before that of the previous one."""
    words = [[*group] for _, group in groupby(cuts, key=lambda cut: cut.span)]
    for earlier, later in pairwise(words):
        one, other = max(earlier, key=view.begin), min(later, key=view.begin)
        same = (one.span.source, one.span.line) == (other.span.source, other.span.line)
        if same and view.begin(other) < view.begin(one):
            message = f"values would flow backwards: the model comes to `{other}` first, then to `{one}`"
            related = (Label(one.span, "this cut is named first"),)
            help_ = "write the cuts of a line in the order in which the model runs"
            yield Diagnostic(BACKWARD_FLOW, message, Label(other.span), related, help=help_)


def _empty(cuts: Sequence[StageCut], view: _View) -> Iterator[Diagnostic]:
    """Return an error for each stage that computes nothing with a weight, or with a value that depends on one."""
    work = [0, *(view.work[view.begin(cut)] for cut in cuts), view.work[-1]]
    for stage, (before, after) in enumerate(pairwise(work)):
        if before == after:
            start, stop = (cuts[stage - 1] if stage else None), (cuts[stage] if stage < len(cuts) else None)
            where = f"from `{start}` on" if stop is None else f"up to `{stop}`"
            if start is not None and stop is not None:
                where = f"between `{start}` and `{stop}`"
            cut = stop or start
            assert cut is not None
            related = (Label(start.span, "the stage begins here"),) if start is not None and stop is not None else ()
            message = f"stage {stage} has no work: nothing is computed with a weight {where}"
            help_ = "cut elsewhere: a layer, an embedding or a head is work"
            yield Diagnostic(EMPTY_STAGE, message, Label(cut.span), related, help=help_)


def _states(captured: Captured, held: Collection[fx.Node]) -> Iterator[tuple[str, list[fx.Node]]]:
    """Return each buffer that the forward updates, with the operators that read it, also through copies and views. The
    operator that makes its new value is included, unless it can be computed anywhere."""
    buffers = captured.placeholders("buffer")
    outputs = captured.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list)
    updates = outputs[: len(outputs) - len(captured.returned)][-len(captured.updates) :]
    for name, value in zip(captured.updates, updates if captured.updates else (), strict=True):
        nodes = [*(buffers[name].users if name in buffers else ()), value]
        for node in nodes:  # grows
            if isinstance(node, fx.Node) and node is not value and operations_of(node) == 0:
                nodes += [user for user in node.users if user not in nodes]
        yield name, [node for node in nodes if node in held and node.op == "call_function"]


def _cycles(cuts: Sequence[StageCut], captured: Captured, view: _View) -> Iterator[Diagnostic]:
    """Return an error for each buffer that one stage reads and another updates."""
    stages = stage_of_nodes(captured, cuts)
    said: set[StageCut] = set()
    for name, nodes in _states(captured, view.held):
        lying = sorted({stages[node] for node in nodes})
        if len(lying) > 1 and cuts[lying[0]] not in said:
            cut = cuts[lying[0]]
            said.add(cut)
            message = f"the buffer `{name}` is read and updated in stages {lying[0]} and {lying[-1]}"
            help_ = f"put the cut where everything that runs `{name.rpartition('.')[0] or name}` is on one side of it"
            yield Diagnostic(STATE_CYCLE, message, Label(cut.span), help=help_)


def _balanced(plan: Plan, captured: Captured, view: _View) -> tuple[StageCut, ...]:
    """Return the cuts that ``stage balanced`` chooses. It counts as many microbatches in flight as in ``1f1b``, or all
    of them where a schedule begins no backward early."""
    line, schedule, count = plan.stages[0], plan.schedule, stage_count(plan)
    cuts = _possible_cuts(captured, view, line.span)
    if len(cuts) + 1 < count:
        ranks = f"`{line.axis.text}` has {count} stages"
        message = f"{ranks}, but the model can be cut into {len(cuts) + 1}"
        help_ = f"make {len(cuts) + 1} stages or fewer: use fewer ranks or chunks, or a model of more layers"
        related = (Label(plan.mesh_spans[line.axis.text], "declared here"),)
        raise PlanError([Diagnostic(TOO_MANY_STAGES, message, Label(line.span), related, help=help_)])
    bounds = [0, *map(view.begin, cuts), len(view.nodes)]
    states = 2 + plan.moments
    pieces = [piece_of(view.nodes[start:stop], states) for start, stop in pairwise(bounds)]

    def in_flight(stage: int) -> int:
        early = schedule is not None and schedule.name in EARLY
        return min(plan.microbatches, count - stage) if early else plan.microbatches

    return tuple(cuts[begin - 1] for begin in balance(pieces, count, in_flight))


def _possible_cuts(captured: Captured, view: _View, span: Span) -> list[StageCut]:
    """Return the places at which ``stage balanced`` may cut: the beginnings and ends of numbered modules (layers), and
    of other modules with weights of their own. A place inside a numbered module counts only where no more values cross
    than before the module. A cut never lies inside a cycle of state. Of places with no work between them only one is
    kept."""
    owners = {name.rpartition(".")[0] for name in (*captured.placeholders("parameter"), *captured.aliases)}
    crossings, index = view.crossings(), {node: at for at, node in enumerate(view.nodes)}
    lying = [[index[node] for node in nodes] for _, nodes in _states(captured, view.held)]
    best: dict[int, StageCut] = {}
    for module in sorted(view.ends, key=lambda name: (len(name), name)):
        outer = _NUMBERED_MODULE.match(module)
        if not (module.rpartition(".")[2].isdecimal() if outer else module in owners):
            continue
        most = crossings[view.ends[outer[0]][0]] if outer and outer[0] != module else len(index)
        for cut in (StageCut(module, False, span), StageCut(module, True, span)):
            begin = view.begin(cut)
            work = view.work[begin]
            held = any(min(places) < begin <= max(places) for places in lying if places)
            better = work not in best or best[work].after > cut.after
            if better and 0 < work < view.work[-1] and crossings[begin] <= most and not held:
                best[work] = cut
    return [best[work] for work in sorted(best)]
