"""Rows of losses: element by element without a reduction, linear if they sum, whole if they average."""

from collections.abc import Callable

from ..factors import Dims, OpCall, OpRule, apply_dims
from ..op_row import OpRow, aligned_dims, plain_dims, rows_of

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's reduction argument
_GRAD = (frozenset({0}),)


def _elementwise(reduction: int, *, grad: bool = False, bounds: bool = False) -> OpRow:
    """The row of a loss of tensors that broadcast, or of its gradient; `reduction` is the position of that argument."""

    def ruling(call: OpCall) -> OpRule:
        rank = max(len(shape) for shape in call.operands)
        operands = [aligned_dims(len(shape), rank) for shape in call.operands]
        result = plain_dims(rank) if call.results[0] else ()
        averages = call.argument(reduction, "reduction", _MEAN) == _MEAN
        whole = frozenset(f"d{dim}" for dim in range(rank)) if averages else frozenset()
        return apply_dims(call, operands, [result], whole=whole, linear=_GRAD if grad else ())

    return OpRow(ruling, precision="loss", backward=grad, bounds=bounds)


def _classes(call: OpCall, rank: int) -> tuple[Dims, Dims]:
    """Return the dims of scores [c], [n c] or [n c ...], and of the targets, which lack the classes."""
    scores = (("c",),) if rank == 1 else (("n",), ("c",), *((f"s{dim}",) for dim in range(rank - 2)))
    return scores, tuple(names for names in scores if names != ("c",))


def _class_loss(position: int) -> Callable[[OpCall], OpRule]:
    """The rule of `(scores, target, weight, reduction, ...)`. A target with as many dims as the scores holds
    probabilities."""

    def ruling(call: OpCall) -> OpRule:
        rank = len(call.operands[0])
        scores, target = _classes(call, rank)
        reduction = call.argument(position, "reduction", _MEAN)
        weights: list[Dims] = [(("c",),)] * (len(call.operands) - 2)
        operands = [scores, scores if len(call.operands[1]) == rank else target, *weights]
        results: list[Dims] = [target if reduction == _NONE else (), *[()] * (len(call.results) - 1)]
        whole = {"c"} | ({name for names in target for name in names} if reduction == _MEAN else set())
        return apply_dims(call, operands, results, whole=frozenset(whole))

    return ruling


def _nll_backward(call: OpCall) -> OpRule:
    """The rule of `(grad, scores, target, weight, reduction, ignore_index, total_weight)`. It gets the total, so n is
    free."""
    scores, target = _classes(call, len(call.operands[1]))
    weights: list[Dims] = [(("c",),)] * (len(call.operands) - 4)
    operands: list[Dims] = [target if call.operands[0] else (), scores, target, *weights, ()]
    return apply_dims(call, operands, [scores], whole=frozenset({"c"}), linear=_GRAD)


_CLASSES = OpRow(_class_loss(3), precision="loss")
_COMPOSITE = """
    nll_loss2d poisson_nll_loss hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss
    multi_margin_loss multilabel_margin_loss ctc_loss.IntList
"""

LOSSES_RULES = {
    **rows_of("mse_loss l1_loss kl_div soft_margin_loss", _elementwise(2)),
    **rows_of("smooth_l1_loss huber_loss", _elementwise(2, bounds=True)),
    **rows_of("binary_cross_entropy", _elementwise(3)),
    **rows_of("binary_cross_entropy_with_logits", _elementwise(4)),
    **rows_of("mse_loss_backward soft_margin_loss_backward", _elementwise(3, grad=True)),
    **rows_of("smooth_l1_loss_backward huber_loss_backward", _elementwise(3, grad=True, bounds=True)),
    **rows_of("binary_cross_entropy_backward", _elementwise(4, grad=True)),
    **rows_of("cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward nll_loss2d_forward", _CLASSES),
    **rows_of("nll_loss_backward nll_loss2d_backward", OpRow(_nll_backward, precision="loss", backward=True)),
    # torch takes these apart before anything is placed
    **rows_of(_COMPOSITE, OpRow(precision="loss")),
}
