"""Facts of a manifest that follow from its plan alone, and the faults of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...grammar.syntax import Word
from ..plan.directives.eval import Eval
from ..plan.directives.precision import TYPES
from ..plan.directives.schedule import ACCUMULATE
from ..plan.plan import Plan
from ..plan.rates import RATE_TABLE
from ..program.optimizers import AVERAGE, PREVIOUS, WEIGHT_LIMITS, grouped
from ..program.program import Fault
from ..program.step_values import initial_state
from ..resolve.names import PlanNames, find_parameters
from ..resolve.pattern import ANY_DEPTH, Pattern
from ..sizes.polynomials import moving
from .facts import fact_fault, unlike
from .json_schema import MANIFEST_FORM

_PARTS = ("optimizer", "init", "precision", "compress", "evaluation")
"""The facts of which the plan determines only a part: the rest is the model's."""


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of a manifest that follow from its plan alone."""
    ranges = {name: [size.low, size.high, size.step] for name, size in moving(plan.sizes).items()}
    offload = {word: None if line.host else line.folder for word, line in plan.offloaded.items()}
    return {
        **({"ranges": ranges} if ranges else {}),
        **({"budget": plan.budget.memory} if plan.budget is not None else {}),
        **({"offload": offload} if plan.offload else {}),
        **({"replicas": plan.check.every} if plan.check is not None else {}),
        **({"evaluation": _evaluation_facts(plan.evaluation)} if plan.evaluation is not None else {}),
        "model": {"callable": plan.model.callable, "arguments": dict(plan.model.values)},
        "inputs": input_facts(plan),
        "sizes": {name: size.high for name, size in plan.sizes.items()},
        "loss": loss_facts(plan),
        "mesh": dict(plan.mesh.axes),
        **view_facts(plan),
        "microbatches": plan.microbatches,
        "optimizer": _optimizer_facts(plan),
        "accumulate": ACCUMULATE[plan.accumulate],
        "precision": [{"type": TYPES[line.type]} for line in plan.precision],
        "compress": [{"axis": line.axis.text, "format": line.format} for line in plan.compress],
        "data": None if plan.data is None else plan.data.said.facts(),
        "init": None if plan.init is None else {"folder": plan.init.folder, "rounded": plan.init.rounded},
        "seed": plan.seed,
        "state": initial_state(plan.loss_scale),
        "steps": plan.steps,
    }  # fmt: skip


def view_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of the ``view`` lines; nothing where there are none."""
    views = [
        {"over": list(line.view.over), "axes": [name for name, _ in line.view.axes],
         "sizes": [size for _, size in line.view.axes], "in": [word.text for word in line.where]}
        for line in plan.views
    ]  # fmt: skip
    return {"views": views} if views else {}


def input_facts(plan: Plan) -> list[dict[str, Any]]:
    """Return the facts of the ``input`` lines in the manifest's form."""
    return [
        {"name": line.name, **({"as": line.parameter} if line.parameter != line.name else {}), "dtype": line.dtype,
         "dims": list(line.dims)}
        for line in plan.inputs
    ]  # fmt: skip


def loss_facts(plan: Plan) -> list[dict[str, Any]]:
    """Return the facts of the terms of the ``loss`` line in the manifest's form."""
    return [{**term._asdict(), "operands": list(term.operands)} for term in plan.loss.terms]


def _evaluation_facts(line: Eval) -> dict[str, Any]:
    """Return the facts of the ``eval`` line in the manifest's form, without those of the model in ``eval()``."""
    samples = line.samples.facts() if line.samples is not None else None
    return {"every": line.every, "batches": line.batches, "data": samples}


def _optimizer_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of the ``optimizer`` and ``ema`` lines in the manifest's form. A learning rate that falls gets
    its last step."""
    line, steps, ema = plan.optimizer, plan.steps, plan.ema
    over = None if line.shape in ("constant", RATE_TABLE) else line.over if line.over is not None else steps
    return {
        "shape": line.shape, "warmup": line.warmup, "to": line.to, "over": over,
        "name": line.name, "lr": line.lr, "weight_decay": line.weight_decay, "clip": line.clip, "eps": line.eps,
        "betas": list(line.betas), "momentum": line.momentum, "nesterov": line.nesterov,
        **({"arguments": dict(line.values)} if line.values else {}),
        **({"fall": line.fall} if line.fall else {}),
        **({AVERAGE: {"decay": ema.decay, "every": ema.every}} if ema is not None else {}),
        **({PREVIOUS: True} if plan.is_delayed else {}),
        **({"table": [list(row) for row in line.table]} if line.table else {}),
    }  # fmt: skip


def plan_faults(manifest: Mapping[str, Any], plan: Plan) -> list[Fault]:
    """Return the faults of a manifest that contradicts the plan of its build."""
    known = {key.removesuffix("?") for key in MANIFEST_FORM} | {"format"}
    faults = [fact_fault(f"`{key}` is no fact of a build") for key in sorted(manifest.keys() - known)]
    faults += unlike(
        manifest,
        {**dict.fromkeys(("ranges", "budget", "offload", "replicas", "views", "evaluation")), **plan_facts(plan)},
        "plan says",
        _PARTS,
    )
    return faults or list(_name_faults(manifest, plan))


def _name_faults(manifest: Mapping[str, Any], plan: Plan) -> Iterator[Fault]:
    """Find facts that name other parameters or modules than those of the manifest that the plan's patterns match."""
    stored, tied = manifest["parameters"], manifest["aliases"]
    paths = (name.split(".") for name in (*stored, *tied))
    modules = frozenset(".".join(path[:depth]) for path in paths for depth in range(1, len(path)))
    names = PlanNames(dict.fromkeys(stored, ()), modules=modules, tied=dict(tied), smaller=True)

    def matched(words: tuple[Word, ...]) -> set[str]:
        matches = (find_parameters(word, names) for word in words)
        return {name for each in matches if isinstance(each, tuple) for name in each}

    if grouped((line.given, matched(line.where)) for line in plan.groups) != manifest["optimizer"]["groups"]:
        yield fact_fault("`optimizer.groups` are not what the plan's `optimizer on` lines say")
    for name, limits in manifest["optimizer"].get(WEIGHT_LIMITS, {}).items():
        if name not in stored or name in manifest["frozen"] or limits == [None, None]:
            yield fact_fault(f"`optimizer.limits` of `{name}` are no limits of a trained parameter")
    if not matched(plan.frozen) & stored.keys() <= set(manifest["frozen"]):
        yield fact_fault("`frozen` lacks what the plan freezes")
    for line, fact in zip(plan.precision, manifest["precision"], strict=True):
        patterns = [word.text for word in line.where]
        for module in fact["modules"]:
            if not (module == "" if not patterns or ANY_DEPTH in patterns else
                    any(Pattern(text).matches(module) for text in patterns)):  # fmt: skip
                yield fact_fault(f"`precision` has the module `{module}`, which line {line.span.line} does not name")
