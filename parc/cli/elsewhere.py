"""Words of a command line that people know from other tools, and the way that parc says them."""

from __future__ import annotations

from collections.abc import Collection

COMMANDS_MEANT = {
    "train": "run", "fit": "run", "launch": "run", "start": "run", "compile": "build", "test": "verify",
    "lint": "check", "validate": "check", "format": "fmt", "convert": "export", "new": "init", "create": "init",
    "plan": "init", "inspect": "show", "report": "show",
}  # fmt: skip
"""The command for a word that is none."""

OPTIONS_MEANT = {
    "nproc-per-node": ("--nproc",), "gpus": ("--nproc",), "ngpus": ("--nproc",), "num-gpus": ("--nproc",),
    "num-processes": ("--nproc",), "world-size": ("--nproc",), "epochs": ("--steps",), "num-epochs": ("--steps",),
    "iterations": ("--steps",), "output": ("-o", "--save"), "output-dir": ("-o", "--save"), "out": ("-o", "--save"),
    "checkpoint": ("--save", "--resume"), "load": ("--resume",), "master-addr": ("--rdzv-endpoint",),
    "master-port": ("--rdzv-endpoint",), "log-dir": ("--tensorboard", "--metrics"),
    "logging-dir": ("--tensorboard", "--metrics"),
}  # fmt: skip
"""The options for an option that is none, where a command has them."""

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


def options_meant(name: str, known: Collection[str]) -> list[str]:
    """Return those of the known options that say what an option of this name says elsewhere."""
    return [option for option in OPTIONS_MEANT.get(_spelt(name), ()) if option in known]


def plan_line(name: str) -> str:
    """Return the line of a plan that says what an option of this name says elsewhere, "" if there is none."""
    return PLAN_LINES.get(_spelt(name), "")


def _spelt(name: str) -> str:
    return name.lower().replace("_", "-")
