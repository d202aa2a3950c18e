"""Models and plans that no one build serves at all declared sizes: refused, with the difference and its place."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from parc.checking.checks import check_build, prove
from parc.compiler.plan.plan import read_plan
from parc.compiler.sizes.template import Template
from parc.compiling.size_ranges import compile_range
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.ranged_models import positions
from tests.test_size_ranges import compiled_of


def alone(how: str, sizes: str, length: int = 32) -> str:
    """Return a plan of ``Positions`` on one rank."""
    return positions(how, sizes, length).partition("mesh")[0]


def refused(text: str) -> str:
    with pytest.raises(PlanError) as error:
        prove(compiled_of(text))
    return str(error.value)


def test_a_branch_on_a_size_is_named() -> None:
    said = refused(alone("branch", "B=4..16 by 4, S=4..28 by 4"))
    where = r"the model has another program at B=4, S=4 than at B=16, S=28 at ranged_models\.py:\d+\n"
    assert re.match(rf"error\[P0225\]: {where}", said)
    assert "B=16, S=28: mul = aten.mul.Tensor(add, 2)" in said
    assert (
        "help: choose a smaller range that contains only one of the two sizes, and make a build for each part" in said
    )
    compiled_of(alone("branch", sizes="B=4, S=24..28 by 4"))


def test_a_number_that_is_no_polynomial_is_named() -> None:
    said = refused(alone("root", sizes="B=4, S=4..16 by 4"))
    assert said.startswith(
        "error[P0226]: the model has a number that is no polynomial of the sizes, between S=16 and S=4 at "
    )
    assert "aten.div.Tensor(add, 2.0)" in said


def test_a_size_rounded_to_a_multiple_is_no_polynomial() -> None:
    said = refused(alone("blocks", sizes="B=4, S=8..40 by 8", length=40))
    assert said.startswith("error[P0226]: the model has a number that is no polynomial of the sizes")


def test_a_model_that_leaves_its_program_where_only_numbers_are_looked_at_is_at_fault() -> None:
    compiled = compiled_of(alone("lone", sizes="B=4, S=4..124 by 4", length=124))
    assert {"B": 4, "S": 88} in [at.sizes for at in compiled.cases()]
    with pytest.raises(PlanError, match=r"P0226") as error:
        check_build(compiled)
    assert "S=88" in str(error.value)


def compiled_numbers(sizes: str, number: Callable[..., int]) -> tuple[int, Template]:
    """Return at how many sizes, and to what, a plan compiles whose only program holds this number."""
    plan = read_plan(Source("ranged.parc", positions(sizes=sizes)))
    made, template = compile_range(
        plan, lambda at: {"p.py": f"x = f({number(**at)})"}, lambda texts: texts, lambda _: {}
    )
    assert template is not None
    return len(made), template


@pytest.mark.parametrize(
    ("sizes", "number"),
    [
        ("B=4, S=8..40 by 8", lambda S: S // 16 * 16),
        ("B=4, S=8..800 by 8", lambda S: S // 64 * 64),
        ("B=4, S=8..800 by 8", lambda S: -S % 48),
        ("B=4, S=7..301 by 7", lambda S: -(-S // 2)),
        ("B=4..8 by 4, S=8..32 by 8", lambda B, S: S // 16 * 16),
        ("B=4..16 by 4, S=8..160 by 8", lambda B, S: S // 16 * B),
    ],
)
def test_what_is_no_polynomial_is_refused_wherever_that_shows(sizes: str, number: Callable[..., int]) -> None:
    with pytest.raises(PlanError, match="P0226"):
        compiled_numbers(sizes, number)


def test_a_number_that_is_whole_at_some_sizes_only_is_told_by_those() -> None:
    looked_at, template = compiled_numbers("B=4, S=8..40", lambda S: S // 2 - 1)
    assert template.texts["p.py"] == "x = f({S/2-1})" and 5 < looked_at <= 8
    assert compiled_numbers("B=4, S=8..800 by 8", lambda S: S // 4)[0] == 5


def test_a_tensor_made_of_a_size_is_named() -> None:
    said = refused(alone("tensor", sizes="B=4, S=4..16 by 4"))
    assert said.startswith(
        "error[P0225]: the tensor `lifted_tensor_0`, which the model's code makes from numbers, is different at S=4\n"
    )


def test_a_range_has_a_name_that_programs_can_use() -> None:
    said = refused(positions().replace("[B, S]", "[B, a-b]").replace("S=4..28", "a-b=4..28"))
    assert "error[P0005]: programs cannot name `a-b`, which has a range" in said


def test_a_size_that_becomes_one_is_named() -> None:
    assert refused(positions(sizes="B=1..4, S=8").replace("[B/dp, _]", "[_, _]")).startswith("error[P0225]")


def test_a_model_that_fails_at_a_size_says_at_which() -> None:
    said = refused(positions(sizes="B=4, S=4..64 by 4"))
    assert said.startswith("error[P0205]") and "note: at S=64, of the declared sizes" in said


def test_what_does_not_divide_inside_the_model_is_named_with_what_would() -> None:
    said = refused(
        'model "tests.ranged_models:Pictures"\ninput pictures float32 [B, 3, H, W]\ninput kinds int64 [B]\n'
        "sizes B=4, H=8..40, W=8\nloss cross_entropy(output, kinds)\noptimizer sgd lr 0.1\n"
    )
    assert re.match(
        r"error\[P0207\]: `\w+` of `second`: H/2-1 is not always a whole number: H must be a multiple of 2", said
    )


def test_of_a_range_the_step_must_divide() -> None:
    said = "error[P0107]: dim 0 of `tokens` has 1 entries, which do not divide by dp=2"
    assert refused(positions(sizes="B=2..8, S=8")).startswith(said)
