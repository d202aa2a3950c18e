"""Cuts in a captured graph: the beginnings of stages, by `stage` lines or balanced; the stage of every operator; and
cuts that are not possible."""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from ...grammar.codes import BACKWARD_FLOW, EMPTY_STAGE, NO_PLACE, STATE_CYCLE, TOO_MANY_STAGES
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.source import Span
from ..capture.capture import Captured
from ..capture.node_facts import noted
from ..capture.reach import computed_anywhere
from ..layout.mesh import Shape
from ..ops.factors import OpCall, Operand
from ..ops.rules import facts
from ..plan.plan import Plan
from ..program.actions import StageRanks
from ..program.binding import PARAMETERS, Binding
from ..schedules import live_microbatches, places_of
from .names import PlanNames
from .stage_lines import StageCut, find_cuts, stage_count

# ---- cuts


_NUMBERED_MODULE = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def cuts_of(plan: Plan, folder: Path, names: PlanNames, captured: Captured) -> tuple[StageCut, ...]:
    """Return the cuts of a plan's ``stage`` lines, in the order of the graph, one fewer than there are stages. There
    are none without such lines, and where their axis has one rank. ``folder`` is the plan's.

    Raises:
        PlanError: the lines do not fit the model, or balanced stages have a schedule that is not of so many.
    """
    named, errors = find_cuts(plan, names)
    if errors:
        raise PlanError(errors)
    count = stage_count(plan)
    if count == 1:
        return ()
    view = _View(captured)
    if plan.stages[0].balanced:
        return _balanced(plan, folder, captured, view)
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


def _balanced(plan: Plan, folder: Path, captured: Captured, view: _View) -> tuple[StageCut, ...]:
    """Return the cuts that ``stage balanced`` chooses, by the ranks and the live microbatches of the schedule."""
    line, schedule, count = plan.stages[0], plan.schedule, stage_count(plan)
    assert schedule is not None  # a plan with stages has one
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
    sizes, table = (schedule.name, count, plan.microbatches, schedule.chunks), schedule.table_of(folder, count)
    places, live = places_of(*sizes, text=table), live_microbatches(*sizes, text=table)
    return tuple(cuts[begin - 1] for begin in balance(pieces, places, live))


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


# ---- balance: consecutive pieces of a model joined to stages, so that the largest stage is as small as possible


FLOPS_PER_BYTE = 100
"""The cost of moving a byte, in operations: accelerators do 100 to 300 operations of products in bfloat16 in the time
of one byte."""
PASSES = 3
"""The work of forward and backward, in forwards: a backward takes twice the work, a gradient for each operand of a
product."""


@dataclass(frozen=True, slots=True)
class BalancedPiece:
    """A piece of the model that is never cut: its operations; the bytes that one microbatch's backward needs of its
    forward; and by name the bytes of its parameters with their gradients and optimizer state."""

    operations: int
    kept: int
    parameters: Mapping[str, int]


def operations_of(node: fx.Node) -> int:
    """Count the floating point operations of a node's forward and backward, by shapes. A multiply-add in products,
    convolutions and attention counts as two. All else takes ``FLOPS_PER_BYTE`` for each byte that it reads or writes,
    but views and copies nothing."""
    row = facts(node.target)
    view = node.target is operator.getitem or row.storage == "view"
    if node.op != "call_function" or view or _passes_on(node):
        return 0
    products = products_of(node)
    if products:
        return PASSES * 2 * products
    table = row.moves == "index"  # of which it reads no more than it gives
    read = node.all_input_nodes[1:] if table else node.all_input_nodes
    return PASSES * FLOPS_PER_BYTE * (_tensor_bytes(node) + sum(map(_tensor_bytes, read)))


def _passes_on(node: fx.Node) -> bool:
    """Return whether an operator's result equals its operand: a copy, or a dropout that drops nothing."""
    row = facts(node.target)
    if str(node.target) == "aten.dropout.default":
        return not node.args[1] or not node.args[2]
    operand = _tensors_of(node.all_input_nodes[0]) if node.all_input_nodes else []
    same = [value.dtype for value in operand] == [value.dtype for value in _tensors_of(node)]
    return (row.moves == "copy" or row.casts) and same


