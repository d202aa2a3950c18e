"""The table of operators, one row each in a file per family; and the line that adds a custom one's.

A row holds all that parc knows of an operator: its sharding rule, and facts of which passes, checks and the runtime
derive every set of operators that they need. So an operator is one row, and one more is one more row.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from typing import Any

from torch._ops import OpOverload

from ...layout.mesh import Shape
from ..factors import OpCall, OpRule, RuleError, rule
from ..op_row import Localize, OpFacts, OpRow, contracted

__all__ = [
    "OP_TABLES",
    "TABLE",
    "OpRow",
    "facts",
    "has_rule",
    "localize",
    "operator_name",
    "register",
    "registered",
    "registered_row",
    "rule_for",
]

_FAMILIES = [import_module(f".{file.name}", __name__) for file in pkgutil.iter_modules(__path__)]
OP_TABLES: tuple[dict[str, OpRow], ...] = tuple(
    getattr(family, f"{family.__name__.rpartition('.')[2].upper()}_RULES") for family in _FAMILIES
)

TABLE: dict[str, OpRow] = {name: row for family in OP_TABLES for name, row in family.items()}
"""All rows by the operator's name, with those that users registered."""

_PACKETS: dict[str, OpRow] = {}
"""The first row of each operator, whatever its overload."""
for _name, _row in TABLE.items():
    _PACKETS.setdefault(_name.rpartition(".")[0], _row)
_UNKNOWN = OpRow()

_REGISTERED: dict[str, tuple[str, str, str, Mapping[str, Any]]] = {}


_NAMES: dict[int, tuple[object, str]] = {}
"""The names of torch's operators, by the numbers of the objects, which are kept here so that no other gets them."""


def operator_name(op: object) -> str:
    """Return ``str(op)``, which torch composes anew each time: rows are looked up a hundred times for each node."""
    if type(op) is str:
        return op
    if not isinstance(op, OpOverload):
        return str(op)
    known = _NAMES.get(id(op))
    if known is None:
        known = _NAMES[id(op)] = op, str(op)
    return known[1]


def facts(op: object) -> OpFacts:
    """Return the row of an operator, given its name or torch's own object. An overload without a row, and a form that
    writes its operand (``add_``), gets the row of the plain operator."""
    name = operator_name(op)
    row = TABLE.get(name)
    if row is None:
        packet, _, overload = name.rpartition(".") if name.count(".") > 1 else (name, "", "")
        plain = packet.removesuffix("_")
        row = TABLE.get(f"{plain}.{overload}") or _PACKETS.get(packet) or _PACKETS.get(plain, _UNKNOWN)
    return row


def has_rule(op: object) -> bool:
    """Return whether an operator has a row with a rule."""
    row = TABLE.get(operator_name(op))
    return row is not None and row.rule is not None


def rule_for(call: OpCall) -> OpRule | None:
    """Return the rule of a call, or None if its operator has no row, or a row that does not know this form of the call.

    Raises RuleError where a registered rule does not fit: that line is the user's to mend.
    """
    row = TABLE.get(call.op)
    if row is None or row.rule is None:
        return None
    try:
        return _rule(row.rule, call)
    except RuleError:
        if call.op in _REGISTERED:
            raise
        return None


@lru_cache(maxsize=1 << 13)
def _rule(rule_of: Callable[[OpCall], OpRule], call: OpCall) -> OpRule:
    """Return the rule of a call; equal calls have one, whatever their placements."""
    return rule_of(call)


def localize(
    call: OpCall, operands: tuple[Shape, ...], results: tuple[Shape, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the args and kwargs of a rank's call, given the global `call` and the local shapes of its operands and
    results."""
    row, args, kwargs = TABLE.get(call.op), list(call.args), dict(call.kwargs)
    for position, name, value in row.localize(call, operands, results) if row is not None and row.localize else ():
        if position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def register(
    op: str, text: str, *, linear: str = "", gradient: str = "", localize: Localize | None = None, **facts: Any
) -> None:
    """Give a custom operator its row: ``parc.register_rule("mylib.scale.default", "... d, d -> ... d", linear="0")``.

    The text names the dims of the tensor operands, then those of the results. Dims with one name are split together. If
    a name is missing in the results, they are a sum over it. A comma separates tensors. ``d!`` is a dim that the
    operator needs whole, ``...`` is any number of dims, ``(b s)`` is one dim made of several, and ``1`` is a dim that
    belongs to no other. ``linear`` lists the operands, by position, in which the operator is linear; sums of these over
    ranks may be done later. ``0|1`` means either of them, ``01`` both together. The same line twice is harmless.

    ``gradient`` says what the operator's derivative is, so that builds of models with it are certified. It is the
    operator that returns the gradients of the tensors, ``"mylib.mix_back.default(g, x, weight)"``, with a rule of its
    own; or a meaning for each of them, such as ``"g * (1 - y * y)"``, in the words of ``certificate/rows.txt``. The
    names are those of the arguments; ``g`` is the gradient of the first result and ``y`` that result, ``g1`` and ``y1``
    are the second's.

    ``localize`` is for an operator with arguments that are sizes. ``localize(call, operands, results)`` returns a
    rank's values of these arguments, from the local shapes, as ``(position, name, value)``. ``facts`` are further facts
    by the names of ``OpFacts``: ``precision="product"`` for an operator that ``precision bf16`` computes in bfloat16,
    and whose work is counted as that of products; ``"sensitive"`` for one that stays float32; ``storage="view"`` for
    one whose result shares its operand's storage.

    Raises:
        RuleError: the text is malformed, a fact does not exist, or the operator already has another rule.
    """
    said = (
        text,
        linear,
        gradient,
        {name: fact for name, fact in facts.items() if not callable(fact)},
    )  # code is not compared
    if _REGISTERED.get(op) == said:
        return
    names = {field.name for field in fields(OpFacts)}
    if not names.issuperset(facts):
        raise RuleError(
            f"{min(facts.keys() - names)!r} is no fact of an operator; these are: {', '.join(sorted(names))}"
        )
    if op in TABLE:
        known = _REGISTERED.get(op)
        raise RuleError(f"{op} already has the rule {known[0]!r}" if known else f"{op} already has a built-in rule")
    if op.count(".") != 2:
        raise RuleError(f"an operator is named 'namespace.name.overload'; got {op!r}")
    ruling = rule(text, linear=linear)
    counted = {"flops": contracted(ruling)} if facts.get("precision") == "product" else {}
    TABLE[op] = OpRow(ruling, localize, **(counted | facts))
    _REGISTERED[op] = said


def registered() -> Mapping[str, str]:
    """Return the operators whose rule a user registered, with its text."""
    return {op: text for op, (text, *_) in _REGISTERED.items()}


def registered_row(op: str) -> tuple[str, str, str] | None:
    """Return the rule, the operands in which it is linear, and the gradient of an operator that a user registered."""
    known = _REGISTERED.get(op)
    return None if known is None else known[:3]
