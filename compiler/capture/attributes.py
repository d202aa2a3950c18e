"""Tensors in plain attributes of modules, alone or in lists, tuples and dicts: they become buffers, which a trace sees.
Beside them the checks of what a forward leaves in attributes and in memory that tensors share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .faults import CaptureError

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has, for what is registered."""
_WITHOUT_TENSORS = (int, float, str, type(None))
"""The types of most other attributes, which hold no tensor."""
_ATTRIBUTE_TENSORS = "_attribute_tensors"


@dataclass(frozen=True, slots=True)
class _Holder:
    """An attribute of ``module`` with tensors among its ``leaves``. ``places``: by the number of a leaf, the module in
    which its tensor is registered, and the name there."""

    module: nn.Module
    attribute: str
    leaves: tuple[Any, ...]
    structure: TreeSpec
    places: Mapping[int, tuple[nn.Module, str]]


@final
class AttributeTensors:
    """The tensors in plain attributes of ``model``'s modules, registered as buffers that no state dict has. A tensor
    gets the name of its attribute; a tensor in a container gets that name and its number there."""

    def __init__(self, model: nn.Module) -> None:
        self.assigned: set[str] = set()
        """The attributes to which a forward assigned another tensor: their first tensor may not be read."""
        self._holders: list[_Holder] = []
        self._by_path: dict[str, tuple[nn.Module, str]] = {}
        """The tensors that were registered under the name of their attribute."""
        registered = {
            id(tensor): (module, name)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        }
        for path, module in model.named_modules():
            for attribute, value in [*vars(module).items()]:
                if attribute in _OF_MODULES or isinstance(value, _WITHOUT_TENSORS):
                    continue
                leaves, structure = tree_flatten(value)
                tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
                for index, tensor in tensors.items():
                    if id(tensor) not in registered:
                        registered[id(tensor)] = module, self._register(module, path, attribute, index, tensor is value)
                if attribute in vars(module) and tensors:
                    places = {index: registered[id(tensor)] for index, tensor in tensors.items()}
                    self._holders.append(_Holder(module, attribute, tuple(leaves), structure, places))

    def _register(self, module: nn.Module, path: str, attribute: str, index: int, alone: bool) -> str:
        value = vars(module)[attribute]
        if alone and not hasattr(type(module), attribute):
            name, tensor = attribute, vars(module).pop(attribute)
            self._by_path[f"{path}.{name}".lstrip(".")] = module, name
        else:
            name, tensor = f"{attribute}_{index}", tree_flatten(value)[0][index]
            while hasattr(module, name):
                name += "_"
        module.register_buffer(name, tensor, persistent=False)
        return name

    def point(self) -> None:
        """Put the tensors that are registered now into their attributes, after a trace or a change of dtype replaced
        them."""
        for holder in self._holders:
            vars(holder.module)[holder.attribute] = tree_unflatten(self._current(holder), holder.structure)

    @contextmanager
    def pointing(self) -> Iterator[None]:
        """Enter a forward. Tensors that it assigns to attributes (a normed weight, a value to look at) are undone.

        Raises:
            CaptureError: it put another tensor into a container.
        """
        self.point()
        before = {path: module._buffers[name] for path, (module, name) in self._by_path.items()}
        yield
        for path, (module, name) in self._by_path.items():
            if module._buffers.get(name) is not before[path]:
                self.assigned.add(path)
                module._buffers[name] = before[path]
        for holder in self._holders:
            leaves, structure = tree_flatten(vars(holder.module).get(holder.attribute))
            current = self._current(holder)
            if structure == holder.structure and any(leaves[index] is not current[index] for index in holder.places):
                raise not_kept(f"{holder.attribute}` of a `{type(holder.module).__name__}")

    @staticmethod
    def _current(holder: _Holder) -> list[Any]:
        current = list(holder.leaves)
        for index, (module, name) in holder.places.items():
            current[index] = getattr(module, name)
        return current


def attribute_tensors(model: nn.Module) -> AttributeTensors:
    """Return the attribute tensors of a model, which are registered at the first call."""
    tensors: AttributeTensors = vars(model).get(_ATTRIBUTE_TENSORS) or AttributeTensors(model)
    vars(model)[_ATTRIBUTE_TENSORS] = tensors
    return tensors


def not_kept(attribute: str) -> CaptureError:
    """Return the error of a tensor that a step leaves in a plain attribute for the next step."""
    what = f"the forward assigns a new tensor to `{attribute}`, which later steps would not see"
    return CaptureError("other", what, help="register it as a buffer: buffers are kept from step to step")


def check_memory(model: nn.Module, written: frozenset[str], unread: Collection[str] = ()) -> None:
    """Check that buffers, but for those ``unread``, share no memory with tensors that change: a program has separate
    values for the two.

    Raises:
        CaptureError: a buffer shares a parameter's memory, or that of another buffer, and one of both is ``written``.
    """
    by_memory = defaultdict(list)
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if name not in unread:
            by_memory[tensor.untyped_storage()._cdata].append((name, tensor))
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for tensors in by_memory.values():
        first, names = tensors[0][0], [name for name, _ in tensors]
        last = next((name for name in reversed(names) if name not in trained), first)
        if last != first and not (trained | written).isdisjoint(names):
            what = f"`{last}` shares the memory of `{first}`, which a step changes"
            help_ = f"compute it from `{first}` in the forward, or `clone` the tensor that it is made from"
            owners = [name.rpartition(".")[0] for name in (last, first)]
            if all(tensor is tensors[0][1] for _, tensor in tensors):
                what = f"`{owners[1]}` and `{owners[0]}` have the same buffers, and the forward writes one of them"
                help_ = "give the module one name: keep it in one attribute or list"
            raise CaptureError("other", what, help=help_)
