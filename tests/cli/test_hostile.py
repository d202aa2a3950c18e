"""Senseless plans, builds, checkpoints and models: each command ends soon, with a message."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from parc.runtime.ranks.faults import RunError
from parc.runtime.state.checkpoint import read_checkpoint
from parc.runtime.state.index import FACTS, INDEX_FILE, TENSORS
from tests.cli.commands import Captured, parc
from tests.hostile_changes import rehash
from tests.runtime.tiny import PLAN, TENSOR, build

SECRET = "root:$6$hunter2:19000:0:99999:7:::\n"
MANY = ", ".join(f"a{axis}=1" for axis in range(40))
HOSTILE = {
    "a size of 2^62": (PLAN.replace("S=8", f"S={2**62}"), "P0010"),
    "a size beyond 64 bits": (PLAN.replace("S=8", f"S={2**64}"), "P0001"),
    "sizes whose product is too large": (PLAN.replace("B=8, S=8", "B=1000000000000, S=8000"), "P0010"),
    "a range of 10^12 sizes": (PLAN.replace("S=8", "S=1..1000000000000"), "P0010"),
    "a number beyond floats": (PLAN.replace("seed      3", "seed 1e999"), "P0001"),
    "a number of many digits": (PLAN.replace("seed      3", f"seed {'9' * 10**5}"), "P0001"),
    "microbatches without end": (PLAN.replace("microbatches 2", "microbatches 1000000000"), "P0"),
    "stages without end": (PLAN + "mesh pp=1000000\nstage balanced over pp\n", "P0"),
    "more ranks than there are": (PLAN + "mesh dp=4611686018427387904, tp=8\n", "P0010"),
    "more axes than there are": (PLAN + f"mesh {MANY}\n", "P0010"),
    "brackets without end": (PLAN + "shard x " + "[" * 10**5 + "\n", "P0001"),
    "parentheses without end": (PLAN + "column x over tp rows " + "(" * 500 + ")" * 500 + "\n", "P0001"),
    "a name without end": (PLAN + f"shard {'a' * 10**5} [_]\n", "P0001"),
    "a range of numbers without end": (PLAN + f"shard a.[0..{'9' * 4400}] [_]\n", "P0001"),
    "a million lines": (PLAN + "seed 1\n" * 10**5, "P0024"),
    "many lines of one mistake": (PLAN + "mesh tp=2\n" * 5000, "P0006"),
    "more bytes than a plan has": (PLAN + "# \n" * 10**6, "P0013"),
    "a device": (PLAN + 'include "/dev/zero"\n', "P0020"),
    "a pipe": (PLAN + 'include "pipe"\n', "P0020"),
    "files that include each other twice": (PLAN + 'include "twice0.parc"\n', "P0024"),
    "a file that is no plan": (PLAN + 'include "secret"\n', "P0025"),
    "a text that doubles": (PLAN + 'let a0="xxxxxxxx"\n' + "".join(f'let a{n + 1}="$a{n}$a{n}"\n' for n in range(40)),
                            "P0010"),
    "a direction of writing": (PLAN + "# \u202e1 dees\n", "P0023"),
    "a joiner": (PLAN + "seed\u200b 1\n", "P0023"),
    "a NUL": (PLAN + "seed 1\0\n", "P0023"),
    "an escape": (PLAN + "# \x1b[2J\n", "P0023"),
    "a return in a line": (PLAN + "seed 1 # \x0b seed 2\n", "P0023"),
}  # fmt: skip
"""Hostile plans by what is wrong with them: the text of the plan, and the code of its message."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text(SECRET * 3)
    for number in range(25):
        (tmp_path / f"twice{number}.parc").write_text(f'include "twice{number + 1}.parc"\n' * 2)
    (tmp_path / "twice25.parc").write_text("seed 1\n")
    return tmp_path


@pytest.mark.parametrize("what", HOSTILE)
def test_a_plan_without_sense_is_refused_soon(capsys: Captured, folder: Path, what: str) -> None:
    text, expected = HOSTILE[what]
    (folder / "plan.parc").write_text(text)
    start = time.monotonic()
    code, out, err = parc(capsys, "check", "--static", folder / "plan.parc")
    assert code == 1 and out == "" and f"error[{expected}" in err, err[:3000]
    assert "help: " in err and "hunter2" not in err and len(err) < 50_000 and time.monotonic() - start < 10


def test_ends_of_lines_and_a_byte_order_mark_are_read_and_other_bytes_are_not(capsys: Captured, folder: Path) -> None:
    for data in (PLAN.encode("utf-8-sig"), PLAN.replace("\n", "\r\n").encode(), PLAN.replace("\n", "\r").encode()):
        (folder / "plan.parc").write_bytes(data + b"\xff" * (data[0] == 0))
        code, _, err = parc(capsys, "check", "--static", folder / "plan.parc")
        assert code == 1 and "error[P0201]: there is no file `gpt.py`" in err, err
    (folder / "plan.parc").write_bytes(PLAN.encode() + b"\xff\xfe")
    for words in (("check", "--static"), ("fmt",)):
        code, _, err = parc(capsys, *words, folder / "plan.parc")
        assert code == 1 and "error[P0013]" in err and "UTF-8" in err, err


