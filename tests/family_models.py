"""Tiny models with random weights, one for each architecture that a family of plans serves, and a convolutional one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"pad_token_id": 3}),
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "phi3": ("Phi3Config", {"pad_token_id": 1}),
    "olmo2": ("Olmo2Config", {"pad_token_id": 1}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
                                    "layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {"vocab_size": 64, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}


def decoder(name: str, kv_heads: int = 2, heads: int = 4, **changes: Any) -> nn.Module:
    """Make a decoder of two layers, four heads and two heads of keys and values; ``changes`` are of its
    configuration."""
    config, own = DECODERS[name]
    sizes = {**_SIZES, "hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    made = getattr(transformers, config)(**{**_TEXT, **sizes, "max_position_embeddings": 32, **own, **changes})
    return AutoModelForCausalLM.from_config(made)


def gpt2(**changes: Any) -> nn.Module:
    """Make a GPT-2 of two layers, with its head tied to the embedding and with its dropout."""
    made = transformers.GPT2Config(**{**_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **changes})
    return AutoModelForCausalLM.from_config(made)


def bert(**changes: Any) -> nn.Module:
    """Make a BERT as a masked language model."""
    made = transformers.BertConfig(**{**_SIZES, "vocab_size": 64, "max_position_embeddings": 32, **changes})
    return transformers.BertForMaskedLM(made)


def t5() -> nn.Module:
    """Make an encoder and a decoder of two layers; both embeddings and the head are one."""
    made = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, use_cache=False, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(made)


def vit(**changes: Any) -> nn.Module:
    """Make a ViT with four patches of an image of 16 by 16."""
    made = transformers.ViTConfig(**{**_SIZES, "image_size": 16, "patch_size": 8, "num_labels": 6, **changes})
    return transformers.ViTForImageClassification(made)


class _Residual(nn.Module):
    """Two convolutions beside a shortcut, each followed by the statistics of the batch."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.short = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b, width, h, w]`` to ``[b, out, h / stride, w / stride]``."""
        made = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(made + self.short(x))


class ResNet(nn.Module):
    """A small ResNet with other parts of convolutional networks: a block by channels (depthwise and GroupNorm)."""

    def __init__(self, width: int = 8, classes: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.ModuleList([_Residual(width, width, 1), _Residual(width, 2 * width, 2)])
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width)
        self.groups = nn.GroupNorm(4, 2 * width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images ``[b, 3, h, w]`` to logits ``[b, classes]``."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        x = F.gelu(self.groups(self.depthwise(x)))
        return self.head(self.pool(x).flatten(1))
