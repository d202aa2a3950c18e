"""Communication: counts and bytes by axis and phase are Megatron-LM's closed form, and no rank holds too much."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest

from parc.compiler.analysis.communication import communication_table
from parc.compiling.compiled import Compiled
from tests import checked_plans
from tests.draws import wide
from tests.runtime.tiny import EXAMPLES

LAYERS, WIDTH, BATCH, LENGTH, VOCAB = 1, 64, 8, 128, 512
F32, I64 = 4, 8

GPT, LLAMA = ("gpt.parc", 16, 2), ("llama.parc", BATCH, 1)
"""Plans, with their batch and its microbatches."""


@cache
def compiled(plan: str, dp: int, tp: int, layers: int = LAYERS) -> Compiled:
    """Compile an example's plan, with few layers."""
    text = (EXAMPLES / plan).read_text()
    return checked_plans.compiled(text, dp=dp, tp=tp, layers=layers, width=WIDTH)


def sent(compilation: Compiled) -> tuple[Counter[tuple[str, str, str]], Counter[tuple[str, str, str]]]:
    """Count a step's collectives by axis, phase and operator, and sum their bytes on one rank."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for row in communication_table(*compilation.build.roles.values()):
        key = row["axis"], row["phase"], row["op"].removeprefix("parc.")
        counts[key] += row["count_per_step"]
        sizes[key] += row["count_per_step"] * row["bytes"]
    return counts, sizes


def local_parameters(compilation: Compiled) -> list[int]:
    """Count the elements of each parameter on a rank."""
    values = list(compilation.build.programs["REDUCE"].main.bound("gradient").values())
    return [math.prod(value.type.local(compilation.mesh)) for value in values]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *((LLAMA, mesh) for mesh in [(2, 2), (1, 1), (2, 1), (1, 4)]),
        (GPT, (2, 2)),
        wide(LLAMA, (1, 2)),
        *(wide(GPT, mesh) for mesh in [(1, 1), (2, 1), (1, 4), (1, 2)]),
    ],
)
def test_a_step_is_megatrons_closed_form(model: tuple[str, int, int], mesh: tuple[int, int]) -> None:
    """Dropout, biases, a tied embedding and a fused qkv add nothing; each microbatch pays."""
    (plan, batch, microbatches), (dp, tp) = model, mesh
    compilation = compiled(plan, dp, tp)
    rows = batch // microbatches // dp * LENGTH
    activation = microbatches * rows * WIDTH * F32
    expected: dict[tuple[str, str, str], tuple[int, int]] = {}
    if tp > 1:
        # a layer: after the attention's output and after the MLP's; one for the embedding; the loss: the largest
        # logit of each row, then both its sums in one message
        inner, sums = 2 * LAYERS + 1, microbatches * rows * F32
        expected["tp", "forward", "all_reduce"] = (microbatches * (inner + 1), inner * activation + 2 * sums)
        expected["tp", "forward", "row_max"] = (microbatches, sums)
        # a layer: before its queries, keys and values, and before its MLP; one before the head
        expected["tp", "backward", "all_reduce"] = (microbatches * inner, inner * activation)
        expected["tp", "step", "all_reduce"] = (1, F32)  # the norm of the split gradients
    if dp > 1:
        parameters = local_parameters(compilation)
        assert plan != "gpt.parc" or len(parameters) == 12 * LAYERS + 4  # the tied matrix once
        expected["dp", "forward", "all_reduce"] = (1, I64)  # how many targets count
        expected["dp", "step", "all_reduce"] = (len(parameters) + 1, (sum(parameters) + 1) * F32)  # and the loss
    counts, sizes = sent(compilation)
    assert {key: (counts[key], sizes[key]) for key in counts} == expected


@pytest.mark.parametrize(("dp", "tp", "kv_heads"), [(1, 4, 2), (2, 2, 1), wide(2, 4, 1), wide(1, 8, 2)])
def test_few_key_heads_cost_one_sum_of_their_gradients_a_step(dp: int, tp: int, kv_heads: int) -> None:
    """As in Megatron-LM each group of ranks keeps a copy of its key head; nothing else changes."""
    text = (EXAMPLES / "llama.parc").read_text().replace("kv_heads=4", f"kv_heads={kv_heads}")
    counts, sizes = sent(checked_plans.compiled(text, dp=dp, tp=tp, layers=LAYERS, width=WIDTH))
    usual, usual_sizes = sent(compiled("llama.parc", dp, tp if tp < 8 else 4))
    inner = [key for key in usual if key[1] != "step"]
    assert {key: (counts[key], sizes[key]) for key in counts if key[1] != "step"} == {
        key: (usual[key], usual_sizes[key]) for key in inner
    }
    copies = ",".join(["dp"] * (dp > 1) + ["tp_1" if kv_heads > 1 else "tp"]), "step", "all_reduce"
    key_bytes = WIDTH // 8 * WIDTH * F32  # of one head, all that a rank holds
    assert (counts[copies], sizes[copies]) == (2 * LAYERS, 2 * LAYERS * key_bytes)


@pytest.mark.parametrize("layers", [1, wide(3)])
def test_a_layer_adds_two_and_two(layers: int) -> None:
    more, less = (sent(compiled("llama.parc", 2, 2, n))[0] for n in (layers + 1, layers))
    more.subtract(less)
    assert {key: count for key, count in more.items() if count} == {
        ("tp", "forward", "all_reduce"): 2,
        ("tp", "backward", "all_reduce"): 2,
        ("dp", "step", "all_reduce"): 9,
    }


@pytest.mark.parametrize("plan", ["llama.parc", "gpt.parc"])
def test_no_rank_holds_whole_logits_or_the_global_batch(plan: str) -> None:
    compilation = compiled(plan, 2, 2)
    captured = [value for line in compilation.build.reference.main.lines for value in line.results if value is not None]
    batch = {"llama.parc": BATCH, "gpt.parc": 8}[plan]
    vocab = {"llama.parc": VOCAB, "gpt.parc": 256}[plan]
    rows = batch * LENGTH
    assert any(value.type.shape[-1:] == (vocab,) and math.prod(value.type.shape) == rows * vocab for value in captured)
    seen = 0
    for program in compilation.build.programs.values():
        for function in program.functions:
            for value in function.values().values():
                whole, local = value.type.shape, value.type.local(compilation.mesh)
                if math.prod(whole) >= rows and set(whole[:1]) & {batch, rows}:
                    seen += 1
                    assert local[0] <= whole[0] // 2, f"{value.name} holds the global batch: {value.type}"
                if vocab in whole and math.prod(whole) >= rows * vocab:
                    assert math.prod(local) <= rows * vocab // 4, f"{value.name} holds whole logits: {value.type}"
    assert seen > 100