def numbers_of(node: fx.Node) -> int:
    """Count the numbers in a node's tensors."""
    return sum(value.numel() for value in _tensors_of(node))


def products_of(node: fx.Node) -> int:
    """Count the multiply-adds of an operator; 0 for one that is no product."""
    flops = facts(node.target).flops
    if flops is None:
        return 0
    operands: list[Shape] = []

    def operand(read: fx.Node) -> Any:
        operands.append(tuple(map(int, noted(read).value.shape)))
        return Operand(len(operands) - 1)

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operand)
    results = tuple(tuple(map(int, value.shape)) for value in _tensors_of(node))
    return flops(OpCall(str(node.target), args, kwargs, tuple(operands), results))


def _tensors_of(node: fx.Node) -> list[Tensor]:
    value = noted(node).value
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Tensor)]


def _tensor_bytes(node: fx.Node) -> int:
    return sum(value.numel() * value.element_size() for value in _tensors_of(node))


def piece_of(nodes: Sequence[fx.Node], states: int) -> BalancedPiece:
    """Return the piece that consists of these nodes. A parameter takes ``states`` times its bytes. Backward is taken to
    need every floating result that is not a view."""
    parameters: dict[str, int] = {}
    operations = kept = 0
    for node in nodes:
        work = operations_of(node)
        operations += work
        kept += sum(v.numel() * v.element_size() for v in _tensors_of(node) if v.is_floating_point()) if work else 0
        for operand in node.all_input_nodes:
            binding: Binding | None = noted(operand).binding
            if binding is not None and binding.kind in PARAMETERS:
                parameters[binding.name] = _tensor_bytes(operand) * states
    return BalancedPiece(operations, kept, parameters)


