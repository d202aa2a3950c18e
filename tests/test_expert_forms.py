"""Forms of experts beyond transformers' interface: Llama 4's, lists of modules, and a person's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.source import Source
from tests.checked_plans import checked, compiled
from tests.draws import star, wide
from tests.moe_forms import LAYERS
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks

PLAN = """\
model "./moe_forms.py:Model" (name="{name}")
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=4
loss cross_entropy(output.logits, targets)
data bytes "{{stdlib}}/*.py"
optimizer adamw lr 1e-2 clip 1.0
mesh {mesh}
shard input_ids, targets [B/dp/ep, _]
experts {where} over ep dropless
"""
LLAMA4 = 'model "./moe_families.py:family" (name="Llama4")'


def plan(name: str, mesh: str, lines: str = "") -> str:
    """Return the text of a plan for a model of one layer of experts."""
    where = "model.layers.*.feed_forward" if name == "Llama4" else "layers.*.experts"
    text = PLAN.format(name=name, mesh=mesh, where=where)
    return (text.replace(text.split("\n")[0], LLAMA4) if name == "Llama4" else text) + lines


def made(name: str, mesh: str, lines: str = "") -> Compiled:
    """Compile it."""
    return compiled(plan(name, mesh, lines), ROOT / "tests")


RANKS = (2, 1, 4, 8)
FORMS = [
    *star([*LAYERS], RANKS),
    *(wide("Llama4", ep) for ep in RANKS),
]  # which ``test_experts`` has among its families


@pytest.mark.parametrize(("name", "ep"), FORMS)
def test_a_form_computes_what_the_layer_does_on_any_number_of_ranks(name: str, ep: int) -> None:
    """Loss, gradients and the update of the simulated ranks in float64, beside those of the layer's own code."""
    report = checked(made(name, f"dp=1, ep={ep}", f"expect {4 * (ep > 1)} exchange in **\n")).report
    assert report["checks"]["numbers"] == "tested"


def test_experts_of_a_list_are_split_at_the_memory_of_stacked_ones() -> None:
    forward = made("listed", "dp=1, ep=4").built.programs["F"]
    stacks = {name: value.type for name, value in forward.main.bound("parameter").items() if ".*." in name}
    assert stacks["layers.0.experts.experts.*.up.weight"].shape == (8, 12, 16)
    assert {type_.local(forward.mesh)[0] for type_ in stacks.values()} == {2}


def trained(folder: str, saved: str, begun: str = "") -> tuple[float, dict[str, torch.Tensor], set[str]]:
    """Train on the ranks of this mesh, from a checkpoint if one is named, and save. Return the last loss, whole
    weights, and the names of those that a rank has."""
    with parc.load(folder) as session:
        if begun:
            session.restore(begun)
        loss = [session.step().loss for _ in range(2)][-1]
        session.save(saved)
        return loss, session.state_dict(), set(session.state_dict(local=True))


def test_checkpoints_of_a_list_have_the_model_s_own_names(tmp_path: Path) -> None:
    """Ranks that share the experts go on where one rank stopped, and the other way round; files of own names are read
    at the start, and the plain module loads what is left."""
    for name, mesh in (("one", "dp=1, ep=1"), ("two", "dp=1, ep=2")):
        build = made("listed", mesh)
        write_build(build.to_write(report_of(build)), tmp_path / name)
    at = {name: str(tmp_path / name) for name in ("one", "two", "first", "second", "third")}
    ((_, begun, _),) = run_ranks(trained, 1, at["one"], at["first"])
    ((loss, expected, _),) = run_ranks(trained, 1, at["one"], at["second"], at["first"])
    for rank, (found, weights, own) in enumerate(run_ranks(trained, 2, at["two"], at["third"], at["first"])):
        assert found == pytest.approx(loss, rel=1e-5)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
        held = {int(name.split(".")[4]) for name in own if ".experts.experts." in name}
        assert held == set(range(4 * rank, 4 * rank + 4))
    plain = parc.reference(at["one"])
    assert plain.module.state_dict().keys() == expected.keys()
    plain.module.load_state_dict(expected)
    assert plain.module.state_dict()["layers.0.experts.experts.3.up.weight"].equal(
        expected["layers.0.experts.experts.3.up.weight"]
    )
    plain.close()
    ((_, back, _),) = run_ranks(trained, 1, at["one"], at["first"], at["third"])  # three steps and two more
    assert back.keys() == begun.keys()
    save_file(expected, _folder(tmp_path / "weights") / "model.safetensors")
    text = plan("listed", "dp=1, ep=2", f'init from "{tmp_path / "weights"}"\n')
    build = compiled(text, ROOT / "tests")
    assert checked(build).report["checks"]["numbers"] == "tested"
    write_build(build.to_write(report_of(build)), tmp_path / "from")
    for weights in run_ranks(_weights, 2, str(tmp_path / "from")):
        assert all(weights[name].equal(value) for name, value in expected.items())


