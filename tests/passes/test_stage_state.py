"""Buffers that a step updates, in stages: B reads the same as F, and the stage that updates a buffer is the one that
reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import parc
from parc.checking.checks import check_build
from parc.cli import main
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.plain import in_reduce
from parc.compiler.program.program import Program
from parc.compiler.program.roles import join_roles
from parc.compiler.verify.communication import check_stages
from parc.compiler.verify.step import check_bindings
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.planted_edits import with_main
from tests.runtime.ranks import run_ranks

_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        for name in {names}:
            self.register_buffer(name, torch.ones(4))

    def forward(self, x):
        {lines}


def square(output, wanted):
    return ((output - wanted) ** 2).mean()
"""
_PLAN = """\
model "./net.py:Net" ()
input x float32 [B, 4]
input wanted float32 [B, 4]
sizes B=8
loss "./net.py:square"(output, wanted)
optimizer sgd lr 0.1
mesh dp=2, pp=2
shard x, wanted [B/dp, _]
stage before b over pp
schedule 1f1b microbatches 2
"""


def model(lines: str, names: tuple[str, ...] = ("state",)) -> str:
    """Return the code of a model of these lines, with buffers of these names."""
    return _MODEL.format(lines=lines.replace("; ", "\n        "), names=names)


def compiled(folder: Path, lines: str, plan: str = _PLAN, names: tuple[str, ...] = ("state",)) -> Compiled:
    """Compile such a model, cut before ``b``."""
    (folder / "net.py").write_text(model(lines, names))
    return compile_plan(read_plan(Source("net.parc", plan)), folder)


@pytest.mark.parametrize(
    "lines",
    [
        "h = torch.tanh(self.a(x)) * self.state.clone(); self.state.copy_(h.detach().sum(0)); return self.b(h)",
        "h = torch.tanh(self.a(x)) + self.state; self.state.copy_(h.detach().sum(0)); return self.b(h)",
    ],
    ids=["whose old entries its backward reads", "whose new entries are summed over ranks last"],
)
def test_a_buffer_of_the_first_stage_stays_there(tmp_path: Path, lines: str) -> None:
    compilation = compiled(tmp_path, lines)
    work = compilation.build.roles["pp1"].programs
    assert "state" not in work["1F"].main.returned("buffer")
    assert not check_build(compilation).faults


def test_a_copy_of_a_buffer_that_another_stage_reads_is_a_reader(tmp_path: Path) -> None:
    lines = "old = self.state.clone(); h = self.a(x); self.state.copy_(h.detach().sum(0)); return self.b(h) * old"
    with pytest.raises(PlanError) as error:
        compiled(tmp_path, lines)
    assert "`state` is read and updated in stages 0 and 1" in error.value.diagnostics[0].message


@pytest.mark.parametrize(("key", "what"), [("1F", "is updated in stage 0"), ("0B", "is another since F")])
def test_a_program_that_reads_a_buffer_after_its_update_is_refused(tmp_path: Path, key: str, what: str) -> None:
    lines = "h = torch.tanh(self.a(x)) * self.state.clone(); self.state.copy_(h.detach().sum(0)); return self.b(h)"
    compilation = compiled(tmp_path, lines)
    roles = compilation.build.roles
    read = roles["pp0"].programs["0F"].main.bound("buffer")["state"]
    changed: dict[str, dict[str, Program]] = {name: in_reduce(role.programs) for name, role in roles.items()}
    own = next(programs for programs in changed.values() if key in programs)
    parameters = (*(v for v in own[key].main.parameters if v.name != read.name), read)
    own |= with_main(own, key, parameters=parameters)
    stored = compilation.build.types
    faults = [*check_stages(changed, compilation.mesh, "pp"), *check_bindings(join_roles(changed), stored)]
    assert any(what in str(fault) for fault in faults)


_ALONE = _PLAN.replace(", pp=2", "").replace("stage before b over pp\n", "").replace("1f1b ", "")
_A_PARAMETER = "h = self.a(x); self.state.copy_(self.b.bias.detach()); return self.b(h)"
_WRITTEN = """\
h = self.a(x); y = self.b(h); s = x.sum(0)
self.first.copy_(h.detach().sum(0)); self.last.copy_(y.detach().sum(0)); self.inputs.copy_(x.sum(0))
self.elsewhere.copy_(s); self.parameter.copy_(self.b.bias.detach()); self.constant.fill_(3.0)
self.assigned = h.detach().sum(0); self.drawn.copy_(torch.rand(4)); return y * s"""
"""Writes to buffers: values of the first stage and of the last, inputs alone, inputs that another stage reads, a
parameter, a constant, a new tensor, random numbers."""
_NAMES = ("first", "last", "inputs", "elsewhere", "parameter", "constant", "assigned", "drawn")


@pytest.mark.parametrize("plan", [_PLAN, _ALONE], ids=["stages", "alone"])
def test_a_buffer_that_nobody_reads_is_kept(tmp_path: Path, plan: str) -> None:
    compilation = compiled(tmp_path, _WRITTEN.replace("\n", "; "), plan, _NAMES)
    assert not check_build(compilation).faults
    written = [name for role in compilation.build.roles.values() for program in role.programs.values()
               for name in program.main.returned("buffer")]  # fmt: skip
    assert sorted(written) == sorted(_NAMES)


def batch(step: int) -> dict[str, torch.Tensor]:
    return dict(zip(("x", "wanted"), torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step)), strict=True))


