"""``make wheel``: source distribution and wheel of the last commit, installed beside torch alone, used and measured.

"Beyond torch" is all that ``pip install`` adds to torch, what torch requires, and numpy: torch hands its tensors to
other packages through numpy and warns where it is missing, so it is counted as torch's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MB = 1e6
LIMITS = {"parc --help": 0.3, "parc check --static gpt.parc": 0.5}  # seconds
LARGEST = 10.0  # MB beyond torch
TIMES = 10


def run(*words: object, cwd: Path) -> None:
    """Run a command that must succeed; its words are shown if it does not."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")


def build(folder: Path) -> tuple[Path, Path]:
    """Make the source distribution of a clean clone, and the wheel from it."""
    run("git", "clone", "--quiet", ROOT, folder / "clone", cwd=folder)
    shutil.rmtree(DIST, ignore_errors=True)
    program = f"import setuptools.build_meta as build; build.build_sdist({str(DIST)!r})"
    run(sys.executable, "-c", program, cwd=folder / "clone")
    (source,) = DIST.glob("*.tar.gz")
    words = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", DIST, source)
    run(sys.executable, *words, cwd=folder)
    (wheel,) = DIST.glob("*.whl")
    return source, wheel


def closure(name: str, seen: set[str]) -> Iterator[Distribution]:
    """Return an installed distribution and all that it requires, without extras."""
    if name in seen:
        return
    seen.add(name)
    try:
        package = distribution(name)
    except PackageNotFoundError:  # a requirement for another platform
        return
    yield package
    for line in package.requires or ():
        if "extra ==" not in line and (match := re.match(r"[\w.-]+", line)):
            yield from closure(re.sub(r"[-_.]+", "-", match[0]).lower(), seen)


def environment(folder: Path, wheel: Path) -> Path:
    """Make a fresh virtual environment that sees torch, torch's requirements and numpy, and install the wheel there."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    torch = folder / "torch"
    torch.mkdir()
    for package in (*closure("torch", set()), distribution("numpy")):
        for top in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
            if not (torch / top).exists():
                (torch / top).symlink_to(Path(str(package.locate_file(top))))
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{torch}\n")
    pip = (sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "install")
    run(*pip, "--quiet", "--no-compile", wheel, cwd=folder)
    sizes = {path.name: sum(file.stat().st_size for file in path.rglob("*")) / MB for path in site.glob("*/")}
    each = ", ".join(f"{name} {size:.2f}" for name, size in sorted(sizes.items()) if not name.endswith(".dist-info"))
    print(f"{'installed beyond torch':28} {sum(sizes.values()):.2f} MB (at most {LARGEST:.0f}): {each}")
    if sum(sizes.values()) > LARGEST:
        sys.exit("too large")
    return folder / "venv/bin/parc"


def use(parc: Path, folder: Path) -> None:
    """Follow a newcomer's first commands after ``pip install``, in a new folder: example, build, run, show, and a
    family of models."""
    folder.mkdir()
    run(parc, "example", "gpt", cwd=folder)
    run(parc, "build", "gpt.parc", "-o", "gpt", cwd=folder)
    run(parc, "run", "gpt", "--steps", "2", cwd=folder)
    run(parc, "show", "gpt", cwd=folder)
    (folder / "family.parc").write_text(
        (folder / "gpt.parc").read_text().split("mesh", 1)[0] + 'mesh dp=2\ninclude "parc:llama" (tp=2)\n'
    )
    run(parc, "check", "--static", "family.parc", cwd=folder)
    print(f"{'used':28} example, build, run of 4 processes, show, include of a family")


def measure(parc: Path, folder: Path) -> bool:
    """Print the least time of several starts of each command; return whether all are within their limits."""
    within = True
    for words, limit in LIMITS.items():
        seconds = []
        for _ in range(TIMES):
            start = time.perf_counter()
            run(parc, *words.split()[1:], cwd=folder)
            seconds.append(time.perf_counter() - start)
        within &= min(seconds) <= limit
        print(f"{words:28} {min(seconds):.2f} s (at most {limit}; the least of {TIMES})")
    return within


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        for wheel in build(here):
            print(f"dist/{wheel.name:40} {wheel.stat().st_size / MB:.2f} MB")
        command = environment(here, wheel)
        use(command, here / "project")
        sys.exit(0 if measure(command, here / "project") else 1)
