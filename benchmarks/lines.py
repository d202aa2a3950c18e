"""Lines of Python by room, at some commits beside each other: ``python -m benchmarks.lines 765d2c3 HEAD``.

Counted are all lines of the files that git has, comments and blank lines among them. Before there were rooms, a package
was one.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import PurePosixPath

from benchmarks.command import command
from benchmarks.turns import ROOT


def lines_by_room(commit: str) -> Counter[str]:
    """Count the lines of each folder of packages, two levels deep. A package's own modules count under its name."""
    counts: Counter[str] = Counter()
    words = ("git", "grep", "-c", "", commit, "--", "*.py")  # counts the lines of every file at once
    for row in subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        _, name, count = row.rsplit(":", 2)
        folders = PurePosixPath(name).parts[:-1]
        counts["/".join(folders[:2]) or "."] += int(count)
    return counts


def main(*commits: str) -> None:
    """Print the table."""
    commits = commits or ("HEAD",)
    counts = [lines_by_room(commit) for commit in commits]
    rooms = sorted(set().union(*counts))
    print(f"{'':24}" + "".join(f"{commit[:12]:>13}" for commit in commits))
    for room in rooms:
        print(f"{room:24}" + "".join(f"{count[room]:13,}" for count in counts))
    for name, outside in (("without tests, benchmarks", ("tests", "benchmarks")), ("all", ())):
        sums = [sum(n for room, n in count.items() if not room.startswith(tuple(outside))) for count in counts]
        print(f"{name:24}" + "".join(f"{total:13,}" for total in sums))


if __name__ == "__main__":
    command(main)
