"""Attention's kernel on a CPU: as autograd has it, however its operands lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from parc.compiler.mesh import Mesh
from parc.runtime.kernels import KERNELS, Site

SITE = Site(Mesh(), {}, [], [], torch.device("cpu"))


def lying(tensor: torch.Tensor, strided: bool) -> torch.Tensor:
    """The same values; ``strided``: those of a head are apart, as a transposed projection has them."""
    return tensor.mT.contiguous().mT if strided else tensor


@pytest.mark.parametrize("strided", ["", "q", "k", "v", "grad", "q k v grad"])
@pytest.mark.parametrize("size", [8, 4, 16])
def test_heads_lie_as_they_may_and_values_have_a_size_of_their_own(strided: str, size: int) -> None:
    torch.manual_seed(0)
    shapes = {"q": (2, 4, 6, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, size), "grad": (2, 4, 6, size)}
    q, k, v, grad = (torch.randn(shape).requires_grad_(name != "grad") for name, shape in shapes.items())
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    given = zip(shapes, (q, k, v, grad), strict=True)
    q, k, v, grad = (lying(tensor.detach(), name in strided.split()) for name, tensor in given)
    out, lse = KERNELS["parc.attention.default"](SITE, q, k, v, None, None, True, None, 0.0)
    torch.testing.assert_close(out, want)
    found = KERNELS["parc.attention_backward.default"](SITE, grad, q, k, v, None, None, out, lse, True, None, 0.0)
    torch.testing.assert_close(found, wanted)
