"""More of ``make outside``: the kinds of models that people bring in their first week, each under several layouts.

Pictures cut into patches, video and volumes, time series, two towers, quantizers, routed experts in loops, weights that
the forward rewrites, types beside float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.outside_models import SQUARES, Case, without_torchvision

PLACE = "benchmarks.outside_everyday"
FLAT = {"image_size": 32, "patch_size": 8, "num_classes": 6, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64,
        "dim_head": 8}  # fmt: skip
VIT_PYTORCH: dict[str, dict[str, Any]] = {
    "vit.ViT": FLAT, "simple_vit.SimpleViT": FLAT,
    "vit_3d.ViT": {**{name: value for name, value in FLAT.items() if name != "patch_size"}, "image_patch_size": 8,
                   "frames": 4, "frame_patch_size": 2},
    "vit_1d.ViT": {**{name: value for name, value in FLAT.items() if name != "image_size"}, "seq_len": 64},
    "nest.NesT": {"image_size": 32, "patch_size": 4, "num_classes": 6, "dim": 16, "heads": 2, "num_hierarchies": 2,
                  "block_repeats": (2, 2), "dim_head": 8},
    "max_vit.MaxViT": {"num_classes": 6, "dim_conv_stem": 8, "dim": 8, "dim_head": 4, "depth": (1, 1),
                       "window_size": 2},
}  # fmt: skip
"""The arguments of each class of vit-pytorch."""
CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2},
}


def vit_pytorch_model(name: str) -> nn.Module:
    """Make a model of vit-pytorch, named by its module and its class."""
    without_torchvision("vit_pytorch")
    file, _, kind = name.rpartition(".")
    model: nn.Module = getattr(import_module(f"vit_pytorch.{file}"), kind)(**VIT_PYTORCH[name])
    return model


def open_clip_model(dtype: str) -> nn.Module:
    """Make the two towers of open_clip, with weights of a type."""
    without_torchvision("timm")
    model: nn.Module = without_torchvision("open_clip").CLIP(**CLIP).to(getattr(torch, dtype))
    return model


def x_wrapper() -> nn.Module:
    """Make a decoder of x-transformers in the wrapper that computes its loss."""
    from x_transformers import AutoregressiveWrapper

    from benchmarks.outside_models import x_transformer

    model: nn.Module = AutoregressiveWrapper(x_transformer("plain"))
    return model


class Quantized(nn.Module):
    """An autoencoder with a quantizer of vector-quantize-pytorch between its two parts: a loss of both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import vector_quantize_pytorch as package

        if kind == "FSQ":
            self.quantizer, width = package.FSQ(levels=[8, 5, 5]), 3
        else:
            self.quantizer, width = package.VectorQuantize(dim=8, codebook_size=16), 8
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, width))
        self.decoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """``[b, s, 16]`` to the mean square of what is lost, and the quantizer's own loss if it has one."""
        values, *others = self.quantizer(self.encoder(series))
        return nn.functional.mse_loss(self.decoder(values), series) + sum(
            other.sum() for other in others if other.is_floating_point()
        )


class Critic(nn.Module):
    """A critic of pictures, with torch's old function for spectral norms."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.spectral_norm
        self.first, self.second = norm(nn.Conv2d(3, 8, 4, 2, 1)), norm(nn.Conv2d(8, 8, 4, 2, 1))
        self.out = norm(nn.Linear(8 * 8 * 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, 3, 32, 32]`` to one score each."""
        leak = nn.functional.leaky_relu
        return self.out(leak(self.second(leak(self.first(x), 0.2)), 0.2).flatten(1))  # type: ignore[no-any-return]


class SkipGram(nn.Module):
    """Word vectors with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.context = nn.Embedding(64, 16, sparse=True), nn.Embedding(64, 16, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` to a score of every word beside each."""
        return self.word(tokens) @ self.context.weight.T


