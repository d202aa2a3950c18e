"""Facts of a manifest that follow from the programs and the schedule of its build, and the faults of others."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import torch

from ..layout.mesh import Mesh
from ..layout.placement import TensorType, parse_type
from ..ops.rules import facts, registered, registered_row
from ..padding.pads import pads_from
from ..program.actions import ACTIONS, FORWARD, REDUCE, Purpose, phases_of, work_kinds
from ..program.binding import PARAMETERS
from ..program.optimizers import PREVIOUS, WEIGHT_LIMITS
from ..program.program import Fault, Program, operator
from ..program.roles import Role
from ..program.step_values import residual_of
from ..sizes.size_range import BATCH


def program_facts(programs: Mapping[str, Program], reference: Program) -> dict[str, Any]:
    """Return the facts of a manifest that follow from its programs alone: the types in which parameters are stored, the
    buffers that a step updates, the role of the programs."""
    mesh = programs[FORWARD].mesh
    return {
        "parameters": {name: type_.text(mesh) for name, type_ in stored_in(programs).items()},
        "updates": list(
            dict.fromkeys(name for of in (reference, *programs.values()) for name in of.main.returned("buffer"))
        ),
        "role": programs[FORWARD].role,
    }


def operator_facts(programs: Iterable[Program]) -> dict[str, dict[str, Any]]:
    """Return what a certificate takes as given of a person's own operators: the registered rules of those that programs
    use, and of those that their gradients name, with torch's names of their arguments."""
    rows: dict[str, dict[str, Any]] = {}
    left = sorted({op for program in programs for op in program.operators})
    while left:
        op = left.pop()
        known = registered_row(op)
        if known is None or op in rows:
            continue
        arguments = [each for each in operator(op)._schema.arguments if each.name != "device"]  # programs name none
        rows[op] = dict(zip(("rule", "linear", "gradient"), known, strict=True)) | {
            "number": facts(op).number,
            "arguments": [argument.name for argument in arguments],
            "defaults": {each.name: each.default_value for each in arguments if each.has_default_value()},
        }
        left += [name for name in registered() if name in rows[op]["gradient"]]
    return dict(sorted(rows.items()))


def stored_in(programs: Mapping[str, Program]) -> dict[str, TensorType]:
    """Return each parameter's type as a rank stores it."""
    reduce = programs[REDUCE].main
    values = reduce.values()
    stored: dict[str, TensorType] = {}
    for program in programs.values():
        stored.update((name, value.type) for name, value in program.main.bound(*PARAMETERS).items())
    stored.update((name, values[gradient].type) for name, gradient in reduce.returned("gradient").items())
    return dict(sorted(stored.items()))


def fact_faults(
    manifest: Mapping[str, Any], programs: Mapping[str, Program], reference: Program, roles: Mapping[str, Role]
) -> list[Fault]:
    """Return the faults of a manifest that contradicts the programs or the schedule of its build.

    Other facts follow from the plan (``plan_faults``), or from the model alone: the values of ``constants``, the names
    in ``aliases`` and ``init``, and parameters that are frozen though no program reads them.
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
    """Return the purpose of a build's programs, except those of its evaluation."""
    return "training" if manifest["loss"] else "inference"


def evaluation_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a build's evaluation alone, which trains nothing and keeps nothing from step to step.
    ``said`` is the verb of the plan's line that names its samples."""
    line = manifest["evaluation"]
    kept = {key: value for key, value in manifest.items() if key not in ("evaluation", "experts")}
    data, said = (manifest["data"], "data") if line["data"] is None else (line["data"], "eval")
    return {
        **kept, "data": data, "said": said, "batches": line["batches"], "constants": line["constants"], "state": {},
        "divisions": line["divisions"],
        "frozen": sorted(manifest["parameters"]),
        "optimizer": {key: value for key, value in manifest["optimizer"].items() if key != WEIGHT_LIMITS},
    }  # fmt: skip


def evaluation_faults(
    manifest: Mapping[str, Any], programs: Mapping[str, Program], reference: Program, roles: Mapping[str, Role],
    trained: Mapping[str, Role],
) -> list[Fault]:  # fmt: skip
    """Return the faults of an evaluation beside its own manifest, and parameters that a role reads though the same role
    of the step, in ``trained``, does not hold them."""

    def parameters(role: Role | None) -> set[str]:
        programs = role.programs.values() if role is not None else ()
        return {key.name for program in programs for key in program.main.bindings if key.kind in PARAMETERS}

    faults = [*_input_faults(manifest, reference), *_state_faults(manifest, programs)]
    for name, role in roles.items():
        unknown = sorted(parameters(role) - parameters(trained.get(name)))
        faults += [fact_fault(f"the evaluation of {name} reads `{other}`, which its steps do not") for other in unknown]
    return faults


