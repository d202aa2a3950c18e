"""Rows of normalisations: the dims that are averaged over are whole, the others free."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...layout.mesh import Shape
from ..factors import Dims, OpCall, OpRule, apply_dims, quotient
from ..op_row import Change, OpRow, is_operand, plain_dims, rows_of, scale

_GRAD = (frozenset({0}),)


# ---- layer_norm and rms_norm: the last dims, those of `normalized_shape`, are whole


def _over_last(call: OpCall, x: Shape, shape: Sequence[Any]) -> tuple[Dims, Dims, frozenset[str]]:
    """Return the dims of x and of a weight, and the whole factors. Statistics have x's dims, of size 1 where
    normalized."""
    dims = plain_dims(len(x))
    last = dims[len(x) - len(shape) :]
    return dims, last, frozenset(name for names in last for name in names)


def _layer_norm(call: OpCall) -> OpRule:
    dims, last, whole = _over_last(call, call.operands[0], call.args[1])
    return apply_dims(call, [dims, *[last] * (len(call.operands) - 1)], [dims] * len(call.results), whole=whole)


def _layer_norm_backward(call: OpCall) -> OpRule:
    """The rule of `(grad, x, shape, mean, rstd, weight, bias, mask)`."""
    dims, last, whole = _over_last(call, call.operands[1], call.args[2])
    weight, bias = is_operand(call.args[5]), is_operand(call.args[6])
    gradients = ((True, dims), (weight, last), (bias, last))
    results = [names for wanted, (exists, names) in zip(call.args[7], gradients, strict=True) if wanted and exists]
    return apply_dims(call, [dims] * 4 + [last] * (weight + bias), results, whole=whole, linear=_GRAD)


# ---- group_norm: channels are (g c), groups free


def _groups_of(call: OpCall, x: Shape, groups: int, operands: Sequence[str], results: Sequence[str]) -> OpRule:
    """Return the dims of "x" [n (g c) ...], "w" [(g c)] and "m" [n g]."""
    spatial = tuple((f"s{dim}",) for dim in range(len(x) - 2))
    spelled: dict[str, Dims] = {
        "x": (("n",), ("g", "c"), *spatial),
        "w": (("g", "c"),),
        "m": (("n",), ("g",)),
    }
    channels = quotient(x[1], groups)
    whole = frozenset({"c", *(name for names in spatial for name in names)})
    sizes = {"g": groups, "c": 1 if channels is None else channels}
    return apply_dims(call, [spelled[k] for k in operands], [spelled[k] for k in results], whole=whole, sizes=sizes)


def _group_norm(groups: int, results: str) -> Callable[[OpCall], OpRule]:
    """The rule of group norms; `groups` is the position of the argument with their number."""
    return lambda call: _groups_of(
        call, call.operands[0], call.args[groups], "x" + "w" * (len(call.operands) - 1), results
    )


def _group_norm_backward(call: OpCall) -> OpRule:
    """The rule of `(grad, x, mean, rstd, weight, N, C, HxW, group, mask)`."""
    weight = is_operand(call.args[4])
    wanted = call.args[9]
    results = "".join(name for name, asked in zip("xww", wanted, strict=True) if asked)
    ruled = _groups_of(call, call.operands[0], call.args[8], "xxmm" + "w" * weight, results)
    return OpRule(ruled.operands, ruled.results, ruled.sizes, ruled.whole, _GRAD)


def _local_groups(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
    return [(1, "num_groups", scale(call.args[1], operands[0][1], call.operands[0][1]))]


def _local_group_sizes(first: int) -> Callable[[OpCall, tuple[Shape, ...], tuple[Shape, ...]], list[Change]]:
    """Make N, C, HxW and group local, which begin at argument `first`."""

    def localize(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
        x = operands[0]
        groups = scale(call.args[first + 3], x[1], call.operands[0][1])
        values = {"N": x[0], "C": x[1], "HxW": math.prod(x[2:]), "group": groups}
        return [(at, name, value) for at, (name, value) in enumerate(values.items(), first)]

    return localize


# ---- batch_norm: channels are free; the batch is whole where its statistics are taken


def _batch_norm(training: int | None, *, updates: bool = False, grad: bool = False) -> Callable[[OpCall], OpRule]:
    """The rule of batch norms. `training` is the position of that flag, None where it is known to be off. `updates`: it
    returns new running statistics, which are not a sum over the batch even where they equal the old ones."""

    def ruling(call: OpCall) -> OpRule:
        rank = len(call.operands[0])
        x = (("n",), ("c",), *((f"s{dim}",) for dim in range(rank - 2)))
        on = updates or (training is not None and bool(call.args[training]))

        def spell(shape: Shape) -> Dims:
            if len(shape) != 1:
                return x
            return ((),) if shape == (0,) else (("c",),)  # statistics that were not taken are empty

        operands, results = list(map(spell, call.operands)), list(map(spell, call.results))
        whole = frozenset(name for (name,) in x if name != "c") if on else frozenset()
        return apply_dims(call, operands, results, whole=whole, linear=_GRAD if grad else ())

    return ruling


_norm_row = partial(OpRow, precision="sensitive")

NORMALISATION_RULES = {
    **rows_of("layer_norm rms_norm _fused_rms_norm", _norm_row(_layer_norm)),
    **rows_of("native_layer_norm", _norm_row(_layer_norm, stands_for="aten.layer_norm.default")),
    **rows_of("native_layer_norm_backward", _norm_row(_layer_norm_backward, backward=True)),
    **rows_of("_fused_rms_norm_backward batch_norm_backward", _norm_row(backward=True)),
    **rows_of("group_norm", _norm_row(_group_norm(1, "x"), _local_groups)),
    **rows_of("native_group_norm", _norm_row(_group_norm(6, "xmm"), _local_group_sizes(3), storage="fresh")),
    **rows_of(
        "native_group_norm_backward",
        _norm_row(_group_norm_backward, _local_group_sizes(5), backward=True, storage="fresh"),
    ),
    **rows_of("batch_norm", _norm_row(_batch_norm(5))),
    **rows_of("_native_batch_norm_legit_functional", _norm_row(_batch_norm(5, updates=True))),
    **rows_of("_native_batch_norm_legit.no_stats", _norm_row(_batch_norm(3))),
    **rows_of("_native_batch_norm_legit_no_training", _norm_row(_batch_norm(None))),
    **rows_of("native_batch_norm_backward", _norm_row(_batch_norm(7, grad=True), backward=True)),
}
