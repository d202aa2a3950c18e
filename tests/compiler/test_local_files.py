"""What a build's hash of its model covers: the model's file and the files of the plan's folder that it imports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import parc
from parc.compiler.callables import changed_files, file_hashes, local_files, target_hashes
from parc.grammar.codes_build import BAD_BUILD
from parc.runtime.faults import RunError
from parc.runtime.opening import check_source_of, open_build
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
        before = file_hashes(target, folder)
        for name, text in FILES.items():
            (folder / name).write_text(text + "# changed\n")
            assert (file_hashes(target, folder) != before) == (name in COVERED), name
            (folder / name).write_text(text)
        assert file_hashes(target, folder) == before != {}
    moved = folder.rename(tmp_path / "moved")
    assert file_hashes("./model.py:Model", moved) == before
    assert file_hashes("torch.nn:Linear", moved) == {} != target_hashes("torch.nn:Linear", moved)


def test_a_file_that_the_models_file_imports_is_held_when_a_build_is_opened(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from gpt import GPT\nfrom widths import WIDTH\n")
    (tmp_path / "widths.py").write_text("WIDTH = 16\n")
    made = build(tmp_path, ONE, PLAN.replace("./gpt.py", "./own.py"))
    parc.load(made).close()
    (tmp_path / "widths.py").write_text("WIDTH = 32\n")
    with pytest.raises(RunError, match=r"^\[P0211\] `widths.py` of the model's code changed since the build;") as error:
        parc.load(made)
    assert error.value.code is BAD_BUILD and f"`parc build PLAN.parc -o {made}`" in error.value.help
    own = json.loads((made / "manifest.json").read_text())["model_source"]
    built = target_hashes("./gpt.py:GPT", tmp_path)
    assert changed_files("./gpt.py:GPT", tmp_path, built) == []
    assert changed_files("./own.py:GPT", tmp_path, {**own, "more.py": ""}) == ["more.py", "widths.py"]
    assert changed_files("torch.nn:Linear", tmp_path, {"torch.nn.modules.linear": ""}) == ["torch.nn.modules.linear"]


def test_why_a_model_cannot_be_imported_is_said(tmp_path: Path) -> None:
    made = open_build(build(tmp_path, ONE))
    (tmp_path / "gpt.py").rename(tmp_path / "own.py")
    (tmp_path / "own.py").write_text("import no_such_module\n")
    model, source = {**made.manifest["model"], "callable": "./own.py:GPT"}, file_hashes("./own.py:GPT", tmp_path)
    with pytest.raises(RunError, match=r"importing `own.py` failed") as error:
        check_source_of(replace(made, manifest={**made.manifest, "model": model, "model_source": source}))
    assert error.value.notes == ("ModuleNotFoundError: No module named 'no_such_module'",) and error.value.help
