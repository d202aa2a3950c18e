"""One capture of a model for the many plans that tests compile of it. A model is captured again if its plan's task or
its code differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.model_calls import TaskLines
from parc.compiler.initial.recipes import Recorded
from parc.compiler.ops.rules import registered
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.plan import Plan
from parc.compiling import driver, plan_capture
from parc.compiling.compiled import Compiled
from parc.proposing import proposal

_MOST = 48
_CAPTURES: dict[Any, tuple[Recorded, Captured]] = {}


def capture_once(
    plan: Plan, lines: TaskLines, folder: Path, overrides: Mapping[str, Any] | None, ranged: bool = False,
    evaluates: bool = False,
) -> tuple[Recorded, Captured]:  # fmt: skip
    """Do as ``capture_plan``. Failures are not kept, and neither are graphs with custom operators: a library of another
    test may have made them, and ended them with it.

    Raises:
        PlanError: the model or its loss is at fault.
    """
    read = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".json"))
    code = torch.get_default_dtype(), *((path.name, path.read_bytes()) for path in read)
    capacities = tuple((str(line.where), line.capacity) for line in plan.placements if isinstance(line, Experts))
    smaller = sorted((overrides or {}).items()), plan.verify and plan.verify.values
    given = repr((lines, smaller, plan.seed, plan_capture.input_specs(plan)))
    rules = tuple(registered().items())
    key = given, code, capacities if any(most for _, most in capacities) else (), rules, ranged, evaluates
    captured = _CAPTURES.pop(key, None) or plan_capture.capture_plan(plan, lines, folder, overrides, ranged, evaluates)
    if not any(_is_custom(node.target) for node in captured[1].graph.nodes):
        _CAPTURES[key] = captured  # the last of a dict is the newest
    if len(_CAPTURES) > _MOST:
        del _CAPTURES[next(iter(_CAPTURES))]
    return captured


def _is_custom(target: object) -> bool:
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "parc")


@contextmanager
def captured_once() -> Iterator[None]:
    """Enter a block in which every build of this process captures a model once for many plans."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (driver, proposal):
            patch.setattr(module, "capture_plan", capture_once)
        yield


def compile_once(plan: Plan, folder: Path, overrides: Mapping[str, Any] | None = None) -> Compiled:
    """Compile a plan, of whose model ``overrides`` are other arguments, in such a block.

    Raises:
        PlanError: the plan, the model or both are at fault.
    """
    with captured_once():
        return driver.compile_plan(plan, folder, overrides=overrides)
