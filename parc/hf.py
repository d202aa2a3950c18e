"""Models of transformers for a plan's `model` line: by class, or by a folder with a configuration.

    model "parc.hf:model" (name="Qwen2ForCausalLM", hidden_size=256, num_hidden_layers=4)
    model "parc.hf:folder" (path="qwen2")

Further arguments are those of the configuration. Weights are random, drawn from the plan's `seed`; `init from "qwen2"`
begins with those of a folder, and a build warns where the folder has some and no line reads them (P0124).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from torch import nn

from parc.grammar.bounded import read_json

_LAYERS = "num_hidden_layers"


def model(name: str, **config: Any) -> nn.Module:
    """Make a model of a class of transformers, with its default configuration and these changes.

    Raises:
        ValueError: there is no such class, or its configuration has no such argument.
    """
    import transformers

    model_class = getattr(transformers, name, None)
    config_class = getattr(model_class, "config_class", None)
    if model_class is None or config_class is None:
        near = difflib.get_close_matches(name, dir(transformers), 3)
        meant = f"did you mean {' or '.join(near)}?" if near else "name one such as `LlamaForCausalLM`"
        raise ValueError(f"transformers has no model class `{name}`; {meant}")
    return _configured(model_class, config_class, {}, config)


def folder(path: str, **config: Any) -> nn.Module:
    """Make the model whose configuration a folder holds, as ``save_pretrained`` writes it, with these changes.

    Raises:
        OSError, ValueError: its configuration cannot be read, names no class, or has no such argument.
    """
    import transformers

    saved = read_json(Path(path) / "config.json")
    names = saved.get("architectures") if isinstance(saved, dict) else None
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    model_class: Any = getattr(transformers, name, None)
    if getattr(model_class, "config_class", None) is None:
        raise ValueError(f"config.json in `{path}` names no model class of transformers under `architectures`")
    return _configured(model_class, model_class.config_class, saved, config)


def _configured(model_class: Any, config_class: Any, saved: dict[str, Any], changes: dict[str, Any]) -> nn.Module:
    """Make a model of a saved configuration with changes. Lists with an entry for each layer are cut to fewer
    layers."""
    default = config_class()
    for name in changes:
        if not hasattr(default, name):
            known = default.to_dict()
            near = difflib.get_close_matches(name, known, 3)
            meant = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(known)[:8])}, …"
            raise ValueError(f"{config_class.__name__} has no `{name}`; {meant}")
    layers, fewer = saved.get(_LAYERS), changes.get(_LAYERS)
    if layers is not None and fewer is not None:
        saved = {name: value[:fewer] if isinstance(value, list) and len(value) == layers else value
                 for name, value in saved.items()}  # fmt: skip
    config = config_class(**{**saved, **changes})
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a step trains on whole sequences
    module: nn.Module = model_class._from_config(config)
    return module
