"""Lines of Python by room, at some commits beside each other: ``python -m benchmarks.lines 765d2c3 HEAD``.

Counted are all lines of the files that git has, comments and blank lines among them. Before there were rooms, a package
was one.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent


def git(*words: str) -> str:
    """Return the standard output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def lines_by_room(commit: str) -> Counter[str]:
    """Count the lines of each folder of packages, two levels deep. A package's own modules count under its name."""
    counts: Counter[str] = Counter()
    # `git grep -c ""` counts the lines of every file at once
    for row in git("grep", "-c", "", commit, "--", "*.py").splitlines():
        _, name, count = row.rsplit(":", 2)
        folders = PurePosixPath(name).parts[:-1]
        counts["/".join(folders[:2]) or "."] += int(count)
    return counts


def main(commits: Sequence[str]) -> None:
    """Print the table."""
    commits = commits or ["HEAD"]
    counts = [lines_by_room(commit) for commit in commits]
    rooms = sorted(set().union(*counts))
    print(f"{'':24}" + "".join(f"{commit[:12]:>13}" for commit in commits))
    for room in rooms:
        print(f"{room:24}" + "".join(f"{count[room]:13,}" for count in counts))
    for name, outside in (("without tests, benchmarks", ("tests", "benchmarks")), ("all", ())):
        sums = [sum(n for room, n in count.items() if not room.startswith(tuple(outside))) for count in counts]
        print(f"{name:24}" + "".join(f"{total:13,}" for total in sums))


if __name__ == "__main__":
    main(sys.argv[1:])
