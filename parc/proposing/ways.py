"""The ways in which a rule lets each operator of a model be split over an axis, and their prices: of messages, and of
what is not divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.clock.lines import product_seconds
from parc.compiler.clock.links import Links
from parc.compiler.layout.collectives import COLLECTIVES, SMALL_SUM
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import AxisType, Placement, Split, TensorType
from parc.compiler.layout.stretches import is_zigzag, nest
from parc.compiler.ops.factors import Dims, OpRule
from parc.compiler.ops.infer import Part
from parc.compiler.ops.rules import facts
from parc.compiler.ops.splits import from_factor, to_factor
from parc.compiler.program.binding import BUFFERS
from parc.passes.calls import ValueKey, call_of, computes, fake, key_of, operands_of, tensors_of
from parc.passes.placing.partition import Partition
from parc.passes.placing.propagate import Placed

_HALVES = 2
"""Forward and backward: a value goes through both."""
MESSAGE_START = SMALL_SUM
"""The bytes that a message costs beside its own, where no cluster says what it takes to start one."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute an operator over the axis: the types that its operands must have, None for any; those of its
    results; the price of doing so; and whether ranks divide the work, or a weight."""

    wants: tuple[AxisType | None, ...]
    gives: tuple[AxisType, ...]
    price: float = 0.0
    divided: bool = False


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
        return MESSAGE_START + COLLECTIVES[f"parc.{op}"].sent(put_in, self.ranks)

    def conversion(self, size: float, have: AxisType, want: AxisType, grads: bool) -> float | None:
        """Return the price of the conversion of a whole value of ``size`` bytes, and of its gradient, if it has one;
        None where there is no such conversion."""
        sent = _MESSAGES.get((_kind(have), _kind(want)))
        return None if sent is None else sum(self.message(op, size) for op in sent[: 1 + grads] if op)

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
        whole: float = product_seconds(self.links.cluster, dtype, (1, math.prod(shape[:-1]), shape[-1]), work)
        return price + (1 + _HALVES) * whole * (1 - 1 / self.ranks)


class WireBytes(Prices):
    """The bytes that a rank sends over an axis, whatever stays undivided."""

    def message(self, op: str, size: float) -> float:
        """Return the bytes that a rank sends."""
        return super().message(op, size) - MESSAGE_START

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

    def _dims(self, node: fx.Node) -> Iterator[tuple[ValueKey, Dims]]:
        """Yield the operands and results of an operator, each with the factors of its dims."""
        rule = self.placed.rules[node]
        yield from zip(map(key_of, operands_of(node)), rule.operands, strict=True)
        yield from (((node, index), dims) for index, dims in enumerate(rule.results))

    def begin(self, names: Callable[[str], bool]) -> None:
        """Let weights of these names be split along each of their dims, and tokens where they go to experts; and all
        values as follows from that, forward and backward."""
        for node in self.graph.nodes:
            if node.op == "placeholder" and noted(node).binding.kind in ("parameter", "frozen"):
                if names(noted(node).binding.name):
                    self._follow([((node, 0), Split(dim)) for dim in range(fake((node, 0)).dim())])
            elif computes(node) and facts(node.target).reroutes:
                rows = key_of(operands_of(node)[0])
                self._follow([(rows, Split(0, self.placed.rules[node].sizes["e"]))], tokens=True)

    def _follow(self, pending: list[tuple[ValueKey, Split]], *, tokens: bool = False) -> None:
        """Let values be split, and others as follows; ``tokens`` only where they are packed for experts."""
        while pending:
            key, split = pending.pop()
            if split in self.splits.get(key, ()) or not self._fits(key, split, tokens):
                continue
            self.splits.setdefault(key, {})[split] = None
            for node in self._terms.get(key, ()):
                if tokens and not facts(node.target).packs:
                    continue
                for part in self._new_parts(node, key, split):
                    places = [(value, from_factor(self.placed.rules[node], dims, *part))
                              for value, dims in self._dims(node)]  # fmt: skip
                    follow = [(value, Split(*at)) for value, at in places if at is not None]
                    if all(self._fits(*place, tokens) for place in follow) and not _across_rows(node, follow):
                        self.parts[node][part] = None
                        pending += follow

    def _new_parts(self, node: fx.Node, key: ValueKey, split: Split) -> Iterator[Part]:
        """Yield the parts of an operator that the split of a value means, and that are new."""
        for other, dims in self._dims(node):
            if other == key:
                part = to_factor(self.placed.rules[node], dims, split.dim, split.outer, self.mesh.size(self.axis))
                if part is not None and part not in self.parts[node] and self._divides(node, part):
                    yield part

    def _divides(self, node: fx.Node, part: Part) -> bool:
        """Return whether an operator can be split so, beside the other axes that split it."""
        rule = self.placed.rules[node]
        name, outer = part
        if name in rule.whole or facts(node.target).reroutes:
            return False
        taken = [(o, axis) for axis, (n, o) in self.placed.parts[node].items() if n == name and axis != self.axis]
        return self._nests(rule.sizes[name], [*taken, (outer, self.axis)])

    def _fits(self, key: ValueKey, split: Split, tokens: bool) -> bool:
        """Return whether a value can be split so, beside the other axes that split it."""
        if split in self.splits.get(key, ()):
            return True
        if is_zigzag(split.outer) or (not tokens and (split.dim, split.outer) in self._samples.get(key, ())):
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
        if facts(node.target).reroutes:  # rows stay where they are, until experts read them
            rows = key_of(operands_of(node)[0])
            kinds: tuple[AxisType, ...] = ("I", *self.splits.get(rows, ()))
            kinds = (*kinds, "R") if grads[rows] else kinds
            return [Way((kind, *[None] * (len(rule.operands) - 1)), (kind,)) for kind in kinds]
        keys = [key_of(operand) for operand in operands_of(node)]
        results = [(node, index) for index in range(len(rule.results))]
        read: tuple[AxisType, ...] = tuple("R" if grads[key] else "I" for key in keys)
        price = self.prices.product(node, self._moved(node)) * self.microbatches if self.works(node) else 0.0
        ways = [Way(_all("I", keys), _all("I", results), price)]
        if "R" in read and grads.get(results[0]):
            marked: tuple[AxisType, ...] = tuple("R" if grads.get(key) else "I" for key in results)
            ways.append(Way(read, marked, price))
        for together in rule.linear if grads.get(results[0]) else ():
            wants: tuple[AxisType, ...] = tuple("P" if index in together else kind for index, kind in enumerate(read))
            ways += self._reduced(Way(wants, _all("P", results), price), results)
        for part in self.parts[node]:
            wants = tuple(self._type(rule, dims, part, kind) for dims, kind in zip(rule.operands, read, strict=True))
            gives = tuple(self._type(rule, dims, part, "P") for dims in rule.results)
            if facts(node.target).reduces == "exponentials" and "P" in gives:  # of its rows sums and peaks are sent
                size = self._bytes(results[0])
                sent = self.prices.message("all_reduce", 2 * size) + self.prices.message("row_max", size)
                ways.append(Way(wants, _all("I", results), sent * self.microbatches, divided=True))
            else:
                ways += self._reduced(Way(wants, gives, divided=True), results)
        return ways

    @staticmethod
    def _type(rule: OpRule, dims: Dims, part: Part, otherwise: AxisType) -> AxisType:
        at = from_factor(rule, dims, *part)
        return otherwise if at is None else Split(*at)

    def _of_placeholder(self, node: fx.Node) -> list[Way]:
        key, kind = (node, 0), noted(node).binding.kind
        lies: AxisType = self.placed.splits[key].get(self.axis, "I")
        if kind not in ("parameter", "frozen", *BUFFERS):
            return [Way((), (lies,))]
        state = 0
        if kind != "buffer":
            state = fake(key).nbytes * (2 + self.moments if kind == "parameter" else 1)
        whole = Way((), ("I",), self.prices.state(state))
        return [whole, *(Way((), (split,), divided=True) for split in self.splits.get(key, ()))]

    def _reduced(self, way: Way, results: Sequence[ValueKey]) -> Iterator[Way]:
        """Yield a way, and the same with its partial results summed for all readers at once."""
        yield way
        if "P" not in way.gives or noted(results[0][0]).packed is not None:
            return
        for kind in ("I", *(self.splits.get(results[0], ()) if len(results) == 1 else ())):
            prices = [self.conversion(key, "P", kind) for key, given in zip(results, way.gives, strict=True)
                      if given == "P"]  # fmt: skip
            gives = tuple(kind if given == "P" else given for given in way.gives)
            total = way.price + sum(price for price in prices if price is not None)
            yield replace(way, gives=gives, price=total)

    def works(self, node: fx.Node) -> bool:
        """Return whether an operator is worth dividing: a product, or a lookup of what depends on the samples."""
        row = facts(node.target)
        pure = self.partition.pure
        return row.precision == "product" or (row.looks_up and any(n not in pure for n in operands_of(node)[1:]))

    def amount(self, node: fx.Node) -> float:
        """Return the multiply-adds of an operator, or the entries of a weight, that ranks may divide."""
        if node.op == "placeholder":
            return fake((node, 0)).numel() if noted(node).binding.kind in ("parameter", "frozen") else 0.0
        flops = facts(node.target).flops
        return flops(call_of(node)) if self.works(node) and flops is not None else 0.0

    def _moved(self, node: fx.Node) -> float:
        """Return the bytes of the values that an operator reads and makes, without weights."""
        read = {key_of(operand) for operand in operands_of(node)}
        values = [key for key in read if key[0].op != "placeholder" and fake(key).is_floating_point()]
        return sum(map(self._bytes, [*values, (node, 0)]))

    # ---- one value

    def _bytes(self, key: ValueKey) -> float:
        """Return the bytes of a value on the ranks of the axis together, in a microbatch."""
        return whole_bytes(
            self.partition.type_of(key, Placement.of(self.mesh, self.placed.splits[key])), self.mesh, [self.axis]
        )

    def conversion(self, key: ValueKey, have: AxisType, want: AxisType) -> float | None:
        """Return the price of a value of one type for readers that want another one, with that of its gradient; None
        where there is no such conversion."""
        grads = self.partition.grad[key]
        if have == want or (not grads and key[0] in self.partition.pure and "P" not in (have, want)):
            return 0.0
        if have == "R" and want == "I" and grads:
            return None
        price = self.prices.conversion(self._bytes(key), have, want, grads)
        once = key[0].op == "placeholder" and (have, want) == ("I", "R")  # its gradient is summed once a step
        return None if price is None else price * (1 if once else self.microbatches)


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


def _all(type_: AxisType, keys: Sequence[ValueKey]) -> tuple[AxisType, ...]:
    """Return one type for all of some values."""
    return (type_,) * len(keys)


def _kind(type_: AxisType) -> str:
    return "S" if isinstance(type_, Split) else type_


def _across_rows(node: fx.Node, splits: Sequence[tuple[ValueKey, Split]]) -> bool:
    """Return whether splits of a lookup would split each row of its table: the rows of a vocabulary stay whole, else
    values behind it would be split along a width that most operators need whole."""
    table = key_of(operands_of(node)[0]) if facts(node.target).looks_up else None
    return any(key == table and split.dim != 0 for key, split in splits)


def whole_bytes(type_: TensorType, mesh: Mesh, axes: Sequence[str]) -> float:
    """Return the bytes of a rank's part of a value, with those parts that some axes split off."""
    local = replace(type_, placement=type_.placement.replace(dict.fromkeys(axes, "I"))).local(mesh)
    there, rows = type_.packed or (1, 1)
    return math.prod(local) * type_.dtype.itemsize * there / rows
