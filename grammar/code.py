"""One error code: the text for the reader of ``parc explain`` and of docs/errors.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class Code:
    """A kind of message, documented where it is defined.

    ``example`` with ``language="parc"`` is a plan text that produces this code (the tests run it; statements it leaves
    out are supplied, but ``loss`` and ``optimizer`` after a first line ``# for inference``; a first line
    ``# -D name=value`` gives definitions); other languages are shown, not run.
    """

    name: str
    title: str
    why: str
    example: str
    instead: str
    language: Literal["parc", "python", "shell"] = "parc"


shown = partial(Code, language="shell")
"""Return a code that a plan's text alone does not produce: its example is shown, not run."""


MODEL = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        {body}"""
"""The code of a model in an example, without the body of its forward."""
