"""Tiny models from packages that an index installs: how each is made, its inputs, and its loss."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

HERE = "benchmarks.outside_models"
SMALL: dict[str, Any] = {
    name: value
    for value, names in {
        32: "hidden_size d_model n_embd embedding_size word_embed_proj_dim max_position_embeddings n_positions n_ctx"
        " max_seq_len moe_intermediate_size true_hidden_size bottleneck_size intra_bottleneck_size",
        64: "vocab_size intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner shared_intermediate_size"
        " shared_expert_intermediate_size expert_intermediate_size dim_ff",
        2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
        " num_encoder_layers num_key_value_heads num_experts_per_tok eos_token_id",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads sliding_window"
        " num_local_experts num_experts n_routed_experts",
        8: "head_dim d_kv rotary_dim patch_size",
        1: "bos_token_id decoder_start_token_id n_shared_experts",
        0: "pad_token_id",
        16: "image_size",
        6: "num_labels",
    }.items()
    for name in names.split()
} | {"use_cache": False}
"""Arguments that configurations of transformers share; a configuration gets those that it has."""

INPUTS = {
    **dict.fromkeys(("input_ids", "decoder_input_ids", "targets", "ids", "tokens", "idx"), ("int64", "B, S")),
    "attention_mask": ("int64", "B, S"),
    **dict.fromkeys(("labels", "timestep", "class_labels"), ("int64", "B")), "timesteps": ("float32", "B"),
    "pixel_values": ("float32", "B, 3, 16, 16"), "x": ("float32", "B, 3, 32, 32"),
    "input_values": ("float32", "B, 800"),
    "input_features": ("float32", "B, 16, 32"), "mel": ("float32", "B, 32, 16"), "past_values": ("float32", "B, 32, 4"),
    "sample": ("float32", "B, 4, 8, 8"), "encoder_hidden_states": ("float32", "B, 5, 32"),
    "hidden_states": ("float32", "B, 16, 4"), "pooled_projections": ("float32", "B, 32"),
    "frames": ("float32", "B, 4, 3, 16, 16"), "volume": ("float32", "B, 3, 4, 32, 32"),
    "img": ("float32", "B, 3, 32, 32"), "signal": ("float32", "B, 3, 64"), "series": ("float32", "B, 8, 16"),
    "wave": ("float64", "B, 12"), "next_wave": ("float64", "B, 12"),
    "long": ("int64", "B, 9"), "image64": ("float64", "B, 3, 16, 16"),
    "features": ("float32", "B, 16"), "target": ("float32", "B"), "latents": ("float32", "B, 2, 8, 8, 8"),
    "ids3": ("float32", "B, 3"), "past": ("float32", "B, 20"), "past_features": ("float32", "B, 20, 2"),
    "observed": ("float32", "B, 20"), "future": ("float32", "B, 4"), "future_features": ("float32", "B, 4, 2"),
    "static": ("int64", "B, 1"),
    "img_ids": ("float32", "16, 3"), "txt_ids": ("float32", "5, 3"),
}  # fmt: skip
"""The type and the dims of each input, by name."""

TEXT = ("input_ids targets", "cross_entropy(output.logits, targets)")
PAIR = ("input_ids decoder_input_ids targets", "cross_entropy(output.logits, targets)")
MASKED_PAIR = ("input_ids attention_mask decoder_input_ids targets", PAIR[1])
LARGE = ("x=pixel_values labels", "cross_entropy(output.logits, labels)")
IMAGE = ("pixel_values labels", "cross_entropy(output.logits, labels)")
VIDEO_TASK = ("frames=pixel_values labels", "cross_entropy(output.logits, labels)")
SQUARES = f'"{HERE}:squares"(output)'


@dataclass(frozen=True)
class Case:
    """A model under a plan: the callable that makes it, with arguments; inputs; loss; lines that split it over tp."""

    maker: str
    arguments: str
    inputs: str
    loss: str
    lines: str = ""
    mesh: str = "dp=2"
    place: str = HERE

    def over(self, mesh: str, lines: str) -> Case:
        """Return the model over another mesh, with lines for it."""
        return replace(self, mesh=mesh, lines=lines)

    def plan(self) -> str:
        """Return the plan's text: a batch of 4, split over dp if the mesh has it."""
        named = {name: INPUTS[name.partition("=")[0]] for name in self.inputs.split()}
        rows = [
            f'model "{self.place}:{self.maker}"' + f" ({self.arguments})" * bool(self.arguments),
            "sizes B=4, S=8",
            f"loss {self.loss}",
        ]
        rows += ["optimizer adamw lr 1e-3 eps 1e-5", f"mesh {self.mesh}"]
        for name, (dtype, dims) in named.items():
            rows.append(f"input {name.replace('=', ' as ')} {dtype} [{dims}]")
            if dims.startswith("B") and "dp=" in self.mesh:
                split = ["B/dp", *("_" for _ in dims.split(", ")[1:])]
                rows.append(f"shard {name.partition('=')[0]} [{', '.join(split)}]")
        return "\n".join([*rows, self.lines]) + "\n"


def squares(output: Any) -> torch.Tensor:
    """Return the mean square of the first tensor that a model returns, as the loss of a model without a task."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if hasattr(output, "values") else output[0]
    return output.float().square().mean()


def transformer(name: str) -> nn.Module:
    """Make a model of transformers: its family's configuration with small sizes."""
    import transformers

    from benchmarks.outside_table import FAMILIES

    head, changes, _ = FAMILIES[name]
    config_class = type(transformers.AutoConfig.for_model(name.partition(" ")[0]))
    default = config_class()
    known = {key: value for key, value in SMALL.items() if hasattr(default, key)}
    arguments = {key: value for key, value in {**known, **changes}.items() if value is not None}
    model: nn.Module = getattr(transformers, head).from_config(config_class(**arguments))
    return model


def timm_model(name: str) -> nn.Module:
    """Make an architecture of timm, for 6 classes."""
    from benchmarks.outside_table import TIMM

    model: nn.Module = without_torchvision("timm").create_model(name, num_classes=6, **TIMM[name])
    return model


def without_torchvision(package: str) -> ModuleType:
    """Import a package beside stand-ins for torchvision."""
    if package not in sys.modules:
        import_module("transformers.utils").is_torchvision_available()  # it remembers that there is none
        stand_ins = {path: _Anything(path) for path in TORCHVISION}
        sys.modules.update(stand_ins)
        import_module(package)
        for path in stand_ins:
            del sys.modules[path]
    return sys.modules[package]


TORCHVISION = ["torchvision", *(
    f"torchvision.{name}" for name in
    ["transforms", "transforms.functional", "datasets", "ops", "ops.misc", "models", "models.feature_extraction"]
)]  # fmt: skip
"""A stand-in for torchvision, which timm imports and whose wheel does not load beside a torch for CPUs alone."""


class _Anything(ModuleType):
    """A package in which every name is a class."""

    __path__: list[str] = []  # noqa: RUF012

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _AnyClass(name, (), {})


class _AnyClass(type):
    """A class with every attribute."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def diffusers_model(name: str) -> nn.Module:
    """Make a model of a class of diffusers."""
    import diffusers

    from benchmarks.outside_table import DIFFUSERS

    model: nn.Module = getattr(diffusers, name)(**DIFFUSERS[name][1])
    return model


def x_transformer(name: str) -> nn.Module:
    """Make a decoder of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    from benchmarks.outside_table import X_TRANSFORMERS

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **X_TRANSFORMERS[name])
    model: nn.Module = TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)
    return model