class Packed(nn.Module):
    """A regression whose forward takes one batch as a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """A batch of ``features`` and ``target`` to its mean square."""
        guess = self.down(self.up(batch["features"]).relu())
        return nn.functional.mse_loss(guess.squeeze(-1), batch["target"])


class Waves(nn.Module):
    """Two cells in float64 that go along a series, and on behind its end."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.LSTMCell(1, width), nn.LSTMCell(width, width), nn.Linear(width, 1)
        self.double()

    def forward(self, series: torch.Tensor, future: int = 0) -> torch.Tensor:
        """``[b, s]`` to the next value of each."""
        states = [torch.zeros(series.shape[0], self.out.in_features, dtype=torch.double) for _ in range(4)]
        results = []
        for value in series.split(1, dim=1):
            states[:2] = self.first(value, (states[0], states[1]))
            states[2:] = self.second(states[0], (states[2], states[3]))
            results.append(self.out(states[2]))
        for _ in range(future):
            states[:2] = self.first(results[-1], (states[0], states[1]))
            states[2:] = self.second(states[0], (states[2], states[3]))
            results.append(self.out(states[2]))
        return torch.cat(results, dim=1)


TRANSFORMERS = (
    "reformer", "gemma3n_text", "doge", "phimoe", "deepseek_v2", "mixtral with router logits", "videomae", "vivit",
    "timesformer", "patchtsmixer", "informer", "chinese_clip",
)  # fmt: skip
_QKV = "column {attention} over tp rows (3 h/tp d)\nrow {out} over tp\ncolumn {up} over tp\nrow {down} over tp"
_APART = "column {attention} over tp\nrow {out} over tp\ncolumn {up} over tp\nrow {down} over tp"
_LAYERS = "transformer.layers.*"
_FLAT = {"attention": f"{_LAYERS}.0.to_qkv", "out": f"{_LAYERS}.0.to_out.0", "up": f"{_LAYERS}.1.net.1",
         "down": f"{_LAYERS}.1.net.4"}  # fmt: skip
_VIDEO = {"attention": "**.layer.*.attention.attention.{query,key,value}", "out": "**.layer.*.attention.output.dense",
          "up": "**.layer.*.intermediate.dense", "down": "**.layer.*.output.dense"}  # fmt: skip
_CODER = "column {encoder,decoder}.0 over tp\nrow {encoder,decoder}.2 over tp"
LINES = {
    **dict.fromkeys(("vit-pytorch vit.ViT", "vit-pytorch vit_1d.ViT", "vit-pytorch vit_3d.ViT"), _QKV.format(**_FLAT)),
    "vit-pytorch simple_vit.SimpleViT": _QKV.format(
        **{**_FLAT, "out": f"{_LAYERS}.0.to_out", "down": f"{_LAYERS}.1.net.3"}),
    "vit-pytorch nest.NesT": _QKV.format(
        attention="layers.*.0.layers.*.0.to_qkv", out="layers.*.0.layers.*.0.to_out.0",
        up="layers.*.0.layers.*.1.net.1", down="layers.*.0.layers.*.1.net.4"),
    "vit-pytorch max_vit.MaxViT": "column layers.*.*.fn.to_qkv over tp rows (3 h/tp d)\n"
                                  "row layers.*.*.fn.to_out.0 over tp",
    "vector-quantize FSQ": _CODER, "vector-quantize VectorQuantize": _CODER,
    **dict.fromkeys(("open_clip CLIP", "open_clip CLIP in float64"), _QKV.format(
        attention="**.resblocks.*.attn.in_proj_weight", out="**.resblocks.*.attn.out_proj",
        up="**.resblocks.*.mlp.c_fc", down="**.resblocks.*.mlp.c_proj")),
    "x-transformers loss of its own": _APART.format(
        attention="net.attn_layers.layers.*.1.to_{q,k,v}", out="net.attn_layers.layers.*.1.to_out",
        up="net.attn_layers.layers.*.1.ff.0.0", down="net.attn_layers.layers.*.1.ff.2"),
    "plain word vectors": "vocab word, context over tp",
    "plain dictionary": "column up over tp\nrow down over tp",
    "transformers doge": _APART.format(
        attention="model.layers.*.self_attn.{q,k,v}_proj", out="model.layers.*.self_attn.{dt,o}_proj",
        up="model.layers.*.mlp.{gate,up}_proj", down="model.layers.*.mlp.down_proj"),
    "transformers deepseek_v2": 'include "parc:deepseek-v3" (tp=2)',
    "transformers mixtral with router logits": 'include "parc:mixtral" (tp=2)',
    "transformers videomae": _APART.format(**_VIDEO),
    "transformers vivit": 'include "parc:vit" (tp=2)',
    "transformers timesformer": _QKV.format(
        attention="**.layer.*.{temporal_attention,attention}.attention.qkv",
        out="**.layer.*.{temporal_attention,attention}.output.dense", up=_VIDEO["up"], down=_VIDEO["down"]),
    "transformers patchtsmixer": "column **.mlp.fc1 over tp\nrow **.mlp.fc2 over tp",
    "transformers chinese_clip": _APART.format(
        attention="vision_model.**.self_attn.{q,k,v}_proj, text_model.**.self.{query,key,value}",
        out="vision_model.**.self_attn.out_proj, text_model.**.attention.output.dense",
        up="vision_model.**.mlp.fc1, text_model.**.intermediate.dense",
        down="vision_model.**.mlp.fc2, text_model.encoder.layer.*.output.dense"),
    "timm davit_tiny": "column stages.*.blocks.*.*.mlp.fc1 over tp\nrow stages.*.blocks.*.*.mlp.fc2 over tp",
    "timm hiera_tiny_224": "column blocks.*.mlp.fc1 over tp\nrow blocks.*.mlp.fc2 over tp",
    "diffusers UNetSpatioTemporalConditionModel": "column **.ff.net.0.proj over tp rows (2 f/tp)\n"
                                                  "row **.ff.net.2 over tp",
}  # fmt: skip
"""The lines that split a model over tp."""
BLOCKS = (
    *(f"vit-pytorch {name}" for name in VIT_PYTORCH), "x-transformers loss of its own", "timm davit_tiny",
    "timm hiera_tiny_224", *(f"transformers {name}" for name in (
        "doge", "deepseek_v2", "mixtral with router logits", "videomae", "vivit", "timesformer", "patchtsmixer")),
)  # fmt: skip
"""The models whose blocks are cut into two stages, and kept in parts."""


