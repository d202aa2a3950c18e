"""Builds whose files were changed by a hand that also put the hashes right: what verify, show and run say of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import Captured, parc
from tests.runtime.tiny import PLAN, TENSOR, build


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build over tp=2."""
    return build(tmp_path_factory.mktemp("altered"), TENSOR, PLAN.replace("width=16, ", "width=16, "))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of it, with its model."""
    shutil.copy(made.parent / "gpt.py", tmp_path)
    return Path(shutil.copytree(made, tmp_path / "build"))


def rehash(folder: Path) -> None:
    """Make the manifest's hashes those of the files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit(folder: Path, change: Callable[[dict[str, Any]], None], name: str = "manifest.json") -> None:
    """Change a JSON file, and the hashes with it."""
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))
    rehash(folder)


def test_verify_accepts_what_was_built(capsys: Captured, copy: Path) -> None:
    code, _, err = parc(capsys, "verify", copy)
    assert code == 0, err


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("seed", lambda m: m.update(seed=4)),
        ("mesh", lambda m: m.update(mesh={"tp": 4})),
        ("optimizer", lambda m: m["optimizer"].update(lr=0.5)),
        ("sizes", lambda m: m["sizes"].update(B=16)),
        ("data", lambda m: m["data"].update(globs=["*.txt"])),
        ("steps", lambda m: m.update(steps=7)),
        ("frozen", lambda m: m.update(frozen=["embed.weight"])),
        ("constants", lambda m: m.update(constants={"c": {"dtype": "float32", "values": [1.0]}})),
        ("parameters", lambda m: m["parameters"].update({"more": "f32[4]"})),
        ("invented", lambda m: m.update(invented=1)),
    ],
)
def test_verify_names_a_fact_that_is_not_the_plans(
    capsys: Captured, copy: Path, key: str, change: Callable[[dict[str, Any]], None]
) -> None:
    edit(copy, change)
    code, _, err = parc(capsys, "verify", copy)
    assert code == 5 and (f"`{key}` is" in err or key == "parameters"), err


def test_verify_holds_the_report_and_every_number_of_a_program(capsys: Captured, copy: Path) -> None:
    edit(copy, lambda report: report["memory"][0].update(peak_bytes=1), "report.json")
    code, _, err = parc(capsys, "verify", copy)
    assert code == 5 and "`memory` is" in err
    program = copy / "programs" / "stage0.F.py"
    text = program.read_text()
    row = next(line for line in text.splitlines() if "native_layer_norm" in line and "1e-05" in line)
    program.write_text(text.replace(row, row.replace("1e-05", "1e-15")))
    rehash(copy)
    code, _, err = parc(capsys, "verify", copy)
    assert code == 5 and "recompilation: stage0.F.py" in err.replace("programs/", "") and "plan compiles to" in err, err


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("manifest.json", lambda m: m.pop("seed"), "it has no `seed`"),
        ("manifest.json", lambda m: m["optimizer"].pop("betas"), "it has no `optimizer.betas`"),
        ("manifest.json", lambda m: m.update(microbatches="2"), "`microbatches` is str, not int"),
        ("manifest.json", lambda m: m.update(data={"globs": 3}), "`data.globs` is int, not list"),
        ("manifest.json", lambda m: m["parameters"].update({"embed.weight": "f32[?]"}), "`parameters.embed.weight`"),
        ("manifest.json", lambda m: m["files"].pop("plan.parc"), "name no `plan.parc`"),
        ("manifest.json", lambda m: m["files"].pop("programs/stage0.B.py"), "has no program of B"),
        ("report.json", lambda r: r.pop("memory"), "it has no `memory`"),
        ("report.json", lambda r: r["communication"][0].pop("bytes"), "it has no `communication[0].bytes`"),
    ],
)
@pytest.mark.parametrize("command", ["show", "run", "verify"])
def test_a_file_of_another_form_is_said(
    capsys: Captured, copy: Path, command: str, name: str, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit(copy, change, name)
    code, _, err = parc(capsys, command, copy)
    assert code == 1 and "error[P0211]" in err and message in err, err


def test_a_model_that_changed_is_not_imported(capsys: Captured, copy: Path) -> None:
    (copy.parent / "gpt.py").write_text("print('imported')\nopen(__file__ + '.ran', 'w')\n")
    code, _, err = parc(capsys, "verify", copy)
    assert code == 1 and "error[P0211]" in err and "`gpt.py` of the model's code changed since the build" in err
    assert not (copy.parent / "gpt.py.ran").exists()
    code, _, err = parc(capsys, "verify", "--static", copy)
    assert code == 0 and "shapes proved, types proved, communication proved; the model was not imported" in err
    assert not (copy.parent / "gpt.py.ran").exists()
    program = copy / "programs" / "stage0.B.py"
    text = program.read_text()
    program.write_text(text + "x = = 3\n")
    code, _, err = parc(capsys, "verify", "--static", copy)
    last = f"programs/stage0.B.py:{text.count(chr(10)) + 1}: invalid syntax"
    assert code == 1 and f"error[P0211]: `{copy}` was altered since it was built: {last}\nhelp: build the plan" in err
    program.write_text(text.replace("= parc.all_reduce(", "= parc.all_gather(", 1))
    assert parc(capsys, "verify", "--static", copy)[0] in (1, 5)


def test_places_where_no_build_goes(made: Path, tmp_path: Path) -> None:
    for out in (".", ".."):
        done = subprocess.run(
            [sys.executable, "-m", "parc", "build", str(made.parent / "build.parc"), "-o", out],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "is the current folder or one above it" in done.stderr, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "parc", "run", "b/nothere"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "there is no build `b/nothere`" in done.stderr, done.stderr
