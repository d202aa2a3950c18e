"""Sums of gradients over ranks, begun as soon as a gradient is complete, beside the rest of backward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from parc.checking.checks import case_of
from parc.compiler.program.binding import Binding
from parc.compiling.compiled import Compiled
from parc.runtime.backends.moves import merge_adjacent
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
from parc.runtime.ranks.work import RankState, Work
from parc.runtime.step import Stepper
from tests.checked_plans import checked, compiled_net

_NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=bias) for bias in (False, True, False))
        if tied:
            self.c.weight = self.a.weight

    def forward(self, x):
        return self.b(self.c(self.a(x).tanh()).tanh())

"""


def net(folder: Path, arguments: str = "", stages: bool = False, lines: str = "") -> Compiled:
    """Compile the net, in two stages before its ``b`` if asked for, with the checks of a build."""
    compilation = compiled_net(folder, _NET, f'Net" ({arguments})', stages, lines)
    checked(compilation)
    return compilation


def sums(compilation: Compiled) -> list[list[str]]:
    """Return, by role, the action during which each sum of a step over the data ranks begins."""
    case = case_of(compilation)
    simulation, found = Simulation(case), []
    for stepper in simulation.steppers:
        begun: list[str] = []
        collective = stepper.backend.collective

        def noted(
            op: str, args: Sequence[Any], pieces: Sequence[torch.Tensor], spare: bool = False,
            stepper: Any = stepper, begun: list[str] = begun, collective: Any = collective,
        ) -> Any:  # fmt: skip
            if op == "parc.all_reduce" and pieces[0].dim() == 2:
                assert spare, "a copy of every gradient"
                begun.append(str(stepper.current))
            return collective(op, args, pieces, spare)

        stepper.backend.collective = noted  # type: ignore[method-assign]
        found.append(begun)
    microbatches = sum(action.kind == "F" and action.stage == 0 for action in simulation.steppers[0].actions)
    simulation.step(random_batch(case.reference, microbatches, torch.Generator().manual_seed(0)), 0)
    return found


def test_sums_begin_in_the_backward_that_completes_their_gradients(tmp_path: Path) -> None:
    assert sums(net(tmp_path)) == [["0B0"] * 3]


def test_sums_wait_for_the_last_microbatch(tmp_path: Path) -> None:
    assert sums(net(tmp_path, lines="schedule microbatches 2\n")) == [["0B1"] * 3]


def test_sums_of_a_stage_begin_in_its_last_backward(tmp_path: Path) -> None:
    found = sums(net(tmp_path, stages=True))
    assert found == [["0B1"] * 2, ["1W1"]], "the last stage sends first, and then makes gradients of weights"


def test_a_gradient_of_two_parts_is_summed_once_both_are_added(tmp_path: Path) -> None:
    assert sums(net(tmp_path, "tied=true")) == [["0B0", "0B0"]]


def test_gradients_that_travel_together_are_made_one_behind_the_other(tmp_path: Path) -> None:
    for microbatches in (1, 2):
        case = case_of(net(tmp_path, lines=f"schedule microbatches {microbatches}\n"))
        simulation, lengths = Simulation(case), list[list[int]]()
        (stepper,) = simulation.steppers
        message = stepper.backend.message

        def noted(
            op: str, args: Sequence[Any], pieces: Sequence[Sequence[torch.Tensor]], spare: Sequence[bool] = (),
            message: Any = message, lengths: list[list[int]] = lengths,
        ) -> Any:  # fmt: skip
            assert all(spare), "a copy of every gradient"
            for of_rank in zip(*pieces, strict=True):
                lengths.append([tensor.numel() for tensor in merge_adjacent(of_rank)])
            return message(op, args, pieces, spare)

        stepper.backend.message = noted  # type: ignore[method-assign]
        simulation.step(random_batch(case.reference, microbatches, torch.Generator().manual_seed(0)), 0)
        assert sorted(map(sorted, lengths)) == [[8, 3 * 8 * 8]] * 2, "the bias, and three weights in one piece"


def test_a_gradient_whose_sum_is_on_its_way_stays_where_it_arrives() -> None:
    here, coming, memory = Binding("gradient", "here"), Binding("gradient", "coming"), torch.zeros(4)
    work = Work(
        RankState({}), [], keep=True, totals={here: memory, coming: memory[2:]}, arriving={coming: lambda: None}
    )
    work.unshare_gradients([])
    assert work.totals[coming].data_ptr() == memory[2:].data_ptr()
    assert work.totals[here].untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()


def test_a_batch_that_requires_gradients_is_as_any_other(tmp_path: Path) -> None:
    simulation = Simulation(case := case_of(net(tmp_path)))
    batches = random_batch(case.reference, 1, torch.Generator().manual_seed(0))
    expected, found = [
        simulation.run(Stepper.gradients, [{name: x.requires_grad_(needs) for name, x in batches[0].items()}], 0)
        for needs in (False, True)
    ]
    for plain, other in zip(expected, found, strict=True):
        for name, gradient in plain.gradients.items():
            assert torch.equal(gradient, other.gradients[name]) and not other.gradients[name].requires_grad
