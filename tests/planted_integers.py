"""Planted bugs of numbers that are cut off beyond what data reaches: whole numbers, which may also go through a type
that is too short for them, and activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.program.binding import RNG
from parc.compiler.program.program import Line, Ref, Value
from tests.planted_builds import GoodBuild
from tests.planted_sites import Mutant, through, with_function

_SAME = (  # for small numbers
    ("aten.clamp.default", (0, 100)), ("aten.clamp.default", (-1000, 2**31)), ("aten.remainder.Scalar", (127,)),
    ("aten.bitwise_and.Scalar", (127,)), ("aten.abs.default", ()),
)  # fmt: skip
_SHORT = (torch.int8, torch.int32, torch.float32)


def shortened(build: GoodBuild) -> Iterator[Mutant]:
    """Change every whole number that a program is given, counts or draws from, in a way that small numbers survive."""
    kind, programs = "cut a whole number off", build.case.programs
    for action, program in programs.items():
        for function in program.functions:
            for name, value in function.values().items():
                if value.type.dtype is not torch.int64 or value.kind == "saved":
                    continue
                if any(value in line.results and line.calls_function for line in function.lines):
                    continue
                for op, args in _SAME:
                    changed = through(function, name, [(op, args, torch.int64)])
                    what = f"{action} {function.name}: {name} by {op}{args}"
                    yield Mutant(kind, what, with_function(programs, action, changed))
                for dtype in _SHORT:
                    casts = [("aten._to_copy.default", (), type_) for type_ in (dtype, torch.int64)]
                    what = f"{action} {function.name}: {name} through {dtype}"
                    yield Mutant(kind, what, with_function(programs, action, through(function, name, casts)))
    for function in programs["F"].functions:
        for value in function.values().values():
            if value.binding == RNG:
                changed = through(function, value.name, [("aten.flip.default", ([0],), torch.int64)])
                yield Mutant(kind, f"F: {value.name} flipped", with_function(programs, "F", changed))


_CUT = (  # for what random data comes to
    ("aten.clamp.default", (-5e4, 5e4)), ("aten.hardtanh.default", (-3e4, 3e4)), ("aten.clip.default", (-5e4, 5e4)),
    ("aten.fmod.Scalar", (5e4,)), ("aten.fake_quantize_per_tensor_affine.default", (1e-9, 0, -(2**60), 2**60)),
)  # fmt: skip
_CUT_BY = (
    ("aten.minimum.default", 5e4), ("aten.fmax.default", -5e4), ("aten.max.other", -5e4), ("aten.fmod.Tensor", 5e4),
    ("aten.clamp_max.Tensor", 5e4), ("aten.logaddexp.default", -5e4),
)  # fmt: skip


def bounded(build: GoodBuild) -> Iterator[Mutant]:
    """Cut off the first activations of each function of F where random data never comes to: by a number, or by a tensor
    that holds it."""
    programs, kind = build.case.programs, "bound an activation"
    for function in programs["F"].functions:
        floats = [value.name for line in function.lines for value in line.made if value.type.dtype.is_floating_point]
        for name in floats[:3]:
            dtype = function.values()[name].type.dtype
            for op, args in _CUT:
                changed = through(function, name, [(op, args, dtype)])
                yield Mutant(kind, f"F {function.name}: {name} by {op}{args}", with_function(programs, "F", changed))
            bound = Value(f"{name}_bound", TensorType(dtype, (), Placement.of(build.build.mesh, {})))
            for op, number in _CUT_BY:
                made = Line((bound,), "aten.full.default", ([], number), (("dtype", dtype),))
                changed = through(function, name, [(op, (Ref(bound.name),), dtype)])
                changed = replace(changed, lines=(made, *changed.lines))
                yield Mutant(kind, f"F {function.name}: {name} by {op} {number}", with_function(programs, "F", changed))