def train(path: str, folder: str) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Return the whole state after each of three steps, the third repeated from a checkpoint, and the buffers of a
    rank."""
    with parc.load(path) as session:
        states = []
        for step in range(3):
            if step == 2:
                session.save(f"{folder}/checkpoint")
            session.step(batch(step))
            states.append(session.state_dict())
        session.restore(f"{folder}/checkpoint")
        states.append(session.state_dict())
        session.step(batch(2))
        return [*states, session.state_dict()], sorted(session.state.buffers)


def test_a_buffer_that_nobody_reads_is_saved_and_restored(tmp_path: Path) -> None:
    """It is so under stages as in the plain module, also if the new value is a parameter, which the update then
    changes."""
    plan = _PLAN.replace("dp=2, ", "").replace("shard x, wanted [B/dp, _]\n", "")
    (tmp_path / "net.py").write_text(model(_A_PARAMETER))
    (tmp_path / "net.parc").write_text(plan)
    assert main(["build", str(tmp_path / "net.parc"), "-o", str(tmp_path / "build")]) == 0
    plain, expected = parc.reference(tmp_path / "build"), []
    for step in range(3):
        plain.step(batch(step))
        expected.append({name: value.clone() for name, value in plain.module.state_dict().items()})
    ranks = run_ranks(train, 2, str(tmp_path / "build"), str(tmp_path))
    for states, _ in ranks:
        for state, wanted in zip(states, [*expected, expected[1], expected[2]], strict=True):
            torch.testing.assert_close(state, wanted, rtol=1e-5, atol=1e-6)
    assert sorted(name for _, names in ranks for name in names) == ["state"]


def test_a_buffer_that_the_model_assigns_is_what_the_plain_module_keeps(tmp_path: Path) -> None:
    """Its new entries are of its old ones, which may be read later, and may be returned."""
    lines = "h = self.a(x); self.mean = 0.9 * self.mean + 0.1 * h.detach().sum(0); old = self.last; "
    lines += "self.last = x.sum(0); self.kept = 2 * x.sum(0); return self.kept + self.b(h) + self.mean + old"
    names = ("mean", "last", "kept")
    (tmp_path / "net.py").write_text(model(lines, names))
    (tmp_path / "net.parc").write_text(_ALONE.replace("dp=2", "dp=1"))
    assert main(["build", str(tmp_path / "net.parc"), "-o", str(tmp_path / "build")]) == 0
    plain = parc.reference(tmp_path / "build")
    with parc.load(tmp_path / "build") as session:
        for step in range(3):
            assert session.step(batch(step)).loss == pytest.approx(plain.step(batch(step)).loss, rel=1e-5)
            kept, expected = session.state_dict(), plain.module.state_dict()
            torch.testing.assert_close({name: kept[name] for name in names}, {name: expected[name] for name in names})


def test_a_buffer_that_becomes_another_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        compiled(tmp_path, "self.state = x; return self.b(self.a(x))")
    assert "the buffer `state` becomes float32 [4, 4], not float32 [4]" in str(error.value)


def fail_once(session: parc.Session, at: int) -> None:
    """Let the F of a session's first stage fail in a microbatch."""
    stepper = session._by_sizes().stepper
    machine = stepper.machines.get("F") or stepper.machines[f"{session.role.stages[0]}F"]

    def watch(*_: Any) -> None:
        if stepper.current is not None and stepper.current.microbatch == at:
            machine.watch = None
            raise RuntimeError("planted")

    machine.watch = watch


def test_a_step_that_failed_on_the_only_rank_leaves_nothing(tmp_path: Path) -> None:
    lines = "h = self.a(x); self.state.add_(1); return self.b(h)"
    (tmp_path / "net.py").write_text(model(lines))
    (tmp_path / "net.parc").write_text(_ALONE.replace("dp=2", "dp=1"))
    assert main(["build", str(tmp_path / "net.parc"), "-o", str(tmp_path / "build")]) == 0
    with parc.load(tmp_path / "build") as session:
        fail_once(session, 1)
        with pytest.raises(RuntimeError, match="planted"):
            session.step(batch(0))
        assert session.state_dict()["state"].tolist() == [1.0] * 4
        assert session.step(batch(0)).step == 1
        assert session.state_dict()["state"].tolist() == [3.0] * 4


def go_on(path: str, folder: str) -> list[str]:
    """Return the messages of a session's calls after a step that failed on every rank."""
    with parc.load(path) as session:
        session.save(f"{folder}/checkpoint")
        fail_once(session, 1 - session.rank)  # in the first stage in the second microbatch, in the other in the first
        with pytest.raises(RuntimeError, match="planted"):
            session.step(batch(0))
        said = []
        for call in (
            lambda: session.step(batch(0)),
            lambda: session.evaluate(batch(0)),
            lambda: session.state_dict(),
            lambda: session.save(f"{folder}/other"),
            lambda: session.restore(f"{folder}/checkpoint"),
        ):
            with pytest.raises(parc.RunError) as error:
                call()
            said.append(error.value.message)
        return said


def test_a_session_with_other_ranks_ends_with_a_step_that_failed(tmp_path: Path) -> None:
    lines = "h = self.a(x); self.state.add_(1); return self.b(h)"
    (tmp_path / "net.py").write_text(model(lines))
    (tmp_path / "net.parc").write_text(_PLAN.replace("dp=2, ", "").replace("shard x, wanted [B/dp, _]\n", "eval\n"))
    assert main(["build", str(tmp_path / "net.parc"), "-o", str(tmp_path / "build")]) == 0
    for rank, said in enumerate(run_ranks(go_on, 2, str(tmp_path / "build"), str(tmp_path))):
        assert said == [f"step 1 ended with an error on rank {rank}, and other ranks may still be in it"] * 5
