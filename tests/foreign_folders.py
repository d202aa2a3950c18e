"""Every command that writes, over folders and files of other people: none of theirs may be lost. ``python -m
tests.foreign_folders`` prints a table, with a real mount point if the system lets it (``unshare -rm`` gives one).

A folder is made by a row of ``FOLDERS``, and a command by a row of ``WRITERS``. What the row put there must be the same
afterwards, at its place; the command has either written, or ended with a message.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

import parc
from parc.cli import main
from parc.compiler.build import folders
from parc.runtime.launch import train
from parc.runtime.ranks.faults import RunError
from tests.runtime.tiny import EVAL, EXAMPLES, FLAT, batch, build

Place = Path
"""The path that a command is told to write."""


@dataclass(frozen=True)
class Foreign:
    """A folder or a file of somebody. ``make`` makes it at a place, maybe around what the command itself wrote there
    (``own``). ``written`` is whether parc may write there: None where that depends on the command."""

    make: Callable[[Place], None]
    own: bool = False
    written: bool | None = False


def put(place: Path, **texts: str) -> None:
    """Write files of a folder; ``__`` in a name stands for a dot, ``___`` for a slash."""
    for name, text in texts.items():
        path = place / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def dataset(place: Path) -> None:
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "d0a4", "_split": "train"}
    put(place, state__json=json.dumps(state), dataset_info__json="{}")
    (place / "data-00000-of-00001.arrow").write_bytes(bytes(99))


def checkout(place: Path) -> None:
    put(place, __git___HEAD="ref: refs/heads/main\n", src___train__py="print(1)\n", README__md="mine\n")


def web_app(place: Path) -> None:
    manifest = {"name": "app", "icons": [], "start_url": "/", "files": {"main.css": "/main.css"}, "format": 7}
    put(place, manifest__json=json.dumps(manifest), index__html="<!DOCTYPE html><title>app</title>", report__json="{}")


def other_checkpoint(place: Path) -> None:
    put(place, state__json='{"step": 900, "optimizer": "adamw", "samples": 7200}', index__json="{}")
    save_file({"model.w": torch.zeros(2)}, place / "state.safetensors")


def other_predictions(place: Path) -> None:
    put(place, predictions__json='{"parts": [{"file": "a.csv"}], "samples": 3}', a__csv="1,2\n")


def weights(place: Path) -> None:
    put(place, config__json="{}")
    save_file({"w": torch.zeros(2)}, place / "model.safetensors")


def file(place: Path) -> None:
    place.write_text("mine\n")


def link(place: Path) -> None:
    dataset(place.with_name("disk"))
    place.symlink_to(place.with_name("disk"))


def circle(place: Path) -> None:
    place.symlink_to(place.with_name("other"))
    place.with_name("other").symlink_to(place)


def linked_own(place: Path) -> None:
    """Put what the command wrote on another disk, with notes in it."""
    place.rename(place.with_name("disk"))
    place.symlink_to(place.with_name("disk"))
    notes(place)


def notes(place: Path) -> None:
    put(place, notes__md="mine\n", programs___notes__md="mine\n", runs___a___log__txt="mine\n")
    (place / "link").symlink_to("notes.md")
    (place / "empty").mkdir()


def protected(place: Path) -> None:
    put(place, notes__md="mine\n")
    place.chmod(0o555)


def newer(place: Path) -> None:
    """A record of a format that nobody knows yet. A build is made of its plan again, and has a list of its files."""
    put(place, notes__md="mine\n")
    for name in ("state.json", "manifest.json"):
        if (place / name).is_file():
            (place / name).write_text(json.dumps({**json.loads((place / name).read_text()), "format": 99}))


def cut(place: Path) -> None:
    """The record of what the command wrote is cut off."""
    for name in ("state.json", "predictions.json", "manifest.json"):
        if (place / name).is_file():
            (place / name).write_text((place / name).read_text()[:20])


def taken(place: Path) -> None:
    """Beside what the command wrote, the names that parc takes while it replaces a folder are somebody's."""
    put(place.with_name(f".{place.name}.old"), notes__md="mine\n")
    put(place.with_name(f".{place.name}.{socket.gethostname()}.99999999"), notes__md="mine\n")
    place.with_name(f".{place.name}.lock").write_text("mine")


def mount(place: Path) -> None:
    """A mount point; where the system allows none, the table of mounts says so."""
    place.mkdir(exist_ok=True)
    if MOUNTS:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    put(place, notes__md="mine\n")


