"""``let``: names for values."""

from __future__ import annotations

from ..directive import Directive


class Let(Directive):
    """Gives names to values; `$name` elsewhere stands for the value, and `-D name=value` replaces it.

    A value is a number, a word, a string or a range, and may use names of earlier lines. A name that nothing uses is a
    warning.
    """

    USAGE = "let NAME=VALUE, ..."
    ONCE = False
