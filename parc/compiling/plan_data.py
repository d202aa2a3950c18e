"""The files and the callables of the lines of a plan that name samples, ``data`` and ``eval``, checked against them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from parc.compiler.build.build import Build
from parc.compiler.build.plan_facts import input_facts, loss_facts
from parc.compiler.capture.callables import CallableError
from parc.compiler.plan.directives.data import Data
from parc.compiler.plan.directives.eval import Eval
from parc.compiler.plan.plan import Plan
from parc.compiler.plan.samples_said import SamplesSaid, samples_span
from parc.compiling.callable_faults import callable_diagnostic, own_trace
from parc.grammar.codes import BAD_DATA, CAPTURE_FAILED
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.runtime.data.feed import MISFIT_HELP, input_types
from parc.runtime.data.random_batch import class_bounds
from parc.runtime.data.samples import DataError, SampleSource, sample_misfit
from parc.runtime.data.sources import Wanted, open_data


def check_data(plan: Plan, folder: Path) -> None:
    """Check that the lines that name samples fit the callable and its arguments, or the files; no sample is read.

    Raises:
        PlanError: the callable cannot be had, or takes other arguments; a glob matches no file, or all are too short.
    """
    for line, said in plan.sampled:
        try:
            _open(plan, folder, line, said)
        except CallableError as error:
            raise PlanError([callable_diagnostic(BAD_DATA, error, line)]) from None
        except DataError as error:
            label = Label(samples_span(line.arguments, error.pattern, line.LEAD))
            notes = own_trace(error.__cause__)
            raise PlanError([Diagnostic(BAD_DATA, str(error), label, help=error.help, notes=notes)]) from None


def _open(plan: Plan, folder: Path, line: Data | Eval, said: SamplesSaid) -> SampleSource | None:
    """Return the samples that a line asks for, at the smallest of the plan's sizes; None for random ones."""
    if said.form == "synthetic":
        return None
    sizes = {name: size.low for name, size in plan.sizes.items()}
    facts = {"inputs": input_facts(plan), "loss": loss_facts(plan), "sizes": sizes, "seed": plan.seed}
    return open_data(Wanted(said.facts(), facts, folder), line is plan.evaluation)


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
        if not any(diagnostic.code is CAPTURE_FAILED for diagnostic in error.diagnostics):
            raise
        first = [_first_sample(plan, folder, line, said) for line, said in plan.sampled]
        wrong = [one for sample in first if sample
                 for one in _misfits(plan, sample.line, sample.tensors, input_facts(plan))]  # fmt: skip
        raise PlanError([*wrong, *error.diagnostics]) from error


class FirstSample(NamedTuple):
    """The first sample of a line: its tensors by the names of inputs, and its entries that no input takes."""

    line: Data | Eval
    tensors: Mapping[str, Tensor]
    others: Mapping[str, Any]


def check_sample(plan: Plan, folder: Path, build: Build) -> list[FirstSample]:
    """Check the first sample of each line against the ``input`` lines of inputs that programs read, with any size of a
    range; and its whole numbers against the rows or classes of the model. Return the samples that could be made.

    Raises:
        PlanError: it is no dict of tensors, lacks an input, or one has another dtype, shape or number.
    """
    samples = []
    for line, said in plan.sampled:
        reads = build.evaluation if line is plan.evaluation else build
        if reads is not None and (sample := _first_sample(plan, folder, line, said)) is not None:
            _check_first(plan, line, said, sample.tensors, reads)
            samples.append(sample)
    return samples


def _check_first(plan: Plan, line: Data | Eval, said: SamplesSaid, sample: Mapping[str, Tensor], build: Build) -> None:
    """Check the first sample of a line that programs of a build read, as ``check_sample`` does."""
    read = input_types(build.programs)
    inputs = [fact for fact in input_facts(plan) if fact["name"] in read]
    missing = [fact["name"] for fact in inputs if fact["name"] not in sample]
    if missing:
        held = f"the data's sample 0 holds {', '.join(f'`{name}`' for name in sample) or 'nothing'}"
        raise PlanError([_data_fault(plan, line, f"{held}, and no `{missing[0]}`", "name inputs as the data does")])
    if wrong := _misfits(plan, line, sample, inputs):
        raise PlanError(wrong)
    for name, bound in class_bounds(build.reference).items():
        message, help_ = bound.fault(name, sample[name])
        if message:
            other = f"; or another `dtype`, if the file's is not {said.dtype}" * bool(said.dtype)
            raise PlanError([_data_fault(plan, line, f"sample 0: {message}", help_ + other, name)])


def _first_sample(plan: Plan, folder: Path, line: Data | Eval, said: SamplesSaid) -> FirstSample | None:
    """Return the first sample of a line. It is None if samples are random, and if it cannot be made: a build may be
    made where the data is not, and a run says what is missing.

    Raises:
        PlanError: it is no dict of tensors.
    """
    try:
        source = _open(plan, folder, line, said)
        if source is None:
            return None
        sample, names = source(0), {declared.name for declared in plan.inputs}
        others = {name: value for name, value in sample.items() if name not in names}
        return FirstSample(line, sample, {**others, **(getattr(source, "others", None) or {})})
    except DataError as error:
        if error.__cause__ is not None:
            return None
        raise PlanError([_data_fault(plan, line, str(error), error.help)]) from None


def _misfits(
    plan: Plan, line: Data | Eval, sample: Mapping[str, Tensor], inputs: Sequence[Mapping[str, Any]]
) -> list[Diagnostic]:
    """Return the error of the first input whose tensor in a line's sample differs from its own line, if there is
    one."""
    wrong = sample_misfit(sample, 0, inputs, plan.sizes)
    return [_data_fault(plan, line, wrong[1], MISFIT_HELP, wrong[0])] if wrong else []


def _data_fault(plan: Plan, line: Data | Eval, message: str, help_: str, name: str = "") -> Diagnostic:
    """Return an error of a line that names samples, and of the named input."""
    related = tuple(Label(declared.span, "declared here") for declared in plan.inputs if declared.name == name)
    return Diagnostic(BAD_DATA, message, Label(line.span), related, help=help_)
