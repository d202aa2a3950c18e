"""Runs of single lines in torch, on tensors without numbers: a mode sees the operators that a composed one is made of,
and those of its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..ops.factors import fill_operands
from ..ops.precision import base_name
from ..program.program import operator
from ..torch_private import quiet
from .dataflow import Question, line_call

Watching = TypeVar("Watching", bound=TorchDispatchMode)


def run_line(
    question: Question, watch: Callable[[Sequence[Tensor]], Watching], *, derivative: bool, wide: bool = False
) -> Watching:  # fmt: skip
    """Run a line in a mode that ``watch`` returns for its operands, and torch's ``derivative`` of it. Return the mode.
    Operands that are ``wide`` are in float64: composed operators may round their numbers to the type of operands.

    Of ``aten.softmax.int(x, -1)`` with its derivative the mode sees ``_softmax`` and ``_softmax_backward_data``.
    """
    with quiet():
        try:
            return _run_on("meta", nullcontext(), question, watch, derivative, wide)
        except NotImplementedError:  # there is no kernel
            return _run_on("cpu", FakeTensorMode(), question, watch, derivative, wide)


def _run_on(
    device: str, mode: Any, question: Question, watch: Callable[[Sequence[Tensor]], Watching], derivative: bool,
    wide: bool,
) -> Watching:  # fmt: skip
    call = line_call(question.line, question.operands, question.results, lambda item: item.size)
    target = operator(call.op)
    with mode:
        types = [(type_.shape, _widened(type_.dtype) if wide else type_.dtype) for type_ in question.operands]
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in types]
        args, kwargs = fill_operands((call.args, dict(call.kwargs)), tensors)
        if any(argument.name == "device" for argument in target._schema.arguments):
            kwargs["device"] = torch.device(device)
        watcher = watch(tensors)
        with watcher:
            floating = [tensor for tensor in tensors if derivative and tensor.is_floating_point()]
            returned = _differentiated(lambda: target(*args, **kwargs), floating)
            floating = [tensor for tensor in floating if tensor.requires_grad]
            results = [x for x in tree_leaves(returned) if isinstance(x, Tensor) and x.requires_grad]
            for chosen in filter(None, (results, results[:1] if len(results) > 1 else ())):
                ones = [torch.empty_like(x) for x in chosen]
                torch.autograd.grad(chosen, floating, ones, retain_graph=True, allow_unused=True)
    return watcher


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _differentiated(call: Callable[[], Any], tensors: Sequence[Tensor]) -> Any:
    """Return the result of a call that reads ``tensors``, with gradients for all of them that it has a derivative by:
    torch refuses others, such as the weights of classes."""
    try:
        for tensor in tensors:
            tensor.requires_grad_()
        return call()
    except RuntimeError:
        for tensor in tensors:
            tensor.requires_grad_(False)
    for tensor in tensors:
        try:
            tensor.requires_grad_()
            call()
        except RuntimeError:
            tensor.requires_grad_(False)
    return call()


@lru_cache(maxsize=1024)
def operators_of(question: Question) -> frozenset[str]:
    """Return the names of the operators that a line is made of, and of those of its derivative: ``_softmax`` and
    ``_softmax_backward_data`` of ``aten.softmax.int``."""
    return frozenset(run_line(question, lambda _: _Names(), derivative=True).names)


class _Names(TorchDispatchMode):
    """A mode that notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(base_name(str(func)))
        return func(*args, **(kwargs or {}))
