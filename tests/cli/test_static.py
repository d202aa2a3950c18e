"""``parc check --static``: the checks that need neither torch nor the model, in the words of the whole check."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parc.compiler.plan.plan import read_plan
from parc.compiling.callable_faults import callable_faults
from tests.cli.commands import Captured, parc
from tests.runtime.tiny import DATA, EXAMPLES, PLAN

LOSS = "cross_entropy(output, targets)"
OPEN = "import sys\nfrom torch.nn import *\n"
PROGRAM = """
import sys
from parc.cli import main
assert main(["check", "--static", sys.argv[1]]) == 1
assert not {"torch", "sympy", "numpy", "gpt"} & set(sys.modules)
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLES / "gpt.py", tmp_path)
    (tmp_path / "more.py").write_text("def mean(output, targets):\n    return output.mean()\n")
    (tmp_path / "tiny.parc").write_text(PLAN + DATA)
    return tmp_path / "tiny.parc"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("B=8, S=8", "B=6, S=8", ["error[P0107]: dim 0 of `tokens` has 3 entries, which do not divide by dp=2",
                                  "choose `B` as a multiple of 4", "the same holds for dim 0 of `targets`"]),
        ("B=8, S=8", "B=2..6 by 2, S=8", ["error[P0107]: dim 0 of `tokens` has 3 entries"]),
        ("B=8, S=8", "B=2..8 by 2, S=8", ["error[P0107]: dim 0 of `tokens` has 1 entries", "a step of `B`"]),
        ("[B/dp, _]", "[B/dp, _, _]", ["error[P0103]: the layout has 3 entries, but `tokens` has 2 dims"]),
        ("[B/dp, _]", "[S/dp, _]", ["error[P0103]: dim 0 of `tokens` is `B`, not `S`"]),
        ("[B/dp, _]", "[B/dp pad, _]", ["error[P0110]: `tokens` is no parameter"]),
        ("tokens, targets [B/dp, _]", "tokens [B/dp, _]\nshard t*s [_, S/dp]",
         ["error[P0105]: two lines place `tokens`"]),
        ("./gpt.py:GPT", "./gtp.py:GPT", ["error[P0201]: there is no file `gtp.py`", "did you mean `gpt.py`?"]),
        ("./gpt.py:GPT", "./gpt.py:GTP", ["error[P0201]: `./gpt.py` has no `GTP`", "did you mean `GPT`?"]),
        (LOSS, '"./more.py:maen"(output, targets)', ["error[P0201]: `./more.py` has no `maen`", "tiny.parc:6:1"]),
        ('bytes "*.py"', '"./none.py:data" ()', ["error[P0303]: there is no file `none.py`", "tiny.parc:7:1"]),
    ],
)  # fmt: skip
def test_it_says_what_the_whole_check_says(
    capsys: Captured, plan: Path, old: str, new: str, expected: list[str]
) -> None:
    assert old in plan.read_text()
    plan.write_text(plan.read_text().replace(old, new))
    code, out, err = parc(capsys, "check", "--static", plan)
    assert (code, out) == (1, "") and all(text in err for text in expected), err
    assert parc(capsys, "check", plan) == (1, "", err)


@pytest.mark.parametrize(
    "text",
    ["GPT = 1", "if True:\n    class GPT: ...", "from x import GPT", "import GPT.inner", "for GPT in x: ...",
     "GPT, b = x", OPEN, "globals()['G' + 'PT'] = 1", "def __getattr__(name): ...",
     "def f():\n    global GPT\n    GPT = 1", "this is no Python"],
)  # fmt: skip
def test_a_name_that_an_import_may_find_is_left_to_it(plan: Path, text: str) -> None:
    (plan.parent / "gpt.py").write_text(f"{text}\n")
    assert list(callable_faults(read_plan(plan), plan.parent)) == []


@pytest.mark.parametrize("text", ["def f():\n    GPT = 1", "class Other:\n    GPT = 1", "print(GPT)", "x.GPT = 1", ""])
def test_a_name_that_no_import_can_find_is_missing(plan: Path, text: str) -> None:
    (plan.parent / "gpt.py").write_text(f"{text}\n")
    (error,) = callable_faults(read_plan(plan), plan.parent)
    assert error.message == "`./gpt.py` has no `GPT`"


def test_it_imports_neither_torch_nor_the_model(plan: Path) -> None:
    plan.write_text(plan.read_text().replace("B=8", "B=6").replace("GPT", "GTP"))
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(plan)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.count("error[") == 2, done.stderr
