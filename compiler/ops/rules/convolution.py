"""Rows of convolutions and pools: batch, groups and channels may be split, space is whole."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...layout.mesh import Shape
from ..factors import Dims, OpCall, OpRule, apply_dims, quotient
from ..op_row import Change, OpRow, along_dims, is_operand, result_shape, rows_of


def _spell(call: OpCall, x: Shape, weight: Shape, groups: int, *, transposed: bool) -> dict[str, Any]:
    """Return the dims of "x" [n (g i) ...], "w" [(g o) i ...] ([(g i) o ...] when transposed), "y" [n (g o) ...] and
    "b"."""
    space = len(weight) - 2
    batch: Dims = (("n",),) if len(x) == space + 2 else ()
    first, second = ("i", "o") if transposed else ("o", "i")
    per_group = quotient(weight[0], groups)
    return {
        "x": (*batch, ("g", "i"), *((f"x{dim}",) for dim in range(space))),
        "w": (("g", first), (second,), *((f"k{dim}",) for dim in range(space))),
        "y": (*batch, ("g", "o"), *((f"y{dim}",) for dim in range(space))),
        "b": (("g", "o"),),
        "sizes": {"g": groups, first: 1 if per_group is None else per_group, second: weight[1]},
        "whole": frozenset(f"{letter}{dim}" for letter in "xky" for dim in range(space)),
    }


def _groups_and_direction(call: OpCall, position: int, transposed: int | None) -> tuple[int, bool]:
    return int(call.argument(position, "groups", 1)), transposed is not None and bool(call.args[transposed])


def _forward(groups: int, transposed: int | None = None) -> Callable[[OpCall], OpRule]:
    """The rule of `(x, weight, bias, ...)`, given the positions of these arguments."""

    def ruling(call: OpCall) -> OpRule:
        count, is_transposed = _groups_and_direction(call, groups, transposed)
        spelled = _spell(call, call.operands[0], call.operands[1], count, transposed=is_transposed)
        biased = is_operand(call.argument(2, "bias"))
        operands = [spelled["x"], spelled["w"], *([spelled["b"]] if biased else [])]
        # with a bias, each part of the channels that are summed would add it once more; one operator gives all
        # gradients, so that neither factor may be partial
        whole = spelled["whole"] | ({"i"} if biased else frozenset())
        return apply_dims(call, operands, [spelled["y"]], whole=whole, sizes=spelled["sizes"])

    return ruling


def _flops(transposed: int | bool | None = None) -> Callable[[OpCall], int]:
    """Count the multiply-adds of a convolution: for each entry of the smaller side, those of a filter without its first
    dim. `transposed` is a flag, or the position of that argument."""

    def count(call: OpCall) -> int:
        turned = transposed if isinstance(transposed, bool) else transposed is not None and call.args[transposed]
        return math.prod(call.operands[0] if turned else call.results[0]) * math.prod(call.operands[1][1:])

    return count


def _temporaries(first: int) -> Callable[[OpCall, Sequence[torch.dtype]], int]:
    """Count the bytes of a convolution's temporaries, whose input is operand ``first``. oneDNN computes with channels
    in blocks: it copies what it reads, and copies its result back. In float64 torch has a matrix of all windows."""

    def count(call: OpCall, dtypes: Sequence[torch.dtype]) -> int:
        x, weight = call.operands[first : first + 2]
        dilation, transposed = call.args[5 + first], bool(call.args[6 + first])
        y = call.operands[0] if first else call.results[0]
        entries, size = sorted((math.prod(x), math.prod(y))), dtypes[0].itemsize
        if dtypes[0] == torch.float64:
            windows = math.prod(x if transposed else y) // (x if transposed else y)[1 - len(weight)]
            wide = math.prod(weight[2:]) > 1 and all(step == 1 for step in dilation)
            return windows * math.prod(weight[1:]) * size * wide
        return (sum(entries) if first else entries[-1] * (1 + transposed)) * size

    return count


def _copies(call: OpCall, dtypes: Sequence[torch.dtype]) -> int:
    """Count the bytes of a resize's temporaries: operand and result with the channels last."""
    return (math.prod(call.operands[0]) + math.prod(call.results[0])) * dtypes[0].itemsize


