"""Balance: consecutive pieces of a model joined to stages, so that the largest stage is as small as possible."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, fx

from ..capture.node_facts import noted
from ..layout.mesh import Shape
from ..ops.factors import OpCall, Operand
from ..ops.rules import facts
from ..program.binding import PARAMETERS, Binding

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


def balance(pieces: Sequence[BalancedPiece], stages: int, in_flight: Callable[[int], int]) -> tuple[int, ...]:
    """Return the numbers of the pieces with which stages 1, 2, … begin. The largest stage has the fewest operations
    possible; among such choices, the largest stage takes the fewest bytes.

    A stage's bytes are those of its parameters (one that several pieces use counts once) and what the backwards of
    ``in_flight(stage)`` microbatches keep. Exact: dynamic programming over the first k stages and the first j pieces,
    once for each of the two; for the bytes, stages of more operations than the first allows are left out.

    Raises:
        ValueError: there are fewer pieces than stages.
    """
    if len(pieces) < stages:
        raise ValueError(f"{len(pieces)} pieces make no {stages} stages")
    sums = [0, *accumulate(piece.operations for piece in pieces)]
    kept = [0, *accumulate(piece.kept for piece in pieces)]
    most, _ = _smallest_largest(len(pieces), stages, lambda stage, start, stop: sums[stop] - sums[start])
    held: dict[tuple[int, int], int] = {}
    for start in range(len(pieces)):
        parameters: dict[str, int] = {}
        for stop in range(start + 1, len(pieces) + 1):
            if sums[stop] - sums[start] > most:
                break
            parameters.update(pieces[stop - 1].parameters)
            held[start, stop] = sum(parameters.values())

    def memory(stage: int, start: int, stop: int) -> float:
        if (start, stop) not in held:
            return math.inf
        return held[start, stop] + in_flight(stage) * (kept[stop] - kept[start])

    return _smallest_largest(len(pieces), stages, memory)[1]


def _smallest_largest(count: int, stages: int, cost: Callable[[int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """Cut ``count`` pieces into ``stages`` runs so that the most expensive run costs as little as possible. Return its
    cost, and the begins of all runs but the first; ``cost(stage, start, stop)`` is the cost of a run."""
    best: list[list[float]] = [[0.0] + [math.inf] * count]
    begin: list[list[int]] = []
    for stage in range(stages):
        row, chosen = [math.inf] * (count + 1), [stage] * (count + 1)
        for stop in range(stage + 1, count + 1):
            for start in range(stop - 1, stage - 1, -1):
                here = cost(stage, start, stop)
                largest = max(best[-1][start], here)
                if largest < row[stop]:
                    row[stop], chosen[stop] = largest, start
        best.append(row)
        begin.append(chosen)
    begins, stop = [], count
    for chosen in reversed(begin):
        stop = chosen[stop]
        begins.append(stop)
    assert all(low < high for low, high in pairwise(reversed(begins)))
    return best[-1][count], tuple(reversed(begins))[1:]
