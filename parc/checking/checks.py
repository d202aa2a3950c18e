"""Checks of every build before it is written: proofs from the texts of its programs, and tests of their numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from parc.checking.certified import NOT_ASKED, Certificate, certificate_of, not_certified
from parc.checking.eager import CLAMP, amplified, compare_with_eager, near_tie, not_finite, other_numbers
from parc.checking.module_numbers import ModuleAgreement
from parc.checking.reports import report_of
from parc.checking.twins import Subject, subject_of
from parc.compiler.analysis.samples import may_read_size
from parc.compiler.build.build import Build
from parc.compiler.build.first_check import FirstCheck
from parc.compiler.build.plan_facts import plan_faults
from parc.compiler.plan.directives.precision import HALF
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import FORWARD, Purpose
from parc.compiler.program.binding import BUFFERS
from parc.compiler.program.program import REFERENCE_FILE, Fault
from parc.compiler.program.roles import SINGLE, Role, as_checked, ranks_of
from parc.compiler.program.step_values import DYNAMIC, Division, biases_in, divisions_in
from parc.compiler.sizes.template import ShapeFault, sizes_text
from parc.compiler.verify.communication import check_messages, check_stages, check_timelines, check_work
from parc.compiler.verify.compressed import check_compressed
from parc.compiler.verify.lines import check_lines, check_program
from parc.compiler.verify.numbers import check_constants
from parc.compiler.verify.padding import check_padding
from parc.compiler.verify.ranges import size_faults
from parc.compiler.verify.rounding import check_precision, check_recomputed
from parc.compiler.verify.step import (
    check_bindings,
    check_places,
    mesh_faults,
)
from parc.compiling.compiled import Compiled
from parc.compiling.driver import Progress, compile_plan
from parc.compiling.microbatches import StepInParts, WrongTerm, averaged_term
from parc.compiling.observation import number_changed
from parc.compiling.size_ranges import fault_diagnostic, misfit_diagnostic
from parc.grammar.codes import AVERAGED, NOT_COMBINED, UNSCALED
from parc.grammar.diagnostics import Diagnostic, Label, PlanError, Severity
from parc.report import plan_of, report_faults
from parc.runtime.compare.agreement import NEAR, TOLERANCE, Agreement
from parc.runtime.compare.model_run import Case, step_errors
from parc.runtime.compare.own_types import OwnStep, own_step, varied_case
from parc.runtime.compare.plain import CPU
from parc.runtime.compare.simulate import compare


@dataclass
class Checked:
    """The outcome of a build's checks: the content of its report, and the faults for which it is refused, if any."""

    report: dict[str, Any]
    faults: list[Fault] = field(default_factory=list)
    agreement: Agreement | None = None
    first: FirstCheck | None = None
    """The step that a run repeats first."""
    certificate: Certificate = NOT_ASKED
    """The answer of the independent checker for the build's texts."""
    warnings: tuple[Diagnostic, ...] = ()
    seconds: float = 0.0

    def warn(self, *warnings: Diagnostic) -> None:
        """Add warnings, of each code and each place in the plan the first."""
        for warning in warnings:
            if (warning.code, warning.primary) not in ((known.code, known.primary) for known in self.warnings):
                self.warnings += (warning,)


def static_faults(build: Build) -> list[Fault]:
    """Return the faults of shapes, types, communication, padding and roundings in a build's programs, from these and
    the captured graph alone."""
    return [fault for faults in faults_by_check(build) for fault in faults]


def faults_by_check(build: Build) -> Iterator[list[Fault]]:
    """Yield the same faults, of one check after the other: a reader of the first need not wait for the last."""
    programs, reference = build.programs, build.reference
    roles = {name: replace(role, programs=as_checked(role.programs)) for name, role in build.roles.items()}
    files = (program for role in roles.values() for program in role.programs.values())
    faults = mesh_faults(programs, build.mesh)
    for program in {id(program): program for program in (*programs.values(), *files)}.values():
        faults += check_program(program)
    axis = "" if faults else build.axis
    if axis:
        faults += check_stages({name: role.programs for name, role in roles.items()}, build.mesh, axis)
    yield faults
    if faults:
        return
    yield check_bindings(programs, build.types)
    yield [*check_constants(programs, reference)]
    yield [*check_compressed(programs, build.rounding.sent)]
    yield [*check_places(programs, build.manifest.get("offload", {}))]
    yield check_precision(programs, reference, build.rounding)
    yield [*check_padding(programs, build.pads, build.types)]
    yield [*check_recomputed(programs)]
    yield check_schedule(roles, build.microbatches, build.purpose)
    for role in roles.values():
        yield [*check_messages(role.programs, build.microbatches)]


