"""Passes over graphs as texts: a small function before a pass, and the same function behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Split
from parc.compiler.ops.precision import PrecisionLine
from parc.compiler.padding.pads import Pad
from parc.compiler.program.binding import Binding
from parc.compiler.resolve.requests import Claim
from parc.passes.calls import mark_packed
from parc.passes.canonical.canonicalize import canonicalize
from parc.passes.canonical.constants import fold_constants
from parc.passes.canonical.decompose import expand_unruled
from parc.passes.canonical.loss import split_loss, stop_gradients
from parc.passes.canonical.narrow import narrow
from parc.passes.canonical.pad import pad
from parc.passes.placing.partition import Partition, fuse_bias, lift_parameters
from parc.passes.placing.propagate import propagate
from tests.passes.as_text import graph_of, text_of, typed_text

X = 'x: "f32[8, 4]",  # input x'
UP, DOWN = 'up_w: "f32[6, 4]",  # parameter up.w', 'down_w: "f32[4, 6]",  # parameter down.w'
UP_B, DOWN_B = 'up_b: "f32[6]",  # parameter up.b', 'down_b: "f32[4]",  # parameter down.b'


def function(parameters: Sequence[str], lines: Sequence[str], **returns: str) -> str:
    """Return the text of a function, which returns ``sum`` as its loss unless told otherwise."""
    body = [line if " | " in line else f"{line} | net net.py:3" for line in lines]
    results = [f'    "{key.replace("_", " ")}": {name},' for key, name in (returns or {"loss": "sum"}).items()]
    head = ["def forward(", *(f"    {parameter}" for parameter in parameters), "):"]
    return "\n".join([*head, *(f"    {line}" for line in [*body, "return {", *results, "}"])])


def rows(text: str) -> list[str]:
    """Return a function's lines without their origins."""
    return [row.strip().partition(" | ")[0] for row in text.splitlines() if " = " in row]


def placed(text: str, mesh: Mesh, claims: Sequence[tuple[Binding, str, int]]) -> torch.fx.Graph:
    """Return the typed graph of a function in which claims split dims of parameters and inputs over axes."""
    graph = graph_of(text)
    mark_packed(graph)
    nodes = {noted(node).binding: (node, 0) for node in graph.find_nodes(op="placeholder")}
    fixed = [Claim(nodes[binding], axis, Split(dim), 1) for binding, axis, dim in claims]
    return Partition(graph, mesh, propagate(graph, mesh, fixed), None, {}).run()


NET = function(
    [X, UP, DOWN],
    [
        "linear = aten.linear.default(x, up_w)  # f32[8, 6] | up net.py:3",
        "softmax = aten.softmax.int(linear, -1)  # f32[8, 6] | act net.py:4",
        "linear_1 = aten.linear.default(softmax, down_w)  # f32[8, 4] | down net.py:5",
        "relu = aten.relu.default(linear_1)  # f32[8, 4] | - net.py:6",
        "sum = aten.sum.default(relu)  # f32[] | - net.py:6",
    ],
)
BIASED = function(
    [X, UP, UP_B, DOWN, DOWN_B],
    [
        "linear = aten.linear.default(x, up_w)  # f32[8, 6]",
        "add = aten.add.Tensor(linear, up_b)  # f32[8, 6]",
        "relu = aten.relu.default(add)  # f32[8, 6]",
        "linear_1 = aten.linear.default(relu, down_w)  # f32[8, 4]",
        "add_1 = aten.add.Tensor(linear_1, down_b)  # f32[8, 4]",
        "sum = aten.sum.default(add_1)  # f32[]",
    ],
)


def test_a_text_is_the_graph_that_it_makes() -> None:
    assert rows(text_of(graph_of(NET))) == rows(NET)


def test_the_canonical_form_takes_biases_out_and_writes_means_as_sums() -> None:
    text = function(
        [X, UP, UP_B],
        [
            "linear = aten.linear.default(x, up_w, up_b)  # f32[8, 6]",
            "view = aten.view.default(linear, [8, 2, 3])  # f32[8, 2, 3]",
            "clone = aten.clone.default(view)  # f32[8, 2, 3]",
            "mean = aten.mean.dim(clone, [-1])  # f32[8, 2]",
            "sum = aten.sum.default(mean)  # f32[]",
        ],
    )
    assert rows(text_of(canonicalize(graph_of(text)))) == [
        "linear = aten.linear.default(x, up_w)  # f32[8, 6]",
        "add = aten.add.Tensor(linear, up_b)  # f32[8, 6]",
        "reshape = aten.reshape.default(add, [8, 2, 3])  # f32[8, 2, 3]",
        "sum = aten.sum.dim_IntList(reshape, [2], False)  # f32[8, 2]",
        "div = aten.div.Tensor(sum, 3)  # f32[8, 2]",
        "sum_1 = aten.sum.default(div)  # f32[]",
    ]


