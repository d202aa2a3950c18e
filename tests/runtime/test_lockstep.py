"""Work that every rank does by itself: where one rank fails none goes on, and all can still do other things
together."""

from __future__ import annotations

from pathlib import Path

import pytest

import parc
from parc.cli import main
from tests.runtime.ranks import run_ranks

_MODEL = """
import torch
from torch import nn


def make():
    return nn.Linear(4, 4)


def square(output):
    return (output ** 2).mean()


def samples(number):
    if number >= 6:
        raise IndexError("there are 6 samples")
    return {"x": torch.full((4,), float(number))}
"""
_PLAN = """\
model "./net.py:make" ()
input x as input float32 [B, 4]
sizes B=4
loss "./net.py:square"(output)
optimizer sgd lr 0.1
data "./net.py:samples"
mesh dp=2
shard x [B/dp, _]
"""


def to_the_end(path: str, folder: str) -> tuple[str, int]:
    with parc.load(path) as session:
        session.step()
        with pytest.raises(parc.RunError) as error:
            session.step()
        session.save(f"{folder}/checkpoint")
        session.step(dict.fromkeys(["x"], session.state_dict()["weight"]))
        return error.value.message, session.step_number


def test_a_batch_that_one_rank_cannot_read_ends_the_step_on_all_before_it_begins(tmp_path: Path) -> None:
    """The second step's rows 6 and 7 are the last rank's."""
    (tmp_path / "net.py").write_text(_MODEL)
    (tmp_path / "net.parc").write_text(_PLAN)
    assert main(["build", str(tmp_path / "net.parc"), "-o", str(tmp_path / "build")]) == 0
    first, second = run_ranks(to_the_end, 2, str(tmp_path / "build"), str(tmp_path))
    assert first == second
    assert "making sample 6 failed: IndexError: there are 6 samples" in first[0] and first[1] == 2
    assert (tmp_path / "checkpoint" / "state.json").is_file()


_TEXT = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 8), nn.Linear(8, 128)

    def forward(self, tokens):
        return self.head(self.embed(tokens))
"""
_TEXT_PLAN = """\
model "./net.py:Net" ()
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=2, S=4
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
data bytes "text"
mesh dp=2
shard tokens, targets [B/dp, _]
"""


def through_the_text(path: str) -> tuple[str, int]:
    with parc.load(path) as session, pytest.raises(parc.RunError) as error:
        while True:
            session.step()
    session.state_dict()
    return error.value.message, session.step_number


def test_text_that_one_rank_cannot_take_ends_the_step_on_all(tmp_path: Path) -> None:
    """One byte of the text is beyond the classes, in one window, which one rank reads."""
    (tmp_path / "net.py").write_text(_TEXT)
    (tmp_path / "net.parc").write_text(_TEXT_PLAN)
    (tmp_path / "text").write_bytes(b"a" * 38 + b"\xe9" + b"b" * 40)
    assert main(["build", str(tmp_path / "net.parc"), "-o", str(tmp_path / "build")]) == 0
    first, second = run_ranks(through_the_text, 2, str(tmp_path / "build"))
    assert first == second and "holds 233, but the model knows 0 to 127" in first[0]


def unwritable(path: str, folder: str) -> list[str]:
    with parc.load(path) as session:
        said = []
        for _ in range(2):
            with pytest.raises(parc.RunError) as error:
                session.save(f"{folder}/net.py")
            said.append(error.value.message)
        session.step()
        return said


def test_a_checkpoint_that_cannot_be_written_leaves_the_session(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(_MODEL)
    (tmp_path / "net.parc").write_text(_PLAN)
    assert main(["build", str(tmp_path / "net.parc"), "-o", str(tmp_path / "build")]) == 0
    first, second = run_ranks(unwritable, 2, str(tmp_path / "build"), str(tmp_path))
    assert first == second and all("net.py" in message for message in first)
