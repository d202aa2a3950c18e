"""Every operator on complex numbers, as pairs of reals, has torch's own values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from parc.compiler.capture.capture import detach_without_gradients
from parc.compiler.capture.complex.form import real_form
from parc.compiler.capture.complex.rules import as_pairs
from parc.compiler.capture.faults import CaptureError
from parc.compiler.capture.functional import functional
from parc.compiler.capture.node_facts import noted
from parc.compiler.torch_private import quiet

INDEX = torch.tensor([2, 0])


def _written(z: Tensor, w: Tensor) -> Tensor:
    made = torch.zeros(4, 3, dtype=z.dtype)
    made[1:] = z[1:] * 2
    made[:, 1] += w[:, 0]
    made[0] = z[0] * 1j
    return made


def _no_grad(z: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        size = z / z.abs()
    return w * size


# z and w are [4, 3], x is [4, 3] and real
EXPRESSIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add": lambda z, w, x: [z + w, z + x, x + z, z + 2, z + 1j, 1 - z, x - z, torch.add(z, w, alpha=2j), z - w * 1j],
    "mul": lambda z, w, x: [z * w, z * x, x * 1j, z * (1 - 2j), z * 3, z * INDEX.sum(), z * w[0], torch.square(z)],
    "div": lambda z, w, x: [z / w, z / x, x / z, z / 2, 1 / z, z / 2j, z.reciprocal(), z.rsqrt()],
    "pow": lambda z, w, x: [z**2, z**3, z**-2, z**0, z**0.5, z**w, x.abs() ** z, 2**z, z**1.5, (1 + 1j) ** z],
    "signs": lambda z, w, x: [
        -z, z.conj(), z.conj() * w, z.imag, z.conj().imag, +z, z.resolve_conj(), z.conj().resolve_conj().T,
    ],
    "sizes": lambda z, w, x: [z.abs(), z.angle(), z.sgn(), z.norm(), torch.linalg.vector_norm(z, 1, -1)],
    "zero": lambda z, w, x: [(z - z).abs(), (z - z).sgn(), torch.complex(x * 0, x * 0).angle(), (z - z) * w],
    "parts": lambda z, w, x: [z.real, z.imag, torch.complex(x, x * 2), torch.polar(x.abs(), x), torch.view_as_real(z)],
    "exp": lambda z, w, x: [z.exp(), torch.exp(1j * x), z.expm1(), torch.exp(-2j * x * w), z.sigmoid()],
    "log": lambda z, w, x: [z.log(), z.log2(), z.log10(), z.log1p(), z.sqrt(), torch.logaddexp(x, x)],
    "turns": lambda z, w, x: [z.sin(), z.cos(), z.tan(), z.sinh(), z.cosh(), z.tanh()],
    "compared": lambda z, w, x: [z * (z == w), z * (z != z.conj()), z * (z == 1), z * z.isnan(), z * z.isfinite()],
    "sums": lambda z, w, x: [z.sum(), z.sum(0), z.mean(), z.mean(-1, keepdim=True), z.cumsum(0)],
    "products": lambda z, w, x: [
        z @ w.T, z.T.mm(w), torch.bmm(z[None], w.T[None]), z @ w[0], torch.dot(z[0], w[0]), torch.vdot(z[0], w[0]),
        torch.outer(z[0], w[1]), torch.einsum("ij,kj,lj->ikl", z, w, z), torch.einsum("ij,kj->ik", z, w.conj()),
        F.linear(z, w, w[:, 0]), torch.addmm(z @ z.T, z, w.T, beta=2, alpha=1j), torch.kron(z, w), z.mv(w[0]),
        torch.addcmul(z, w, w), torch.matmul(z[:, None, None], w[:, :, None]), torch.lerp(z, w, 0.25),
        torch.baddbmm(z[None] @ w.T[None], z[None], w.T[None]),
    ],
    "convolution": lambda z, w, x: [F.conv1d(z[None], w[:, :, None].expand(4, 3, 2)[:, None, 0], w[:, 0], groups=4)],
    "shapes": lambda z, w, x: [
        z.reshape(3, 4), z.T.flatten(), z.view(2, 2, 3), z[None].squeeze(0), z[:, None].expand(4, 2, 3),
        z.permute(1, 0),
        z.repeat(2, 1), z.flip(0), z.roll(1, 1), z.unflatten(0, (2, 2)).movedim(0, -1), z.unfold(0, 2, 1), z.tile(2),
        z.squeeze(), z.expand_as(w), z.contiguous().clone(), z.rot90(), z.swapaxes(0, 1), z.ravel(),
    ],
    "pieces": lambda z, w, x: [
        z[1:3], z[:, -1], z[INDEX], z.index_select(0, INDEX), z.gather(0, INDEX[:, None].expand(2, 3)), z[1, 2], z[::2],
        *z.unbind(0), *z.chunk(2), *z.split([1, 3]), z.diagonal(), z.tril(), z.triu(1), torch.diag_embed(z[0]),
    ],
    "joined": lambda z, w, x: [
        torch.cat([z, w]), torch.cat([z, x]), torch.stack([z, w], 1), torch.where(x > 0, z, w),
        torch.where(x > 0, z, 1j),
        torch.where(x > 0, z, x.detach()), z.masked_fill(x > 0, 2j), F.pad(z, (1, 2)), F.pad(z, (0, 1), value=3.0),
        _written(z, w),
        z.index_add(0, INDEX, w[:2]), z.scatter(0, INDEX[:, None].expand(2, 3), w[:2]), z.index_put((INDEX,), w[:2]),
        torch.cat([z, INDEX[:, None].expand(2, 3)]),
    ],
    "made": lambda z, w, x: [
        z + torch.zeros_like(z), z * torch.ones(3, dtype=z.dtype), z * torch.full((3,), 1 + 2j, dtype=z.dtype),
        z + torch.full_like(z, 2j), x * torch.zeros_like(z, dtype=x.dtype), z * z.new_full((3,), 1j), z.new_ones(3) * x,
    ],
    "types": lambda z, w, x: [x.to(z.dtype), z.to(torch.complex64).to(z.dtype), x.to(z.dtype) * w, z.to(torch.cfloat)],
    "detached": lambda z, w, x: [z.detach() * w, _no_grad(z, w)],
    "fft": lambda z, w, x: [
        torch.fft.fft(z), torch.fft.ifft(z), torch.fft.fft(z, dim=0), torch.fft.fft(x), torch.fft.fft(z, n=5),
        torch.fft.fft(z, n=2, norm="ortho"), torch.fft.ifft(z, norm="forward"), torch.fft.fft(x, dim=0, norm="forward"),
        torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real,
    ],
    "rfft": lambda z, w, x: [
        torch.fft.rfft(x), torch.fft.rfft(x, dim=0, norm="ortho"), torch.fft.irfft(z), torch.fft.irfft(z, n=5),
        torch.fft.irfft(z, n=4, dim=0, norm="ortho"), torch.fft.irfft(torch.fft.rfft(x, dim=0), n=4, dim=0),
        torch.fft.hfft(z), torch.fft.ihfft(x), torch.fft.rfft(x, n=7),
    ],
    "fftn": lambda z, w, x: [
        torch.fft.fft2(z), torch.fft.ifft2(x), torch.fft.fftn(z, norm="ortho"), torch.fft.rfft2(x), torch.fft.irfft2(z),
        torch.fft.rfftn(x, s=(3, 5)), torch.fft.irfftn(z, s=(4, 3), norm="ortho"), torch.fft.ifftn(z, s=(2, 2)),
        torch.fft.fftn(x, dim=(0, 1)).real,
    ],
    "shifts": lambda z, w, x: [torch.fft.fftshift(z), torch.fft.ifftshift(z, dim=0), z * torch.fft.fftfreq(3)],
}  # fmt: skip


class _Body(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, z: Tensor, w: Tensor, x: Tensor) -> list[Tensor]:
        made = self.body(torch.view_as_complex(z), torch.view_as_complex(w), x)
        return [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value for value in made]


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((4, 3, 2), (4, 3, 2), (4, 3))]


def _in_reals(body: nn.Module) -> Callable[..., Any]:
    with quiet():
        exported = torch.export.export(body, tuple(_inputs()), strict=False)
        assert detach_without_gradients(exported.graph_module)
        exported = functional(exported)
    module = exported.graph_module
    as_pairs(module.graph)
    module.graph.lint()
    for node in module.graph.nodes:
        for value in noted(node).value if isinstance(noted(node).value, (list, tuple)) else [noted(node).value]:
            assert not isinstance(value, Tensor) or not value.is_complex(), node
    constants = [
        real_form(exported.constants[name])
        for name in exported.graph_signature.inputs_to_lifted_tensor_constants.values()
    ]
    return lambda *inputs: fx.Interpreter(module).run(*constants, *inputs)


def _named(where: str, message: str) -> str:
    return f"{where}: {message}"


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_pairs_have_the_values_and_gradients_of_complex_numbers(name: str) -> None:
    body = _Body(EXPRESSIONS[name])
    run = _in_reals(body)
    inputs = [value.requires_grad_() for value in _inputs()]
    wanted, found = body(*inputs), run(*inputs)
    for at, (own, made) in enumerate(zip(wanted, found, strict=True)):
        where = f"{name}[{at}]"
        assert own.shape == made.shape and own.dtype == made.dtype, where
        torch.testing.assert_close(made, own, rtol=1e-9, atol=1e-9, msg=partial(_named, where))
        assert own.requires_grad or not made.requires_grad, where
        if not own.requires_grad or not made.requires_grad:
            continue
        weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(at)).to(own.dtype)
        own_grads = torch.autograd.grad((own * weights).sum(), inputs, retain_graph=True, materialize_grads=True)
        grads = torch.autograd.grad((made * weights).sum(), inputs, retain_graph=True, materialize_grads=True)
        for grad, own_grad in zip(grads, own_grads, strict=True):
            torch.testing.assert_close(grad, own_grad, rtol=1e-8, atol=1e-8, msg=partial(_named, where))


def test_an_operator_without_a_form_in_reals_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"aten\.linalg_inv_ex\.default of complex numbers cannot be computed"):
        _in_reals(_Body(lambda z, w, x: [torch.linalg.inv(z[:3])]))
