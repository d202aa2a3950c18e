"""Adapters of the ``peft`` library in a trained model: written alone in its own format, or merged into their layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compiler.capture.adapters import base_names, is_adapted
from ..grammar.codes_build import BAD_STATE
from .faults import RunError


def adapter_states(module: Any, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the name of each adapter of a model, and its tensors by the names that ``peft`` gives them in files. Only
    these are read of ``state``."""
    from peft import get_peft_model_state_dict

    for adapter in module.peft_config:
        yield adapter, get_peft_model_state_dict(module, state, adapter, save_embedding_layers=False)


def write_configuration(module: Any, adapter: str, folder: Path) -> None:
    """Write an adapter's configuration, as ``save_pretrained`` of its model does."""
    config = module.peft_config[adapter]
    trained, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = trained


def merged_weights(
    module: nn.Module, state: Mapping[str, torch.Tensor], aliases: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model without adapters, by its own names, with what adapters add to their layers. No more
    than one layer is held at a time.

    Raises:
        RunError: no adapter wraps a layer, or one that does shares its weight with another layer.
    """
    bases = base_names(module)
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if hasattr(layer, "merge") and hasattr(layer, "base_layer")
    }
    if not layers:
        raise RunError(BAD_STATE, "no adapter wraps a layer of the model", "write its weights without `--merge`")
    copies = {bases[name] for name in bases if ".modules_to_save." in name}
    done: set[str] = set()
    for name in state:
        path = next((path for path in _outer(name) if path in layers), None)
        base = bases[name]
        if path is None:
            if ".original_module." not in name or base not in copies:
                yield str(base), state[name]
        elif path not in done:
            done.add(path)
            _refuse_shared(path, aliases)
            for own, value in _merged_layer(path, layers[path], state):
                yield str(bases[own]), value


def _merged_layer(path: str, layer: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a wrapped layer, with what its adapters add."""
    names = [name for name in state if name.startswith(f"{path}.")]
    layer.load_state_dict({name.removeprefix(f"{path}."): state[name] for name in names}, assign=True)
    with torch.no_grad():
        layer.merge()  # type: ignore[operator]
    own = layer.state_dict()
    yield from ((name, own[key]) for name in names if (key := name.removeprefix(f"{path}.")).startswith("base_layer."))
    layer.to_empty(device="meta")


def _refuse_shared(path: str, aliases: Mapping[str, str]) -> None:
    for name, other in aliases.items():
        if {path} & {*_outer(name), *_outer(other)}:
            message = f"`{name}` and `{other}` are one weight, but an adapter changes it only in `{path}`"
            raise RunError(BAD_STATE, message, "write the adapters, without `--merge`, or leave this layer without one")


def _outer(name: str) -> Iterable[str]:
    """Return the modules in which a tensor lies, the innermost first."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))


def unadapted(module: Any) -> nn.Module:
    """Return the model that adapters wrap, or the module itself."""
    return module.get_base_model() if is_adapted(module) else module  # type: ignore[no-any-return]
