"""The hash of a build's model: it covers the model's file and the files of the plan's folder that it imports."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import parc
from parc.checking.verification import differences
from parc.compiler.capture.model_code import changed_files, file_hashes, target_hashes
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.codes import BAD_BUILD
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.opening import check_source_of, open_build
from tests.runtime.tiny import ONE, PLAN, TENSOR, build

FILES = {
    "model.py": "import json\nimport layers, parc\nfrom blocks.attention import Attention\n",
    "layers.py": "def late():\n    from constants import WIDTH\n    import model\n",
    "constants.py": "WIDTH = 8\n",
    "blocks/__init__.py": "from . import norms\n",
    "blocks/attention.py": "from .mask import causal\nfrom ..constants import WIDTH\nimport blocks.norms\n",
    "blocks/mask.py": "this is no Python\n",
    "blocks/norms.py": "raise SystemExit('imported')\n",
    "other.py": "import model\n",
    "parc.py": "",
    "blocks/json.py": "",
}
COVERED = {
    "model.py", "layers.py", "constants.py", "blocks/__init__.py", "blocks/attention.py", "blocks/mask.py",
    "blocks/norms.py",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plan" / "blocks").mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / "plan" / name).write_text(text)
    (tmp_path / "beside.py").write_text("")
    return tmp_path / "plan"


def test_the_files_of_a_folder_that_a_module_imports_are_found_without_importing(folder: Path) -> None:
    assert file_hashes(["./model.py:Model"], folder).keys() == file_hashes(["model:Model"], folder).keys() == COVERED
    assert file_hashes(["blocks.norms:x"], folder).keys() == {"blocks/__init__.py", "blocks/norms.py"}
    assert file_hashes(["torch.nn:Linear"], folder) == {}


def test_a_hash_changes_with_every_file_that_is_imported_and_with_no_other(folder: Path, tmp_path: Path) -> None:
    for target in ("./model.py:Model", "model:Model"):
        before = file_hashes([target], folder)
        for name, text in FILES.items():
            (folder / name).write_text(text + "print()\n")
            assert (file_hashes([target], folder) != before) == (name in COVERED), name
            (folder / name).write_text(text)
        assert file_hashes([target], folder) == before != {}
    moved = folder.rename(tmp_path / "moved")
    assert file_hashes(["./model.py:Model"], moved) == before
    assert file_hashes(["torch.nn:Linear"], moved) == {} != target_hashes(["torch.nn:Linear"], moved)


MODEL = """from __future__ import annotations
import json
import torch
from torch import nn
from torch.utils.data import Dataset
from layers import Block, Other
WIDTH = 8
unused = 9

class Model(nn.Module):
    \"\"\"A model.\"\"\"
    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)
    @torch.no_grad()
    def forward(self, x: torch.Tensor = f"{WIDTH!r:>{3}}"):  # as it is
        from late import last
        return scaled(self.block(x)) + last(x)

def scaled(x):
    return x * half()

def half():
    return 0.5

class Data(Dataset):
    size = 4
    def __getitem__(self, index):
        return helper(index)

def helper(index):
    return index

def loss(output):
    return output.sum()

if __name__ == "__main__":
    print(Model())
"""
LAYERS = """from torch import nn
class Block(nn.Linear):
    def __init__(self, width): super().__init__(width, width)
class Other(nn.Module):
    pass
