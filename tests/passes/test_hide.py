"""Exchanges that hide: the lines between the start of an all-to-all of tokens and its await."""

from __future__ import annotations

import re

import pytest

from parc.checking.reports import report_of
from parc.compiler.program.roles import Programs
from parc.compiler.program.text import parse_program
from parc.compiler.verify.communication import check_messages
from tests.checked_plans import compiled
from tests.draws import wide
from tests.planted_builds import ROOT
from tests.test_capacity import limited
from tests.test_experts import plan

ORDER = {
    ("Mixtral", "F"): "all_to_all pack wait exchange expert_linear expert_linear exchange",
    ("Mixtral", "B"): "exchange mm wait expert_linear expert_linear exchange expert_outer expert_outer mm wait",
    # three products of shared experts
    ("DeepseekV3", "F"): "all_to_all pack mm wait exchange mm wait expert_linear expert_linear exchange mm wait",
    ("DeepseekV3", "B"): """exchange mm mm mm mm wait expert_linear expert_linear
        exchange mm mm expert_outer expert_outer mm mm wait""",
}
SHOWN = {"all_to_all", "exchange", "wait", "pack", "mm", "expert_linear", "expert_outer"}
TRAVELS = ("all_to_all", "exchange", "wait")


def programs_of(family: str) -> Programs:
    return compiled(plan(family, mesh="dp=1, ep=2"), ROOT / "tests").built.programs


@pytest.mark.parametrize(("family", "action"), ORDER)
def test_products_that_need_no_exchange_stand_between_its_start_and_its_await(family: str, action: str) -> None:
    blocks = ([line.op.split(".")[1] for line in block.lines] for block in programs_of(family)[action].blocks)
    ops = [op for op in next(ops for ops in blocks if "exchange" in ops) if op in SHOWN]
    places = [at for at, op in enumerate(ops) if op in TRAVELS]
    assert ops[places[0] : places[-1] + 1] == ORDER[family, action].split()


def test_the_report_says_which_exchanges_hide() -> None:
    for family, hidden in (("Mixtral", [False, False, True, True]), ("DeepseekV3", [True] * 4)):
        rows = report_of(compiled(plan(family, mesh="dp=1, ep=2"), ROOT / "tests"))["communication"]
        assert [row["hidden"] for row in rows if row["op"] == "exchange"] == hidden


@pytest.mark.parametrize(
    ("family", "hidden"), [("Mixtral", [False, False, True, True]), wide("DeepseekV3", [True] * 4)]
)
def test_tokens_in_slots_hide_as_packed_rows_do(family: str, hidden: list[bool]) -> None:
    rows = report_of(compiled(limited(family, mesh="dp=1, ep=2"), ROOT / "tests"))["communication"]
    assert [row["hidden"] for row in rows if row["op"] == "all_to_all"] == hidden


def test_rows_that_are_read_on_their_way_are_refused() -> None:
    programs = programs_of("DeepseekV3")
    text = programs["F"].text()
    awaits = re.findall(r"\n    (\w+) = parc\.wait\((\w+)\)[^\n]*", text)
    assert awaits
    for name, coming in awaits:
        early = re.sub(rf"\n    {name} = parc\.wait[^\n]*", "", text)
        wrong = parse_program(re.sub(rf"\b{name}\b", coming, early))
        assert any("on its way" in fault.message for fault in check_messages({**programs, "F": wrong}, 1))
