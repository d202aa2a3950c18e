"""Recipes of initial values of parameters and buffers: recorded once without allocating, computed for any elements."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from ..capture.attributes import attribute_tensors
from ..capture.complex.form import own_form
from ..capture.experts.forms import stack_lists
from ..torch_private import loads_with_numbers, shape_environment
from .nodes import Draw, Read, Replay, Result, in_reals, reachable
from .recorder import (
    RecipeError,
    RecipeRecorder,
    arrays_and_buffers,
    deep_copies_by_operators,
    dense_for_sparse,
    truncated_normals_by,
)

__all__ = ["Recipe", "RecipeError", "Recorded", "initialize", "record"]

_PART = 1 << 22  # elements whose indices are held at once
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recipe of the initial value of one parameter or buffer, of global shape ``shape``. It is computed on the device
    that wants it if every device computes the same bits, else on a CPU. A complex value has its ``real_form``.

    Element i depends on the seed, the parameter's name and i alone, never on which other elements are asked for.
    """

    name: str  # the first of its names, if it is tied
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    elementwise: bool  # False: some operator in it (a factorisation, a sort) is computed whole, then cut
    read: Read

    def elements(self, index: Tensor, device: torch.device = _CPU) -> Tensor:
        """Return the elements at flat global indices (int64, any shape), in the shape of ``index``, on a device."""
        with unset_fake_temporarily(), torch.no_grad():
            flat = Replay(self.seed).elements(self.read, index.reshape(-1).to("cpu"), self._computed_on(device))
            return flat.reshape(index.shape).to(device)

    def whole(self, device: torch.device = _CPU) -> Tensor:
        """Return all elements, as a contiguous tensor on a device, without holding the indices of all at once."""
        with unset_fake_temporarily(), torch.no_grad():
            replay, flat = Replay(self.seed), torch.empty(math.prod(self.shape), dtype=self.dtype, device=device)
            computed_on = self._computed_on(device)
            for start in range(0, len(flat), _PART):
                part = flat[start : start + _PART]
                part.copy_(replay.elements(self.read, torch.arange(start, start + len(part), device=computed_on)))
            return flat.reshape(self.shape)

    @property
    def drawn(self) -> bool:
        """Return whether it reads random numbers."""
        return any(isinstance(node, Draw) for node in reachable(self.read.node))

    def _computed_on(self, device: torch.device) -> torch.device:
        return device if all(node.anywhere for node in reachable(self.read.node)) else _CPU


@dataclass(frozen=True, eq=False)
class Recorded:
    """A module on fake tensors, and the recipe of each parameter and buffer."""

    module: nn.Module
    recipes: dict[str, Recipe]  # of parameters and buffers, by every name; tied ones share one recipe
    mode: FakeTensorMode  # of the module's tensors, for their capture
    files: str  # a hash of the numbers that the building code read from files, "" if it read none


class _SharedMode(FakeTensorMode):
    """A mode of fake tensors that ``copy.deepcopy`` does not copy: the tensors of copied layers must stay in one
    mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensorMode:
        return self


def record(build: Callable[[], nn.Module], seed: int) -> Recorded:
    """Build a module on fake tensors, and record the recipe of each parameter and buffer.

    ``build`` is called once; nothing of the size of a parameter is allocated. torch's random numbers are drawn from
    streams of ``seed`` instead: a stream for each random operator behind a parameter, named by the parameter and
    counted within it, so a change of one layer changes no values of others. Generators passed to torch are ignored.
    Random numbers of other libraries (Python's ``random``, numpy) are kept as they are: they are the same on every rank
    only if ``build`` sees to it. Memory that is never written counts as zeros.

    Raises:
        RecipeError: the code reads memory as another dtype than it was written, or writes overlapping memory.
    """
    mode = _SharedMode(allow_non_fake_inputs=True, shape_env=shape_environment(), static_shapes=True)
    recorder = RecipeRecorder(mode, seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # by copy.deepcopy
        with (
            truncated_normals_by(recorder), deep_copies_by_operators(), dense_for_sparse(),
            arrays_and_buffers(recorder), loads_with_numbers(), mode, recorder,
        ):  # fmt: skip
            module = build()
            stack_lists(module)
    attributes = attribute_tensors(module)
    _make_fake(module, mode, recorder)
    attributes.point()
    known: dict[tuple[int, ...], Recipe] = {}

    def recipe_of(name: str, tensor: Tensor) -> Recipe:
        where = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), *tensor.shape, *tensor.stride())
        if where not in known:
            read = in_reals(recorder.read(tensor))
            nodes = reachable(read.node)
            # draws behind no earlier tensor get streams of this name
            unnamed = (node for node in nodes if isinstance(node, Draw) and not node.stream)
            for ordinal, draw in enumerate(sorted(unnamed, key=lambda draw: draw.order)):
                draw.stream.append(f"init:{name}:{ordinal}")
            elementwise = not any(isinstance(node, Result) for node in nodes)
            known[where] = Recipe(name, read.sizes, read.dtype, seed, elementwise, read)
        return known[where]

    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    recipes = {name: recipe_of(name, tensor) for name, tensor in tensors}
    return Recorded(module, recipes, mode, recorder.hash_of_files())


def initialize(
    build: Callable[[], nn.Module],
    seed: int,
    recipes: Mapping[str, Recipe] | None = None,
    values: Mapping[str, Tensor] = MappingProxyType({}),
) -> nn.Module:
    """Return the plain reference: a real module from ``build`` with exactly the values of the recipes. ``recipes`` are
    those of ``build`` and ``seed``, if they were recorded before; ``values`` are those of some, if they were computed
    before."""
    recipes = record(build, seed).recipes if recipes is None else recipes
    with torch.random.fork_rng(devices=[]):
        module = build()
    stack_lists(module)
    attribute_tensors(module)
    for child in module.modules():  # sparse ones, of which recipes have all entries
        child._buffers.update({name: value.to_dense() for name, value in child._buffers.items()
                               if value is not None and value.layout is not torch.strided})  # fmt: skip
    targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, tensor in targets.items():
            known = values[name] if name in values else recipes[name].whole()
            value = own_form(known, tensor.is_complex())
            # expanded memory cannot be written, and a size may come from a random number
            if (0 in tensor.stride() and tensor.numel() > 1) or tensor.shape != value.shape:
                tensor.data = value.to(tensor.device, copy=True)
            else:
                tensor.copy_(value)
    return module


def _make_fake(module: nn.Module, mode: FakeTensorMode, recorder: RecipeRecorder) -> None:
    """Replace real tensors of the module, such as ``Parameter(torch.from_numpy(…))``, which no operator made."""
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    fake: Any = mode.from_tensor(tensor, static_shapes=True)
                    recorder.adopt(fake, tensor)
                    table[name] = fake
