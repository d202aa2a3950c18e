"""Small models that are no transformers, for which placements are found: convolutions, mixers and U-Nets."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Sequential):
    """Three linear layers."""

    def __init__(self, width: int = 256) -> None:
        super().__init__(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )  # fmt: skip


class Vgg(nn.Module):
    """Convolutions one behind the other, with pools, and linear layers at the end."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [3, width, width, 2 * width, 2 * width]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.hidden, self.head = nn.Linear(2 * width * 16, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        for at, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            x = F.max_pool2d(x, 2) if at != 1 else x
        return self.head(F.relu(self.hidden(x.flatten(1))))


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(x + self.bn3(self.conv3(y)))


class ResNet(nn.Module):
    """Residual blocks."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.ModuleList(Bottleneck(width, width // 2) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class MixerBlock(nn.Module):
    """Products over tokens, then over channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(MixerBlock(64, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Double(nn.Sequential):
    """Two convolutions with norms over groups."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(),
            nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """A U-Net of two levels, whose halves are joined along channels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = Double(3, width), Double(width, 2 * width)
        self.middle = Double(2 * width, 4 * width)
        self.raise2, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), Double(4 * width, 2 * width)
        self.raise1, self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2), Double(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.middle(F.max_pool2d(b, 2))
        y = self.up2(torch.cat([b, self.raise2(y)], 1))
        return self.out(self.up1(torch.cat([a, self.raise1(y)], 1)))


class NextBlock(nn.Module):
    """A convolution in depth, then two products over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """A ConvNeXt."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(NextBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """A wide block with a convolution in depth inside, and a gate on its channels."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.depth = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.squeeze, self.excite = nn.Conv2d(inner, 8, 1), nn.Conv2d(8, inner, 1)
        self.down = nn.Conv2d(inner, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.depth(F.silu(self.bn1(self.up(x)))))
        gate = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.down(y * gate)


class MobileNet(nn.Module):
    """Inverted residual blocks."""

    def __init__(self, width: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Inverted(width, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
