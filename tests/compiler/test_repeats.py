"""Lines that read one part of every layer: tested on a twin of fewer layers, and certified of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from parc.checking.certified import certificate_of
from parc.checking.twins import subject_of
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Function, Program
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from tests.planted_bugs import LARGE
from tests.planted_builds import ROOT, table_text
from tests.planted_large import ROUTERS, LargeBuild, large_build

NAME = "losses of all routers dp=16"


@pytest.fixture(scope="module")
def build() -> LargeBuild:
    return large_build(NAME)


def head(build: LargeBuild, action: str) -> tuple[Program, Function]:
    """Return a program, and its function that reads a part of every layer, or makes the gradient of each."""
    program = build.programs[action]
    last = build.programs["F"].main.lines[-1].op
    (function,) = (f for f in program.blocks if f.name.removesuffix("_backward") == last)
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
    assert build.twin.overrides["num_hidden_layers"] == 2 < len(build.compiled.request.placing.experts)


@pytest.mark.parametrize("name", [NAME, *ROUTERS])
def test_every_wrong_operand_of_a_repetition_is_seen_beside_fewer_of_them(name: str) -> None:
    build = large_build(name)
    for action in ("F", "B"):
        program, function = head(build, action)
        mutants = [*changed(function)]
        assert len(mutants) > 10
        for what, mutant in mutants[:: -(-len(mutants) // 8)]:
            functions = tuple(mutant if f is function else f for f in program.functions)
            programs = {**build.programs, action: replace(program, functions=functions)}
            assert build.faults(programs), what


@pytest.mark.parametrize(("way", "layers"), [("from zero", 2), ("zeros", 2), ("reversed", 2), ("means", 2)])
def test_losses_of_all_layers_are_carried_over_however_they_are_added(way: str, layers: int) -> None:
    assert large_build(f"routers, {way}").twin.overrides["layers"] == layers


@pytest.mark.parametrize("way", ["weighted", "stack"])
def test_a_loss_of_all_layers_without_repetitions_is_certified_too(way: str) -> None:
    text = ROUTERS["routers, zeros"][1].replace("zeros", way).replace("layers=7", "layers=9")
    compilation = compile_plan(read_plan(Source("large.parc", text)), ROOT / "tests")
    assert "layers=2, width=8" in subject_of(compilation).text
    assert not certificate_of(compilation.build).missing


def test_what_is_wrong_with_one_layers_part_is_refused() -> None:
    rows = LARGE.rows([NAME, *ROUTERS], 1, share=18)
    print(table_text(rows))
    divided_by_one = "aten.div.Tensor(Ref(name='to_copy'), 1)"
    assert not [what for row in rows.values() for what in row.accepted if divided_by_one not in what]
    assert sum(row.first["certificate"] for row in rows.values()) >= 10
