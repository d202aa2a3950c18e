"""``recompute … fit``: the cheapest choice of what to make again with which a rank fits into a size."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parc.checking.checks import prove
from parc.checking.reports import report_of
from parc.checking.twins import find_twin
from parc.cli.build import report_text
from parc.compiler.analysis.flops import BlockCost, block_costs
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.fit import options_of
from parc.compiling.fitted import condensed
from parc.desugar import desugar
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.source import Source
from parc.report import memory_of
from tests.checked_plans import checked, compiled, simulated
from tests.draws import wide

PLAN = """\
model     "./gpt.py:GPT" (layers={layers}, width=16, heads=2, vocab=32, length=16, dropout=0.1)
verify    layers=4, length=16
input     tokens  int64 [B, S]
input     targets int64 [B, S]
sizes     B=8, S={length}
loss      cross_entropy(output, targets)
optimizer sgd lr 0.1
"""
DEEP = 6  # layers, of which a twin has fewer
STAGES = "mesh pp=2\nstage balanced over pp\nschedule 1f1b microbatches 2\n"


def plan(lines: str, layers: int = 2, length: str = "16") -> Compiled:
    return compiled(PLAN.format(layers=layers, length=length) + lines)


def peaks(compilation: Compiled) -> dict[str, int]:
    return {
        name: memory_of(compilation.build, compilation.plan, role).peak_bytes
        for name, role in compilation.build.roles.items()
    }


@cache
def deep_line(share: float) -> str:
    """Return the lines of two stages of a deep model, that fit into a size so far between the least and the most."""
    least, most = (max(peaks(plan(STAGES + line, DEEP)).values()) for line in ("recompute blocks.*\n", ""))
    return f"{STAGES}recompute blocks.* fit {int(least + share * (most - least))}B\n"


@cache
def deep_and_twin(share: float) -> tuple[Compiled, Compiled]:
    """Return a deep model that fits, and its twin, which has the same programs."""
    compilation = plan(deep_line(share), DEEP)
    twin = find_twin(compilation)
    return compilation, twin


def work(compilation: Compiled) -> int:
    return sum(cost.work for role in compilation.build.roles.values() for cost in block_costs(role).values())


def policies(compilation: Compiled) -> str:
    assert compilation.fitted is not None
    return "".join(map(str, compilation.fitted.policies.values()))


costs = st.lists(st.builds(BlockCost, st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3)


@given(st.lists(st.tuples(st.integers(1, 3), costs), min_size=1, max_size=2))
def test_no_other_choice_keeps_as_little_for_less_work(kinds: list[tuple[int, list[BlockCost]]]) -> None:
    options = options_of(kinds)
    for chosen in product(*(combinations_with_replacement(range(3), number) for number, _ in kinds)):
        own = [cost[policy] for (_, cost), policies in zip(kinds, chosen, strict=True) for policy in policies]
        total = sum(own, BlockCost())
        assert any(option.kept <= total.kept and option.work <= total.work for option in options)
    assert all(one.work < other.work and one.kept > other.kept for one, other in pairwise(options))


places = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(places, places, st.integers(1, 16), st.integers(0, 16))
def test_a_smaller_model_has_every_pair_of_neighbours_or_says_so(
    first: list[int], later: list[int], count: int, behind: int
) -> None:
    here = [(policy, False) for policy in first] + [(policy, True) for policy in later]
    wanted = set(pairwise(here))
    labels = [False] * count + [True] * behind
    chosen, enough = condensed(here, labels)
    assert len(chosen) == len(labels)
    there = [*zip(chosen, labels, strict=True)]
    assert not enough or (set(pairwise(there)) == wanted and there[0] == here[0] and there[-1] == here[-1])


def test_the_choice_is_the_cheapest_of_all_that_fit() -> None:
    """Every number of blocks by policy is compiled, and each size that lies between two peaks is fitted into."""
    keeps = {0: "", 1: " keep products", 2: ""}
    found = {}
    for chosen in combinations_with_replacement((2, 1, 0), 2):
        lines = [f"recompute blocks.{block}{keeps[policy]}\n" for block, policy in enumerate(chosen) if policy]
        compilation = plan("".join(lines))
        found[chosen] = peaks(compilation)["stage0"], work(compilation)
    sizes = sorted({peak for peak, _ in found.values()})
    for size in [sizes[0], sizes[len(sizes) // 2] - 1]:
        compilation = plan(f"recompute blocks.* fit {size}B\n")
        assert peaks(compilation)["stage0"] <= size
        assert work(compilation) == min(work for peak, work in found.values() if peak <= size)


@pytest.mark.parametrize("share", [0.3, wide(0.4)])
def test_every_stage_has_a_choice_of_its_own_and_a_twin_has_blocks_of_each_kind(share: float) -> None:
    made, twin = deep_and_twin(share)
    first, second = policies(made)[: DEEP // 2], policies(made)[DEEP // 2 :]
    assert sorted(first, reverse=True) == list(first)
    assert sum(map(int, first)) > sum(map(int, second))  # of which a microbatch less waits for backward
    assert len(policies(twin)) == 4 and not prove(made)
    simulated(twin)


def test_the_report_says_what_was_chosen_and_a_plan_in_primitives_has_it() -> None:
    least, most = (peaks(plan(line))["stage0"] for line in ("recompute blocks.*\n", ""))
    compilation = plan(f"recompute blocks.* fit {(least + most) // 2}B\n")
    (row,) = report_of(compilation)["recompute"]["roles"]
    assert row["peak_bytes"] == peaks(compilation)["stage0"] <= (least + most) // 2 < row["next_peak_bytes"]
    assert row["again"] == round(work(compilation) / work(plan("")) - 1, 4)
    assert f"of 2 blocks, {row['again']:+.1%} of a step's multiply-adds; with less, a rank would need" in report_text(
        report_of(compilation)
    )
    again = compiled(desugar(compilation))
    assert "fit" not in again.plan.text()
    assert {name: text.replace("plan:8", "") for name, text in again.build.texts.items() if "programs" in name} == {
        name: text.replace("plan:8", "") for name, text in compilation.build.texts.items() if "programs" in name
    }


def test_nothing_is_made_again_where_all_fits() -> None:
    """Norms and masks of dropout have no products, and take time all the same."""
    size = peaks(plan(""))["stage0"]
    assert policies(plan(f"recompute blocks.* fit {size}B\n")) == "00"


def test_sizes_of_a_range_make_again_what_the_largest_do() -> None:
    size = peaks(plan("recompute blocks.*\n"))["stage0"]
    compilation = plan(f"recompute blocks.* fit {size + 2000}B\n", length="8..16 by 8")
    assert "2" in policies(compilation)
    assert checked(compilation).report["checks"]["numbers"] == "tested"


def test_parts_of_blocks_are_made_again_where_a_line_names_these() -> None:
    most, least = (peaks(plan(line))["stage0"] for line in ("", "recompute blocks.*.mlp\n"))
    compilation = plan(f"recompute blocks.*.mlp fit {(most + least) // 2}B\n")
    assert {name for line in compilation.resolved.recompute for name in line.modules} <= {
        f"blocks.{n}.mlp" for n in range(2)
    }
    assert peaks(compilation)["stage0"] <= (most + least) // 2


def test_a_size_that_nothing_fits_into_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(PlanError) as refused:
        plan("recompute blocks.* fit 20KB\n")
    text = render(refused.value.diagnostics[0])
    assert "P0153" in text and "a rank needs at least" in text and "it holds parameters" in text
    least = text.split("write `fit ")[1].split("`")[0]
    assert plan(f"recompute blocks.* fit {least}\n").fitted is not None


def test_a_twin_gets_by_itself_the_blocks_that_show_every_choice() -> None:
    made, enough = deep_and_twin(0.3)
    text = made.plan.text().replace("verify    layers=4", "verify    layers=1")
    assert text != made.plan.text()
    twin = find_twin(replace(made, plan=read_plan(Source("plan.parc", text))))
    assert twin.overrides["layers"] == 4
    assert policies(twin) == policies(enough)
