"""The time of lines: products by their operations and shapes, all others by the bytes that they read and write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..analysis.dataflow import local_call
from ..analysis.flops import counted, multiply_adds
from ..analysis.lifetimes import Aliases
from ..analysis.liveness import local_bytes
from ..layout.collectives import COLLECTIVES, RINGS, WAIT, axes_of
from ..layout.sweep import Amount, greatest, rounded_up
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
    barrier: bool = True
    """False where a rank begins the next step without waiting for others: the norm over all is looked at later, and
    the update taken back if it should not have been made."""
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


def product_seconds(cluster: Cluster, dtype: str, shape: Sequence[int], multiply_adds: int) -> Amount:
    """Return the time of a product: ``shape`` is that of its result, ``[batch, m, n]``."""
    products = cluster.products
    batch, rows, columns = shape
    inner = multiply_adds / greatest(1, batch * rows * columns)
    shares = (
        share * batch * rows * columns / (_rounds(batch, rows / high, columns / wide, products.units) * high * wide)
        for high, wide, share in cluster.tiles
    )
    share = products.top * greatest(*shares) / (1 + products.ramp / greatest(1.0, inner))
    return 2 * multiply_adds / (cluster.peak_of(dtype) * share)


def _rounds(batch: int, high: float, wide: float, units: float) -> Amount:
    """Return the tiles for which all units have time in the rounds that a product of so many tiles takes."""
    return rounded_up(batch * rounded_up(high) * rounded_up(wide) / units) * units


class LineTimes:
    """The times of the lines of one program's functions."""

    def __init__(self, program: Program, cluster: Cluster, habits: Habits, views: Mapping[str, Aliases]) -> None:
        self.program, self.cluster, self.habits, self.views = program, cluster, habits, views

    def of(self, function: Function) -> list[LineTime]:
        """Return the time of each line of a function; of a call, and of a message, only what the process needs."""
        storage = _Storages(function, self.views[function.name])
        times = [self._line(line, function, at in storage.views) for at, line in enumerate(function.lines)]
        if self.habits.compiled:
            for at, seconds in self._fused(function, storage):
                times[at] = LineTime(seconds, "other")
        return times

    def _line(self, line: Line, function: Function, is_view: bool) -> LineTime:
        call = self.cluster.device.call
        if line.calls_function or line.op == WAIT:
            return NOTHING
        if line.op in COLLECTIVES and line.op not in RINGS and COLLECTIVES[line.op].communicates:
            local = self._streamed(line, function) if facts(line.op).reduces else 0.0
            return LineTime(call + local, "other")
        work = self._multiply_adds(line, function)
        if work is not None:
            return LineTime(call + self._product(line, function, work), "products")
        if is_view:
            return LineTime(call, "other")
        return LineTime(call + self._streamed(line, function), "other")

    # ---- products

    def _multiply_adds(self, line: Line, function: Function) -> int | None:
        """Count the multiply-adds of a line, None if it is no product; of a ring those of its attention with the keys
        of all ranks."""
        if line.op not in RINGS:
            product = facts(line.op).flops is not None
            return multiply_adds(line, function.values(), self.program.mesh) if product else None
        call, axes = local_call(line, function.values(), self.program.mesh), axes_of(line.args[1:])
        count = facts(call.op).flops
        return (
            None
            if count is None
            else counted(count, call, self.program.mesh) * math.prod(map(self.program.mesh.size, axes))
        )

    def _product(self, line: Line, function: Function, work: int) -> Amount:
        values, mesh, cluster = function.values(), self.program.mesh, self.cluster
        call = local_call(line, values, mesh)
        dtype = str(values[line.uses[0]].type.dtype).removeprefix("torch.")
        row = facts(line.op)
        seconds = 0.0
        if _ATTENTION.match(call.op):
            seconds = self._attention(call, work, dtype)
        elif row.packs:
            ramp = cluster.products.grouped_ramp / greatest(1.0, self._rows_of_expert(line, function))
            seconds = 2 * work * (1 + ramp) / (cluster.peak_of(dtype) * cluster.products.grouped)
        else:
            shape = call.results[0] or (1,)
            batched = len(shape) > 2 and all(len(operand) > 2 for operand in call.operands[:2])
            batch = math.prod(shape[:-2]) if batched else 1
            rows = shape[-2] if batched else math.prod(shape[:-1])
            seconds = product_seconds(cluster, dtype, (batch, rows, shape[-1]), work)
        size = self._bytes(line, function)
        read = size / cluster.bandwidth(size)
        return greatest(seconds + cluster.products.reading * read, read, cluster.device.launch)

    def _rows_of_expert(self, line: Line, function: Function) -> Amount:
        """Return the rows of each expert in a grouped product, if all are chosen equally often."""
        types = [function.values()[name].type for name in line.uses]
        chosen = next(type_ for type_ in types if not type_.dtype.is_floating_point)
        present, rows = types[0].packed or (1, 1)
        return chosen.local(self.program.mesh)[1] * present / rows

    def _attention(self, call: OpCall, work: int, dtype: str) -> Amount:
        cluster, backward = self.cluster, facts(call.op).backward
        causal = bool(call.args[_CAUSAL_AT[backward]])
        products = cluster.products
        queries, keys = call.operands[int(backward)], call.operands[1 + int(backward)]
        if self.habits.fused_attention:
            share = products.attention_backward if backward else products.attention
            ramp = products.attention_ramp / greatest(1.0, keys[2])
            return 2 * work * (0.5 if causal else 1) * (1 + ramp) / (cluster.peak_of(dtype) * share)
        batch = queries[0] * queries[1]
        several = 5 if backward else 2  # products, of which backward need not make the scores again
        each = work // several
        products_of_scores = 4 if backward else 2
        flat = product_seconds(cluster, dtype, (batch, queries[2], keys[2]), each) * products_of_scores
        scores = batch * queries[2] * keys[2] * 2
        passes = _PASSES[backward]
        return flat + passes * greatest(cluster.device.launch, scores / cluster.bandwidth(scores))

    # ---- other lines

    def _streamed(self, line: Line, function: Function) -> Amount:
        size = self._bytes(line, function)
        slow = self.cluster.operators.get(line.op.split(".")[1], 0.0) if self.cluster.operators else 0.0
        entries = 0
        if slow:
            entries = greatest(*self._entries(line, function))
        return greatest(size / self.cluster.bandwidth(size), entries * slow, self.cluster.device.launch)

    def _entries(self, line: Line, function: Function) -> Iterator[Amount]:
        """Yield the entries of each operand and result of a line, but for the table that rows are looked up in or added
        to."""
        values, row = function.values(), facts(line.op)
        operands = [values[name].type for name in line.uses[int(row.looks_up) :]]
        for type_ in (*operands, *(value.type for value in line.made if not row.unread_rows)):
            yield local_bytes(type_, self.program) / type_.dtype.itemsize

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

    def _fused(self, function: Function, storage: _Storages) -> Iterator[tuple[int, float]]:
        """Yield the lines that are fused with others, each with the time of what it reads and writes for the group:
        values outside it, and results that others read. A group ends where a product, a call or a message stands. A
        cast to a wider type is made again by each group that reads it."""
        values, groups = function.values(), self._groups(function, storage)
        leaves = {storage.root(name) for _, name in function.returns}
        read_by: dict[str, set[int]] = {}
        for at, line in enumerate(function.lines):
            for name in line.uses if at not in storage.views else ():
                read_by.setdefault(storage.root(name), set()).add(groups[at])
        again: dict[str, str] = {}
        for at, line in enumerate(function.lines):
            if groups[at] >= 0 and _widens(line, function):
                name, source = line.made[0].name, storage.root(line.uses[0])
                if name not in leaves and -1 not in read_by.get(name, ()):
                    again[name] = again.get(source, source)
                    read_by[again[name]] |= read_by.get(name, set())
        sizes: dict[int, dict[int, int]] = {}
        seen, made_in = set[tuple[int, str]](), dict[str, int]()
        for at, line in enumerate(function.lines):
            if (group := groups[at]) < 0 or at in storage.views or (line.made and line.made[0].name in again):
                continue
            size = 0
            for name in (again.get(storage.root(name), storage.root(name)) for name in line.uses):
                if made_in.get(name, -1) != group and (group, name) not in seen and name in values:
                    seen.add((group, name))
                    size += local_bytes(values[name].type, self.program)
            for value in line.made:
                if storage.root(value.name) == value.name:
                    made_in[value.name] = group
                    if value.name in leaves or read_by.get(value.name, set()) - {group}:
                        size += local_bytes(value.type, self.program)
            sizes.setdefault(group, {})[at] = size
        yield from ((at, 0.0) for at, group in enumerate(groups) if group >= 0)
        for of_group in sizes.values():
            total = sum(of_group.values())
            seconds = max(total / self.cluster.bandwidth(total), self.cluster.device.launch) if total else 0.0
            yield from ((at, seconds * moved / total) for at, moved in of_group.items() if moved)

    def _groups(self, function: Function, storage: _Storages) -> list[int]:
        """Return the group of each line, -1 for those that are not fused. Norms that are kernels of their own cast what
        they read and write themselves."""
        groups, group, of_norm = list[int](), 0, dict[str, int]()
        for at, line in enumerate(function.lines):
            row = None if line.calls_function else facts(line.op)
            source = storage.root(line.uses[0]) if line.uses else ""
            if row is not None and self.habits.own_norms and row.precision == "sensitive" and not row.reduces:
                of_norm.update((value.name, group + 1) for value in line.made)
                groups.append(group + 1)
                group += 2
            elif row is not None and row.casts and source in of_norm:
                groups.append(of_norm[source])
            elif self._is_fusible(line):
                groups.append(group)
            else:
                groups.append(-1)
                group += at not in storage.views
        return groups

    def _is_fusible(self, line: Line) -> bool:
        if line.calls_function or line.op in COLLECTIVES or line.op in RINGS:
            return False
        row = facts(line.op)
        drawn = row.key_at is not None and row.precision != "product"
        norm = row.precision == "sensitive"
        moves = row.moves in ("copy", "shape", "dims", "place", "join")
        constant = row.number is not None
        return bool(row.elementwise or row.reduces or row.casts or constant or drawn or norm or moves)


