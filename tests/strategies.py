"""Hypothesis strategies: small models, meshes, and plans that place a model's tensors on a mesh."""

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

OPTIMIZERS = (
    "sgd lr 1e-3",
    "sgd lr 1e-3 momentum 0.9 clip 0.5",
    "sgd lr linear 1e-2 to 1e-3 over 4 momentum 0.9 nesterov",
    "adamw lr 1e-3 clip 1.0",
    "adamw lr cosine 1e-3 warmup 1 over 5 weight_decay 0.1 betas 0.8, 0.9",
)


@st.composite
def meshes(draw: st.DrawFn, ranks: int = 8) -> dict[str, int]:
    """Draw one to three axes with at most so many ranks."""
    names = draw(st.sampled_from([("dp", "tp"), ("tp",), ("dp", "tp", "ax")]))
    mesh: dict[str, int] = {}
    for name in names:
        room = ranks // math.prod(mesh.values())
        mesh[name] = draw(st.sampled_from([size for size in (2, 1, 3, 4) if size <= room]))
    return mesh


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def layouts(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: dict[str, int], named: tuple[str, ...] = (), pad: bool = False
) -> str:
    """Draw a layout that fits the shape, with sub-dims and several axes on a dim; with ``pad`` one that need not
    divide."""
    on: list[list[str]] = [[] for _ in shape]
    for axis in draw(st.permutations(list(mesh))):
        place = draw(st.sampled_from([*range(len(shape)), None]))
        if place is not None and (pad or shape[place] % math.prod([mesh[axis], *(mesh[a] for a in on[place])]) == 0):
            on[place].append(axis)
    entries = []
    for dim, (size, axes) in enumerate(zip(shape, on, strict=True)):
        if size % math.prod(mesh[axis] for axis in axes):
            outer = draw(st.sampled_from(_divisors(size)))
            split = "/".join(["_", *axes])
            entries.append(f"({outer} {split}) pad" if outer > 1 else f"{split} pad")
            continue
        rest = size // math.prod(mesh[axis] for axis in axes)
        words = []
        for axis in axes:
            outer = draw(st.sampled_from(_divisors(rest)))
            rest //= outer
            words += [str(outer)] * (outer > 1) + [f"_/{axis}={mesh[axis]}"]
        if not words or all("/" in word for word in words):
            entries.append("/".join([named[dim] if dim < len(named) else "_", *axes]))
        else:
            entries.append(f"({' '.join([*words, str(rest)] if rest > 1 else words)})")
    return f"[{', '.join(entries)}]"


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


