"""Lines that need the captured graph: ``context`` lines on its attention, and the units that ``zero`` lines name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ...grammar.codes import BAD_VALUE, NO_ATTENTION, SHARED_OVER_UNITS
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.nearest import listed
from ...grammar.syntax import Word
from ..capture.capture import Captured
from ..capture.node_facts import noted
from ..ops.precision import base_name
from ..plan.directives.context import Context
from ..plan.plan import Plan
from ..program.blocks import innermost, starred
from ..program.program import Line
from .names import PlanNames, find_modules, is_within
from .pattern import ANY_DEPTH

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
    return tuple(_context_line(line, names, attention) for line in plan.context if plan.mesh.size(line.axis.text) > 1)


def _context_line(line: Context, names: PlanNames, attention: list[str]) -> ContextLine:
    modules: list[str] = []
    for word in line.where:
        meant = find_modules(word, names)
        if isinstance(meant, Diagnostic):
            raise PlanError([meant])
        if meant and not any(is_within(at, module) for at in attention for module in meant):
            message = f"`{word.text}` contains no attention"
            if len(meant) > 1:
                message = f"the {len(meant)} modules of `{word.text}` contain no attention"
            others = [name or "the model itself" for name in dict.fromkeys(attention)]
            seen = f"attention is in {listed(others[:3])}"
            if not others:
                seen = "the model never calls torch's `scaled_dot_product_attention`: choose that one"
            raise PlanError([Diagnostic(NO_ATTENTION, message, Label(word.span), help=seen)])
        modules += meant
    return ContextLine(line.axis.text, line.method, tuple(modules), line.span.root.line)


# ---- units: modules whose weights are gathered together, and freed together


def units_of(plan: Plan, names: PlanNames, captured: Captured) -> frozenset[str]:
    """Return the modules that the plan's lines name as units; none of lines that do nothing.

    Raises:
        PlanError: a name matches no module, or a unit reads a parameter that operators outside it read too.
    """
    words: dict[str, Word] = {}
    errors: list[Diagnostic] = []
    active: set[str] = set()
    for line in plan.zero:
        for word in line.units:
            if word.text == ANY_DEPTH:
                message, help_ = "the whole model is no unit", "name modules, as `model.layers.*`"
                why = "its weights would be gathered before the step, and freed behind it"
                errors.append(Diagnostic(BAD_VALUE, message, Label(word.span), help=help_, notes=(why,)))
                continue
            modules = find_modules(word, names)
            if isinstance(modules, Diagnostic):
                errors.append(modules)
                continue
            words.update(dict.fromkeys(modules, word))
            if line.level and plan.ranks(line.axis.text) > 1:
                active.update(modules)
    errors = errors or [*_shared_parameters(words, captured)]
    if errors:
        raise PlanError(errors)
    return frozenset(active)


def _shared_parameters(words: dict[str, Word], captured: Captured) -> Iterator[Diagnostic]:
    """Yield an error for the first parameter of each word's units that is read outside its unit."""
    said: set[Word] = set()
    for name, parameter in captured.placeholders("parameter").items():
        readers = {_module(user): innermost(_module(user), words) for user in parameter.users}
        for module, unit in sorted(readers.items()):
            other = next((other for other, its in sorted(readers.items()) if its != unit), None)
            if unit is None or other is None or words[unit] in said:
                continue
            said.add(words[unit])
            where = f"`{other}`" if other else "the model's own code or the loss"
            message = f"the unit `{unit}` cuts through the shared parameter `{name}`: {where} reads it too"
            help_ = f"name a module that contains both readers, or leave `{unit}` out: a block gathers what it reads"
            yield Diagnostic(SHARED_OVER_UNITS, message, Label(words[unit].span, f"`{module}` reads it"), help=help_)


def _module(node: fx.Node) -> str:
    return noted(node).origin.module