def _widens(line: Line, function: Function) -> bool:
    """Return whether a line only casts to a wider type."""
    if line.calls_function or not facts(line.op).casts:
        return False
    before, after = function.values()[line.uses[0]].type, line.made[0].type
    return after.dtype.itemsize > before.dtype.itemsize


def _permutes(line: Line, function: Function) -> bool:
    """Return whether a line may change the order of dims: it moves them, and adds and repeats none."""
    row, before = facts(line.op), function.values()[line.uses[0]].type.shape if line.uses else ()
    after = line.made[0].type.shape
    return row.moves == "dims" and len(before) == len(after) and math.prod(before) == math.prod(after)


class _Storages:
    """The storages of a function's values as a device has them: ``views`` are the lines that move no bytes. A permuted
    value is a view that is not contiguous, as products and attention read it; a reshape copies only such ones."""

    def __init__(self, function: Function, aliases: Aliases) -> None:
        self._root: dict[str, str] = {}
        self.views: set[int] = set()
        permuted = set[str]()
        for at, line in enumerate(function.lines):
            made = [value.name for value in line.made]
            if line.calls_function or not line.uses or not made:
                self._root.update((name, self.root(aliases.root.get(name, name))) for name in made)
                continue
            row, source = facts(line.op), line.uses[0]
            shared = [name for name in line.uses if {aliases.root[one] for one in made} == {aliases.root[name]}]
            if row.moves == "dims" or (shared and not (row.moves == "shape" and source in permuted)):
                self.views.add(at)
                first = self.root(shared[0] if shared else source)
                self._root.update(dict.fromkeys(made, first))
            if _ATTENTION.match(line.op):  # its results lie as its operands do
                turned = not permuted.isdisjoint(line.uses)
            else:
                turned = at in self.views and row.moves != "shape" and (source in permuted) != _permutes(line, function)
            permuted.update(made if turned else ())

    def root(self, name: str) -> str:
        """Return the first value in the same storage."""
        return self._root.get(name, name)
