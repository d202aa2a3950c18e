"""Mistakes of new users, each with what parc says to it; ``python -m tests.mistakes`` prints docs/mistakes.md."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

import parc
from parc.cli import main
from parc.runtime.ranks.faults import RunError
from tests.runtime.tiny import DATA, ONE, PLAN, TENSOR, batch, build

GOOD = PLAN.strip() + "\n" + TENSOR.strip() + "\n"
WHOLE = GOOD.replace("tp=2", "tp=$tp")
SAMPLES = """import torch


def narrow(number):
    return {"tokens": torch.zeros(8, dtype=torch.int32), "targets": torch.zeros(8, dtype=torch.int64)}
"""


@dataclass(frozen=True)
class Mistake:
    """A mistake: a ``wrong`` text in place of a ``right`` one in a plan, words of a command, or a line of Python."""

    title: str
    right: str = ""
    wrong: str = ""
    words: str = "check gpt.parc"
    python: str = ""
    plan: str = GOOD
    without_gpu: bool = False


def line(title: str, right: str, wrong: str, words: str = "check gpt.parc", plan: str = GOOD) -> Mistake:
    """Return a mistake in a line of a plan."""
    return Mistake(title, right, wrong, words, plan=plan)


def command(title: str, words: str, plan: str = GOOD, without_gpu: bool = False) -> Mistake:
    """Return a mistake on the command line."""
    return Mistake(title, words=words, plan=plan, without_gpu=without_gpu)


def loop(title: str, python: str) -> Mistake:
    """Return a mistake in a training loop of one's own, which has a session and a batch."""
    return Mistake(title, python=python)


MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "A line of the plan": (
        line("a misspelt verb", "column    blocks.*.mlp.up", "colum blocks.*.mlp.up"),
        line("a line as YAML has it", "mesh      tp=2", "mesh: tp=2"),
        line("a line as Python has it", "sizes     B=8, S=8", "sizes = dict(B=8, S=8)"),
        line("quotes of a word processor", '"./gpt.py:GPT"', "“./gpt.py:GPT”"),
        line("a missing comma", "mesh      tp=2", "mesh dp=2 tp=2"),
        line("an axis that the mesh lacks", "embed, head over tp", "embed, head over pt"),
        line("a size that has no value", "sizes     B=8, S=8", "sizes B=8"),
        line("a type by another name", "tokens  int64", "tokens long"),
        line("a loss that does not exist", "cross_entropy(", "cross_entropie("),
        line("an argument without a space", "lr 1e-2", "lr=1e-2"),
        line("a schedule as other tools have it", "eps 1e-5", "eps 1e-5 schedule cosine"),
        line("an optimizer that does not exist", "optimizer adamw lr", "optimizer adamax2 lr"),
        line("no loss", "loss      cross_entropy(output, targets)\n", ""),
    ),
    "Sizes and ranks": (
        line("a batch that does not divide", "B=8, S=8", "B=6, S=8", plan=PLAN.strip() + DATA.replace("dp=2", "dp=4")),
        line("more microbatches than fit", "microbatches 2", "microbatches 3"),
        line("heads that the ranks do not divide", "mesh      tp=2", "mesh      tp=4"),
        line("sequences longer than the model's table", "S=8\n", "S=16\n", words="build gpt.parc"),
    ),
    "The model and its names": (
        line("a file that is not there", "./gpt.py:GPT", "./gtp.py:GPT"),
        line("a class that is not in the file", "./gpt.py:GPT", "./gpt.py:GTP"),
        line("a misspelt argument of the model", "width=16", "wdith=16"),
        line("an input that forward does not know", "input     tokens", "input     token"),
        line("a misspelt module", "blocks.*.mlp.up", "blocks.*.mpl.up"),
        line("a module without the path to it", "blocks.*.mlp.up", "mlp.up"),
        line("a path with a wrapper's name before it", "blocks.*.mlp.up", "model.blocks.*.mlp.up"),
        line("a pattern that matches nothing", "blocks.*.mlp.up", "block.*.mlp.up"),
        line("a pattern that matches too much", "vocab     embed, head over tp", "column ** over tp"),
        line("a module without a weight of its own", "column    blocks.*.mlp.up", "column blocks.*.mlp"),
    ),
    "Data": (
        line("files that are not there", '"*.py"', '"*.text"'),
        line("samples of another type", 'bytes "*.py"', '"./samples.py:narrow" ()'),
        line("no data", 'data      bytes "*.py"\n', "", words="run gpt.parc"),
    ),
    "The command line": (
        command("a misspelt command", "bulid gpt.parc"),
        command("a command of other tools", "train gpt.parc"),
        command("a misspelt option", "run gpt.parc --stepps 5"),
        command("an option of other tools", "run gpt.parc --lr 3e-4"),
        command("a value of the plan as an option", "check gpt.parc --tp 2", "let tp=2\n" + WHOLE),
        command("a misspelt name after `-D`", "check gpt.parc -D pt=2", "let tp=2\n" + WHOLE),
        command("a misspelt plan", "check gtp.parc"),
        command("a build where a plan is wanted", "check build"),
        command("a plan where a build is wanted", "verify gpt.parc"),
        command("another number of processes", "run build --nproc 3"),
        command("a GPU that is not there", "run build --device cuda", without_gpu=True),
        command("numbers to be tested on it", "verify build --device cuda", without_gpu=True),
        command("a checkpoint that is not there", "run build --resume checkpiont"),
        command("a folder that holds something else", "run alone --steps 1 --save texts"),
    ),
    "A training loop of one's own": (
        loop("a plan where a build is wanted", 'parc.load("gpt.parc")'),
        loop("a build of two ranks without torchrun", 'parc.load("build")'),
        loop("a batch without an input", 'session.step({"tokens": tokens})'),
        loop("a batch that is no dictionary", "session.step((tokens, targets))"),
        loop("tokens of another type", 'session.step({"tokens": tokens.int(), "targets": targets})'),
        loop("sequences of another length", 'session.step({"tokens": tokens[:, :4], "targets": targets[:, :4]})'),
        loop("gradients used twice", "result = session.gradients(); session.update(result); session.update(result)"),
        loop("a token beyond the vocabulary", 'session.step({"tokens": tokens + 256, "targets": targets})'),
    ),
}


