"""Names of the tensors of a model with adapters of the ``peft`` library, and of the same model without them."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

BASE, PREFIX = "base_layer", "base_model.model."


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a model of ``peft`` around another."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def base_names(module: nn.Module) -> dict[str, str | None]:
    """Return the names that the tensors of a module's state have in the model without adapters, None for those of an
    adapter; nothing where no layer is wrapped. The trained copy of a layer (``modules_to_save``) has the layer's
    names."""
    kinds: dict[str, str] = {}
    for path, layer in module.named_modules():
        if hasattr(layer, "adapter_layer_names") and hasattr(layer, BASE):
            kinds[path] = BASE
        elif hasattr(layer, "modules_to_save") and hasattr(layer, "original_module"):
            kinds[path] = "original_module"
    prefix = PREFIX if is_adapted(module) else ""
    names = {name: _base(name, kinds) for name in module.state_dict()} if kinds else {}
    return {name: base.removeprefix(prefix) if base is not None else None for name, base in names.items()}


def saved_name(module: Any, name: str) -> str:
    """Return the name that a tensor has in the files of ``peft``, which leave out the name of a single adapter."""
    adapters = [*module.peft_config] if is_adapted(module) else []
    return re.sub(rf"(\.modules_to_save)?\.{re.escape(adapters[0])}(?=\.|$)", "", name) if len(adapters) == 1 else name


def _base(name: str, kinds: dict[str, str]) -> str | None:
    parts = name.split(".")
    for depth in range(1, len(parts)):
        path, rest = ".".join(parts[:depth]), parts[depth:]
        match kinds.get(path):
            case kind if kind is not None and rest[0] == kind:
                return ".".join([path, *rest[1:]])
            case "original_module" if rest[0] == "modules_to_save":
                return ".".join([path, *rest[2:]])
            case str():
                return None
    return name
