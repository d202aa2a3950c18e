"""A pipeline of four products, its programs written by hand. An early value is handed on through a stage that does not
read it, and the last stage has the first's weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from parc.compiler.build.build import Build
from parc.compiler.program.actions import Action
from parc.compiler.program.program import Program
from parc.compiler.program.roles import Role
from parc.compiler.program.text import parse_program

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tied, self.second, self.third = (nn.Parameter(torch.randn(4, 4) / 2) for _ in range(3))

    def forward(self, x, y):
        first = x @ self.tied
        second = torch.tanh(first @ self.second)
        third = second @ self.third + first
        return (third @ self.tied - y).square().sum()
"""
PLAN = """
model     "./net.py:Net" ()
input     x float32 [B, 4]
input     y float32 [B, 4]
sizes     B=8
loss      output
optimizer adamw lr 1e-2 clip 0.5
seed      1
steps     3
schedule  microbatches 4
"""
MICROBATCHES = 4
STAGES = 4
FORWARD = [
    ("x:input x", "tied:parameter tied", "mm = mm(x, tied)", "sent mm"),
    ("mm:received mm", "second:parameter second", "h = mm(mm, second)", "tanh = tanh(h)",
     "sent mm", "sent tanh", "saved mm", "saved tanh"),
    ("mm:received mm", "tanh:received tanh", "third:parameter third", "h = mm(tanh, third)",
     "add = add.Tensor(h, mm)", "sent add", "saved tanh"),
    ("add:received add", "tied:parameter tied", "y:input y", "h = mm(add, tied)", "sub = sub.Tensor(h, y)",
     "square = pow.Tensor_Scalar(sub, 2)", "sum = sum(square)", "loss sum", "saved add", "saved sub"),
]  # fmt: skip
BACKWARD = [
    ("mm:received mm", "x:input x", "t = t(x)", "dw = mm(t, mm)", "tied dw"),
    ("g:received mm", "g_1:received tanh", "second:parameter second", "mm:saved mm", "tanh:saved tanh",
     "d = tanh_backward(g_1, tanh)", "t = t(mm)", "dw = mm(t, d)", "t_1 = t(second)", "h = mm(d, t_1)",
     "g_2 = add.Tensor(g, h)", "second dw", "sent mm g_2"),
    ("g:received add", "third:parameter third", "tanh:saved tanh", "t = t(tanh)", "dw = mm(t, g)", "t_1 = t(third)",
     "h = mm(g, t_1)", "third dw", "sent mm g", "sent tanh h"),
    ("scale:scale", "tied:parameter tied", "add:saved add", "sub:saved sub", "two = mul.Scalar(sub, 2.0)",
     "g = mul.Tensor(two, scale)", "t = t(add)", "dw = mm(t, g)", "t_1 = t(tied)", "h = mm(g, t_1)",
     "tied dw", "sent add h"),
]  # fmt: skip
READS = [("tied",), ("second",), ("third",), ("tied",)]


def program(role: str, action: str, mesh: str, words: Sequence[str], types: Mapping[str, str]) -> Program:
    """Return a program from a shorthand: `name:role` a parameter, `name = op(…)` a line, `key [name]` a return. A value
    that is not in ``types`` is a microbatch's activation."""
    rows, returns = [], []
    activation = "f32[2/dp, 4]" if "dp" in mesh else "f32[2, 4]"
    for word in words:
        name = word.partition(":")[0] if ":" in word else word.partition(" = ")[0]
        type_ = types.get(name, activation)
        if " = " in word:
            op, _, args = word.partition(" = ")[2].partition("(")
            op = op if op.startswith("parc.") else f"aten.{op}" if "." in op else f"aten.{op}.default"
            rows.append(f"    {name} = {op}({args}  # {type_} | - -\n")
        elif ":" in word:
            rows.append(f'    {name}: "{type_}",  # {word.partition(":")[2]}\n')
        else:
            *key, name = word.split()
            returns.append(
                f'        "{word if key[0] in ("sent", "saved") and len(key) == 1 else " ".join(key)}": {name},\n'
            )
    at = next((i for i, row in enumerate(rows) if row[4:].partition(" ")[0][-1] != ":"), len(rows))
    text = "".join([
        f'"""parc program: role {role}, action {action}"""\n\nmesh({mesh})\n\n\ndef main(\n', *rows[:at], "):\n",
        *rows[at:], "    return {\n", *returns, "    }\n",
    ])  # fmt: skip
    return parse_program(text)


