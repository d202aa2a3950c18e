"""Rows of a build's report that follow from its plan, programs and schedule: to write a report, and to check one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

from parc.compiler.analysis.communication import communication_table
from parc.compiler.analysis.flops import stage_flops, step_timeline
from parc.compiler.analysis.memory import Memory, action_peaks, estimate_memory, offload_buffers, state_bytes, states
from parc.compiler.analysis.products import BLAS, ONEDNN
from parc.compiler.build.build import Build, BuildError
from parc.compiler.build.directory import again, json_text, unlined
from parc.compiler.build.plan_facts import view_facts
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import parts
from parc.compiler.padding.pads import real_shape
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiler.program.actions import FORWARD, Action
from parc.compiler.program.binding import PARAMETERS
from parc.compiler.program.blocks import block_of, starred
from parc.compiler.program.program import Fault
from parc.compiler.program.roles import Role
from parc.compiler.resolve.pattern import Pattern
from parc.compiler.sizes.size_range import BATCH
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source

_MOST_APART = 0.01
"""The relative difference of two estimates above which a report names both."""


def program_rows(build: Build, plan: Plan) -> dict[str, Any]:
    """Return mesh, sizes, batch, roles, stages, memory and communication in the report's form."""
    rows = [row for role in build.roles.values() for row in communication_table(role)]
    stage = next((line.span.root.line for line in plan.stages), 0)
    for row in rows:
        row["line"] = stage if row["op"] == "send" else row["line"]
        seen = seen_from(row["module"], plan, build.mesh)
        row["axis"] = ",".join(seen.joined(build.mesh.spread(row["axis"].split(","))))
    return {
        "mesh": dict(build.mesh.declared.axes),
        **view_facts(plan),
        "world": build.mesh.world,
        "purpose": build.purpose,
        "sizes": {name: str(size) for name, size in plan.sizes.items()},
        "batch": _batch_row(build),
        "roles": list(build.roles),
        **_stage_rows(build),
        "parameters": sum(_real_entries(build, name) for name in build.types),
        "memory": [_memory_row(build, plan, role) for role in build.roles.values()],
        **({"budget": plan.budget.memory} if plan.budget is not None else {}),
        "communication": rows,
        **_expert_rows(build, plan),
    }


def _batch_row(build: Build) -> dict[str, int] | None:
    """Return the samples of a step's batch, its microbatches and its data ranks; None if no input has a batch dim."""
    values = build.programs[FORWARD].main.bound("input")
    dims = {line["name"]: line["dims"].index(BATCH) for line in build.manifest["inputs"] if BATCH in line["dims"]}
    if not dims:
        return None
    ranks = [parts(values[name].type.placement, build.mesh, dim) for name, dim in dims.items() if name in values]
    return {
        "samples": int(build.manifest["sizes"][BATCH]), "microbatches": build.microbatches,
        "data_ranks": max(ranks, default=1),
    }  # fmt: skip


def _stage_rows(build: Build) -> dict[str, Any]:
    """Return each stage with its layers, parameters and the FLOPs of a step on one of its ranks, and the idle share of
    each role in a step."""
    rows, timeline = [], step_timeline(build.roles)
    of_stage = {stage: role for role in build.roles.values() for stage in role.stages}
    for stage, flops in stage_flops(build.roles).items():
        role = of_stage[stage]
        forward = role.programs[Action(stage, FORWARD).program_in(role.programs)]
        held = {name for kind in (*PARAMETERS, "weight") for name in forward.main.bound(kind)} & build.types.keys()
        layers = {block_of(line.origin.module) for line in forward.main.lines if line.calls_function} - {None}
        rows.append(
            {
                "stage": stage, "role": role.name, "layers": len(layers),
                "parameters": sum(_real_entries(build, name) for name in held),
                "flops": sum(flops.get(each.kind, 0) for each in role.actions if each.works and each.stage == stage),
            }
        )  # fmt: skip
    return {"stages": rows, "idle": {name: timeline.idle_share(name) for name in build.roles}}


def seen_from(name: str, plan: Plan, mesh: Mesh) -> Mesh:
    """Return the mesh with the axes that a module or a parameter sees in its texts; "" is no module."""
    path = name.split(".")
    inside = [".".join(path[:depth]) for depth in range(1, len(path) + 1)]
    for line in plan.views:
        if any(Pattern(word.text).of(inside) for word in line.where):
            return replace(mesh, seen=tuple(axis for axis, _ in line.view.axes if axis in dict(mesh.views)))
    return replace(mesh, views=()) if name else mesh


