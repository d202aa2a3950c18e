"""The time of lines: products by their operations and shapes, all others by the bytes that they read and write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..analysis.dataflow import local_call
from ..analysis.flops import multiply_adds
from ..analysis.lifetimes import Aliases
from ..analysis.liveness import local_bytes
from ..layout.collectives import COLLECTIVES, RINGS, WAIT, axes_of
from ..ops.factors import OpCall
from ..ops.rules import facts
from ..program.program import Function, Line, Program
from .cluster import Cluster

TimePart = Literal["products", "other"]
_ATTENTION = re.compile(r"parc\.attention(_backward)?\.")
_CAUSAL_AT = 5, 8
"""The position of the argument that says whether attention hides later keys, half of its work; in backward."""
_PASSES = 7, 9
"""The times that unfused attention reads or writes the scores: scaling, mask, softmax (two), dropout (two), the
product; in backward those of their gradients."""


@dataclass(frozen=True, slots=True)
class Habits:
    """The habits of a system, which programs do not say. Those of parc: fused attention, and a kernel for each line."""

    compiled: bool = False
    """True where lines between products are fused, as `--compile` does."""
    fused_attention: bool = True
    """False where scores are written to memory, and read again."""
    overlap: bool = True
    """False where sums of gradients, and gathers of weights, start when all else is done, and are awaited at once."""
    blocking_sends: bool = False
    """True where a stage waits until the next one has its results."""
    own_norms: bool = False
    """True where norms are kernels of their own beside fused lines, as in apex and Transformer Engine."""
    half_gradients: bool = False
    """True where gradients are summed over ranks in two bytes an entry, whatever programs say."""


@dataclass(frozen=True, slots=True)
class LineTime:
    """The seconds of a line on the queue that computes, and the part of a step that they belong to."""

    seconds: float
    part: TimePart


NOTHING = LineTime(0.0, "other")


def product_seconds(cluster: Cluster, dtype: str, shape: Sequence[int], multiply_adds: int) -> float:
    """Return the time of a product: ``shape`` is that of its result, ``[batch, m, n]``."""
    products = cluster.products
    batch, rows, columns = shape
    inner = multiply_adds / max(1, batch * rows * columns)
    shares = (
        share * batch * rows * columns / (_rounds(batch, rows / high, columns / wide, products.units) * high * wide)
        for high, wide, share in cluster.tiles
    )
    share = products.top * max(shares) / (1 + products.ramp / max(1.0, inner))
    return 2 * multiply_adds / (cluster.peak_of(dtype) * share)


def _rounds(batch: int, high: float, wide: float, units: float) -> float:
    """Return the tiles for which all units have time in the rounds that a product of so many tiles takes."""
    return math.ceil(batch * math.ceil(high) * math.ceil(wide) / units) * units


class LineTimes:
    """The times of the lines of one program's functions."""

    def __init__(self, program: Program, cluster: Cluster, habits: Habits, views: Mapping[str, Aliases]) -> None:
        self.program, self.cluster, self.habits, self.views = program, cluster, habits, views

    def of(self, function: Function) -> list[LineTime]:
        """Return the time of each line of a function; of a call, and of a message, only what the process needs."""
        times = [self._line(line, function) for line in function.lines]
        if self.habits.compiled:
            for at, seconds in self._fused(function):
                times[at] = LineTime(seconds, "other")
        return times

    def _line(self, line: Line, function: Function) -> LineTime:
        call = self.cluster.device.call
        if line.calls_function or line.op == WAIT:
            return NOTHING
        if line.op in COLLECTIVES and line.op not in RINGS and COLLECTIVES[line.op].communicates:
            return LineTime(call, "other")
        work = self._multiply_adds(line, function)
        if work:
            return LineTime(call + self._product(line, function, work), "products")
        if self._is_view(line, function):
            return LineTime(call, "other")
        return LineTime(call + self._streamed(line, function), "other")

    def _is_view(self, line: Line, function: Function) -> bool:
        """Return whether all results of a line lie in storages of its operands."""
        root = self.views[function.name].root
        read = {root.get(name, name) for name in line.uses}
        return bool(line.made) and all(root.get(value.name, value.name) in read for value in line.made)

    # ---- products

    def _multiply_adds(self, line: Line, function: Function) -> int:
        """Count the multiply-adds of a line; of a ring those of its attention with the keys of all ranks."""
        if line.op not in RINGS:
            return multiply_adds(line, function.values(), self.program.mesh)
        call, axes = local_call(line, function.values(), self.program.mesh), axes_of(line.args[1:])
        count = facts(call.op).flops
        return 0 if count is None else count(call) * math.prod(map(self.program.mesh.size, axes))

    def _product(self, line: Line, function: Function, work: int) -> float:
        values, mesh, cluster = function.values(), self.program.mesh, self.cluster
        call = local_call(line, values, mesh)
        dtype = str(values[line.uses[0]].type.dtype).removeprefix("torch.")
        row = facts(line.op)
        seconds = 0.0
        if _ATTENTION.match(call.op):
            seconds = self._attention(call, work, dtype)
        elif row.packs:
            seconds = 2 * work / (cluster.peak_of(dtype) * cluster.products.grouped)
        else:
            shape = call.results[0] or (1,)
            batched = len(shape) > 2 and all(len(operand) > 2 for operand in call.operands[:2])
            batch = math.prod(shape[:-2]) if batched else 1
            rows = shape[-2] if batched else math.prod(shape[:-1])
            seconds = product_seconds(cluster, dtype, (batch, rows, shape[-1]), work)
        size = self._bytes(line, function)
        return max(seconds, size / cluster.bandwidth(size), cluster.device.launch)

    def _attention(self, call: OpCall, work: int, dtype: str) -> float:
        cluster, backward = self.cluster, facts(call.op).backward
        causal = bool(call.args[_CAUSAL_AT[backward]])
        products = cluster.products
        if self.habits.fused_attention:
            share = products.attention_backward if backward else products.attention
            return 2 * work * (0.5 if causal else 1) / (cluster.peak_of(dtype) * share)
        queries, keys = call.operands[int(backward)], call.operands[1 + int(backward)]
        batch = queries[0] * queries[1]
        several = 5 if backward else 2  # products, of which backward need not make the scores again
        each = work // several
        products_of_scores = 4 if backward else 2
        flat = product_seconds(cluster, dtype, (batch, queries[2], keys[2]), each) * products_of_scores
        scores = batch * queries[2] * keys[2] * 2
        passes = _PASSES[backward]
        return flat + passes * max(cluster.device.launch, scores / cluster.bandwidth(scores))

    # ---- other lines

    def _streamed(self, line: Line, function: Function) -> float:
        size = self._bytes(line, function)
        slow = self.cluster.operators.get(line.op.split(".")[1], 0.0) if self.cluster.operators else 0.0
        entries = 0
        if slow:
            entries = max(math.prod(shape) for shape in self._shapes(line, function))
        return max(size / self.cluster.bandwidth(size), entries * slow, self.cluster.device.launch)

    def _shapes(self, line: Line, function: Function) -> Iterator[Sequence[int]]:
        values = function.values()
        for name in (*line.uses, *(value.name for value in line.made)):
            yield values[name].type.local(self.program.mesh)

    def _bytes(self, line: Line, function: Function) -> int:
        """Return the bytes that a line reads and writes; of a table only the rows that it looks up."""
        values, row = function.values(), facts(line.op)
        read = dict.fromkeys(line.uses)
        if row.looks_up or row.moves == "place":
            read.pop(line.uses[0], None)
        written = sum(local_bytes(value.type, self.program) for value in line.made)
        twice = 2 if row.looks_up or row.moves == "place" else 1
        return sum(local_bytes(values[name].type, self.program) for name in read) + twice * written

    # ---- fused lines

    def _fused(self, function: Function) -> Iterator[tuple[int, float]]:
        """Yield the lines that are fused with others, each with the time of what it reads and writes for the group:
        values outside it, and results that others read. A group ends where a product, a call or a message stands."""
        values, group, groups = function.values(), 0, list[int]()
        for line in function.lines:
            fusible = self._is_fusible(line)
            group += not fusible and not self._is_view(line, function)
            groups.append(group if fusible else -1)
        root = self.views[function.name].root
        leaves = {root.get(name, name) for _, name in function.returns}
        readers: dict[str, set[int]] = {}
        for at, line in enumerate(function.lines):
            for name in line.uses:
                readers.setdefault(root.get(name, name), set()).add(groups[at])
        read: dict[int, set[str]] = {}
        made_in: dict[str, int] = {}
        sums: dict[int, float] = {}
        of_line: dict[int, float] = {}
        for at, line in enumerate(function.lines):
            if groups[at] < 0:
                continue
            size = 0
            for name in (root.get(name, name) for name in line.uses):
                seen = read.setdefault(groups[at], set())
                if made_in.get(name, -1) != groups[at] and name not in seen and name in values:
                    seen.add(name)
                    size += local_bytes(values[name].type, self.program)
            for value in line.made:
                if root.get(value.name, value.name) == value.name:
                    made_in[value.name] = groups[at]
                    if value.name in leaves or readers.get(value.name, set()) - {groups[at]}:
                        size += local_bytes(value.type, self.program)
            of_line[at] = size
            sums[groups[at]] = sums.get(groups[at], 0) + size
        for at, moved in of_line.items():
            total = sums[groups[at]]
            seconds = max(total / self.cluster.bandwidth(total), self.cluster.device.launch) if total else 0.0
            yield at, seconds * moved / total if total else 0.0

    def _is_fusible(self, line: Line) -> bool:
        if line.calls_function or line.op in COLLECTIVES or line.op in RINGS:
            return False
        row = facts(line.op)
        drawn = row.key_at is not None and row.precision != "product"
        norm = row.precision == "sensitive" and not self.habits.own_norms
        moves = row.moves in ("copy", "shape", "dims", "place", "join")
        constant = row.number is not None
        return bool(row.elementwise or row.reduces or row.casts or constant or drawn or norm or moves)
