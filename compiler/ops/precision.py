"""Precision: where a plan computes in a narrow type, and which operators do so there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_PRODUCTS = """
    mm bmm addmm addbmm baddbmm mv addmv dot vdot outer addr linear matmul einsum bilinear prelu attention
    scaled_dot_product_attention convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    grouped_mm_fallback _grouped_mm lstm gru rnn_tanh rnn_relu
"""
_SENSITIVE = """
    sum nansum mean prod cumsum cumprod logcumsumexp logsumexp softmax _softmax log_softmax _log_softmax
    var var_mean std std_mean norm linalg_vector_norm dist cdist pdist renorm cosine_similarity
    layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm
    batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit _native_batch_norm_legit_no_training
    pow exp exp2 expm1 log log10 log2 log1p reciprocal rsqrt softplus sinh cosh tan acos asin erfinv
    row_max loss_parts square_sum
"""
_LOSSES = """
    token_loss cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss
    margin_ranking_loss cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss ctc_loss
"""

PRODUCTS = frozenset(_PRODUCTS.split())
"""Operators that take and give the narrow type; this list and the next are those of torch's autocast."""
SENSITIVE = frozenset(_SENSITIVE.split())
"""Operators that take and give float32: sums, statistics and norms, softmax, and what amplifies rounding."""
LOSSES = frozenset(_LOSSES.split())
"""Losses: sensitive, and what is made of them stays float32 too."""


def base_name(op: str) -> str:
    """``softmax`` of ``aten.softmax.int``."""
    return op.split(".")[1] if "." in op else op


def is_sensitive(op: str, *, backward: bool = False) -> bool:
    """Whether an operator of a forward never takes a narrow type; or one of a backward, as that of such an operator."""
    name = base_name(op)
    if backward:
        forward = name.removesuffix("_data").removesuffix("_backward")
        return name != forward and (forward in SENSITIVE or forward in LOSSES)
    return name in SENSITIVE or name in LOSSES


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a type rounds what float32 holds."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class PrecisionLine:
    """One line, its pattern resolved: a type, the modules (with all inside them), and the line's number."""

    dtype: torch.dtype
    modules: tuple[str, ...]
    line: int = 0

    def holds(self, module: str) -> bool:
        """Whether a module is one of the line's, or inside one; ``*`` in its path is any number."""
        path = module.split(".") if module else []
        return any(_begins(path, name.split(".") if name else []) for name in self.modules)


def _begins(path: list[str], head: list[str]) -> bool:
    alike = (at == name or (at == "*" and name.isdigit()) for at, name in zip(path, head, strict=False))
    return len(path) >= len(head) and all(alike)


PrecisionRegions = tuple[PrecisionLine, ...]
"""A plan's lines in order: of those that hold for a module the last counts."""


def regions(lines: Iterable[tuple[str, Sequence[str], int]]) -> PrecisionRegions:
    """Lines from their types by name, modules and numbers."""
    return tuple(PrecisionLine(getattr(torch, name), tuple(modules), line) for name, modules, line in lines)


def line_at(lines: PrecisionRegions, module: str) -> PrecisionLine | None:
    """The line by which a module computes in a narrow type, if it does."""
    found = next((line for line in reversed(lines) if line.holds(module)), None)
    return found if found is not None and is_narrow(found.dtype) else None


def may_narrow(lines: PrecisionRegions, module: str) -> bool:
    """Whether a module's operators may round; ``layers.*`` stands for blocks of which one may."""
    if "*" in module.split("."):
        return any(is_narrow(line.dtype) and line.holds(module) for line in lines)
    return line_at(lines, module) is not None


@dataclass(frozen=True, slots=True)
class Rounding:
    """All by which a plan's programs may round what the model computes: its lines, and the type in which gradients of
    microbatches are added up."""

    lines: PrecisionRegions = ()
    sums: torch.dtype = torch.float32
