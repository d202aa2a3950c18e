"""Buffers that a model's forward assigns: a trace sees what is written in place, and only that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from ..ops.own_ops import aten
from ..ops.rules import facts
from .faults import CaptureError
from .node_facts import copy_place


@contextmanager
def assigned_in_place(model: nn.Module) -> Iterator[None]:
    """Enter a block in which a buffer that the model's code assigns (``self.mean = ...``) is written in place: a trace
    sees only writes.

    Raises:
        CaptureError: what is assigned is no tensor of the buffer's shape and dtype. One without elements, which nothing
            can be read of, may become anything.
    """
    buffers = [(path, module, name, value) for path, module in model.named_modules()
             for name, value in module.named_buffers(recurse=False) if value.numel()]  # fmt: skip
    yield
    assigned: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
    for path, module, name, value in buffers:
        assigned_value: Any = getattr(module, name, None)
        if assigned_value is not value:
            now, then = (_name_type(tensor) for tensor in (assigned_value, value))
            if now != then:
                called = f"{path}.{name}" if path else name
                help_ = "register it with that shape and type, or keep it as a plain attribute"
                raise CaptureError("other", f"the buffer `{called}` becomes {now}, not {then}", help=help_)
            assigned.append(
                (module, name, value, assigned_value.detach().clone())
            )  # it may be another buffer, assigned too
    for module, name, value, assigned_value in assigned:
        setattr(module, name, value.copy_(assigned_value))


def beside_makers(updates: Mapping[str, fx.Node], buffers: Mapping[str, fx.Node], graph: fx.Graph) -> None:
    """Move the nodes that write new values of buffers from the graph's end to where each value is made. If the value is
    a placeholder, they move behind the readers of the buffer."""
    tails: dict[str, list[fx.Node]] = {}
    makers = dict(updates)
    for name in updates:
        tails[name] = []
        while _copies(makers[name]) and len(makers[name].users) < 2:
            node = makers[name]
            tails[name].append(node)
            makers[name] = node.args[-1 if node.target is aten.copy.default else 0]  # type: ignore[assignment]
    moved = {node for tail in tails.values() for node in tail}
    order = {node: index for index, node in enumerate(graph.nodes)}
    for name, tail in tails.items():
        last = makers[name]
        if last.op == "placeholder":
            readers = {*(buffers[name].users if name in buffers else ()), *last.users} - moved
            last = max(readers, key=order.__getitem__, default=graph.find_nodes(op="placeholder")[-1])
        for node in reversed(tail):
            last.append(node)
            copy_place(last, node)
            last = node


def _copies(node: fx.Node) -> bool:
    return node.target is aten.copy.default or facts(node.target).moves == "copy"


def _name_type(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
