"""Positions beyond a table's last row are found before anything runs."""

from __future__ import annotations

from collections.abc import Callable

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


class Unpadded(nn.Module):
    """A model that counts the tokens that are not padding, as RoBERTa does, or the parts of a sequence."""

    def __init__(self, rows: int, parts: bool) -> None:
        super().__init__()
        self.positions, self.parts = nn.Embedding(rows, 8), parts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids.eq(5).int() if self.parts else ids.ne(1).int()
        at = (torch.cumsum(mask, dim=1).type_as(mask) + 0) * mask
        return self.positions(at.long() + 1).sum()


def captured(make: Callable[[], nn.Module]) -> Captured:
    made = record(make, 0)
    inputs = {"ids": InputSpec(torch.int64, (2, 6))}
    return capture(made.module, made.mode, inputs, lambda model, given: model(given["ids"]), lambda out, _: out)


@pytest.mark.parametrize(("rows", "first", "fits"), [(7, 0, True), (6, 0, False), (10, 3, True), (9, 3, False)])
def test_a_position_beyond_the_last_row_of_its_table_is_refused(rows: int, first: int, fits: bool) -> None:
    """The largest position is ``first + 6``; numbers that inputs give are not known before a run."""
    if fits:
        assert captured(lambda: Positions(rows, first)).placeholders("parameter")
        return
    with pytest.raises(CaptureError, match=rf"in `positions`: position {first + 6} .* a table of {rows} rows"):
        captured(lambda: Positions(rows, first))


@pytest.mark.parametrize(("rows", "parts", "fits"), [(8, False, True), (7, False, False), (3, True, True)])
def test_positions_of_tokens_that_are_not_padding_are_followed(rows: int, parts: bool, fits: bool) -> None:
    """Six tokens without padding have positions 2 to 7 for RoBERTa, which leaves one free; there may be fewer parts."""
    if fits:
        assert captured(lambda: Unpadded(rows, parts)).placeholders("parameter")
        return
    with pytest.raises(CaptureError, match=rf"in `positions`: position 7 .* a table of {rows} rows"):
        captured(lambda: Unpadded(rows, parts))
