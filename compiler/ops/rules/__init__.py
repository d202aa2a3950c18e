"""The table of sharding rules, one row per operator in a file per family; and the line that adds a custom one's."""

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...layout.mesh import Shape
from ..factors import OpCall, OpRule, RuleError, rule
from ..op_row import OpRow

__all__ = ["OP_TABLES", "TABLE", "OpRow", "localize", "register", "registered", "rule_for"]

_FAMILIES = [import_module(f".{file.name}", __name__) for file in pkgutil.iter_modules(__path__)]
OP_TABLES: tuple[dict[str, OpRow], ...] = tuple(
    getattr(family, f"{family.__name__.rpartition('.')[2].upper()}_RULES") for family in _FAMILIES
)

TABLE: dict[str, OpRow] = {name: row for family in OP_TABLES for name, row in family.items()}
"""All rows by the operator's name, those registered by users included."""

_REGISTERED: dict[str, tuple[str, str]] = {}


def rule_for(call: OpCall) -> OpRule | None:
    """The rule of a call; None if its operator has no row, or a row that does not know this form of the call.

    Raises RuleError where a registered rule does not fit: that line is the user's to mend.
    """
    row = TABLE.get(call.op)
    if row is None:
        return None
    try:
        return row.rule(call)
    except RuleError:
        if call.op in _REGISTERED:
            raise
        return None


def localize(
    call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The args and kwargs of a rank's call, of the global `call` and the local shapes of its operands and results."""
    row, args, kwargs = TABLE.get(call.op), list(call.args), dict(call.kwargs)
    for position, name, value in row.localize(call, operands, results) if row is not None and row.localize else ():
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def register(op: str, text: str, *, linear: str = "") -> None:
    """Gives a custom operator its rule: ``parc.register_rule("mylib.scale.default", "... d, d -> ... d", linear="0")``.

    The text has the tensor operands' dims by name, then the results': what is named alike is split alike, and a sum is
    made over what results lack. A comma separates tensors; ``d!`` is needed whole, ``...`` is any number of dims,
    ``(b s)`` one dim of several, ``1`` a dim of its own. ``linear`` lists the operands, by their place, in which the
    operator is linear, so that their sums over ranks may be put off: ``0|1`` is either, ``01`` both together. The same
    line twice is harmless.

    Raises:
        RuleError: the text is malformed, or the operator already has another rule.
    """
    if _REGISTERED.get(op) == (text, linear):
        return
    if op in TABLE:
        known = _REGISTERED.get(op)
        raise RuleError(f"{op} already has the rule {known[0]!r}" if known else f"{op} already has a built-in rule")
    if op.count(".") != 2:
        raise RuleError(f"an operator is named 'namespace.name.overload'; got {op!r}")
    TABLE[op] = OpRow(rule(text, linear=linear))
    _REGISTERED[op] = (text, linear)


def registered() -> Mapping[str, str]:
    """Operators whose rule a user registered, with its text."""
    return {op: text for op, (text, _) in _REGISTERED.items()}
