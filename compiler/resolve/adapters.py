"""Layers that adapters wrap, as those of the ``peft`` library: ``q_proj.base_layer.weight`` is the layer's own weight,
``q_proj.lora_A.default.weight`` and ``q_proj.lora_B.default.weight`` are an adapter's two. Of a layer that is trained
beside adapters, ``lm_head.modules_to_save.default.weight`` is the copy that computes."""

from __future__ import annotations

import re
from collections.abc import Collection

_OWN = r"(base_layer|modules_to_save\.[^.]+)\.weight"


def layer_weights(module: str, style: str, parameters: Collection[str]) -> list[tuple[str, str | None]]:
    """Return the weights of a linear layer or a table that a line of a style splits, each with its bias.

    Of a wrapped layer they are its own weight, and the factors of adapters that have the dim which is split: the second
    where outputs are split, the first where inputs are.

    >>> layer_weights("up", "column", ["up.base_layer.weight", "up.lora_A.a.weight", "up.lora_B.a.weight"])
    [('up.base_layer.weight', None), ('up.lora_B.a.weight', None)]
    """
    if f"{module}.weight" in parameters:
        weights = [f"{module}.weight"]
    else:
        factor = r"lora_A\.[^.]+\.weight" if style == "row" else r"lora_B\.[^.]+\.weight"
        split = re.compile(rf"{re.escape(module)}\.({_OWN}|{factor})")
        weights = list(filter(split.fullmatch, parameters))
    biases = (f"{weight.removesuffix('.weight')}.bias" for weight in weights)
    return [(weight, bias if bias in parameters else None) for weight, bias in zip(weights, biases, strict=True)]
