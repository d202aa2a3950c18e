"""The integer program of placements: for every operator of a model one of the ways to split it over an axis, so that
messages, and what stays undivided, cost least. HiGHS solves it.

It is the formulation of Alpa ("Automating inter- and intra-operator parallelism for distributed deep learning", 2022,
section 4), with types in place of shardings: a value that is partial, or whole for readers that are split, costs in
forward, in backward, or in both. Equal blocks share their unknowns, so a hundred layers cost as much as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.placement import AxisType, Split
from parc.grammar.codes import NO_PACKAGE
from parc.grammar.diagnostics import Diagnostic, PlanError
from parc.passes.calls import ValueKey, computes, fake, key_of, operands_of, substitute_nodes
from parc.proposing.ways import Ways, WireBytes

Unit = tuple[object, ...]
"""The name of an operator or a parameter that equal blocks have in common."""


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
            (node.target, substitute_nodes((node.args, node.kwargs), token), sorted(map(str, ways.parts[node])))
            for node in nodes
        )  # fmt: skip
        key = hash(str(signature))
        units |= {node: (key, at) for node, at in place.items()}
        units |= {node: (key, name) for node, name in inner.items()
                  if all(noted(user).block == block for user in node.users)}  # fmt: skip
    return {
        node: units.get(node, (node.name,)) for node in ways.graph.nodes if computes(node) or node.op == "placeholder"
    }


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
    """The bytes that a column sends."""
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


def _solver() -> Any:
    """Return the modules of the solver.

    Raises:
        PlanError: it is not installed.
    """
    try:
        return import_module("scipy.optimize"), import_module("scipy.sparse")
    except ImportError:
        message = "placements are found with the package `scipy`, which is not installed"
        raise PlanError([Diagnostic(NO_PACKAGE, message, help='`pip install "parc-compiler[plan]"`')]) from None


Columns = Mapping[AxisType, Sequence[int]]
"""The choices that give a value a type, or want it so."""


def _by_type(columns: Sequence[int], types: Sequence[AxisType | None]) -> Columns:
    by_type: dict[AxisType, list[int]] = {}
    for column, type_ in zip(columns, types, strict=True):
        if type_ is not None:
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


def _limit(rows: _Rows, amounts: Mapping[int, float], most: float) -> None:
    """Add the row that a sum over columns is at most so much, if that is finite."""
    if math.isfinite(most):
        scale = max(most, 1.0)
        rows.row({column: amount / scale for column, amount in amounts.items() if amount}, -math.inf, most / scale)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what a solution sends, and of what it leaves undivided: bytes, and the parts of all work and of all
    entries of weights."""

    sent: float = math.inf
    work: float = 1.0
    weights: float = 1.0


def solve(ways: Ways, seconds: float, limits: Limits) -> dict[fx.Node, Split] | None:
    """Return the splits of parameters in the cheapest of all choices of ways within limits; None where there is none,
    or none that the solver finds in so many ``seconds``.

    Raises:
        PlanError: the solver is not installed.
    """
    wires = ways.priced(WireBytes(ways.axis, ways.prices.ranks))
    optimize, sparse = _solver()
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
        made = _by_type(columns[maker], [way.gives[index] for way in choices[maker]])
        read = [_by_type(columns[unit], [way.wants[at] for way in choices[unit]]) for unit, at in readers]
        _add_value(rows, ways, wires, keys, made, read)
    _limit(rows, dict(enumerate(rows.sent)), limits.sent)
    for kind, part in (("placeholder", limits.weights), ("call_function", limits.work)):
        amounts = {unit: ways.amount(node) * count[unit] for unit, node in first.items() if node.op == kind}
        left = {column: amount for unit, amount in amounts.items()
                for column, way in zip(columns[unit], choices[unit], strict=True) if not way.divided}  # fmt: skip
        _limit(rows, left, part * sum(amounts.values()) if part < 1 else math.inf)
    lows, highs = zip(*rows.bounds, strict=True)
    at, column, value = zip(*rows.entries, strict=True)
    scale = max(rows.prices) or 1.0
    matrix = sparse.csr_matrix((value, (at, column)), (len(rows.bounds), len(rows.prices)))
    result = optimize.milp(
        [price / scale for price in rows.prices], integrality=[int(whole) for whole in rows.whole],
        bounds=optimize.Bounds(0, 1), constraints=optimize.LinearConstraint(matrix, lows, highs),
        options={"time_limit": seconds, "mip_rel_gap": 1e-3},
    )  # fmt: skip
    if result.x is None:
        return None
    splits: dict[fx.Node, Split] = {}
    for node, unit in units.items():
        if node.op == "placeholder" and noted(node).binding.kind in ("parameter", "frozen"):
            way = max(zip(columns[unit], choices[unit], strict=True), key=lambda pair: result.x[pair[0]])[1]
            if isinstance(way.gives[0], Split):
                splits[node] = way.gives[0]
    return splits