def check_schedule(roles: Mapping[str, Role], microbatches: int, purpose: Purpose = "training") -> list[Fault]:
    """Check the timelines of all roles together, and that their work has programs. The step has the optional kinds of
    actions for which there are programs."""
    actions = {name: role.actions for name, role in roles.items()}
    ranks = ranks_of({name: role.programs for name, role in roles.items()})
    kinds = {program.action for role in roles.values() for program in role.programs.values()}
    faults = check_timelines(actions, ranks, microbatches, also=kinds, purpose=purpose)
    return faults or [fault for role in roles.values() for fault in check_work(role.actions, role.programs)]


def check_build(compiled: Compiled, progress: Progress = lambda _: None, *, uncertified: bool = False) -> Checked:
    """Check a compiled plan through the texts of its programs, and make its report. One that is ``uncertified`` may be
    so, though its numbers are tested on a smaller build alone.

    Raises:
        PlanError: something does not divide at a size that the plan declares, or at some size the model's graph is
            another.
    """
    start = time.perf_counter()
    progress("shapes, types, communication")
    checked = Checked(report_of(compiled), prove(compiled))
    if not checked.faults:
        progress("certificate")
        checked.certificate = certificate_of(compiled.build)
        checked.report["certificate"] = checked.certificate.facts
        progress("numbers")
        check_numbers(compiled, checked, uncertified=uncertified)
    if checked.faults:
        check_template(compiled)
    else:
        checked.report["checks"] = {**dict.fromkeys(proved(compiled.build), "proved"),
                                    "equality": checked.certificate.word,
                                    "numbers": "tested", "memory": "estimated"}  # fmt: skip
    checked.seconds = round(time.perf_counter() - start, 3)
    return checked


def proved(build: Build) -> tuple[str, ...]:
    """Return the properties that are proved of a build without faults."""
    return ("shapes", "types", "communication", *(("padding",) if build.pads else ()))


def prove(compiled: Compiled) -> list[Fault]:
    """Prove facts, shapes, types and communication of a compiled plan, from the texts that will be written.

    Raises:
        PlanError: something does not divide at a size that the plan declares.
    """
    build, plan = compiled.build, compiled.plan
    if faults := stated_faults(build, plan):
        return faults
    if errors := range_faults(build):
        raise PlanError([fault_diagnostic(plan, fault) for fault in errors])
    return program_faults(build, plan)


def check_files(build: Build) -> list[Fault]:
    """Prove the same of a build from its files alone, and that its report agrees with them."""
    plan = plan_of(build)
    faults = stated_faults(build, plan) or [fault.fault() for fault in range_faults(build)]
    return faults or program_faults(build, plan) or report_faults(build, plan)


def stated_faults(build: Build, plan: Plan) -> list[Fault]:
    """Return the facts of the manifest that contradict the programs, the schedule or the plan."""
    return [*build.fact_faults(), *plan_faults(build.manifest, plan)]


def range_faults(build: Build) -> list[ShapeFault]:
    """Return the sizes that do not divide, or are not whole numbers, somewhere in the ranges that a plan declares."""
    template = build.template
    faults = [] if template is None else template.faults(build.mesh) or size_faults(template, build.mesh)
    return faults or ([] if build.evaluation is None else range_faults(build.evaluation))


def program_faults(build: Build, plan: Plan) -> list[Fault]:
    """Return the faults of shapes, types and communication in a build's programs. Where sizes have ranges, the largest,
    the smallest and some in between are checked."""
    faults = check_lines(build.reference)
    for at in build.cases() if not faults else ():
        faults += static_faults(at)
    if not faults and build.evaluation is not None:
        faults += [
            replace(fault, where=f"evaluation {fault.where}") for fault in program_faults(build.evaluation, plan)
        ]
    return faults