def unlike(
    manifest: Mapping[str, Any], wanted: Mapping[str, Any], said: str, parts: Collection[str] = ()
) -> list[Fault]:
    """Return a fault for each fact that differs from the wanted one, whose source is ``said``. Of a fact in ``parts``
    only those parts are compared that the wanted one has."""
    faults = []
    for key, value in wanted.items():
        have = _compared_part(manifest.get(key), value) if key in parts else manifest.get(key)
        if _fact_text(have) != _fact_text(value):
            faults.append(fact_fault(f"`{key}` is {_short(have)}, but the {said} {_short(value)}"))
    return faults


def _compared_part(have: Any, wanted: Any) -> Any:
    """Return the parts of a fact that the wanted one has too."""
    if isinstance(have, list) and isinstance(wanted, list):
        return [_compared_part(*pair) for pair in zip(have, wanted, strict=True)] if len(have) == len(wanted) else have
    if isinstance(have, Mapping) and isinstance(wanted, Mapping):
        return {key: value for key, value in have.items() if key in wanted}
    return have


def _view_faults(manifest: Mapping[str, Any], mesh: Mesh) -> Iterator[Fault]:
    """Find views whose axes have other sub-axes in the programs than the plan says: all those of the mesh's axes that
    the view is over, in their order."""
    views = dict(mesh.views)
    for view in manifest.get("views", ()):
        if unknown := [axis for axis in view["over"] if axis not in mesh.declared]:
            yield fact_fault(f"`views` is over `{unknown[0]}`, which the mesh does not have")
            continue
        over = [part for axis in view["over"] for part in mesh.parts(axis) if mesh.size(part) > 1]
        axes = {name: views.pop(name, ()) for name in view["axes"]}
        sizes = [math.prod(map(mesh.size, parts)) for parts in axes.values()]
        if [part for parts in axes.values() for part in parts] != over or sizes != view["sizes"]:
            yield fact_fault(f"`views` has {view['axes']} of {view['sizes']} ranks, but the programs {axes}")
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
    """Find wrong facts about the tensors of the model, and the state of steps, that the programs read."""
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
        elif math.prod(value.type.shape) and _list_shape(constant["values"]) != value.type.shape:
            yield fact_fault(f"`constants.{name}` is not of shape {list(value.type.shape)}")
    for tensor in (manifest["init"] or {"tensors": ()})["tensors"]:
        if not isinstance(getattr(torch, tensor["dtype"], None), torch.dtype):
            yield fact_fault(f"`init.tensors` has one of type {_short(tensor['dtype'])}")
    for name, rows in pads_from(manifest["padding"]).items():
        shape = parse_type(stored[name], mesh).shape if name in stored else ()
        for pad in rows:
            if not 0 <= pad.dim < len(shape) or shape[pad.dim] != pad.outer * pad.padded or pad.real > pad.padded:
                yield fact_fault(f"`padding.{name}` is of no dim of a parameter that the programs have")


def _list_shape(values: Any) -> tuple[int, ...]:
    """Return the shape of nested lists; for ragged lists a shape that no tensor has."""
    if not isinstance(values, list):
        return ()
    inner = {_list_shape(value) for value in values}
    return (len(values), *(inner.pop() if len(inner) == 1 else (-1,) * len(inner)))


def _schedule_faults(manifest: Mapping[str, Any], roles: Mapping[str, Role]) -> Iterator[Fault]:
    microbatches, purpose = manifest["microbatches"], purpose_of(manifest)
    for name, role in roles.items():
        if role.overlaps and not manifest["optimizer"].get(PREVIOUS):
            yield fact_fault(f"`optimizer` has no `{PREVIOUS}`, but {name} begins a step before the update of the last")
    for name, role in roles.items():
        done = Counter((action.stage, action.kind) for action in role.actions)
        for stage, kind in product(role.stages, (kind for kind in work_kinds() if not ACTIONS[kind].instead_of)):
            times = sum(done[stage, each] for each in (kind, *phases_of(kind)[:1]))
            if times != (microbatches if ACTIONS[kind].serves(purpose) else 0):
                yield fact_fault(f"`microbatches` is {microbatches}, but {name} does `{kind}` of stage {stage} "
                                 f"{times} times")  # fmt: skip


def fact_fault(message: str) -> Fault:
    """Return a fault of the manifest."""
    return Fault("facts", "manifest.json", message)


def _fact_text(value: Any) -> str:
    """Return a text that is equal for equal facts."""
    return json.dumps(value, sort_keys=True)


def _short(value: Any) -> str:
    return shortened("nothing" if value is None else _fact_text(value))


def shortened(text: str) -> str:
    """Return at most 80 characters of a text."""
    return text if len(text) <= 80 else f"{text[:77]}..."
