"""Recomputation: the same gradients to the bit, in one process and on gloo ranks, and fewer values kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import parc
from benchmarks.kept import COMMON, GPT, LLAMA, kept_by_parc
from parc.checking.certified import certificate_of
from parc.checking.checks import prove
from parc.checking.twins import subject_of
from parc.compiler.program.actions import BACKWARD
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError
from tests.checked_plans import compiled
from tests.draws import star
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import PLAN, batch, build
from tests.test_experts import plan

TENSOR = """\
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
"""
STAGES = "stage before blocks.1 over pp\n"
DROPS = PLAN.replace("dropout=0.1", "dropout=0.3")


def trained(*folders: str) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of each build after two steps."""
    ends = []
    for folder in folders:
        with parc.load(folder) as session:
            for step in range(2):
                session.step(batch(step))
            ends.append(session.state_dict())
    return ends


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Hold training with and without a line to each other."""
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """Training under lines that make nothing again, once for all that do."""

    @cache
    def train(lines: str) -> dict[str, torch.Tensor]:
        return trained(str(build(tmp_path_factory.mktemp("plain"), lines, DROPS)))[0]

    return train


KEEP = ("", " keep products, attention", " keep products", " keep random, gelu")


@pytest.mark.parametrize(("keep", "lines"), star(KEEP, ["", "precision bf16\n"]))
def test_dropout_is_replayed_to_the_bit(
    tmp_path: Path, plainly: Callable[[str], dict[str, torch.Tensor]], lines: str, keep: str
) -> None:
    (found,) = trained(str(build(tmp_path, f"{lines}recompute blocks.*{keep}\n", DROPS)))
    same_bits(plainly(lines), found)


@pytest.mark.parametrize(
    ("lines", "recompute"),
    [
        ("mesh pp=2\n" + STAGES, "recompute blocks.*\n"),
        ("mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp\nprecision bf16\n", "recompute blocks.0\n"),
    ],
)
def test_ranks_train_to_the_bit_as_without_it(tmp_path: Path, lines: str, recompute: str) -> None:
    text = DROPS.replace("schedule  microbatches 2", "schedule 1f1b microbatches 4") if "stage" in lines else DROPS
    folders = [str(build(tmp_path / name, lines + line, text)) for name, line in (("a", ""), ("b", recompute))]
    for one, other in run_ranks(trained, 2, *folders):
        same_bits(one, other)


def plan_of(model: str, lines: str = "") -> Compiled:
    return compiled(model + COMMON + lines)


def kept(model: str, lines: str) -> list[str]:
    return [name for name, *_ in kept_by_parc(plan_of(model, lines)) if not name.startswith("key_")]


def test_a_block_keeps_what_its_line_says() -> None:
    assert kept(LLAMA, "recompute model.layers.*\n") == ["x"]
    assert kept(GPT, "recompute blocks.[0..2:2]\n") == kept(GPT, "")
    assert kept(GPT, "recompute blocks.[1..2:2]\n") == ["x"]
    assert kept(GPT, "recompute blocks.* keep products\n") == [
        "x", "attn_qkv_addmm", "add", "mlp_up_addmm",
    ]  # fmt: skip
    assert "attn_attention" in kept(GPT, "recompute blocks.* keep products, attention\n")
    with_tensors = "mesh tp=2\n" + TENSOR
    both = [plan_of(GPT, f"{with_tensors}recompute blocks.*{keep}\n") for keep in ("", " keep collectives")]
    functions = [made.built.programs[BACKWARD].blocks for made in both]
    sums = [sum("reduce" in line.op for function in own for line in function.lines) for own in functions]
    assert sums[0] - sums[1] == 1  # the sum of the attention; that at the end of a block is not needed


def test_weights_are_gathered_once_for_a_backward_that_recomputes() -> None:
    def gathers(line: str) -> int:
        lines = "mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp\n" + line
        main = plan_of(GPT, lines).built.programs[BACKWARD].main
        names = [value for line in main.lines if line.op == "parc.all_gather" for value in line.uses]
        assert len(names) == len(set(names))
        return len(names)

    assert gathers("recompute blocks.*\n") - gathers("") == 3 * 3  # biases of products; nobody needs the last product's


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("recompute blocks.*.mlp keep attention\n", "P0150", "the operators `gelu`, `linear`"),
        ("recompute blocks.*.mlp.up keep products\n", "P0151", ""),
        ("recompute blocks.*.mlp.act\n", "P0104", ""),
    ],
)
def test_lines_without_a_meaning_are_refused(line: str, code: str, words: str) -> None:
    try:
        found = plan_of(GPT, line).resolved.warnings
    except PlanError as error:
        found = tuple(error.diagnostics)
    (said,) = (one for one in found if one.code.name == code)
    assert words in said.help


@pytest.mark.parametrize("keep", ["", " keep collectives"])
def test_exchanges_of_tokens_run_again(keep: str) -> None:
    compilation = compiled(plan(mesh="dp=1, ep=2", lines=f"recompute model.layers.*{keep}\n"), ROOT / "tests")
    assert not prove(compilation)
    lines = [line for function in compilation.built.programs[BACKWARD].blocks for line in function.lines]
    assert sum(line.op == "parc.exchange" for line in lines) == (2 if keep else 4)


def test_blocks_of_each_kind_are_certified_where_a_twin_has_fewer() -> None:
    model = PLAN.replace("dropout=0.1", "dropout=0.0") + "verify layers=1\n"
    large = "mesh dp=16\nshard tokens, targets [B/dp, _]\nrecompute blocks.[0..8]\n"
    deep = compiled(model.replace("layers=2", "layers=10").replace("B=8", "B=32") + large)
    assert subject_of(deep).text.startswith("the twin: layers=2, ")
    assert not certificate_of(deep.build).missing
