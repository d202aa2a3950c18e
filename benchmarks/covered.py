"""Lines that the tests run at two commits, by room: ``python -m benchmarks.covered BEFORE AFTER [pytest's arguments]``.

Lines are statements as coverage.py counts them, also those that ranks and other processes of the tests run. Below the
table stand the lines that are in both commits, and that only the first's tests run: those are what a change of the
tests has lost. ``pip install coverage`` first: nothing else of parc needs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from .test_time import ROOT, checkout

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
        self.texts = {file: (tree / file).read_text().splitlines() for file in files}
        """The lines of each file."""

    def text(self, place: tuple[str, int]) -> tuple[str, str]:
        """Return a statement by the name of its file, which stays when the file moves, and the text of its line."""
        file, line = place
        return Path(file).name, self.texts[file][line - 1].strip()

    def by_room(self) -> Counter[str]:
        """Count the statements that the tests run in each folder of packages, two levels deep."""
        return Counter("/".join(Path(file).parts[:-1][:2]) for file, _ in self.run)


def measure(commit: str, arguments: Sequence[str]) -> Covered:
    """Run the tests of a commit under coverage.py in a checkout of its own."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]["source"]
    with checkout(commit) as tree:
        folder = tree.parent
        settings, record = folder / "settings", folder / "record"
        source = ", ".join(str(tree / package) for package in packages)
        settings.write_text(_SETTINGS.format(folder=folder, source=source))
        environment = {**os.environ, "PYTHONPATH": str(tree)}

        def coverage(command: str, *words: str | Path) -> int:
            line = [sys.executable, "-m", "coverage", command, f"--rcfile={settings}", *words]
            return subprocess.run(line, cwd=tree, env=environment, check=False).returncode

        failed = coverage("run", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        # `-i`: a test may have written a file, run it and removed it
        if coverage("combine", "-q") or coverage("json", "-q", "-i", "-o", record):
            sys.exit(f"the tests of {commit} left nothing to read")
        if failed:
            print(f"some tests of {commit} failed", file=sys.stderr)
        return Covered(tree, json.loads(record.read_text())["files"])


def lost(before: Covered, after: Covered) -> list[tuple[str, int]]:
    """Return the statements that no test runs any more, though they stand as before: in the same place of a file, or,
    where they were moved, word for word in a file of the same name of which no such line is run."""
    gone = set[tuple[str, int]]()
    for file in before.texts.keys() & after.texts.keys():
        matcher = SequenceMatcher(None, before.texts[file], after.texts[file], autojunk=False)
        for was, now, length in matcher.get_matching_blocks():
            for line in range(1, length + 1):
                if (file, was + line) in before.run and (file, now + line) in after.missed:
                    gone.add((file, now + line))
    ran, runs = ({covered.text(place) for place in covered.run} for covered in (before, after))
    missed = {before.text(place) for place in before.missed}
    texts = ran - runs - missed
    gone.update(place for place in after.missed if after.text(place) in texts)
    return sorted(gone)


def main(before: str, after: str, *arguments: str) -> None:
    """Print the table, and the lines that are lost."""
    sides = [measure(commit, arguments or ("-n", "2")) for commit in (before, after)]
    counts = [side.by_room() for side in sides]
    print(f"{'lines that the tests run':24}{before[:12]:>13}{after[:12]:>13}")
    for room in sorted(set().union(*counts)):
        print(f"{room:24}" + "".join(f"{count[room]:13,}" for count in counts))
    print(f"{'all':24}" + "".join(f"{len(side.run):13,}" for side in sides))
    print(f"{'of':24}" + "".join(f"{len(side.run) + len(side.missed):13,}" for side in sides))
    gone = lost(*sides)
    print(f"{'run before, no more':24}{'':13}{len(gone):13,}")
    for place in gone:
        print(f"{place[0]}:{place[1]}: {sides[1].text(place)[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
