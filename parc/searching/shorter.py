"""Shorter models: the argument of a model that says how many equal blocks it has, found by making the model twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parc.compiler.capture.callables import load_callable
from parc.compiler.capture.model_calls import whole_arguments
from parc.compiler.initial.recipes import Recorded
from parc.compiler.plan.plan import Plan
from parc.compiler.program.blocks import block_of
from parc.compiling.driver import task_lines
from parc.compiling.plan_capture import make_model
from parc.grammar.diagnostics import PlanError

_TRIED = 6
"""The layers of the smaller of two models that are compared."""
_LEAST = 12
"""The fewest layers of a model that is priced by a shorter one."""


@dataclass(frozen=True)
class Layers:
    """The blocks of a model: the ``argument`` that counts them, their number in the plan's model, the list that holds
    them (``model.layers``), and how many at its beginning are unlike the others."""

    argument: str
    number: int
    prefix: str
    unlike: int

    def name(self, block: int) -> str:
        """Return the name of a block."""
        return f"{self.prefix}.{block}"


def counted_layers(plan: Plan, folder: Path) -> Layers | None:
    """Return the blocks of a plan's model; None where no argument, said or by default, counts blocks of which there are
    many.

    Raises:
        PlanError: the model is at fault.
    """
    said, lines = dict(plan.model.values), task_lines(plan)
    module = make_model(plan, lines, folder).module
    numbers = whole_arguments(load_callable(lines.model, folder), module, said)
    counts = [(name, value) for name, value in numbers.items() if value >= _LEAST]
    for name, value in sorted(counts, key=lambda pair: "layer" not in pair[0] and "depth" not in pair[0]):
        try:
            one, other = (make_model(plan, lines, folder, {name: _TRIED + more}) for more in (0, 1))
        except PlanError:
            continue  # the model does not take so few
        layers = _added(one, other, name, value)
        if layers is not None:
            return layers
    return None


def _added(one: Recorded, other: Recorded, argument: str, number: int) -> Layers | None:
    """Return the blocks of two models if the second has one more than the first, and nothing else is different."""
    few, more = _shapes(one), _shapes(other)
    added = more.keys() - few.keys()
    blocks = {block_of(name) for name in added}
    block = next(iter(blocks), None)
    if len(blocks) != 1 or block is None or any(more[name] != shape for name, shape in few.items()):
        return None
    prefix, _, last = block.rpartition(".")
    if not last.isdigit() or int(last) != _TRIED:
        return None
    kinds = [_of_block(more, f"{prefix}.{at}.") for at in range(_TRIED + 1)]
    unlike = next(at for at in range(_TRIED + 1) if all(kind == kinds[-1] for kind in kinds[at:]))
    return Layers(argument, number, prefix, unlike)


def _shapes(recorded: Recorded) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in recorded.module.named_parameters()}


def _of_block(shapes: Mapping[str, tuple[int, ...]], block: str) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(block): shape for name, shape in shapes.items() if name.startswith(block)}
