"""``python -m parc``, and the script ``parc``: the command line as a process."""

import atexit
import gc
import os
import sys
from contextlib import suppress

from parc.cli import main


def process() -> int:
    """Run the command of ``sys.argv``, and return the exit code. A command's graphs live until its process ends, so a
    garbage collection, also Python's last one, would walk over all of them and free next to nothing. A run collects."""
    if sys.argv[1:2] != ["run"]:
        gc.disable()
    codes = [1]  # as Python's own, if an exception leaves `main`
    atexit.register(_leave, codes)  # the first is called last
    codes[0] = main()
    return codes[0]


def _leave(codes: list[int]) -> None:
    """End the process behind all other exit handlers, without Python's finalization: of objects under ``gc.freeze`` it
    frees none, and libraries that count theirs would report leaks."""
    with suppress(OSError, ValueError):  # nobody reads
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(codes[0])


if __name__ == "__main__":
    sys.exit(process())