def reduction(mesh: str, ranks: int, rank: int) -> Program:
    """Return REDUCE of a role: sums over data, then between the two roles that have the tied weight, then of the
    norm."""
    stages = range(rank, STAGES, ranks)
    dp, parameters, lines, returns, squares = "dp" in mesh, [], [], [], []
    owners = sorted({0 % ranks, 3 % ranks})
    everyone = list(range(ranks))
    for name in sorted({name for stage in stages for name in READS[stage]}, reverse=True):
        parameters.append(f"{name}:gradient {name}")
        whole = name
        if dp:
            lines.append(f"{name}_dp = parc.all_reduce({name}, 'dp')")
            whole = f"{name}_dp"
        if name == "tied" and len(owners) > 1:
            lines.append(f"tied_all = parc.all_reduce_among({whole}, 'pp', {owners})")
            whole = "tied_all"
        returns.append(f"gradient {name} {whole}")
        if name != "tied" or rank == owners[0]:
            lines.append(f"{name}_square = parc.square_sum({whole})".replace("square_sum(", "square_sum.default("))
            squares.append(f"{name}_square")
    if squares:
        lines += [f"stack = stack([{', '.join(squares)}])", "sum = sum(stack)"]
    else:
        lines += ["sum = full([], 0.0, dtype=torch.float32)"]
    lines += [f"sum_all = parc.all_reduce_among(sum, 'pp', {everyone})", "norm = sqrt(sum_all)"]
    partial = " +dp" if dp else ""
    types = dict.fromkeys(["sum", "sum_all", "norm", *squares], "f32[]")
    types |= dict.fromkeys(["tied", "second", "third"], f"f32[4, 4]{partial}")
    types |= dict.fromkeys(["tied_dp", "second_dp", "third_dp", "tied_all"], "f32[4, 4]")
    types |= {"stack": f"f32[{len(squares)}]"}
    words = [*parameters, *lines, *returns, "grad_norm norm"]
    return program(f"pp{rank}", "REDUCE", mesh, words, types)


def averaging(mesh: str, ranks: int, rank: int) -> Program:
    """Return LOSS of a role: the sum over data, scaled where the role has the last stage, and that over roles."""
    dp, words = "dp" in mesh, list[str]()
    if STAGES - 1 in range(rank, STAGES, ranks):
        words += ["loss:loss", "scale:scale", *["loss_dp = parc.all_reduce(loss, 'dp')"] * dp]
        words.append(f"mean = mul.Tensor({'loss_dp' if dp else 'loss'}, scale)")
    else:
        words.append("mean = full([], 0.0, dtype=torch.float32)")
    words += [f"loss_all = parc.all_reduce_among(mean, 'pp', {list(range(ranks))})", "loss loss_all"]
    types = {**dict.fromkeys(["loss_dp", "mean", "loss_all", "scale"], "f32[]"), "loss": f"f32[]{' +dp' if dp else ''}"}
    return program(f"pp{rank}", "LOSS", mesh, words, types)


def roles(mesh: str, ranks: int, order: Sequence[Action] | None = None) -> dict[str, Role]:
    """Return the roles of a mesh with ``pp`` of so many ranks; work is in an order that one process could do it in."""
    weight = dict.fromkeys(["tied", "second", "third"], "f32[4, 4]")
    types = {**weight, "sum": "f32[] +dp" if "dp" in mesh else "f32[]", "scale": "f32[]"}
    back = {**weight, "scale": "f32[]", "dw": "f32[4, 4] +dp" if "dp" in mesh else "f32[4, 4]"}
    back |= dict.fromkeys(["t_1"], "f32[4, 4]")
    transposed = {"t": "f32[4, 2/dp]" if "dp" in mesh else "f32[4, 2]"}
    made = {}
    for rank in range(ranks):
        programs = {"SCALE": program("stage0", "SCALE", mesh, ["scale = full([], 1.0, dtype=torch.float32)",
                                                               "scale scale"], types)}  # fmt: skip
        programs |= {"LOSS": averaging(mesh, ranks, rank), "REDUCE": reduction(mesh, ranks, rank)}
        for stage in range(rank, STAGES, ranks):
            programs[f"{stage}F"] = program(f"stage{stage}", "F", mesh, FORWARD[stage], types)
            programs[f"{stage}B"] = program(f"stage{stage}", "B", mesh, BACKWARD[stage], {**back, **transposed})
        made[f"pp{rank}"] = Role(f"pp{rank}", programs, tuple(timeline(order or accumulated(), ranks, rank)), "pp")
    return made


def accumulated() -> list[Action]:
    """Return timelines of two microbatches under way at a time."""
    first = [Action(stage, "F", m) for m in (0, 1) for stage in range(STAGES)]
    for m in range(MICROBATCHES):
        first += [Action(stage, "B", m) for stage in reversed(range(STAGES))]
        if m + 2 < MICROBATCHES:
            first += [Action(stage, "F", m + 2) for stage in range(STAGES)]
    return first


def timeline(order: Sequence[Action], ranks: int, rank: int) -> list[Action]:
    """Return the actions of one role, with its messages."""
    found = [Action(rank, "SCALE")]
    for action in order:
        if action.stage % ranks != rank:
            continue
        first, last = (0, STAGES - 1) if action.kind == "F" else (STAGES - 1, 0)
        if action.stage != first:
            found.append(Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch))
        found.append(action)
        if action.stage != last:
            found.append(Action(action.stage, "SEND_F" if action.kind == "F" else "SEND_B", action.microbatch))
    return [*found, Action(rank, "LOSS"), Action(rank, "REDUCE"), Action(rank, "STEP")]


def staged(build: Build, mesh: str, ranks: int) -> Build:
    """Return a build of ``PLAN`` over a mesh, run by the stages."""
    return replace(build, roles=roles(mesh, ranks))


def write(folder: Path, mesh: str) -> Path:
    """Write the plan and its model into a folder; data are split over ``dp`` if the mesh has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(MODEL)
    lines = (f"mesh {mesh}\n" if mesh else "") + ("shard x, y [B/dp, _]\n" if "dp" in mesh else "")
    (folder / "net.parc").write_text(PLAN + lines)
    return folder / "net.parc"


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return a whole batch."""
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": y}
