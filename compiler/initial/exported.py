"""Facts of a model's state, by which a checkpoint's weights are exported without the model's code."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...grammar.scratch import scratch
from ..capture.adapters import is_adapted
from ..program.stacked import is_stacked, part_names
from ..torch_private import quiet
from .recipes import Recorded

CONFIG, VERSION = "config.json", "transformers_version"
_CONFIGS = (CONFIG, "generation_config.json")


def state_facts(recorded: Recorded, parameters: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of a model's state beside the ``parameters`` of a build: the names that are ``more`` than these,
    the parameters that it does not have (``without``), the names of complex tensors, and the files that transformers
    reads with the weights (``configs``). None of these where only the model itself can write them, as that of ``peft``.
    """
    module, recipes = recorded.module, recorded.recipes
    known = {part for name, recipe in recipes.items() for part in _parts(name, recipe.shape)}
    kept = [name for name in module.state_dict() if name in known and name not in aliases]
    stored = [part for name in parameters for part in _parts(name, recipes[name].shape if name in recipes else ())]
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    complex_ = {name for name, value in tensors if value.is_complex()}
    parts = {name: _parts(name, recipe.shape) for name, recipe in recipes.items()}
    complex_ |= {part for name in complex_ & parts.keys() for part in parts[name]}
    lists = {
        "more": sorted(set(kept) - set(stored)),
        "without": sorted(set(stored) - set(kept)),
        "complex": sorted(complex_ & set(kept)),
    }
    return {**{name: names for name, names in lists.items() if names}, "configs": _configs(module)}


def _parts(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(part_names(name, shape[0])) if is_stacked(name) and shape else (name,)


def _configs(module: nn.Module) -> dict[str, Any] | None:
    """Return the values of the files that a model of transformers saves beside its weights, by the files' names."""
    if is_adapted(module):
        return None
    with scratch("config") as folder:
        try:
            with quiet():
                save_configs(module, folder / "saved", None)
            files = sorted((folder / "saved").glob("*"))
            values = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
            for value in values.values():
                value.pop(VERSION, None)  # that of the export counts
        except Exception:  # of a configuration that cannot be saved: an export says so
            return None
    return values if set(values) <= {*_CONFIGS} else None


def save_configs(module: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configuration of a model of transformers, as ``save_pretrained`` writes it; nothing for others."""
    config: Any = getattr(module, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(module).__name__]
    config.dtype = dtype or next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    config.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        copy.deepcopy(generation).save_pretrained(folder)
