"""The files of a plan's ``init`` line, checked against its model, and the facts about them for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parc.compiler.capture.capture import Captured
from parc.compiler.initial.files import WeightsError, open_weights, shown_faults, state_tensors
from parc.compiler.initial.recipes import Recorded
from parc.compiler.plan.plan import Plan
from parc.grammar.codes_build import BAD_WEIGHTS
from parc.grammar.diagnostics import Diagnostic, Label, PlanError


def init_facts(plan: Plan, recorded: Recorded, captured: Captured) -> dict[str, Any] | None:
    """Return the facts of the ``init`` line, with the model's tensors as a run expects them in the files."""
    line = plan.init
    if line is None:
        return None
    tensors = [
        {
            "names": list(tensor.names),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            **({"optional": True} if tensor.optional else {}),
        }
        for tensor in state_tensors(recorded.module, captured.aliases)
    ]
    return {"folder": line.folder, "rounded": line.rounded, "tensors": tensors}


def check_weights(plan: Plan, folder: Path, recorded: Recorded, captured: Captured) -> None:
    """Check the files of the ``init`` line against the model; no tensor is read.

    Raises:
        PlanError: they cannot be read, or do not fit; tensors that do not are named.
    """
    line = plan.init
    if line is None:
        return
    label = Label(line.arguments.span("from"))
    try:
        weights = open_weights(folder / line.folder, line.rounded)
    except WeightsError as error:
        raise PlanError(
            [Diagnostic(BAD_WEIGHTS, str(error), label, help="name a folder of safetensors files")]
        ) from None
    faults = weights.faults(state_tensors(recorded.module, captured.aliases))
    if faults:
        message = f"the weights in `{line.folder}` are not the model's"
        help_ = "write files with the model's own names, as its `state_dict()` has them"
        raise PlanError([Diagnostic(BAD_WEIGHTS, message, label, help=help_, notes=shown_faults(faults))])
