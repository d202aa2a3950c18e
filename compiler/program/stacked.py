"""Names of stacked tensors: ``experts.*.up.weight``, [8, 4, 2], holds the model's ``experts.0.up.weight`` to
``experts.7.up.weight``, [4, 2] each."""

from __future__ import annotations

from collections.abc import Iterator

EACH = "*"
"""The word of a stacked tensor's name that stands for the numbers of its parts."""


def is_stacked(name: str) -> bool:
    """Return whether a name is that of a stacked tensor."""
    return EACH in name.split(".")


def part_name(name: str, number: int) -> str:
    """Return the model's name for a part of a stacked tensor.

    >>> part_name("experts.*.up.weight", 3)
    'experts.3.up.weight'
    """
    return ".".join(str(number) if word == EACH else word for word in name.split("."))


def part_names(name: str, count: int) -> Iterator[str]:
    """Yield the model's names for the first parts of a stacked tensor, in their order."""
    return (part_name(name, number) for number in range(count))
