"""A row of the operator table, and the pieces rows are made of."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..layout.mesh import Shape
from .factors import Dims, OpCall, Operand, OpRule, apply_dims, linear_sets, quotient

Change = tuple[int, str, Any]
"""An argument's position, its name, and the value that takes its place."""
Localize = Callable[[OpCall, tuple[Shape, ...], tuple[Shape, ...]], list[Change]]
Ruling = Callable[[OpCall], OpRule]


Precision = Literal["", "product", "sensitive", "loss"]
"""The behaviour of an operator where a plan asks for a narrow type, as in torch's autocast. A *product* takes and gives
the narrow type. A *sensitive* operator takes and gives float32 (sums, statistics, norms, softmax and what amplifies
rounding). So does a *loss*, and all that is computed from it stays float32 too. Other operators follow their
operands."""
Moves = Literal["", "copy", "shape", "dims", "place", "join", "index", "scatter"]
"""The way in which an operator without arithmetic places entries: a *copy* of its operand; all of them in their order
in another *shape*; in renamed or repeated *dims*; some of them, or at another *place*, maybe with a constant beside
them; the entries of all operands, *joined*; entries that an *index* names, or entries *scattered* to where one says."""
Storage = Literal["", "view", "fresh"]
"""The storage of an operator's results: that of the first operand (``view``), surely none of the operands' (``fresh``),
or not known (``""``)."""
Reduces = Literal["", "sum", "squares", "max", "exponentials"]
"""The reduction of the first operand's entries over a factor that results lack."""
Computes = Literal["", "total", "difference", "multiple", "ratio", "both", "either", "below", "at most", "above",
                   "at least"]  # fmt: skip
"""The arithmetic of an operator on two operands, whatever their types: `a + b`, `a - b`, `a * b`, `a / b`, `a & b`, `a
| b` and the comparisons."""
LawName = Literal["", "uniform", "normal", "integers", "bernoulli", "exponential"]
"""The law of the numbers that an operator draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """All that parc knows of an operator beside its rule; positions count arguments, or operands where it says so."""

    precision: Precision = ""
    backward: bool = False
    """It is the derivative of an operator of this precision, and computes as that does."""
    flops: Callable[[OpCall], int] | None = None
    """The count of multiply-adds in a call, from its shapes; None where there are none to speak of."""

    moves: Moves = ""
    storage: Storage = ""
    casts: bool = False
    """It gives its first operand in another type."""
    stops_gradient: bool = False
    exported: bool = True
    """torch's functional form of a graph leaves it as it is, where it copies a constant, or detaches what has no
    derivative."""

    number: int | None = None
    """The number that all entries of its result hold."""
    number_at: int | None = None
    """The argument that is that number."""
    by_number: bool = False
    """It makes entries by their numbers along the first dim, which more entries at its end do not change."""
    law: LawName = ""
    key_at: int | None = None
    """The operand that is a random stream's key."""
    chance_at: int | None = None
    """The argument that is a probability: where it is not 0, entries are drawn by their numbers."""

    counted: tuple[int, int] | None = None
    """The operand, and its dim, whose entries are named by their numbers: rows of a table, classes of a loss."""
    named_at: int = 1
    """The operand that holds these numbers."""
    ignored_at: int | None = None
    """The argument that is the number to ignore."""
    replaced: bool = False
    """Another operator stands in its place where the counted dim is split: as it is, it needs that whole."""
    unread_rows: bool = False
    """Rows of its result that nothing looks up hold zeros."""
    stands_for: str = ""
    """The captured graph's operator in whose place programs have this one."""

    elementwise: bool = False
    """Entries of its results depend on those at their place alone."""
    reduces: Reduces = ""
    computes: Computes = ""
    power: float | None = None
    """It raises its operand to this power."""
    exact: bool = False
    """It has one right result, whatever kernel computes it."""
    bounds: bool = False
    """Numbers among its arguments decide at which values it does something else."""
    limits: tuple[float, ...] = ()
    """Such numbers that no argument says."""

    reaches_outside: bool = False
    """It does more than its results say, or reads more than its operands: a file, a number in Python, the screen, or
    memory that nobody wrote. No program may use it."""
    addable: bool = False
    """It makes gradients of weights, and can add them to something."""
    compiled: bool = True
    """Inductor may be shown it; not what it would add up in the order in which threads arrive, where torch's own
    operator repeats its bits, nor what reads a tensor's numbers or makes a shape of them."""
    plain: bool = False
    """torch's function, or tensor's method, of its name takes the same arguments."""

    @property
    def looks_up(self) -> bool:
        """True where the operator reads rows of its first operand by numbers below the count of rows."""
        return self.moves == "index" and self.counted is not None

    @property
    def keeps_values(self) -> bool:
        """True where the results are entries of the first operand, unchanged."""
        return self.moves in ("copy", "shape", "dims", "place")

    @property
    def creates(self) -> bool:
        """True where the result holds one number that is no operand's."""
        return self.number is not None or self.number_at is not None

    def number_in(self, args: Sequence[Any]) -> Any:
        """The one number that its result holds, called with these arguments."""
        return self.number if self.number_at is None else args[self.number_at]

    def makes_zeros(self, args: Sequence[Any]) -> bool:
        """Return whether the result of a call with these arguments holds nothing but zeros."""
        return self.creates and bool(self.number_in(args) == 0)


@dataclass(frozen=True, slots=True)
class OpRow(OpFacts):
    """An operator's rule, if it has one, and, where it has arguments that speak of sizes, how these become local; and
    its facts.

    `localize(call, operands, results)` takes the local shapes and returns the arguments that change; None leaves all as
    they are.
    """

    rule: Ruling | None = None
    localize: Localize | None = None


def contracted(ruling: Ruling) -> Callable[[OpCall], int]:
    """The products of two numbers that a contraction adds up: one for each choice of an entry of each factor."""
    return lambda call: math.prod(ruling(call).sizes.values())


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
    """Return whether an argument is a tensor; an optional tensor may also be None."""
    return isinstance(value, Operand)


def rows_of(names: str, row: OpRow) -> dict[str, OpRow]:
    """The same row for each of the names, `packet` or `packet.overload` of aten, separated by blanks."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": row for name in names.split()}


def overloads(names: str, kinds: str) -> str:
    """Every name with every overload, as `table` reads them."""
    return " ".join(f"{name}.{kind}" for name in names.split() for kind in kinds.split())
