"""The files and the callable of a plan's ``data`` line, checked against it, and the facts about them for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from parc.compiler.build.build import Build
from parc.compiler.build.plan_facts import data_facts, input_facts, loss_facts
from parc.compiler.capture.callables import CallableError
from parc.compiler.plan.plan import Plan
from parc.compiler.plan.samples_said import samples_span
from parc.compiling.callable_faults import callable_diagnostic, own_trace
from parc.grammar.codes_build import BAD_DATA, CAPTURE_FAILED
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.runtime.data.feed import MISFIT_HELP, input_types
from parc.runtime.data.random_batch import beyond, beyond_help, class_bounds
from parc.runtime.data.samples import DataError, sample_misfit
from parc.runtime.data.sources import Wanted, open_data


def check_data(plan: Plan, folder: Path) -> None:
    """Check that the ``data`` line fits the callable and its arguments, or the files; no sample is read.

    Raises:
        PlanError: the callable cannot be had, or takes other arguments; a glob matches no file, or all are too short.
    """
    line, wanted = plan.data, _wanted(plan, folder)
    if line is None or wanted is None:
        return
    try:
        open_data(wanted)
    except CallableError as error:
        raise PlanError([callable_diagnostic(BAD_DATA, error, line)]) from None
    except DataError as error:
        label = Label(samples_span(line.arguments, error.pattern))
        notes = own_trace(error.__cause__)
        raise PlanError([Diagnostic(BAD_DATA, str(error), label, help=error.help, notes=notes)]) from None


def _wanted(plan: Plan, folder: Path) -> Wanted | None:
    """Return the samples that the plan asks for, at the smallest of its sizes; None for random ones, and for none."""
    line = data_facts(plan.data)
    if line is None or line["form"] == "synthetic":
        return None
    sizes = {name: size.low for name, size in plan.sizes.items()}
    facts = {"inputs": input_facts(plan), "loss": loss_facts(plan), "sizes": sizes, "seed": plan.seed}
    return Wanted(line, facts, folder)


@contextmanager
def sample_said(plan: Plan, folder: Path) -> Iterator[None]:
    """Enter a block that may fail because the model does not take the inputs that the plan declares. If the plan's
    first sample differs from the ``input`` lines, that error is put first.

    Raises:
        PlanError: that of the code inside, with the sample's error before it.
    """
    try:
        yield
    except PlanError as error:
        if any(diagnostic.code is CAPTURE_FAILED for diagnostic in error.diagnostics) and (
            sample := _first_sample(plan, folder)
        ):
            raise PlanError([*_misfits(plan, sample, input_facts(plan)), *error.diagnostics]) from error
        raise


def check_sample(plan: Plan, folder: Path, build: Build) -> None:
    """Check the first sample against the ``input`` lines of inputs that programs read, with any size of a range; and
    its whole numbers against the rows or classes of the model.

    Raises:
        PlanError: it is no dict of tensors, lacks an input, or one has another dtype, shape or number.
    """
    read = input_types(build.programs)
    sample = _first_sample(plan, folder)
    if sample is None:
        return
    inputs = [fact for fact in input_facts(plan) if fact["name"] in read]
    missing = [fact["name"] for fact in inputs if fact["name"] not in sample]
    if missing:
        held = f"the data's sample 0 holds {', '.join(f'`{name}`' for name in sample)}"
        raise PlanError([_fault(plan, f"{held}, and no `{missing[0]}`", "name inputs as the data does")])
    if wrong := _misfits(plan, sample, inputs):
        raise PlanError(wrong)
    for name, (bound, ignore) in class_bounds(build.reference).items():
        if message := beyond(name, sample[name], bound, ignore):
            dtype = plan.data.said.dtype if plan.data is not None else None
            help_ = beyond_help(bound, ignore) + f"; or another `dtype`, if the file's is not {dtype}" * bool(dtype)
            raise PlanError([_fault(plan, f"sample 0: {message}", help_, name)])


def _first_sample(plan: Plan, folder: Path) -> Mapping[str, Tensor] | None:
    """Return the first sample. It is None if no line names files or a callable, and if the sample cannot be made: a
    build may be made where the data is not, and a run says what is missing.

    Raises:
        PlanError: it is no dict of tensors.
    """
    wanted = _wanted(plan, folder)
    if wanted is None:
        return None
    try:
        return open_data(wanted)(0)
    except DataError as error:
        if error.__cause__ is not None:
            return None
        raise PlanError([_fault(plan, str(error), error.help)]) from None


def _misfits(plan: Plan, sample: Mapping[str, Tensor], inputs: Sequence[Mapping[str, Any]]) -> list[Diagnostic]:
    """Return the error of the first input whose tensor in a sample differs from its line, if there is one."""
    wrong = sample_misfit(sample, 0, inputs, plan.sizes)
    return [_fault(plan, wrong[1], MISFIT_HELP, wrong[0])] if wrong else []


def _fault(plan: Plan, message: str, help_: str, name: str = "") -> Diagnostic:
    """Return an error of the ``data`` line, and of the named input."""
    assert plan.data is not None
    related = tuple(Label(line.span, "declared here") for line in plan.inputs if line.name == name)
    return Diagnostic(BAD_DATA, message, Label(plan.data.span), related, help=help_)
