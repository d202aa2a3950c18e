"""Builds whose files a person changed, with the hashes put right: the answers of verify, show and run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parc.build import build as build_checked
from parc.checking.checks import check_files, prove
from parc.compiler.build.directory import FORMAT, read_build
from parc.compiler.plan.plan import read_plan
from tests.captured_once import compile_once
from tests.cli.commands import Captured, parc
from tests.hostile_changes import rehash
from tests.runtime.tiny import EXAMPLES, FLAT, PLAN, TENSOR, build


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build over tp=2."""
    return build(tmp_path_factory.mktemp("altered"), TENSOR, PLAN.replace("layers=2, ", "layers=1, "))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the build, with its model."""
    shutil.copy(made.parent / "gpt.py", tmp_path)
    return Path(shutil.copytree(made, tmp_path / "build"))


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
    ("format_", "said", "help_"),
    [
        (
            FORMAT - 1,
            f"`build` is a build of format {FORMAT - 1}, and this parc reads format {FORMAT}",
            "build the plan",
        ),
        (
            FORMAT + 1,
            f"`build` is a build of format {FORMAT + 1}, and this parc reads format {FORMAT}",
            "install the parc",
        ),
        ("six", f"`build/manifest.json` is not of format {FORMAT}", "build the plan"),
        (None, f"`build/manifest.json` is not of format {FORMAT}", "build the plan"),
    ],
)
def test_a_build_of_another_format_says_what_to_do(
    capsys: Captured, copy: Path, monkeypatch: pytest.MonkeyPatch, format_: object, said: str, help_: str
) -> None:
    """An older manifest has other keys too: nothing else of it is looked at."""
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["state"]
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format": format_}))
    monkeypatch.chdir(copy.parent)
    for word in ("run", "show", "verify"):
        code, _, err = parc(capsys, word, "build")
        assert code == 1 and said in err and f"help: {help_}" in err and "parc build PLAN.parc -o build" in err, err


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build with a first check."""
    folder = tmp_path_factory.mktemp("tested")
    (folder / "gpt.py").write_text((EXAMPLES / "gpt.py").read_text())
    (folder / "plan.parc").write_text(FLAT)
    build_checked(folder / "plan.parc", folder / "build", {})
    return folder / "build"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: None, ""),
        (lambda row: row["expected"]["loss"].__setitem__(0, 2.0), "the loss differs from the one expected there by"),
        (lambda row: row["expected"]["loss"].__setitem__(2, 1.0), "the loss may differ there by"),
        (lambda row: row["expected"].pop("loss"), "it expects another loss"),
        (lambda row: row["facts"].update(seed=9), "`seed` is 9, but the plan says 3"),
    ],
)
def test_verify_names_what_a_first_check_expects_otherwise(
    capsys: Captured, tested: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    shutil.copy(tested.parent / "gpt.py", tmp_path)
    folder = Path(shutil.copytree(tested, tmp_path / "build"))
    edit(folder, change, "first_check.json")
    code, _, err = parc(capsys, "verify", folder)
    assert code == (5 if said else 0) and said in err, err


def test_verify_runs_a_step_at_full_sizes_without_data_too(capsys: Captured, tested: Path) -> None:
    reading = build(tested.parent, "", FLAT.replace('data      bytes "*.py"\n', ""), "reading")
    for folder in (tested, reading):
        code, _, err = parc(capsys, "verify", "--run", folder, "--device", "cpu")
        assert code == 0 and "tensors of a step as computed line by line (the largest error is" in err, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--run --json", "`--json` changes nothing with `--run`"),
        ("--static --device cpu", "`--device` changes nothing with `--static`"),
        ("--compile", "`--compile` changes nothing without `--run`"),
    ],
)
def test_verify_refuses_options_that_change_nothing(capsys: Captured, words: str, said: str) -> None:
    code, _, err = parc(capsys, "verify", "build", *words.split())
    assert code == 2 and err == f"parc verify: {said}\n"


def test_verify_names_facts_that_are_not_the_models(capsys: Captured, copy: Path) -> None:
    edit(copy, lambda m: m.update(constants={"c": {"dtype": "float32", "values": [1.0]}}, aliases={}))
    code, _, err = parc(capsys, "verify", copy)
    assert code == 5 and "`constants` is" in err and "`aliases` is" in err and "parc's own" not in err, err


MUTANTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "model": lambda m: m["model"]["arguments"].update(dropout=0.0),
    "inputs": lambda m: m["inputs"].pop(),
    "sizes": lambda m: m["sizes"].update(B=16),
    "ranges": lambda m: m.update(ranges={"B": [4, 8, 4]}),
    "budget": lambda m: m.update(budget=1),
    "loss": lambda m: m["loss"][0].update(ignore=0),
    "mesh": lambda m: m["mesh"].update(dp=2),
    "microbatches": lambda m: m.update(microbatches=10**9),
    "optimizer": lambda m: m["optimizer"].update(clip=None),
    "optimizer.groups": lambda m: m["optimizer"].update(
        groups=[{"parameters": ["norm.weight"], "set": {"weight_decay": 0.0}}]
    ),
    "optimizer.limits": lambda m: m["optimizer"].update(limits={"norm.weight": [None, None]}),
    "accumulate": lambda m: m.update(accumulate="bfloat16"),
    "precision": lambda m: m.update(precision=[{"type": "bfloat16", "modules": [""], "line": 1}]),
    "data": lambda m: m.update(data=None),
    "init": lambda m: m.update(init={"folder": "/", "rounded": True, "tensors": []}),
    "seed": lambda m: m.update(seed=2**70),
    "state": lambda m: m.update(state={"loss_scale": 1.0}),
    "steps": lambda m: m.update(steps=None),
    "frozen": lambda m: m.update(frozen=["embed.weight"]),
    "parameters": lambda m: m["parameters"].update({"norm.weight": "f32[8]"}),
    "padding.embed.weight": lambda m: m.update(padding={"embed.weight": [[-1, 1, 255, 256]]}),
    "updates": lambda m: m.update(updates=["embed.weight"]),
    "role": lambda m: m.update(role="pp0"),
    "invented": lambda m: m.update(invented=1),
}
"""Changes of a manifest by the fact that they break: all facts but those of the model alone and those found at their
use."""


@pytest.mark.parametrize("key", MUTANTS)
def test_a_manifest_is_held_against_plan_programs_and_schedule(made: Path, key: str) -> None:
    build = read_build(made)
    manifest = json.loads(json.dumps(build.manifest))
    assert check_files(build) == []
    MUTANTS[key](manifest)
    faults = check_files(replace(build, manifest=manifest))
    assert any(f"`{key}` " in fault.message for fault in faults) and {fault.check for fault in faults} == {"facts"}


def test_a_compilation_is_held_to_the_same_facts_before_it_is_written(made: Path) -> None:
    compiled = compile_once(read_plan(made.with_suffix(".parc")), made.parent)
    assert prove(compiled) == []
    for key, change in MUTANTS.items():
        manifest = json.loads(json.dumps(compiled.build.manifest))
        change(manifest)
        faults = prove(replace(compiled, written=replace(compiled.build, manifest=manifest)))
        assert any(f"`{key}` " in fault.message for fault in faults), key


@pytest.mark.parametrize("key", ["mesh", "microbatches", "padding"])
def test_a_manifest_that_is_not_of_its_build_neither_verifies_nor_runs(capsys: Captured, copy: Path, key: str) -> None:
    edit(copy, MUTANTS.get(key, lambda m: m.update(padding={"norm.weight": [[0, 1, 16, 16, 7]]})))
    for words in (("verify", "--static"), ("run",), ("show",)):
        code, _, err = parc(capsys, *words, copy)
        assert code == (5 if words == ("verify", "--static") and key != "padding" else 1), err
        assert f"`{key}" in err and "parc's own" not in err and "build the plan again" in err, err


@pytest.mark.parametrize("key", ["mesh", "sizes", "world", "roles", "parameters", "memory", "communication"])
def test_a_report_is_held_against_the_programs(made: Path, key: str) -> None:
    build = read_build(made)
    report = dict(build.report)
    report[key] = type(report[key])()
    assert check_files(build) == []
    (fault,) = check_files(replace(build, report=report))
    assert fault.message == f"`{key}` is not what the programs say"


def test_plan_and_manifest_changed_alike_are_held_against_the_programs(capsys: Captured, copy: Path) -> None:
    for old, new, change in (
        ("mesh      tp=2", "mesh      tp=4", lambda m: m.update(mesh={"tp": 4})),
        ("B=8", "B=16", lambda m: m["sizes"].update(B=16)),
        ("microbatches 2", "microbatches 4", lambda m: m.update(microbatches=4)),
    ):
        place, kept = copy / "plan.parc", [(copy / name).read_text() for name in ("plan.parc", "manifest.json")]
        place.write_text(kept[0].replace(old, new))
        edit(copy, change)
        code, _, err = parc(capsys, "verify", "--static", copy)
        assert code == 5 and "facts: manifest.json: " in err and "parc's own" not in err, err
        place.write_text(kept[0])
        (copy / "manifest.json").write_text(kept[1])


