"""Numbers of a build beside its twin's, and which of them follow from the model's."""

from __future__ import annotations

from parc.compiler.twin.bodies import Numbers, Pairs, Scalar, number_problem

ORIGIN = "layers.*.attn model.py:12"
HEADS = (2, 8)
"""The sizes of a dim that is 2 in both, and 1/x of which is 0.5."""


def _scaled(op: str, scale: Scalar) -> tuple[Numbers, ...]:
    return (Numbers(f"parc.{op}.default", ORIGIN, (("scale", scale, False),), HEADS),)


def test_a_derivative_has_the_number_of_its_operator_and_no_other_of_the_model() -> None:
    model = Pairs.of(_scaled("attention", 0.25), _scaled("attention", 0.25))
    half, same = _scaled("attention_backward", 0.5), _scaled("attention_backward", 0.25)
    assert number_problem(same, same, model, whole=False) is None
    problem = number_problem(half, half, model, whole=False)
    assert problem == (
        "parc.attention_backward.default has 0.5 where its twin has 0.5: the operator itself has no such scale"
    )


def test_a_derivative_has_its_operators_default_where_none_is_written() -> None:
    def slope(op: str, *given: tuple[str, Scalar, bool]) -> tuple[Numbers, ...]:
        return (Numbers(f"aten.{op}.default", ORIGIN, given, HEADS),)

    model = Pairs.of(slope("leaky_relu"), slope("leaky_relu"))
    default = slope("leaky_relu_backward", ("negative_slope", 0.01, False))
    other = slope("leaky_relu_backward", ("negative_slope", 0.5, False))
    assert number_problem(default, default, model, whole=False) is None
    assert number_problem(other, other, model, whole=False) is not None
