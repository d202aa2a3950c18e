"""Hypothesis strategies: meshes, and plans that place a model's tensors on a mesh."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from torch import nn

from parc.compiler.layout.mesh import Mesh, UnevenNodes, node_levels

from .strategies import ModelSpec, RandomModel, input_shapes

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
def storing_lines(draw: st.DrawFn, spec: ModelSpec, mesh: dict[str, int], lines: list[str]) -> list[str]:
    """Draw lines that store parameters in parts over axes that no line splits a weight over, lines about nodes, and one
    that compresses gradients."""
    split = " ".join(line for line in lines if not line.startswith(("shard x", "shard y", "shard z")))
    free = [axis for axis in mesh if f"/{axis}" not in split and f"over {axis}" not in split]
    places = ["", "", *(f" on layers.{index}" for index in range(len(spec.layers)))]
    ranks = draw(st.sampled_from([2, 4]))
    try:
        levels = node_levels(Mesh(tuple(mesh.items())), ranks)
    except UnevenNodes:
        levels = {}
    both = [axis for axis, parts in levels.items() if 1 not in parts and draw(st.booleans())]
    found = [f"node {ranks}"] * bool(both) + [f"hierarchical over {axis}" for axis in both if draw(st.booleans())]
    for axis in free:
        within = " within node" if axis in both and draw(st.booleans()) else ""
        within += draw(st.sampled_from(["", "", *(place.replace(" on ", " unit ") for place in places)]))
        found.append(f"zero {draw(st.sampled_from([0, 1, 2, 3]))} over {axis}{within}{draw(st.sampled_from(places))}")
    late = [axis for axis in mesh if not any(f"zero {level} over {axis}" in line for line in found for level in (2, 3))]
    if late and draw(st.sampled_from([False, False, True])):
        axis, form, where = (draw(st.sampled_from(choices)) for choices in (late, ["fp16", "int8"], places))
        found.append(f"compress gradients over {axis} using {form}{where}")
    return found


@st.composite
def plans(draw: st.DrawFn, spec: ModelSpec) -> str:
    """Draw the text of a plan for the model, sometimes with a pipeline."""
    ranks, cuts = draw(stages(spec)) if draw(st.sampled_from([False, False, True])) else (1, [])
    mesh = draw(meshes(8 // ranks))
    lines, optimizer = draw(placements(spec, mesh)), draw(st.sampled_from(OPTIMIZERS))
    if cuts:
        mesh = {"pp": ranks, **mesh} if draw(st.booleans()) else {**mesh, "pp": ranks}
        lines += cuts
    lines += draw(storing_lines(spec, mesh, lines))
    lines += draw(st.sampled_from([[], [], ["offload parameters, activations to cpu"]]))
    narrow = ["", "precision fp16 loss_scale dynamic\n", "precision bf16\nprecision fp32 on layers.1?\n"]
    precision = draw(st.sampled_from(narrow))
    return plan_text(spec, mesh, lines, optimizer) + precision