def check_template(compiled: Compiled) -> None:
    """Capture the model at all sizes that are checked. This explains faults at sizes at which nothing was compiled.

    Raises:
        PlanError: at some sizes the captured graph is not the template's.
    """
    template = compiled.build.template
    for at in compiled.cases()[1:] if template is not None else ():
        recompiled = compile_plan(at.plan, at.folder, overrides=at.overrides, like=at)
        assert template is not None
        captured = replace(template, texts={REFERENCE_FILE: template.texts[REFERENCE_FILE]})
        sizes = {name: at.sizes[name] for name in template.ranges}
        misfit = captured.misfit(sizes, {REFERENCE_FILE: recompiled.build.texts[REFERENCE_FILE]})
        if misfit is not None:
            raise PlanError([misfit_diagnostic(compiled.plan, misfit)])


def check_numbers(
    compiled: Compiled, checked: Checked, device: torch.device = CPU, *, uncertified: bool = False
) -> None:
    """Train all ranks and the captured graph in float64 on a device, or those of the twin of a large build. Where sizes
    have ranges, all choices that are proved are tested too, those that are not the largest for one step.

    Raises:
        PlanError: on random batches the model or its loss is not finite, or not the same each time; the captured graph
            is not the module, or, at some sizes, not the template's; the build is not certified, and too large to be
            tested itself.
    """
    chosen = subject_of(compiled, not checked.certificate.missing)
    subject, on = chosen.compiled, chosen.text
    if subject is not compiled:
        if checked.certificate.missing and not uncertified:
            raise PlanError([not_certified(compiled.plan.model, checked.certificate, on)])
        checked.faults += prove(subject) if subject.mesh != compiled.mesh else []
    if checked.faults:
        return
    cases = subject.cases()
    if subject.template is not None:
        on += f", at {'; '.join(sizes_text(at.sizes) for at in cases)}"
    numbers: dict[str, Any] = {"on": on, "tolerance": TOLERANCE}
    evaluated = [at.evaluated for at in cases]
    for at in (*cases, *(at for at in evaluated if at is not None)):
        case = case_of(at)
        with one_thread():
            where = _where(at, subject)
            eager = _module_agreement(at, case, compiled, where)
            start = case if at.request.trains else varied_case(case)
            agreement = compare(replace(start, device=device), 1 if checked.agreement else chosen.steps)
        _check_sound(at.plan, agreement)
        checked.warn(*_check_whole_batch(at))
        if eager.changed:
            checked.warn(number_changed(compiled.plan, eager.changed))
        checked.agreement = checked.agreement or agreement
        errors = {
            "steps": agreement.steps,
            "loss": agreement.loss, "gradient": agreement.gradient, "grad_norm": agreement.norm,
            "parameter": agreement.parameter, "buffer": agreement.buffer,
            **{f"eager_{kind}": eager.error(kind) for kind in ("loss", "gradient", "buffer")},
        }  # fmt: skip
        module = numbers.setdefault("module", {"compared": eager.compared, "notes": []})
        module["notes"] += [note for note in eager.notes if note not in module["notes"]]
        errors |= {kind: error for kind in ("metric", "output") if (error := getattr(agreement, kind))}
        numbers.update((name, max(numbers.get(name, 0), error)) for name, error in errors.items())
        if agreement.margin.apart < numbers.get("margin", {"apart": math.inf})["apart"]:
            numbers["margin"] = asdict(agreement.margin)
        checked.faults += _number_faults(agreement, where)
        checked.faults += (
            Fault("numbers", f"model.py `{name}`", f"differs from what the manifest says by {error:.1e}")
            for name, error in step_errors(case)
            if not error <= TOLERANCE
        )
        if at is cases[0] and not checked.faults:
            with one_thread():
                checked.first, faults = first_check_of(compiled, chosen, replace(case, device=device))
            checked.faults += faults
    checked.report["numbers"] = numbers


