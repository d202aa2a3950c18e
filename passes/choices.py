"""Choices by a cost or by values. All sizes of a range must make the same ones, so that one program serves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Choice = TypeVar("Choice")
ShardDims = Mapping[tuple[str, str], tuple[int, bool] | None]
"""The dim along which a parameter is stored in parts, or a sum is cut, by the name of the parameter or the place of the
sum and by the axes, and whether that takes padding; None where it stays whole. A twin has those of the larger build."""


class Choices:
    """The choices of the first compilation, at the largest sizes, imposed on those at other sizes."""

    def __init__(self) -> None:
        self._made: dict[object, object] = {}

    def make(self, what: object, own: Choice) -> Choice:
        """Return the first compilation's choice in place of ``own``; ``what`` names the choice alike at all sizes."""
        return self._made.setdefault(what, own)  # type: ignore[return-value]


def agreed(choices: Choices | None, what: object, own: Choice) -> Choice:
    """Return ``own``, if sizes are fixed or the largest sizes chose it too; else an empty choice, which is always
    safe."""
    return own if choices is None or choices.make(what, own) == own else type(own)()
