"""The pages of the documentation as their fenced blocks, and what can be asked of each kind of block.

A block may have a title, as ```` ```python title="words.py" ````: the file that it is.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import parc
from parc.cli import main, parse_words
from parc.compiler.plan.directive import TRAINERS
from parc.compiler.plan.open_plan import read_open
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.source import Source
from parc.runtime.ranks.work import StepReport
from parc.runtime.session.session import Session

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
GENERATED = ("docs/errors.md",)  # its examples are mistakes: tests/test_language.py has them
PAGES = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if str(file.relative_to(ROOT)) not in GENERATED
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page and line, its language (`""` without one), its title and its text."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Return the words of each command of a shell block, without comments; `\\` goes on in the next line. Of a
        script, which has a title, those that begin with ``parc``."""
        lines = re.sub(r"\\\n\s*", " ", self.text).splitlines()
        found = [words for line in lines if (words := shlex.split(line, comments=True))]
        if not self.title:
            return found
        own = (words[words.index("parc") :] for words in found if "parc" in words)
        return [[re.sub(r"\$\w+", "1", word) for word in words if word != "${resume[@]}"] for words in own]


def text_of(page: str) -> str:
    """Return the text of a page, named from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in its order."""
    text, found = text_of(page), []
    for fence in FENCE.finditer(text):
        indent, info, inside = fence.groups()
        title = re.search(r'title="([^"]*)"', info)
        inside = re.sub(rf"^{indent}", "", inside, flags=re.MULTILINE) if indent else inside
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, info.partition(" ")[0], title[1] if title else "", inside))
    return found


# ---- blocks that are read

AXES = ("dp", "pp", "tp", "ep", "cp")
SUPPLIED = {
    "model": 'model "gpt:GPT"',
    "input": "input tokens int64 [B, S]\ninput targets int64 [B, S]",
    "sizes": "sizes B=8, S=8",
    "loss": "loss cross_entropy(output, targets)",
    "optimizer": "optimizer sgd lr 0.1",
    "schedule": "schedule 1f1b microbatches 2",
}
"""The lines that a fragment of a plan leaves out."""


def plan_faults(block: Block) -> str:
    """Return what is wrong with a plan, or with a fragment of one; names of modules are not looked up."""
    text = block.text
    verbs = set(re.findall(r"^\s*(\w+)", text, re.MULTILINE))
    used = {axis for axis in AXES if re.search(rf"(over|/|,|as) ?{axis}\b", text)}
    if block.title and verbs.isdisjoint(TRAINERS):  # a whole plan, for inference
        verbs.update(TRAINERS)
    lines = [line for verb, line in SUPPLIED.items() if verb not in verbs and (verb != "schedule" or "stage" in verbs)]
    if "mesh" not in verbs and "include" not in verbs and used:
        lines.append("mesh " + ", ".join(f"{axis}=2" for axis in AXES if axis in used))
    free = set(re.findall(r"\$(\w+)", text)) - set(re.findall(r"(\w+)=", text))
    lines += [f"let {name}=2" for name in sorted(free)]
    try:
        read_open(Source(block.place, "\n".join([text.rstrip("\n"), *lines])), {}).example()
    except PlanError as error:
        return "\n".join(render(diagnostic) for diagnostic in error.diagnostics if diagnostic.is_error)
    return ""


KNOWN: Mapping[str, object] = {"parc": parc, "session": Session, "report": StepReport}
"""Names that mean the same in every page."""
IMPORTED = ("torch", "safetensors", "parc")
"""Packages that pages import names from."""