@st.composite
def placements(draw: st.DrawFn, spec: ModelSpec, mesh: dict[str, int]) -> list[str]:
    """Draw placement lines: inputs over some axes, then some of the parameters in any way that fits."""
    lines = []
    axes = list(mesh)
    batch_axis = axes[0]
    inputs = input_shapes(spec)
    if draw(st.booleans()) and spec.sizes.batch % mesh[batch_axis] == 0:
        rest = {name: ", ".join(["_"] * (len(shape) - 1)) for name, (_, shape) in inputs.items()}
        lines += [f"shard {name} [B/{batch_axis}, {more}]" for name, more in rest.items()]
    elif draw(st.booleans()) and spec.sizes.length % mesh[axes[-1]] == 0:
        lines += [f"shard {name} [_, _/{axes[-1]}, ...]" for name in inputs]
    else:
        for name, (_, shape) in inputs.items():
            if draw(st.booleans()):
                lines.append(f"shard {name} {draw(layouts(shape, mesh))}")
    model = RandomModel(spec)
    modules = dict(model.named_modules())
    names = [name for name, _ in model.named_parameters()]
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=5)) if names else []:
        shape = tuple(model.get_parameter(name).shape)
        module = name.rpartition(".")[0]
        axis, pad = draw(st.sampled_from(axes)), draw(st.booleans())
        flag = " pad" if pad else ""
        fits = [dim for dim in (0, 1) if len(shape) == 2 and (pad or shape[dim] % mesh[axis] == 0)]
        if isinstance(modules[module], nn.Linear) and name.endswith("weight") and fits and draw(st.booleans()):
            dim = draw(st.sampled_from(fits))
            outer = draw(st.sampled_from(_divisors(shape[dim] // (1 if pad else mesh[axis])))) if dim == 0 else 1
            rows = f" rows ({outer} n/{axis})" if outer > 1 else ""
            lines.append(f"{('column', 'row')[dim]} {module} over {axis}{rows}{flag}")
            others = [other for other in axes if other != axis and shape[1 - dim] % mesh[other] == 0]
            if draw(st.booleans()) and others:
                lines.append(f"{('row', 'column')[dim]} {module} over {draw(st.sampled_from(others))}")
        elif isinstance(modules[module], nn.Embedding) and 0 in fits and draw(st.booleans()):
            lines.append(f"vocab {module} over {axis}{flag}")
        elif draw(st.sampled_from([True, True, False])):
            lines.append(f"shard {name} {draw(layouts(shape, mesh, pad=pad))}")
        else:
            lines.append(f"replicate {name}")
    if draw(st.sampled_from([False, False, False, True])) and names:
        lines.append(f"freeze {draw(st.sampled_from(names))}")
    return lines


def plan_text(spec: ModelSpec, mesh: dict[str, int], lines: list[str], optimizer: str = "sgd lr 1e-3") -> str:
    """Draw a whole plan for the model of a spec."""
    s = spec.sizes
    rows = ['model "./model.py:make"']
    for name, (dtype, shape) in input_shapes(spec).items():
        rows.append(f"input {name} {dtype} [{', '.join(['B', *map(str, shape[1:])])}]")
    operands = "output, y" if "y" in input_shapes(spec) else "output"
    loss = f'"./model.py:{spec.loss}"({operands})'
    if spec.loss == "cross_entropy":
        loss = f"cross_entropy({operands})"
    rows += [f"sizes B={s.batch * spec.microbatches}", f"loss {loss}", f"optimizer {optimizer}"]
    rows += [f"mesh {', '.join(f'{axis}={size}' for axis, size in mesh.items())}", *lines]
    if spec.microbatches > 1 and not any(line.startswith("schedule") for line in lines):
        rows.append(f"schedule microbatches {spec.microbatches}")
    return "\n".join(rows) + "\n"


@st.composite
def stages(draw: st.DrawFn, spec: ModelSpec) -> tuple[int, list[str]]:
    """Draw the ranks of a pipeline, and the lines that cut the model into its stages. The middle cuts may lie anywhere:
    between whole layers and heads, or in the middle of one."""
    ranks, schedule = draw(st.sampled_from([2, 2, 3])), draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    chunks = 2 if schedule == "interleaved" and spec.microbatches > 1 else 1
    ranks = spec.microbatches if chunks > 1 else ranks
    if chunks == 1 and schedule != "gpipe":
        schedule = "1f1b" if spec.microbatches >= ranks else "gpipe"
    schedule = f"schedule {schedule} microbatches {spec.microbatches}{' chunks 2' if chunks > 1 else ''}"
    model = RandomModel(spec)
    whole = [f"layers.{index}" for index in range(len(spec.layers))] + ["head"] * spec.has_head
    inside = [name for name, _ in model.named_modules() if name.startswith("layers.")]
    places = [f"before {name}" for name in whole] + [
        f"after out({name})" for name in draw(st.sampled_from([[], inside]))
    ]
    number = ranks * chunks - 1
    if len(places) < number or draw(st.sampled_from([False, False, True])):
        return ranks, ["stage balanced over pp", schedule]
    cuts = draw(st.lists(st.sampled_from(places), min_size=number, max_size=number, unique=True))
    return ranks, [*(f"stage {cut} over pp" for cut in cuts), schedule]


@st.composite
def zero_lines(draw: st.DrawFn, spec: ModelSpec, mesh: dict[str, int], lines: list[str]) -> list[str]:
    """Draw lines that store parameters in parts over axes that no line splits a weight over."""
    split = " ".join(line for line in lines if not line.startswith(("shard x", "shard y", "shard z")))
    free = [axis for axis in mesh if f"/{axis}" not in split and f"over {axis}" not in split]
    places = ["", "", *(f" on layers.{index}" for index in range(len(spec.layers)))]
    return [f"zero {draw(st.sampled_from([0, 1, 2, 3]))} over {axis}{draw(st.sampled_from(places))}" for axis in free]


@st.composite
def plans(draw: st.DrawFn, spec: ModelSpec) -> str:
    """Draw the text of a plan for the model, sometimes with a pipeline."""
    ranks, cuts = draw(stages(spec)) if draw(st.sampled_from([False, False, True])) else (1, [])
    mesh = draw(meshes(8 // ranks))
    lines, optimizer = draw(placements(spec, mesh)), draw(st.sampled_from(OPTIMIZERS))
    if cuts:
        mesh = {"pp": ranks, **mesh} if draw(st.booleans()) else {**mesh, "pp": ranks}
        lines += cuts
    lines += draw(zero_lines(spec, mesh, lines))
    lines += draw(st.sampled_from([[], [], ["offload parameters, activations to cpu"]]))
    narrow = ["", "precision fp16 loss_scale dynamic\n", "precision bf16\nprecision fp32 on layers.1?\n"]
    precision = draw(st.sampled_from(narrow))
    return plan_text(spec, mesh, lines, optimizer) + precision
