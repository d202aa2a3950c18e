"""One step of a build's ranks beside the plain module on the whole batch, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parc.checking.checks import case_of
from parc.compiler.padding.tensors import shrink
from parc.compiling.compiled import Compiled
from parc.runtime.compare.simulate import Simulation

_ROUNDING = 1e-6


def is_right(
    compiled: Compiled, module: nn.Module, plain: Callable[[Any], Tensor], batch: Mapping[str, Tensor]
) -> bool:  # fmt: skip
    """Return whether the loss and every gradient of a step are those of ``plain(module)``, the loss of the whole
    batch. The module gets the build's initial numbers; inputs of one number are every microbatch's."""
    case, count = case_of(compiled), compiled.plan.microbatches
    module.double().load_state_dict({**case.parameters, **case.buffers}, strict=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected = plain(module)
    finally:
        torch.set_default_dtype(before)
    expected.backward()
    parts = [{name: x if len(x) < count else x.chunk(count)[at] for name, x in batch.items()} for at in range(count)]
    losses, gradients = Simulation(case).step(parts, 0)
    trained = {name: of for name, of in module.named_parameters() if of.grad is not None}
    if not trained.keys() <= gradients.keys():
        return False
    pairs = [(losses[0].detach(), expected.detach())]
    pairs += [
        (shrink(gradients[name], case.pads.get(name, ())), of.grad)
        for name, of in trained.items()
        if of.grad is not None
    ]
    return all(float((a - b).norm()) <= _ROUNDING * max(float(b.norm()), _ROUNDING) for a, b in pairs)
