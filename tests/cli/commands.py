"""A command run in this process."""

from __future__ import annotations

import pytest

from parc.cli import main

Captured = pytest.CaptureFixture[str]


def parc(capsys: Captured, *words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err