MOUNTS = False
FOLDERS = {
    "a data set of datasets": Foreign(dataset),
    "a git checkout": Foreign(checkout),
    "a web app": Foreign(web_app),
    "another tool's checkpoint": Foreign(other_checkpoint),
    "another tool's predictions": Foreign(other_predictions),
    "weights of transformers": Foreign(weights),
    "a file": Foreign(file),
    "a link to a data set": Foreign(link),
    "links in a circle": Foreign(circle),
    "a mount point": Foreign(mount),
    "its own, with notes": Foreign(notes, own=True, written=True),
    "its own behind a link, with notes": Foreign(linked_own, own=True, written=True),
    "its own, write-protected": Foreign(protected, own=True),
    "its own, of a newer format": Foreign(newer, own=True, written=None),
    "its own, cut off": Foreign(cut, own=True),
    "its own, with taken names beside": Foreign(taken, own=True),
}


# ---- the commands


@cache
def ready() -> Path:
    """Return a folder with a build that trains and evaluates, its plan, a checkpoint, and weights."""
    home = Path(tempfile.mkdtemp(prefix="parc-folders-"))
    build(home, EVAL, FLAT)
    (home / "few.txt").write_text("few words, " * 10)
    with parc.load(home / "build") as session:
        session.step(batch(0))
        session.save(home / "checkpoint")
    assert not main(["export", str(home / "build"), str(home / "checkpoint"), "-o", str(home / "w.safetensors")])
    return home


def command(*words: str) -> Callable[[Place], str]:
    """Return a writer by words of the command line: OUT is the place, FOLDER what it is in, HOME the ready folder. It
    returns the message of an exit code other than 0."""

    def write(place: Place) -> str:
        said = io.StringIO()
        names = {"HOME": ready(), "OUT": place, "FOLDER": place.parent}
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main([re.sub("HOME|OUT|FOLDER", lambda name: str(names[name[0]]), word) for word in words])
        if code not in (0, 1) or (code and "Traceback" in said.getvalue()):
            raise AssertionError(f"exit code {code}: {said.getvalue()}")
        return said.getvalue() if code else ""

    return write


def save(place: Place) -> str:
    """Save from a loop of one's own, which holds nothing."""
    with parc.load(ready() / "build") as session:
        try:
            session.save(place)
        except RunError as error:
            return str(error)
    return ""


RUN = ("run", "HOME/build", "--no-first-check")
WRITERS = {
    "build": command("build", "HOME/build.parc", "-o", "OUT"),
    "run": command(*RUN, "--steps", "1", "--save", "OUT"),
    "session.save": save,
    "import": command("import", "HOME/build", "HOME/w.safetensors", "-o", "OUT"),
    "export": command("export", "HOME/build", "HOME/checkpoint", "-o", "OUT"),
    "predict": command(*RUN, "--predict", 'bytes "HOME/few.txt"', "--resume", "HOME/checkpoint", "-o", "OUT"),
}
"""The commands that replace a folder."""


def page(place: Path) -> None:
    place.write_text("<!DOCTYPE html>\n<title>parc</title>\n")


def picture(place: Path) -> None:
    place.write_text('<svg xmlns="http://www.w3.org/2000/svg">\n<rect width="100%"/></svg>\n')


def trace(place: Path) -> None:
    place.write_text('{"displayTimeUnit": "ms", "traceEvents": []}')


def lines(place: Path) -> None:
    place.write_text('{"loss": 1.0, "run": {}}\n')


def zipped(place: Path) -> None:
    place.write_bytes(gzip.compress(b'{"schemaVersion": 1, "traceEvents": [{"name": "a"}], "parc": 1}'))


def link_to_file(place: Path) -> None:
    file(place.with_name("disk"))
    place.symlink_to(place.with_name("disk"))


def linked_file(place: Path) -> None:
    place.rename(place.with_name("disk"))
    place.symlink_to(place.with_name("disk"))


def unchanged(place: Path) -> None:
    """Leave what the command wrote."""


FILES = {
    "a file": Foreign(file),
    "another tool's page": Foreign(page),
    "another tool's picture": Foreign(picture),
    "another tool's trace": Foreign(trace),
    "another tool's metrics": Foreign(lines),
    "another tool's profile": Foreign(zipped),
    "a link to a file": Foreign(link_to_file),
    "a folder": Foreign(dataset),
    "its own": Foreign(unchanged, own=True, written=True),
    "its own behind a link": Foreign(linked_file, own=True, written=True),
}
GO_ON = ("run --metrics", "run --profile")
"""Commands that warn of a full disk, and train on."""
SMALL = ("layers=1", "width=16", "heads=2", "vocab=256", "length=8", "--sizes", "B=8,S=8")
FILE_WRITERS = {
    "show --html": command("show", "HOME/build", "--html", "OUT"),
    "show --svg": command("show", "HOME/build", "--svg", "OUT"),
    "run --trace": command(*RUN, "--steps", "1", "--trace", "OUT"),
    "run --metrics": command(*RUN, "--steps", "1", "--metrics", "OUT"),
    "run --profile": command(*RUN, "--steps", "1", "--profile", "FOLDER"),
    "init --force": command("init", "HOME/gpt.py:GPT", *SMALL, "--force", "-o", "OUT"),
    "export one": command("export", "HOME/build", "HOME/checkpoint", "-o", "OUT"),
}
"""The commands that write a file."""
COMMANDS = {**WRITERS, **FILE_WRITERS}
NAMES = {"run --profile": "rank0.json.gz", "export one": "w.safetensors", "init --force": "gpt.parc"}
"""The names of files that a command cannot write by any other name."""


