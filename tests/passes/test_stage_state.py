"""Buffers that a step updates, in stages: B reads what F read, and who updates one is who reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parc.checks import check_build
from parc.compiler.placement import parse_type
from parc.compiler.plan import read_plan
from parc.compiler.program import Program
from parc.compiler.roles import join
from parc.compiler.verify_stages import check_stages
from parc.compiler.verify_step import check_bindings
from parc.driver import Compiled, compile_plan, stored_types
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source

_MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("state", torch.ones(4))

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


def compiled(folder: Path, lines: str) -> Compiled:
    """A model of these lines, cut before ``b``."""
    (folder / "net.py").write_text(_MODEL.format(lines=lines.replace("; ", "\n        ")))
    return compile_plan(read_plan(Source("net.parc", _PLAN)), folder)


@pytest.mark.parametrize(
    "lines",
    [
        "h = torch.tanh(self.a(x)) * self.state.clone(); self.state.copy_(h.detach().sum(0)); return self.b(h)",
        "h = torch.tanh(self.a(x)) + self.state; self.state.copy_(h.detach().sum(0)); return self.b(h)",
    ],
    ids=["whose old entries its backward reads", "whose new entries are summed over ranks last"],
)
def test_a_buffer_of_the_first_stage_stays_there(tmp_path: Path, lines: str) -> None:
    made = compiled(tmp_path, lines)
    work = made.roles()["pp1"].programs
    assert "buffer state" not in {key for key, _ in work["1F"].main.returns}
    assert not check_build(made).faults


def test_a_copy_of_a_buffer_that_another_stage_reads_is_a_reader(tmp_path: Path) -> None:
    lines = "old = self.state.clone(); h = self.a(x); self.state.copy_(h.detach().sum(0)); return self.b(h) * old"
    with pytest.raises(PlanError) as error:
        compiled(tmp_path, lines)
    assert "`state` is read and updated in stages 0 and 1" in error.value.diagnostics[0].message


@pytest.mark.parametrize(("key", "what"), [("1F", "is updated in stage 0"), ("0B", "is another since F")])
def test_a_program_that_reads_a_buffer_after_its_update_is_refused(tmp_path: Path, key: str, what: str) -> None:
    lines = "h = torch.tanh(self.a(x)) * self.state.clone(); self.state.copy_(h.detach().sum(0)); return self.b(h)"
    made = compiled(tmp_path, lines)
    roles = made.roles()
    read = next(v for v in roles["pp0"].programs["0F"].main.parameters if v.role == "buffer state")
    changed: dict[str, dict[str, Program]] = {name: dict(role.programs) for name, role in roles.items()}
    own = next(programs for programs in changed.values() if key in programs)
    main = own[key].main
    main = replace(main, parameters=(*(v for v in main.parameters if v.name != read.name), read))
    own[key] = replace(own[key], functions=(*own[key].functions[:-1], main))
    stored = {name: parse_type(text, made.mesh) for name, text in stored_types(made).items()}
    faults = [*check_stages(changed, made.mesh, "pp"), *check_bindings(join(changed), stored)]
    assert any(what in str(fault) for fault in faults)
