"""The command line as a process of its own."""

from __future__ import annotations

import atexit
import gc
import sys

import pytest

from parc import __main__


@pytest.mark.parametrize(("command", "collects"), [("run", True), ("build", False), ("verify", False)])
def test_only_a_run_collects_garbage(command: str, collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    at_exit: list[object] = []

    def main() -> int:
        found.append(gc.isenabled())
        return 5

    monkeypatch.setattr(__main__, "main", main)
    monkeypatch.setattr(sys, "argv", ["parc", command, "m.parc"])
    monkeypatch.setattr(atexit, "register", at_exit.append)
    try:
        assert __main__.process() == 5
    finally:
        gc.enable()
    assert found == [collects] and at_exit == [gc.freeze]
