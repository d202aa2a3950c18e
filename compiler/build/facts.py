"""A build's facts: what its manifest says beside the programs, and what of it follows from them and the schedule."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from ..layout.mesh import Mesh
from ..layout.placement import TensorType, parse_type
from ..padding.pads import pads_from
from ..program.actions import ACTIONS, FORWARD, REDUCE, Purpose, work_kinds
from ..program.binding import PARAMETERS
from ..program.program import Fault, Program
from ..program.roles import Role
from ..program.step_values import residual_of
from ..sizes.size_range import BATCH


def program_facts(programs: Mapping[str, Program], reference: Program) -> dict[str, Any]:
    """The facts of a manifest that follow from its programs alone: how parameters are stored, which buffers a step
    updates, what role the programs are of."""
    mesh = programs[FORWARD].mesh
    return {
        "parameters": {name: type_.text(mesh) for name, type_ in stored_in(programs).items()},
        "updates": list(
            dict.fromkeys(name for of in (reference, *programs.values()) for name in of.main.returned("buffer"))
        ),
        "role": programs[FORWARD].role,
    }


def stored_in(programs: Mapping[str, Program]) -> dict[str, TensorType]:
    """Each parameter's type as a rank stores it."""
    reduce = programs[REDUCE].main
    values = reduce.values()
    found: dict[str, TensorType] = {}
    for program in programs.values():
        found.update((name, value.type) for name, value in program.main.bound(*PARAMETERS).items())
    found.update((name, values[made].type) for name, made in reduce.returned("gradient").items())
    return dict(sorted(found.items()))


def fact_faults(
    manifest: Mapping[str, Any], programs: Mapping[str, Program], reference: Program, roles: Mapping[str, Role]
) -> list[Fault]:
    """Return the faults of a manifest that contradicts the programs or the schedule of its build.

    What these do not say is the plan's, or the model's alone: the values of ``constants``, the names in ``aliases`` and
    ``init``, and parameters that are frozen though no program reads them.
    """
    mesh = programs[FORWARD].mesh
    wanted = {"mesh": dict(mesh.declared.axes), **program_facts(programs, reference)}
    return unlike(manifest, wanted, "programs say") or [
        *_schedule_faults(manifest, roles),
        *_view_faults(manifest, mesh),
        *_input_faults(manifest, reference),
        *_state_faults(manifest, programs),
    ]


def purpose_of(manifest: Mapping[str, Any]) -> Purpose:
    """Return what the programs of a build are for, by its manifest; those of its evaluation apart."""
    return "training" if manifest["loss"] else "inference"


def evaluation_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a build's evaluation alone, which trains nothing and keeps nothing from step to step.
    ``said`` is the verb of the plan's line that names its samples."""
    own = manifest["evaluation"]
    kept = {key: value for key, value in manifest.items() if key not in ("evaluation", "experts")}
    data, said = (manifest["data"], "data") if own["data"] is None else (own["data"], "eval")
    return {
        **kept, "data": data, "said": said, "batches": own["batches"], "constants": own["constants"], "state": {},
        "frozen": sorted(manifest["parameters"]),
    }  # fmt: skip


def evaluation_faults(
    manifest: Mapping[str, Any], programs: Mapping[str, Program], reference: Program, roles: Mapping[str, Role],
    trained: Mapping[str, Role],
) -> list[Fault]:  # fmt: skip
    """Return the faults of an evaluation beside its own manifest, and parameters that a role reads though the same role
    of the step, in ``trained``, does not hold them."""
    faults = [*_input_faults(manifest, reference), *_state_faults(manifest, programs)]
    for name, role in roles.items():
        held = trained[name].programs.values() if name in trained else ()
        own = {key.name for program in held for key in program.main.bindings if key.kind in PARAMETERS}
        read = {key.name for program in role.programs.values() for key in program.main.bindings
                if key.kind in PARAMETERS}  # fmt: skip
        faults += [
            fact_fault(f"the evaluation of {name} reads `{other}`, which its steps do not")
            for other in sorted(read - own)
        ]
    return faults


def unlike(
    manifest: Mapping[str, Any], wanted: Mapping[str, Any], said: str, parts: Collection[str] = ()
) -> list[Fault]:
    """Return a fault for each fact that differs from the wanted one. For the keys in ``parts`` only those parts of a
    fact are compared that the wanted one has."""
    faults = []
    for key, value in wanted.items():
        have = _part(manifest.get(key), value) if key in parts else manifest.get(key)
        if fact_text(have) != fact_text(value):
            faults.append(fact_fault(f"`{key}` is {_short(have)}, but the {said} {_short(value)}"))
    return faults


def _part(have: Any, wanted: Any) -> Any:
    """Return the parts of a fact that the wanted one has too."""
    if isinstance(have, list) and isinstance(wanted, list):
        return [_part(*pair) for pair in zip(have, wanted, strict=True)] if len(have) == len(wanted) else have
    if isinstance(have, Mapping) and isinstance(wanted, Mapping):
        return {key: value for key, value in have.items() if key in wanted}
    return have


