"""The recorder's graph of a function and its gradients is the one that torch's own tracer makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from parc.compiler.capture.node_facts import noted
from parc.compiler.ops.results import example, results_of
from parc.compiler.torch_private import quiet, trace
from parc.passes.programs.joint import GraphRecorder

aten = torch.ops.aten


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.gelu(x @ w).softmax(-1) @ v + x.sum((0, 2), keepdim=True)


def pictures(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    made = F.conv2d(x.unsqueeze(0), w.reshape(4, 2, 2, 2), padding=1)
    return F.max_pool2d(torch.cat([made, made.relu()], 1), 2).std() + v.mean()


def pieces(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    first, last = x.split([1, 3], -1)
    top, places = last.topk(2, -1)
    made = torch.cat([first, top.clone().transpose_(1, 2).mul_(2).transpose(1, 2)], -1)
    return made.masked_fill(made > 0, 1.0).cumsum(1) * x[..., :3].index_select(1, torch.ones_like(places[0, 0]))[:, :1]


def norms(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.layer_norm(x, (4,), w[:, 0], w[:, 1]) * F.group_norm(x, 3) + F.rms_norm(x, (4,)) + torch.full((4,), 0.5)


def traced(function: Callable[..., Tensor], *operands: Tensor) -> tuple[Any, ...]:
    leaves = [x.detach().requires_grad_() for x in operands]
    made = function(*leaves)
    return made, *torch.autograd.grad(made, leaves, torch.ones_like(made), allow_unused=True)


def words(graph: torch.fx.Graph) -> list[tuple[str, str, str, str]]:
    graph.eliminate_dead_code()
    order = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    found = []
    for node in graph.nodes:
        args = torch.fx.node.map_arg((node.args, dict(node.kwargs)), order.__getitem__)
        values = noted(node).value
        values = values if isinstance(values, (tuple, list)) else [values]
        shapes = [None if x is None else (x.dtype, tuple(x.shape), x.stride()) for x in values]
        target = (
            "" if node.op == "placeholder" else str(node.target).replace("alias", "detach")
        )  # torch 2.15 says alias
        found.append((node.op, target, str(args), str(shapes)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [mlp, pictures, pieces, norms])
def test_a_function_and_its_gradients_are_recorded_as_torch_traces_them(
    function: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    shapes = (2, 3, 4), (4, 8), (8, 4)
    with quiet(), torch.backends.mkldnn.flags(enabled=False), GraphRecorder() as recorder:
        recorded = recorder.finish(traced(function, *(recorder.placeholder(dtype, shape) for shape in shapes)))
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(shape, dtype=dtype) for shape in shapes]
    again = trace(lambda *given: traced(function, *given), fakes, mode)
    assert len(words(recorded)) > 15
    assert words(recorded) == words(again)


def test_results_of_the_same_layouts_are_remembered_and_others_are_not() -> None:
    x = example(torch.float32, (2, 3))
    turned = results_of(aten.t.default, (x,), {}).values
    assert (turned.shape, turned.stride()) == ((3, 2), (1, 3))
    assert results_of(aten.add.Tensor, (turned, 1), {}) is results_of(aten.add.Tensor, (turned, 1), {})
    assert results_of(aten.add.Tensor, (turned, 1), {}) is not results_of(aten.add.Tensor, (turned, True), {})
    assert results_of(aten.add.Tensor, (turned, 1), {}).values.stride() == (1, 3)
    assert results_of(aten.mul_.Tensor, (x, 2), {}).in_place
    with pytest.raises(RuntimeError, match="broadcast"):
        results_of(aten.add.Tensor, (x, turned), {})


def test_results_follow_the_default_dtype_that_a_models_code_may_set() -> None:
    counts = example(torch.int64, (2, 3))
    before = torch.get_default_dtype()
    try:
        found = []
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found.append(results_of(aten.div.Tensor, (counts, 3), {}).values.dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float64, torch.float32]


def test_what_writes_into_a_view_is_kept_though_nobody_reads_it_there() -> None:
    with GraphRecorder() as recorder:
        x = recorder.placeholder(torch.float32, (2, 3))
        y = x.clone()
        y[0].mul_(2)
        graph = recorder.finish([y.sum()])
    assert "aten.mul_.Tensor" in [str(node.target) for node in graph.nodes]
