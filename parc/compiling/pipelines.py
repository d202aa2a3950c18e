"""Pipelines that a plan asks for: the cuts of the captured step, and the timeline of each role."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from parc.compiler.capture.capture import Captured
from parc.compiler.capture.node_facts import noted
from parc.compiler.plan.plan import Plan
from parc.compiler.program.actions import Action, accumulation
from parc.compiler.program.roles import SINGLE
from parc.compiler.resolve.names import PlanNames
from parc.compiler.resolve.stage_cuts import cuts_of
from parc.compiler.schedules import places_of, timelines
from parc.passes.programs.cut import Pipeline


def pipeline_of(plan: Plan, folder: Path, names: PlanNames, captured: Captured) -> Pipeline | None:
    """Return the cut of the step into stages that the plan asks for; None where it is one stage.

    Raises:
        PlanError: the cuts do not fit the model, or the schedule's file is none of these stages.
    """
    cuts = cuts_of(plan, names, captured)
    if not cuts or plan.schedule is None:
        return None
    places = tuple((cut.module, cut.after) for cut in cuts)
    origins = (noted(node).origin.module for node in captured.graph.nodes if node.op == "call_function")
    stages, schedule = len(cuts) + 1, plan.schedule
    table = schedule.table_of(folder, stages)
    ranks = places_of(schedule.name, stages, plan.microbatches, schedule.chunks, text=table)
    return Pipeline(plan.stages[0].axis.text, schedule.chunks, places, ranks, tuple(dict.fromkeys(origins)))


def timelines_of(
    plan: Plan, programs: Collection[str], pipeline: Pipeline | None, folder: Path
) -> dict[str, tuple[Action, ...]]:
    """Return the actions of each role in a step, in order, of the kinds that have programs.

    Raises:
        PlanError: the schedule's file cannot be read, or is no schedule of these stages.
    """
    if pipeline is None or plan.schedule is None:
        return {SINGLE: accumulation(plan.microbatches, also=programs)}
    return timelines(
        plan.schedule.name, pipeline.stages, plan.microbatches, pipeline.chunks, axis=pipeline.axis, also=programs,
        text=plan.schedule.table_of(folder, pipeline.stages),
    )  # fmt: skip
