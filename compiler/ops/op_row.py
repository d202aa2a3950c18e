"""A row of the operator table, and the pieces rows are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..layout.mesh import Shape
from .factors import Dims, OpCall, Operand, OpRule, apply_dims, linear_sets, quotient

Change = tuple[int, str, Any]
"""An argument's position, its name, and the value that takes its place."""
Localize = Callable[[OpCall, tuple[Shape, ...], tuple[Shape, ...]], list[Change]]
Ruling = Callable[[OpCall], OpRule]


@dataclass(frozen=True, slots=True)
class OpRow:
    """An operator's rule and, where it has arguments that speak of sizes, how these become local.

    `localize(call, operands, results)` takes the local shapes and returns the arguments that change; None leaves all as
    they are.
    """

    rule: Ruling
    localize: Localize | None = None


def result_shape(position: int, name: str) -> Localize:
    """Localizes an argument that spells the first result's shape."""
    return lambda call, operands, results: [(position, name, list(results[0]))]


def scale(value: int, local: int, whole: int) -> int:
    """`value` of a dim of size `whole`, on a rank that holds `local` of it; the rule made sure that it is exact."""
    if local == whole:
        return value
    scaled = quotient(value * local, whole)
    if scaled is None:
        raise ValueError(f"{value} of {whole} is not a size where {local} of it is held")
    return scaled


def normal_dim(dim: int, rank: int) -> int:
    """A dim counted from the front; rank-0 tensors count as rank 1, as torch has it."""
    return dim + max(rank, 1) if dim < 0 else dim


def normal_dims(dims: Any, rank: int) -> frozenset[int]:
    """Dims counted from the front, of an argument that is one dim, a list of them, or nothing for all."""
    if dims is None or dims == [] or dims == ():
        return frozenset(range(rank))
    listed: Sequence[int] = (dims,) if isinstance(dims, int) else dims
    return frozenset(normal_dim(dim, rank) for dim in listed)


def plain_dims(rank: int, prefix: str = "d") -> Dims:
    """One factor per dim: d0, d1, ..."""
    return tuple((f"{prefix}{dim}",) for dim in range(rank))


def aligned_dims(rank: int, result_rank: int) -> Dims:
    """The dims of a tensor of `rank` that broadcasts, aligned right, against `plain_dims(result_rank)`."""
    return plain_dims(result_rank)[result_rank - rank :] if rank else ()


def argument_linear(call: OpCall, text: str) -> tuple[frozenset[int], ...]:
    """`linear_sets` over argument positions; a set falls away if a literal other than 0 stands in one of them.

    So "01" of `add(x, 3)` gives nothing, and "02" of `masked_fill(x, mask, 0)` gives x.
    """
    sets = []
    for positions in linear_sets(text):
        values = [call.args[position] if position < len(call.args) else None for position in sorted(positions)]
        operands = [value.index for value in values if isinstance(value, Operand)]
        literals = [value for value in values if not isinstance(value, Operand)]
        if operands and all(isinstance(value, (int, float)) and value == 0 for value in literals):
            sets.append(frozenset(operands))
    return tuple(sets)


def pointwise(linear: str = "") -> Ruling:
    """Every tensor "...": one factor per result dim, operands broadcast. `linear` speaks of argument positions."""

    def apply(call: OpCall) -> OpRule:
        rank = len(call.results[0])
        operands = [aligned_dims(len(shape), rank) for shape in call.operands]
        results = [plain_dims(rank) for _ in call.results]
        return apply_dims(call, operands, results, linear=argument_linear(call, linear))

    return apply


def along_dims(dims_of: Callable[[OpCall, int], frozenset[int]], *, linear: str = "") -> Ruling:
    """All tensors alike in rank, but for sizes along the dims that `dims_of(call, rank)` names: those are whole."""

    def apply(call: OpCall) -> OpRule:
        blocked = dims_of(call, len(call.operands[0]))
        named = [
            tuple((f"t{index}_{dim}" if dim in blocked else f"d{dim}",) for dim in range(len(shape)))
            for index, shape in enumerate((*call.operands, *call.results))
        ]
        whole = frozenset(name for dims in named for (name,) in dims if name.startswith("t"))
        count = len(call.operands)
        return apply_dims(call, named[:count], named[count:], whole=whole, linear=argument_linear(call, linear))

    return apply


def dim_argument(position: int, name: str = "dim", default: int | None = -1) -> Callable[[OpCall, int], frozenset[int]]:
    """For `along`: the dim, or dims, at (position, name)."""

    def dims_of(call: OpCall, rank: int) -> frozenset[int]:
        return normal_dims(call.argument(position, name, default), rank)

    return dims_of


def is_operand(value: Any) -> bool:
    """Whether an argument is a tensor; an optional one may be None."""
    return isinstance(value, Operand)


def rows_of(names: str, row: OpRow) -> dict[str, OpRow]:
    """The same row for each of the names, `packet` or `packet.overload` of aten, separated by blanks."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": row for name in names.split()}


def overloads(names: str, kinds: str) -> str:
    """Every name with every overload, as `table` reads them."""
    return " ".join(f"{name}.{kind}" for name in names.split() for kind in kinds.split())
