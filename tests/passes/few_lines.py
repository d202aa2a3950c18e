"""Models of a few lines under plans of a few lines, compiled with every check."""

from __future__ import annotations

import textwrap
from pathlib import Path

from parc.advice import warnings_of
from parc.checking.checks import Checked
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from tests.checked_plans import checked

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.more(**options)

    def more(self):
        pass

    def forward(self, x):
        return self.fc(x).square().mean()
"""
X, Y, T = "input x float32 [B, 4, 8]", "input y float32 [B, 4, 8]", "input t int64 [B, 4]"
DATA = "mesh dp=2\nshard {} [B/dp, ...]"


def made(folder: Path, body: str, lines: str, arguments: str = "", sizes: str = "B=4") -> tuple[Compiled, Checked]:
    """Compile a class `Model` with some body; every check must pass."""
    source = textwrap.dedent(body)
    if "class Model" not in source:
        source = "class Model(Base):\n" + textwrap.indent(source, "    ")
    (folder / "models.py").write_text(MODELS + "\n\n" + source)
    head = f'model "./models.py:Model" {arguments}\nsizes {sizes}\noptimizer sgd lr 1e-2\nseed 3\nsteps 2\n'
    plan = folder / "some.parc"
    plan.write_text(head + ("" if "loss" in lines else "loss output\n") + lines + "\n")
    compiled = compile_plan(read_plan(plan), folder)
    return compiled, checked(compiled)


def codes(compiled: Compiled) -> list[str]:
    """Return the codes of a build's warnings."""
    return [warning.code.name for warning in warnings_of(compiled)]
