"""ZeRO: what is stored in parts, what each level sends, and where messages start and are awaited."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest

from parc.checking.reports import report_of
from parc.compiler.program.program import Function, Program
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError, render

from ..checked_plans import checked, compiled, compiled_net
from ..draws import each_once

PLAN = """\
model "./gpt.py:GPT" (layers=2, width={width}, heads=2, vocab=24, length=4)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=24, S=4
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
mesh dp={dp}
shard tokens, targets [B/dp, _]
schedule microbatches {microbatches}
"""


@cache
def built(lines: str, width: int = 16, dp: int = 2, microbatches: int = 1) -> Compiled:
    """Build the model under a plan with more lines."""
    text = PLAN.format(width=width, dp=dp, microbatches=microbatches) + lines
    return compiled(text)


def told(main: Function) -> str:
    """Tell a main function in words, one for each message that starts or is awaited, and for each call."""
    numbers: dict[str, int] = {}
    words: list[str] = []
    for line in main.lines:
        message = dict(line.kwargs).get("message")
        if message is not None:
            numbers[line.made[0].name] = message
            words.append(f"{line.op.removeprefix('parc.')} {message}")
        elif line.op == "parc.wait":
            words.append(f"wait {numbers[line.uses[0]]}")
        elif line.calls_function:
            words.append(line.op)
    return ", ".join(word for at, word in enumerate(words) if not at or words[at - 1] != word)


def test_weights_are_gathered_a_block_ahead_and_gradients_summed_beside_the_next() -> None:
    programs = built("zero 3 over dp").built.programs
    assert told(programs["F"].main) == (
        "all_gather 1, all_gather 2, wait 1, part, all_gather 3, wait 2, blocks, all_gather 4, wait 3, blocks, wait 4, "
        "part_1"
    )
    assert told(programs["B"].main) == (
        "all_gather 1, all_gather 2, wait 1, part_1_backward, reduce_scatter 3, all_gather 4, wait 2, blocks_backward, "
        "wait 3, reduce_scatter 5, wait 4, blocks_backward, wait 5, reduce_scatter 6, part_backward, wait 6, "
        "reduce_scatter 7, wait 7"
    )


def test_both_levels_of_what_is_sent_hide() -> None:
    programs = built("zero 3 over dp\nnode 2\nhierarchical over dp", dp=4).built.programs
    assert told(programs["F"].main) == (
        "all_gather 1, wait 1, all_gather 2, all_gather 3, wait 3, all_gather 4, all_gather 5, wait 2, part, wait 5, "
        "all_gather 6, all_gather 7, wait 4, blocks, wait 7, all_gather 8, wait 6, blocks, wait 8, part_1"
    )
    assert told(programs["B"].main).endswith(
        "wait 7, blocks_backward, wait 8, wait 9, reduce_scatter 10, reduce_scatter 11, part_backward, wait 10, "
        "wait 11, reduce_scatter 12, reduce_scatter 13, wait 12, wait 13, reduce_scatter 14, wait 14"
    )


def test_prefetch_and_buckets_say_when_messages_start_and_how_large_they_are() -> None:
    late = built("zero 3 over dp\nprefetch 0").built.programs["F"].main
    assert told(late) == (
        "all_gather 1, wait 1, part, all_gather 2, wait 2, blocks, all_gather 3, wait 3, blocks, all_gather 4, wait 4, "
        "part_1"
    )
    early = told(built("zero 3 over dp\nprefetch 9").built.programs["F"].main)
    assert early.startswith("all_gather 1, all_gather 2, all_gather 3, all_gather 4, wait 1")
    small = built("zero 1 over dp\nbucket 1KB").built.programs["UNSHARD"].main
    sizes: dict[int, int] = {}
    for line in small.lines:
        if (message := dict(line.kwargs).get("message")) is not None:
            sizes[message] = sizes.get(message, 0) + 4 * math.prod(line.made[0].type.shape)
    assert len(sizes) > 10
    assert max(sizes.values()) == 4 * 64 * 16  # one tensor that is larger than a bucket


def test_units_that_a_line_names_are_gathered_and_summed_by_themselves() -> None:
    programs = built("zero 3 over dp unit blocks.*.attn, blocks.*.mlp").built.programs
    assert told(programs["F"].main).startswith(
        "all_gather 1, all_gather 2, all_gather 3, wait 1, part, all_gather 4, all_gather 5, wait 2, blocks, wait 3, "
        "blocks_attn, all_gather 6, all_gather 7, wait 4, blocks_1, wait 5, blocks_mlp, all_gather 8"
    )
    assert told(programs["B"].main).startswith(  # what is left of a block has no product for messages to hide beside
        "all_gather 1, all_gather 2, wait 1, part_1_backward, reduce_scatter 3, all_gather 4, all_gather 5, "
        "blocks_2_backward, wait 2, blocks_mlp_backward, wait 3, reduce_scatter 6"
    )
    modules = {line.origin.module for line in programs["F"].function("blocks_attn").lines}
    assert modules == {"blocks.*.attn", "blocks.*.attn.qkv", "blocks.*.attn.out"}


TAPERING = """
import torch
from torch import nn

