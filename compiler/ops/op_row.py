"""The row of an operator in the table: its facts, its sharding rule, and functions from which families build rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..layout.mesh import Shape
from .factors import Dims, OpCall, Operand, OpRule, apply_dims, linear_sets, quotient

Change = tuple[int, str, Any]
"""An argument's position, its name, and the value that takes its place."""
Localize = Callable[[OpCall, tuple[Shape, ...], tuple[Shape, ...]], list[Change]]
Ruling = Callable[[OpCall], OpRule]


Precision = Literal["", "product", "sensitive", "loss"]
"""The behaviour of an operator where a plan asks for a narrow type, as in torch's autocast. A *product* takes and
returns the narrow type. A *sensitive* operator takes and returns float32 (sums, statistics, norms, softmax and
operators that amplify rounding). So does a *loss*, and all that is computed from it stays float32 too. Other operators
follow their operands."""
Moves = Literal["", "copy", "shape", "dims", "place", "join", "index", "scatter"]
"""The way in which an operator without arithmetic places entries: a *copy* of its operand; all of them in their order
in another *shape*; in renamed or repeated *dims*; some of them, or at another *place*, maybe with a constant beside
them; the entries of all operands, *joined*; entries that an *index* names, or entries *scattered* to where one says."""
Storage = Literal["", "view", "fresh"]
"""The storage of an operator's results: that of the first operand (``view``), surely none of the operands' (``fresh``),
or not known (``""``)."""
Reduces = Literal["", "sum", "squares", "max", "exponentials"]
"""The reduction of the first operand's entries over a factor that results lack."""
OfRows = Literal["", "softmax", "log softmax", "log sum", "entry", "loss"]
"""The function of rows of logits, of which ranks may hold parts: terms of each row that they sum give it."""
Computes = Literal["", "total", "difference", "multiple", "ratio", "both", "either", "below", "at most", "above",
                   "at least"]  # fmt: skip
"""The arithmetic of an operator on two operands, whatever their types: `a + b`, `a - b`, `a * b`, `a / b`, `a & b`, `a
| b` and the comparisons."""
Carries = Literal["", "away", "back"]
"""The way of a value to a place beside the memory that computes (``away``), or from there (``back``)."""
Packs = Literal["", "rows", "sums"]
"""The effect of an operator on packed rows of tokens: its results are packed *rows*, or it *sums* such rows to values
that are whole. See compiler/ops/own_ops.py."""
OfSlots = Literal["", "assigns", "leaves"]
"""The effect of an operator on the slots of experts with a capacity: it *assigns* tokens to them, or *leaves* them: its
results are of tokens again."""
TILE = 1 << 18
"""The entries of temporaries that kernels make at once on a CPU, so that several passes over them stay in its cache."""
DRAW_BLOCK = 1 << 15
"""The entries that are drawn in one pass on a CPU: in the cache, and too few for torch to wake a second thread."""
LawName = Literal["", "uniform", "normal", "integers", "bernoulli", "exponential", "permutation", "classes"]
"""The distribution of the numbers that an operator draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """All that parc knows of an operator beside its rule. Positions count arguments, or operands where it says so."""

    precision: Precision = ""
    backward: bool = False
    """True where the operator is the derivative of one with this precision, and computes as that does."""
    flops: Callable[[OpCall], int] | None = None
    """The count of multiply-adds in a call, from its shapes; None where there are none to speak of."""

    moves: Moves = ""
    storage: Storage = ""
    casts: bool = False
    """True where the result is the first operand in another type."""
    stops_gradient: bool = False
    exported: bool = True
    """False where torch's functional form of a graph changes the operator: it copies a constant, or detaches a value
    that has no derivative."""

    number: int | None = None
    """The number that all entries of the result hold."""
    number_at: int | None = None
    """The position of the argument that is that number."""
    by_number: bool = False
    """True where entries depend on their positions along the first dim, and not on how many there are."""
    counts: bool = False
    """True where entries rise in equal steps along one dim, by the arguments `start` and `step`, else from 0 by 1."""
    law: LawName = ""
    key_at: int | None = None
    """The position of the operand that is a random stream's key."""
    chance_at: int | None = None
    """The position of the argument that is a probability: unless it is 0, entries are drawn by their numbers."""

    counted: tuple[int, int] | None = None
    """The operand, and its dim, whose entries are named by their numbers: rows of a table, classes of a loss."""
    named_at: int = 1
    """The position of the operand that holds these numbers."""
    ignored_at: int | None = None
    """The position of the argument that is the number to ignore."""
    rises_at: int | None = None
    """The position of the operand whose numbers must rise: where parts begin that are found for other operands."""
    put_back: str = ""
    """The operator that gives the first operand with another tensor in the place of the part that this one takes: its
    operands are both, and its other arguments are the same."""
    replaced: bool = False
    """True where another operator replaces this one if the counted dim is split; this one needs it whole."""
    unread_rows: bool = False
    """True where those rows of the result that nothing looks up hold zeros."""
    stands_for: str = ""
    """The captured graph's operator that programs replace by this one."""

    elementwise: bool = False
    """True where an entry of a result depends only on the operands' entries at its place."""
    chooses: tuple[int, int, int] | None = None
    """The positions of the arguments of an operator that takes each entry from one of two: the condition, the argument
    where it holds, and the other."""
    reduces: Reduces = ""
    of_rows: OfRows = ""
    computes: Computes = ""
    power: float | None = None
    """The power to which the operator raises its operand."""
    exact: bool = False
    """True where the result is the same to the bit, whatever kernel computes it."""
    bounds: bool = False
    """True where numbers among the arguments bound the values at which the operator changes its behaviour."""
    limits: tuple[float, ...] = ()
    """Bounds of that kind that no argument has."""

    takes: Callable[[OpCall, Sequence[torch.dtype]], int] | None = None
    """The bytes of a call's temporaries on a CPU, from its local shapes and the dtypes of its operands; None where they
    are few or not known."""
    packs: Packs = ""
    """The effect of the operator on packed rows of tokens; "" computes each row by itself, or takes none."""
    of_slots: OfSlots = ""
    reroutes: bool = False
    """True where packed rows may change from a split over experts to one over tokens, or back."""
    carries: Carries = ""
    """The way of the operand between the memory that computes and the place where an ``offload`` line keeps it."""
    reaches_outside: bool = False
    """True where the operator does more than its results say, or reads more than its operands: a file, a number in
    Python, the screen, or memory that nobody wrote. No program may use it."""
    addable: bool = False
    """True where the operator makes gradients of weights, and can accumulate them in place, without a temporary."""
    compiled: bool = True
    """False where Inductor must not compile the operator: it would add up in the order in which threads arrive, where
    torch's own operator repeats its bits; or the operator reads a tensor's numbers, or makes a shape of them."""
    plain: bool = False
    """True where torch's function, or tensor's method, of the same name takes the same arguments."""

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

    @property
    def cheap(self) -> bool:
        """True where the results cost little beside their operands' bytes: entries that are moved, rounded, counted, or
        computed one by one, but not drawn."""
        moved = self.storage == "view" or self.moves in ("copy", "shape", "dims", "place", "join")
        created = self.creates or (self.by_number and self.key_at is None)
        return moved or created or self.casts or (self.elementwise and not self.law)

    def number_in(self, args: Sequence[Any]) -> Any:
        """Return the one number that the result of a call with these arguments holds."""
        return self.number if self.number_at is None else args[self.number_at]

    def makes_zeros(self, args: Sequence[Any]) -> bool:
        """Return whether the result of a call with these arguments holds nothing but zeros."""
        return self.creates and bool(self.number_in(args) == 0)