def extreme(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the ranks of this mesh with 8 tokens, then with one. Return losses and weights."""
    with parc.load(folder) as session:
        words = torch.randint(0, 256, (2, 8, 1), generator=torch.Generator().manual_seed(1))
        given = [{"input_ids": words[0, :batch], "targets": words[1, :batch]} for batch in (8, 1, 8)]
        return [session.step(batch).loss for batch in given], session.state_dict()


def test_ranks_without_a_token_go_on(tmp_path: Path) -> None:
    """All tokens go to one expert, so all others are empty; and there is one token in all."""
    for folder, mesh in (("one", "dp=1, ep=1"), ("two", "dp=1, ep=2")):
        text = plan("listed", mesh).replace('"listed")', '"listed", top=1, to=2)').replace("S=4", "S=1")
        build = compiled(text, ROOT / "tests")
        assert checked(build).report["checks"]["numbers"] == "tested"
        write_build(build.to_write(report_of(build)), tmp_path / folder)
    ((losses, weights),) = run_ranks(extreme, 1, str(tmp_path / "one"))
    for found, state in run_ranks(extreme, 2, str(tmp_path / "two")):
        assert found == pytest.approx(losses, rel=1e-5)
        for key, value in weights.items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def not_a_number(folder: str) -> str:
    """Let the router of one rank have NaN, and return what a step says on this one."""
    with parc.load(folder) as session:
        if session.rank == 0:
            session.state.parameters["layers.0.experts.router.weight"].data.fill_(torch.nan)
        words = torch.randint(0, 32, (8, 4))
        with pytest.raises(parc.RunError) as stopped:
            session.step({"input_ids": words, "targets": words})
        return str(stopped.value)


def test_nan_in_a_router_is_an_error_on_every_rank(tmp_path: Path) -> None:
    build = made("listed", "dp=1, ep=2")
    write_build(build.to_write(report_of(build)), tmp_path / "two")
    said = run_ranks(not_a_number, 2, str(tmp_path / "two"))
    assert all("P0302" in text and "nan" in text for text in said), said


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _weights(folder: str) -> dict[str, torch.Tensor]:
    with parc.load(folder) as session:
        return session.state_dict()


WRONG = """
import torch
from torch import nn
from tests.moe_forms import LAYERS, Listed, Model, listed
import parc

class Other(Listed):
    def forward(self, x):
        return super().forward(x)

class Mixed(Listed):
    def __init__(self, top):
        super().__init__(top)
        self.experts[3].norm.eps = 0.1

    def forward(self, x):
        return super().forward(x)

class Strange(Listed):
    def forward(self, x):
        return super().forward(x)

class Dropped(Listed):
    def __init__(self, top):
        super().__init__(top)
        for expert in self.experts:
            expert.gate = nn.Sequential(expert.gate, nn.Dropout(0.1))

    def forward(self, x):
        return super().forward(x)

class Norm(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

class Centred(Listed):
    def __init__(self, top):
        super().__init__(top)
        for expert in self.experts:
            expert.norm = Norm()

    def forward(self, x):
        return super().forward(x)

class Wide(Listed):
    def forward(self, x):
        return super().forward(x)

class Many(Listed):
    def forward(self, x):
        return super().forward(x)

@parc.register_experts(Many, "experts")
def many(layer, x):
    weights, index = layer.route(x.flatten(0, 1))
    index = torch.cat([index] * 5, 1)
    return parc.routed(x.flatten(0, 1), index, index.float(), layer.experts)

LAYERS.update(other=Other, mixed=Mixed, strange=Strange, dropped=Dropped, centred=Centred, wide=Wide, many=Many)
parc.register_experts(Dropped, "experts")(listed)
parc.register_experts(Centred, "experts")(listed)

@parc.register_experts(Wide, "experts")
def wide(layer, x):
    weights, index = layer.route(x)
    return parc.routed(x, index, weights, layer.experts)

@parc.register_experts(Other, "experts")
def other(layer, x):
    weights, index = layer.route(x.flatten(0, 1))
    return parc.routed(x.flatten(0, 1), index, 2 * weights, layer.experts).view_as(x)

@parc.register_experts(Mixed, "experts")
def mixed(layer, x):
    raise AssertionError

@parc.register_experts(Strange)
def strange(layer, x):
    tokens = x.flatten(0, 1)
    weights, index = layer.route(tokens)
    if layer.router.out_features == 8:
        return parc.routed(tokens, index, weights, lambda rows, up: rows * up.cumsum(0), (layer.router.weight,))
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other", ["error[P0265]", "the form of `Other` is not what its forward computes", "plan.parc:1:1"]),
        (
            "dropped",
            ["error[P0264]", "in `layers.0.experts.experts.0.gate.1`: draws a random number", "at moe_forms.py:"],
        ),
        ("centred", ["error[P0264]", "in `layers.0.experts.experts.0.norm`: `sum` mixes the rows", "at wrong.py:"]),
        ("wide", ["error[P0263]", "tokens [8, 4, 16], index [8, 4, 2], weights [8, 4, 2]", "wrong.py:", "`flatten`"]),
        ("many", ["error[P0263]", "each token is to go to 10 of 8 experts", "at most as many experts as there are"]),
        (
            "mixed",
            [
                "error[P0263]",
                "the experts in `layers.0.experts.experts` are not alike: numbers 0 and 3",
                "`eps` of `norm`",
            ],
        ),
        (
            "strange",
            ["error[P0263]", "wrong.py:", "`.cumsum` reads a weight of one expert", "write experts with linear layers"],
        ),
    ],
)
def test_a_form_that_is_none_is_refused(name: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    text = plan("listed", "dp=1, ep=2").replace("./moe_forms.py:Model", "./wrong.py:Model").replace("listed", name)
    with pytest.raises(PlanError) as refusal:
        checked(compile_plan(read_plan(Source("plan.parc", text)), tmp_path))
    message = "\n".join(map(render, refusal.value.diagnostics))
    assert all(part in message for part in said), message
