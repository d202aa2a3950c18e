"""Stretches of lines as code: they compute what the lines say, and a value dies after its last use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.program.binding import LOSS
from parc.compiler.program.program import Line, Origin, Ref, Value
from parc.compiler.program.text import ProgramError, parse_program
from parc.runtime.backends.in_process import InProcess
from parc.runtime.machine.coded import Added, CodedLine, coded
from parc.runtime.machine.execute import Machine
from parc.runtime.ranks.communication import Environment

CPU = torch.device("cpu")
TYPE = TensorType(torch.float32, (4,), Placement.whole(Mesh()))


def line(made: str, *args: Any, op: str = "aten.add.Tensor") -> Line:
    """Return a line that makes values of these names; ``_`` is one that nobody wants."""
    values = tuple(None if name == "_" else Value(name, TYPE) for name in made.split())
    return Line(values, op, args)


def run(lines: Sequence[CodedLine], **values: Any) -> Environment:
    """Run lines on one lane, and return what the environment then has."""
    coded(lines)([environment := dict(values)])
    return environment


def test_arguments_are_values_numbers_and_lists_of_both() -> None:
    seen: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return torch.zeros(4)

    args = [Ref("a"), 2, 0.5, float("inf"), None, "text", torch.int8, [1, 2], [Ref("a"), Ref("b")], (Ref("b"), 1)]
    run([CodedLine(line("c", *args), note, args, {"from": Ref("b"), "dim": [3]})], a=1, b=2)
    assert seen == [
        ((1, 2, 0.5, float("inf"), None, "text", torch.int8, [1, 2], [1, 2], (2, 1)), {"from": 2, "dim": [3]})
    ]


def test_names_of_values_may_be_any() -> None:
    values = {"__values": 1, "__lane": 2, "__0": 3, "__total": 4, "v__0": 5, "stretch": 6}
    for name in values:
        made = run([CodedLine(line("made", Ref(name)), lambda x: [x], [Ref(name)], {})], **values)
        assert made["made"] == [values[name]] and {**made, "made": 0} == {**values, "made": 0}
    both = CodedLine(line("made", Ref("__0"), Ref("v__0")), lambda x, y: [x, y], [Ref("__0"), Ref("v__0")], {})
    assert run([both], **values)["made"] == [3, 5]


def test_each_lane_has_its_site_and_its_values() -> None:
    sites: Any = [10, 20]
    stretch = coded([CodedLine(line("y", Ref("x")), lambda site, x: site + x, [Ref("x")], {}, sites)])
    lanes = [{"x": 1}, {"x": 2}]
    stretch(lanes)
    assert [lane["y"] for lane in lanes] == [11, 22]


def test_several_results_a_list_of_one_and_one_that_nobody_wants() -> None:
    pair = CodedLine(line("_ low", Ref("x"), op="aten.max.dim"), lambda x: (x + 1, x - 1), [Ref("x")], {})
    assert run([pair], x=3) == {"x": 3, "low": 2}
    unbind = CodedLine(line("only", Ref("x"), op="aten.unbind.int"), torch.unbind, [Ref("x")], {})
    assert run([unbind], x=torch.ones(1, 4))["only"].shape == (4,)


def test_a_value_dies_after_its_last_use() -> None:
    alive: list[bool] = []
    watched: list[Any] = []

    def made(x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        watched.append(weakref.ref(result))
        return result

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(watched[0]() is not None)
        return x

    environment = run([
        CodedLine(line("y", Ref("x")), made, [Ref("x")], {}),
        CodedLine(line("z", Ref("y")), look, [Ref("y")], {}, dead=("y",)),
        CodedLine(line("w", Ref("x")), look, [Ref("x")], {}, dead=("w",)),
        CodedLine(line("v", Ref("z")), look, [Ref("x")], {}, dead=("x",)),
    ], x=torch.ones(4))  # fmt: skip
    assert alive == [True, True, True], "z is y"
    del environment["z"]
    assert watched[0]() is None and list(environment) == ["v"]


def test_a_result_is_added_where_there_is_a_total() -> None:
    def add(total: int, otherwise: Any, x: int) -> int:
        return total + int(otherwise(x))

    def kernel(site: int, x: int) -> int:
        return site * x

    sites: Any = [10]
    each = CodedLine(line("y", Ref("x")), kernel, [Ref("x")], {}, sites, added=Added("y", add))
    assert run([each], x=2) == {"x": 2, "y": 20}
    assert run([each], x=2, **{"total of y": 5}) == {"x": 2, "y": 25}
    pair = replace(line("y", Ref("x")), results=(*line("y", Ref("x")).results, *line("z", Ref("x")).results))
    both = CodedLine(pair, torch.frexp, [Ref("x")], {}, totalled=("y", "z"))
    total = torch.full((2,), 5.0)
    found = run([both], x=torch.tensor([1.0, 3.0]), **{"total of y": total})
    assert found["y"] is total and found["y"].tolist() == [5.5, 5.75] and found["z"].tolist() == [1, 2]


def test_an_error_says_of_which_line_it_is() -> None:
    lines = [
        CodedLine(replace(line(made, Ref("x")), origin=Origin(module, "net.py:7")), call, [Ref("x")], {}, dead=dead)
        for made, module, call, dead in (
            ("y", "model", torch.exp, ("y",)), ("z", "model.head", torch.linalg.inv, ()), ("w", "", torch.neg, ("x",))
        )
    ]  # fmt: skip
    with pytest.raises(RuntimeError) as caught:
        run(lines, x=torch.zeros(2, 3))
    assert caught.value.__notes__ == ["in `aten.add.Tensor`, which makes `z` | model.head net.py:7"]


def test_equal_functions_of_a_program_run_apart_from_sums_over_ranks() -> None:
    text = '''"""parc program: role stage0, action F"""

mesh(dp=2)


def forward(
    x: "f32[4]",  # input x
):
    double = aten.add.Tensor(x, x)  # f32[4] | - -
    whole = parc.all_reduce(double, 'dp')  # f32[4] | - -
    exp = aten.exp.default(x)  # f32[4] | - -
    sum = aten.add.Tensor(exp, whole)  # f32[4] | - -
    return {
        "loss": sum,
    }
'''
    program, seen = parse_program(text), list[tuple[str, list[str]]]()
    inputs = [{"x": torch.full((4,), float(rank))} for rank in range(2)]
    found = Machine(program, InProcess(program.mesh), CPU, reuse=True).run([dict(one) for one in inputs])
    for rank, results in enumerate(found):
        assert torch.equal(results[LOSS], torch.full((4,), float(rank)).exp() + 2)

    def watch(line: Line, environments: Sequence[Environment]) -> None:
        seen.append((line.made[0].name, sorted(name for name in environments[0] if " " not in name)))
        assert not any(environment[line.made[0].name].isnan().any() for environment in environments), "it has arrived"

    Machine(program, InProcess(program.mesh), CPU, watch=watch).run(inputs)
    assert [name for name, _ in seen] == ["double", "whole", "exp", "sum"]
    assert seen[1][1] == ["double", "whole", "x"], "a watch sees what a line reads"


@pytest.mark.parametrize("words", ["class = aten.exp.default(x)", "y; import os = aten.exp.default(x)",
                                   "print(1) = aten.exp.default(x)", "y = aten.add.Tensor(x, x, **{'alpha': 1})",
                                   "y = aten.add.Tensor(x, x, alpha=print(1))"])  # fmt: skip
def test_a_program_of_a_build_brings_nothing_but_names_into_the_code(words: str) -> None:
    text = """\"\"\"parc program: role stage0, action F\"\"\"

mesh()


def forward(
    x: "f32[4]",  # input x
):
    LINE  # f32[4] | - -
    return {
        "loss": x,
    }
"""
    parse_program(text.replace("LINE", "y = aten.exp.default(x)"))
    with pytest.raises(ProgramError):
        parse_program(text.replace("LINE", words))