def test_what_a_module_computes_twice_of_the_same_values_is_computed_once() -> None:
    text = function(
        [X],
        [
            "abs = aten.abs.default(x)  # f32[8, 4]",
            "sub = aten.sub.Tensor(x, abs)  # f32[8, 4]",
            "pow = aten.pow.Tensor_Scalar(sub, 2)  # f32[8, 4]",
            "sub_1 = aten.sub.Tensor(x, abs)  # f32[8, 4]",
            "mul = aten.mul.Tensor(sub_1, pow)  # f32[8, 4]",
            "sub_2 = aten.sub.Tensor(x, abs)  # f32[8, 4] | net.norm net.py:4",
            "drop = aten.dropout.default(sub_2, 0.5, True)  # f32[8, 4]",
            "drop_1 = aten.dropout.default(sub_2, 0.5, True)  # f32[8, 4]",
            "mul_1 = aten.mul.Tensor(mul, drop)  # f32[8, 4]",
            "mul_2 = aten.mul.Tensor(mul_1, drop_1)  # f32[8, 4]",
            "sum = aten.sum.default(mul_2)  # f32[]",
        ],
    )
    lines = [row.partition("  #")[0] for row in rows(text_of(canonicalize(graph_of(text))))]
    assert [line for line in lines if "aten.sub" in line or "aten.mul" in line][:3] == [
        "sub = aten.sub.Tensor(x, abs)",
        "mul = aten.mul.Tensor(sub, pow)",
        "sub_1 = aten.sub.Tensor(x, abs)",  # of another module, perhaps of another stage
    ]
    assert len([line for line in lines if "aten.dropout" in line]) == 2


def test_calls_that_are_equal_at_these_sizes_alone_stay_apart() -> None:
    text = function(
        [X],
        [
            "div = aten.div.Tensor(x, 8)  # f32[8, 4]",
            "div_1 = aten.div.Tensor(x, 8)  # f32[8, 4]",
            "mul = aten.mul.Tensor(div, div_1)  # f32[8, 4]",
            "sum = aten.sum.default(mul)  # f32[]",
        ],
    )
    assert "mul = aten.mul.Tensor(div, div_1)  # f32[8, 4]" in rows(text_of(canonicalize(graph_of(text))))


def test_slices_that_make_up_a_dim_become_one_split() -> None:
    text = function(
        [X],
        [
            "slice = aten.slice.Tensor(x, 1, 0, 2)  # f32[8, 2]",
            "slice_1 = aten.slice.Tensor(x, 1, 2, 4)  # f32[8, 2]",
            "mul = aten.mul.Tensor(slice, slice_1)  # f32[8, 2]",
            "sum = aten.sum.default(mul)  # f32[]",
        ],
    )
    first, *_ = rows(text_of(canonicalize(graph_of(text))))
    split = "aten.split_with_sizes.default(x, [2, 2], 1)"
    assert first == f"split_with_sizes, split_with_sizes_1 = {split}  # f32[8, 2]; f32[8, 2]"


def test_a_mask_of_later_positions_becomes_causal_attention() -> None:
    text = function(
        ['q: "f32[2, 3, 4, 8]",  # input q'],
        [
            "iota = aten.arange.default(4, device='cpu')  # i64[4]",
            "unsqueeze = aten.unsqueeze.default(iota, 1)  # i64[4, 1]",
            "ge = aten.ge.Tensor(unsqueeze, iota)  # bool[4, 4]",
            "attention = aten.scaled_dot_product_attention.default(q, q, q, ge)  # f32[2, 3, 4, 8]",
            "sum = aten.sum.default(attention)  # f32[]",
        ],
    )
    graph = canonicalize(graph_of(text))
    assert "iota = parc.iota.default(4, 0, 1, torch.int64)  # i64[4]" in rows(text_of(graph))
    fold_constants(graph)
    call = "parc.attention.default(q, q, q, None, None, True, None, 0.0)"
    assert rows(text_of(graph)) == [
        f"attention, attention_1 = {call}  # f32[2, 3, 4, 8]; f32[2, 3, 4]",
        "sum = aten.sum.default(attention)  # f32[]",
    ]


