"""Rows of operators that only rename dims: the same elements in the same order, or dims put elsewhere."""

import math
from collections.abc import Sequence
from functools import partial

from ...layout.mesh import Shape
from ..factors import Dims, OpCall, OpRule, apply_dims, quotient
from ..op_row import Change, OpRow, normal_dim, normal_dims, plain_dims, pointwise, result_shape, rows_of

_LINEAR = (frozenset({0}),)


def refine(before: Shape, after: Shape) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Return the common refinement of two shapes of the same elements: the dims of both, sizes, and factors that are
    whole.

    Both shapes are read from the major side; where neither dim divides the other, everything up to the next
    position at which both have passed the same number of elements is whole.
    """
    names: list[list[list[str]]] = [[[] for _ in before], [[] for _ in after]]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    rests = [
        [(dim, size) for dim, size in enumerate(shape) if size != 1] for shape in (before, after)
    ]  # what is not yet named, dim by dim

    def take(side: int, size: int, name: str) -> None:
        dim, rest = rests[side][0]
        names[side][dim].append(name)
        sizes[name] = size
        left = quotient(rest, size)
        rests[side][:1] = [] if left is None or left == 1 else [(dim, left)]

    while rests[0] and rests[1]:
        a, b = rests[0][0][1], rests[1][0][1]
        part = a if quotient(b, a) is not None else b if quotient(a, b) is not None else None
        if part is not None:
            shared = f"d{len(sizes)}"
            take(0, part, shared)
            take(1, part, shared)
            continue
        for side, count in enumerate(_next_meeting(*rests)):
            for _ in range(count):
                name = f"d{len(sizes)}"
                whole.add(name)
                take(side, rests[side][0][1], name)
    for side in (0, 1):  # only where the elements differ in number, which a valid call never has
        while rests[side]:
            name = f"d{len(sizes)}"
            whole.add(name)
            take(side, rests[side][0][1], name)
    dims_before, dims_after = (tuple(map(tuple, spelled)) for spelled in names)
    return dims_before, dims_after, sizes, frozenset(whole)


def _next_meeting(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the smallest counts of dims of each side that hold the same number of elements, or the counts of all
    dims."""
    for total in range(2, len(a) + len(b)):
        for count in range(max(1, total - len(b)), min(len(a), total - 1) + 1):
            if math.prod(size for _, size in a[:count]) == math.prod(size for _, size in b[: total - count]):
                return count, total - count
    return len(a), len(b)


def _view(call: OpCall) -> OpRule:
    before, after, sizes, whole = refine(call.operands[0], call.results[0])
    return OpRule((before,), (after,), sizes, whole, _LINEAR)


