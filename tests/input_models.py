"""Small models whose inputs their first layers do not tell: patches, videos, series, towers, forwards of any names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Patches(nn.Module):
    """A picture cut into patches before the first product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(3 * 8 * 8, 16), nn.Linear(16, 4)

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        """``[b, c, h, w]`` to scores."""
        b, c, h, w = img.shape
        x = img.reshape(b, c, h // 8, 8, w // 8, 8).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * 64)
        return self.out(self.up(x).mean(1))


class VideoPatches(nn.Module):
    """A video cut into patches of two frames, with a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(3 * 2 * 8 * 8), nn.Linear(3 * 2 * 8 * 8, 16)
        self.positions, self.out = nn.Parameter(torch.zeros(1, 2 * 16, 16)), nn.Linear(16, 4)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        """``[b, c, f, h, w]`` to scores."""
        b, c, f, h, w = video.shape
        x = video.reshape(b, c, f // 2, 2, h // 8, 8, w // 8, 8).permute(0, 2, 4, 6, 3, 5, 7, 1).reshape(b, -1, c * 128)
        return self.out((self.up(self.norm(x)) + self.positions).mean(1))


class Frames(nn.Module):
    """A video of which each frame goes through a net of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.out = nn.Linear(8, 4)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        """``[b, f, c, h, w]`` to scores."""
        return self.out(self.net(video.flatten(0, 1)).view(*video.shape[:2], -1).mean(1))


class Waves(nn.Module):
    """A series of numbers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, 8), nn.Linear(8, 1)
        self.double()

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` to the next numbers."""
        h = c = torch.zeros(series.shape[0], 8, dtype=torch.double)
        results = []
        for value in series.split(1, dim=1):
            h, c = self.cell(value, (h, c))
            results.append(self.out(h))
        return torch.cat(results, dim=1)


class Towers(nn.Module):
    """Features of pictures and of texts, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.table = nn.Conv2d(3, 16, 8, 8), nn.Embedding(64, 16)
        self.left, self.right = nn.Linear(16, 32), nn.Linear(16, 32)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, image: torch.Tensor | None = None, text: torch.Tensor | None = None) -> tuple[Any, ...]:
        """A batch of either, or of both."""
        left = None if image is None else F.normalize(self.left(self.picture(image).flatten(2).mean(2)), dim=-1)
        right = None if text is None else F.normalize(self.right(self.table(text).mean(1)), dim=-1)
        return left, right, self.scale.exp()


class Balanced(nn.Module):
    """Logits, and a loss of the balance of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.router, self.out = nn.Embedding(64, 16), nn.Linear(16, 4), nn.Linear(16, 64)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """``[b, s]`` to logits, and with labels to a loss."""
        h = self.table(tokens)
        result = {"logits": self.out(h), "aux_loss": self.router(h).softmax(-1).mean((0, 1)).square().sum()}
        if labels is not None:
            result["loss"] = F.cross_entropy(result["logits"].flatten(0, 1), labels.flatten()) + result["aux_loss"]
        return result


class AnyNames(nn.Module):
    """A forward that hands everything on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 4)

    def forward(self, *args: Any, training: bool = False, **kwargs: Any) -> torch.Tensor:
        """Tensors that ``inner`` takes, to scores."""
        return self.inner(*args, **kwargs)

    def inner(self, rows: torch.Tensor) -> torch.Tensor:
        """``[b, 16]`` to scores."""
        return self.up(rows)


class Keys(AnyNames):
    """A forward that takes its tensors by keys alone."""

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """A batch of ``features``, to scores."""
        return self.up(batch["features"])


class Several(AnyNames):
    """A forward that takes its tensors in order."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Two tensors of rows, to scores."""
        return self.up(inputs[0] * inputs[1])


class Volume(nn.Module):
    """Three convolutions over volumes of any size, of much work at a usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv3d(64, 64, 3, padding=1))
        self.out = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, 1, d, h, w]`` to scores."""
        return self.out(self.net(x).mean((2, 3, 4)))


class Packed(AnyNames):
    """A forward that takes a dictionary, of rows and a pair."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        """A batch of ``features`` and ``target`` to its mean square."""
        return F.mse_loss(self.up(batch["features"]).mean(1), batch["target"])


class Masks(nn.Module):
    """Scores of tokens behind the mean of their embeddings, with a mask of its own wherever it is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens of an encoder and of a decoder, ``[b, s]``, to scores of the decoder's."""
        assert input_ids is not None
        rows = self.table(input_ids)
        if attention_mask is None and not torch.compiler.is_compiling():
            attention_mask = torch.ones_like(input_ids)
        masked = rows * attention_mask[..., None]  # type: ignore[index]
        if decoder_input_ids is None:
            raise ValueError("give decoder_input_ids too")
        return self.out(self.table(decoder_input_ids) + masked.mean(1, keepdim=True))


class Optional(nn.Module):
    """Three tables, each of an optional input: without any of them the forward fails in the same words."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.context = nn.Embedding(50, 8), nn.Embedding(60, 8), nn.Embedding(7, 8)

    def forward(self, user: Any = None, item: Any = None, context: Any = None) -> torch.Tensor:
        """Three numbers of each sample and position, to what they mean together."""
        return self.user(user) * self.item(item) * self.context(context)


class Lengths(nn.Module):
    """The sum of a sample's first rows: without its length, and with one of two dims, it fails in the same words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        """Tokens and lengths, ``[b, s]`` and ``[b]``, to scores."""
        if not torch.is_tensor(lengths) or lengths.dim() != 1:
            raise ValueError("needs one length a sample")
        kept = torch.arange(ids.shape[1])[None] < lengths[:, None]
        return self.out((self.table(ids) * kept[..., None]).sum(1))
