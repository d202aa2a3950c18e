"""Operators run whole and on shards, as their rule says, and compared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parc.compiler.ops.factors import Dims, OpCall, Operand, OpRule
from parc.compiler.ops.rules import localize, rule_for
from parc.compiler.ops.splits import from_factor, to_factor


@dataclass(frozen=True)
class Case:
    """A valid application of an operator to real tensors."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def target(self) -> Any:
        namespace, packet, overload = self.op.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    @property
    def has_values(self) -> bool:
        return "empty" not in self.op


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _tensors(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [item for item in out if item is not None]


def _run(case: Case, args: Any, kwargs: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    def fill(value: Any) -> Any:
        return operands[value.index] if isinstance(value, Operand) else value

    return _tensors(case.target(*_mapped(tuple(args), fill), **{k: _mapped(v, fill) for k, v in kwargs.items()}))


@dataclass(frozen=True)
class Whole:
    """A case run once on whole tensors."""

    case: Case
    call: OpCall
    operands: list[torch.Tensor]
    results: list[torch.Tensor]
    rule: OpRule


def run_whole(case: Case) -> Whole:
    """Run the case and find its rule."""
    operands: list[torch.Tensor] = []

    def lift(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            operands.append(value)
            return Operand(len(operands) - 1)
        return value

    args = _mapped(case.args, lift)
    kwargs = {name: _mapped(value, lift) for name, value in case.kwargs.items()}
    results = _run(case, args, kwargs, operands)
    shapes = [tuple(tuple(tensor.shape) for tensor in tensors) for tensors in (operands, results)]
    call = OpCall(case.op, args, kwargs, shapes[0], shapes[1])
    rule = rule_for(call)
    assert rule is not None
    check_form(call, rule)
    assert rule == rule_for(call), "two looks at one call give two rules"
    return Whole(case, call, operands, results, rule)


def check_form(call: OpCall, rule: OpRule) -> None:
    """Check that each dim is the product of its factors, sizes are those of the factors in use, and whole ones are
    among them."""
    tensors = [*zip(rule.operands, call.operands, strict=True), *zip(rule.results, call.results, strict=True)]
    used = set()
    for dims, shape in tensors:
        assert len(dims) == len(shape)
        names = [name for dim in dims for name in dim]
        assert len(names) == len(set(names)), f"a factor stands twice in one tensor: {dims}"
        used |= set(names)
        for dim, size in zip(dims, shape, strict=True):
            held = 1
            for name in dim:
                assert rule.sizes[name] != 1
                held *= int(rule.sizes[name])
            assert held == size or not dim, f"{dim} of {rule.sizes} in a dim of size {size}"
    assert set(rule.sizes) == used
    assert rule.whole <= used
    assert all(0 <= index < len(call.operands) for indices in rule.linear for index in indices)


def part_of(tensor: torch.Tensor, place: tuple[int, Any] | None, rank: int, ranks: int) -> torch.Tensor:
    """Return the part of a tensor that `rank` holds in placement `S(dim, outer)`; all of it without a placement."""
    if place is None:
        return tensor
    dim, outer = place
    shape = tuple(tensor.shape)
    if isinstance(outer, tuple):
        pieces = tensor.split([size * shape[dim] // sum(outer) for size in outer], dim)
        return torch.cat([part_of(piece, (dim, 1), rank, ranks) for piece in pieces], dim)
    parts = tensor.reshape(*shape[:dim], outer, ranks, shape[dim] // (outer * ranks), *shape[dim + 1 :])
    return parts.select(dim + 1, rank).reshape(*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :]).contiguous()


def splits(rule: OpRule, ranks: int) -> list[tuple[str, Any]]:
    """Return every (factor, outer) that the rule allows to split over so many ranks; for a sum of factors, the splits
    of all of them alike."""
    found: list[tuple[str, Any]] = []
    members = {name for names in rule.sums.values() for name in names}
    for total, names in rule.sums.items():
        for outer in range(1, min(int(rule.sizes[name]) for name in names)):
            if all(rule.sizes[name] % outer == 0 and rule.sizes[name] // outer % ranks == 0 for name in names):
                sizes = [int(rule.sizes[name]) // outer for name in names for _ in range(outer)]
                unit = math.gcd(*sizes)
                equal = len(set(sizes)) == 1
                found.append((total, len(sizes) if equal else tuple(size // unit for size in sizes)))
    for name, size in rule.sizes.items():
        if name in members or name in rule.sums:
            continue
        for outer in range(1, int(size)):
            if name not in rule.whole and size % outer == 0 and (size // outer) % ranks == 0:
                found.append((name, outer))
    return found


def _places(rule: OpRule, tensors: Sequence[Dims], factor: str, outer: int, ranks: int) -> list[Any]:
    places = [from_factor(rule, dims, factor, outer) for dims in tensors]
    for dims, place in zip(tensors, places, strict=True):
        if place is not None:
            assert to_factor(rule, dims, *place, ranks) == (factor, outer)
    return places


def check_split(whole: Whole, factor: str, outer: int, ranks: int) -> None:
    """Check that every rank's call on its shards gives its shard of each result, or a part of a sum where a result
    lacks the factor."""
    rule, call = whole.rule, whole.call
    held = _places(rule, rule.operands, factor, outer, ranks)
    made = _places(rule, rule.results, factor, outer, ranks)
    sums: list[Any] = [0] * len(made)
    for rank in range(ranks):
        operands = [part_of(x, place, rank, ranks) for x, place in zip(whole.operands, held, strict=True)]
        expected = [part_of(y, place, rank, ranks) for y, place in zip(whole.results, made, strict=True)]
        local = (tuple(tuple(x.shape) for x in operands), tuple(tuple(y.shape) for y in expected))
        args, kwargs = localize(call, *local)
        if call.op == "aten.embedding.default" and factor == "v":
            results = _masked_lookup(whole, operands[0], outer, rank, ranks)
        else:
            results = _run(whole.case, args, kwargs, operands)
        assert len(results) == len(expected)
        for index, (result, right) in enumerate(zip(results, expected, strict=True)):
            if made[index] is None and any(place is not None for place in held):
                sums[index] = sums[index] + result
            else:
                compare(whole.case, result, right, f"result {index} of rank {rank} with {factor!r}/{outer} on {ranks}")
    for index, total in enumerate(sums):
        if isinstance(total, torch.Tensor):
            compare(whole.case, total, whole.results[index], f"the sum of result {index}, {factor!r} on {ranks}")


def _masked_lookup(whole: Whole, rows: torch.Tensor, outer: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """Look up a rank's own rows, with zeros for the others, as programs do for a split vocabulary."""
    table, indices = whole.operands[:2]
    mine = part_of(torch.arange(table.shape[0]), (0, outer), rank, ranks)
    at = torch.full((table.shape[0],), -1)
    at[mine] = torch.arange(len(mine))
    local = at[indices]
    return [rows[local.clamp(min=0)] * (local >= 0).unsqueeze(-1)]


def check_linear(whole: Whole, indices: frozenset[int]) -> None:
    """Check that the results of addends of these operands add up to the results of the sums."""
    ranks = 2
    addends: dict[int, list[torch.Tensor]] = {}
    for index in indices:
        x = whole.operands[index]
        assert x.is_floating_point(), f"operand {index} is no float, so never Partial"
        first = torch.rand_like(x) - 0.5
        addends[index] = [first, x - first]
    totals: list[Any] = [0] * len(whole.results)
    for rank in range(ranks):
        operands = [addends[i][rank] if i in indices else x for i, x in enumerate(whole.operands)]
        for index, result in enumerate(_run(whole.case, whole.call.args, whole.call.kwargs, operands)):
            totals[index] = totals[index] + result
    for total, right in zip(totals, whole.results, strict=True):
        compare(whole.case, total, right, f"operands {set(indices)} partial")


def compare(case: Case, result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that tensors are equal, floats to rounding. Where the operator gives no defined values only shapes are
    compared."""
    assert result.shape == expected.shape and result.dtype == expected.dtype, f"{what}: {result.shape} {result.dtype}"
    if not case.has_values:
        return
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-4
    if expected.is_floating_point():
        assert torch.allclose(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True), what
    else:
        assert torch.equal(result, expected), what
