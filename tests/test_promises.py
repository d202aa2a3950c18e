"""Promises of a plan: kept ones are silent, broken ones name the collective, its cause and its bytes, or the memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor, nn

from parc.build import build
from parc.checking.cheaper import PlanChange, most_memory
from parc.checking.limits import hold_promises
from parc.checking.reports import report_of
from parc.cli import main
from parc.compiler.analysis import products
from parc.compiler.plan.plan import read_plan
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import Diagnostic, PlanError, render
from parc.grammar.source import Source
from parc.grammar.syntax import size_text
from parc.report import memory_by_library, memory_of
from parc.report_words import fact_rows
from tests.checked_plans import compiled
from tests.runtime.tiny import BOTH, EXAMPLES, PLAN, TENSOR
from tests.two_layers import MODULE, TASK

SHALLOW = PLAN.replace("layers=2", "layers=1")


def broken(lines: str, placements: str = BOTH) -> list[Diagnostic]:
    """Return the diagnostics of promises that are not kept."""
    try:
        hold_promises(compiled(PLAN + placements + lines))
    except PlanError as error:
        return list(error.diagnostics)
    return []


KEPT = """
forbid any in blocks.*.{norm1,norm2}
forbid all_to_all in **
forbid all_gather in **
forbid any in blocks.** over dp
forbid reduce_scatter in blocks.*.nothing?
expect 4 all_reduce in blocks.*
expect 2 all_reduce in blocks.* during forward
expect 1 all_reduce in head during backward
expect 0 any in blocks.0.attn.qkv during forward
expect 1 any in blocks.0.attn.qkv.weight? during step
budget memory 1MB
"""


def test_promises_that_are_kept_are_silent() -> None:
    assert broken(KEPT) == []
    assert broken("expect 8 all_reduce in blocks.**\n") == []  # `blocks` itself is the outermost


def test_a_forbidden_collective_is_named_with_its_cause_and_bytes() -> None:
    (found,) = broken("forbid all_reduce in blocks.*.attn during forward\n")
    text = render(found)
    assert "error[P0402]: `all_reduce` over `tp` in `blocks.0.attn.out` is forbidden" in text
    assert "row       blocks.*.attn.out over tp" in text and "placed by this line" in text
    # 8 samples in 2 microbatches over dp=2, 8 tokens, 16 numbers of 4 bytes
    assert "at gpt.py:26, forward, 1.0 KiB a rank of float32" in text
    assert "the same holds for 1 more" in text and found.help


def test_a_gather_that_two_lines_cause_is_found() -> None:
    clash = TENSOR.replace("row       blocks.*.mlp.down", "column    blocks.*.mlp.down")
    found = next(found for found in broken("forbid all_gather in blocks.*\n", clash) if "mlp" in found.message)
    assert found.message == "`all_gather` over `tp` in `blocks.0.mlp.down` is forbidden"
    assert "column    blocks.*.mlp.down over tp" in render(found)


def test_another_number_than_expected_lists_what_is_there() -> None:
    (found,) = broken("expect 3 all_reduce in blocks.*\n")
    text = render(found)
    assert "error[P0403]: `blocks.0` has 4 `all_reduce`, not 3" in text
    assert text.count("= note: `all_reduce` over `tp` in `blocks.0.") == 4
    assert "the same holds for 1 more of the modules" in text
    (none,) = broken("expect 1 all_gather in **\n")
    assert none.message == "the model has 0 `all_gather`, not 1"


def test_words_of_promises_that_match_nothing_are_errors() -> None:
    codes = [found.code.name for found in broken("forbid any in bolcks.*\nexpect 1 any in blocks.7\n")]
    assert codes == ["P0104", "P0104"]


def test_a_budget_is_exact_and_names_what_is_large() -> None:
    compilation = compiled(PLAN + BOTH)
    peak = memory_of(compilation.build, compilation.plan, next(iter(compilation.build.roles.values()))).peak_bytes
    assert broken(f"budget memory {peak}B\n") == []
    (found,) = broken(f"budget memory {peak - 1}B\n")
    text = render(found)
    assert "error[P0401]: a rank needs" in text and "1 B more than the budget" in text
    assert "note: parameters " in text and "note: `embed.weight` f32[256/tp, 16], 8.0 KiB" in text


LETS = "let dp=2, tp=2, m=2, level=0\n" + SHALLOW.replace("microbatches 2", "microbatches $m")
LETS += BOTH.replace("dp=2, tp=2", "dp=$dp, tp=$tp") + "zero $level over dp\n"
STAGED = SHALLOW.replace("schedule  micro", "schedule 1f1b micro").replace("layers=1", "layers=2")
STAGED += "mesh pp=2\nstage balanced over pp\n"
LONG = SHALLOW.replace("B=8", "B=64")
CHANGES = {
    "a level of ZeRO": (SHALLOW + BOTH, 85, ["zero 1 over dp", "offload optimizer to cpu"]),
    "beside an evaluation": (SHALLOW + BOTH + "eval\n", 85,
                             ["zero 1 over dp", "offload optimizer to cpu"]),
    "values of lets": (LETS, 85, ["-D level=1", "offload optimizer to cpu"]),
    "several together": (LETS, 55, ["-D level=3 -D m=4 recompute blocks.* offload optimizer to cpu"]),
    "recomputation": (LONG + BOTH, 230, ["recompute blocks.*", "schedule microbatches 4"]),
    "a whole table": (SHALLOW + "mesh tp=2\n", 156,
                      ["schedule microbatches 8", "vocab embed over tp"]),
    "another axis": (STAGED, 68,
                     ["schedule 1f1b microbatches 8 mesh pp=4 recompute blocks.* offload optimizer to cpu"]),
}  # fmt: skip
"""A plan; a budget that it does not keep, in KiB; and changes with which it does."""


def changed(plan: str, words: list[str]) -> tuple[str, dict[str, int]]:
    """Return a plan with changes as a message words them, and its ``-D``."""
    defines = dict(word.split("=") for each in words if each.startswith("-D") for word in each.split() if "=" in word)
    for line in (each for each in words if not each.startswith("-D")):
        verb = line.split()[0]
        rest = [old for old in plan.splitlines() if verb in ("vocab", "offload") or old.split()[:1] != [verb]]
        plan = "\n".join([*rest, line, ""])
    return plan, {name: int(value) for name, value in defines.items()}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_named_for_a_budget_is_compiled_and_within_it(kind: str) -> None:
    plan, kib, expected = CHANGES[kind]
    with pytest.raises(PlanError) as error:
        hold_promises(compiled(f"{plan}budget memory {kib}KiB\n"))
    help_ = error.value.diagnostics[0].help
    assert help_.startswith("write `")
    named = [re.findall("`([^`]+)`", choice) for choice in help_.split("; or ")]
    sizes = re.findall(r"a rank then needs ([\d.]+) KiB", help_)
    assert [" ".join(words) for words in named] == expected and len(sizes) == len(named)
    for words, size in zip(named, sizes, strict=True):
        text, defines = changed(plan, words)
        assert most_memory(compiled(text, **defines)).peak_bytes <= min(kib, float(size) + 0.1) * 1024


def test_of_changes_that_are_not_enough_the_closest_is_named() -> None:
    with pytest.raises(PlanError) as error:
        hold_promises(compiled(f"{STAGED}budget memory 43KiB\n"))
    assert error.value.diagnostics[0].help == (
        "closest comes `schedule 1f1b microbatches 8` in place of line 11 and `mesh pp=4` in place of line 12 and "
        "`recompute blocks.*` and `offload optimizer to cpu`: a rank then needs 67.0 KiB on 4 ranks; add ranks to an "
        "axis that splits the largest of these, or place them over another axis"
    )


def test_of_two_changes_of_one_number_the_later_counts() -> None:
    """As of microbatches, of which an axis that splits sequences takes more."""
    plan = read_plan(Source("plan.parc", LETS.replace("$m", "4  # few")), {"m": "2"})
    start = plan.source.text.index("microbatches 4") + len("microbatches ")
    changes = [PlanChange(1, {(start, start + 1): f"{n}"}, defines={"tp": f"{n}"}) for n in (8, 16)]
    both = changes[0] + changes[1]
    assert both.saves == 2 and "microbatches 16  # few\n" in both.text(plan)
    assert re.fullmatch(r"`-D tp=16` and `schedule microbatches 16` in place of line \d+", both.words(plan))


def test_a_change_of_an_included_file_is_not_advised(tmp_path: Path) -> None:
    """Its lines are no lines of the plan: what is named can be written in the plan itself."""
    (tmp_path / "part.parc").write_text("zero 1 over dp\n")
    text = SHALLOW.replace("./gpt.py", str(EXAMPLES / "gpt.py")) + BOTH + 'include "./part.parc"\nbudget memory 60KiB\n'
    (tmp_path / "plan.parc").write_text(text)
    with pytest.raises(PlanError) as error:
        hold_promises(compile_plan(read_plan(tmp_path / "plan.parc"), tmp_path))
    assert "zero" not in error.value.diagnostics[0].help


def test_a_refusal_and_a_report_say_what_the_library_that_multiplies_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE_PRODUCT", 1)
    wide = SHALLOW.replace("width=16", "width=64").replace("B=8", "B=32")
    compilation = compiled(wide)
    (role,) = compilation.build.roles.values()
    usual, more = (
        memory.peak_bytes for memory in memory_by_library(compilation.build, compilation.plan, role).values()
    )
    assert more > 1.01 * usual
    row = dict(fact_rows(report_of(compilation)))["memory"]
    assert f"peak {size_text(more)} a rank (" in row
    assert row.endswith(f"), {size_text(usual)} where BLAS multiplies float32")
    with pytest.raises(PlanError, match=f"a rank needs {size_text(more)}") as caught:
        hold_promises(compiled(f"{wide}budget memory {usual}B\n"))
    note = f"this is on a CPU whose products of float32 are oneDNN's; else it needs {size_text(usual)}"
    assert f"note: {note}" in render(caught.value.diagnostics[0])
    narrow = report_of(compiled(f"{wide}precision bf16\n"))
    assert not any("peak_by_library" in row for row in narrow["memory"]), "they are the BLAS's"


class Tied(nn.Module):
    """A model whose table is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """``[b, s]`` to ``[b, s, 16]``."""
        made: Tensor = self.head(self.middle(self.embed(tokens)))
        return made


