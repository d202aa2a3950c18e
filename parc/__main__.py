"""``python -m parc``, and the script ``parc``: the command line as a process."""

import atexit
import gc
import sys

from parc.cli import main


def process() -> int:
    """Run the command of ``sys.argv``; returns the exit code. A command's graphs live until its process ends: a
    collection of garbage, Python's last one too, walks over all of them and frees next to nothing. A run collects."""
    if sys.argv[1:2] != ["run"]:
        gc.disable()
    atexit.register(gc.freeze)
    return main()


if __name__ == "__main__":
    sys.exit(process())