def test_an_operator_without_a_rule_is_written_as_its_parts() -> None:
    text = function(
        ['x: "f32[2, 4, 6]",  # input x'],
        ["pool = aten.avg_pool1d.default(x, [2])  # f32[2, 4, 3]", "sum = aten.sum.default(pool)  # f32[]"],
    )
    graph = graph_of(text)
    expand_unruled(graph)
    assert rows(text_of(graph)) == [
        "unsqueeze = aten.unsqueeze.default(x, -2)  # f32[2, 4, 1, 6]",
        "avg_pool2d = aten.avg_pool2d.default(unsqueeze, [1, 2], [1, 2])  # f32[2, 4, 1, 3]",
        "squeeze = aten.squeeze.dim(avg_pool2d, -2)  # f32[2, 4, 3]",
        "sum = aten.sum.default(squeeze)  # f32[]",
    ]


def test_the_count_of_targets_leaves_the_loss() -> None:
    text = function(
        ['x: "f32[8, 6]",  # input x', 'y: "i64[8]",  # input y'],
        [
            "mean = aten.cross_entropy_loss.default(x, y)  # f32[]",
            "mul = aten.mul.Tensor(mean, 2.0)  # f32[]",
        ],
        loss="mul",
    )
    graph = canonicalize(graph_of(text))
    count, *_ = split_loss(graph, 1, lambda terms: [term.division for term in terms])
    assert rows(text_of(graph)) == [
        "token_loss = parc.token_loss.default(x, y, -100)  # f32[8]",
        "sum = aten.sum.default(token_loss)  # f32[]",
        "mul = aten.mul.Tensor(sum, 2.0)  # f32[]",
    ]
    assert count is not None and rows(text_of(count)) == [
        "ne = aten.ne.Scalar(y, -100)  # bool[8]",
        "sum = aten.sum.default(ne)  # i64[]",
    ]


def test_no_gradient_comes_back_from_the_new_value_of_a_buffer() -> None:
    text = function(
        [X, UP, 'm: "f32[6]",  # buffer m'],
        [
            "linear = aten.linear.default(x, up_w)  # f32[8, 6]",
            "sum = aten.sum.dim_IntList(linear, [0])  # f32[6]",
            "add = aten.add.Tensor(m, sum)  # f32[6]",
            "sum_1 = aten.sum.default(linear)  # f32[]",
        ],
        loss="sum_1",
        buffer_m="add",
    )
    graph = graph_of(text)
    stop_gradients(graph)
    assert rows(text_of(graph)) == [
        "linear = aten.linear.default(x, up_w)  # f32[8, 6]",
        "detach = aten.detach.default(linear)  # f32[8, 6]",
        "sum = aten.sum.dim_IntList(detach, [0])  # f32[6]",
        "add = aten.add.Tensor(m, sum)  # f32[6]",
        "sum_1 = aten.sum.default(linear)  # f32[]",
    ]


def test_products_take_the_narrow_type_and_a_softmax_the_wide_one() -> None:
    graph = graph_of(NET)
    narrow(graph, (PrecisionLine(torch.bfloat16, ("",), 7),))
    assert rows(text_of(graph)) == [
        "to_copy = aten._to_copy.default(x, dtype=torch.bfloat16)  # bf16[8, 4]",
        "to_copy_1 = aten._to_copy.default(up_w, dtype=torch.bfloat16)  # bf16[6, 4]",
        "linear = aten.linear.default(to_copy, to_copy_1)  # bf16[8, 6]",
        "to_copy_2 = aten._to_copy.default(linear, dtype=torch.float32)  # f32[8, 6]",
        "softmax = aten.softmax.int(to_copy_2, -1)  # f32[8, 6]",
        "to_copy_3 = aten._to_copy.default(softmax, dtype=torch.bfloat16)  # bf16[8, 6]",
        "to_copy_4 = aten._to_copy.default(down_w, dtype=torch.bfloat16)  # bf16[4, 6]",
        "linear_1 = aten.linear.default(to_copy_3, to_copy_4)  # bf16[8, 4]",
        "relu = aten.relu.default(linear_1)  # bf16[8, 4]",
        "to_copy_5 = aten._to_copy.default(relu, dtype=torch.float32)  # f32[8, 4]",
        "sum = aten.sum.default(to_copy_5)  # f32[]",
    ]