def test_sums_among_stages_are_collectives_too() -> None:
    model = 'model "tests.test_promises:Tied"'
    tied = "\n".join([model, *PLAN.replace("schedule  micro", "schedule gpipe micro").splitlines()[2:]])
    lines = "\nmesh pp=2\nstage before middle over pp\n"

    def told(promise: str) -> str:
        try:
            hold_promises(compiled(tied + lines + promise))
        except PlanError as error:
            return str(error)
        return ""

    assert told("expect 1 all_reduce in embed during step\nexpect 1 any in embed over pp during step\n") == ""
    assert "`all_reduce_among` over `pp` in `embed.weight` is forbidden" in told(
        "forbid any in embed over pp during step\n"
    )


NET_PLAN = f"""
let       n = 1
{TASK}mesh      tp=2
expect    $n all_reduce in 2
"""


def test_every_command_that_builds_holds_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(MODULE)
    plan = tmp_path / "plan.parc"
    plan.write_text(NET_PLAN)
    build(plan, tmp_path / "good", {})
    for words in (["check", str(plan)], ["build", str(plan), "-o", str(tmp_path / "bad")]):
        assert main([*words, "-D", "n=2"]) == 1
        assert "error[P0403]: `2` has 1 `all_reduce`, not 2" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()
    assert main(["verify", str(tmp_path / "good")]) == 0
    kept = tmp_path / "good" / "plan.parc"
    kept.write_text(kept.read_text().replace("expect    1", "expect    2"))
    assert main(["verify", str(tmp_path / "good")]) == 1
    assert "error[P0403]" in capsys.readouterr().err
