"""Forms of experts beyond transformers' interface: Llama 4's, lists of modules, and a person's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import parc
from parc.checking.reports import report_of
from parc.compiler.build.directory import write_build
from parc.compiling.driver import Compiled
from tests.checked_plans import checked, compiled
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


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["Llama4", *LAYERS])
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


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _weights(folder: str) -> dict[str, torch.Tensor]:
    with parc.load(folder) as session:
        return session.state_dict()