def in_layouts(cases: Mapping[str, Case]) -> Iterator[tuple[str, Case]]:
    """Yield the models of this file under more layouts: over tp by its lines, in two stages, and in parts."""
    for name, lines in LINES.items():
        yield f"{name} tp=2", cases[name].over("tp=2", lines)
    for name in BLOCKS:
        yield f"{name} pp=2", cases[name].over("pp=2", "stage balanced over pp\nschedule 1f1b microbatches 2")
        yield f"{name} zero=2", cases[name].over("dp=2", "zero 3 over dp")


def everyday_cases() -> dict[str, Case]:
    """Return the models of this file by name."""
    classes, pairs = "cross_entropy(output, labels)", '"torch.nn.functional:mse_loss" (output.0, output.1)'
    words = {"vit_3d.ViT": "volume=video", "vit_1d.ViT": "signal=series", "max_vit.MaxViT": "x"}
    return {
        **{f"vit-pytorch {name}": Case("vit_pytorch_model", f'name="{name}"', f"{words.get(name, 'x=img')} labels",
                                       classes, place=PLACE) for name in VIT_PYTORCH},
        **{f"vector-quantize {kind}": Case("Quantized", f'kind="{kind}"', "series", "output", place=PLACE)
           for kind in ("FSQ", "VectorQuantize")},
        "open_clip CLIP": Case("open_clip_model", 'dtype="float32"', "pixel_values=image ids=text", pairs, place=PLACE),
        "open_clip CLIP in float64": Case("open_clip_model", 'dtype="float64"', "image64=image ids=text", pairs,
                                          place=PLACE),
        "x-transformers loss of its own": Case("x_wrapper", "", "long=x", "output", place=PLACE),
        "plain critic": Case("Critic", "", "x", SQUARES, place=PLACE),
        "plain word vectors": Case("SkipGram", "", "tokens targets", "cross_entropy(output, targets)", place=PLACE),
        "plain dictionary": Case("Packed", "", "features=batch.features target=batch.target", "output", place=PLACE),
        "plain waves": Case("Waves", "", "wave=series next_wave",
                            '"torch.nn.functional:mse_loss" (output, next_wave)', place=PLACE),
    }  # fmt: skip


NEW = frozenset({*everyday_cases(), *(f"transformers {name}" for name in TRANSFORMERS), "timm davit_tiny",
                 "timm hiera_tiny_224", "diffusers UNetSpatioTemporalConditionModel"})  # fmt: skip
"""The models of this file's kind, also those whose arguments are in the table."""
