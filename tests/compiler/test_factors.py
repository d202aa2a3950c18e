"""Rules as text, positions against factors, sizes, and forms of calls that tests with small shapes cannot show."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.layout.collectives import TypeFault
from parc.compiler.ops import rules as op_rules
from parc.compiler.ops.factors import Dims, OpCall, Operand, OpRule, RuleError, opaque, quotient, rule
from parc.compiler.ops.infer import packed_result
from parc.compiler.ops.rules import TABLE, localize, register, rule_for
from parc.compiler.ops.splits import from_factor, to_factor

B, S, U = 5, 7, 11  # no two have a divisor in common


def call(op: str, args: tuple[Any, ...], operands: Any, results: Any, **kwargs: Any) -> OpCall:
    return OpCall(op, args, kwargs, tuple(operands), tuple(results))


def ruled(*arguments: Any, **kwargs: Any) -> OpRule:
    found = rule_for(call(*arguments, **kwargs))
    assert found is not None
    return found


# ---- sizes


@given(st.integers(1, 60), st.integers(1, 60))
def test_quotient_of_integers_is_exact_division(a: int, b: int) -> None:
    assert quotient(a, b) == (a // b if a % b == 0 else None)
    assert quotient(a * b, b) == a


def test_nothing_is_a_multiple_of_zero() -> None:
    assert quotient(4, 0) is None


# ---- positions


@st.composite
def dims_and_sizes(draw: st.DrawFn) -> tuple[Dims, dict[str, int]]:
    names = iter("abcdefgh")
    dims = tuple(tuple(next(names) for _ in range(draw(st.integers(0, 3)))) for _ in range(draw(st.integers(1, 2))))
    sizes = {name: draw(st.sampled_from((2, 3, 4, 6))) for names_ in dims for name in names_}
    return dims, sizes


def rule_of(dims: Dims, sizes: dict[str, int]) -> OpRule:
    return OpRule((dims,), (), sizes)


def splittable(size: int, ranks: int) -> Iterator[int]:
    return (outer for outer in range(1, size) if size % outer == 0 and (size // outer) % ranks == 0)


@given(dims_and_sizes(), st.sampled_from((2, 3)))
def test_to_factor_undoes_from_factor(drawn: tuple[Dims, dict[str, int]], ranks: int) -> None:
    dims, sizes = drawn
    one = rule_of(dims, sizes)
    for name, size in sizes.items():
        for outer in splittable(size, ranks):
            place = from_factor(one, dims, name, outer)
            assert place is not None
            assert to_factor(one, dims, *place, ranks) == (name, outer)
    assert from_factor(one, dims, "absent", 1) is None


@given(dims_and_sizes(), st.sampled_from((2, 3)))
def test_to_factor_holds_the_same_elements(drawn: tuple[Dims, dict[str, int]], ranks: int) -> None:
    """A position belongs to a factor exactly if both give rank 0 the same elements; else there is no factor."""
    dims, sizes = drawn
    one = rule_of(dims, sizes)
    for dim, names in enumerate(dims):
        whole = math.prod(sizes[name] for name in names)
        for outer in splittable(whole, ranks):
            held = {x for x in range(whole) if x % (whole // outer) < whole // outer // ranks}
            found = to_factor(one, dims, dim, outer, ranks)
            by_factor = {}
            for name in names:
                for part in splittable(sizes[name], ranks):
                    before = math.prod(sizes[n] for n in names[: names.index(name)])
                    inside = whole // before // sizes[name]
                    width = sizes[name] // part
                    by_factor[name, part] = {
                        x for x in range(whole) if (x // inside) % sizes[name] % width < width // ranks
                    }
            assert found == next((key for key, elements in by_factor.items() if elements == held), None)


# ---- text


def test_text_of_a_rule() -> None:
    got = rule("... m k!, n k -> ... m n, n 1", linear="0|01")(
        call("x.y.z", (), [(1, 5, 2, 3), (4, 3)], [(1, 5, 2, 4), (4, 7)])
    )
    assert got.operands == (((), ("...0",), ("m",), ("k",)), (("n",), ("k",)))
    assert got.results == (((), ("...0",), ("m",), ("n",)), (("n",), ()))
    assert got.whole == {"k"}
    assert got.sizes == {"...0": 5, "m": 2, "n": 4, "k": 3}
    assert got.linear == (frozenset({0}), frozenset({0, 1}))


def test_groups_get_their_sizes_from_other_dims() -> None:
    text = "(b s) d, b -> b s (d e)"
    got = rule(text)(call("x.y.z", (), [(12, 5), (3,)], [(3, 4, 10)]))
    assert got.sizes == {"b": 3, "s": 4, "d": 5, "e": 2}
    assert got.operands[0] == (("b", "s"), ("d",))
    with pytest.raises(RuleError, match="cannot be known"):
        rule("(b s) -> (b s)")(call("x.y.z", (), [(12,)], [(12,)]))
    with pytest.raises(RuleError, match="does not hold"):
        rule(text)(call("x.y.z", (), [(13, 5), (3,)], [(3, 4, 10)]))


def test_whole_ellipsis_and_scalars() -> None:
    got = rule("...!, k -> ")(call("x.y.z", (), [(2, 3), (4,)], [()]))
    assert got.whole == {"...0", "...1"}
    assert got.results == ((),)


@pytest.mark.parametrize(
    "text",
    ["a, b", "a -> b -> c", "a a -> a", "(a (b)) -> a", "(a -> a", "a) -> a", "! -> a", "... ... -> a", "a$ -> a"],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(RuleError):
        rule(text)


@pytest.mark.parametrize("linear", ["1", "0,1", "x", "0||0", "-1"])
def test_malformed_linear_is_refused(linear: str) -> None:
    with pytest.raises(RuleError):
        rule("a -> a", linear=linear)


@given(st.text(alphabet="ab.()!,-> 1", max_size=20))
def test_text_is_a_rule_or_a_rule_error(text: str) -> None:
    try:
        ready = rule(text)
    except RuleError:
        return
    with contextlib.suppress(RuleError):
        ready(call("x.y.z", (), [(2, 3)], [(2, 3)]))


@pytest.mark.parametrize(
    ("operands", "results"), [([(2,)], [(2,)]), ([(2, 3), (3,)], [(2, 3)]), ([(2, 3)], [(2, 4)]), ([(2, 3)], [])]
)
def test_a_call_that_does_not_fit_is_refused(operands: Any, results: Any) -> None:
    with pytest.raises(RuleError):
        rule("a b -> a b")(call("x.y.z", (), operands, results))


# ---- registration


def test_register_gives_a_custom_operator_its_rule() -> None:
    name = "testlib.scale.default"
    try:
        register(name, "... d, d -> ... d", linear="0")
        register(name, "... d, d -> ... d", linear="0")
        scale = call(name, (Operand(0), Operand(1)), [(2, 3), (3,)], [(2, 3)])
        assert ruled(*_parts(scale)).operands == ((("...0",), ("d",)), (("d",),))
        assert localize(scale, ((1, 3), (3,)), ((1, 3),)) == (scale.args, {})
        with pytest.raises(RuleError, match="already has the rule"):
            register(name, "... d, d -> ... d")
        with pytest.raises(RuleError, match="operands"):
            rule_for(call(name, (Operand(0),), [(2, 3)], [(2, 3)]))
    finally:  # what is registered outlives the test otherwise, and every later build would look for the operator
        TABLE.pop(name, None)
        op_rules._REGISTERED.pop(name, None)
    with pytest.raises(RuleError, match="built-in"):
        register("aten.mm.default", "m k, k n -> m n")
    with pytest.raises(RuleError, match="named"):
        register("scale", "a -> a")
    with pytest.raises(RuleError):
        register("testlib.broken.default", "a -> -> a")
    assert "testlib.broken.default" not in TABLE


def _parts(one: OpCall) -> tuple[Any, ...]:
    return one.op, one.args, one.operands, one.results


def test_an_operator_without_a_row_has_no_rule() -> None:
    assert rule_for(call("aten.as_strided.default", (Operand(0),), [(2,)], [(2,)])) is None
    assert rule_for(call("aten.mm.default", (), [(2,)], [(2,)])) is None


def test_opaque_promises_nothing() -> None:
    got = opaque(call("x.y.z", (), [(2, 1)], [(3,)]))
    assert got.whole == set(got.sizes) == {"o0_0", "r0_0"}


# ---- structure, not luck


def test_dims_of_equal_size_are_told_apart() -> None:
    n = 6
    x = [(n, n, n)]
    transposed = ruled("aten.transpose.int", (Operand(0), 0, 2), x, x)
    assert transposed.operands[0] == tuple(reversed(transposed.results[0]))
    assert len(set(transposed.operands[0])) == 3
    product_rule = ruled("aten.mm.default", (Operand(0), Operand(1)), [(n, n), (n, n)], [(n, n)])
    assert product_rule.operands == ((("m",), ("k",)), (("k",), ("n",)))
    assert ruled("aten.softmax.int", (Operand(0), 1), x, x).whole == {"t0_1", "t1_1"}
    viewed = ruled("aten.view.default", (Operand(0), [n, n * n]), x, [(n, n * n)])
    assert viewed.results[0] == (viewed.operands[0][0], viewed.operands[0][1] + viewed.operands[0][2])


def test_dims_of_size_one_belong_to_no_factor() -> None:
    got = ruled("aten.add.Tensor", (Operand(0), Operand(1)), [(6, 1, 4), (3, 4)], [(6, 3, 4)])
    assert got.operands == ((("d0",), (), ("d2",)), (("d1",), ("d2",)))
    viewed = ruled("aten.view.default", (Operand(0), [1, 6, 1]), [(6, 1)], [(1, 6, 1)])
    assert viewed.operands[0][1] == viewed.results[0][0] == viewed.results[0][2] == ()


def test_literals_are_not_partial() -> None:
    x = [(2, 3)]
    assert ruled("aten.add.Tensor", (Operand(0), 3), x, x).linear == ()
    assert ruled("aten.add.Tensor", (Operand(0), 0), x, x).linear == (frozenset({0}),)
    assert ruled("aten.mul.Tensor", (Operand(0), 3), x, x).linear == (frozenset({0}),)
    assert ruled("aten.div.Tensor", (3, Operand(0)), x, x).linear == ()
    assert ruled("aten.masked_fill.Scalar", (Operand(0), Operand(1), 1.0), x * 2, x).linear == ()
    assert ruled("aten._to_copy.default", (Operand(0),), x, x, dtype=torch.int64).linear == ()
    assert ruled("aten._to_copy.default", (Operand(0),), x, x, dtype=torch.bfloat16).linear == (frozenset({0}),)


def test_bias_makes_the_summed_factor_whole() -> None:
    x, w, b = (2, 3), (4, 3), (4,)
    assert ruled("aten.linear.default", (Operand(0), Operand(1)), [x, w], [(2, 4)]).whole == set()
    assert ruled("aten.linear.default", (Operand(0), Operand(1), None), [x, w], [(2, 4)]).whole == set()
    biased = ruled("aten.linear.default", (Operand(0), Operand(1), Operand(2)), [x, w, b], [(2, 4)])
    assert biased.whole == {"k"}


# ---- sizes that no other shares


def test_views_of_sizes_without_common_divisors() -> None:
    merged = ruled("aten.view.default", (Operand(0), [B * S, 12]), [(B, S, 12)], [(B * S, 12)])
    assert merged.results[0] == (merged.operands[0][0] + merged.operands[0][1], merged.operands[0][2])
    assert merged.whole == set()
    shapes = ((B, 2 * U, 12), (B, 2 * U, 3, 4))
    heads = call("aten.view.default", (Operand(0), list(shapes[1])), [shapes[0]], [shapes[1]])
    assert localize(heads, ((B, U, 12),), ((B, U, 3, 4),))[0][1] == [B, U, 3, 4]
    odd = ruled("aten.view.default", (Operand(0), [S, B]), [(B, S)], [(S, B)])
    assert odd.whole == set(odd.sizes)


def test_slices_of_sizes_without_common_divisors() -> None:
    pieces = call("aten.split.Tensor", (Operand(0), 2 * U, 1), [(B, 6 * U)], [(B, 2 * U)] * 3)
    got = rule_for(pieces)
    assert got is not None
    assert got.operands[0][1] == ("c0", "p")
    assert [dims[1] for dims in got.results] == [("p",)] * 3
    assert localize(pieces, ((B, 3 * U),), ((B, U),) * 3)[0][1] == U
    end = 2**63 - 1
    half = call("aten.slice.Tensor", (Operand(0), 1, 2 * U, end), [(B, 4 * U)], [(B, 2 * U)])
    assert localize(half, ((B, 2 * U),), ((B, U),))[0] == (Operand(0), 1, U, 2 * U)
    full = ruled("aten.slice.Tensor", (Operand(0), 1, 0, end), [(B, S)], [(B, S)])
    assert full.operands == full.results
    assert full.whole == set()
    ragged = ruled("aten.slice.Tensor", (Operand(0), 1, 1, end), [(B, S)], [(B, S - 1)])
    assert to_factor(ragged, ragged.operands[0], 1, 1, 2) is None


# ---- attention


def test_heads_of_attention() -> None:
    args = tuple(map(Operand, range(4)))
    op = "aten.scaled_dot_product_attention.default"
    grouped = ruled(op, args, [(2, 8, 6, 5), (2, 4, 7, 5), (2, 4, 7, 9), (6, 7)], [(2, 8, 6, 9)])
    q, k, v, mask = grouped.operands
    assert q[1] == ("g", "r")
    assert k[1] == v[1] == ("g",)
    assert (grouped.sizes["g"], grouped.sizes["r"]) == (4, 2)
    assert mask == (("s",), ("t",))
    equal = ruled(op, args[:3], [(2, 4, 6, 8)] * 3, [(2, 4, 6, 8)])
    assert equal.operands[0][1] == equal.operands[1][1] == ("g",)
    odd = ruled(op, args[:3], [(2, 6, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)], [(2, 6, 6, 8)])
    assert odd.whole == set(odd.sizes), "4 heads of keys do not divide 6 of queries"


def test_causal_attention_keeps_its_queries_whole() -> None:
    q = (2, 4, 6, 8)
    args = (Operand(0), Operand(1), Operand(2))
    free = ruled("aten.scaled_dot_product_attention.default", args, [q] * 3, [q])
    causal = ruled("aten.scaled_dot_product_attention.default", args, [q] * 3, [q], is_causal=True)
    assert causal.whole - free.whole == {"s"}


def test_an_equation_that_takes_a_diagonal_promises_nothing() -> None:
    call = OpCall("aten.einsum.default", ("bii->bi", [Operand(0)]), {}, ((2, 3, 3),), ((2, 3),))
    found = rule_for(call)
    assert found is not None and found.whole == frozenset(found.sizes)


def test_rows_that_are_packed_differently_meet_in_no_operator() -> None:
    call = OpCall("aten.add.Tensor", (Operand(0), Operand(1)), {}, ((4, 2), (4, 2)), ((4, 2),))
    with pytest.raises(TypeFault, match="packed differently"):
        packed_result(call, [(2, 8), (4, 8)])