# ---- the comparison


def contents(top: Path) -> dict[str, str]:
    """Return what is below a folder: the text of each file, the target of each link, the mode of each folder."""
    found = {}
    for place, inner, names in os.walk(top):
        for name in [*inner, *names]:
            path = Path(place, name)
            mode = path.lstat().st_mode
            kind = f"link to {os.readlink(path)}" if stat.S_ISLNK(mode) else f"folder {mode:o}"
            found[str(path.relative_to(top))] = path.read_bytes().hex() if stat.S_ISREG(mode) else kind
    return found


@contextlib.contextmanager
def laid(place: Path, writer: str, row: Foreign) -> Iterator[None]:
    """Enter a block in which something of somebody is at a place."""
    if row.own:
        own = written_by(writer)
        shutil.copytree(own, place, symlinks=True) if own.is_dir() else shutil.copy(own, place)
    told = folders._mount_points
    try:
        row.make(place)
        if row.make is mount and not MOUNTS:
            folders._mount_points = lambda: [*told(), place]
        yield
    finally:
        folders._mount_points = told
        if MOUNTS and row.make is mount:
            subprocess.run(["umount", place], check=True)


@cache
def written_by(writer: str) -> Path:
    """Return what a command writes where nothing is."""
    place = Path(tempfile.mkdtemp(prefix="parc-own-")) / NAMES.get(writer, "place")
    said = COMMANDS[writer](place)
    assert not said, said
    return place


def faults(top: Path, writer: str, row: Foreign) -> list[str]:
    """Run a command over something of somebody below ``top``, and return what is wrong behind it."""
    place = top / NAMES.get(writer, "place")
    with laid(place, writer, row):
        before = contents(top)
        own = (
            {str(path) for path in contents(written_by(writer).parent)}
            if row.own and row.written is not False
            else set()
        )
        said = COMMANDS[writer](place)
        after = contents(top)
    real = "disk" if row.own and place.is_symlink() else place.name
    mine = {path for path in before if (place.name + path.removeprefix(real)) in own and path.startswith(real)}
    lost = [f"lost: {path}" for path, text in before.items() if path not in mine and after.get(path) != text]
    left = [f"left: {path}" for path in after.keys() - before.keys() if path.startswith(".")]
    if row.written and not writer.startswith("export"):  # which replaces nothing
        return lost + left + ([f"not written: {said}"] if said else [])
    over = [] if said or row.written is None else ["written over"]
    wordless = ["no way out"] if said and "help:" not in said and ";" not in said else []
    return lost + left + over + wordless


def full(top: Path, writer: str) -> list[str]:
    """Run a command over what it wrote before, with notes in it, on a disk that takes no more than a few bytes."""
    place = top / NAMES.get(writer, "place")
    with laid(place, writer, Foreign(notes if written_by(writer).is_dir() else unchanged, own=True)):
        before, limits, waits = contents(top), resource.getrlimit(resource.RLIMIT_FSIZE), train._WAITS_S
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
        train._WAITS_S = (0.01, 0.01, 0.01, 0.01)  # this process trains by itself
        try:
            said = COMMANDS[writer](place)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            train._WAITS_S = waits
        after = contents(top)
    changed = [f"changed: {path}" for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    return changed + ([] if said else ["nothing said"])


def table() -> int:
    """Run every command over every folder, and print the outcomes. Return the number of faults."""
    total = count = 0
    for writers, rows in ((WRITERS, FOLDERS), (FILE_WRITERS, FILES)):
        for writer in writers:
            full_disk = {} if writer in GO_ON else {"a full disk": None}
            for name, row in {**rows, **full_disk}.items():
                with tempfile.TemporaryDirectory() as top:
                    wrong = faults(Path(top), writer, row) if row is not None else full(Path(top), writer)
                total, count = total + len(wrong), count + 1
                print(f"{writer:14}{name:36}{'; '.join(wrong) or 'nothing lost'}")
    kinds = (
        f"{len(WRITERS)} commands over {len(FOLDERS)} kinds of folders, {len(FILE_WRITERS)} over {len(FILES)} of files"
    )
    print(f"{kinds}, {'real' if MOUNTS else 'simulated'} mount points: {count} cases, {total} faults")
    return total


if __name__ == "__main__":
    assert EXAMPLES.is_dir()
    if "--mounts" not in sys.argv and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0:
        os.execvp("unshare", ["unshare", "-rm", sys.executable, "-m", "tests.foreign_folders", "--mounts"])
    MOUNTS = "--mounts" in sys.argv
    sys.exit(table() > 0)