def _local_unflatten(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
    """Make the sizes of `unflatten(x, dim, sizes)` local: they are those of the result from `dim` on."""
    dim = normal_dim(call.args[1], len(operands[0]))
    return [(2, "sizes", list(results[0][dim : dim + len(call.args[2])]))]


def _renamed(call: OpCall, order: Sequence[int | None]) -> OpRule:
    """Return the rule in which result dim i is operand dim order[i], or new and of size 1."""
    result: Dims = tuple(() if dim is None else (f"d{dim}",) for dim in order)
    return apply_dims(call, [plain_dims(len(call.operands[0]))], [result], linear=_LINEAR)


def _transpose(call: OpCall) -> OpRule:
    rank = len(call.operands[0])
    order = list(range(rank))
    if rank:
        a, b = (normal_dim(dim, rank) for dim in call.args[1:3])
        order[a], order[b] = order[b], order[a]
    return _renamed(call, order)


def _last_two(call: OpCall) -> OpRule:
    order = list(range(len(call.operands[0])))
    order[-2:] = reversed(order[-2:])
    return _renamed(call, order)


def _permute(call: OpCall) -> OpRule:
    rank = len(call.operands[0])
    return _renamed(call, [normal_dim(dim, rank) for dim in call.args[1]])


def _movedim(call: OpCall) -> OpRule:
    rank = len(call.operands[0])
    source, target = ([normal_dim(dim, rank) for dim in ([d] if isinstance(d, int) else d)] for d in call.args[1:3])
    rest = iter(dim for dim in range(rank) if dim not in source)
    placed = dict(zip(target, source, strict=True))
    return _renamed(call, [placed[dim] if dim in placed else next(rest) for dim in range(rank)])


def _unsqueeze(call: OpCall) -> OpRule:
    rank = len(call.operands[0])
    order: list[int | None] = list(range(rank))
    order.insert(normal_dim(call.args[1], rank + 1), None)
    return _renamed(call, order)


def _squeeze(call: OpCall) -> OpRule:
    """The rule of `squeeze`. A dim that it was told to drop but keeps, as its size is not 1, must be whole: a part of
    it could be of size 1."""
    shape = call.operands[0]
    dims = normal_dims(call.args[1] if len(call.args) > 1 else None, len(shape))
    kept = [dim for dim, size in enumerate(shape) if not (dim in dims and size == 1)]
    whole = frozenset(f"d{dim}" for dim in kept if dim in dims)
    result = tuple((f"d{dim}",) for dim in kept)
    return apply_dims(call, [plain_dims(len(shape))], [result], whole=whole, linear=_LINEAR)


def _repeat(call: OpCall) -> OpRule:
    """The rule of `repeat`. A repeated dim is (times, dim); other ranks may hold other repetitions."""
    shape, result = call.operands[0], call.results[0]
    new = len(result) - len(shape)
    spelled = []
    sizes: dict[str, int] = {}
    for dim, (size, times) in enumerate(zip((1,) * new + tuple(shape), call.args[1], strict=True)):
        names = [(name, part) for name, part in ((f"r{dim}", times), (f"d{dim}", size)) if part != 1]
        sizes.update(names)
        spelled.append(tuple(name for name, _ in names))
    operand = tuple((f"d{dim + new}",) if size != 1 else () for dim, size in enumerate(shape))
    return OpRule((operand,), (tuple(spelled),), sizes, linear=_LINEAR)


def _local_repeat(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
    shape = (1,) * (len(results[0]) - len(operands[0])) + tuple(operands[0])
    times = [quotient(size, held) for size, held in zip(results[0], shape, strict=True)]
    return [(1, "repeats", times)]


def _repeat_interleave(call: OpCall) -> OpRule:
    """The rule of `repeat_interleave(x, times, dim)`: the dim becomes (dim, times), or the flattened x does where no
    dim is given."""
    shape, times, chosen = call.operands[0], call.args[1], call.argument(2, "dim")
    operand, _, sizes, _ = refine(shape, shape)
    result = [*operand]
    if chosen is None:
        result = [tuple(name for names in operand for name in names)]
    if times != 1:
        dim = 0 if chosen is None else normal_dim(chosen, len(shape))
        result[dim] = (*result[dim], "r")
        sizes["r"] = times
    return OpRule((operand,), (tuple(result),), sizes, linear=_LINEAR)


def _local_interleave(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
    chosen = call.argument(2, "dim")
    dim = 0 if chosen is None else normal_dim(chosen, len(operands[0]))
    held = math.prod(operands[0]) if chosen is None else operands[0][dim]
    changes: list[Change] = [(1, "repeats", quotient(results[0][dim], held))]
    if call.kwargs.get("output_size") is not None:
        changes.append((len(call.args), "output_size", results[0][dim]))
    return changes


_shaped = partial(OpRow, moves="shape", storage="view")
_turned = partial(OpRow, moves="dims", storage="view")

VIEWS_RULES = {
    **rows_of("view _unsafe_view", _shaped(_view, result_shape(1, "size"))),
    **rows_of("reshape", _shaped(_view, result_shape(1, "size"), plain=True)),
    **rows_of("flatten.using_ints", _shaped(_view)),
    **rows_of("unflatten.int", _shaped(_view, _local_unflatten)),
    **rows_of("view.dtype", OpRow(storage="view", exported=False)),  # it makes other numbers of the same bytes
    **rows_of("repeat_interleave.Tensor", OpRow()),  # it makes positions
    **rows_of("expand", _turned(pointwise("0"), result_shape(1, "size"), plain=True)),
    **rows_of("expand_as", _turned(pointwise("0"))),
    **rows_of("transpose.int", _turned(_transpose, plain=True)),
    **rows_of("swapaxes", _turned(_transpose)),
    **rows_of("t", _turned(_last_two, plain=True)),
    **rows_of("mT", _turned(_last_two)),
    **rows_of("permute", _turned(_permute)),
    **rows_of("movedim.int movedim.intlist", _turned(_movedim)),
    **rows_of("unsqueeze", _turned(_unsqueeze, plain=True)),
    **rows_of("squeeze squeeze.dim squeeze.dims", _turned(_squeeze, plain=True)),
    **rows_of("repeat", OpRow(_repeat, _local_repeat, moves="dims")),
    **rows_of("repeat_interleave.self_int", OpRow(_repeat_interleave, _local_interleave, moves="dims")),
}
