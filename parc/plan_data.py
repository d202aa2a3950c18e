"""The files and the callable of a plan's ``data`` line held against it, and what a run is told of them."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from parc.callable_faults import callable_diagnostic
from parc.compiler.callables import CallableError
from parc.compiler.plan import Plan
from parc.grammar.codes_build import BAD_DATA
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.syntax import String
from parc.runtime.data import DataError, misfit
from parc.runtime.feed import MISFIT_HELP, open_data


def data_facts(plan: Plan) -> dict[str, Any] | None:
    """The ``data`` line as the manifest has it."""
    line = plan.data
    if line is None:
        return None
    return {"globs": list(line.globs), "callable": line.callable, "arguments": dict(line.values)}


def input_facts(plan: Plan) -> list[dict[str, Any]]:
    """The ``input`` lines as the manifest has them."""
    return [{"name": line.name, "dtype": line.dtype, "dims": list(line.dims)} for line in plan.inputs]


def check_data(plan: Plan, folder: Path) -> None:
    """Hold the ``data`` line against what is there: the callable and its arguments, the files; no sample is read.

    Raises:
        PlanError: the callable cannot be had, or takes other arguments; a glob matches no file, or all are too short.
    """
    line, facts = plan.data, data_facts(plan)
    if line is None or facts is None:
        return
    sizes = {name: size.low for name, size in plan.sizes.items()}  # what is too short at any of them
    try:
        open_data(facts, input_facts(plan), plan.loss.operands, sizes, folder)
    except CallableError as error:
        raise PlanError([callable_diagnostic(BAD_DATA, error, line)]) from None
    except DataError as error:
        globs = [item for item in line.arguments.items("bytes") if isinstance(item, String)]
        span = next((item.span for item in globs if item.text == error.pattern), line.span)
        raise PlanError([Diagnostic(BAD_DATA, str(error), Label(span), help=error.help)]) from None


def check_sample(plan: Plan, folder: Path, read: Container[str]) -> None:
    """Hold the first sample against the ``input`` lines of what the programs ``read``; any size of a range will do.

    Raises:
        PlanError: it is no dict of tensors, lacks an input, or one has another dtype or shape.
    """
    line, facts = plan.data, data_facts(plan)
    if line is None or facts is None:
        return
    inputs = [fact for fact in input_facts(plan) if fact["name"] in read]
    sizes = {name: size.low for name, size in plan.sizes.items()}
    try:
        sample = open_data(facts, input_facts(plan), plan.loss.operands, sizes, folder)(0)
    except DataError as error:
        if error.__cause__ is not None:
            return  # a build may be made where the data is not; a run says what is missing
        raise PlanError([Diagnostic(BAD_DATA, str(error), Label(line.span), help=error.help)]) from None
    held = f"the data's sample 0 holds {', '.join(f'`{name}`' for name in sample)}"
    found = next(((f"{held}, and no `{fact['name']}`", "name inputs as the data does") for fact in inputs
                  if fact["name"] not in sample), None)  # fmt: skip
    if wrong := misfit(sample, 0, inputs, plan.sizes):
        found = found or (wrong[1], MISFIT_HELP)
    if found:
        raise PlanError([Diagnostic(BAD_DATA, found[0], Label(line.span), help=found[1])])
