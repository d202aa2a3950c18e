"""Mistakes in the words of a command line: each message names the words that were probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from parc.cli.elsewhere import COMMANDS_MEANT, options_meant, plan_line
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
        options, name = {option.lstrip("-"): option for option in self.options}, first.partition("=")[0].lstrip("-")
        if line := plan_line(name):
            otherwise = f"a line of the plan says it, as `{line}`; {otherwise}"
        meant = options_meant(name, self.options)
        if not meant and not line:
            meant = [options[near] for near in nearest(name, options)]
        help_ = f"did you mean {listed(meant, 'or')}?" if meant else otherwise
        self.fail(f"unrecognized arguments: {' '.join(words)}", help_)

    def refuse_command(self, word: str, known: Iterable[str]) -> NoReturn:
        """End with a message about a command that does not exist."""
        meant = COMMANDS_MEANT.get(word)
        otherwise = f"did you mean `{meant}`?" if meant else f"`{self.prog} --help` lists them"
        self.fail(f"there is no command `{word}`", otherwise if meant else did_you_mean(word, known, otherwise))
