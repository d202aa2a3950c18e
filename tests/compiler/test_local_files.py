"""What a build's hash of its model covers: the model's file and the files of the plan's folder that it imports."""

from __future__ import annotations

from pathlib import Path

import pytest

import parc
from parc.compiler.callables import file_hash, local_files, target_hash
from parc.grammar.codes_build import BAD_BUILD
from parc.runtime.faults import RunError
from tests.runtime.tiny import ONE, PLAN, build

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
    expected = sorted(folder / name for name in COVERED)
    assert local_files("./model.py", folder) == local_files("model", folder) == expected
    assert local_files("blocks.norms", folder) == sorted(folder / f"blocks/{n}.py" for n in ("__init__", "norms"))
    assert local_files("torch.nn", folder) == []


def test_a_hash_changes_with_every_file_that_is_imported_and_with_no_other(folder: Path, tmp_path: Path) -> None:
    for target in ("./model.py:Model", "model:Model"):
        before = file_hash(target, folder)
        for name, text in FILES.items():
            (folder / name).write_text(text + "# changed\n")
            assert (file_hash(target, folder) != before) == (name in COVERED), name
            (folder / name).write_text(text)
        assert file_hash(target, folder) == before != ""
    moved = folder.rename(tmp_path / "moved")
    assert file_hash("./model.py:Model", moved) == before
    assert file_hash("torch.nn:Linear", moved) == "" != target_hash("torch.nn:Linear", moved)


def test_a_file_that_the_models_file_imports_is_held_when_a_build_is_opened(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from gpt import GPT\nfrom widths import WIDTH\n")
    (tmp_path / "widths.py").write_text("WIDTH = 16\n")
    made = build(tmp_path, ONE, PLAN.replace("./gpt.py", "./own.py"))
    parc.load(made).close()
    (tmp_path / "widths.py").write_text("WIDTH = 32\n")
    with pytest.raises(RunError, match="or one beside the plan that it imports, changed since the build") as error:
        parc.load(made)
    assert error.value.code is BAD_BUILD
