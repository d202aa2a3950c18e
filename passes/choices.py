"""Choices: what is decided by a cost or by values, which all sizes of a range must decide alike to have one program."""

from __future__ import annotations

from typing import TypeVar

Choice = TypeVar("Choice")


class Choices:
    """The choices of the first compilation, that of the largest sizes, imposed on those of other sizes."""

    def __init__(self) -> None:
        self._made: dict[object, object] = {}

    def make(self, what: object, own: Choice) -> Choice:
        """The choice that stands for ``own``; ``what`` is the same at all sizes."""
        return self._made.setdefault(what, own)  # type: ignore[return-value]


def agreed(choices: Choices | None, what: object, own: Choice) -> Choice:
    """``own``, where sizes are fixed or it is the choice of the largest; else what that choice leaves: nothing."""
    return own if choices is None or choices.make(what, own) == own else type(own)()
