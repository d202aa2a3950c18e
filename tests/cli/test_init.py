"""A plan for a model that has none: from nothing to trained weights that others load, and what is said where that does
not go."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

import parc
from parc.cli import main
from tests.cli.commands import Captured
from tests.cli.commands import parc as command
from tests.runtime.forked import forked_ranks

NANO = '''
"""A GPT in one file: fused q, k and v, a head that is the embedding, and a forward that returns its loss."""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 65
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd), wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout), h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        b, t = idx.size()
        assert t <= self.config.block_size
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(t, device=idx.device))
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def gpt(n_layer: int = 2, n_embd: int = 32) -> GPT:
    return GPT(GPTConfig(n_layer=n_layer, n_embd=n_embd))
'''
QWEN = (
    "hf:Qwen2ForCausalLM", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=4",
    "num_key_value_heads=2", "vocab_size=64", "max_position_embeddings=64",
)  # fmt: skip


def trained(capsys: Captured, *model: str) -> int:
    """Run the commands from a model to trained weights in a folder, and return how many there were."""
    commands = [
        ("init", *model, "--dp", "1"),
        ("build", "plan.parc", "-o", "build"),
        ("run", "build", "--steps", "2", "--save", "checkpoint"),
        ("export", "build", "checkpoint", "-o", "weights"),
    ]
    with forked_ranks():
        for words in commands:
            code, _, err = command(capsys, *words)
            assert code == 0, err
    return len(commands)


def plain(batches: int = 2) -> Any:
    """Return the plain module of the build, trained alike on one device."""
    reference = parc.reference("build")
    for _ in range(batches):
        reference.step()
    return reference


def close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def test_from_nothing_to_weights_that_from_pretrained_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from transformers import Qwen2ForCausalLM

    monkeypatch.chdir(tmp_path)
    assert trained(capsys, *QWEN) <= 5
    assert 'include   "parc:llama" (tp=$tp)' in Path("plan.parc").read_text()
    tokens = torch.arange(12).view(1, 12)
    with contextlib.closing(plain()) as reference, torch.no_grad():
        loaded = Qwen2ForCausalLM.from_pretrained("weights").eval()
        assert close(loaded(tokens).logits, reference.module.eval()(tokens).logits)


def test_from_nothing_to_weights_that_a_file_of_ones_own_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(NANO)
    assert trained(capsys, "model.py:gpt") <= 5
    text = Path("plan.parc").read_text()
    assert 'include   "parc:gpt2" (tp=$tp)' in text and "sizes     B=8, S=32 " in text
    assert main(["fmt", "--check", "plan.parc"]) == 0
    spec = importlib.util.spec_from_file_location("model", "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokens = torch.arange(12).view(1, 12)
    with contextlib.closing(plain()) as reference, torch.no_grad():
        loaded = module.gpt()
        load_model(loaded, next(Path("weights").glob("*.safetensors")))
        assert close(loaded(tokens, tokens)[0], reference.module(tokens, tokens)[0])
