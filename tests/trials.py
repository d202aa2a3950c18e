"""Trials of random models: captured once, then built and simulated for any number of plans."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from parc.checks import rounding_of, static_faults
from parc.compiler.capture import Captured, InputSpec, capture
from parc.compiler.mesh import Mesh
from parc.compiler.names import Names
from parc.compiler.placement import Split, parse_type
from parc.compiler.plan import read_plan
from parc.compiler.precision import regions
from parc.compiler.program import Program
from parc.compiler.program_text import parse_program
from parc.compiler.recipes import Recorded, record
from parc.compiler.resolve import resolve
from parc.compiler.roles import join
from parc.driver import Compiled, frozen_parameters, optimizer_facts, stored_types, task_lines
from parc.grammar.source import Source
from parc.passes.pipeline import Request, build_programs
from parc.passes.weights import names_of
from parc.pipelines import pipeline_of, timelines_of
from parc.runtime.backends.in_process import InProcess
from parc.runtime.execute import Machine
from parc.runtime.kernels import REFERENCE_KERNELS
from parc.runtime.random_batch import random_batch
from parc.runtime.simulate import Agreement, Case, compare

from .strategies import ModelSpec, RandomModel, filled, input_shapes

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Subject:
    """A captured model, and the numbers it starts from."""

    spec: ModelSpec
    recorded: Recorded
    captured: Captured
    names: Names
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def call_loss(spec: ModelSpec, output: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a spec."""
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
    """The model of a spec, captured."""
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
    return Subject(spec, recorded, captured, names_of(captured), dict(model.named_parameters()), buffers)


def build(made: Subject, text: str) -> Compiled:
    """The programs of the model under a plan.

    Raises:
        PlanError: the plan asks for what cannot be.
    """
    plan = read_plan(Source("random.parc", text))
    resolved = resolve(plan, made.names)
    lines = task_lines(plan)
    frozen = frozen_parameters(plan, made.recorded, made.captured, resolved)
    kinds = {**dict.fromkeys(frozen, "frozen"), **dict.fromkeys(lines.inputs, "input")}
    claims = tuple(
        (
            f"{kinds.get(seed.value, 'parameter')} {seed.value}",
            seed.axis,
            None if seed.dim is None else Split(seed.dim, seed.outer),
            seed.span.line,
        )
        for seed in resolved.seeds
    )
    pads = {f"{'frozen' if name in frozen else 'parameter'} {name}": rows for name, rows in resolved.pads.items()}
    pipeline = pipeline_of(plan, made.names, made.captured)
    request = Request(claims, plan.microbatches, plan.seed, frozen, pads=pads, precision=regions(resolved.precision),
                      pipeline=pipeline)  # fmt: skip
    built = build_programs(made.captured, plan.mesh, request)
    timelines = timelines_of(plan, "COUNT" in built.programs, pipeline, Path())
    return Compiled(
        plan, Path("."), plan.mesh, lines, made.recorded, made.captured, resolved, built, timelines, pipeline, {}, {},
        frozen=frozen,
    )  # fmt: skip


def case_of(made: Subject, compiled: Compiled) -> Case:
    """What the simulator needs, with programs read back from their texts."""
    stored = stored_types(compiled)
    roles = {name: replace(role, programs={key: reread(program) for key, program in role.programs.items()})
             for name, role in compiled.roles().items()}  # fmt: skip
    return Case(
        join({name: role.programs for name, role in roles.items()}),
        reread(compiled.built.reference),
        () if compiled.pipeline is not None else compiled.actions,
        compiled.mesh,
        compiled.plan.microbatches,
        optimizer_facts(compiled),
        {name: made.parameters[name].detach() for name in stored},
        made.buffers,
        stored,
        compiled.resolved.pads,
        roles,
    )


def reread(program: Program) -> Program:
    """The program from its text, which must be the same program."""
    text = program.text()
    again = parse_program(text)
    assert again.text() == text
    assert again == program
    return again


def check(made: Subject, text: str, steps: int = 2) -> tuple[Compiled, Agreement]:
    """Build, run every static check, simulate; all must hold."""
    compiled = build(made, text)
    case = case_of(made, compiled)
    types = {name: parse_type(stored, compiled.mesh) for name, stored in case.stored.items()}
    rounding, pads = rounding_of(compiled), compiled.resolved.pads
    faults = static_faults(
        case.programs, types, compiled.mesh, (), case.microbatches, case.reference, pads, rounding, case.roles
    )
    assert not faults, "\n".join(map(str, faults))
    agreement = compare(case, steps)
    assert agreement.largest <= TOLERANCE, agreement
    return compiled, agreement


def eager_error(made: Subject, reference: Program) -> float:
    """How far loss and gradients of the captured graph are from the module's own, relative to the largest."""
    model = filled(made.spec).train()
    batch = random_batch(reference, 1, torch.Generator().manual_seed(3))[0]
    dtype, shape = input_shapes(made.spec)["x"]
    wide = torch.float64 if dtype == "float32" else torch.int64
    batch = {"x": torch.zeros(shape, dtype=wide), **batch}  # a model may read its other input alone
    output = call_loss(made.spec, model(*(batch[name] for name in ("x", "z") if name in batch)), batch)
    output.backward()
    parameters = {name: value.detach().clone().requires_grad_() for name, value in made.parameters.items()}
    machine = Machine(reference, InProcess(Mesh()), torch.device("cpu"), wide=True, kernels=REFERENCE_KERNELS)
    buffers = {name: value.detach().clone() for name, value in made.buffers.items()}

    def environment(function: str) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for value in reference.function(function).parameters:
            kind, _, name = value.role.partition(" ")
            tables = {"input": batch, "parameter": parameters, "frozen": parameters}
            table: Mapping[str, Any] = tables.get(kind, buffers)
            given[value.name] = table[name]
        return given

    loss = machine.run([environment("forward")], "forward")[0]["loss"]
    if any(function.name == "count" for function in reference.functions):
        loss = loss / machine.run([environment("count")], "count")[0]["count"]
    loss.backward()
    pairs = [(loss, output)]
    trained = {value.role for value in reference.function("forward").parameters}
    for name, expected in model.named_parameters():
        if f"parameter {name}" not in trained:
            continue
        given = parameters[name].grad
        zero = torch.zeros_like(expected)
        pairs.append((zero if given is None else given, zero if expected.grad is None else expected.grad))
    floor = max(float(e.detach().abs().max()) for _, e in pairs) * 1e-3
    return max(float((g - e).detach().abs().max()) / max(float(e.detach().abs().max()), floor, 1e-30) for g, e in pairs)
