"""The ``context`` lines of a plan on the attention of one model."""

from __future__ import annotations

from dataclasses import dataclass

from ...grammar.codes_plan import NO_ATTENTION
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.nearest import listed
from ..capture.capture import Captured
from ..capture.node_facts import noted
from ..ops.precision import base_name
from ..plan.directives.context import Context
from ..plan.plan import Plan
from ..program.blocks import starred
from ..program.program import Line
from .names import PlanNames, find_modules, is_within

RING_METHODS = ("ring", "zigzag")
"""The ways in which keys go around."""


@dataclass(frozen=True, slots=True)
class ContextLine:
    """A ``context`` line: its axis, the way in which attention in some modules works across the ranks, and its
    number."""

    axis: str
    method: str
    modules: tuple[str, ...]
    line: int

    def names(self, line: Line) -> bool:
        """Return whether the module of a program's line is one of these or in one. It is starred if the line stands for
        equal blocks, and not if a block is the only one of its kind."""
        inside = line.origin.module
        return any(is_within(inside, outer) for module in self.modules for outer in (module, starred(module)))


def context_lines(plan: Plan, names: PlanNames, captured: Captured) -> tuple[ContextLine, ...]:
    """Return the lines that do something.

    Raises:
        PlanError: a line's modules do no attention.
    """
    attention = [
        noted(node).origin.module
        for node in captured.graph.nodes
        if node.op == "call_function" and base_name(str(node.target)) == "scaled_dot_product_attention"
    ]
    return tuple(_found(line, names, attention) for line in plan.context if plan.mesh.size(line.axis.text) > 1)


def _found(line: Context, names: PlanNames, attention: list[str]) -> ContextLine:
    modules: list[str] = []
    for word in line.where:
        found = find_modules(word, names)
        if isinstance(found, Diagnostic):
            raise PlanError([found])
        if found and not any(is_within(at, module) for at in attention for module in found):
            message = f"`{word.text}` contains no attention"
            if len(found) > 1:
                message = f"the {len(found)} modules of `{word.text}` contain no attention"
            others = [name or "the model itself" for name in dict.fromkeys(attention)]
            seen = f"attention is in {listed(others[:3])}"
            if not others:
                seen = "the model never calls torch's `scaled_dot_product_attention`: choose that one"
            raise PlanError([Diagnostic(NO_ATTENTION, message, Label(word.span), help=seen)])
        modules += found
    return ContextLine(line.axis.text, line.method, tuple(modules), line.span.root.line)
