"""Small models without a family of plans, one for each kind of operators that models are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    """A model with an LSTM that has dropout between its layers, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` to ``[b, s, 16]``."""
        return self.head(self.gru(self.lstm(self.embed(tokens))[0])[0])


class Drawing(nn.Module):
    """A model with draws of every law that a forward may have: of whole channels, of samples, in place, of each
    element's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.channels = nn.Dropout1d(0.3)
        self.inplace = nn.Dropout(0.2, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, 8]`` to ``[b, 4]``."""
        x = torch.cat(x.split([4, 4], 1)[::-1], 1)  # cut as a microbatch is long: a shape by chance
        made = self.inplace(self.channels(torch.relu(self.up(x)).unsqueeze(-1)).squeeze(-1) * 1.0)
        kept = torch.floor(0.8 + torch.rand(x.shape[0], 1))
        noise = torch.randn_like(made) * 0.1 + torch.empty_like(made).uniform_(-0.1, 0.1)
        return self.down(made * kept + noise * torch.bernoulli(torch.sigmoid(made)))


class Painter(nn.Module):
    """A U-Net: transposed convolution, skips, pads and resizes of both kinds, instance norm, attention over space."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.mid = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Conv2d(7, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images ``[b, 3, h, w]`` to images."""
        made = F.logsigmoid(self.mid(self.norm(self.down(x))))
        smaller = F.interpolate(F.max_pool2d(made, 2), scale_factor=2, mode="bilinear", align_corners=False)
        made = torch.cat([self.up(made + smaller), x], 1)
        return self.out(F.interpolate(F.adaptive_max_pool2d(made, 4), size=x.shape[2:], mode="nearest"))


class Waves(nn.Module):
    """A model over one dim: weight norm, dilation, PReLU, pools of one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 16, 2, dilation=2))
        self.act = nn.PReLU(8)
        self.point = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, 2, t]`` to ``[b, 4]``."""
        a, b = self.conv(F.pad(x, (2, 0))).chunk(2, 1)
        made = self.point(self.act(F.max_pool1d(a * torch.sigmoid(b), 2)))
        return self.head(torch.cat([F.adaptive_avg_pool1d(made, 1), F.adaptive_max_pool1d(made, 1)], 1).flatten(1))


class Recommender(nn.Module):
    """A DLRM: bags of embeddings, products of each pair of features, a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(12, 8, mode=mode) for mode in ("sum", "mean", "max")])
        self.bottom, self.pair, self.top = nn.Linear(4, 8), nn.Bilinear(8, 8, 4), nn.Linear(10, 1)

    def forward(self, dense: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """``[b, 4]`` and ``[b, 3, 2]`` to ``[b]``."""
        vectors = [self.bottom(dense), *(bag(items[:, at] % 12) for at, bag in enumerate(self.bags))]
        every = torch.stack(vectors, 1)
        i, j = torch.tril_indices(4, 4, -1)
        crossed = torch.bmm(every, every.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([crossed, self.pair(vectors[0], vectors[1])], 1)).squeeze(1)


class Readers(nn.Module):
    """A model that reads trained values by indices of the batch: one row for each sample, along dims, and by repeated
    batches."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.queries = nn.Parameter(torch.randn(1, 2, 3, 4))

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """``[b, 6, 8]`` and ``[b]`` to ``[b, 4]``."""
        made = torch.tanh(self.make(x))
        one = made[torch.arange(x.shape[0]), which % 6]
        rows = made.flatten(0, 1)[which % 6] + made.mean(0).index_select(0, which % 6)
        heads = made.unflatten(-1, (2, 4)).transpose(1, 2)
        scores = torch.matmul(self.queries, heads.transpose(-1, -2)).softmax(-1)
        return self.head(one + rows + torch.matmul(scores, heads).sum(2).flatten(1))


class Reordering(nn.Module):
    """A model that draws numbers of events, which no stream counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, 8]`` to ``[b, 4]``."""
        return self.head(torch.poisson(x.exp()))


def mean_square(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squared differences."""
    return F.mse_loss(output, wanted)
