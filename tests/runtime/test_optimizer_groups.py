"""Groups of an optimizer and tables of rates, beside torch's own param groups on the plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import parc
from parc.checking.checks import static_faults
from parc.checking.verification import verify_static
from parc.cli import main
from parc.compiler.build.directory import read_build
from parc.compiler.plan.plan import read_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.checked_plans import checked, compiled, compiled_net
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import BOTH, EXAMPLES, PLAN, batch, build

LINE = "adamw lr 1e-2 eps 1e-5 weight_decay 0.1 clip 1.0"
EVEN = PLAN.replace("dropout=0.1", "dropout=0.0")
GROUPS = """
optimizer on **.bias, norm, blocks.*.norm* weight_decay 0
optimizer on position lr 1e-3 betas 0.8, 0.9
optimizer on head.bias? lr 5e-3
"""
ROWS = [(1, 0.0), (2, 1e-2), (4, 2e-3)]
TABLED = EVEN.replace("lr 1e-2", 'lr table "rates.txt"')


def written(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rates.txt").write_text("# step rate\n1 0\n2, 1e-2  # the top\n\n4  2e-3\n")
    return folder


class TorchRun:
    """The plain module, trained by a loop of torch alone, with the groups and rates of the plan above."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        scope = {"__name__": "gpt"}
        exec((EXAMPLES / "gpt.py").read_text(), scope)
        make: type[nn.Module] = scope["GPT"]  # type: ignore[assignment]
        self.module = make(layers=2, width=16, heads=2, vocab=256, length=8, dropout=0.0)
        self.module.load_state_dict(weights)
        named = dict(self.module.named_parameters())
        still = {name for name in named if name.endswith(".bias") or ".norm" in f".{name}"}
        own = {"position.weight"}
        groups: list[dict[str, Any]] = [
            {"params": [value for name, value in named.items() if name not in still | own]},
            {"params": [named[name] for name in sorted(still)], "weight_decay": 0.0},
            {"params": [named["position.weight"]], "lr": 1e-3, "betas": (0.8, 0.9)},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-5, weight_decay=0.1)
        self.first = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, given: dict[str, torch.Tensor], rate: float) -> None:
        for group, own in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = rate * own / 1e-2
        self.optimizer.zero_grad()
        cross_entropy(self.module(given["tokens"]).flatten(0, 1), given["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()


def trained(folder: str, steps: int, saved: str = "", restored: str = "") -> dict[str, torch.Tensor]:
    with parc.load(folder) as session:
        if restored:
            session.restore(restored)
        for step in range(session.step_number, steps):
            session.step(batch(step))
        if saved:
            session.save(saved)
        return session.state_dict()


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)


def test_groups_and_rates_are_those_of_torch_on_split_ranks_and_in_other_sessions(tmp_path: Path) -> None:
    """Two steps on four ranks, then a checkpoint, and two on one rank whose optimizer lies in files, without groups."""
    split = build(written(tmp_path), BOTH + "zero 2 over dp\n" + GROUPS, TABLED)
    alone = build(tmp_path, 'offload optimizer to "state"\n', TABLED, "alone")
    wanted = TorchRun(trained(str(alone), 0))
    for step, rate in enumerate((0.0, 1e-2)):
        wanted.step(batch(step), rate)
    half = run_ranks(trained, 4, str(split), 2, str(tmp_path / "saved"))
    for found in half:
        close(found, wanted.module.state_dict())
    wanted.first = [1e-2] * 3
    wanted.optimizer.param_groups[1]["weight_decay"] = 0.1
    wanted.optimizer.param_groups[2]["betas"] = (0.9, 0.999)
    for step, rate in ((2, 6e-3), (3, 2e-3)):
        wanted.step(batch(step), rate)
    close(trained(str(alone), 4, "", str(tmp_path / "saved")), wanted.module.state_dict())


@pytest.mark.parametrize("more", ["zero 3 over dp\n", "offload optimizer to cpu\n"])
def test_ranks_update_groups_as_one_device_does(more: str) -> None:
    compilation = compiled(PLAN + BOTH + more + GROUPS, EXAMPLES)
    assert checked(compilation).report["checks"]["numbers"] == "tested"


def test_a_build_keeps_groups_and_rates_and_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = build(written(tmp_path), GROUPS, TABLED)
    (tmp_path / "rates.txt").unlink()
    opened = read_build(path)
    line = opened.manifest["optimizer"]
    assert line["table"] == [list(row) for row in ROWS] and line["lr"] == 1e-2
    assert "lr table [1 0, 2 1e-2, 4 2e-3]" in (path / "plan.parc").read_text()
    own = {"parameters": ["position.weight"], "set": {"betas": [0.8, 0.9], "lr": 1e-3}}
    assert own in line["groups"]
    assert not verify_static(path).faults
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "weight_decay 0.0" in shown and "blocks.*.norm1.weight" in shown and "all others" in shown


def test_a_group_may_have_what_the_loss_does_not_depend_on(tmp_path: Path) -> None:
    model = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x)
"""
    lines = "optimizer on **.bias lr 0.2\noptimizer on b lr 0.3\n"
    for more, frozen in ((lines, set()), (lines + "freeze b\n", {"b.bias", "b.weight"})):
        compilation = compiled_net(tmp_path, model, 'Net" ()', lines=more)
        assert not static_faults(compilation.build)
        assert compilation.build.manifest["optimizer"]["groups"] == [{"parameters": ["a.bias"], "set": {"lr": 0.2}}]
        assert frozen >= set(compilation.build.manifest["frozen"])


def test_groups_need_an_optimizer() -> None:
    text = PLAN.replace(f"optimizer {LINE}", "optimizer on head lr 1e-3")
    with pytest.raises(PlanError) as refused:
        read_plan(Source("plan.parc", text))
    assert [str(diagnostic.message) for diagnostic in refused.value.diagnostics] == [
        "`plan.parc` has no `optimizer` line"
    ]
