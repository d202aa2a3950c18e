"""A model of windows in the way of Swin: 4 x 4 places in windows of 2 x 2, of which a layer merges each four."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A gated layer within windows beside the places themselves, and a layer on each four places together."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.key, self.value = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.merged, self.head = nn.LayerNorm(4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [samples, 2, 2, width] of [samples, 4, 4, width]."""
        windows = self.norm(x).unflatten(2, (2, 2)).unflatten(1, (2, 2)).transpose(2, 3)
        inside = windows.flatten(3, 4).flatten(0, 2)
        inside = (self.key(inside).softmax(1) * self.value(inside)).view(windows.shape)
        x = x + inside.transpose(2, 3).flatten(1, 2).flatten(2, 3)
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        out: Tensor = self.head(self.merged(torch.cat(corners, -1)))
        return out


def square_and_mean(output: Tensor) -> Tensor:
    """Return a loss of two means."""
    return output.square().mean() + output.mean()
