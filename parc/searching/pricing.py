"""Prices of whole plans: each is compiled, and its step priced from its own programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parc.checking.limits import hold_collectives
from parc.compiler.analysis.communication import communication_table
from parc.compiler.clock.cluster import Cluster
from parc.compiler.plan.plan import Plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import Captures, compile_with
from parc.grammar.codes import code_pages
from parc.grammar.diagnostics import PlanError
from parc.grammar.format import format_statement
from parc.grammar.syntax import size_in_both
from parc.mesh_order import best_order
from parc.report import memory_of
from parc.step_time import PricedStep, framework_bytes, price

_OVER = re.compile(r"\bover (\w+)")
_IDLE = re.compile(r"zero\s+0\b|recompute\s+none$")
_NAMED = re.compile(r"(schedule\s+)\S+ (microbatches \S+)( chunks \S+)?")
Parts = Mapping[str, float]
OVER = BUDGET, MEMORY = "budget", "memory"
"""The kinds of rejections of choices that need too much memory."""


@dataclass(frozen=True)
class Figures:
    """The figures of a plan's step: its seconds, the ``parts`` of the rank that waits least for others, the share of
    the devices' work that counts (``mfu``), and the bytes of the fullest rank with the framework's own."""

    seconds: float
    parts: Parts
    mfu: float
    memory: int
    framework: int
    """The framework's part of the memory."""


@dataclass(frozen=True)
class Rejected:
    """A reason why a choice is no plan: ``kind`` counts it with others, ``words`` say it of this one. ``excess`` is how
    far it is from a plan, in bytes, if that is what lacks."""

    kind: str
    words: str
    excess: int = 0
    error: PlanError | None = None
    """The error of the plan, if it is one."""


@dataclass(frozen=True)
class PricedPlan:
    """A plan that a choice makes, with the figures of its own programs. ``order`` is that of the mesh's axes."""

    choice: Mapping[str, str]
    order: tuple[str, ...]
    plan: Plan = field(repr=False)
    figures: Figures
    exposed: Mapping[str, int]
    """The bytes that the rank that sends most puts on the wire in a step beside no work, by axis."""
    estimate: Figures | None = None
    """The figures that chose it, before it was compiled."""
    step: PricedStep | None = field(default=None, repr=False)


@dataclass
class ExactPrices:
    """The prices of plans on a cluster, each from its own programs. Models are captured once for each way in which
    plans call them."""

    folder: Path
    cluster: Cluster
    captures: Captures = field(init=False)

    def __post_init__(self) -> None:
        self.captures = Captures(self.folder)

    def compile(self, plan: Plan) -> Compiled:
        """Compile a plan, without its evaluation and without checks.

        Raises:
            PlanError: the choice makes no plan.
        """
        return compile_with(self.captures, plan)

    def price(
        self, choice: Mapping[str, str], plan: Plan, keep_order: bool = False, estimate: Figures | None = None
    ) -> PricedPlan | Rejected:
        """Return the figures of a plan, or the reason why it is none. With ``keep_order`` the axes of its mesh stay in
        their order; ``estimate`` are the figures that chose it.

        Raises:
            ClusterError: the cluster has too few nodes, or no peak for the type of its products.
        """
        try:
            compiled = self.compile(plan)
            hold_collectives(compiled)
        except PlanError as error:
            return rejected(error)
        step = price(compiled.build, plan, self.cluster)
        order, step = (plan.mesh.names, step) if keep_order else best_order(compiled, step)
        memory = max(memory_of(compiled.build, plan, role).peak_bytes for role in compiled.build.roles.values())
        memory += framework_bytes(step)
        figures = Figures(
            step.time.seconds, step.time.parts(step.time.longest), step.mfu, memory, framework_bytes(step)
        )
        if excess := over_memory(figures, plan, self.cluster):
            return excess
        return PricedPlan(choice, tuple(order), plan, figures, _exposed(compiled), estimate, step)


def over_memory(figures: Figures, plan: Plan, cluster: Cluster) -> Rejected | None:
    """Return the reason why a rank's memory is over the plan's budget, or with the framework's own over that of a
    device; None if it is neither."""
    needed, have = figures.memory - figures.framework, int(cluster.device.memory)
    if plan.budget is not None and needed > plan.budget.memory:
        words = f"needs {size_in_both(needed)} a rank, and the plan's budget is {size_in_both(plan.budget.memory)}"
        return Rejected(BUDGET, words, needed - plan.budget.memory)
    if figures.memory > have:
        words = f"needs {size_in_both(figures.memory)} of memory a rank, and a device has {size_in_both(have)}"
        return Rejected(MEMORY, words, figures.memory - have)
    return None


def rejected(error: PlanError) -> Rejected:
    """Return the reason that an error of a plan is."""
    first = next(one for one in error.diagnostics if one.is_error)
    return Rejected(code_pages()[first.code.name].title, first.message, error=error)


def _exposed(compiled: Compiled) -> Mapping[str, int]:
    """Return the bytes beside no work by axis, of the role that sends most of them."""
    most = Counter[str]()
    for role in compiled.build.roles.values():
        sent = Counter[str]()
        for row in communication_table(role):
            if not row["hidden"]:
                sent[row["axis"]] += row["wire_bytes"] * row["count_per_step"]
        most = max(most, sent, key=lambda counts: counts.total())
    return dict(most)


def effect_of(plan: Plan) -> tuple[str, ...]:
    """Return what a plan's lines do, the same for choices that make the same plan: without lines that do nothing, over
    an axis of one rank for example."""
    lines = []
    staged = any(plan.mesh.size(line.axis.text) > 1 for line in plan.stages if line.axis.text in plan.mesh)
    for statement in plan.statements:
        text = format_statement(statement)
        axes = [axis for axis in _OVER.findall(text) if axis == "none" or axis in plan.mesh]
        idle = axes and all(axis == "none" or plan.mesh.size(axis) == 1 for axis in axes)
        if not (idle or _IDLE.match(text)):
            lines.append(text if staged else _NAMED.sub(r"\1\2", text))
    return tuple(lines)
