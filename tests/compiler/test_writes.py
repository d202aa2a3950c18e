"""Random models that write into values and their parts: the form without writes has their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from parc.compiler.capture import functional as composites
from parc.compiler.capture.functional import functional
from parc.compiler.torch_private import quiet
from tests.draws import wide

VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x,
    lambda x: x[1:],
    lambda x: x[:, :2],
    lambda x: x[0],
    lambda x: x[:, 1],
    lambda x: x.t(),
    lambda x: x.flip(0),  # a copy
    lambda x: x[1:3][:, 1:],
)


class _Writes(nn.Module):
    """A model of 4 x 4 values, of which it writes some, or parts of some, as a seed says."""

    count: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("count", torch.arange(16.0).reshape(4, 4).clone())

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``[4, 4]`` to sums of all values."""
        draw, squares, read = Random(self.seed), [x * 2.0, x + 1.0, self.count], list[torch.Tensor]()
        for _ in range(draw.randrange(2, 8)):
            whole, other = draw.choice(squares), draw.choice(squares)
            part = draw.choice(VIEWS)(whole)
            match draw.randrange(7):
                case 0:
                    part.add_(1.5)
                case 1:
                    part.mul_(other.mean())
                case 2:
                    read.append(part.add_(2.0))
                case 3:
                    read.append(part)
                case 4:
                    part.copy_(other.sum(0)[: part.shape[-1]])
                case 5:
                    squares.append(whole * 3.0)
                case 6:
                    part[..., 0] = other[0, 0] * 2.0
        return [value.sum() for value in (*squares, *read)]


def _results(exported: ExportedProgram, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a graph makes of an input: the buffer, if it is written, and the sums."""
    names = [spec.target for spec in exported.graph_signature.input_specs]
    given = [exported.state_dict[name].clone() if name else x for name in names]
    return list(fx.Interpreter(exported.graph_module).run(*given))


@pytest.mark.parametrize("seeds", [range(6), wide(range(6, 300))])
def test_values_are_those_of_the_model(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composites, "decomposed", lambda exported: None)  # torch makes those of the other graphs
    made = 0
    for seed in seeds:
        model, x = _Writes(seed), torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        with quiet():
            exported = functional(torch.export.export(_Writes(seed), (x,), strict=False))
        if exported is None:
            continue
        made += 1
        exported.graph.lint()
        assert not re.search(r"aten\.\w+_\.", str(exported.graph))
        found, wanted = _results(exported, x), model(x)
        for own, other in zip(found, [*[model.count] * (len(found) - len(wanted)), *wanted], strict=True):
            torch.testing.assert_close(own, other, msg=f"seed {seed}")
    assert made > 0.15 * len(seeds)