def test_a_file_that_no_build_has_is_said(capsys: Captured, copy: Path) -> None:
    (copy / "programs" / "stage1.F.py").write_text("print('extra')\n")
    code, _, err = parc(capsys, "verify", "--static", copy)
    assert code == 1 and "`programs/stage1.F.py (not of the build)`" in err and "error[P0211]" in err, err


def test_verify_holds_the_report_and_every_number_of_a_program(capsys: Captured, copy: Path) -> None:
    peak = json.loads((copy / "report.json").read_text())["memory"][0]["peak_bytes"]
    edit(copy, lambda report: report["memory"][0].update(peak_bytes=1), "report.json")
    code, _, err = parc(capsys, "verify", copy)
    assert code == 5 and "`memory` is" in err
    edit(copy, lambda report: report["memory"][0].update(peak_bytes=peak), "report.json")
    program = copy / "programs" / "stage0.F.py"
    text = program.read_text()
    row = next(line for line in text.splitlines() if "native_layer_norm" in line and "1e-05" in line)
    program.write_text(text.replace(row, row.replace("1e-05", "1e-15")))
    rehash(copy)
    code, _, err = parc(capsys, "verify", copy)
    assert code == 5 and "has native_layer_norm with eps 1e-15 1 times, and the captured graph 0 times" in err, err


def test_a_captured_graph_that_no_operator_makes_is_refused_by_its_line(capsys: Captured, copy: Path) -> None:
    graph = copy / "programs" / "model.py"
    text = graph.read_text()
    assert "1, 2)" in text
    graph.write_text(text.replace("1, 2)", "1, 4611686018427387904)", 1))
    rehash(copy)
    code, _, err = parc(capsys, "verify", copy, "--static")
    assert code == 5 and "aten.transpose.int does not take these shapes" in err, err


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("manifest.json", lambda m: m.pop("seed"), "it has no `seed`"),
        ("manifest.json", lambda m: m["optimizer"].pop("betas"), "it has no `optimizer.betas`"),
        ("manifest.json", lambda m: m.update(microbatches="2"), "`microbatches` is str, not int"),
        ("manifest.json", lambda m: m.update(data={"form": 3}), "`data.form` is int, not str"),
        ("manifest.json", lambda m: m["parameters"].update({"embed.weight": "f32[?]"}), "`parameters.embed.weight`"),
        ("manifest.json", lambda m: m["files"].pop("plan.parc"), "name no `plan.parc`"),
        ("manifest.json", lambda m: m["files"].pop("programs/stage0.B.py"), "has no program of B"),
        ("report.json", lambda r: r.pop("memory"), "it has no `memory`"),
        ("report.json", lambda r: r["communication"][0].pop("bytes"), "it has no `communication[0].bytes`"),
        ("report.json", lambda r: r["pipeline"].pop("stages"), "it has no `pipeline.stages`"),
        ("report.json", lambda r: r.update(recompute={"line": 3, "fit": 1}), "it has no `recompute.roles`"),
        ("report.json", lambda r: r["communication"][0].update(phase="x"), "`communication[0].phase` is none of"),
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
    assert code == 0 and "communication proved, equality certified; the model was not imported" in err
    assert not (copy.parent / "gpt.py.ran").exists()
    program = copy / "programs" / "stage0.B.py"
    text = program.read_text()
    program.write_text(text + "x = = 3\n")
    code, _, err = parc(capsys, "verify", "--static", copy)
    last = f"programs/stage0.B.py:{text.count(chr(10)) + 1}: invalid syntax"
    assert code == 1 and f"error[P0211]: `{copy}` was altered since it was built: {last}\nhelp: build the plan" in err
    program.write_text(text.replace("= parc.all_reduce(", "= parc.all_gather(", 1))
    assert parc(capsys, "verify", "--static", copy)[0] in (1, 5)


def test_places_where_no_build_goes(
    capsys: Captured, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", ".."):
        code, _, err = parc(capsys, "build", made.parent / "build.parc", "-o", out)
        assert code == 1 and "is the current folder or one above it" in err, err
    code, _, err = parc(capsys, "run", "b/nothere")
    assert code == 1 and "there is no build `b/nothere`" in err, err
