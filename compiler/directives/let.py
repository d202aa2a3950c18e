"""``let``: names for values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ...grammar.usage import Arguments
from ..directive import Directive


@dataclass(frozen=True)
class Let(Directive):
    """Gives names to values; `$name` elsewhere stands for the value, and `-D name=value` replaces it.

    A value is a number, a word, a string or a range, and may use names of earlier lines. A name that nothing uses is a
    warning.
    """

    USAGE = "let NAME=VALUE, ..."
    ONCE = False

    names: tuple[str, ...]

    @classmethod
    def read(cls, arguments: Arguments) -> Self:
        return cls(arguments, tuple(binding.name.text for binding in arguments.bindings("name")))
