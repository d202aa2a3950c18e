"""The command line as a process of its own."""

from __future__ import annotations

import atexit
import gc
import subprocess
import sys

import pytest

from parc import __main__

ENDING = """
import atexit, ctypes, sys
from parc import __main__

def main():
    ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)  # where libraries in C++ look what is left of their objects
    atexit.register(print, "told")
    print("done, ", end="")
    {how}

__main__.main = main
sys.exit(__main__.process())
"""


@pytest.mark.parametrize(("command", "collects"), [("run", True), ("build", False), ("verify", False)])
def test_only_a_run_collects_garbage(command: str, collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def main() -> int:
        found.append(gc.isenabled())
        return 5

    monkeypatch.setattr(__main__, "main", main)
    monkeypatch.setattr(sys, "argv", ["parc", command, "m.parc"])
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    try:
        assert __main__.process() == 5
    finally:
        gc.enable()
    assert found == [collects]


@pytest.mark.parametrize(("how", "code", "said"), [("return 5", 5, ""), ("raise KeyError('x')", 1, "KeyError: 'x'")])
def test_a_process_ends_without_taking_python_apart(how: str, code: int, said: str) -> None:
    words = [sys.executable, "-c", ENDING.replace("{how}", how), "build"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "done, told\n") and said in done.stderr


def test_streams_that_a_process_was_started_without_are_opened() -> None:
    checks = "os.write(2, b'said'); os._exit(None in (sys.stdin, sys.stdout, sys.stderr))"
    code = f"import os, sys; import parc.cli as cli; cli._open_streams(); {checks}"
    lacking = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", lacking, sys.executable, code], check=False).returncode == 0
