"""Words of the language for operators."""

from __future__ import annotations

from .precision import base_name
from .rules import facts


def words_for(op: str) -> frozenset[str]:
    """Return the words by which a plan means an operator: its own name, that of the operator for which it stands, and
    its family's."""
    row, name = facts(op), base_name(op)
    words = {name, base_name(row.stands_for)} if row.stands_for else {name}
    if "attention" in name:
        words.add("attention")
    elif row.precision == "product":
        words.add("products")
    if row.law:
        words.add("random")
    return frozenset(words)
