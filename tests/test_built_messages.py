"""The texts of messages that need a model or files, held by a golden file as those of the language are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parc.build import build
from parc.grammar.codes import CODES
from parc.grammar.diagnostics import PlanError
from tests.runtime.tiny import EXAMPLES, PLAN, TENSOR

CASES = {
    "P0021": 'include "other.parc"',
    "P0214": "freeze **",
    "P0215": 'init from "weights"',
    "P0401": "budget memory 100KB",
    "P0402": "forbid all_reduce in blocks.*.mlp during forward",
    "P0403": "expect 2 all_reduce in blocks.*",
}
GOLDEN = Path(__file__).parent / "golden" / "built_messages.txt"


def said(folder: Path, code: str) -> str:
    """What a build of the tiny GPT says with the line of a case."""
    shutil.copy(EXAMPLES / "gpt.py", folder)
    (folder / "other.parc").write_text('include "tiny.parc"\n')
    (folder / "weights").mkdir()
    save_file({"embed.weight": torch.zeros(4, 16), "wte.weight": torch.zeros(1)}, folder / "weights" / "a.safetensors")
    (folder / "tiny.parc").write_text(PLAN + TENSOR + CASES[code] + "\n")
    with pytest.raises(PlanError) as refused:
        build(folder / "tiny.parc", folder / "build", {})
    return str(refused.value)


def test_messages_of_builds_look_as_they_did(tmp_path: Path) -> None:
    """To accept a change of messages, delete the golden file and run this once."""
    texts = []
    for code in CASES:
        assert CODES[code].language == "shell"
        (tmp_path / code).mkdir()
        texts.append(f"# {code}\n{said(tmp_path / code, code)}")
        assert f"error[{code}]" in texts[-1] and "help: " in texts[-1]
    text = "\n\n".join(texts) + "\n"
    if not GOLDEN.exists():
        GOLDEN.write_text(text, encoding="utf-8")
        pytest.fail(f"{GOLDEN.name} was missing and is written anew: look at it and run again")
    assert GOLDEN.read_text(encoding="utf-8") == text
