"""Lines that the tests run at two commits, by room: ``python -m benchmarks.covered BEFORE AFTER [pytest's arguments]``.

Lines are statements as coverage.py counts them, also those that ranks and other processes of the tests run. Below the
table stand the lines that are in both commits, word for word in a file of the same name, and that only the first's
tests run: those are what a change of the tests has lost. ``pip install coverage`` first: nothing else of parc needs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("parc", "compiler", "grammar", "passes", "runtime")
# `fork` and `_exit`: a rank is a fork of the tests' process, and leaves without Python's own end
_SETTINGS = """[run]
data_file = {folder}/data
source = {source}
relative_files = true
parallel = true
patch = subprocess, fork, _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse
"""


class Covered:
    """The statements of a commit: those that its tests run, and those that they do not.

    Each is a file, as a path from the root, and the number of a line.
    """

    def __init__(self, tree: Path, files: dict[str, dict[str, list[int]]]) -> None:
        self.run = {(file, line) for file, data in files.items() for line in data["executed_lines"]}
        self.missed = {(file, line) for file, data in files.items() for line in data["missing_lines"]}
        self._texts = {file: (tree / file).read_text().splitlines() for file in files}

    def text(self, place: tuple[str, int]) -> tuple[str, str]:
        """Return a statement by the name of its file, which stays when the file moves, and the text of its line."""
        file, line = place
        return Path(file).name, self._texts[file][line - 1].strip()

    def by_room(self) -> Counter[str]:
        """Count the statements that the tests run in each folder of packages, two levels deep."""
        return Counter("/".join(Path(file).parts[:-1][:2]) for file, _ in self.run)


def measure(commit: str, arguments: Sequence[str], folder: Path) -> Covered:
    """Run the tests of a commit under coverage.py in a checkout of its own."""
    tree, settings = folder / "tree", folder / "settings"
    source = ", ".join(str(tree / package) for package in _PACKAGES)
    settings.write_text(_SETTINGS.format(folder=folder, source=source))
    subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
    try:
        environment = {**os.environ, "PYTHONPATH": str(tree)}

        def coverage(command: str, *words: str | Path) -> int:
            line = [sys.executable, "-m", "coverage", command, f"--rcfile={settings}", *words]
            return subprocess.run(line, cwd=tree, env=environment, check=False).returncode

        failed = coverage("run", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        # `-i`: a test may have written a file, run it and removed it
        if coverage("combine", "-q") or coverage("json", "-q", "-i", "-o", folder / "json"):
            sys.exit(f"the tests of {commit} left nothing to read")
        if failed:
            print(f"some tests of {commit} failed", file=sys.stderr)
        return Covered(tree, json.loads((folder / "json").read_text())["files"])
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def lost(before: Covered, after: Covered) -> Iterator[tuple[str, int]]:
    """Yield the statements that no test runs any more, though they stand as before. A text that some line of the file
    still has and runs is not lost: which of several equal lines was which is not told."""
    ran, runs = ({covered.text(place) for place in covered.run} for covered in (before, after))
    missed = {before.text(place) for place in before.missed}
    for place in sorted(after.missed):
        if (text := after.text(place)) in ran and text not in runs and text not in missed:
            yield place


def main(before: str, after: str, *arguments: str) -> None:
    """Print the table, and the lines that are lost."""
    sides = []
    for commit in (before, after):
        with tempfile.TemporaryDirectory() as folder:
            sides.append(measure(commit, arguments or ("-n", "2"), Path(folder)))
    counts = [side.by_room() for side in sides]
    print(f"{'lines that the tests run':24}{before[:12]:>13}{after[:12]:>13}")
    for room in sorted(set().union(*counts)):
        print(f"{room:24}" + "".join(f"{count[room]:13,}" for count in counts))
    print(f"{'all':24}" + "".join(f"{len(side.run):13,}" for side in sides))
    print(f"{'of':24}" + "".join(f"{len(side.run) + len(side.missed):13,}" for side in sides))
    gone = list(lost(*sides))
    print(f"{'run before, no more':24}{'':13}{len(gone):13,}")
    for place in gone:
        print(f"{place[0]}:{place[1]}: {sides[1].text(place)[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