def _backward(call: OpCall) -> OpRule:
    """The rule of `convolution_backward(grad, x, weight, bias_sizes, ..., transposed, ..., groups, mask)`."""
    count, transposed = _groups_and_direction(call, 9, 7)
    spelled = _spell(call, call.operands[1], call.operands[2], count, transposed=transposed)
    results = [spelled[name] for name, wanted in zip("xwb", call.args[10], strict=True) if wanted]
    # the bias gradient is a sum over the output alone: every part of the input channels would give all of it
    whole = spelled["whole"] | ({"i"} if call.args[10][2] else frozenset())
    operands = [spelled["y"], spelled["x"], spelled["w"]]
    return apply_dims(call, operands, results, whole=whole, linear=[frozenset({0})], sizes=spelled["sizes"])


def _local_groups(groups: int, x: int) -> Callable[[OpCall, tuple[Shape, ...], tuple[Shape, ...]], list[Change]]:
    """Return the number of groups that a rank holds: its input channels by those of one group. `x` is the operand that
    has them."""

    def localize(call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> list[Change]:
        weight = operands[x + 1]
        count = call.argument(groups, "groups", 1)
        changes: list[Change] = []
        if count != 1:
            transposed = (call.op == "aten.convolution.default" and call.args[6]) or (x == 1 and call.args[7])
            channels = (operands[0] if x else results[0]) if transposed else operands[x]
            changes.append((groups, "groups", quotient(channels[1 - len(weight)], weight[1])))
        if x and call.args[3] is not None:
            changes.append((3, "bias_sizes", [operands[0][1]]))
        return changes

    return localize


def _space(dims: int) -> Callable[[OpCall, int], frozenset[int]]:
    return lambda call, rank: frozenset(range(rank - dims, rank))


_RESIZES = {1: "linear1d", 2: "bilinear2d bicubic2d", 3: "trilinear3d"}


def _over_space(dims: int) -> dict[str, OpRow]:
    """The rows of pools, pads and resizes over so many dims of space, with their gradients. Those of one dim are
    written as pools of two."""
    linear = [f"reflection_pad{dims}d", f"replication_pad{dims}d"]
    maxima = [f"max_pool{dims}d_with_indices", f"adaptive_max_pool{dims}d"] if dims > 1 else []
    linear += [f"avg_pool{dims}d", f"_adaptive_avg_pool{dims}d"] if dims > 1 else []
    resizes = [f"upsample_nearest{dims}d", f"_upsample_nearest_exact{dims}d"]
    resizes += [f"upsample_{kind}" for kind in _RESIZES[dims].split()]
    copied = [name for name in resizes if dims == 2 and "bicubic" not in name]
    resizes = [name for name in resizes if name not in copied]
    passed = OpRow(along_dims(_space(dims), linear="0"))
    return {
        **rows_of(" ".join(maxima), OpRow(along_dims(_space(dims)))),
        **rows_of(" ".join([*linear, *resizes, *(f"{name}_backward" for name in (*maxima, *linear))]), passed),
        **rows_of(" ".join(copied), OpRow(passed.rule, takes=_copies)),
        **rows_of(
            " ".join(f"{name}_backward" for name in (*resizes, *copied)),
            OpRow(passed.rule, result_shape(2, "input_size")),
        ),
    }


_CONV = OpRow(_forward(6), _local_groups(6, 0), precision="product", flops=_flops())
_TRANSPOSED = OpRow(precision="product", flops=_flops(True))  # torch takes it apart before anything is placed

CONVOLUTION_RULES = {
    **rows_of("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding", _CONV),
    **rows_of(
        "convolution",
        OpRow(_forward(8, 6), _local_groups(8, 0), precision="product", flops=_flops(6), takes=_temporaries(0)),
    ),
    **rows_of("conv_transpose1d conv_transpose2d.input conv_transpose3d.input", _TRANSPOSED),
    **rows_of("convolution_backward", OpRow(_backward, _local_groups(9, 1), takes=_temporaries(1))),
    **_over_space(1),
    **_over_space(2),
    **_over_space(3),
}
