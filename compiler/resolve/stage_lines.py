"""The plan's ``stage`` lines applied to the names of a captured model, as far as names alone determine the cuts."""

from __future__ import annotations

from dataclasses import dataclass

from ...grammar.codes import REPEATED, STAGE_COUNT
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.source import Span
from ..plan.plan import Plan
from .names import PlanNames, find_modules
from .pattern import ANY_DEPTH


@dataclass(frozen=True, slots=True)
class StageCut:
    """The end of one stage and the beginning of the next: before a module's first operator, or after its last."""

    module: str
    after: bool
    span: Span

    def __str__(self) -> str:
        module = self.module or ANY_DEPTH
        return f"after out({module})" if self.after else f"before {module}"


def stage_count(plan: Plan) -> int:
    """Return the number of stages of the plan's model: 1 without ``stage`` lines, and where their axis has one rank."""
    if not plan.stages or plan.mesh.size(plan.stages[0].axis.text) == 1:
        return 1
    return plan.mesh.size(plan.stages[0].axis.text) * (plan.schedule.chunks if plan.schedule is not None else 1)


def find_cuts(plan: Plan, names: PlanNames) -> tuple[list[StageCut], list[Diagnostic]]:
    """Return the cuts that ``before`` and ``after`` lines name, in their order (none over one rank), and the errors."""
    if stage_count(plan) == 1:
        return [], []
    cuts: list[StageCut] = []
    errors: list[Diagnostic] = []
    first: dict[tuple[str, bool], StageCut] = {}
    for line in plan.stages:
        for word in (*line.before, *line.after):
            modules = find_modules(word, names)
            if isinstance(modules, Diagnostic):
                errors.append(modules)
                continue
            for cut in (StageCut(module, bool(line.after), word.span) for module in modules):
                cuts.append(cut)
                earlier = first.setdefault((cut.module, cut.after), cut)
                if earlier is not cut:
                    related = (Label(earlier.span, "cut here already"),)
                    message = f"the model is cut twice {cut}"
                    errors.append(Diagnostic(REPEATED, message, Label(cut.span), related, help="remove one"))
    if not errors and not plan.stages[0].balanced:
        errors += _check_count(plan, len(cuts))
    return cuts, errors


def _check_count(plan: Plan, cuts: int) -> list[Diagnostic]:
    """Return an error unless the cuts make as many stages as the axis and the schedule ask for."""
    line, wanted = plan.stages[0], stage_count(plan)
    if cuts + 1 == wanted:
        return []
    axis, chunks = line.axis.text, plan.schedule.chunks if plan.schedule is not None else 1
    ranks = plan.mesh.size(axis)
    so_far = f"{cuts} {'cut makes' if cuts == 1 else 'cuts make'} {cuts + 1} stage{'s' if cuts else ''}"
    each = f"{axis}={ranks} with {chunks} chunks a rank" if chunks > 1 else f"{axis}={ranks}"
    ways = [f"name {wanted - 1} {'cut' if wanted == 2 else 'cuts'}", f"write `stage balanced over {axis}`"]
    if chunks == 1 and cuts:
        ways.append(f"let `{axis}` have {cuts + 1} ranks")
    elif (cuts + 1) % chunks:
        so_far += f", which do not divide into {chunks} chunks"
    related = [Label(plan.mesh_spans[axis], "declared here")]
    if chunks > 1 and plan.schedule is not None:
        related.append(Label(plan.schedule.arguments.span("chunks"), "chunks of each rank"))
    message = f"{so_far}: {each} has {wanted}"
    return [Diagnostic(STAGE_COUNT, message, Label(line.span), tuple(related), help=", or ".join(ways))]