def _view_faults(manifest: Mapping[str, Any], mesh: Mesh) -> Iterator[Fault]:
    """Find views whose axes are other ranks in the programs than in the plan: its axes are those of the mesh, in their
    order."""
    views = dict(mesh.views)
    for view in manifest.get("views", ()):
        if unknown := [axis for axis in view["over"] if axis not in mesh.declared]:
            yield fact_fault(f"`views` is over `{unknown[0]}`, which the mesh does not have")
            continue
        over = [part for axis in view["over"] for part in mesh.parts(axis) if mesh.size(part) > 1]
        own = {name: views.pop(name, ()) for name in view["axes"]}
        sizes = [math.prod(map(mesh.size, parts)) for parts in own.values()]
        if [part for parts in own.values() for part in parts] != over or sizes != view["sizes"]:
            yield fact_fault(f"`views` has {view['axes']} of {view['sizes']} ranks, but the programs {own}")
    if views:
        yield fact_fault(f"`views` lacks {sorted(views)}, which the programs have")


def _input_faults(manifest: Mapping[str, Any], reference: Program) -> Iterator[Fault]:
    """Find inputs that differ from those of a microbatch at the manifest's sizes."""
    read = {name: value for function in reference.functions for name, value in function.bound("input").items()}
    sizes, microbatches = manifest["sizes"], manifest["microbatches"]
    for line in manifest["inputs"]:
        value, name = read.get(line["name"]), line["name"]
        if unknown := [dim for dim in line["dims"] if isinstance(dim, str) and dim not in sizes]:
            yield fact_fault(f"`sizes` has no `{unknown[0]}` of the input `{name}`")
        elif value is not None and microbatches >= 1:
            whole = [dim if isinstance(dim, int) else sizes[dim] for dim in line["dims"]]
            shape = tuple(n // microbatches if dim == BATCH else n for dim, n in zip(line["dims"], whole, strict=True))
            if (f"torch.{line['dtype']}", shape) != (str(value.type.dtype), value.type.shape):
                yield fact_fault(f"`inputs` and `sizes` make `{name}` {line['dtype']} {list(shape)} in a microbatch, "
                                 f"but it is `{value.type.text(reference.mesh)}` in the model")  # fmt: skip


def _state_faults(manifest: Mapping[str, Any], programs: Mapping[str, Program]) -> Iterator[Fault]:
    """Find wrong facts about the model's tensors that the programs read."""
    mesh, main, stored = programs[FORWARD].mesh, programs[FORWARD].main, manifest["parameters"]
    frozen, read = ({name for program in programs.values() for name in program.main.bound(kind)}
                    for kind in PARAMETERS[::-1])  # fmt: skip
    wrong = sorted(frozen - set(manifest["frozen"])) + sorted(read & set(manifest["frozen"]))
    for name in wrong:
        yield fact_fault(f"`frozen` does not say of `{name}` what the programs say")
    kept = {name for program in programs.values() for name, value in program.main.bound("state").items()
            if not residual_of(value.binding)}  # fmt: skip
    for name in sorted(kept ^ manifest["state"].keys()):
        yield fact_fault(f"`state` does not say of `{name}` what the programs say")
    for name, value in main.bound("constant").items():
        constant = manifest["constants"].get(name)
        if constant is None or f"torch.{constant['dtype']}" != str(value.type.dtype):
            yield fact_fault(f"`constants` has no `{name}` of {value.type.text(mesh)}")
        elif math.prod(value.type.shape) and _shape(constant["values"]) != value.type.shape:
            yield fact_fault(f"`constants.{name}` is not of shape {list(value.type.shape)}")
    for tensor in (manifest["init"] or {"tensors": ()})["tensors"]:
        if not isinstance(getattr(torch, tensor["dtype"], None), torch.dtype):
            yield fact_fault(f"`init.tensors` has one of type {_short(tensor['dtype'])}")
    for name, rows in pads_from(manifest["padding"]).items():
        shape = parse_type(stored[name], mesh).shape if name in stored else ()
        for pad in rows:
            if not 0 <= pad.dim < len(shape) or shape[pad.dim] != pad.outer * pad.padded or pad.real > pad.padded:
                yield fact_fault(f"`padding.{name}` is of no dim of a parameter that the programs have")


def _shape(values: Any) -> tuple[int, ...]:
    """Return the shape of nested lists; for uneven lists a shape that no tensor has."""
    if not isinstance(values, list):
        return ()
    inner = {_shape(value) for value in values}
    return (len(values), *(inner.pop() if len(inner) == 1 else (-1,) * len(inner)))


def _schedule_faults(manifest: Mapping[str, Any], roles: Mapping[str, Role]) -> Iterator[Fault]:
    microbatches, purpose = manifest["microbatches"], purpose_of(manifest)
    for name, role in roles.items():
        done = Counter((action.stage, action.kind) for action in role.actions)
        for stage, kind in product(role.stages, work_kinds()):
            if done[stage, kind] != (microbatches if ACTIONS[kind].serves(purpose) else 0):
                yield fact_fault(f"`microbatches` is {microbatches}, but {name} does `{kind}` of stage {stage} "
                                 f"{done[stage, kind]} times")  # fmt: skip


def fact_fault(message: str) -> Fault:
    """A fault of the manifest."""
    return Fault("facts", "manifest.json", message)


def fact_text(value: Any) -> str:
    """Return a text that is equal for equal facts."""
    return json.dumps(value, sort_keys=True)


def _short(value: Any) -> str:
    text = "nothing" if value is None else fact_text(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
