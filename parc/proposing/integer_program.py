"""The integer program of placements: for every operator of a model one of the ways in which its rule lets it be split
over an axis, so that messages, and what stays undivided, cost least. HiGHS solves it.

It is the formulation of Alpa ("Automating inter- and intra-operator parallelism for distributed deep learning", 2022,
section 4), with types in place of shardings: a value that is partial, or whole for readers that are split, costs in
forward, in backward, or in both. Equal blocks share their unknowns, so a hundred layers cost as much as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.clock.lines import product_seconds
from parc.compiler.clock.links import Links
from parc.compiler.layout.collectives import COLLECTIVES, SMALL_SUM
from parc.compiler.layout.placement import AxisType, Placement, Split
from parc.compiler.layout.stretches import is_zigzag, nest
from parc.compiler.ops.infer import Part
from parc.compiler.ops.rules import facts
from parc.compiler.ops.splits import from_factor, to_factor
from parc.compiler.program.binding import BUFFERS
from parc.passes.calls import ValueKey, call_of, computes, fake, key_of, operands_of, substitute_nodes, tensors_of
from parc.passes.placing.partition import EXPANSIONS, Partition
from parc.passes.placing.propagate import Placed

Unit = tuple[object, ...]
"""The name of an operator or a parameter that equal blocks have in common."""
_HALVES = 2
"""Forward and backward: a value goes through both."""
_START = SMALL_SUM
"""The bytes that a message costs beside its own, where no cluster says what it takes to start one."""


class NoSolver(Exception):
    """The error that the solver is not installed."""

    def __init__(self) -> None:
        super().__init__("placements are found by scipy's HiGHS, which is not installed")
        self.help = 'install it: `pip install "parc-compiler[search]"`'


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute an operator over the axis: the types that its operands must have, those of its results, and the
    price of doing so."""

    wants: tuple[AxisType, ...]
    gives: tuple[AxisType, ...]
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of messages over an axis, and of work that its ranks do not divide: in bytes that a rank sends, or in
    seconds on a cluster, if there are ``links``.

    What is not divided is priced as though it was sent: the values that a product or a lookup reads and makes, in
    forward and in backward, and the state of a weight. So a product is divided wherever that sends less than gathering
    all its values would. On a cluster the product's own time comes to that.
    """

    axis: str
    ranks: int
    links: Links | None = None

    def message(self, op: str, size: float) -> float:
        """Return the price of a collective on a whole value of ``size`` bytes."""
        put_in = int(size if op in ("all_reduce", "reduce_scatter", "row_max") else size / self.ranks)
        if self.links is not None:
            return self.links.seconds(op, (self.axis,), put_in)
        return _START + COLLECTIVES[f"parc.{op}"].sent(put_in, self.ranks)

    def state(self, size: float) -> float:
        """Return the price of a weight of which every rank has the whole state: the time in which an update reads it
        once more than it must, or as many bytes."""
        rest = size * (1 - 1 / self.ranks)
        return rest if self.links is None else rest / self.links.cluster.bandwidth(rest)

    def product(self, node: fx.Node, size: float) -> float:
        """Return the price of a product or a lookup that every rank computes as a whole, on values of so many bytes."""
        price = _HALVES * self.message("all_gather", size)
        row, (result, *_) = facts(node.target), tensors_of(node)
        if self.links is None or row.flops is None:
            return price
        work, shape = row.flops(call_of(node)), tuple(result.shape) or (1,)
        dtype = str(result.dtype).removeprefix("torch.")
        whole = product_seconds(self.links.cluster, dtype, (1, math.prod(shape[:-1]), shape[-1]), work)
        return price + (1 + _HALVES) * whole * (1 - 1 / self.ranks)


class WireBytes(Prices):
    """The bytes that a rank sends over an axis, whatever stays undivided."""

    def message(self, op: str, size: float) -> float:
        """Return the bytes that a rank sends."""
        return super().message(op, size) - _START

    def state(self, size: float) -> float:
        """Return 0: a weight at rest is not sent."""
        return 0.0

    def product(self, node: fx.Node, size: float) -> float:
        """Return 0: a product sends nothing."""
        return 0.0


class Ways:
    """The ways of all operators of a graph to be split over an axis, as its weights could be split, one at a time, and
    what follows; and the prices of conversions between. ``placed`` has where values lie without such a split."""

    def __init__(
        self, graph: fx.Graph, placed: Placed, partition: Partition, prices: Prices, microbatches: int, moments: int,
        samples: Mapping[ValueKey, Sequence[tuple[int, Any]]],
    ) -> None:  # fmt: skip
        self.graph, self.placed, self.prices, self.microbatches, self.moments = (
            graph, placed, prices, microbatches, moments,
        )  # fmt: skip
        self.mesh, self.axis, self.partition = partition.mesh, prices.axis, partition
        self._samples = samples
        """The dims of a value that are samples or positions of an input: weights do not split these."""
        self.splits: dict[ValueKey, dict[Split, None]] = {}
        self.parts: dict[fx.Node, dict[Part, None]] = {node: {} for node in graph.nodes if computes(node)}
        self._terms: dict[ValueKey, list[fx.Node]] = {}
        for node in self.parts:
            for key, _ in self._dims(node):
                self._terms.setdefault(key, []).append(node)
        for key, axes in placed.splits.items():
            if self.axis in axes:
                self.splits.setdefault(key, {})[axes[self.axis]] = None
        for node, parts in self.parts.items():
            if self.axis in placed.parts[node]:
                parts[placed.parts[node][self.axis]] = None

    def priced(self, prices: Prices) -> Ways:
        """Return the same ways at other prices."""
        same = copy(self)
        same.prices = prices
        return same

    def _dims(self, node: fx.Node) -> Iterator[tuple[ValueKey, Any]]:
        """Yield the operands and results of an operator, each with the factors of its dims."""
        rule = self.placed.rules[node]
        yield from zip(map(key_of, operands_of(node)), rule.operands, strict=True)
        yield from (((node, index), dims) for index, dims in enumerate(rule.results))

    def begin(self, parameter: fx.Node) -> None:
        """Let a weight be split along each of its dims, and all values as follows from that, forward and backward."""
        pending = [((parameter, 0), Split(dim)) for dim in range(fake((parameter, 0)).dim())]
        while pending:
            key, split = pending.pop()
            if split in self.splits.get(key, ()) or not self._fits(key, split):
                continue
            self.splits.setdefault(key, {})[split] = None
            for node in self._terms.get(key, ()):
                rule = self.placed.rules[node]
                for other, dims in self._dims(node):
                    part = to_factor(rule, dims, split.dim, split.outer, self.prices.ranks) if other == key else None
                    if part is None or part in self.parts[node] or not self._divides(node, part):
                        continue
                    places = [(value, from_factor(rule, names, *part)) for value, names in self._dims(node)]
                    whole = [(value, Split(*at)) for value, at in places if at is not None]
                    by_rows = not facts(node.target).looks_up or (operands_of(node)[0], ) not in {
                        (value[0],) for value, at in whole if at.dim != 0}
                    if by_rows and all(self._fits(*place) for place in whole):
                        self.parts[node][part] = None
                        pending += whole

    def _divides(self, node: fx.Node, part: Part) -> bool:
        """Return whether an operator can be split so, beside the other axes that split it."""
        rule = self.placed.rules[node]
        name, outer = part
        if name in rule.whole and not facts(node.target).reroutes:
            return False
        taken = [(o, axis) for axis, (n, o) in self.placed.parts[node].items() if n == name and axis != self.axis]
        return self._nests(rule.sizes[name], [*taken, (outer, self.axis)])

    def _fits(self, key: ValueKey, split: Split) -> bool:
        """Return whether a value can be split so, beside the other axes that split it."""
        if is_zigzag(split.outer):
            return False
        packs = noted(key[0]).packed is not None
        if (split.dim, split.outer) in self._samples.get(key, ()) and not packs and split not in self.splits.get(key, ()):
            return False
        taken = [(other.outer, axis) for axis, other in self.placed.splits[key].items()
                 if other.dim == split.dim and axis != self.axis]  # fmt: skip
        return self._nests(fake(key).shape[split.dim], [*taken, (split.outer, self.axis)])

    def _nests(self, size: int, parts: Sequence[tuple[Any, str]]) -> bool:
        return nest(size, [(outer, self.mesh.size(axis)) for outer, axis in parts])

    # ---- one operator

    def of(self, node: fx.Node) -> list[Way]:
        """Return the ways of an operator, or of a placeholder to lie. The way ``I`` comes first."""
        if node.op == "placeholder":
            return self._of_placeholder(node)
        rule, grads = self.placed.rules[node], self.partition.grad
        keys = [key_of(operand) for operand in operands_of(node)]
        results = [(node, index) for index in range(len(rule.results))]
        read = tuple("R" if grads[key] else "I" for key in keys)
        price = self.prices.product(node, self._moved(node)) * self.microbatches if self.works(node) else 0.0
        ways = [Way(("I",) * len(keys), ("I",) * len(results), price)]
        if "R" in read and grads.get(results[0]):
            ways.append(Way(read, tuple("R" if grads.get(key) else "I" for key in results), price))
        for together in rule.linear if grads.get(results[0]) else ():
            wants = tuple("P" if index in together else kind for index, kind in enumerate(read))
            ways += self._reduced(Way(wants, ("P",) * len(results), price), results)
        for part in self.parts[node]:
            wants = tuple(self._type(rule, dims, part, kind) for dims, kind in zip(rule.operands, read, strict=True))
            gives = tuple(self._type(rule, dims, part, "P") for dims in rule.results)
            if node.target in EXPANSIONS and "P" in gives:  # sums and peaks of its rows are exchanged, no more
                rows = self._bytes(results[0]) * self.microbatches
                sent = self.prices.message("all_reduce", 2 * rows) + self.prices.message("row_max", rows)
                ways.append(Way(wants, ("I",) * len(results), sent))
            else:
                ways += self._reduced(Way(wants, gives), results)
        return ways

    @staticmethod
    def _type(rule: Any, dims: Any, part: Part, otherwise: AxisType) -> AxisType:
        at = from_factor(rule, dims, *part)
        return otherwise if at is None else Split(*at)

    def _of_placeholder(self, node: fx.Node) -> list[Way]:
        key, kind = (node, 0), noted(node).binding.kind
        lies = self.placed.splits[key].get(self.axis, "I")
        if kind not in ("parameter", "frozen", *BUFFERS):
            return [Way((), (lies,))]
        state = 0
        if kind != "buffer":
            state = fake(key).nbytes * (2 + self.moments if kind == "parameter" else 1)
        whole = Way((), ("I",), self.prices.state(state))
        return [whole, *(Way((), (split,)) for split in self.splits.get(key, ()))]

    def _reduced(self, way: Way, results: Sequence[ValueKey]) -> Iterator[Way]:
        """Yield a way, and the same with its partial results summed for all readers at once."""
        yield way
        if "P" not in way.gives or noted(results[0][0]).packed is not None:
            return
        for kind in ("I", *(self.splits.get(results[0], ()) if len(results) == 1 else ())):
            prices = [self.conversion(key, "P", kind) for key, given in zip(results, way.gives, strict=True)
                      if given == "P"]  # fmt: skip
            gives = tuple(kind if given == "P" else given for given in way.gives)
            yield Way(way.wants, gives, way.price + sum(price for price in prices if price is not None))

    def works(self, node: fx.Node) -> bool:
        """Return whether an operator is worth dividing: a product, or a lookup of what depends on the samples."""
        row = facts(node.target)
        pure = self.partition.pure
        return row.precision == "product" or (row.looks_up and any(n not in pure for n in operands_of(node)[1:]))

    def _moved(self, node: fx.Node) -> float:
        """Return the bytes of the values that an operator reads and makes, without weights."""
        read = {key_of(operand) for operand in operands_of(node)}
        values = [key for key in read if key[0].op != "placeholder" and fake(key).is_floating_point()]
        return sum(map(self._bytes, [*values, (node, 0)]))

    # ---- one value

    def _bytes(self, key: ValueKey) -> float:
        """Return the bytes of a value on the ranks of the axis together, in a microbatch."""
        others = {axis: split for axis, split in self.placed.splits[key].items() if axis != self.axis}
        there, rows = noted(key[0]).packed or (1, 1)
        local = self.partition.type_of(key, Placement.of(self.mesh, others)).local(self.mesh)
        return math.prod(local) * fake(key).dtype.itemsize * there / rows

    def conversion(self, key: ValueKey, have: AxisType, want: AxisType) -> float | None:
        """Return the price of a value of one type for readers that want another one, with that of its gradient; None
        where there is no such conversion."""
        grads = self.partition.grad[key]
        if have == want or (not grads and key[0] in self.partition.pure and "P" not in (have, want)):
            return 0.0
        sent = _MESSAGES.get((_kind(have), _kind(want)))
        if sent is None or (have == "R" and want == "I" and grads):
            return None
        size, times = self._bytes(key), self.microbatches
        if key[0].op == "placeholder" and (have, want) == ("I", "R"):
            times = 1  # its gradient is summed once a step
        return times * sum(self.prices.message(op, size) for op in sent[: 1 + grads] if op)


_MESSAGES: Mapping[tuple[str, str], tuple[str, str]] = {
    ("I", "R"): ("", "all_reduce"),
    ("I", "S"): ("", "all_gather"),
    ("R", "I"): ("", ""),
    ("R", "S"): ("", ""),
    ("P", "I"): ("all_reduce", ""),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("S", "I"): ("all_gather", ""),
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "S"): ("all_to_all", "all_to_all"),
}
"""The messages of a conversion in forward, and in backward."""


def _kind(type_: AxisType) -> str:
    return "S" if isinstance(type_, Split) else type_


# ---- equal blocks


def shared_units(ways: Ways) -> dict[fx.Node, Unit]:
    """Return a name for every node: equal blocks have the same names."""
    blocks: dict[str, list[fx.Node]] = {}
    for node in ways.parts:
        if (block := noted(node).block) is not None:
            blocks.setdefault(block, []).append(node)
    units: dict[fx.Node, Unit] = {}
    for block, nodes in blocks.items():
        place = {node: at for at, node in enumerate(nodes)}
        inner: dict[fx.Node, str] = {}

        def token(operand: fx.Node, block: str = block, place: Any = place, inner: Any = inner) -> object:
            of = key_of(operand)[0]
            if of in place:
                return f"%{place[of]}.{key_of(operand)[1]}"
            name = noted(of).binding.name if of.op == "placeholder" else ""
            if name.startswith(f"{block}."):
                inner[of] = name.removeprefix(f"{block}.")
                return f"{inner[of]} {sorted(map(str, ways.splits.get((of, 0), ())))}"
            return f"outside {tuple(fake(key_of(operand)).shape)}"

        signature = tuple(
            (str(node.target), str(substitute_nodes((node.args, node.kwargs), token)), sorted(map(str, ways.parts[node])))
            for node in nodes
        )  # fmt: skip
        key = hash(str(signature))
        units |= {node: (key, at) for node, at in place.items()}
        units |= {node: (key, name) for node, name in inner.items()
                  if all(noted(user).block == block for user in node.users)}  # fmt: skip
    return {node: units.get(node, (node.name,)) for node in ways.graph.nodes if computes(node) or node.op == "placeholder"}


_Value = tuple[Unit, int, frozenset[tuple[Unit, int]]]
"""A value of equal blocks: its maker, the index of the result, and its readers, each with the index of the operand."""


def _values(units: Mapping[fx.Node, Unit]) -> dict[_Value, list[ValueKey]]:
    """Return all values that operators read, those of equal blocks together."""
    readers: dict[ValueKey, set[tuple[Unit, int]]] = {}
    for node in filter(computes, units):
        for index, operand in enumerate(operands_of(node)):
            readers.setdefault(key_of(operand), set()).add((units[node], index))
    alike: dict[_Value, list[ValueKey]] = {}
    for key, reading in readers.items():
        alike.setdefault((units[key[0]], key[1], frozenset(reading)), []).append(key)
    return alike


# ---- the program


@dataclass
class _Rows:
    """The columns and rows of a program, as the solver takes them."""

    prices: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    bounds: list[tuple[float, float]] = field(default_factory=list)

    def column(self, price: float, sent: float, *, whole: bool = False) -> int:
        self.prices.append(price)
        self.sent.append(sent)
        self.whole.append(whole)
        return len(self.prices) - 1

    def row(self, entries: Mapping[int, float], low: float, high: float) -> None:
        self.entries += [(len(self.bounds), column, value) for column, value in entries.items()]
        self.bounds.append((low, high))


def solver() -> Any:
    """Return the modules of the solver.

    Raises:
        NoSolver: it is not installed.
    """
    try:
        return import_module("scipy.optimize"), import_module("scipy.sparse")
    except ImportError:
        raise NoSolver from None


Columns = Mapping[AxisType, Sequence[int]]
"""The choices that give a value a type, or want it so."""


def _by_type(columns: Sequence[int], types: Sequence[AxisType]) -> Columns:
    by_type: dict[AxisType, list[int]] = {}
    for column, type_ in zip(columns, types, strict=True):
        by_type.setdefault(type_, []).append(column)
    return by_type


def _add_value(
    rows: _Rows, ways: Ways, wires: Ways, keys: Sequence[ValueKey], made: Columns, read: Sequence[Columns]
) -> None:
    """Add the conversions of a value, which stands for equal ones: one from each type that it may have to each that a
    reader may want."""
    for want in dict.fromkeys(type_ for columns in read for type_ in columns):
        conversions: dict[int, float] = {}
        for have, makers in made.items():
            price, sent = (each.conversion(keys[0], have, want) for each in (ways, wires))
            if price is not None and sent is not None:
                column = rows.column(price * len(keys), sent * len(keys))
                rows.row({column: 1.0, **dict.fromkeys(makers, -1.0)}, -math.inf, 0)
                conversions[column] = 1.0
        for columns in read:
            if want in columns:
                rows.row({**conversions, **dict.fromkeys(columns[want], -1.0)}, 0, math.inf)


def solve(ways: Ways, limit: float, most_bytes: float = math.inf) -> dict[fx.Node, Split] | None:
    """Return the splits of parameters in the cheapest of all choices of ways, of those that send at most so many bytes;
    None where the solver has none within ``limit`` seconds.

    Raises:
        NoSolver: it is not installed.
    """
    wires = ways.priced(WireBytes(ways.axis, ways.prices.ranks))
    optimize, sparse = solver()
    units, rows = shared_units(ways), _Rows()
    count: dict[Unit, int] = {}
    for unit in units.values():
        count[unit] = count.get(unit, 0) + 1
    first: dict[Unit, fx.Node] = {}
    for node, unit in units.items():
        first.setdefault(unit, node)
    choices = {unit: ways.of(node) for unit, node in first.items()}
    columns = {
        unit: [rows.column(way.price * count[unit], wire.price * count[unit], whole=True)
               for way, wire in zip(choices[unit], wires.of(node), strict=True)]
        for unit, node in first.items()
    }  # fmt: skip
    for chosen in columns.values():
        rows.row(dict.fromkeys(chosen, 1.0), 1, 1)
    for (maker, index, readers), keys in _values(units).items():
        _add_value(rows, ways, wires, keys, _by_type(columns[maker], [way.gives[index] for way in choices[maker]]),
                   [_by_type(columns[unit], [way.wants[at] for way in choices[unit]]) for unit, at in readers])  # fmt: skip
    if math.isfinite(most_bytes):
        largest = max(most_bytes, 1.0)
        rows.row({column: sent / largest for column, sent in enumerate(rows.sent) if sent}, 0, most_bytes / largest)
    lows, highs = zip(*rows.bounds, strict=True)
    at, column, value = zip(*rows.entries, strict=True)
    scale = max(rows.prices) or 1.0
    matrix = sparse.csr_matrix((value, (at, column)), (len(rows.bounds), len(rows.prices)))
    result = optimize.milp(
        [price / scale for price in rows.prices], integrality=[int(whole) for whole in rows.whole],
        bounds=optimize.Bounds(0, 1), constraints=optimize.LinearConstraint(matrix, lows, highs),
        options={"time_limit": limit, "mip_rel_gap": 1e-4},
    )  # fmt: skip
    if result.x is None:
        return None
    splits: dict[fx.Node, Split] = {}
    for node, unit in units.items():
        if node.op == "placeholder" and noted(node).binding.kind in ("parameter", "frozen"):
            at_ = max(range(len(columns[unit])), key=lambda index: result.x[columns[unit][index]])
            kind = choices[unit][at_].gives[0]
            if isinstance(kind, Split):
                splits[node] = kind
    return splits