def balance(pieces: Sequence[BalancedPiece], ranks: StageRanks, live: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the pieces with which stages 1, 2, … begin, where stages lie on these ``ranks``. The
    busiest rank has as few operations as possible; among such choices, the fullest rank takes the fewest bytes; among
    those, ranks and their stages are as even as possible.

    A rank's bytes are those of its parameters (one that several pieces use counts once) and what the backwards of
    ``live`` microbatches of each stage keep. Exact where each rank has one stage: by dynamic programming over the first
    k stages and the first j pieces, once for each demand, without stages that are worse by the demands before. Else so
    for stages that follow each other on different ranks, in turn until nothing gets better.

    Raises:
        ValueError: there are fewer pieces than stages.
    """
    if len(pieces) < len(ranks):
        raise ValueError(f"{len(pieces)} pieces make no {len(ranks)} stages")
    work = [0, *accumulate(piece.operations for piece in pieces)]
    bytes_of = _RankBytes(pieces, live)

    def busy(runs: Sequence[_Run]) -> float:
        return sum(work[stop] - work[start] for _, start, stop in runs)

    def memory(runs: Sequence[_Run]) -> float:
        return bytes_of(runs) if busy(runs) <= busiest else math.inf

    def squares(runs: Sequence[_Run]) -> float:
        return busy(runs) ** 2 + busy(runs[-1:]) ** 2 if memory(runs) <= fullest else math.inf

    busiest = fullest = math.inf
    _, begins = _best_cut(range(len(ranks)), 0, len(pieces), lambda run: busy([run]) ** 2, operator.add)
    bounds = _improved([0, *begins, len(pieces)], ranks, squares, operator.add)  # even stages leave room to improve
    bounds = _improved(bounds, ranks, busy, max)
    busiest = max(map(busy, _runs_of_ranks(bounds, ranks)))
    bounds = _improved(bounds, ranks, memory, max)
    fullest = max(map(memory, _runs_of_ranks(bounds, ranks)))
    return tuple(_improved(bounds, ranks, squares, operator.add)[1:-1])


_Run = tuple[int, int, int]
"""A stage with the numbers of its first piece and of the one behind its last."""
_Join = Callable[[float, float], float]
"""The sum of the costs of stages, or the largest of them."""


class _RankBytes:
    """The bytes of a rank by the pieces of its stages."""

    def __init__(self, pieces: Sequence[BalancedPiece], live: Sequence[int]) -> None:
        users = Counter(name for piece in pieces for name in piece.parameters)
        once = [sum(size for name, size in piece.parameters.items() if users[name] == 1) for piece in pieces]
        self._live, self._once = live, [0, *accumulate(once)]
        self._kept = [0, *accumulate(piece.kept for piece in pieces)]
        self._shared = [(at, name, size) for at, piece in enumerate(pieces)
                        for name, size in piece.parameters.items() if users[name] > 1]  # fmt: skip

    def __call__(self, runs: Sequence[_Run]) -> int:
        shared = {name: size for at, name, size in self._shared if any(start <= at < stop for _, start, stop in runs)}
        return sum(shared.values()) + sum(
            self._once[stop] - self._once[start] + self._live[stage] * (self._kept[stop] - self._kept[start])
            for stage, start, stop in runs
        )


def _runs_of_ranks(bounds: Sequence[int], ranks: StageRanks) -> list[list[_Run]]:
    """Return the runs of each rank's stages."""
    return [[(stage, bounds[stage], bounds[stage + 1]) for stage, lies in enumerate(ranks) if lies == rank]
            for rank in sorted({*ranks})]  # fmt: skip


def _improved(
    bounds: Sequence[int], ranks: StageRanks, cost: Callable[[Sequence[_Run]], float], join: _Join
) -> list[int]:
    """Return bounds of stages whose costs joined are smaller, if there are any. A cost is that of a rank's stages, the
    last of which is to be cut; it grows with it."""
    bounds, windows = [*bounds], list[range]()
    for first in range(len(ranks)):
        last = next((last for last in range(first, len(ranks)) if ranks[last] in ranks[first:last]), len(ranks))
        if not windows or last > windows[-1].stop:
            windows.append(range(first, last))
    others: dict[int, list[_Run]] = {}
    better = True

    def beside(run: _Run) -> float:
        return cost([*others[run[0]], run])

    while better:
        better = False
        for window in windows:
            runs = _runs_of_ranks(bounds, ranks)
            others = {stage: [run for run in runs[ranks[stage]] if run[0] != stage] for stage in window}
            now = reduce(join, (beside((stage, bounds[stage], bounds[stage + 1])) for stage in window))
            best, begins = _best_cut(window, bounds[window.start], bounds[window.stop], beside, join)
            if best < now:
                better, bounds[window.start + 1 : window.stop] = True, begins
    return bounds


def _best_cut(
    stages: range, first: int, last: int, cost: Callable[[_Run], float], join: _Join
) -> tuple[float, tuple[int, ...]]:
    """Cut the pieces from ``first`` up to ``last`` into the runs of stages, so that their costs joined are as small as
    possible. Return that, and the begins of all runs but the first. A longer run costs no less."""
    count = last - first
    best: list[list[float]] = [[0] + [math.inf] * count]
    begin: list[list[int]] = []
    for number, stage in enumerate(stages):
        row, chosen = [math.inf] * (count + 1), [number] * (count + 1)
        for stop in range(number + 1, count + 1):
            for start in range(stop - 1, number - 1, -1):
                here = cost((stage, first + start, first + stop))
                if here >= row[stop]:
                    break
                joined = join(best[-1][start], here)
                if joined < row[stop]:
                    row[stop], chosen[stop] = joined, start
        best.append(row)
        begin.append(chosen)
    begins, stop = [], count
    for chosen in reversed(begin):
        stop = chosen[stop]
        begins.append(first + stop)
    assert all(low < high for low, high in pairwise(reversed(begins)))
    return best[-1][count], tuple(reversed(begins))[1:]