class Step(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.wide = nn.Linear(before, after)

    def forward(self, x):
        return torch.tanh(self.wide(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = Step(8, 12), Step(12, 8), Step(8, 4), nn.Linear(4, 10)

    def forward(self, x):
        return self.out(self.c(self.b(self.a(x))))
"""


def test_units_of_like_modules_with_names_for_numbers_are_each_themselves(tmp_path: Path) -> None:
    checked(compiled_net(tmp_path, TAPERING, 'Net" ()', lines="zero 3 over dp unit *.wide\n"))


def test_a_line_that_does_nothing_names_no_units() -> None:
    plain = built("zero 1 over dp").built.programs["F"].text()
    assert built("zero 1 over dp unit blocks.*.mlp").built.programs["F"].text() != plain
    assert built("zero 0 over dp unit blocks.*.mlp").built.programs["F"].text() == built("").built.programs["F"].text()


def stored_bytes(program: Program) -> int:
    """Return the bytes of all parameters, whole, that a program is given."""
    return sum(4 * math.prod(value.type.shape) for value in program.main.bound("parameter").values())


@pytest.mark.parametrize(("dp", "microbatches"), each_once([2, 4], [1, 3]))
def test_each_level_sends_what_its_closed_form_says(dp: int, microbatches: int) -> None:
    """Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 7;
    with microbatches, level 2 sums and level 3 gathers in each of them."""
    sent = {}
    for level in range(4):
        report = report_of(built(f"zero {level} over dp", dp=dp, microbatches=microbatches))
        rows = [row for row in report["communication"] if row["carries"] in ("weights", "gradients")]
        sent[level] = sum(row["wire_bytes"] * row["count_per_step"] for row in rows)
    programs = built("zero 3 over dp", dp=dp).built.programs
    unit, again = (stored_bytes(programs[action]) * (dp - 1) // dp for action in "FB")
    assert sent[0] == sent[1] == 2 * unit
    assert sent[2] == (1 + microbatches) * unit
    assert again < unit  # backward needs no biases
    assert sent[3] == microbatches * (2 * unit + again)


def test_narrow_weights_travel_narrow_and_gradients_whole() -> None:
    rows = report_of(built("zero 1 over dp\nprecision bf16"))["communication"]
    types = {(row["carries"], row["dtype"]) for row in rows if row["carries"] in ("weights", "gradients")}
    assert types == {("weights", "bfloat16"), ("weights", "float32"), ("gradients", "float32")}
    for program in built("zero 0 over dp\nprecision bf16").built.programs.values():
        for function in program.functions[:-1]:
            casts = [line for line in function.lines if line.op == "aten._to_copy.default"]
            stored = {value.name for value in function.parameters if value.name.endswith("weight")}
            assert not [line for line in casts if stored.intersection(line.uses)], "a block rounds a weight"


def test_a_dim_that_does_not_divide_is_padded_and_a_small_one_stays_whole() -> None:
    report = report_of(built("zero 3 over dp", width=18, dp=4))
    padded = {row["value"]: (row["from"], row["to"]) for row in report["padding"]}
    assert padded["norm.weight"] == (18, 20)
    assert padded["blocks.0.attn.qkv.weight"] == (54, 56)  # where 18 columns would take a ninth, not a 27th
    assert "blocks.0.mlp.down.weight" not in padded  # its 72 columns divide
    whole = report_of(built("zero 3 over dp", width=2, dp=3))["stored_whole"]
    assert whole["norm.weight"] == 8


def message(lines: str) -> str:
    with pytest.raises(PlanError) as refusal:
        built(lines)
    return "\n".join(render(diagnostic) for diagnostic in refusal.value.diagnostics)


def test_mistakes_are_told_at_their_line() -> None:
    assert "there is no level 4 of ZeRO" in message("zero 4 over dp")
    twice = message("zero 1 over dp\nzero 3 over dp on blocks.0")
    assert "two lines shard `blocks.0.norm1.weight` over `dp`" in twice
    assert "first: level 1" in twice
    split = message("column blocks.*.mlp.up over dp\nzero 3 over dp")
    assert "`blocks.0.mlp.up.weight` is split over `dp` already" in split
    others = re.search(r"or all others: `(zero 3 over dp on .*)`", split)
    assert others is not None and "blocks.*.mlp.down" in others[1]
    compilation = built(f"column blocks.*.mlp.up over dp\n{others[1]}")
    parameters = compilation.build.manifest["parameters"]
    assert compilation.resolved.shardings.keys() == {name for name in parameters if ".mlp.up." not in name}
    unknown = message("zero 3 over dp unit blocks.*.mpl")
    assert "did you mean `blocks.*.mlp`" in unknown
    assert "the whole model is no unit" in message("zero 3 over dp unit **")
