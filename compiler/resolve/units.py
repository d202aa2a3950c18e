"""The units that ``zero`` lines name: modules whose weights are gathered together, and freed together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ...grammar.codes_plan import BAD_VALUE, SHARED_OVER_UNITS
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.syntax import Word
from ..capture.capture import Captured
from ..capture.node_facts import noted
from ..plan.plan import Plan
from ..program.blocks import innermost
from .names import PlanNames, find_modules
from .pattern import ANY_DEPTH


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
            found = find_modules(word, names)
            if isinstance(found, Diagnostic):
                errors.append(found)
                continue
            words.update(dict.fromkeys(found, word))
            if line.level and plan.ranks(line.axis.text) > 1:
                active.update(found)
    errors = errors or [*_shared(words, captured)]
    if errors:
        raise PlanError(errors)
    return frozenset(active)


def _shared(words: dict[str, Word], captured: Captured) -> Iterator[Diagnostic]:
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
