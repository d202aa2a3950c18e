"""Rows of operators that cut a dim into pieces, join pieces into a dim, or pad one: slice, split, select, cat, pad."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...layout.mesh import Shape
from ..factors import Dims, OpCall, OpRule, apply_dims, linear_sets, opaque, quotient
from ..op_row import (
    Change,
    OpRow,
    Storage,
    along_dims,
    dim_argument,
    normal_dim,
    plain_dims,
    result_shape,
    rows_of,
    scale,
)

Sums = dict[str, tuple[str, ...]]


def _ruled(
    call: OpCall, tensors: Sequence[Dims], whole: set[str], sizes: dict[str, int], sums: Sums | None = None
) -> OpRule:
    """Return the rule of operands then results; these operators are linear in all their operands together."""
    count = len(call.operands)
    linear = [frozenset(range(count))]
    operands, results = tensors[:count], tensors[count:]
    return apply_dims(call, operands, results, whole=frozenset(whole), linear=linear, sizes=sizes, sums=sums)


def _dims_with(shape: Shape, dim: int, names: tuple[str, ...]) -> Dims:
    return tuple(names if i == dim else (f"d{i}",) for i in range(len(shape)))


def _pieces_rule(call: OpCall, dim: int, offset: int = 0) -> OpRule:
    """Return the rule of tensors that are alike except for their sizes along `dim`.

    With p the greatest common piece of all these sizes and the offset, each such dim is (D / p, p): which pieces a
    tensor holds is whole, while the pieces may be split, all in the same way.
    """
    tensors = (*call.operands, *call.results)
    if any(len(shape) != len(tensors[0]) for shape in tensors):  # cat skips empty tensors of one dim
        return opaque(call)
    piece = math.gcd(*(shape[dim] for shape in tensors), offset)
    sizes = {"p": piece}
    for index, shape in enumerate(tensors):
        count = quotient(shape[dim], piece)
        if not count:  # an empty tensor: no two of the dims have a piece in common
            named = [_dims_with(other, dim, (f"c{at}",)) for at, other in enumerate(tensors)]
            lengths = {f"c{at}": other[dim] for at, other in enumerate(tensors)}
            return _ruled(call, named, set(lengths), lengths)
        sizes[f"c{index}"] = count
    names = [_dims_with(shape, dim, (f"c{index}", "p")) for index, shape in enumerate(tensors)]
    return _ruled(call, names, sizes.keys() - {"p"}, sizes)


def _joined_rule(call: OpCall, dim: int, long: int) -> OpRule:
    """Return the rule of a tensor that consists, along `dim`, of the others one after the other. Its factor is the sum
    of theirs or, for equal parts, their number times theirs."""
    tensors = (*call.operands, *call.results)
    alike = all(len(shape) == len(tensors[0]) for shape in tensors)
    if not alike or any(shape[dim] < 2 for shape in tensors):
        return _pieces_rule(call, dim)
    short = [index for index in range(len(tensors)) if index != long]
    if len({tensors[index][dim] for index in short}) == 1:
        return _pieces_rule(call, dim)
    names = [_dims_with(shape, dim, ("x" if index == long else f"x{index}",)) for index, shape in enumerate(tensors)]
    sizes = {"x" if index == long else f"x{index}": shape[dim] for index, shape in enumerate(tensors)}
    return _ruled(call, names, set(), sizes, {"x": tuple(f"x{index}" for index in short)})


# ---- slice and its relatives: one tensor is the long one, another the short one


def _slice_row(first: int, long: int, short: int, *, sizes: bool = False, **facts: Any) -> OpRow:
    """`first`: the position of the argument `dim`, before start, end and step; `long` and `short` count the tensors,
    operands then results; `sizes`: the argument before `dim` spells the result's shape."""

    def read(call: OpCall) -> tuple[int, int, int, int, int]:
        tensors = (*call.operands, *call.results)
        dim = normal_dim(call.argument(first, "dim", 0), len(tensors[long]))
        size, taken = tensors[long][dim], tensors[short][dim]
        start: int = call.argument(first + 1, "start") or 0
        start = min(max(start + size if start < 0 else start, 0), size)
        return dim, start, int(call.argument(first + 3, "step", 1)), size, taken

    def ruling(call: OpCall) -> OpRule:
        dim, start, step, size, taken = read(call)
        if step == 1:
            return _pieces_rule(call, dim, start)
        tensors = (*call.operands, *call.results)
        count = quotient(size, step)
        # one of every `step` elements: (n, step) -> (n)
        regular = count is not None and start < step and count == taken
        names = [
            _dims_with(shape, dim, ("short",) if index == short else ("short", "step") if regular else ("long",))
            for index, shape in enumerate(tensors)
        ]
        if regular:
            return _ruled(call, names, {"step"}, {"short": taken, "step": step})
        return _ruled(call, names, {"short", "long"}, {"short": taken, "long": size})

    def localize(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
        tensors = (*operands, *results)
        dim, start, step, size, _ = read(call)
        held, taken = tensors[long][dim], tensors[short][dim]
        begin = scale(start, held, size) if step == 1 else start
        end = begin if taken == 0 else begin + (taken - 1) * step + 1
        if step != 1 and taken * step == held:
            end = held  # one of every `step` to the end, wherever that is on a rank
        changes: list[Change] = [
            (first, "dim", dim),
            (first + 1, "start", begin),
            (first + 2, "end", end),
        ]
        if sizes:
            changes.insert(0, (first - 1, "input_sizes", list(results[0])))
        return changes

    return OpRow(ruling, localize, **facts)


# ---- split and cat


def _split_row(name: str, part: Callable[[list[int]], Any] | None, storage: Storage = "view") -> OpRow:
    """`split(x, how, dim)`; `part(sizes)` is the `how`, called `name`, of a rank's pieces; None leaves it."""

    def dim_of(call: OpCall) -> int:
        return normal_dim(call.argument(2, "dim", 0), len(call.operands[0]))

    def local(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
        return [(1, name, part([shape[dim_of(call)] for shape in results]))] if part else []

    return OpRow(lambda call: _joined_rule(call, dim_of(call), long=0), local, moves="place", storage=storage)


def _cat(call: OpCall) -> OpRule:
    return _joined_rule(call, normal_dim(call.argument(1, "dim", 0), len(call.results[0])), long=len(call.operands))


def _halves(position: int, halved: str, *, linear: str = "") -> Callable[[OpCall], OpRule]:
    """Return the rule in which the dim at `position` is (2, half) in the tensors marked "2" in `halved`, operands then
    results, else (half)."""

    def ruling(call: OpCall) -> OpRule:
        tensors = (*call.operands, *call.results)
        dim = normal_dim(call.argument(position, "dim", -1), len(tensors[0]))
        names = [
            _dims_with(shape, dim, ("two", "half") if mark == "2" else ("half",))
            for mark, shape in zip(halved, tensors, strict=True)
        ]
        count = len(call.operands)
        sets = linear_sets(linear)
        return apply_dims(call, names[:count], names[count:], whole=frozenset({"two"}), linear=sets, sizes={"two": 2})

    return ruling


# ---- operators between tensors that have a dim and tensors that lack it


def _lacking(position: int, default: int | None = None) -> Callable[[OpCall], OpRule]:
    """Return the rule in which the dim at `position`, counted in the tensors that have it, is whole."""

    def ruling(call: OpCall) -> OpRule:
        tensors = (*call.operands, *call.results)
        rank = max(len(shape) for shape in tensors)
        dim = normal_dim(call.argument(position, "dim", default), rank)
        having = _dims_with((1,) * rank, dim, ("whole",))
        lacking = having[:dim] + having[dim + 1 :]
        return _ruled(call, [having if len(shape) == rank else lacking for shape in tensors], {"whole"}, {})

    return ruling


# ---- pads and reorderings


def _pad(call: OpCall) -> OpRule:
    """The rule of pads: padded dims are whole. It is linear unless it pads with a constant other than 0."""
    rank, pads = len(call.operands[0]), list(call.args[1])
    padded = {rank - 1 - i for i in range(len(pads) // 2) if pads[2 * i] != 0 or pads[2 * i + 1] != 0}
    operand, result = (
        tuple((f"{name}{dim}" if dim in padded else f"d{dim}",) for dim in range(rank)) for name in ("x", "y")
    )
    whole = frozenset(f"{name}{dim}" for name in ("x", "y") for dim in padded)
    linear = [] if call.argument(2, "value", 0) else [frozenset({0})]
    return apply_dims(call, [operand], [result], whole=whole, linear=linear)


def _unfold(call: OpCall) -> OpRule:
    """The rule of `unfold(x, dim, size, step)`: windows of the dim, their elements last; `unfold_backward(grad, sizes,
    dim)`."""
    backward = len(call.operands[0]) > len(call.results[0])
    x = (call.results if backward else call.operands)[0]
    dim = normal_dim(call.args[1 + backward], len(x))
    tensors = [_dims_with(x, dim, ("whole",)), (*_dims_with(x, dim, ("windows",)), ("size",))]
    return _ruled(call, tensors[::-1] if backward else tensors, {"whole", "windows", "size"}, {})


def _diagonal(call: OpCall) -> OpRule:
    """The rule of `diagonal(x, offset, dim1, dim2)`, the diagonal last; `diagonal_backward(grad, sizes, offset, dim1,
    dim2)`."""
    backward = len(call.operands[0]) < len(call.results[0])
    rank = len((call.results if backward else call.operands)[0])
    dims = [normal_dim(call.argument(i + 1 + backward, f"dim{i}", i - 1), rank) for i in (1, 2)]
    rest = tuple(names for dim, names in enumerate(plain_dims(rank)) if dim not in dims)
    tensors = [plain_dims(rank), (*rest, ("diagonal",))]
    return _ruled(call, tensors[::-1] if backward else tensors, {"diagonal", *(f"d{dim}" for dim in dims)}, {})


def _last_two(call: OpCall, rank: int) -> frozenset[int]:
    return frozenset({rank - 2, rank - 1})


SLICING_RULES = {
    **rows_of(
        "slice.Tensor", _slice_row(1, 0, 1, moves="place", storage="view", put_back="aten.slice_scatter.default")
    ),
    **rows_of("slice_backward", _slice_row(2, long=1, short=0, sizes=True, storage="fresh")),
    **rows_of("slice_scatter", _slice_row(2, long=0, short=1)),
    **rows_of("split.Tensor", _split_row("split_size", lambda sizes: sizes[0])),
    **rows_of("unsafe_split.Tensor", _split_row("split_size", lambda sizes: sizes[0], "")),
    **rows_of("split.sizes", _split_row("split_size", list)),
    **rows_of("split_with_sizes", _split_row("split_sizes", list)),
    **rows_of("unsafe_split_with_sizes", _split_row("split_sizes", list, "")),
    **rows_of("chunk", _split_row("chunks", None)),
    **rows_of("cat", OpRow(_cat, moves="join", storage="fresh", plain=True)),
    **rows_of("glu", OpRow(_halves(1, "21"))),
    **rows_of("glu_backward", OpRow(_halves(2, "122", linear="0"))),
    **rows_of("select.int", OpRow(_lacking(1), moves="place", storage="view", put_back="aten.select_scatter.default")),
    **rows_of("select_backward", OpRow(_lacking(2), result_shape(1, "input_sizes"), storage="fresh")),
    **rows_of("select_scatter", OpRow(_lacking(2))),
    **rows_of("unbind.int", OpRow(_lacking(1, 0), moves="place", storage="view")),
    **rows_of("stack", OpRow(_lacking(1, 0), moves="join")),
    **rows_of("constant_pad_nd", OpRow(_pad, moves="place")),
    **rows_of("unfold", OpRow(_unfold, moves="place", storage="view")),
    **rows_of("unfold_backward", OpRow(_unfold, result_shape(1, "input_sizes"))),
    **rows_of("diagonal", OpRow(_diagonal, moves="place", storage="view")),
    **rows_of("diagonal_backward", OpRow(_diagonal, result_shape(1, "input_sizes"))),
    **rows_of("flip", OpRow(along_dims(dim_argument(1, "dims"), linear="0"), moves="place")),
    **rows_of("roll", OpRow(along_dims(dim_argument(2, "dims", None), linear="0"), moves="place")),
    **rows_of("narrow", OpRow(moves="place", storage="view")),
    **rows_of("as_strided", OpRow(moves="place")),
    **rows_of("tril triu", OpRow(along_dims(_last_two, linear="0"))),
}
