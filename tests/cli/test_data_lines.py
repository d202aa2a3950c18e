"""Messages of `parc check` and `parc run` on a `data` line whose data does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from parc.cli import main
from tests.runtime.tiny import EXAMPLES, PLAN, build

SAMPLES = """
import torch


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=40):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == 13:
            raise LookupError("the shelf is empty")
        return torch.arange(8) + index, torch.arange(8) + index


def three():
    return Rows(3)


def none():
    return Rows(0)
"""
SAID = {
    'dataset "./samples.py:three"': """\
error[P0303]: the data has 3 samples, and a step takes 8
 --> plan.parc:7:19
7 | data      dataset "./samples.py:three"
  |                   ^^^^^^^^^^^^^^^^^^^^
help: give it 8 or more, or make B smaller
""",
    'tokens "train.bin"': """\
error[P0303]: train.bin does not say which type its tokens have
 --> plan.parc:7:18
7 | data      tokens "train.bin"
  |                  ^^^^^^^^^^^
help: add it to the plan's line, as `dtype uint16` for nanoGPT's files
""",
    'tokens "train.bin" dtype uint16': """\
error[P0303]: every second number of train.bin is 0, read as uint16
 --> plan.parc:7:18
7 | data      tokens "train.bin" dtype uint16
  |                  ^^^^^^^^^^^
help: was it written as uint32? Then `dtype uint32`
""",
    'tokens "train.bin" dtype uint32 pack': """\
error[P0303]: nothing says where documents end in train.bin
 --> plan.parc:7:18
7 | data      tokens "train.bin" dtype uint32 pack
  |                  ^^^^^^^^^^^
help: name the token that ends one, as `pack end 50256`
""",
    "tokens dtype uint16": """\
error[P0003]: `tokens` needs GLOBS: strings
 --> plan.parc:7:11
7 | data      tokens dtype uint16
  |           ^^^^^^
help: usage: data tokens GLOBS [dtype TYPE] [pack] [end N] [shuffle] [split X] [workers N]
""",
    'bytes "*.py"\neval every 3 data dataset "./samples.py:none"': """\
error[P0303]: the data has 0 samples
 --> plan.parc:8:27
8 | eval every 3 data dataset "./samples.py:none"
  |                           ^^^^^^^^^^^^^^^^^^^
help: give it 1 or more
""",
    'folder "wiki"': """\
error[P0303]: there is no folder or file wiki
 --> plan.parc:7:18
7 | data      folder "wiki"
  |                  ^^^^^^
help: name a folder that `dataset.save_to_disk` wrote, or a file of JSON with an object a line
""",
}


@pytest.mark.parametrize("line", SAID)
def test_a_line_whose_data_does_not_fit_is_said_with_its_place(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "gpt.py", tmp_path)
    (tmp_path / "samples.py").write_text(SAMPLES)
    np.arange(200, dtype=np.uint32).tofile("train.bin")
    Path("plan.parc").write_text(PLAN.replace('bytes "*.py"', line))
    assert main(["check", "plan.parc"]) == 1
    assert SAID[line] in capsys.readouterr().err.replace(f"{tmp_path}/", "")


FAILED = """\
error[P0303]: step 2: entry 13 of the dataset failed: LookupError: the shelf is empty
 = note: line 6 of the build's plan.parc: data dataset "./samples.py:Rows" shuffle workers 1
 = note: raised at samples.py:14: raise LookupError("the shelf is empty")
 = note: the state after step 1 was saved to saved
help: ask the dataset for it: `dataset[13]`
"""


def test_an_entry_that_fails_in_a_worker_ends_a_run_with_its_number_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples.py").write_text(SAMPLES)
    made = build(tmp_path, "", PLAN.replace('bytes "*.py"', 'dataset "./samples.py:Rows" shuffle workers 1'))
    assert main(["run", str(made), "--steps", "9", "--save", "saved"]) == 1
    said = capsys.readouterr().err.replace(f"{tmp_path}/", "")
    assert said[said.index("error") :].strip() == FAILED.strip()


def test_a_run_says_before_its_first_step_that_the_evaluation_has_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = build(tmp_path, 'eval every 3 data bytes "valid/*.txt"\n')
    assert main(["run", str(made), "--save", "saved", "--metrics", "metrics.jsonl"]) == 1
    assert 'P0303]: no file matches "valid/*.txt"' in capsys.readouterr().err
    assert not Path("saved").exists() and not Path("metrics.jsonl").exists()
    assert main(["run", str(made), "--steps", "2", "--eval-every", "2"]) == 1
    assert "step 1" not in capsys.readouterr().err