def python_faults(block: Block) -> Iterator[str]:
    """Yield what is wrong with Python code: its syntax, names that parc or an imported module lacks, arguments that a
    call does not take."""
    tree = ast.parse(block.text, block.place)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str() as module) if module.partition(".")[0] in IMPORTED:
                there = importlib.import_module(module)
                yield from (f"{block.place}: {module} has no `{one.name}`" for one in node.names
                            if not hasattr(there, one.name))  # fmt: skip
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if name in KNOWN:
                member = getattr(KNOWN[name], attribute, None)
                if callable(member) and (wrong := _unlike(member, node, name == "session")):
                    yield f"{block.place}: {name}.{attribute}: {wrong}"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in KNOWN:
                if attribute not in _attributes(KNOWN[name]):
                    yield f"{block.place}: `{name}` has no `{attribute}`"


def _attributes(known: object) -> set[str]:
    own = set(re.findall(r"self\.(\w+)", inspect.getsource(known))) if inspect.isclass(known) else set()
    return own | set(dir(known)) | set(getattr(known, "__annotations__", {}))


def _unlike(member: object, call: ast.Call, bound: bool) -> str:
    assert callable(member)
    if any(isinstance(word, ast.Starred) for word in call.args):
        return ""
    places = [None, *call.args] if bound else list(call.args)
    try:
        inspect.signature(member).bind(*places, **{word.arg: None for word in call.keywords if word.arg})
    except TypeError as error:
        return str(error)
    return ""


def command_faults(words: Sequence[str]) -> str:
    """Return what is wrong with a command that is read alone."""
    if words[0] == "parc":
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                parse_words(words[1:])
            except SystemExit as stop:
                return said.getvalue() if stop.code else ""
        return ""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"there is no `make {unknown[0]}`" if unknown else ""
    return "" if words[0] in OTHERS else f"`{words[0]}` is no command that a page may have: see OTHERS"


OTHERS = {
    "pip": "it would change the environment of the tests",
    "source": "it enters an environment",
    "torchrun": "it starts a Python for each rank; the loop is run with one",
    "srun": "there is no cluster",
    "sbatch": "there is no cluster",
    "python": "it starts a new Python",
    "git": "it needs a network",
    "cd": "the test is in that folder",
}
"""Commands that no test runs, with the reason."""

# ---- blocks that are run

ONLY_READ = {
    "parc build words.parc -o build/wide -D dp=1 -D tp=4": "tests/cli/test_run.py goes on under another plan",
    "parc run build/wide --resume checkpoint --steps 12": "tests/runtime/test_shards.py goes on under many",
    "parc verify build/gpt": "tests/cli/test_altered.py verifies builds, and broken ones",
}
"""Commands of followed pages that take seconds, and the tests that do the same."""

MEASURED = re.compile(r"error \S+|^seconds.*|(?<=[a-z])_\d+\b|(?<=version )\d+\.[0-9a-f]{6}\b", re.MULTILINE)
"""The parts that another machine, torch or checker prints otherwise: rounding, seconds, numbers in names of values, and
the hash in the checker's version."""


def walk(page: str, python: bool = True) -> Iterator[str]:
    """Do in the current folder what a page says, in its order: write its files, run its commands, and its ``python``.
    Yield what goes wrong."""
    said, names = "", {"__name__": "__page__"}
    for block in blocks_of(page):
        if block.title and not Path(block.title).exists():
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.title and block.text != (there := Path(block.title).read_text(encoding="utf-8")):
            yield f"{block.place}: the commands before it wrote another {block.title}\n{there}"
        elif block.language == "sh":
            said = ""
            for words in block.commands():
                if words[0] != "parc" or shlex.join(words) in ONLY_READ:
                    continue
                ended, printed = _ran(words[1:])
                said += printed
                if ended:
                    yield f"{block.place}: {shlex.join(words)} ended with {ended}\n{printed}"
        elif block.language == "python" and python:
            exec(compile(block.text, block.place, "exec"), names)
        elif block.language == "text" and said:
            shown, printed = (MEASURED.sub("", text.replace("\n    ", "\n")) for text in (block.text, said))
            if shown.strip() not in printed:
                yield f"{block.place}: this is not what the commands before it print\n{said}"


def _ran(words: Sequence[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        ended = main(words)
    return ended, said.getvalue()
