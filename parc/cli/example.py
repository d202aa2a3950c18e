"""``parc example``: the plans that parc ships for a start, each with its model."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from parc.cli.terminal import say, text_table
from parc.compiler.build.output_files import write_whole
from parc.compiler.plan.include import MOST_PLAN_BYTES
from parc.compiler.plan.open_plan import read_open
from parc.grammar.bounded import read_bounded
from parc.grammar.nearest import did_you_mean, listed
from parc.grammar.source import Source


def example_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="copy this example; without it, list them")
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", type=Path, default=Path(), help="default: the current folder"
    )


def example_command(args: argparse.Namespace) -> int:
    """Print the list of examples, or copy an example's files, unless one of them exists with another text."""
    plans = _plans()
    if args.name is None:
        rows = [(name, text.partition("\n")[0].partition(" - ")[2]) for name, text in plans.items()]
        print(text_table(rows, ("example", "")))
        return 0
    name = args.name.removesuffix(".parc")
    if name not in plans:
        say(f"there is no example `{args.name}`; {did_you_mean(name, plans, f'there are {listed(plans)}')}")
        return 1
    texts = _texts(name, plans[name])
    changed = [file for file, text in texts.items() if _differs(args.folder / file, text)]
    if changed:
        say(f"{args.folder / changed[0]} is there and is not the example's; name another folder")
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        write_whole(args.folder / file, text)
        say(f"written {args.folder / file}")
    for text in _commands(args.folder, name, texts):
        say(text)
    return 0


_HOST_RANKS = 8  # processes that one machine may run


def _commands(folder: Path, name: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield the next commands: those that train a plan for one machine, or show a plan for many."""
    path = folder / f"{name}.parc"
    opened = read_open(Source(f"{name}.parc", texts[f"{name}.parc"], path=path), {})
    if opened.lets:
        yield f"next:  parc plan {path} --ranks 64 --cluster h100-sxm -o {folder / 'best.parc'}"
        return
    _, plan = opened.example()
    missing = sorted({package for text in texts.values() for package in _imported(text) if find_spec(package) is None})
    if missing:
        yield f"first: pip install {' '.join(missing)}"
    out, ranks = folder / name, plan.mesh.world
    yield f"next:  parc build {folder / f'{name}.parc'} -o {out}"
    if ranks > _HOST_RANKS:
        yield f"       parc show {out}        # on {ranks:,} ranks `parc run` trains it"
    else:
        yield f"       parc run {out} --steps 5        # {ranks} process{'es' * (ranks != 1)} on this machine"


def _imported(text: str) -> Iterator[str]:
    """Yield the packages that a model's file imports; a plan, which is not Python, imports none."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _plans() -> dict[str, str]:
    """Return the text of each plan, by name."""
    entries = sorted((files("parc") / "examples").iterdir(), key=lambda entry: entry.name)
    return {
        entry.name.removesuffix(".parc"): entry.read_text(encoding="utf-8")
        for entry in entries
        if entry.name.endswith(".parc")
    }


def _texts(name: str, text: str) -> Mapping[str, str]:
    """Return the files of an example: the plan, and the file of its model."""
    model = read_open(Source(f"{name}.parc", text), {}).example()[1].model.callable.partition(":")[0]
    return {f"{name}.parc": text, model: (files("parc") / "examples" / model).read_text(encoding="utf-8")}


def _differs(path: Path, text: str) -> bool:
    try:
        return read_bounded(path, MOST_PLAN_BYTES) != text.encode()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a folder, a pipe, something larger
        return True
