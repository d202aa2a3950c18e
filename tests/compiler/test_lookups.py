"""Positions beyond a table's last row are found before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parc.compiler.capture.capture import Captured, InputSpec, capture
from parc.compiler.capture.faults import CaptureError
from parc.compiler.initial.recipes import record


class Positions(nn.Module):
    def __init__(self, rows: int, first: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.first = nn.Embedding(32, 8), nn.Embedding(rows, 8), first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(self.first, self.first + ids.shape[1], device=ids.device)[None].expand_as(ids)
        return (self.tokens(ids) + self.positions(at + 1)).sum()


def captured(rows: int, first: int) -> Captured:
    made = record(lambda: Positions(rows, first), 0)
    inputs = {"ids": InputSpec(torch.int64, (2, 6))}
    return capture(made.module, made.mode, inputs, lambda model, given: model(given["ids"]), lambda out, _: out)


@pytest.mark.parametrize(("rows", "first", "fits"), [(7, 0, True), (6, 0, False), (10, 3, True), (9, 3, False)])
def test_a_position_beyond_the_last_row_of_its_table_is_refused(rows: int, first: int, fits: bool) -> None:
    """The largest position is ``first + 6``; numbers that inputs give are not known before a run."""
    if fits:
        assert captured(rows, first).placeholders("parameter")
        return
    with pytest.raises(CaptureError, match=rf"in `positions`: position {first + 6} .* a table of {rows} rows"):
        captured(rows, first)
