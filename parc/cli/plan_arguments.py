"""Arguments of the commands that take a plan: their types, `-D`, the reading of the plan, the default folder of its
build."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from parc.cli.terminal import say

if TYPE_CHECKING:
    from parc.compiler.plan.plan import Plan


def define(text: str) -> tuple[str, str]:
    """Read ``name=value`` of one ``-D``.

    Raises:
        argparse.ArgumentTypeError: it is not that.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"`{text}` is not name=value")
    return name.strip(), value


def positive(text: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is not that, or has more than 18 digits.
    """
    digits = text.lstrip("0")
    if not text.isascii() or not digits.isdigit():
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number of at least 1")
    if len(digits) > 18:
        raise argparse.ArgumentTypeError(f"a number of {len(digits)} digits is too large")
    return int(digits)


def positive_number(text: str) -> float:
    """Read a number above 0, as 989e12.

    Raises:
        argparse.ArgumentTypeError: it is not that.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number above 0")
    return number


def chosen_sizes(text: str) -> dict[str, int]:
    """Read ``B=16,S=256`` of ``--sizes``.

    Raises:
        argparse.ArgumentTypeError: it is not that.
    """
    pairs = [define(word) for word in text.split(",")]
    if len(dict(pairs)) != len(pairs):
        raise argparse.ArgumentTypeError(f"`{text}` names a size twice")
    return {name: positive(value.strip()) for name, value in pairs}


_LARGEST_COST = 1e6
"""The most that one kind of work may cost beside another: pictures and sums of times have no room for more."""


def work_costs(text: str) -> dict[str, float]:
    """Read ``F=4,I=5,W=3`` of ``--costs``: the cost of one action of each kind of work. A kind that stands for several
    costs what they do, if it is not given.

    Raises:
        argparse.ArgumentTypeError: it is not that.
    """
    from parc.compiler.program.actions import phases_of, work_kinds

    kinds, pairs = work_kinds(), [define(word) for word in text.split(",")]
    parts = [kind for kind in kinds if not phases_of(kind)]
    usual = ",".join(f"{kind}=1" for kind in parts)
    for kind, _ in pairs:
        if kind not in kinds:
            raise argparse.ArgumentTypeError(f"`{kind}` is no kind of work: write costs as `{usual}`")
    costs = {kind: positive_number(value.strip()) for kind, value in pairs}
    if max(costs.values()) > _LARGEST_COST * min(costs.values()):
        most, least = max(costs, key=costs.__getitem__), min(costs, key=costs.__getitem__)
        raise argparse.ArgumentTypeError(
            f"`{most}` costs more than {_LARGEST_COST:g} times what `{least}` does: write costs as `{usual}`"
        )
    if len(costs) != len(pairs):
        raise argparse.ArgumentTypeError(f"`{text}` names a kind of work twice: write costs as `{usual}`")
    if lacking := [kind for kind in parts if kind not in costs]:
        raise argparse.ArgumentTypeError(f"`{text}` has no cost of {', '.join(lacking)}: write costs as `{usual}`")
    return {kind: sum(map(costs.__getitem__, phases_of(kind))) for kind in kinds} | costs


def add_defines(parser: argparse.ArgumentParser) -> None:
    """Add the option ``-D``."""
    parser.add_argument(
        "-D", dest="defines", metavar="NAME=VALUE", type=define, action="append", default=[],
        help="replace the value of one of the plan's `let` names; may be given many times",
    )  # fmt: skip


def plan_at(args: argparse.Namespace, plan: Path) -> Plan:
    """Read a plan with the values of ``-D``. That needs no torch, so mistakes in its text are reported at once.

    Raises:
        PlanError: with every mistake that can be found without the model.
    """
    from parc.compiler.plan.plan import read_plan

    return read_plan(plan, dict(args.defines))


def plan_or_example(args: argparse.Namespace, plan: Path) -> Plan:
    """Read a plan that may have open `let`s, with the first values that make one; ``args.defines`` have them then.

    Raises:
        PlanError: with every mistake that can be found without the model.
    """
    from parc.compiler.plan.open_plan import open_words, read_open

    opened = read_open(plan, dict(args.defines))
    if not opened.lets:
        return plan_at(args, plan)
    choice, _ = opened.example()
    args.defines = [*args.defines, *choice.items()]
    values = " ".join(f"{name}={value}" for name, value in choice.items())
    say(f"open: {open_words(opened.lets)}; here with {values}")
    return plan_at(args, plan)


def default_out(plan: Path) -> Path:
    """Return the default folder of a plan's build, which is in the current folder."""
    return Path(f"{plan.stem}.parc.build")


def is_plan(path: Path) -> bool:
    """Return whether a path, of a plan or of a build, is that of a plan."""
    return path.is_file() or (not path.exists() and path.suffix == ".parc")
