"""The memory of a rank, estimated from its programs and its order of work."""

from __future__ import annotations

from pathlib import Path

from parc.compiler.analysis.memory import estimate_memory
from parc.compiler.schedules import timelines
from tests.checked_plans import checked, compiled_net
from tests.runtime.staged import program, roles

RELAY = {
    "1F": program("stage1", "F", "pp=3", ("x:received x", "sent x"), {}),
    "1B": program("stage1", "B", "pp=3", ("g:received x", "sent x g"), {}),
}
VALUE = 2 * 4 * 4


def test_what_is_received_and_sent_is_counted() -> None:
    """A stage that only hands on keeps one value under way, one of its own and one that arrives."""
    actions = timelines("gpipe", 3, 2)["pp1"]
    assert estimate_memory(RELAY, actions, {}, {}).activations == 3 * VALUE


def test_a_rank_keeps_no_more_between_actions_than_is_estimated() -> None:
    """The estimate is at least the number of values that the executor keeps, as tests of running measure it for these
    stages."""
    for role, kept in zip(roles("pp=4", 4).values(), (1, 6, 3, 4), strict=True):
        assert estimate_memory(role.programs, role.actions, {}, {}).activations >= kept * VALUE


TAKEN_APART = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.all(x).reshape(-1, 3, 8).unbind(1)
        return torch.sigmoid(q * k).unfold(1, 4, 4).diagonal(dim1=1, dim2=2).sum(-1, keepdim=True) * v
"""


def test_parts_of_a_tensor_are_made_again_and_the_tensor_is_saved(tmp_path: Path) -> None:
    compilation = compiled_net(tmp_path, TAKEN_APART, 'Net"')
    assert not checked(compilation).faults
    saved = [value.name for value in compilation.built.programs["B"].main.parameters if value.kind == "saved"]
    assert any("all" in name for name in saved)
    assert not any(word in name for name in saved for word in ("unbind", "unfold", "diagonal"))
