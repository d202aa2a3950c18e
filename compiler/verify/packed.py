"""The check of the number of packed rows that types count: it sets memory and bytes, and no number that is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..program.program import Fault, Function, Program


def check_packed(programs: Mapping[str, Program], reference: Program) -> Iterator[Fault]:
    """Find values whose rows are counted as none in the captured graph are: `3 of 8` where a token chooses two of eight
    experts."""
    known = {value.type.packed for function in reference.functions for value in function.values().values()}
    for action, program in programs.items():
        for function in program.functions:
            for name, packed in _packed(function).items():
                if packed not in known:
                    message = f"has {packed[0]} of {packed[1]} rows, which nothing in the captured graph has"
                    yield Fault("types", f"{action} {function.name}: {name}", message)


def _packed(function: Function) -> dict[str, tuple[int, int]]:
    values = function.values()
    return {name: value.type.packed for name, value in values.items() if value.type.packed is not None}
