"""Sums of gradients as lines of the last microbatch's backward, awaited by REDUCE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parc.compiler.layout.collectives import WAIT
from parc.compiler.program.plain import EarlyFault, in_reduce
from parc.compiler.program.roles import SINGLE, Programs

from ..checked_plans import checked, compiled_net
from ..planted_edits import reading, with_function
from .test_zero import built, told


def own(lines: str, microbatches: int = 1) -> Programs:
    """Return the programs of a build's one role."""
    return built(lines, microbatches=microbatches).build.roles[SINGLE].programs


def test_a_blocks_gradients_are_summed_beside_the_next_block_and_awaited_by_reduce() -> None:
    programs = own("")
    last = programs["B"].last
    assert last is not None
    assert told(last) == (
        "part_1_backward, all_reduce 1, blocks_backward, all_reduce 2, blocks_backward, all_reduce 3, part_backward, "
        "all_reduce 4"
    )
    assert told(programs["B"].main) == "part_1_backward, blocks_backward, part_backward"
    ops = [line.op for line in programs["REDUCE"].main.lines]
    assert "parc.all_reduce" not in ops
    gradients = programs["REDUCE"].main.bound("gradient")
    assert ops.count(WAIT) == len(gradients)
    waits = [at for at, op in enumerate(ops) if op == WAIT]
    assert [ops[at + 1] for at in waits] == ["parc.square_sum.default"] * len(waits)


def test_sums_are_of_all_microbatches_and_split_where_zero_splits_them() -> None:
    programs = own("zero 1 over dp", microbatches=3)
    last = programs["B"].last
    assert last is not None
    assert "reduce_scatter 2, blocks_backward" in told(last)
    so_far = [value for value in last.parameters if value.kind == "gradient"]
    adds = [line for line in last.lines if line.op == "aten.add.Tensor" and line.args[0].name.endswith("_so_far")]
    assert len(adds) == len(so_far) == len(programs["REDUCE"].main.bound("gradient"))
    whole = in_reduce(programs)
    assert whole["B"].last is None and not whole["B"].main.bound("gradient")
    assert [line.op for line in whole["REDUCE"].main.lines].count("parc.reduce_scatter") == len(so_far)


def test_what_zero_2_sums_in_every_microbatch_stays_there() -> None:
    programs = own("zero 2 over dp", microbatches=2)
    assert programs["B"].last is None
    assert "reduce_scatter" in told(programs["B"].main)


def test_a_last_backward_that_does_other_work_is_no_build() -> None:
    programs = own("")
    last = programs["B"].last
    assert last is not None
    call = next(at for at, line in enumerate(last.lines) if line.op == "blocks_backward")
    given = last.lines[call].args[0].name
    other = next(value.name for value in last.parameters if value.kind == "saved" and value.name != given)
    with pytest.raises(EarlyFault, match="does other work than `backward`"):
        in_reduce(with_function(programs, "B", reading(last, given, other, call)))


_MADE = """
import torch
from torch import nn


class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(8, 8))

    def forward(self):
        return self.p.tanh()


class Used(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, made):
        return x @ (self.p + made)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Made(), Used()])

    def forward(self, x):
        return self.layers[1](x, self.layers[0]())


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.forward_last = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        return self.forward_last[0](x).square().mean()


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.p = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.a(x).mean(0) + self.p
"""


@pytest.mark.parametrize(("model", "lines"), [
    ("Shared", ""),  # the gradient of one weight is what the block before reads
    ("Named", ""),
    ("Bare", "schedule microbatches 2\n"),  # every microbatch has the same tensor for a gradient
])  # fmt: skip
def test_sums_write_over_nothing_that_is_read_and_add_each_microbatch(tmp_path: Path, model: str, lines: str) -> None:
    checked(compiled_net(tmp_path, _MADE, f'{model}" ()', lines=lines))


def test_a_sum_of_one_stage_alone_is_refused_where_another_has_a_part() -> None:
    programs = own("", microbatches=2)
    last = programs["B"].last
    assert last is not None
    other = replace(programs["B"], functions=(*programs["B"].blocks, programs["B"].main))
    with pytest.raises(EarlyFault, match="of which another stage makes a part"):
        in_reduce({"0B": other, "1B": programs["B"], "REDUCE": programs["REDUCE"]})


def test_a_residual_that_reduce_returns_beside_backward_is_no_build() -> None:
    programs = own("compress gradients over dp using int8")
    reduce, last = programs["REDUCE"].main, programs["B"].last
    assert last is not None
    left = next(key for key, _ in last.returns if key.kind == "state")
    twice = replace(reduce, returns=(*reduce.returns, (left, reduce.parameters[0].name)))
    with pytest.raises(EarlyFault, match=f"returns `{left}`, and so does REDUCE"):
        in_reduce(with_function(programs, "REDUCE", twice))
