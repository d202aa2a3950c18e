"""Experts in an ``nn.ModuleList``: their weights, stacked in one parameter each, which can be split over ranks.

``experts.0.up.weight`` and those after it become ``experts.*.up.weight``, [experts, ...]. A module ``*`` of the list
holds the stacks while no forward runs; a forward sees the list without it, with parts of the stacks as the experts'
parameters. State dicts and checkpoints have the model's own names (`compiler/program/stacked.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ...program.stacked import EACH
from ..faults import CaptureError

_STACKED = "_expert_lists"
"""The attribute in which a model has its stacked lists, and such a list its own ``ExpertList``."""


@dataclass(frozen=True, slots=True)
class ExpertList:
    """A list of experts of one structure, and the module that holds their stacked parameters."""

    owner: nn.ModuleList
    experts: tuple[nn.Module, ...]
    stacks: nn.Module

    @contextmanager
    def filled(self, expert: nn.Module, part: Callable[[nn.Parameter], Any]) -> Iterator[None]:
        """Enter a block in which an expert has ``part(stack)`` for each of its parameters that was stacked."""
        with ExitStack() as within:
            for path, stack in self.stacks.named_parameters():
                owner, _, name = path.rpartition(".")
                parameters = expert.get_submodule(owner)._parameters
                parameters[name] = part(stack)
                within.callback(parameters.pop, name)
            yield


def stack_experts(model: nn.Module, lists: Sequence[nn.ModuleList], alike: Sequence[nn.ModuleList] = ()) -> None:
    """Stack the parameters of the experts of ``lists``, in place, and of those lists in ``alike`` whose experts are.

    Raises:
        CaptureError: the experts of one of ``lists`` are not alike.
    """
    names = {id(module): name for name, module in model.named_modules()}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    stacked = [_stacked(experts, names[id(experts)], uses) for experts in lists]
    for experts in alike:
        with suppress(CaptureError):
            stacked.append(_stacked(experts, names[id(experts)], uses))
    vars(model)[_STACKED] = stacked


def stacks_of(experts: nn.ModuleList) -> ExpertList | None:
    """Return the stacks of a list of experts, or None if it has none."""
    return vars(experts).get(_STACKED)


@contextmanager
def unstacked(model: nn.Module, parts: bool = True) -> Iterator[None]:
    """Enter a forward, in which lists of experts are without the module of their stacks. Without ``parts`` the experts
    have no parameters: only forms read them."""
    lists: list[ExpertList] = vars(model).get(_STACKED, [])
    with ExitStack() as within:
        for each in lists:
            del each.owner._modules[EACH]
            within.callback(each.owner._modules.__setitem__, EACH, each.stacks)
            for number, expert in enumerate(each.experts if parts else ()):
                within.enter_context(each.filled(expert, itemgetter(number)))
        yield


def _stacked(owner: nn.ModuleList, path: str, uses: Mapping[int, int]) -> ExpertList:
    """Stack the parameters of the experts of one list. A parameter that all experts share stays as it is."""
    experts, stacks = tuple(owner), nn.Module()
    for number, expert in enumerate(experts):
        if unlike := _unlike(experts[0], expert):
            what = f"the experts in `{path}` are not alike: numbers 0 and {number} differ in {unlike}"
            help_ = "give all experts one structure, or keep the other one outside the list"
            raise CaptureError("experts", what, help=help_)
    for name, first in experts[0].named_parameters(remove_duplicate=False):
        parameters = [expert.get_parameter(name) for expert in experts]
        shared = all(parameter is first for parameter in parameters)
        if not shared and any(uses[id(parameter)] > 1 for parameter in parameters):
            what = f"`{path}.0.{name}` has another name too, so it cannot be stacked with those of other experts"
            raise CaptureError("experts", what, help="let each expert have its own parameters, or all the same one")
    for name, first in list(experts[0].named_parameters(remove_duplicate=False)):
        inside, _, attribute = name.rpartition(".")
        modules = [expert.get_submodule(inside) for expert in experts]
        parameters = [module.get_parameter(attribute) for module in modules]
        if all(parameter is first for parameter in parameters):
            continue
        stack = nn.Parameter(torch.stack([parameter.detach() for parameter in parameters]), first.requires_grad)
        _submodule(stacks, inside).register_parameter(attribute, stack)
        for module in modules:
            del module._parameters[attribute]
    owner._modules[EACH] = stacks
    owner._register_state_dict_hook(_to_own_names)
    owner.register_load_state_dict_pre_hook(_from_own_names)
    vars(owner)[_STACKED] = stacked = ExpertList(owner, experts, stacks)
    return stacked


def _submodule(module: nn.Module, path: str) -> nn.Module:
    """Return the module at a path inside another; empty modules are added where it is not there."""
    for word in path.split(".") if path else ():
        if word not in module._modules:
            module.add_module(word, nn.Module())
        module = module.get_submodule(word)
    return module


def _to_own_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Write stacks of a state dict as their parts."""
    start = f"{prefix}{EACH}."
    for key in [key for key in state if key.startswith(start)]:
        stack = state.pop(key)
        state.update({f"{prefix}{number}.{key.removeprefix(start)}": part for number, part in enumerate(stack)})


def _from_own_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Write the parts of stacks in a state dict as stacks."""
    stacked = stacks_of(module)  # type: ignore[arg-type]
    assert stacked is not None
    for path, _stack in stacked.stacks.named_parameters():
        names = [f"{prefix}{number}.{path}" for number in range(len(stacked.experts))]
        if all(name in state for name in names):
            state[f"{prefix}{EACH}.{path}"] = torch.stack([state.pop(name) for name in names])


def _unlike(first: nn.Module, other: nn.Module) -> str:
    """Return the difference between two modules of one list, apart from the contents of their tensors; "" if none."""
    ours, theirs = dict(first.named_modules()), dict(other.named_modules())
    if list(ours) != list(theirs):
        return "their modules"
    for path, module in ours.items():
        place, twin = f"`{path}`" if path else "themselves", theirs[path]
        if type(module) is not type(twin):
            return f"the class of {place}"
        tensors = [
            {name: (tuple(value.shape), value.dtype, value.requires_grad) for name, value in of if value is not None}
            for one in (module, twin)
            for of in ([*one.named_parameters(recurse=False), *one.named_buffers(recurse=False)],)
        ]
        if tensors[0] != tensors[1]:
            return f"the tensors of {place}"
        plain = [{k: v for k, v in vars(one).items() if k not in ("_parameters", "_buffers", "_modules")}
                 for one in (module, twin)]  # fmt: skip
        odd = [name for name in {**plain[0], **plain[1]} if not _equal(plain[0].get(name), plain[1].get(name))]
        if odd:
            return f"`{odd[0]}` of {place}"
    return ""


def _equal(one: Any, other: Any) -> bool:
    """Return whether two plain attributes are equal: functions if they have the same code and no closures."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one is other or (one.__code__ is other.__code__ and not one.__closure__ and not other.__closure__)
    if one is other or type(one) is not type(other) or isinstance(one, torch.Tensor):
        return one is other
    return bool(one == other)
