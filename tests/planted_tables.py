"""Planted bugs of precision: values computed from positions, buffers and constants are rounded too early."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from parc.compiler.ops.precision import may_narrow
from parc.compiler.program.binding import BUFFERS
from parc.compiler.program.program import Function, Program
from parc.compiling.compiled import Compiled
from tests.checked_plans import compiled
from tests.planted_edits import through, with_function
from tests.planted_mutators import Mutant

ROOT = Path(__file__).parent.parent
PLAN = """\
model "tests.table_models:Attends" (how="{how}")
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=8
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
mesh dp=2
shard tokens, targets [B/dp, _]
precision bf16
"""
HOW = ("angles", "waves", "slopes", "given", "scores")


def tables_build(how: str) -> Compiled:
    """Build a model that computes with positions in one of the ways ``HOW``."""
    text = PLAN.format(how=how)
    return compiled(text if how != "given" else text.replace("sizes", "input positions int64 [1, S]\nsizes"), ROOT)


def rounded(function: Function, name: str, dtype: torch.dtype = torch.bfloat16) -> Function:
    """Return the function with a value rounded to a narrower type and back as soon as it is there."""
    casts = (dtype, function.values()[name].type.dtype)
    return through(function, name, [("aten._to_copy.default", (), cast) for cast in casts])


def made_of_positions(function: Function, exact: set[str]) -> list[str]:
    """Return the floating values that are computed from integers, from ``exact`` values, and from one another."""
    values, found = function.values(), []
    for line in function.lines:
        read = [values[name] for name in line.uses]
        if line.calls_function or not all(v.name in exact or not v.type.dtype.is_floating_point for v in read):
            continue
        for value in line.made:
            exact.add(value.name)
            if value.type.dtype == torch.float32 and value.type.shape:
                found.append(value.name)
    return found


def early_roundings(made: Compiled) -> Iterator[Mutant]:
    """Round each such value in F, and each buffer, to bfloat16 and back, in a module that computes so."""
    programs: dict[str, Program] = dict(made.build.programs)
    lines, main = made.build.rounding.lines, programs["F"].main
    buffers = {value.name for value in main.parameters if value.kind in BUFFERS}
    given: dict[str, set[str]] = {main.name: buffers}
    for call in (line for line in main.lines if line.calls_function):
        taken = programs["F"].function(call.op).parameters
        known = {value.name for value, name in zip(taken, call.uses, strict=True) if name in buffers}
        given[call.op] = given.get(call.op, known) & known
    for function in programs["F"].functions:
        for name in made_of_positions(function, set(given[function.name])):
            line = next(line for line in function.lines if any(value.name == name for value in line.made))
            if may_narrow(lines, line.origin.module, torch.bfloat16):
                changed = with_function(programs, "F", rounded(function, name))
                yield Mutant("round a table early", name, f"{function.name}: {name}", partial(dict, changed))
