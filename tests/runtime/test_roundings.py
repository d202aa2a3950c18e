"""Roundings that nobody asked for are refused: all of them in a build of float32, and in a narrow one those that no
line of the plan allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from parc.checking.checks import prove, static_faults
from parc.compiler.ops.precision import Rounding, base_name
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Function, Program
from parc.compiler.program.text import parse_program
from parc.compiler.verify.rounding import check_precision
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from tests.checked_plans import compiled
from tests.planted_bugs import ROUNDINGS
from tests.planted_edits import with_function
from tests.planted_tables import rounded, tables_build
from tests.runtime.test_precision import BF16
from tests.runtime.tiny import BOTH, PLAN

FEW = PLAN.replace("layers=2", "layers=1")


def faults(compilation: Compiled, programs: dict[str, Program], rounding: Rounding) -> list[str]:
    """Return the faults that the checks of types find."""
    facts = {"precision": compilation.build.manifest["precision"] if rounding.lines else [],
             "accumulate": str(rounding.sums).removeprefix("torch.")}  # fmt: skip
    faults = static_faults(
        replace(compilation.build, programs=programs, manifest={**compilation.build.manifest, **facts})
    )
    return [str(fault) for fault in faults]


def is_refused(compilation: Compiled, programs: dict[str, Program]) -> bool:
    """Return whether a check refuses programs: that of roundings is asked first, and mostly alone."""
    rounding = compilation.build.rounding
    return bool(
        check_precision(programs, compilation.build.reference, rounding) or faults(compilation, programs, rounding)
    )


def test_no_value_of_a_float32_plan_may_be_rounded() -> None:
    """One value of each function of a program is rounded at once, and a fault found in each of these functions."""
    compilation = compiled(FEW + BOTH)
    programs = dict(compilation.build.programs)
    tried = 0
    for action, program in programs.items():
        for changed in zip_longest(*map(may_be_rounded, program.functions)):
            functions = [rounded(function, name) if name else function
                         for function, name in zip(program.functions, changed, strict=True)]  # fmt: skip
            mutant = {**programs, action: replace(program, functions=tuple(functions))}
            found = check_precision(mutant, compilation.build.reference, Rounding())
            where = {fault.where.partition(":")[0] for fault in found if "rounds to bfloat16" in str(fault)}
            names = {
                f"{action} {function.name}": name for function, name in zip(functions, changed, strict=True) if name
            }
            tried += len(names)
            assert names.keys() <= where, names
    assert tried > 100


def may_be_rounded(function: Function) -> list[str]:
    """Return the floating values that a function is given or computes itself, and does not read from its forward."""
    called = {value for line in function.lines if line.calls_function for value in line.results}
    return [name for name, value in function.values().items()
            if value.kind != "saved" and value.type.dtype.is_floating_point and value not in called]  # fmt: skip


def test_where_a_plan_rounds_losses_sums_and_gradients_may_not_be() -> None:
    compilation = compiled(FEW + BOTH + BF16)
    programs, rounding = dict(compilation.build.programs), compilation.build.rounding
    assert not faults(compilation, programs, rounding)
    assert any("no line of the plan" in fault for fault in faults(compilation, programs, Rounding()))

    def refused(action: str, function: Function) -> bool:
        return is_refused(compilation, dict(with_function(programs, action, function)))

    last = programs["F"].functions[-2]
    tried = 0
    for line in last.lines:
        values = [value for value in line.results if value is not None]
        if base_name(line.op) in ("native_layer_norm", "row_max", "loss_parts", "log", "sum"):
            tried += 1
            lowered = tuple(replace(value, type=replace(value.type, dtype=torch.bfloat16)) for value in values)
            changed = tuple(replace(line, results=lowered) if other is line else other for other in last.lines)
            assert refused("F", replace(last, lines=changed)), line.op
        if base_name(line.op) in ("loss_parts", "log", "sub", "mul", "sum"):
            assert refused("F", rounded(last, values[0].name)), line.op
    assert tried == 5
    for action in ("SCALE", "REDUCE"):
        for name in programs[action].main.values():  # by the check of gradients that are sent too
            narrowed = with_function(programs, action, rounded(programs[action].main, name))
            assert faults(compilation, dict(narrowed), rounding), name
    weights = next(function for function in programs["B"].functions if function.name.startswith("blocks"))
    for _, name in weights.returns:
        if weights.values()[name].type.dtype == torch.float32:
            assert refused("B", rounded(weights, name)), name


def test_gradients_are_added_up_in_a_narrow_type_only_where_the_plan_says() -> None:
    compilation = compiled(PLAN.replace("microbatches 2", "microbatches 2 accumulate bf16") + BOTH)
    programs, rounding = dict(compilation.build.programs), compilation.build.rounding
    assert not faults(compilation, programs, rounding)
    for other in (Rounding(), replace(rounding, sums=torch.float16)):
        assert any("added up over microbatches in bfloat16" in fault for fault in faults(compilation, programs, other))


def test_programs_round_to_the_type_that_the_plan_names() -> None:
    """float16 holds no number beyond 65504, which no test in float64 sees."""
    compilation = compiled(PLAN + BOTH + BF16)
    half = {
        action: parse_program(program.text().replace("bf16[", "f16[").replace("bfloat16", "float16"), action)
        for action, program in compilation.build.programs.items()
    }
    assert any("rounds to float16" in fault for fault in faults(compilation, half, compilation.build.rounding))


def test_no_value_of_a_float64_model_may_be_rounded_to_float32(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(_DOUBLE)
    (tmp_path / "double.parc").write_text(_DOUBLE_PLAN)
    compilation = compile_plan(read_plan(tmp_path / "double.parc"), tmp_path)
    assert not prove(compilation)
    programs, tried = dict(compilation.build.programs), 0
    for action, program in programs.items():
        for function in program.functions:
            for name, value in function.values().items():
                whole = value.type.dtype == torch.float64
                if whole and not any(value in line.results and line.calls_function for line in function.lines):
                    tried += 1
                    mutant = with_function(programs, action, rounded(function, name, torch.float32))
                    assert is_refused(compilation, dict(mutant)), (action, name)
    assert tried > 40


_DOUBLE = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()

def square(output, wanted):
    return ((output - wanted) ** 2).mean()
"""
_DOUBLE_PLAN = """
model "./double.py:net"
input input float64 [B, 8]
input wanted float64 [B, 8]
sizes B=16
loss "./double.py:square"(output, wanted)
optimizer sgd lr 0.1
mesh tp=2
column 0 over tp
row 2 over tp
"""


def test_what_is_made_of_positions_is_rounded_by_the_line_that_meets_an_activation() -> None:
    """The models are angles that one module makes and another takes cosines of, and distances that attention adds to
    its scores."""
    for how in ("angles", "slopes"):
        assert not prove(tables_build(how))
        row = ROUNDINGS.rows([how])["round a table early"]
        assert row.mutants >= 4
        assert not row.accepted, row.accepted
