"""The private entry points of torch that parc uses, in one place; tested on torch 2.11 and 2.13."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot, make_fx


def trace(function: Callable[..., Any], values: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.Graph:
    """The ATen graph, forward and backward, of a function on fake tensors."""
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*values).graph


def tracing_graph() -> fx.Graph:
    """The graph that is being traced."""
    mode = get_innermost_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


def proxy_node(value: torch.Tensor) -> fx.Node | None:
    """The node of the graph that is being traced which made a value."""
    mode = get_innermost_proxy_mode()
    assert mode is not None
    slot: Any = get_proxy_slot(value, mode.tracer, None)
    return None if slot is None else slot.proxy.node
