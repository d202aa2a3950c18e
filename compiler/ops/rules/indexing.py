"""Rows of lookups: the indexed dims are whole, and the positions of the indices are free."""

from collections.abc import Callable, Sequence
from functools import partial

from ...layout.mesh import Shape
from ..factors import Dims, OpCall, OpRule, apply_dims, opaque, rule
from ..op_row import OpRow, argument_linear, is_operand, normal_dim, rows_of

# ---- index.Tensor and index_put


def _indexed(call: OpCall) -> tuple[Dims, list[Dims], Dims, frozenset[str]] | None:
    """Return the dims of x, of the indices, and of `x[indices]`, and the indexed factors; None if nothing indexes.

    The dims of the indices, broadcast, stand where the first of consecutive indexed dims stood, else in front.
    """
    shape = call.operands[0]
    indices = [index.index if is_operand(index) else None for index in call.args[1]]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    shapes = [call.operands[index] for index in indices if index is not None]
    if not shapes:
        return None
    rank = max(map(len, shapes))
    asking = tuple((f"i{dim}",) for dim in range(rank))
    x = tuple((f"x{dim}",) if dim in places else (f"d{dim}",) for dim in range(len(shape)))
    consecutive = places == list(range(places[0], places[-1] + 1))
    front = [names for dim, names in enumerate(x) if dim not in places and consecutive and dim < places[0]]
    back = [names for dim, names in enumerate(x) if dim not in places and not (consecutive and dim < places[0])]
    looked = (*front, *asking, *back)
    return x, [asking[rank - len(index) :] for index in shapes], looked, frozenset(f"x{dim}" for dim in places)


def _broadcasts(call: OpCall, indices: Sequence[Shape], start: int, rank: int) -> bool:
    """Return whether the result has the indices' broadcast shape from dim `start` on; boolean masks do not give it."""
    result = call.results[0][start : start + rank]
    return len(result) == rank and all(
        any(len(shape) >= rank - i and shape[i - rank] == size for shape in indices) or size == 1
        for i, size in enumerate(result)
    )


def _index(call: OpCall) -> OpRule:
    indexed = _indexed(call)
    linear = [frozenset({0})]
    if indexed is None:
        return opaque(call, linear)
    x, indices, looked, whole = indexed
    start = next((dim for dim, names in enumerate(looked) if names[0].startswith("i")), 0)
    rank = sum(names[0].startswith("i") for names in looked)
    if len(looked) != len(call.results[0]) or not _broadcasts(call, call.operands[1:], start, rank):
        return opaque(call, linear)
    return apply_dims(call, [x, *indices], [looked], whole=whole, linear=linear)


def _may_mask(call: OpCall) -> bool:
    """Return whether an index may be a boolean mask over several dims of x: it has their sizes, and the call says no
    more."""
    shape = call.operands[0]
    for dim, index in enumerate(call.args[1]):
        covered = call.operands[index.index] if is_operand(index) else ()
        if len(covered) > 1 and shape[dim : dim + len(covered)] == covered:
            return True
    return False


def _index_put(call: OpCall) -> OpRule:
    """The rule of `index_put(x, indices, values)`. All is whole: a part of the values would leave the other entries of
    x as they were."""
    indexed = _indexed(call)
    values = call.operands[-1]
    linear = argument_linear(call, "02")
    if indexed is None or len(values) > len(indexed[2]) or _may_mask(call):
        return opaque(call, linear)
    x, indices, looked, whole = indexed
    asking = frozenset(name for names in looked for name in names if name.startswith("i"))
    return apply_dims(
        call, [x, *indices, looked[len(looked) - len(values) :]], [x], whole=whole | asking, linear=linear
    )


# ---- gather, scatter and their relatives: (x, dim, index, ...), index as long as x in the other dims, or shorter


def _picked(text: str, *, free: bool = False, linear: str = "") -> Callable[[OpCall], OpRule]:
    """Return the rule of a lookup along `dim`. `text` has a letter for each tensor, operands then results: "x" for one
    that is indexed, "i" for one with the positions of the indices, "l" for a list of these alone, "1" for a tensor of
    rank 0."""

    def ruling(call: OpCall) -> OpRule:
        dim = normal_dim(call.args[1], len(call.operands[0]))
        tensors = (*call.operands, *call.results)
        ranked = [shape for letter, shape in zip(text, tensors, strict=True) if letter in "xi"]

        def spell(index: int, letter: str, shape: Shape) -> Dims:
            if letter in "l1":
                return (("i",),) * len(shape)
            dims = [f"d{place}" for place in range(len(shape))]
            for place, size in enumerate(shape):
                if any(other[place] != size for other in ranked):  # it speaks of the first part of a longer one
                    dims[place] = f"w{index}_{place}"
                if place == dim:
                    dims[place] = letter
            return tuple((name,) for name in dims)

        named = [spell(index, *each) for index, each in enumerate(zip(text, tensors, strict=True))]
        names = {name for dims in named for dim_names in dims for name in dim_names}
        whole = frozenset(name for name in names if name[0] == "w" or name == "x" or (name == "i" and not free))
        count = len(call.operands)
        return apply_dims(call, named[:count], named[count:], whole=whole, linear=argument_linear(call, linear))

    return ruling


def _embedding_backward(call: OpCall) -> OpRule:
    """The rule of a lookup's backward. Gradients of one row add up, unless each is divided by the number of its
    lookups."""
    lead = "...!" if call.argument(4, "scale_grad_by_freq", False) else "..."
    return rule(f"{lead} d, {lead} -> v! d", linear="0")(call)


def _embedding_rule(call: OpCall) -> OpRule:
    """The rule of `embedding`. A gradient that is divided by the number of a row's lookups needs all lookups, of all
    rows."""
    if call.argument(3, "scale_grad_by_freq", False):
        return rule("v! d, ...! -> ...! d", linear="0")(call)
    return rule("v d, ... -> ... d", linear="0")(call)


_gather = partial(OpRow, moves="index")
_scatter = partial(OpRow, moves="scatter")

INDEXING_RULES = {
    # a rank with a part of v looks up its own rows and gives zeros elsewhere: what is emitted masks the indices
    **rows_of("embedding", _gather(_embedding_rule, counted=(0, 0), replaced=True, storage="fresh")),
    **rows_of(
        "embedding_dense_backward",
        _scatter(_embedding_backward, unread_rows=True, storage="fresh", addable=True, compiled=False),
    ),
    **rows_of("one_hot", _scatter(rule("... -> ... c!"))),
    # the bucket is how many boundaries lie below: a count, which adds up
    **rows_of("bucketize.Tensor", OpRow(rule("..., boundaries -> ..."), rises_at=1)),
    **rows_of("index.Tensor _unsafe_index.Tensor", _gather(_index)),
    **rows_of("index_put _unsafe_index_put", _scatter(_index_put)),
    **rows_of("gather", _gather(_picked("xii", linear="0"), of_rows="entry")),
    **rows_of("scatter.value", _scatter(_picked("xix", linear="03"))),
    **rows_of("scatter.src scatter_add", _scatter(_picked("xiix", linear="03"))),
    **rows_of("scatter_reduce.two", _scatter(_picked("xiix"))),
    **rows_of("index_select", _gather(_picked("xli", free=True, linear="0"))),
    **rows_of("index_add index_copy", _scatter(_picked("xlix", linear="03"))),
    **rows_of("index_fill.int_Scalar", _scatter(_picked("xlx", linear="03"))),
    # torch takes these apart before anything is placed
    **rows_of("embedding_bag embedding_bag.padding_idx _embedding_bag", OpRow(moves="index")),
}