@dataclass(frozen=True, slots=True)
class OpRow(OpFacts):
    """The row of an operator: its facts; its rule, if it has one; and the function that makes arguments with sizes
    local.

    `localize(call, operands, results)` takes the local shapes and returns the arguments that change; None leaves all as
    they are.
    """

    rule: Ruling | None = None
    localize: Localize | None = None


def contracted(ruling: Ruling) -> Callable[[OpCall], int]:
    """Count the multiply-adds of a contraction: one for each choice of an entry of each factor."""
    return lambda call: math.prod(ruling(call).sizes.values())


def result_shape(position: int, name: str) -> Localize:
    """Return the function that makes an argument local which spells the first result's shape."""
    return lambda call, operands, results: [(position, name, list(results[0]))]


def scale(value: int, local: int, whole: int) -> int:
    """Return the part of `value` for a rank that holds `local` of a dim of size `whole`. Rules ensure that it is a
    whole number."""
    if local == whole:
        return value
    scaled = quotient(value * local, whole)
    if scaled is None:
        raise ValueError(f"{value} of {whole} is not a size where {local} of it is held")
    return scaled


def normal_dim(dim: int, rank: int) -> int:
    """Return a dim counted from the front. Tensors without dims count as having one, as in torch."""
    return dim + max(rank, 1) if dim < 0 else dim


def normal_dims(dims: Any, rank: int) -> frozenset[int]:
    """Return dims counted from the front, for an argument that is one dim, a list of dims, or nothing for all."""
    if dims is None or dims == [] or dims == ():
        return frozenset(range(rank))
    listed: Sequence[int] = (dims,) if isinstance(dims, int) else dims
    return frozenset(normal_dim(dim, rank) for dim in listed)


def plain_dims(rank: int, prefix: str = "d") -> Dims:
    """Return one factor per dim: d0, d1, ..."""
    return tuple((f"{prefix}{dim}",) for dim in range(rank))


def aligned_dims(rank: int, result_rank: int) -> Dims:
    """The dims of a tensor of `rank` that broadcasts, aligned right, against `plain_dims(result_rank)`."""
    return plain_dims(result_rank)[result_rank - rank :] if rank else ()


def argument_linear(call: OpCall, text: str) -> tuple[frozenset[int], ...]:
    """Read `linear_sets` over argument positions. A set is dropped if one of them has a literal other than 0.

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
    """Return the rule of a pointwise operator: one factor per result dim, operands broadcast. `linear` speaks of
    argument positions."""

    def apply(call: OpCall) -> OpRule:
        rank = len(call.results[0])
        operands = [aligned_dims(len(shape), rank) for shape in call.operands]
        results = [plain_dims(rank) for _ in call.results]
        return apply_dims(call, operands, results, linear=argument_linear(call, linear))

    return apply


def along_dims(dims_of: Callable[[OpCall, int], frozenset[int]], *, linear: str = "") -> Ruling:
    """Return the rule of tensors that are alike except along the dims that `dims_of(call, rank)` names: those are
    whole."""

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
    """Return the function that reads the dim, or dims, from the argument at (position, name), for `along`."""

    def dims_of(call: OpCall, rank: int) -> frozenset[int]:
        return normal_dims(call.argument(position, name, default), rank)

    return dims_of


def is_operand(value: Any) -> bool:
    """Return whether an argument is a tensor; an optional tensor may also be None."""
    return isinstance(value, Operand)


def rows_of(names: str, row: OpRow) -> dict[str, OpRow]:
    """Return the same row under each of these names of aten, `packet` or `packet.overload`, separated by blanks."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": row for name in names.split()}


def overloads(names: str, kinds: str) -> str:
    """Return every name with each of its overloads, separated by blanks: ``overloads("max min", "default dim")``."""
    return " ".join(f"{name}.{kind}" for name in names.split() for kind in kinds.split())
