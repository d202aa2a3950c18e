"""Trials of random models: captured once, then built and simulated for any number of plans."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

from parc.checking.checks import static_faults
from parc.compiler.capture.capture import Captured, InputSpec, capture
from parc.compiler.initial.recipes import Recorded, record
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Program
from parc.compiler.program.roles import SINGLE
from parc.compiler.program.step_values import divisions_in
from parc.compiler.program.text import parse_program
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_captured
from parc.grammar.source import Source
from parc.runtime.compare.agreement import Agreement
from parc.runtime.compare.model_run import Case, ReferenceRun
from parc.runtime.compare.simulate import compare
from parc.runtime.data.random_batch import random_batch

from .strategies import ModelSpec, RandomModel, filled, input_shapes

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Subject:
    """A captured model, and its initial numbers."""

    spec: ModelSpec
    recorded: Recorded
    captured: Captured
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def call_loss(spec: ModelSpec, output: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the loss of a spec."""
    if spec.has_head:
        return _class_loss(spec.loss, output, inputs["y"])
    if spec.loss in ("mean", "sum"):
        return output.square().mean() if spec.loss == "mean" else (output.tanh().square() / 16).sum()
    y = inputs["y"]
    if spec.loss == "masked":
        return ((output - y).square() * (y > 0)).sum() / (y > 0).sum().clamp(min=1)
    if spec.loss == "bce":
        return F.binary_cross_entropy_with_logits(output, y.sigmoid())
    return {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}[spec.loss](output, y)


def _class_loss(kind: str, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if kind == "cross_entropy_classes_second":
        return F.cross_entropy(output.transpose(1, 2), y)
    if kind == "nll":
        return F.nll_loss(torch.log_softmax(output.flatten(0, 1), -1), y.flatten())
    if kind == "shifted":
        return F.cross_entropy(output[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    if kind == "smoothed":
        return F.cross_entropy(output.flatten(0, 1), y.flatten(), label_smoothing=0.1)
    if kind == "added":
        return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum") / 64
    if kind == "last":
        return F.cross_entropy(output[:, -1], y[:, 0])
    loss = F.cross_entropy(output.flatten(0, -2), y.flatten())
    return loss + 1e-2 * output.logsumexp(-1).square().mean() if kind == "with_z" else loss


@lru_cache(maxsize=4)
def subject(spec: ModelSpec) -> Subject:
    """Capture the model of a spec."""
    recorded = record(lambda: RandomModel(spec).train(), 1)
    inputs = {name: InputSpec(getattr(torch, dtype), shape) for name, (dtype, shape) in input_shapes(spec).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = capture(
            recorded.module,
            recorded.mode,
            inputs,
            lambda model, given: model(*(given[name] for name in ("x", "z") if name in given)),
            lambda output, given: call_loss(spec, output, given),
        )
    model = filled(spec)
    buffers = {**dict(model.named_buffers()), **captured.constants}
    return Subject(spec, recorded, captured, dict(model.named_parameters()), buffers)


def build(subject: Subject, text: str) -> Compiled:
    """Build the model under a plan.

    Raises:
        PlanError: the plan asks for what cannot be.
    """
    plan = read_plan(Source("random.parc", text))
    return compile_captured(plan, Path(), subject.recorded, subject.captured)


def case_of(subject: Subject, compiled: Compiled) -> Case:
    """Return the case that the simulator runs, with programs read back from their texts."""
    build = compiled.build
    for program in build.files():
        reread(program)
    actions = () if build.axis else build.roles[SINGLE].actions
    return Case(
        build.programs, build.reference, actions, build.mesh, build.microbatches,
        build.manifest["optimizer"], {name: subject.parameters[name].detach() for name in build.types}, subject.buffers,
        build.manifest["parameters"], build.pads, build.roles, build.manifest["state"],
        divisions=divisions_in(build.manifest),
    )  # fmt: skip


def reread(program: Program) -> Program:
    """Read the program back from its text; it must be the same program."""
    text = program.text()
    again = parse_program(text)
    assert again.text() == text
    assert again == program
    return again


def check(subject: Subject, text: str, steps: int = 2) -> tuple[Case, Agreement]:
    """Build, run every static check, and simulate; all must hold."""
    compiled = build(subject, text)
    case = case_of(subject, compiled)
    faults = static_faults(compiled.build)
    assert not faults, "\n".join(map(str, faults))
    agreement = compare(case, steps)
    assert agreement.largest <= TOLERANCE, agreement
    return case, agreement


def eager_error(subject: Subject, case: Case) -> float:
    """Return the error of the captured graph's loss and gradients beside the module's own, relative to the largest."""
    model = filled(subject.spec).train()
    batch = random_batch(case.reference, 1, torch.Generator().manual_seed(3))[0]
    dtype, shape = input_shapes(subject.spec)["x"]
    wide = torch.float64 if dtype == "float32" else torch.int64
    batch = {"x": torch.zeros(shape, dtype=wide), **batch}  # a model may read its other input alone
    output = call_loss(subject.spec, model(*(batch[name] for name in ("x", "z") if name in batch)), batch)
    output.backward()
    loss, gradients = ReferenceRun(case).gradients([batch], 0)
    pairs = [(loss, output.detach())]
    trained = case.reference.main.bound("parameter")
    for name, expected in model.named_parameters():
        if name in trained:
            zero = torch.zeros_like(expected)
            pairs.append((gradients.get(name, zero), zero if expected.grad is None else expected.grad))
    floor = max(float(e.abs().max()) for _, e in pairs) * 1e-3
    return max(float((g - e).abs().max()) / max(float(e.abs().max()), floor, 1e-30) for g, e in pairs)
