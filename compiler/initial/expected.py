"""The tensors that files of a model's weights have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..capture.adapters import base_names, saved_name
from ..capture.complex.form import real_form
from .files import Expected


def state_tensors(module: nn.Module, aliases: Mapping[str, str]) -> list[Expected]:
    """Return the tensors of a model's state, tied ones once with all their names; ``aliases`` are these. Where adapters
    wrap layers, a layer has the name of the model without adapters too, and an adapter's tensor that of files of
    ``peft``."""
    bases = base_names(module)
    tensors: dict[str, Expected] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor):
            owner, base = aliases.get(name, name), bases.get(name, name)
            names = tensors[owner].names if owner in tensors else ()
            also = [saved_name(module, name), *([base] if base is not None else [])]
            names = tuple(dict.fromkeys((*names, name, *also)))
            held = real_form(value)
            tensors[owner] = Expected(names, tuple(held.shape), held.dtype, base is None)
    return list(tensors.values())
