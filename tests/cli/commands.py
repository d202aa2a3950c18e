"""A command run in this process."""

from __future__ import annotations

import pytest

from parc.cli import main

Captured = pytest.CaptureFixture[str]


def parc(capsys: Captured, *words: object) -> tuple[int, str, str]:
    """Run a command, and return its exit code, stdout and stderr."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err
