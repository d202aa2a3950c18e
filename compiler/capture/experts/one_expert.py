"""One expert's code, run on the packed rows of all experts: each row meets the weight of its expert."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import nn

from ...ops.own_ops import OPS
from ...ops.rules import facts
from ..faults import CaptureError
from .lists import stacks_of


class Through(Protocol):
    """The layout of the experts' rows; each of its functions takes a weight [experts, ...]."""

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        """Return each row times its expert's weight, which is [out, in], or [in, out] where it is ``transposed``."""
        ...

    def are_rows(self, value: object) -> bool:
        """Return whether a value is rows of these experts."""
        ...

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return each row's part of a weight [experts, width]."""
        ...


@final
class ThroughSlots:
    """Rows in slots, [experts, slots, width]: every expert has as many."""

    def __init__(self, experts: int) -> None:
        self._experts = experts

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        return torch.bmm(rows, weight if transposed else weight.mT)

    def are_rows(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[0] == self._experts

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[:, None]


@final
class ThroughPacked:
    """Packed rows, of each expert as many as tokens chose it."""

    def __init__(self, chosen: torch.Tensor, top: int) -> None:
        self._chosen, self._top = chosen, top

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        product: torch.Tensor = OPS.expert_linear(rows, self._chosen, weight, transposed, self._top)
        return product

    def are_rows(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[0] == self._chosen.numel()

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = OPS.spread(weight, self._chosen, self._top)
        return parts


@final
class Stack:
    """A tensor of one expert as that expert's code sees it, which stands for ``whole``, [experts, ...]: each row meets
    the part of its expert. Only the functions in ``_READERS`` and pointwise ones may read it.

    Raises:
        CaptureError: another function reads it.
    """

    def __init__(self, whole: torch.Tensor, through: Through, turned: bool = False) -> None:
        self.whole, self.through, self.turned = whole, through, turned
        self.dtype, self.device = whole.dtype, whole.device

    @property
    def shape(self) -> torch.Size:
        """The shape of one expert's tensor."""
        sizes = self.whole.shape[1:]
        return torch.Size(reversed(sizes)) if self.turned else sizes

    def t(self) -> Stack:
        """Return the transpose."""
        return Stack(self.whole, self.through, len(self.shape) == 2 and not self.turned)

    T = mT = property(t)

    def to(self, *to: Any, **options: Any) -> Stack:
        """Return it in another dtype."""
        return Stack(self.whole.to(*to, **options), self.through, self.turned)

    def float(self) -> Stack:
        """Return it in float32."""
        return self.to(torch.float32)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unread(f"`.{name}`")

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return each row's part of a stacked number or vector."""
        if len(self.shape) > 1 or not self.through.are_rows(rows):
            raise _unread("arithmetic")
        return self.through.rows(self.whole.unsqueeze(-1) if not self.shape else self.whole)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        writes = name.endswith("_") and not name.startswith("_") and isinstance(args[0], Stack)
        pointwise = facts(f"aten.{name.strip('_')}.Tensor").elementwise and not writes
        reader = _READERS.get(func, _read_pointwise if pointwise else None)
        if reader is None:
            raise _unread(f"`{name}`")
        return reader(func, *args, **(kwargs or {}))


def _unread(what: str) -> CaptureError:
    what = f"{what} reads a weight of one expert, which is not possible on packed rows"
    help_ = "write experts with linear layers, matrix products, norms of rows, and sums and products of vectors"
    return CaptureError("experts", what, help=help_)


def _read_in_product(func: Any, rows: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    """Multiply rows with a weight that is [in, out]."""
    return _read_in_linear(func, rows, weight.t() if isinstance(weight, Stack) else weight, bias)


def _read_in_linear(func: Any, input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    """Multiply rows with a weight that is [out, in], and add a bias."""
    if not isinstance(weight, Stack):  # all experts have one weight
        product = F.linear(input, weight)
    elif isinstance(input, Stack) or len(weight.shape) != 2 or not weight.through.are_rows(input):
        raise _unread(f"`{func.__name__}`")
    else:
        product = weight.through.linear(input, weight.whole, weight.turned)
    return product if bias is None else product + bias


def _read_pointwise(func: Any, *operands: Any, **options: Any) -> Any:
    """Compute with each row's part; without rows, with the stacks as they are."""
    rows = next((value for value in operands if isinstance(value, torch.Tensor)), None)
    stacks = [value for value in operands if isinstance(value, Stack)]
    if rows is None:
        if len({(stack.shape, stack.turned) for stack in stacks}) > 1:
            raise _unread(f"`{func.__name__}`")
        whole = func(*(value.whole if isinstance(value, Stack) else value for value in operands), **options)
        return Stack(whole, stacks[0].through, stacks[0].turned)
    return func(*(value.of(rows) if isinstance(value, Stack) else value for value in operands), **options)


def _read_in_norm(func: Any, input: Any, shape: Any, weight: Any = None, bias: Any = None, eps: Any = None) -> Any:
    """Norm rows, and then multiply and add."""
    normed = func(input, shape) if eps is None else func(input, shape, eps=eps)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def _operator(name: str, swapped: bool) -> Callable[[Stack, Any], Any]:
    """Return the method of a Python operator."""
    compute = getattr(operator, name)
    return lambda stack, other: _read_pointwise(compute, *((other, stack) if swapped else (stack, other)))


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Stack, f"__{_name}__", _operator(_name, swapped=False))
    setattr(Stack, f"__r{_name}__", _operator(_name, swapped=True))

_Tensor: Any = torch.Tensor
_READERS: dict[Any, Callable[..., Any]] = {
    F.linear: _read_in_linear,
    **dict.fromkeys((torch.matmul, _Tensor.matmul, torch.mm, _Tensor.mm, _Tensor.__matmul__), _read_in_product),
    torch.addmm: lambda func, bias, rows, weight: _read_in_product(func, rows, weight, bias),
    F.layer_norm: _read_in_norm,
    F.rms_norm: _read_in_norm,
}
"""The functions that may read the weight of one expert, each in its form on all rows."""


Compute = Callable[[torch.Tensor, Through], torch.Tensor]
"""The computation of all experts: from their input rows, in some layout, to their output rows."""


def expert_of(
    experts: nn.ModuleList | Callable[..., torch.Tensor], stacks: Sequence[torch.Tensor]
) -> tuple[Compute, int]:
    """Return the code of one expert as a function of the rows of all, and the number of experts.

    Raises:
        CaptureError: the experts are a list whose weights are not stacked.
    """
    if not isinstance(experts, nn.ModuleList):
        return lambda rows, through: experts(rows, *(Stack(whole, through) for whole in stacks)), len(stacks[0])
    stacked = stacks_of(experts)
    if stacked is None:
        what = "`parc.routed` is given a list of experts whose weights are not stacked"
        help_ = 'name the list\'s attribute: `@parc.register_experts(Layer, "experts")`'
        raise CaptureError("experts", what, help=help_)
    first, *_ = stacked.experts

    def compute(rows: torch.Tensor, through: Through) -> torch.Tensor:
        with stacked.filled(first, lambda stack: Stack(stack, through)), ExitStack() as within:
            for path, _ in list(first.named_buffers()):
                owner, _, name = path.rpartition(".")
                buffers = [expert.get_buffer(path) for expert in stacked.experts]
                module = first.get_submodule(owner)
                within.callback(module._buffers.__setitem__, name, buffers[0])
                module._buffers[name] = Stack(torch.stack(buffers), through)  # type: ignore[assignment]
            outputs: torch.Tensor = first(rows)
            return outputs

    return compute, len(stacked.experts)
