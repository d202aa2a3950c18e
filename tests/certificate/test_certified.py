"""Certificates of whole builds, from their texts alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from certificate.step import certify
from certificate.text import Refused
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import files_of, manifest_of
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts of a small GPT on dp=2, pp=2, tp=2 under ZeRO 3."""
    text = (EXAMPLES / "gpt3d.parc").read_text(encoding="utf-8") + "\nzero 3 over dp\n"
    compiled = compile_plan(read_plan(Source("gpt3d.parc", text)), EXAMPLES)
    folder = tmp_path_factory.mktemp("build")
    for name, content in files_of(compiled).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest_of(compiled)), encoding="utf-8")
    return folder


def edited(build: Path, folder: Path, file: str, old: str, new: str) -> Path:
    """Copy a build with one text edited."""
    edits = 0
    for path in [*build.glob("*.*"), *build.glob("programs/*")]:
        target = folder / path.relative_to(build)
        target.parent.mkdir(exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.name == file:
            assert text.count(old) >= 1
            text, edits = text.replace(old, new, 1), edits + 1
        target.write_text(text, encoding="utf-8")
    assert edits == 1, f"there is no {file}"
    return folder


def test_a_build_is_proved_equal_to_its_model(build: Path) -> None:
    proof = certify(build)
    assert proof.lines == ["pp0: the loss, 26 gradients, the norm", "pp1: the loss, 27 gradients, the norm"]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stage0.F.py", "[64], norm1_weight, norm1_bias, 1e-05", "[64], norm1_weight, norm1_bias, 1e-06"),
        ("stage1.I.py", "aten.gelu_backward.default(view_10, view_7)", "aten.silu_backward.default(view_10, view_7)"),
        ("pp1.REDUCE.py", "aten.sqrt.default", "aten.rsqrt.default"),
        ("stage0.SCALE.py", "parc.all_reduce(count, 'dp')", "parc.wait(count)"),
    ],
    ids=["another eps", "another activation", "another norm", "counts of one rank"],
)
def test_a_build_with_an_edited_line_is_refused(build: Path, tmp_path: Path, file: str, old: str, new: str) -> None:
    with pytest.raises(Refused):
        certify(edited(build, tmp_path, file, old, new))


def test_the_checker_imports_nothing_of_what_it_checks() -> None:
    script = "import sys, certificate.__main__; print(sorted({'parc', 'torch', 'sympy'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
