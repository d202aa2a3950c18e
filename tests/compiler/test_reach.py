"""The flow of gradients in a graph, and the values that are made without a parameter."""

from __future__ import annotations

import torch
from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.capture.reach import FIXED, GradientFlow, computed_anywhere, made_of, reached_by_gradient
from parc.compiler.layout.placement import Placement, TensorType
from parc.compiler.ops.own_ops import aten
from parc.compiler.program.binding import Binding

BOUND = {
    "x": Binding("input", "x"), "w": Binding("parameter", "w"), "f": Binding("frozen", "f"),
    "mean": Binding("buffer", "mean"), "table": Binding("buffer", "table"),
}  # fmt: skip


def graph() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """``loss = sum(x * w + f)``, beside a mask, a detached copy, and the new value of a buffer."""
    made, nodes = fx.Graph(), dict[str, fx.Node]()
    for name, binding in BOUND.items():
        nodes[name] = made.placeholder(name)
        noted(nodes[name]).binding, noted(nodes[name]).value = binding, torch.empty(2)
    rows = {
        "twice": (aten.add.Tensor, ("table", "table")), "shifted": (aten.add.Tensor, ("x", "table")),
        "mask": (aten.gt.Tensor, ("w", "twice")), "product": (aten.mul.Tensor, ("x", "w")),
        "sum": (aten.add.Tensor, ("product", "f")), "loss": (aten.sum.default, ("sum",)),
        "apart": (aten.detach.default, ("product",)), "new": (aten.add.Tensor, ("mean", "apart")),
    }  # fmt: skip
    for name, (target, operands) in rows.items():
        nodes[name] = made.call_function(target, tuple(nodes[operand] for operand in operands))
        noted(nodes[name]).value = torch.empty(2, dtype=torch.bool if name == "mask" else torch.float32)
    made.output((nodes["loss"], nodes["new"]))
    return made, nodes


def names(nodes: dict[str, fx.Node], found: GradientFlow | set[fx.Node]) -> set[str]:
    return {name for name, node in nodes.items() if node in found}


def test_gradients_flow_to_parameters_that_are_trained_and_not_past_a_detach() -> None:
    made, nodes = graph()
    assert names(nodes, GradientFlow()) == {"w", "product", "sum", "loss"}
    assert made.output_node() not in GradientFlow()


def test_a_gradient_of_the_loss_reaches_all_that_it_is_made_of() -> None:
    _, nodes = graph()
    assert names(nodes, reached_by_gradient(nodes["loss"])) == {"x", "w", "f", "product", "sum", "loss"}
    assert names(nodes, reached_by_gradient(nodes["new"])) == {"mean", "new"}


def test_what_no_parameter_reaches_is_made_of_the_rest() -> None:
    made, nodes = graph()
    assert names(nodes, made_of(made, FIXED)) == {"mean", "table", "twice"}
    assert names(nodes, computed_anywhere(made, ["mean"])) == {"twice", "shifted"}


def test_the_flow_is_the_same_on_the_types_of_a_graph_without_values() -> None:
    _, nodes = graph()
    for node in nodes.values():
        noted(node).types = [TensorType(noted(node).value.dtype, (2,), Placement(()))]
        noted(node).value = None
    assert names(nodes, GradientFlow()) == {"w", "product", "sum", "loss"}