"""
SAME = {
    "a comment": ("# as it is", "# as it was"),
    "lines": ("\n\nclass Model", "\n\n\n# ----\nclass Model"),
    "a docstring": ("A model.", "The model."),
    "quotes and brackets": ('"__main__"', "('__main__')"),
    "a dataset": ("    size = 4\n", "    size = 5\n    more: list[int] = []\n"),
    "a dataset's function": ("return index\n", "return index + 1\n"),
    "what nothing reads": ("unused = 9", "unused = 10\nmore: int = 3"),
    "a new dataset": ("def helper(", "class Twice(Data):\n    pass\n\n\ndef helper("),
    "a library for it": ("import json", "import json, math\nfrom torch.utils.data import Subset"),
    "a script": ("print(Model())", "print(Model)"),
    "another file's other class": ("    pass\n", "    bias = True\n"),
}
OTHER = {
    "the model": ("scaled(self.block(x))", "scaled(self.block(x)) * 1.0"),
    "what it calls": ("return 0.5", "return 0.25"),
    "a number that it reads": ("WIDTH = 8", "WIDTH = 9"),
    "its loss": ("output.sum()", "output.mean()"),
    "a class of another file": ("(width, width)", "(width, width, bias=False)"),
    "a late import": ("return -x", "return x"),
    "a call at import": ("class Data(", "torch.manual_seed(1)\n\nclass Data("),
    "a class of a registry": ("(Dataset)", "(Registered)"),
    "a decorator": ("def helper(", "@register\ndef helper("),
    "a default that is made": ("def helper(index", "def helper(index, other=list(range(3))"),
    "a second value": ("def helper(", "half = print\n\ndef helper("),
    "an assignment into something": ("def helper(", "nn.Linear.bias = 3\n\ndef helper("),
    "names by their text": ("def helper(index):\n    return index", "def helper(index):\n    return eval(index)"),
    "another package": ("import json", "import json, patches"),
}
"""Changes of files, by kind: those that leave the model as it is, and those that may change it."""


def hashed(folder: Path, change: tuple[str, str] = ("", "")) -> tuple[dict[str, str], list[str]]:
    """Return the hashes of code, and of lines, after a change of whichever file has its text."""
    files = {"model.py": MODEL, "layers.py": LAYERS, "late.py": "def last(x):\n    return -x\n"}
    assert any(change[0] in text for text in files.values())
    for name, text in files.items():
        (folder / name).write_text(text.replace(*change, 1))
    found = file_hashes(["./model.py:Model", "./model.py:loss"], folder)
    return {name: code for name, (code, _) in found.items()}, [lines for _, lines in found.values()]


@pytest.mark.parametrize("what", SAME)
def test_what_leaves_a_model_as_it_is_leaves_its_hash(tmp_path: Path, what: str) -> None:
    assert hashed(tmp_path)[0] == hashed(tmp_path, SAME[what])[0] != {}


@pytest.mark.parametrize("what", OTHER)
def test_what_may_change_a_model_changes_its_hash(tmp_path: Path, what: str) -> None:
    assert hashed(tmp_path)[0] != hashed(tmp_path, OTHER[what])[0]


def test_a_hash_is_that_of_every_version_of_python(tmp_path: Path) -> None:
    """The hash is written down, so that a version with other syntax trees is found by its own tests."""
    codes, _ = hashed(tmp_path)
    assert {name: code[:8] for name, code in codes.items()} == {
        "late.py": "155a7524",
        "layers.py": "f667786a",
        "model.py": "f2b22807",
    }


def test_a_file_that_the_models_file_imports_is_held_when_a_build_is_opened(tmp_path: Path) -> None:
    own = "def GPT(**given):\n    return Whole(**{**given, 'width': WIDTH})\n"
    (tmp_path / "own.py").write_text(f"from gpt import GPT as Whole\nfrom widths import WIDTH\n{own}")
    (tmp_path / "widths.py").write_text("WIDTH = 16\n")
    made = build(tmp_path, ONE, PLAN.replace("./gpt.py", "./own.py"))
    parc.load(made).close()
    (tmp_path / "widths.py").write_text("WIDTH = 32\n")
    with pytest.raises(RunError, match=r"^\[P0211\] `widths.py` of the model's code changed since the build;") as error:
        parc.load(made)
    assert error.value.code is BAD_BUILD and f"`parc build PLAN.parc -o {made}`" in error.value.help
    code = json.loads((made / "manifest.json").read_text())["model_source"]
    built = {name: code for name, (code, _) in target_hashes(["./gpt.py:GPT"], tmp_path).items()}
    assert changed_files(["./gpt.py:GPT"], tmp_path, built) == []
    assert changed_files(["./own.py:GPT"], tmp_path, {**code, "more.py": ""}) == ["more.py", "widths.py"]
    assert changed_files(["torch.nn:Linear"], tmp_path, {"torch.nn.modules.linear": ""}) == ["torch.nn.modules.linear"]


def test_a_build_whose_models_lines_moved_runs_verifies_and_says_so(tmp_path: Path) -> None:
    made, place = build(tmp_path, TENSOR), tmp_path / "gpt.py"
    assert open_build(made).moved() == ""
    before = place.read_text()
    place.write_text(before.replace("\nclass Attention", "\n# Heads side by side.\n\nclass Attention"))
    opened = open_build(made)
    assert opened.moved() == "lines of `gpt.py` moved since the build, whose programs name the old ones"
    check_source_of(opened)
    for name in [name for name in sys.modules if name.startswith("parc_user_gpt_")]:
        del sys.modules[name]  # as in a process of its own
    again = compile_plan(read_plan(made / "plan.parc"), tmp_path)
    assert again.build.texts["programs/stage0.F.py"] != (made / "programs" / "stage0.F.py").read_text()
    assert differences(opened, again) == []
    place.write_text(before.replace("y.transpose(1, 2)", "y.mT.transpose(1, 2)"))
    assert opened.moved() == ""
    with pytest.raises(RunError, match=r"`gpt.py` of the model's code changed"):
        check_source_of(opened)


def test_why_a_model_cannot_be_imported_is_said(tmp_path: Path) -> None:
    opened = open_build(build(tmp_path, ONE))
    (tmp_path / "gpt.py").rename(tmp_path / "own.py")
    (tmp_path / "own.py").write_text("import no_such_module\n")
    model = {**opened.manifest["model"], "callable": "./own.py:GPT"}
    source = {name: code for name, (code, _) in file_hashes(["./own.py:GPT"], tmp_path).items()}
    with pytest.raises(RunError, match=r"importing `own.py` failed") as error:
        check_source_of(replace(opened, manifest={**opened.manifest, "model": model, "model_source": source}))
    assert error.value.notes == ("ModuleNotFoundError: No module named 'no_such_module'",) and error.value.help
