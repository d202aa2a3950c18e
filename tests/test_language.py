"""The literate specs of tests/language, the examples of error codes, and the generated pages of docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from parc.cli.usage import PLAN_LINES
from parc.compiler.plan.directive import TRAINERS
from parc.compiler.plan.directives import language_page
from parc.compiler.plan.directives.optimizer import Optimizer
from parc.compiler.plan.plan import read_plan
from parc.compiler.resolve.placements import Resolved, resolve
from parc.grammar import codes
from parc.grammar.codes import MISSING_STATEMENT, code_pages, errors_page
from parc.grammar.diagnostics import Code, Diagnostic, PlanError, render
from parc.grammar.source import Source
from tests.gpt_names import gpt_names

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = re.compile(r"# (?:error|warning): (P\d{4})")
EXAMPLES = {name: page.example for name, page in code_pages().items() if page.language == "parc"}
"""The plans that produce a code, by its name."""
SPECS = sorted((HERE / "language").glob("*.md"))

# What a block of a spec leaves out is added after it, so that its line numbers stay.
SUPPLIED = {
    "model": 'model "gpt:GPT"',
    "input": "input tokens int64 [B, S]\ninput targets int64 [B, S]",
    "sizes": "sizes B=4, S=8",
    "loss": "loss cross_entropy(output, targets)",
    "optimizer": "optimizer sgd lr 0.1",
}


COMMANDS = {
    "language.md": "run `python -m parc.compiler.plan.directives > docs/language.md`",
    "errors.md": "run `python -m parc.grammar.codes > docs/errors.md`",
}


@dataclass(frozen=True)
class Block:
    """One ```parc block of a spec: its text, and the codes that its marks expect, as (line, code)."""

    name: str
    text: str
    expected: frozenset[tuple[int, str]]
    rendered: str | None  # the ```message block that follows it
    seeds: str | None  # the ```seeds block that follows it


def check(text: str, name: str = "plan.parc") -> tuple[tuple[Diagnostic, ...], Resolved | None]:
    """Return every diagnostic of a plan on the small GPT; a first line ``# -D a=1 b=2`` gives definitions, and
    with ``# for inference`` no loss and no optimizer are added."""
    first = text.split("\n", 1)[0]
    defines = dict(re.findall(r"(\w+)=(\S+)", first)) if first.startswith("# -D ") else {}
    left_out = TRAINERS if first == "# for inference" else ()
    supplied = [line for verb, line in SUPPLIED.items()
                if verb not in left_out and not re.search(rf"^\s*{verb}\b", text, re.MULTILINE)]  # fmt: skip
    try:
        plan = read_plan(Source(name, "\n".join([text.rstrip("\n"), *supplied])), defines)
        resolved = resolve(plan, gpt_names())
    except PlanError as error:
        return error.diagnostics, None
    return (*plan.warnings, *resolved.warnings), resolved


def blocks() -> Iterator[Block]:
    for path in SPECS:
        fences = re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for at, (kind, text) in enumerate(fences):
            if kind != "parc":
                continue
            after = dict(fences[at + 1 : at + 2])
            marks = enumerate(text.split("\n"), start=1)
            expected = frozenset((number, code) for number, line in marks for code in MARK.findall(line))
            yield Block(f"{path.stem}-{at}", text, expected, after.get("message"), after.get("seeds"))


BLOCKS = list(blocks())


@pytest.mark.parametrize("block", BLOCKS, ids=[block.name for block in BLOCKS])
def test_spec(block: Block) -> None:
    plain = re.sub(r" *# (error|warning): P.*", "", block.text)
    diagnostics, resolved = check(plain, "spec.parc")
    found = {(found.primary.span.root.line if found.primary else 0, found.code.name) for found in diagnostics}
    assert found == block.expected, "\n".join(map(render, diagnostics))
    if block.rendered is not None:
        assert "\n".join(map(render, diagnostics)) + "\n" == block.rendered
    if block.seeds is not None:
        assert resolved is not None
        lines = (f"{s.value} {s.axis} {'whole' if s.dim is None else f'S({s.dim},{s.outer})'}" for s in resolved.seeds)
        assert "\n".join(lines) + "\n" == block.seeds


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_of_a_code_produces_it(code: str) -> None:
    diagnostics, _ = check(EXAMPLES[code])
    assert code in {diagnostic.code.name for diagnostic in diagnostics}, "\n".join(map(render, diagnostics))


def test_every_message_has_a_way_out() -> None:
    for example in EXAMPLES.values():
        for found in check(example)[0]:
            assert found.help
            assert found.primary is not None or found.code is MISSING_STATEMENT
            assert not found.message.endswith(".")


def test_what_is_said_for_words_of_other_tools_is_of_the_language() -> None:
    for argument in Optimizer.ELSEWHERE.values():
        rate = "" if argument.startswith("lr ") else "lr 0.1 "
        assert not [found for found in check(f"steps 900\noptimizer adamw {rate}{argument}")[0] if found.is_error]
    for line in {*PLAN_LINES.values()}:
        mesh = "" if line.startswith("mesh") else "mesh dp=2\n"
        mesh += "" if line.startswith("sizes") else "sizes B=16, S=8\n"
        text = f"{mesh}steps 900\nshard tokens, targets [B/dp, _]\n{line}\n"
        assert not [found for found in check(text)[0] if found.is_error], line
    for wrong, help_ in {
        "lr=3e-4": "write `lr 3e-4`, without `=`",
        "lr 3e-4 weight_decay=0.1": "write `weight_decay 0.1`, without `=`",
        "lr 3e-4 betas 0.9 0.95": "a comma joins items: `betas 0.9, 0.95`",
        "lr 3e-4 schedule cosine": "write `lr cosine 3e-4 warmup 100 to 3e-5`",
    }.items():
        (found,) = check(f"optimizer adamw {wrong}")[0]
        assert found.help == help_


def test_each_code_has_one_name_and_one_page() -> None:
    text = (ROOT / "grammar" / "errors.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (P\d+): ", text, re.M) == [*code_pages()] == sorted(code_pages())
    assert sorted(code.name for code in vars(codes).values() if isinstance(code, Code)) == [*code_pages()]


def test_the_specs_cover_every_code_of_the_language() -> None:
    marked = {code for block in BLOCKS for _, code in block.expected}
    assert EXAMPLES.keys() - marked == set()


def test_messages_look_as_they_did() -> None:
    """To accept a change of messages, delete the golden file and run this once."""
    texts = ["\n".join([f"# {name}", *map(render, check(example)[0])]) for name, example in EXAMPLES.items()]
    golden = HERE / "golden" / "messages.txt"
    if not golden.exists():
        golden.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        pytest.fail(f"{golden.name} was missing and is written anew: look at it and run again")
    assert golden.read_text(encoding="utf-8") == "\n\n".join(texts) + "\n"


@pytest.mark.parametrize("rows", ["vocab embed, head over tp", "shard embed.weight [(2 h/tp d), _]"])
def test_a_dim_without_entries_is_not_split(rows: str) -> None:
    plan = read_plan(Source("plan.parc", "\n".join([*SUPPLIED.values(), "mesh tp=2", rows])))
    with pytest.raises(PlanError, match="has no entries"):
        resolve(plan, gpt_names(vocab=0))


@pytest.mark.parametrize("page", ["language.md", "errors.md"])
def test_generated_pages_are_up_to_date(page: str) -> None:
    text = language_page() if page == "language.md" else errors_page()
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == text, COMMANDS[page]


def test_reading_a_plan_does_not_import_torch() -> None:
    import subprocess
    import sys

    program = "import sys, parc.compiler.resolve.placements; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
