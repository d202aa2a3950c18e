"""Reads by strides, beside torch's own read of the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from parc.compiler.capture.faults import CaptureError
from parc.compiler.capture.node_facts import noted
from parc.compiler.ops.own_ops import aten
from parc.passes.canonical.decompose import expand_unruled

_DIMS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from((0, 1, 2, 3, 4, 6, 8, 12, 16, 24))), max_size=4)


def expanded(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> fx.GraphModule:
    """Return the parts of a read of a tensor."""
    graph, mode = fx.Graph(), FakeTensorMode()
    source = graph.placeholder("x")
    noted(source).value = mode.from_tensor(x)
    read = graph.call_function(aten.as_strided.default, (source, [*size], [*stride], start))
    with mode:
        noted(read).value = torch.empty(size, dtype=x.dtype)
    graph.output(read)
    expand_unruled(graph)
    return fx.GraphModule({}, graph)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Draw a view of some memory: dims in any order, some of them cut or with steps."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        x = x[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 2))),)] if draw(st.booleans()) else x
    return x.permute(draw(st.permutations(range(len(shape)))))


@given(views(), _DIMS, st.integers(0, 5))
def test_a_read_is_that_of_the_memory_wherever_its_entries_lie(x: Tensor, dims: list[tuple[int, int]], by: int) -> None:
    size, stride = [one for one, _ in dims], [one for _, one in dims]
    start = x.storage_offset() + by
    memory = x.untyped_storage().nbytes() // x.element_size()
    assume(start + sum((one - 1) * step for one, step in dims) < memory)
    read = x.as_strided(size, stride, start)
    outside = not set(read.flatten().tolist()) <= set(x.flatten().tolist())
    try:
        parts = expanded(x, size, stride, int(start))
    except CaptureError:
        assert outside or x.stride() != x.contiguous().stride()
        return
    assert not outside
    assert not parts.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert torch.equal(parts(x), read)


def test_windows_of_a_transposed_view_are_read_without_positions() -> None:
    x = torch.arange(64.0).reshape(8, 2, 4).transpose(0, 1)
    parts = expanded(x, (3, 4, 2, 4), (16, 8, 4, 1), 0)
    names = {str(node.target) for node in parts.graph.nodes if node.op == "call_function"}
    assert "aten.unfold.default" in names and not names & {"aten.index_select.default", "aten.index.Tensor"}
    assert torch.equal(parts(x), x.as_strided((3, 4, 2, 4), (16, 8, 4, 1)))


def test_memory_that_holds_other_values_is_refused() -> None:
    with pytest.raises(CaptureError, match="holds no entry of the tensor"):
        expanded(torch.arange(8.0)[:4], (6,), (1,), 0)
