"""Plans compiled with one capture for many. A model is captured again if its plan's task or its code differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parc.compiler.capture.capture import Captured
from parc.compiler.initial.recipes import Recorded
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.plan import Plan
from parc.compiler.sizes.polynomials import moving
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_captured, compile_plan, task_lines, with_evaluation
from parc.compiling.plan_capture import capture_plan
from parc.grammar.format import format_statements

_TASK = ("model", "input", "sizes", "loss", "seed")
_MOST = 48
_CAPTURES: dict[Any, tuple[Recorded, Captured]] = {}


def compile_once(plan: Plan, folder: Path, overrides: Mapping[str, Any] | None = None) -> Compiled:
    """Compile a plan, of whose model ``overrides`` are other arguments. A model is captured once for many plans of it,
    unless a Python file of their folder was changed.

    Raises:
        PlanError: the plan, the model or both are at fault.
    """
    if moving(plan.sizes):
        return compile_plan(plan, folder, overrides=overrides)
    code = tuple((path.name, path.read_bytes()) for path in sorted(folder.glob("*.py")))
    task = format_statements([line for line in plan.statements if line.verb.text in _TASK])
    capacities = [(line.where, line.capacity) for line in plan.placements if isinstance(line, Experts)]
    given = tuple(sorted((overrides or {}).items()))
    key = task, plan.microbatches, code, given, tuple(capacities if any(most for _, most in capacities) else ())
    captured = _CAPTURES.pop(key, None) or capture_plan(plan, task_lines(plan), folder, overrides)
    _CAPTURES[key] = captured  # the last of a dict is the newest
    if len(_CAPTURES) > _MOST:
        del _CAPTURES[next(iter(_CAPTURES))]
    made = compile_captured(plan, folder, *captured, smaller=overrides is not None)
    made = replace(made, overrides=dict(overrides or {}))
    return made if plan.evaluation is None else with_evaluation(made, plan)
