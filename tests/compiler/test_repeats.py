"""The short form of lines that read one part of every layer, and what a twin of fewer layers then still sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from parc.compiler.program.program import Function, Program
from parc.compiler.twin.structure import compare_structure
from tests.planted_large import LargeBuild, large_build, refusals
from tests.planted_rows import table_text

NAME = "losses of all routers dp=16"


@pytest.fixture(scope="module")
def build() -> LargeBuild:
    return large_build(NAME)


def head(build: LargeBuild, action: str) -> tuple[Program, Function]:
    """Return a program, and its function that reads a part of every layer, or makes the gradient of each."""
    program = build.programs[action]
    (function,) = (f for f in program.blocks if f.name.startswith("part_1"))
    return program, function


def changed(function: Function) -> Iterator[tuple[str, Function]]:
    """Yield the function with one value read instead of another of its type, and with two results exchanged."""
    values, before = function.values(), [*function.parameters]
    for at, line in enumerate(function.lines):
        for name in dict.fromkeys(line.uses):
            for other in before:
                if other.name != name and other.type == values[name].type:
                    lines = (*function.lines[:at], line.renamed({name: other.name}), *function.lines[at + 1 :])
                    yield f"{other.name} for {name} in line {at}", replace(function, lines=lines)
        before += line.made
    pairs = [(a, b) for b in range(len(function.returns)) for a in range(b)]
    for one, two in pairs:
        (first, x), (second, y) = function.returns[one], function.returns[two]
        if values[x].type == values[y].type:
            returns = [*function.returns]
            returns[one], returns[two] = (first, y), (second, x)
            yield f"{x} and {y} exchanged", replace(function, returns=tuple(returns))


def test_a_loss_of_all_layers_is_carried_over_from_two(build: LargeBuild) -> None:
    assert build.twin.overrides["num_hidden_layers"] == 2 < len(build.compiled.routing)


@pytest.mark.parametrize("action", ["F", "B"])
def test_every_wrong_operand_of_a_repetition_is_seen_beside_fewer_of_them(build: LargeBuild, action: str) -> None:
    program, function = head(build, action)
    mutants = [*changed(function)]
    assert len(mutants) > 100
    twin = build.twin.build
    for what, mutant in mutants[:: len(mutants) // 40]:
        functions = tuple(mutant if f is function else f for f in program.functions)
        programs = {**build.programs, action: replace(program, functions=functions)}
        assert compare_structure(programs, build.compiled.build.reference, twin.programs, twin.reference), what


def test_what_is_wrong_with_one_layers_part_is_refused() -> None:
    rows = refusals(1, [NAME])
    print(table_text(rows))
    assert not [what for row in rows.values() for what in row.accepted]
    assert sum(row.first["twin"] for row in rows.values()) >= 10