def test_a_padded_dim_is_cut_where_an_operator_sees_it_whole() -> None:
    graph = graph_of(NET)
    pad(graph, {Binding("parameter", "up.w"): (Pad(0, 1, 6, 8),)})
    assert rows(text_of(graph))[:4] == [
        "linear = aten.linear.default(x, up_w)  # f32[8, 8]",
        "cut_pad = parc.cut_pad.default(linear, 1, 1, 6, 8)  # f32[8, 6]",
        "softmax = aten.softmax.int(cut_pad, -1)  # f32[8, 6]",
        "linear_1 = aten.linear.default(softmax, down_w)  # f32[8, 4]",
    ]


def test_a_split_contraction_is_summed_before_its_bias_is_added() -> None:
    mesh = Mesh.parse("tp=2")
    split = [(Binding("parameter", "up.w"), "tp", 0), (Binding("parameter", "down.w"), "tp", 1)]
    assert rows(typed_text(placed(BIASED, mesh, split), mesh)) == [
        "linear_default = aten.linear.default(x, up_w)  # f32[8, 6/tp]",
        "add_tensor = aten.add.Tensor(linear_default, up_b)  # f32[8, 6/tp]",
        "relu_default = aten.relu.default(add_tensor)  # f32[8, 6/tp]",
        "linear_default_1 = aten.linear.default(relu_default, down_w)  # f32[8, 4] +tp",
        "convert_default = parc.convert.default(linear_default_1, 'tp', 'P', 'I')  # f32[8, 4]",
        "add_tensor_1 = aten.add.Tensor(convert_default, down_b)  # f32[8, 4]",
        "sum_default = aten.sum.default(add_tensor_1)  # f32[]",
    ]


def test_parameters_that_all_readers_mark_enter_as_replicated_and_biases_join_their_products_again() -> None:
    mesh = Mesh.parse("dp=2")
    graph = placed(BIASED, mesh, [(Binding("input", "x"), "dp", 0)])
    mark = "convert_default = parc.convert.default(up_w, 'dp', 'I', 'R')  # f32[6, 4]"
    assert rows(typed_text(graph, mesh))[0] == mark
    lift_parameters(graph)
    fuse_bias(graph)
    graph.eliminate_dead_code()
    assert rows(typed_text(graph, mesh)) == [
        "add_tensor = aten.linear.default(x, up_w, up_b)  # f32[8/dp, 6]",
        "relu_default = aten.relu.default(add_tensor)  # f32[8/dp, 6]",
        "add_tensor_1 = aten.linear.default(relu_default, down_w, down_b)  # f32[8/dp, 4]",
        "sum_default = aten.sum.default(add_tensor_1)  # f32[] +dp",
    ]


def test_the_loss_of_a_split_vocabulary_is_a_maximum_and_two_sums_in_one_message() -> None:
    mesh = Mesh.parse("tp=2")
    text = function(
        [X, 'y: "i64[8]",  # input y', UP],
        [
            "linear = aten.linear.default(x, up_w)  # f32[8, 6]",
            "token_loss = parc.token_loss.default(linear, y, -100)  # f32[8]",
            "sum = aten.sum.default(token_loss)  # f32[]",
        ],
    )
    assert rows(typed_text(placed(text, mesh, [(Binding("parameter", "up.w"), "tp", 0)]), mesh)) == [
        "linear_default = aten.linear.default(x, up_w)  # f32[8, 6/tp]",
        "row_max_default = parc.row_max.default(linear_default, 'tp')  # f32[8, 1]",
        "loss_parts_default = parc.loss_parts.default(linear_default, row_max_default, y)  # f32[2, 8] +tp",
        "convert_default = parc.convert.default(loss_parts_default, 'tp', 'P', 'I')  # f32[2, 8]",
        "select_int = aten.select.int(convert_default, 0, 0)  # f32[8]",
        "select_int_1 = aten.select.int(convert_default, 0, 1)  # f32[8]",
        "log_default = aten.log.default(select_int)  # f32[8]",
        "sub_tensor = aten.sub.Tensor(log_default, select_int_1)  # f32[8]",
        "ne_scalar = aten.ne.Scalar(y, -100)  # bool[8]",
        "mul_tensor = aten.mul.Tensor(sub_tensor, ne_scalar)  # f32[8]",
        "sum_default = aten.sum.default(mul_tensor)  # f32[]",
    ]