def prepare(folder: Path) -> None:
    """Put the files into a folder that the mistakes are made in: a model, data, a build of two ranks, one of one."""
    build(folder, TENSOR)
    build(folder, ONE, name="alone")
    (folder / "build.parc").unlink()
    (folder / "alone.parc").unlink()
    (folder / "samples.py").write_text(SAMPLES)
    (folder / "texts").mkdir()
    (folder / "texts" / "notes.md").write_text("not a checkpoint\n")


def said(mistake: Mistake, folder: Path) -> str:
    """Make a mistake in a prepared folder, and return what parc says."""
    assert mistake.right in mistake.plan, mistake.title
    (folder / "gpt.parc").write_text(mistake.plan.replace(mistake.right, mistake.wrong, 1), encoding="utf-8")
    out = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(chdir(folder))
        stack.enter_context(patch.dict(os.environ, {"COLUMNS": "100"}))
        if mistake.without_gpu:
            stack.enter_context(patch.object(torch.cuda, "is_available", return_value=False))
        if mistake.python:
            return _raised(mistake.python)
        with redirect_stderr(out), redirect_stdout(out):
            assert main(mistake.words.split()) in (1, 2), mistake.title
    text = re.sub(r"^ +[~^]+\n", "", out.getvalue(), flags=re.MULTILINE)  # a traceback's marks are Python's own
    return text.replace(str(folder), "FOLDER").rstrip("\n")


def _raised(python: str) -> str:
    """Return the error of a line of a training loop, as Python prints its last lines."""
    with parc.load("alone", "cpu") as session:
        try:
            exec(python, {"parc": parc, "session": session, **batch(0)})
        except RunError as error:
            return f"parc.RunError: {error}"
    raise AssertionError(f"{python} is no mistake")


def sections(folder: Path) -> Iterator[str]:
    """Yield the parts of the page, from mistakes that are made in a prepared folder."""
    number = 0
    for kind, mistakes in MISTAKES.items():
        yield f"## {kind}"
        for mistake in mistakes:
            number += 1
            yield f"### {number}. {mistake.title[:1].upper()}{mistake.title[1:]}"
            yield _typed(mistake)
            yield f"```text\n{said(mistake, folder)}\n```"


def _typed(mistake: Mistake) -> str:
    """Return what a person typed, as text of the page."""
    if mistake.python:
        return f"`{mistake.python}`"
    if not mistake.right:
        return f"`parc {mistake.words}`"
    before, after = (
        re.sub(r" +", " ", next(iter(_lines_with(text, mistake)), "")) for text in (mistake.right, mistake.wrong)
    )
    return f"`{after}` in place of `{before}`" if after else f"No line `{before}`"


def _lines_with(text: str, mistake: Mistake) -> list[str]:
    """Return the lines of the plan around a text, right or wrong, in the order of the plan."""
    plan = mistake.plan.replace(mistake.right, text, 1)
    return [row for row in plan.splitlines() if text.strip() and text.strip() in row]


HEAD = """# Messages to typical mistakes

Generated by `python -m tests.mistakes`: these {count} mistakes were made, and this is what parc said. A message names
the code of the error (`parc explain P0104` says more), the place in the plan, the cause, and a way out. The model is
that of `parc example gpt`, made small.
"""


def page() -> str:
    """Return the text of docs/mistakes.md."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        parts = list(sections(folder))
    return "\n\n".join([HEAD.format(count=sum(map(len, MISTAKES.values()))).rstrip("\n"), *parts]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
