"""Small models with an operator, a parameter or a type that a build got wrong once, or refused in torch's words."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Two layers, and what a ``kind`` does between them: from ``[b, 16]`` to ``[b, 4]``, or to a loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.inner, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.part = nn.Parameter(torch.randn(8, 16))
        self.even = torch.arange(16) % 2 == 0
        self.places = self.even.nonzero().squeeze(1)
        self.number, self.turned = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(16, 16).t())
        self.none = nn.Parameter(torch.empty(0, 16))
        self.instances = nn.InstanceNorm1d(4, track_running_stats=kind == "instances")
        if kind == "sparse":
            self.register_buffer("heads", torch.ones(2, 3, dtype=torch.bool).to_sparse(), persistent=False)
            places, values = torch.tensor([[0, 3, 5, 3], [1, 2, 2, 2]]), torch.arange(4.0)
            self.register_buffer(
                "near", torch.sparse_coo_tensor(places, values, (16, 16), check_invariants=False).coalesce()
            )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """``[b, 16]`` and ``[b, 6]`` to ``[b, 4]``."""
        h = torch.tanh(self.up(x)) + 0.0 * (self.part.sum() + self.number + self.turned.sum() + self.inner.bias.sum())
        return self.down(KINDS[self.kind](self, h, tokens))


def _put_at_mask(net: Net, h: Tensor, _: Tensor) -> Tensor:
    full = net.part.new_zeros(16, 16)
    full[net.even] = net.part
    return F.linear(h, full)


def _put_at_places(net: Net, h: Tensor, _: Tensor) -> Tensor:
    full = net.part.new_zeros(16, 16)
    full[net.places] = net.part
    return F.linear(h, full)


def _ctc(net: Net, h: Tensor, tokens: Tensor) -> Tensor:
    scores = h.view(-1, 4, 4).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(h),), 4), torch.ones(len(h), dtype=torch.long)
    return h + F.ctc_loss(scores, tokens[:, :1] % 3 + 1, *lengths)


def _scores_of_positions(_: Net, h: Tensor, tokens: Tensor) -> Tensor:
    apart = torch.arange(16)[:, None] - torch.arange(16)[None]
    return h @ torch.softmax(apart.abs() * -0.5, -1)


def _bits(_: Net, h: Tensor, tokens: Tensor) -> Tensor:
    return h * (h.detach().view(torch.int32) >> 31).abs()


def _odd(net: Net, h: Tensor, _: Tensor) -> Tensor:
    return torch.cat([h, net.none], 0) @ net.turned * net.number.exp()


def _autocast(of: Callable[[Tensor], Tensor]) -> Callable[[Net, Tensor, Tensor], Tensor]:
    def run(net: Net, h: Tensor, _: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.inner(of(net.inner(h))).float()

    return run


NARROW: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: F.softmax(h, -1),
    "log_softmax": lambda h: F.log_softmax(h, -1),
    "softplus": F.softplus,
    "layer_norm": lambda h: F.layer_norm(h, [16]),
    "group_norm": lambda h: F.group_norm(h, 4),
    "rms_norm": lambda h: F.rms_norm(h, [16]),
    "normalize": F.normalize,
    "logsumexp": lambda h: h - h.logsumexp(-1, keepdim=True),
    "std": lambda h: h / h.std(-1, keepdim=True),
}
"""Operators that are sensitive to rounding, which a model itself computes in bfloat16."""


KINDS: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "linear of positions": lambda net, h, _: h + net.inner(torch.arange(16) / 7),
    "scores of positions": _scores_of_positions,
    "waves": lambda net, h, _: h + net.inner(torch.sin(torch.arange(16) * 0.1)),
    "odd parameters": _odd,
    "values at a mask": _put_at_mask,
    "values at places": _put_at_places,
    "entries at a mask": lambda net, h, _: F.linear(h[:, net.even], net.part.t()),
    "a number of values": lambda net, h, _: h * len(torch.unique(h.argmax(1))),
    "ctc": _ctc,
    "bits of numbers": _bits,
    "sparse": lambda net, h, _: h + torch.sparse.mm(net.near, h.t()).t(),
    "instances": lambda net, h, _: net.instances(h.view(-1, 4, 4)).flatten(1),
    "products of prefixes": lambda net, h, _: torch.cumprod(torch.sigmoid(h) + 0.5, 1),
    "prefixes": lambda net, h, _: torch.cumprod(torch.logcumsumexp(h.cumsum(1) / 4, 1) / 4, 1),
    "extremes of prefixes": lambda net, h, _: h.cummax(1).values + h.cummin(1).values,
    "inverse tangents": lambda net, h, _: torch.atanh(h * 0.9),
    "between two": lambda net, h, _: torch.lerp(h, net.inner(h), torch.sigmoid(h)),
    "a fraction added": lambda net, h, _: torch.addcdiv(h, net.inner(h), h.abs() + 1, value=0.5),
    "quantiles": lambda net, h, _: h * torch.quantile(h, 0.5, dim=1, keepdim=True),
    "steps": lambda net, h, _: h * torch.heaviside(h, torch.tensor(0.5)),
    "whole quotients": lambda net, h, _: h + torch.floor_divide(h, h.abs() + 1),
    **{f"autocast {name}": _autocast(of) for name, of in NARROW.items()},
}


class Table(nn.Module):
    """A table of rows with options, looked up and averaged."""

    def __init__(self, padding: int = 100, frequency: bool = False, sparse: bool = False, bag: bool = False) -> None:
        super().__init__()
        options = {"padding_idx": None if padding == 100 else padding, "scale_grad_by_freq": frequency}
        self.rows = (nn.EmbeddingBag if bag else nn.Embedding)(12, 8, sparse=sparse, **options)  # type: ignore[arg-type]
        self.bag, self.down = bag, nn.Linear(8, 4)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """``[b, 16]`` and ``[b, 6]`` to ``[b, 4]``."""
        found = self.rows(tokens % 12)
        return self.down(found if self.bag else found.mean(1)) + x[:, :4]


class Mixed(nn.Module):
    """A frozen bfloat16 encoder, a trained bfloat16 adapter and a float32 head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.GELU()).to(torch.bfloat16).requires_grad_(False)
        self.adapter, self.head = nn.Linear(16, 16, dtype=torch.bfloat16), nn.Linear(16, 4)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """``[b, 16]`` to ``[b, 4]``."""
        h = self.encoder(x.to(torch.bfloat16))
        return self.head((h + self.adapter(h)).float())


class Waves(nn.Module):
    """A layer of complex weights in the frequencies of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.phase = (
            nn.Parameter(torch.randn(9, dtype=torch.cfloat)),
            nn.Parameter(torch.ones((), dtype=torch.cfloat)),
        )
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """``[b, 16]`` to ``[b, 4]``."""
        return self.down(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum * self.phase, n=16))
