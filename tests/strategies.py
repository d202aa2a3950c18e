"""Hypothesis strategies: small models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from .random_functions import ACTIVATIONS, FUNCTIONS, JOINS
from .random_layers import LAYERS, WEIGHTED, Sizes

CLASSES_SECOND = "cross_entropy_classes_second"
CLASS_LOSSES = ("cross_entropy", CLASSES_SECOND, "nll", "shifted", "smoothed", "added", "last", "with_z")
NUMBER_LOSSES = ("mse", "l1", "huber", "bce", "masked", "mean", "sum")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, the value that it reads (counted back from the newest), the value that its result meets, and how."""

    kind: str
    options: tuple[Any, ...] = ()
    reads: int = 0
    adds: int | None = None
    join: str = "add"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A random model as data, so that it prints as what it is, and shrinks."""

    sizes: Sizes
    source: str
    layers: tuple[Layer, ...]
    loss: str
    microbatches: int = 1
    extra: str = "none"  # a second input: "floats" is a value as any other, "mask" hides rows, "places" are looked up
    frozen: bool = False  # whether the first layer is not trained

    @property
    def has_head(self) -> bool:
        """True where the model gives logits of a vocabulary."""
        return self.loss in CLASS_LOSSES

    @property
    def drops(self) -> bool:
        """True where some layer is random."""
        return any(
            layer.kind == "dropout" or layer.options == ("drop",) or (layer.kind == "attention" and layer.options[-1])
            for layer in self.layers
        )


class RandomModel(nn.Module):
    """The model of a spec. With ``source`` ``tied`` the head's matrix is the embedding's."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        s = spec.sizes
        self.spec = spec
        self.embed = (
            nn.Embedding(s.vocab, s.width, padding_idx=1 if spec.source == "padded" else None)
            if spec.source != "floats"
            else None
        )
        self.layers = nn.ModuleList(LAYERS[layer.kind](s, *layer.options) for layer in spec.layers)
        self.head = nn.Linear(s.width, s.vocab, bias=spec.source == "floats") if spec.has_head else None
        if spec.source == "tied" and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight
        self.places = nn.Embedding(s.length, s.width) if spec.extra == "places" else None
        if spec.frozen:
            self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        values = [x if self.embed is None else self.embed(x)]
        if self.places is not None:
            values[0] = values[0] + self.places(z)
        elif z is not None and self.spec.extra == "mask":
            values[0] = values[0].masked_fill(~z[..., None], 0.1)
        elif z is not None:
            values.insert(0, z)
        for layer, module in zip(self.spec.layers, self.layers, strict=True):
            made = module(values[-1 - layer.reads % len(values)])
            other = None if layer.adds is None else values[-1 - layer.adds % len(values)]
            values.append(made if other is None else JOINS[layer.join](made, other))
        return values[-1] if self.head is None else self.head(values[-1])


def filled(spec: ModelSpec) -> RandomModel:
    """Make the model in float64 with numbers that leave nothing symmetric; they depend on the names alone."""
    model = RandomModel(spec).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            fan = parameter.shape[-1] if parameter.dim() > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / math.sqrt(fan))
            parameter.add_(0.3 if parameter.dim() < 2 else 0.0)
    return model


# ---- models

_LAYER: dict[str, st.SearchStrategy[tuple[Any, ...]]] = {
    "linear": st.tuples(st.booleans()),
    "mlp": st.tuples(st.sampled_from(sorted(ACTIVATIONS)), st.booleans(), st.sampled_from(["none", "apart", "fused"])),
    "attention": st.tuples(
        st.sampled_from(["apart", "split", "chunk", "interleaved", "permuted"]),
        st.sampled_from([1, 2, 3]),
        st.sampled_from(["enable", "expand", "interleave", "plain"]),
        st.sampled_from(["none", "causal", "bool", "where", "triu", "learned", "slopes"]),
        st.sampled_from([0.0, 0.0, 0.3]),
    ),
    "layer_norm": st.tuples(st.booleans()),
    "rms_norm": st.tuples(st.booleans()),
    "weighted": st.tuples(st.sampled_from(sorted(WEIGHTED))),
    "plain": st.tuples(st.sampled_from(sorted(FUNCTIONS))),
    "positions": st.tuples(st.booleans()),
    "dropout": st.tuples(st.just(0.25)),
    "conv": st.tuples(st.booleans(), st.booleans()),
    "running": st.tuples(st.sampled_from(["batch_norm", "mean", "assigned"])),
    "group_norm": st.tuples(),
    "torch_rms_norm": st.tuples(st.booleans()),
    "experts": st.tuples(st.sampled_from([2, 4, 3]), st.booleans()),
    "squeeze": st.tuples(),
    "glu": st.tuples(),
    "image": st.tuples(st.booleans()),
}


@st.composite
def layers(draw: st.DrawFn, heads: int) -> Layer:
    """Draw one layer of a model with so many heads."""
    kind = draw(st.sampled_from(list(_LAYER)))
    options = draw(_LAYER[kind])
    if kind == "attention":
        qkv, shared, repeat, mask, dropout = options
        shared = shared if qkv == "apart" and heads % shared == 0 else 1
        repeat = repeat if shared == 1 or repeat != "plain" else "enable"
        options = qkv, shared, repeat, mask, dropout
    reads, adds = draw(st.sampled_from([0, 0, 0, 1, 2])), draw(st.sampled_from([None, 0, 0, 1]))
    return Layer(kind, options, reads, adds, "add" if adds is None else draw(st.sampled_from(["add", *JOINS])))


@st.composite
def models(draw: st.DrawFn, most_layers: int = 4) -> ModelSpec:
    """Draw a small model. Dims of equal size are as likely as not, since nothing may follow from equal sizes."""
    heads = draw(st.sampled_from([2, 4, 1, 6]))
    sizes = Sizes(
        batch=draw(st.sampled_from([4, 2, 6, 8])),
        length=draw(st.sampled_from([4, 6, 8, 2])),
        heads=heads,
        head=draw(st.sampled_from([2, 4, 6])),
        vocab=draw(st.sampled_from([8, 12, 24])),
    )
    loss = draw(st.sampled_from(["cross_entropy", "cross_entropy", *CLASS_LOSSES, *NUMBER_LOSSES]))
    source = draw(st.sampled_from(["tokens", "tied", "floats", "padded"]))
    drawn = draw(st.lists(layers(heads), min_size=1, max_size=most_layers))
    extra = draw(st.sampled_from(["none", "none", "none", "floats", "mask", "places"]))
    microbatches, frozen = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([False, False, False, True]))
    spec = ModelSpec(sizes, source, tuple(drawn), loss, microbatches, extra, frozen)
    trained = any(parameter.requires_grad for parameter in RandomModel(spec).parameters())
    return spec if trained else replace(spec, source="tokens")


# ---- plans


def input_shapes(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each input of one microbatch."""
    s = spec.sizes
    shape = (s.batch, s.length)
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "x": ("float32", (*shape, s.width)) if spec.source == "floats" else ("int64", shape)
    }
    if spec.extra != "none":
        dtype = {"floats": "float32", "mask": "bool", "places": "int64"}[spec.extra]
        found["z"] = (dtype, (*shape, s.width) if spec.extra == "floats" else shape)
    if spec.has_head:
        found["y"] = ("int64", shape)
    elif spec.loss not in ("mean", "sum"):
        found["y"] = ("float32", (*shape, s.width))
    return found
