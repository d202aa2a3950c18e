"""Mistakes in the words of a command line: each message names the words that were probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from parc.grammar.nearest import did_you_mean, listed, nearest

_SETTING = re.compile(r"(?:--)?([A-Za-z_]\w*)=([^-=]+)")


class Parser(argparse.ArgumentParser):
    """A parser that knows what was probably meant."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | options)

    @property
    def options(self) -> list[str]:
        """The command's options, as they are written."""
        return [word for action in self._actions for word in action.option_strings]

    @property
    def defines(self) -> bool:
        """True where the command takes ``-D NAME=VALUE``."""
        return "-D" in self.options

    def fail(self, message: str, help_: str) -> NoReturn:
        """End with a message of wrong usage and a way out, without the list of all options."""
        self.exit(2, f"{self.prog}: error: {message}\nhelp: {help_}\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End with a message about words that the command does not take."""
        first = words[0]
        otherwise = f"`{self.prog} --help` lists what it takes"
        given = _SETTING.fullmatch("=".join(words[:2]) if "=" not in first else first)
        if given and self.defines:
            otherwise = f"a value of the plan's `let` is given by `-D {given[1]}={given[2]}`; {otherwise}"
        options = {option.lstrip("-"): option for option in self.options}
        near = nearest(first.partition("=")[0].lstrip("-"), options)
        help_ = f"did you mean {listed(map(options.__getitem__, near), 'or')}?" if near else otherwise
        self.fail(f"unrecognized arguments: {' '.join(words)}", help_)

    def refuse_command(self, word: str, known: Iterable[str]) -> NoReturn:
        """End with a message about a command that does not exist."""
        self.fail(f"there is no command `{word}`", did_you_mean(word, known, f"`{self.prog} --help` lists them"))
