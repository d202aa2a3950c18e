"""The sizes of a run: a build bound to the sizes of each batch, where its plan declares ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar, final

import torch

from ...compiler.build.build import Build
from ...compiler.sizes.size_range import BATCH, SizeRange
from ...compiler.sizes.template import sizes_text
from ...grammar.codes import BAD_DATA, OUT_OF_RANGE
from ..ranks.faults import RunError
from ..step import Stepper
from .feed import Feed
from .sources import line_of

_Bound = TypeVar("_Bound")
NO_SHARES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AtSizes:
    """A build at one choice of its sizes, with the stepper and the feed for batches of them."""

    build: Build
    stepper: Stepper
    feed: Feed


@final
class BySizes(Generic[_Bound]):
    """A cache of objects made from a build for each choice of its sizes, when the first batch of that choice comes."""

    def __init__(self, build: Build, make: Callable[[Build], _Bound]) -> None:
        self._build, self._make = build, make
        self._bound: dict[tuple[tuple[str, int], ...], _Bound] = {}

    def __call__(
        self, batch: Mapping[str, torch.Tensor] | None = None, shares: Mapping[str, int] = NO_SHARES
    ) -> _Bound:
        """Return the object for a batch's sizes, or, without a batch, for the build's own sizes. If the batch is one
        rank's, ``shares`` has the numbers of ranks that divide the samples of each input.

        Raises:
            RunError: the build was not made for these sizes.
        """
        return self.at({} if batch is None or self._build.template is None else _sizes_of(self._build, batch, shares))

    def ranges(self, name: str) -> bool:
        """Return whether a size has a range."""
        return self._build.template is not None and name in self._build.template.ranges

    def at(self, sizes: Mapping[str, int]) -> _Bound:
        """Return the object for these sizes; sizes that are not named are the build's own.

        Raises:
            RunError: the build was not made for these sizes.
        """
        key = tuple(sorted({**self._build.manifest["sizes"], **sizes}.items()))
        if key not in self._bound:
            self._bound[key] = self._make(bound_build(self._build, sizes))
        return self._bound[key]


def bound_build(build: Build, sizes: Mapping[str, int]) -> Build:
    """Return the build for these sizes; sizes that are not named stay as they are.

    Raises:
        RunError: its plan declares no such sizes.
    """
    ranges = build.template.ranges if build.template is not None else {}
    known = {name: ranges.get(name, SizeRange(size, size)) for name, size in build.manifest["sizes"].items()}
    for name, size in sizes.items():
        if name not in known:
            raise RunError(OUT_OF_RANGE, f"the plan has no size `{name}`", f"its sizes are {sizes_text(known)}")
        if size not in known[name].values:
            near = " or ".join(f"{name}={other}" for other in known[name].nearest(size))
            message = f"{name}={size} is not a size that the build was made for: {name}={known[name]}"
            notes = [line for line in [line_of(build, "sizes")] if line]
            raise RunError(OUT_OF_RANGE, message, f"the nearest is {near}", notes)
    return build.at(sizes) if ranges and sizes else build


def _sizes_of(build: Build, batch: Mapping[str, torch.Tensor], shares: Mapping[str, int]) -> dict[str, int]:
    """Return a batch's sizes that have ranges. An input that does not fit the plan has none: the feed refuses it later.

    Raises:
        RunError: two inputs have different ones.
    """
    chosen: dict[str, tuple[str, int]] = {}
    assert build.template is not None
    for line in build.manifest["inputs"]:
        value = batch.get(line["name"]) if isinstance(batch, Mapping) else None
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, size in zip(line["dims"], shape, strict=False):
            if len(shape) != len(line["dims"]) or dim not in build.template.ranges:
                continue
            size = size * shares.get(line["name"], 1) if dim == BATCH else size
            first, known = chosen.setdefault(dim, (line["name"], size))
            if known != size:
                message = f"`{first}` has {dim}={known}, but `{line['name']}` has {dim}={size}"
                raise RunError(BAD_DATA, message, "one batch has one choice of the plan's sizes")
    return {name: size for name, (_, size) in chosen.items()}
