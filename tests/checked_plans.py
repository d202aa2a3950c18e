"""Plans compiled and checked as ``parc build`` does it, with nothing written."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from parc.checks import Checked, check_build
from parc.compiler.plan import read_plan
from parc.driver import Compiled, compile_plan
from parc.grammar.source import Source
from tests.runtime.tiny import EXAMPLES


@lru_cache(maxsize=16)
def compiled(text: str, folder: Path = EXAMPLES, **defines: int) -> Compiled:
    """The programs of a plan whose paths count from a folder."""
    words = {name: str(value) for name, value in defines.items()}
    return compile_plan(read_plan(Source("plan.parc", text), words), folder)


def checked(made: Compiled) -> Checked:
    """What the checks of a build report; every one must hold."""
    found = check_build(made)
    assert not found.faults, "\n".join(map(str, found.faults))
    return found