def _module_agreement(at: Compiled, case: Case, compiled: Compiled, where: str) -> ModuleAgreement:
    """Return the agreement of a captured graph with its module. ``compiled`` is the build, of which ``at`` is one of
    its sizes, or the twin.

    Raises:
        PlanError: they do not agree.
    """
    agreement = compare_with_eager(at, case)
    if agreement.tied and not agreement.holds:
        raise PlanError([near_tie(at.plan.model, agreement.tied, NEAR)])
    if not agreement.holds:
        check_template(compiled)
        raise PlanError([other_numbers(at.plan.model, agreement, where)])
    return agreement


def _check_sound(plan: Plan, agreement: Agreement) -> None:
    """Check that the numbers of random batches tell something.

    Raises:
        PlanError: they are not finite, hang on a tie, or on single roundings.
    """
    if agreement.not_finite:
        line, help_ = (plan.optimizer, "take a smaller learning rate") if agreement.steps else (plan.loss, CLAMP)
        raise PlanError([not_finite(line, agreement.not_finite, help_)])
    if agreement.tied:
        raise PlanError([near_tie(plan.model, agreement.margin.at, NEAR)])
    if agreement.amplified:
        raise PlanError([amplified(plan.model, agreement.amplified)])


def _check_whole_batch(compiled: Compiled) -> tuple[Diagnostic, ...]:
    """Check that a step makes of microbatches what the module and the loss make of the whole batch. Return a warning of
    each term of the loss of which that is not known: neither from running it, nor for sure from its graph.

    Raises:
        PlanError: a term of the loss is not divided by what makes it so.
    """
    plan, step, reference = compiled.plan, StepInParts.of(compiled), compiled.build.reference
    if plan.microbatches == 1 or not plan.trains:
        return ()
    divisions, averaged = divisions_in(compiled.build.manifest), compiled.built.averaged
    whole = step.compare(reference, divisions, averaged)
    errors = []
    for term in whole.wrong:
        number = term.number
        what = "the loss" if len(plan.loss.terms) == 1 else f"term {number} of the loss"
        message = f"{what} {_beside(term)}"
        help_ = "say what divides it: `/ N`, or `/ INPUT`, behind a term that is a sum over the batch"
        if plan.loss.terms[number - 1].divisor is not None:
            help_ = "leave out what is behind `/`: the term is no sum over the batch"
        errors.append(Diagnostic(NOT_COMBINED, message, Label(plan.loss.term_span(number)), help=help_))
    if errors:
        raise PlanError(errors)
    decided = {*averaged, *plan.loss.summed, *plan.loss.counted}
    near = ((averaged_term(compiled, term.number), term) for term in whole.near)
    return *(replace(warning, notes=(*warning.notes, f"it {_beside(term)}")) for warning, term in near), *(
        _not_measured(plan, number, divisions[number - 1], reason)
        for number, reason in whole.unknown.items()
        if number not in decided and may_read_size(reference, number, divisions[number - 1], plan.unbatched)
    )


def _beside(term: WrongTerm) -> str:
    return f"is {term.combined:.6g} in microbatches, but {term.whole:.6g} on the whole batch"


def _not_measured(plan: Plan, number: int, division: Division, reason: str) -> Diagnostic:
    """Return the warning of a term of the loss whose graph alone says how microbatches add up to it."""
    what = "the loss" if len(plan.loss.terms) == 1 else f"term {number} of the loss"
    taken = {"sum": "a sum over the batch", "mean": "a mean over the batch"}.get(division.by, "divided by its count")
    return Diagnostic(
        AVERAGED, f"{what} could not be compared with the whole batch's: {reason}", Label(plan.loss.term_span(number)),
        notes=(f"by its graph it is taken to be {taken}; a number in the graph may be the size of a microbatch",),
        help="let the model and the loss run on any number of samples; or return a sum over the samples, and say so"
        " behind the term: `/ N`, or `/ INPUT`",
        severity=Severity.WARNING,
    )  # fmt: skip


def _where(at: Compiled, subject: Compiled) -> str:
    """Return the words that say which of several builds is tested."""
    where = f" at {sizes_text(at.sizes)}" if subject.template is not None else ""
    return f"{where} in evaluation" if at.request.purpose == "evaluation" else where


