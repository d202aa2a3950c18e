"""The short form of lines that read one part of every layer, and what a twin of fewer layers then still sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from parc.checking.twins import subject_of
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Function, Line, Program, Ref, Value
from parc.compiler.twin.bodies import ShortForm, function_body, short_form
from parc.compiler.twin.structure import compare_structure
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError, render
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
    twin = build.twin.build
    for action in ("F", "B"):
        program, function = head(build, action)
        mutants = [*changed(function)]
        assert len(mutants) > 10
        for what, mutant in mutants[:: -(-len(mutants) // 40)]:
            functions = tuple(mutant if f is function else f for f in program.functions)
            programs = {**build.programs, action: replace(program, functions=functions)}
            assert compare_structure(programs, build.compiled.build.reference, twin.programs, twin.reference), what


@pytest.mark.parametrize(("way", "layers"), [("from zero", 4), ("zeros", 2), ("reversed", 4), ("means", 4)])
def test_losses_of_all_layers_are_carried_over_however_they_are_added(way: str, layers: int) -> None:
    assert large_build(f"routers, {way}").twin.overrides["layers"] == layers


@pytest.mark.parametrize("way", ["weighted", "cat", "stack"])
def test_a_loss_of_all_layers_without_repetitions_names_its_line_and_the_way_out(way: str) -> None:
    text = ROUTERS["routers, zeros"][1].replace("zeros", way).replace("layers=7", "layers=9")
    compilation = compile_plan(read_plan(Source("large.parc", text)), ROOT / "tests")
    with pytest.raises(PlanError) as refused:
        subject_of(compilation)
    message = render(refused.value.diagnostics[0])
    assert "P0213" in message and "large.parc:2:1" in message and "parc's own" not in message
    assert "reads a value of each of `blocks.0` to `blocks.8`, and not in equal repetitions" in message
    assert "router_losses.py:" in message and "keep `layers=9` in the `verify` line" in message
    whole = compile_plan(read_plan(Source("large.parc", text.replace("verify layers=2, ", "verify "))), ROOT / "tests")
    assert "width=8" in subject_of(whole).text


def test_what_is_wrong_with_one_layers_part_is_refused() -> None:
    rows = LARGE.rows([NAME, *ROUTERS], 1)
    print(table_text(rows))
    assert not [what for row in rows.values() for what in row.accepted]
    assert sum(row.first["twin"] for row in rows.values()) >= 10


def test_operands_that_a_function_returns_are_a_family_of_results() -> None:
    """As logits that a model returns beside their loss."""
    type_ = TensorType(torch.float32, (4,), Placement(()))
    lines, total = list[Line](), "zero"
    for at in range(4):
        lines.append(Line((Value(f"sum{at}", type_),), "aten.add.Tensor", (Ref(total), Ref(f"x{at}"))))
        total = f"sum{at}"
    scores = [f"x{at}" for at in range(4)]
    read = tuple(Value(name, type_) for name in ("zero", *scores))

    def short(*returned: str) -> ShortForm:
        keys = [Binding("output", name) for name in returned]
        return short_form(Function("head", read, tuple(lines), tuple(zip(keys, returned, strict=True))), [scores])

    form, slots = short(total, *scores), ((0, 0), (1, 0), (1, 1), (1, 2), (1, 3))
    assert len(form.lines) == 2 and form.returned == ("sum1", "x0")
    assert form.operands == form.results == slots
    assert len(short(total, "x1").lines) == 4
    for count in (2, 3, 4):
        head = Function("head", read[: count + 1], tuple(lines[:count]), ((Binding("output", "x"), f"sum{count - 1}"),))
        names = function_body(head, Mesh(), families=[scores[:count]]).names
        assert len({*names.values()}) == len(names), "backward may read any of them by its name"