def _expert_rows(build: Build, plan: Plan) -> dict[str, Any]:
    """Return the layers of experts, alike ones together, with the peak memory of a rank to which all tokens are
    routed."""
    rows: dict[str, dict[str, Any]] = {}
    for module, fact in build.manifest.get("experts", {}).items():
        row = {
            "modules": starred(module),
            "layers": 0,
            **{key: fact[key] for key in ("experts", "top", "ranks", "rate", "load", "capacity")},
        }
        rows.setdefault(str(row), row)["layers"] += 1
    dropless = [row for row in rows.values() if row["capacity"] is None]
    most = max(
        (row["ranks"] * min(row["top"], row["experts"] // row["ranks"]) / row["top"] for row in dropless), default=1
    )
    peaks = (memory_of(build, plan, role, most).peak_bytes for role in build.roles.values())
    return {"experts": list(rows.values()), "experts_peak_bytes": max(peaks)} if rows else {}


def memory_of(build: Build, plan: Plan, role: Role, load: float | None = None) -> Memory:
    """Return the memory of a rank of a role, with the matrix library that needs more."""
    return max(memory_by_library(build, plan, role, load).values(), key=lambda memory: memory.peak_bytes)


def memory_by_library(build: Build, plan: Plan, role: Role, load: float | None = None) -> dict[str, Memory]:
    """Return the memory of a rank of a role by the name of the matrix library: a build does not know on which device it
    will run. ``load`` is the load of the busiest rank of experts; that of the plan's lines if it is left out."""
    load = _busiest(plan) if load is None else load
    arguments = role.programs, role.actions, build.types, _moments(build, plan), plan.offloaded
    buffers = offload_buffers(*arguments)
    offloaded = {word: sum(size * count for size, count in buffers[word].items()) for word in plan.offloaded}
    update = build.manifest["optimizer"]
    usual = replace(estimate_memory(*arguments, load, BLAS, update), offloaded=offloaded)
    if not _differ(role):
        return {BLAS.name: usual, ONEDNN.name: usual}
    return {
        BLAS.name: usual,
        ONEDNN.name: replace(estimate_memory(*arguments, load, ONEDNN, update), offloaded=offloaded),
    }


def action_peaks_of(build: Build, plan: Plan, role: Role) -> dict[Action, int]:
    """Return the most bytes that a rank of a role holds while each of its actions runs, with the matrix library that
    needs more."""
    arguments = role.programs, role.actions, build.types, _moments(build, plan), plan.offloaded, _busiest(plan)
    libraries = (BLAS, ONEDNN) if _differ(role) else (BLAS,)
    peaks = [action_peaks(*arguments, library, build.manifest["optimizer"]) for library in libraries]
    return {action: max(one[action] for one in peaks) for action in peaks[0]}


def _busiest(plan: Plan) -> float:
    """Return the load of the busiest rank of experts."""
    return max((line.load for line in plan.placements if isinstance(line, Experts)), default=1.0)


def _differ(role: Role) -> bool:
    """Return whether matrix libraries need different temporaries for a role's products."""
    return any(
        ONEDNN.apart(line, function, program.mesh)
        for program in role.programs.values() for function in program.functions for line in function.lines
    )  # fmt: skip


def _moments(build: Build, plan: Plan) -> dict[str, int]:
    """Return the number of tensors that the update keeps of each parameter; frozen parameters have none."""
    return dict.fromkeys(build.types.keys() - set(build.manifest["frozen"]), plan.moments)


def states_of(build: Build, plan: Plan, role: Role) -> dict[str, dict[str, int]]:
    """Return the bytes of a rank's training state by parameter of its role, and kind."""
    return states(role.programs, build.types, _moments(build, plan), role.overlaps)


def _memory_row(build: Build, plan: Plan, role: Role) -> dict[str, Any]:
    memories = memory_by_library(build, plan, role)
    memory = max(memories.values(), key=lambda memory: memory.peak_bytes)
    peaks = {name: memory.peak_bytes for name, memory in memories.items()}
    parameters = {name for program in role.programs.values() for name in program.main.bound(*PARAMETERS)}
    return {
        "role": role.name, "peak_bytes": memory.peak_bytes, **asdict(memory),
        "state": state_bytes(role.programs, build.types, _moments(build, plan), role.overlaps),
        "of": sum(_real_entries(build, name) for name in parameters & build.types.keys()),
        **({"peak_by_library": peaks} if max(peaks.values()) > (1 + _MOST_APART) * min(peaks.values()) else {}),
    }  # fmt: skip


def _real_entries(build: Build, name: str) -> int:
    return math.prod(real_shape(build.types[name].shape, build.pads.get(name, ())))


def plan_of(build: Build) -> Plan:
    """Read the plan that a build holds.

    Raises:
        BuildError: the build's `plan.parc` is no plan.
    """
    try:
        return read_plan(Source("plan.parc", build.texts["plan.parc"], path=build.path / "plan.parc"))
    except PlanError as error:
        message = f"`{build.path / 'plan.parc'}` is no plan: {error.diagnostics[0].message}"
        raise BuildError(message, again(build.path)) from None


def report_faults(build: Build, plan: Plan) -> list[Fault]:
    """Return the facts of a build's report that its programs and its schedule contradict. Numeric errors, lines of the
    plan and build options are not checked here: only a recompilation can check them."""
    wanted = json.loads(json_text(unlined(program_rows(build, plan))))
    return [
        Fault("facts", "report.json", f"`{key}` is not what the programs say")
        for key in wanted
        if unlined(build.report.get(key)) != wanted[key]
    ]
