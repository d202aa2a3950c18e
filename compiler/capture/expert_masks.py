"""Masks of the tokens that chose an expert, as a loop over experts makes them: by comparing, or of ``one_hot``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ..ops.rules import facts


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A mask of the tokens that chose expert ``number``, made of ``index``, [tokens] or [tokens, k]. ``dims`` are its
    own."""

    index: Tensor
    number: int
    dims: tuple[str, ...]

    def same(self, other: Mask) -> bool:
        """Return whether two masks mark the same tokens."""
        return self.index is other.index and self.number == other.number


@final
class Masks:
    """The tensors of which a loop knows what tokens they mark. They are kept, so that no other tensor gets their
    number."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._distinct: dict[int, Tensor] = {}
        """The results of ``topk``, which name no expert twice for one token."""
        self._parts: dict[int, dict[str, Tensor]] = defaultdict(dict)
        """The parts of these, each taken once: ``index[:, 0]`` is one tensor in every turn of a loop."""
        self._masks: dict[int, tuple[Tensor, Mask]] = {}
        self._hot: dict[int, tuple[Tensor, Tensor, tuple[str, ...]]] = {}
        """The results of ``one_hot``, with the experts of tokens that they were made of, and their dims."""

    def of(self, value: Any) -> Mask | None:
        """Return the mask that a value is, or None."""
        return self._masks[id(value)][1] if id(value) in self._masks else None

    def names_each_once(self, index: Tensor) -> bool:
        """Return whether no token has an expert twice in an index."""
        return id(index) in self._distinct

    def forget(self, tensor: Any) -> None:
        """Forget all masks if a tensor of which one is made, or a part of one, is written."""
        parts = [part for of in self._parts.values() for part in of.values()]
        indices = [mask.index for _, mask in self._masks.values()]
        masks = [made for made, _ in self._masks.values()] + [made for made, _, _ in self._hot.values()]
        if any(known is tensor for known in (*self._distinct.values(), *parts, *indices, *masks)):
            self._kept += [*self._distinct.values(), *parts, *indices, *masks]
            for table in (self._distinct, self._parts, self._masks, self._hot):
                table.clear()

    def noted(self, func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of tensors, and note of its result which tokens it marks, if it does."""
        first: Any = args[0] if args else None
        if (
            name == "getitem"
            and id(first) in self._distinct
            and isinstance(args[1], tuple)
            and {*map(type, args[1])} == {slice, int}
        ):
            parts, key = self._parts[id(first)], str(args[1])
            parts[key] = parts[key] if key in parts else func(*args)
            return parts[key]
        made: Any = func(*args, **kwargs)
        mask, hot = self.of(first), self._hot.get(id(first))
        if name == "topk" and (kwargs.get("dim", -1) if len(args) < 3 else args[2]) in (-1, first.dim() - 1):
            self._distinct[id(made[1])] = made[1]
        elif id(first) in self._distinct and facts(f"aten.{name}.default").moves in ("copy", "shape"):
            if made.shape[-1] == first.shape[-1]:
                self._distinct[id(made)] = made
        elif name == "eq" and type(args[1]) is int and first.dtype == torch.int64 and first.dim() in (1, 2):
            self._masks[id(made)] = made, Mask(first, args[1], ("token", "slot")[: first.dim()])
        elif name == "any" and mask is not None and mask.dims == ("token", "slot"):
            if [*args[1:], *kwargs.values()] in ([-1], [1]):
                self._masks[id(made)] = made, Mask(mask.index, mask.number, ("token",))
        elif name == "one_hot" and first.dim() == 2:
            self._hot[id(made)] = made, first, ("token", "slot", "expert")
        elif name == "permute" and hot is not None:
            order = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            self._hot[id(made)] = made, hot[1], tuple(hot[2][dim] for dim in order)
        elif name in ("to", "bool", "int", "long") and hot is not None:
            self._hot[id(made)] = made, *hot[1:]
        elif name == "getitem" and hot is not None and type(args[1]) is int and hot[2][0] == "expert":
            self._masks[id(made)] = made, Mask(hot[1], args[1], hot[2][1:])
        return made