def _number_faults(agreement: Agreement, at: str) -> Iterator[Fault]:
    for kind, where in agreement.worst.items():
        error = getattr(agreement, kind)
        if not error <= TOLERANCE:
            whose = "its optimizer's formula" if kind == "parameter" else "the captured graph's"
            message = f"the {kind} differs from {whose} by {error:.1e}"
            if (margin := agreement.margin).at:
                message += f"; no top-k decides it, whose scores are at least {margin.apart:.1e} of the largest apart"
            yield Fault("numbers", f"{where}{at}", message)


# ---- the first check: one step of the small programs in their own types, tested here and repeated by each run


def first_check_of(compiled: Compiled, chosen: Subject, case: Case) -> tuple[FirstCheck, list[Fault]]:
    """Return the first check of a build, tested on the chosen subject, whose ``case`` has its largest sizes; and the
    faults of that step in the programs' own types.

    Raises:
        PlanError: a number is finite in float64, and not in the programs' own types, or becomes zero in float16.
    """
    small, plan = _small_build(compiled, chosen.compiled), chosen.compiled.plan
    formats = [line["format"] for line in small.manifest["compress"]]
    step = own_step(case, plan.unbatched, formats, plan.trains)
    _hold_range(plan, step)
    expected = {key: (of.signature.squares, of.signature.product, of.bound) for key, of in step.expected.items()}
    return FirstCheck(small, chosen.text, step.seed, step.state, expected), [*_own_type_faults(step)]


def _hold_range(plan: Plan, step: OwnStep) -> None:
    """Check that the range of the plan's types holds the numbers of a step.

    Raises:
        PlanError: a number is finite in float64 alone, or gradients become zero in float16.
    """
    if step.not_finite:
        message = f"the {step.not_finite} is not finite in the programs' own types, and is in float64"
        help_ = "take `precision bf16`, which holds larger numbers, or let the model compute with smaller ones"
        raise PlanError([not_finite((*plan.precision, plan.model)[0], message, help_)])
    half = next((line for line in plan.precision if line.type == HALF), None)
    if step.worst[0] > 1 and half is not None and plan.trains and plan.loss_scale != DYNAMIC:
        message = f"small gradients of float16 become zero: the {step.worst[1]} is another one than in float64"
        help_ = "write `precision fp16 loss_scale dynamic`, or `precision bf16`, which needs none"
        raise PlanError([Diagnostic(UNSCALED, message, Label(half.arguments.statement.span), help=help_)])


def _own_type_faults(step: OwnStep) -> Iterator[Fault]:
    times, name = step.worst
    if times > 1:
        message = f"in the programs' own types it differs by {times:.1f} times what their roundings explain"
        yield Fault("numbers", f"the {name}", message)
    for operator in step.narrow:
        message = f"a kernel computes {operator}, which the plan's `precision` lines leave in float32"
        yield Fault("numbers", "the programs' own types", message)


def _small_build(compiled: Compiled, subject: Compiled) -> Build:
    """Return the subject as a build that a run can open: it has the arguments of its own model, whose initial values
    are those of the model's code."""
    manifest = {key: value for key, value in subject.build.manifest.items() if key != "evaluation"}
    model = manifest["model"]
    manifest |= {"init": None, "model": {**model, "arguments": {**model["arguments"], **subject.overrides}}}
    texts = compiled.build.texts if subject is compiled else subject.build.texts
    return replace(subject.build, texts=texts, manifest=manifest, evaluation=None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Enter a block in which torch uses one thread, which is faster for small tensors, above all on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def case_of(compiled: Compiled) -> Case:
    """Return the simulator's case of a compiled plan; that of a pipeline has its roles."""
    build, recipes = compiled.build, compiled.recorded.recipes
    constants = compiled.captured.constants  # tensors in the code of the model
    buffers = {name: recipes[name].whole() if name in recipes else constants[name]
               for name in build.programs[FORWARD].main.bound(*BUFFERS)}  # fmt: skip
    roles = build.roles if build.axis else {}
    return Case(
        build.programs if roles else build.roles[SINGLE].programs, build.reference,
        () if roles else build.roles[SINGLE].actions, build.mesh, build.microbatches,
        build.manifest["optimizer"], {name: recipes[name].whole() for name in build.types}, buffers,
        build.manifest["parameters"], build.pads, roles, build.manifest["state"], biases_in(build.manifest),
        divisions_in(build.manifest),
    )  # fmt: skip
