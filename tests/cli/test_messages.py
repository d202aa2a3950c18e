"""Commands in this process: the words of each, their place, and the exit code, above all for a person's mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parc.cli import COMMANDS
from parc.runtime.ranks.processes import DEVICE
from tests.cli.commands import Captured, parc
from tests.runtime.tiny import DATA, PLAN, TENSOR, build

MODELS = """
import torch


def mean(output):
    return output.mean()


def sample(number, length=8):
    raise RuntimeError("the samples are elsewhere")


def narrow(number):
    return {"tokens": torch.zeros(8, dtype=torch.int32), "targets": torch.zeros(8, dtype=torch.int64)}


def misnamed(number):
    return {"tokens": torch.zeros(8, dtype=torch.int64), "labels": torch.zeros(8, dtype=torch.int64)}


def fails():
    raise RuntimeError("no weights here")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build over dp=2, without a report."""
    return build(tmp_path_factory.mktemp("cli"), DATA)


LAYERS = "layers=2, "


@pytest.fixture
def plan(tmp_path: Path, made: Path) -> Path:
    """A good plan of one layer with a `let`, in a folder with models."""
    (tmp_path / "gpt.py").write_text((made.parent / "gpt.py").read_text())
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "texts").mkdir()
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    place = tmp_path / "tiny.parc"
    place.write_text("let tp=2\n" + PLAN.replace(LAYERS, "layers=1, ") + TENSOR.replace("tp=2", "tp=$tp"))
    return place


def test_help_and_usage(capsys: Captured) -> None:
    code, out, _ = parc(capsys, "--help")
    assert code == 0 and all(name in out for name in COMMANDS)
    code, out, err = parc(capsys)
    assert (code, out) == (2, "") and "usage: parc" in err
    assert parc(capsys, "bulid")[0] == 2
    assert parc(capsys, "build")[0] == 2
    code, _, err = parc(capsys, "run", "x", "--nproc", "two")
    assert code == 2 and "`two` is not a whole number of at least 1" in err
    code, _, err = parc(capsys, "run", "x", "--nproc", "9" * 5000)
    assert code == 2 and "a number of 5000 digits is too large" in err
    for command in COMMANDS:
        code, out, _ = parc(capsys, command, "--help")
        assert code == 0 and out.startswith(f"usage: parc {command}")
    assert parc(capsys, "--version")[1].startswith("parc 0.")


def test_words_before_torch_are_instant() -> None:
    """Help, explanations, and the mistakes of a plan's text need no torch."""
    code = """
import sys
from parc.cli import main
slow = {"torch", "sympy", "numpy", "rich"}
for words in (["--help"], ["explain", "P0107"], ["check", "missing.parc"], ["run", "--help"], ["example"]):
    main(words)
assert not slow & set(sys.modules)
assert main(["check", "--static", "examples/gpt.parc"]) == 0
assert main(["check", "examples/gpt.parc", "-D", "tp=0"]) == 1
assert not slow & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_explain(capsys: Captured) -> None:
    code, out, _ = parc(capsys, "explain", "P0107")
    assert code == 0 and out.startswith("## P0107: a sharded dim does not divide evenly")
    assert parc(capsys, "explain", "p0107")[1] == out
    code, out, err = parc(capsys, "explain", "P0170")
    assert (code, out) == (1, "") and "there is no code `P0170`; did you mean" in err
    assert "there is no code `P9999`; `parc explain` lists all" in parc(capsys, "explain", "P9999")[2]
    assert parc(capsys, "explain", f"P{'9' * 5000}")[0] == 1  # Python reads no number of so many digits
    code, out, _ = parc(capsys, "explain")
    assert code == 0 and "\nP0107  a sharded dim does not divide evenly\n" in out


def test_build_show_and_verify(capsys: Captured, plan: Path, tmp_path: Path) -> None:
    out_folder = tmp_path / "made"
    plan.write_text(plan.read_text().replace("layers=1, ", LAYERS))
    code, out, err = parc(capsys, "build", plan, "-o", out_folder, "--json")
    report = json.loads(out)
    assert code == 0 and report["mesh"] == {"tp": 2}
    assert set(report["seconds"]) == {"import", "capture", "passes", "checks", "emit"}
    assert "seconds" not in json.loads((out_folder / "report.json").read_text())
    code, out, err = parc(capsys, "show", out_folder)
    assert code == 0 and err == "" and "tp=2 (2 ranks)" in out
    assert "blocks.*.attn.qkv.weight  x2  f32[(3 16/tp), 16]" in out and "stage0.F.py" in out
    shown = json.loads(parc(capsys, "show", out_folder, "--json")[1])
    assert {row["name"]: row["local_bytes"] for row in shown["parameter_table"]}["embed.weight"] == 256 * 16 * 4 // 2
    code, out, _ = parc(capsys, "show", out_folder, "--role", "stage0", "--action", "SCALE")
    assert code == 0 and out == (out_folder / "programs" / "stage0.SCALE.py").read_text()
    assert parc(capsys, "show", out_folder, "--action", "Q")[0] == 2
    code, out, err = parc(capsys, "verify", out_folder)
    assert code == 0 and "numbers tested" in err

    program = out_folder / "programs" / "stage0.B.py"
    good = program.read_text()
    program.write_text(good.replace("= parc.all_reduce(", "= parc.all_gather(", 1))
    assert parc(capsys, "verify", out_folder)[0] in (1, 5)
    program.write_text(good)
    changed = [f"programs/stage0.{action}.py" for action in "BF"]  # backward makes it again
    for program in (out_folder / name for name in changed):
        program.write_text(program.read_text().replace("aten.gelu.default(", "aten.silu.default("))
    code, out, err = parc(capsys, "verify", out_folder, "--first-difference", "--json")
    assert code == 5 and "error[P0210]" in err and json.loads(out)["altered"] == changed
    assert "first difference: " in err and "in `blocks.0.mlp.down` at gpt.py:" in err


def test_a_build_is_the_same_byte_for_byte(capsys: Captured, plan: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert parc(capsys, "build", plan, "-o", tmp_path / name)[0] == 0
    files = [
        sorted(path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*.*"))
        for name in ("first", "second")
    ]
    assert files[0] == files[1]
    assert all((tmp_path / "first" / f).read_bytes() == (tmp_path / "second" / f).read_bytes() for f in files[0])


def test_check(capsys: Captured, plan: Path) -> None:
    before = sorted(plan.parent.iterdir())
    code, out, err = parc(capsys, "check", plan)
    assert (code, out) == (0, "") and "no fault found" in err
    assert [path for path in sorted(plan.parent.iterdir()) if path.name != "__pycache__"] == before


AS_P0104 = (
    "error[P0105]",
    "error[P0112]",
    "error[P0303]: `tokens` of sample 0 is int32 [8], but `input tokens int64 [B, S]` asks for int64 [8]",
    "error[P0303]: `tokens` of sample 0 is int64 [8], but",
    "error[P0303]: the data's sample 0 holds `tokens`, `labels`, and no `targets`",
)
"""Mistakes that are found once the model is captured, as P0104 is, which is asked of every command."""


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        (("let tp=2", "let tp=2, tp=2"), (), ["error[P0006]"]),
        (("mesh ", "mehs "), (), ["error[P0002]", "did you mean `mesh`?", "tiny.parc:"]),
        (None, ("-D", "pt=2"), ["error[P0008]: no `let` defines `pt`\n --> -D pt=2\nhelp: the plan's names are `tp`"]),
        (("loss ", "verify layerz=1\nloss "), (), ["error[P0201]", "takes no `layerz`", "did you mean `layers`?"]),
        (("./gpt.py:GPT", "./gtp.py:GPT"), (), ["error[P0201]", "there is no file `gtp.py`", "did you mean `gpt.py`?"]),
        (("./gpt.py:GPT", "./gpt.py:GTP"), (), ["error[P0201]", "has no `GTP`", "did you mean `GPT`?"]),
        (("./gpt.py:GPT", "gtp:GPT"), (), ["error[P0201]", "there is no module `gtp`", "did you mean `gpt`?"]),
        (("./gpt.py:GPT", "torch.nnn:GPT"), (), ["error[P0201]", "there is no module `torch.nnn`", "`torch.nn`"]),
        (("./gpt.py:GPT", "./broken.py:GPT"), (), ["error[P0201]", "code's own traceback", "nothing_of_this_name"]),
        (("layers=1, width=16", "layers=1, wdith=16"), (),
         ["error[P0201]: `./gpt.py:GPT` takes no `wdith`", "tiny.parc:3:37", "did you mean `width`?"]),
        (("cross_entropy(output, targets)", '"./models.py:mean"(output, targets)'), (),
         ["error[P0201]: `./models.py:mean` takes 1 argument", "is given 2", "tiny.parc:7:1"]),
        (('bytes "*.py"', '"./models.py:smaple" ()'), (),
         ["error[P0303]: `./models.py` has no `smaple`", "tiny.parc:8:1", "did you mean `sample`?"]),
        (('bytes "*.py"', '"./models.py:sample" (lenght=8)'), (),
         ["error[P0303]: `./models.py:sample` takes no `lenght`", "tiny.parc:8:33", "did you mean `length`?"]),
        (('bytes "*.py"', '"./models.py:fails" ()'), (),
         ["error[P0303]: `./models.py:fails` takes 0 arguments by position, and is given 1",
          "help: name a function of a sample's number that returns a dict of tensors, as `def sample(number)`"]),
        (('bytes "*.py"', 'dataset "./models.py:torch"'), (),
         ["error[P0303]: `./models.py:torch` is not callable", "help: name a function that returns the dataset, as"]),
        (('bytes "*.py"', '"./models.py:narrow" ()'), (),
         ["error[P0303]: `tokens` of sample 0 is int32 [8], but `input tokens int64 [B, S]` asks for int64 [8]",
          "tiny.parc:8:1", 'data      "./models.py:narrow" ()', "tiny.parc:4:1", "declared here"]),
        (("tokens  int64 [B, S]", "tokens  int64 [B, 2, S]"), (),
         ["error[P0303]: `tokens` of sample 0 is int64 [8], but", "asks for int64 [2, 8]", "error[P0205]: ",
          "tiny.parc:4:1", "-- given in each microbatch as int64 [4, 2, 8]", "2 errors"]),
        (('bytes "*.py"', '"./models.py:misnamed" ()'), (),
         ["error[P0303]: the data's sample 0 holds `tokens`, `labels`, and no `targets`", "tiny.parc:8:1"]),
        (('bytes "*.py"', 'bytes "*.py", "txets/*.md"'), (),
         ['error[P0303]: no file matches "txets/*.md" in', "tiny.parc:8:25", "did you mean `texts`?"]),
        (("B=8, S=8", "B=8, S=1000000"), (), ["error[P0303]: 3 files hold", "tiny.parc:8:1"]),
        (("blocks.*.mlp.up over", "blocks.*.mpl.up over"), (), ["error[P0104]", "blocks.*.mlp.up"]),
        (None, ("-D", "tp=3"), ["error[P0112]"]),
        (("vocab ", "row blocks.0.mlp.up over tp\nvocab "), (), ["error[P0105]"]),
        (("column    blocks.*.attn", "shard blocks.0.mlp.up.weight [_, _/tp]\ncolumn    blocks.*.attn"), (),
         ["error[P0105]", "help: a line with a layout places its tensors on every axis: write all"]),
    ],
)  # fmt: skip
def test_mistakes_in_plans(
    capsys: Captured, plan: Path, change: tuple[str, str] | None, words: tuple[str, ...], expected: list[str]
) -> None:
    if change is not None:
        assert change[0] in plan.read_text()
        plan.write_text(plan.read_text().replace(*change))
    for command in ("check", "build", "run"):
        code, out, err = parc(capsys, command, plan, *words)
        assert (code, out) == (1, ""), err
        assert all(text in err for text in expected), err
        assert "Traceback" not in err or "code's own traceback" in err
        if expected[0] in AS_P0104 or "traceback" in err:  # a module that failed is imported again by each command
            break


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ('"tests.family_models:decoder" (name="llama", use_cache=true)', ["error[P0203]", "use_cache=False"]),
        (
            '"tests.family_models:decoder" ()',
            ["error[P0201]: `tests.family_models:decoder` needs `name`", "give each as"],
        ),
        ('"./models.py:fails" ()', ["error[P0201]", "no weights here", 'raise RuntimeError("no weights here")']),
    ],
)
def test_models_that_cannot_be_captured(capsys: Captured, plan: Path, model: str, expected: list[str]) -> None:
    text = "\n".join(PLAN.splitlines()[2:]).replace("tokens  int64", "tokens as input_ids int64")
    plan.write_text(f"model {model}\n{text}\n")
    code, _, err = parc(capsys, "check", plan)
    assert code == 1 and all(part in err for part in expected), err


def test_runs_that_cannot_start(capsys: Captured, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: object) -> tuple[int, str]:
        code, out, err = parc(capsys, "run", *words)
        assert out == ""
        return code, err

    monkeypatch.setenv(DEVICE, "cpu")  # of GPUs there may be too few
    code, err = run(made, "--nproc", 3)
    assert code == 2 and "error[P0301]: 3 processes for a mesh of dp=2, which has 2 ranks" in err
    code, err = run(tmp_path / "missing")
    assert code == 1 and "error[P0211]: there is no build" in err and f"`parc build PLAN.parc -o {tmp_path}" in err
    code, err = run(made, "-D", "tp=2")
    assert code == 2 and "-D is for plans" in err
    assert run(made, "--save-every", 2)[0] == 2
    assert run(made, "--nnodes", 2)[0] == 2
    code, err = run(made, "--nnodes", 3, "--rdzv-endpoint", "localhost:1")
    assert code == 2 and "help: start 2: `--nnodes` times `--nproc` is their number" in err
    code, err = run(made, "--resume", tmp_path)
    assert code == 1 and "error[P0304]" in err and "help: name a folder that `parc run --save`" in err
    (tmp_path / "knock").mkdir()
    code, err = run(made, "--resume", tmp_path / "nock")
    assert code == 1 and "nock` does not exist\nhelp: name a folder" in err
    (tmp_path / "knock" / "state.json").write_text("{}")
    code, err = run(made, "--resume", tmp_path / "nock")
    assert code == 1 and f"nock` does not exist\nhelp: did you mean `{tmp_path / 'knock'}`?" in err
    (tmp_path / "kept.txt").write_text("kept")
    code, err = run(made, "--save", tmp_path)
    assert code == 1 and "exists and is not a checkpoint" in err


def test_paths_that_are_misspelt(
    capsys: Captured, made: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made, tmp_path / "tiny_dp")
    for command in ("run", "show", "verify"):
        code, _, err = parc(capsys, command, tmp_path / "tiny_pd")
        assert code == 1 and "error[P0211]: there is no build" in err
        assert f"help: did you mean `{tmp_path / 'tiny_dp'}`" in err and "again" not in err
    monkeypatch.chdir(tmp_path)
    code, _, err = parc(capsys, "run", "tinni.parc")
    assert code == 1 and "error[P0013]" in err and "help: did you mean `tiny.parc`?" in err
    code, _, err = parc(capsys, "run", "tinny")
    assert code == 1 and "there is no build `tinny`" in err and "did you mean `tiny_dp` or `tiny.parc`?" in err
    (tmp_path / "empty").mkdir()
    code, _, err = parc(capsys, "run", "empty")
    assert (
        code == 1 and "is not a build" in err and "help: build it from a plan: `parc build PLAN.parc -o empty`" in err
    )


def test_builds_that_are_not_as_they_were(capsys: Captured, made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    program = copy / "programs" / "stage0.F.py"
    text = program.read_text()
    program.write_text(text + "\n")
    for command in ("run", "show"):
        code, _, err = parc(capsys, command, copy)
        assert code == 1 and "error[P0211]" in err and "stage0.F.py` was altered" in err
        assert f"help: build the plan again: `parc build PLAN.parc -o {copy}`" in err
    program.unlink()
    code, _, err = parc(capsys, "run", copy)
    assert code == 1 and "stage0.F.py` is missing" in err
    program.write_text(text)
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"torch": "', '"torch": "1.'))
    code, _, err = parc(capsys, "run", copy)
    assert code == 1 and "error[P0212]" in err and "was built with torch 1." in err
    manifest.write_text("{")
    assert parc(capsys, "run", copy)[0] == 1
    code, _, err = parc(capsys, "build", made.parent / "build.parc", "-o", tmp_path)
    assert code == 1 and "is not a build; it is left as it is" in err


def test_a_fault_of_parcs_own_says_what_to_report(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parc.cli.explain.code_pages", None)
    code, _, err = parc(capsys, "explain", "P0107")
    assert code == 3 and "Please report" in err and "parc 0." in err and "TypeError" in err


def test_what_is_no_plan_and_no_build_is_said_once(capsys: Captured, plan: Path) -> None:
    code, _, err = parc(capsys, "build", plan.parent / "gpt.py")
    assert code == 1 and err.count("error[") == 1 and "gpt.py` is no plan" in err and "help: name a plan file" in err
    code, _, err = parc(capsys, "verify", plan)
    assert code == 1 and "tiny.parc` is a file, not the folder of a build" in err and f"parc build {plan}" in err


def test_a_value_of_the_command_line_is_shown_where_it_was_given(capsys: Captured, plan: Path) -> None:
    code, _, err = parc(capsys, "check", plan, "-D", "tp=two")
    assert code == 1 and err.count("error[") == 1 and "::: -D tp=two\nhelp: " in err


def test_a_batch_that_does_not_divide_is_said_once(capsys: Captured, plan: Path) -> None:
    text = plan.read_text().replace(
        "mesh      tp=$tp", "mesh dp=5, tp=$tp\nshard tokens [B/dp, _]\nshard targets [B/dp, _]"
    )
    plan.write_text(text)
    code, _, err = parc(capsys, "check", plan)
    assert code == 1 and err.count("error[") == 1 and "= note: the same holds for dim 0 of `targets`, line " in err


def test_a_smaller_model_may_lack_what_a_pattern_names(plan: Path) -> None:
    from parc.compiler.plan.plan import read_plan
    from parc.compiling.driver import compile_plan

    text = plan.read_text().replace("layers=1, ", LAYERS).replace("blocks.*", "blocks.[0..1]")
    assert "blocks.[0..1]" in text
    plan.write_text(text + "replicate blocks.1.mlp.down.bias\n")
    compiled = compile_plan(read_plan(plan), plan.parent, overrides={"layers": 1})
    assert "blocks.0.mlp.up" in compiled.captured.modules and "blocks.1" not in compiled.captured.modules
