"""Mistakes in the words of a command line: each message names the words that were probably meant, also where another
tool has the words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from parc.grammar.nearest import did_you_mean, listed, nearest

COMMANDS_MEANT = {
    "train": "run", "fit": "run", "launch": "run", "start": "run", "compile": "build", "test": "verify",
    "lint": "check", "validate": "check", "format": "fmt", "convert": "export", "new": "init", "create": "init",
    "inspect": "show", "report": "show",
}  # fmt: skip
"""The command for a word that is none of parc's."""

OPTIONS_MEANT = {
    "nproc-per-node": ("--nproc",), "gpus": ("--nproc",), "ngpus": ("--nproc",), "num-gpus": ("--nproc",),
    "num-processes": ("--nproc",), "world-size": ("--nproc",), "epochs": ("--steps",), "num-epochs": ("--steps",),
    "iterations": ("--steps",), "output": ("-o", "--save"), "output-dir": ("-o", "--save"), "out": ("-o", "--save"),
    "checkpoint": ("--save", "--resume"), "load": ("--resume",), "master-addr": ("--rdzv-endpoint",),
    "master-port": ("--rdzv-endpoint",), "log-dir": ("--tensorboard", "--metrics"),
    "logging-dir": ("--tensorboard", "--metrics"),
}  # fmt: skip
"""The options for an option that a command does not have; it may have none of these either."""

_RATE, _SIZES, _NARROW = "optimizer adamw lr 3e-4", "sizes B=16, S=512", "precision bf16"
_FALLING, _PARTS = "optimizer adamw lr cosine 3e-4 warmup 100 to 3e-5", "schedule microbatches 4"
PLAN_LINES = {
    "lr": _RATE, "learning-rate": _RATE, "optimizer": _RATE, "optim": _RATE, "warmup": _FALLING,
    "warmup-steps": _FALLING, "scheduler": _FALLING, "lr-scheduler": _FALLING, "min-lr": _FALLING,
    "weight-decay": "optimizer adamw lr 3e-4 weight_decay 0.1",
    "clip": "optimizer adamw lr 3e-4 clip 1.0", "grad-clip": "optimizer adamw lr 3e-4 clip 1.0",
    "batch-size": _SIZES, "global-batch-size": _SIZES, "batch": _SIZES, "seq-len": _SIZES, "seq-length": _SIZES,
    "max-length": _SIZES, "micro-batch-size": _PARTS, "gradient-accumulation-steps": _PARTS, "microbatches": _PARTS,
    "mesh": "mesh dp=2, tp=2", "precision": _NARROW, "bf16": _NARROW, "fp16": "precision fp16",
    "mixed-precision": _NARROW, "seed": "seed 1", "data": 'data bytes "texts/*.txt"',
    "dataset": 'data bytes "texts/*.txt"', "zero": "zero 3 over dp", "zero-stage": "zero 3 over dp",
    "fsdp": "zero 3 over dp", "gradient-checkpointing": "recompute blocks.*", "recompute": "recompute blocks.*",
}  # fmt: skip
"""The line of a plan for an option that no command has."""

_SETTING = re.compile(r"(?:--)?([A-Za-z_]\w*)=([^-=]+)")


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the words that were probably meant."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | options)

    @property
    def options(self) -> list[str]:
        """The command's options, as they are written."""
        return [word for action in self._actions for word in action.option_strings]

    def fail(self, message: str, help_: str) -> NoReturn:
        """End with a message of wrong usage and a way out, without the list of all options."""
        self.exit(2, f"{self.prog}: error: {message}\nhelp: {help_}\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End with a message about words that the command does not take."""
        first = words[0]
        otherwise = f"`{self.prog} --help` lists what it takes"
        setting = _SETTING.fullmatch("=".join(words[:2]) if "=" not in first else first)
        if setting and "-D" in self.options:
            otherwise = f"a value of the plan's `let` is given by `-D {setting[1]}={setting[2]}`; {otherwise}"
        options, name = {option.lstrip("-"): option for option in self.options}, first.partition("=")[0].lstrip("-")
        spelt = name.lower().replace("_", "-")
        if line := PLAN_LINES.get(spelt, ""):
            otherwise = f"a line of the plan says it, as `{line}`; {otherwise}"
        meant = [option for option in OPTIONS_MEANT.get(spelt, ()) if option in self.options]
        if not meant and not line:
            meant = [options[near] for near in nearest(name, options)]
        help_ = f"did you mean {listed(meant, 'or')}?" if meant else otherwise
        self.fail(f"unrecognized arguments: {' '.join(words)}", help_)

    def refuse_command(self, word: str, known: Iterable[str]) -> NoReturn:
        """End with a message about a command that does not exist."""
        meant = COMMANDS_MEANT.get(word)
        otherwise = f"did you mean `{meant}`?" if meant else f"`{self.prog} --help` lists them"
        self.fail(f"there is no command `{word}`", otherwise if meant else did_you_mean(word, known, otherwise))