def test_what_stands_in_a_file_that_is_no_table_is_not_shown(capsys: Captured, folder: Path) -> None:
    shutil.copy(build_files() / "gpt.py", folder)
    plan = PLAN.replace("schedule  microbatches 2", 'schedule  table "secret" microbatches 2')
    (folder / "plan.parc").write_text(plan + "mesh pp=2\nstage before blocks.1 over pp\n")
    code, _, err = parc(capsys, "check", folder / "plan.parc")
    assert code == 1 and "is not `rank 0: 0F0 0B0`" in err and "hunter2" not in err, err


def build_files() -> Path:
    return Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.mark.parametrize(
    "body",
    ["import sys\nsys.exit(3)", "raise KeyboardInterrupt", "def f():\n    f()\nf()", "class GPT:\n    import sys\n"
     "    def __init__(self, **_):\n        self.sys.exit()", "def GPT(**_):\n    raise KeyboardInterrupt"],
)  # fmt: skip
def test_a_model_that_ends_the_process_is_said_at_its_line(capsys: Captured, folder: Path, body: str) -> None:
    (folder / "gpt.py").write_text(f"{body}\n{'# of a length that fills a batch' * 99}\n")
    (folder / "plan.parc").write_text(PLAN)
    code, _, err = parc(capsys, "check", folder / "plan.parc")
    assert code == 1 and "error[P0201]" in err and "plan.parc:2:1" in err and "gpt.py" in err, err


def test_a_model_of_endless_layers_is_refused(capsys: Captured, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parc.compiler.initial.recorder._MOST_OPERATORS", 2_000)
    shutil.copy(build_files() / "gpt.py", folder)
    (folder / "plan.parc").write_text(PLAN.replace("layers=2", f"layers={2**31}"))
    code, _, err = parc(capsys, "check", folder / "plan.parc")
    assert code == 1 and "error[P0201]" in err and "does it have more layers than you meant?" in err, err


def test_a_forward_that_ends_the_process_is_said(capsys: Captured, folder: Path) -> None:
    text = (build_files() / "gpt.py").read_text()
    assert "def forward(self, tokens" in text
    head, _, rest = text.rpartition("def forward(self, tokens")
    first, _, rest = rest.partition("\n")
    (folder / "gpt.py").write_text(f"{head}def forward(self, tokens{first}\n        raise SystemExit(7)\n{rest}")
    (folder / "plan.parc").write_text(PLAN)
    code, _, err = parc(capsys, "check", folder / "plan.parc")
    assert code == 1 and "SystemExit(7)" in err and "plan.parc:2:1" in err and "gpt.py" in err, err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("hostile"), TENSOR)


@pytest.mark.parametrize("name", ["manifest.json", "report.json", "programs/stage0.F.py", "schedule.txt", "plan.parc"])
@pytest.mark.parametrize("kind", ["pipe", "nested", "zeros", "folder"])
def test_a_build_without_sense_is_refused_soon(
    capsys: Captured, made: Path, tmp_path: Path, name: str, kind: str
) -> None:
    place = Path(shutil.copytree(made, tmp_path / "build")) / name
    spoil(place, kind)
    for words in (("verify", "--static"), ("show",)):
        code, _, err = parc(capsys, *words, tmp_path / "build")
        assert code == 1 and "error[P0211]" in err and "help: " in err and "parc's own" not in err, err


def test_an_order_that_never_ends_is_not_drawn(capsys: Captured, made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "build"))
    place = copy / "schedule.txt"
    place.write_text(place.read_text().replace("0F0", "0RECV_B0 0F0", 1))
    rehash(copy)
    code, _, err = parc(capsys, "show", "--pipeline", copy)
    assert code == 1 and "error[P0211]" in err and "schedule.txt`: the order deadlocks: " in err, err


def spoil(place: Path, kind: str) -> None:
    """Replace a file by something else."""
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "zeros":
        place.write_bytes(bytes(10**6))
    else:
        place.write_text("[" * 10**6 + "]" * 10**6)


@pytest.mark.parametrize("name", [FACTS, TENSORS, INDEX_FILE])
@pytest.mark.parametrize("kind", ["pipe", "nested", "zeros", "folder"])
def test_a_checkpoint_without_sense_is_refused_soon(tmp_path: Path, name: str, kind: str) -> None:
    for file in (FACTS, TENSORS, INDEX_FILE):
        (tmp_path / file).write_text(json.dumps({"step": 1, **({"index": "0"} if name == INDEX_FILE else {})}))
    spoil(tmp_path / name, kind)
    with pytest.raises(RunError) as caught:
        read_checkpoint(tmp_path)
    assert "cannot be read" in str(caught.value)
