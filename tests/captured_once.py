"""One capture of a model for the many plans that tests compile of it, and one recording for the sessions that run its
builds. A model is captured and recorded again if its plan's task or its code differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.model_calls import TaskLines, model_builder
from parc.compiler.initial.recipes import Recorded, record
from parc.compiler.ops.rules import registered
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.plan import Plan
from parc.compiling import driver, plan_capture
from parc.compiling.compiled import Compiled
from parc.proposing import proposal
from parc.runtime.session import session
from parc.runtime.state import initial

_MOST = 96
_CAPTURES: dict[Any, tuple[Recorded, Captured]] = {}
_RECORDED: dict[Any, Recorded] = {}


def capture_once(
    plan: Plan, lines: TaskLines, folder: Path, overrides: Mapping[str, Any] | None, ranged: bool = False,
    evaluates: bool = False,
) -> tuple[Recorded, Captured]:  # fmt: skip
    """Do as ``capture_plan``. Failures are not kept, and neither are graphs with custom operators: a library of another
    test may have made them, and ended them with it.

    Raises:
        PlanError: the model or its loss is at fault.
    """
    code = _code(folder)
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


def _code(folder: Path) -> tuple[Any, ...]:
    """Return the files that a model of a folder is made of, and the dtype in which it is made."""
    read = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".json"))
    return torch.get_default_dtype(), *((path.name, path.read_bytes()) for path in read)


@dataclass(frozen=True)
class _Builder:
    """A function that makes a model, and all that the model depends on."""

    make: Callable[[], nn.Module]
    given: Any

    def __call__(self) -> nn.Module:
        return self.make()


def initial_once(*given: Any) -> initial.Initial:
    """Do as ``Initial``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "model_builder", _builder)
        patch.setattr(initial, "record", _record)
        return initial.Initial(*given)


def _builder(lines: TaskLines, folder: Path) -> _Builder:
    return _Builder(model_builder(lines, folder), (repr(lines), _code(folder)))


def _record(make: _Builder, seed: int) -> Recorded:
    key = make.given, seed
    recorded = _RECORDED.pop(key) if key in _RECORDED else record(make, seed)
    _RECORDED[key] = recorded  # the last of a dict is the newest
    if len(_RECORDED) > _MOST:
        del _RECORDED[next(iter(_RECORDED))]
    return recorded


def _is_custom(target: object) -> bool:
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "parc")


@contextmanager
def captured_once() -> Iterator[None]:
    """Enter a block in which this process captures a model once for many plans, and records it once for many sessions.
    Plain modules, beside which sessions are held, record for themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "Initial", initial_once)
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
