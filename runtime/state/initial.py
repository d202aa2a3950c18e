"""The initial state of a rank: its pieces of parameters and buffers, drawn by recipes or read from the files of
``init``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from ...compiler.build.build import Build
from ...compiler.build.directory import again
from ...compiler.capture.complex.form import own_form
from ...compiler.capture.known import fingerprint
from ...compiler.capture.model_calls import TaskLines, model_builder
from ...compiler.capture.observer import code_undone
from ...compiler.initial.files import Expected, Weights, WeightsError, open_weights, shown_faults
from ...compiler.initial.recipes import Recipe, Recorded, record
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import take
from ...compiler.layout.placement import TensorType
from ...compiler.padding.pads import Pad, pads_from
from ...compiler.padding.tensors import grow, real_entries, spread
from ...compiler.program.stacked import is_stacked, part_names
from ...grammar.codes import BAD_BUILD, BAD_WEIGHTS, MODEL_FAILED
from ..ranks.faults import RunError
from ..ranks.work import RankState
from .step_state import first_state

_PUT_BACK = "put the files of `init from` back as they were built with, or build the plan again"


def weights_of(build: Build) -> Weights | None:
    """Open the weights of a build's ``init`` line; None without such a line.

    Raises:
        RunError: they cannot be read, or do not fit the model; tensors that do not are named.
    """
    line = build.manifest["init"]
    if line is None:
        return None
    try:
        weights = open_weights(build.folder / line["folder"], line["rounded"])
    except WeightsError as error:
        raise RunError(BAD_WEIGHTS, str(error), "`init from` names a folder relative to the plan's") from None
    faults = weights.faults(expected_of(line))
    if faults:
        message = f"the weights in `{line['folder']}` are not the model's"
        raise RunError(BAD_WEIGHTS, message, "write files with the model's own names", shown_faults(faults))
    return weights


def expected_of(line: Mapping[str, Any]) -> list[Expected]:
    """Return the model's tensors as the manifest's ``init`` lists them."""
    return [
        Expected(
            tuple(tensor["names"]),
            tuple(tensor["shape"]),
            getattr(torch, tensor["dtype"]),
            bool(tensor.get("optional")),
        )
        for tensor in line["tensors"]
    ]


def _record(build: Build, lines: TaskLines) -> Recorded:
    """Return the model of a build, recorded here.

    Raises:
        RunError: making it fails here, or it reads other weights from files than at the build.
    """
    try:
        with code_undone(lines.sources, build.folder):
            recorded = record(model_builder(lines, build.folder), int(build.manifest["seed"]))
    except Exception as error:  # of the model's code
        message = f"making the model failed: {type(error).__name__}: {error}"
        help_ = "a build is opened where the files that its model's code reads are"
        raise RunError(MODEL_FAILED, message, help_) from error
    if recorded.files != build.manifest.get("model_files", ""):
        message = f"`{lines.model}` reads other weights from files than it did at the build"
        help_ = f"put the files back, or {again(build.path)}; weights that change are read by an `init from` line"
        raise RunError(BAD_BUILD, message, help_)
    for name, asked in build.manifest.get("asked", {}).items():
        if name not in recorded.recipes or fingerprint(recorded.recipes[name].whole()) != asked:
            message = f"`{lines.model}` gives the buffer `{name}` another value than at the build, which went by it"
            raise RunError(BAD_BUILD, message, f"let the code make the same one, or {again(build.path)}")
    return recorded


class Initial:
    """The initial values of one build for the rank at ``coordinates``."""

    def __init__(
        self, build: Build, lines: TaskLines, mesh: Mesh, coordinates: Mapping[str, int], device: torch.device
    ) -> None:
        self._build, self._mesh, self._coordinates, self._device = build, mesh, coordinates, device
        recorded = _record(build, lines)
        self.module, self._recipes = recorded.module, recorded.recipes
        self._stacks = {
            part: (name, number)
            for name in filter(is_stacked, self._recipes)
            for number, part in enumerate(part_names(name, self._recipes[name].shape[0]))
        }
        self.kept = [name for name in recorded.module.state_dict() if name in {*self._recipes, *self._stacks}]
        tensors = chain.from_iterable(
            named(remove_duplicate=False) for named in (recorded.module.named_parameters, recorded.module.named_buffers)
        )
        self._complex = {name for name, value in tensors if value.is_complex()}
        self._complex |= {part for part, (name, _) in self._stacks.items() if name in self._complex}
        self._weights = weights_of(build)
        self._pads = pads_from(build.manifest["padding"])
        weights, line = self._weights, build.manifest["init"]
        stored = (
            [tensor.names for tensor in expected_of(line) if weights.has(tensor.names)] if weights is not None else []
        )
        self._names = {name: names for names in stored for name in names}
        self._names |= {name: (name,) for part, (name, _) in self._stacks.items() if part in self._names}

    def state(
        self, parameters: Mapping[str, TensorType], buffers: Mapping[str, TensorType],
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda piece: piece,
    ) -> RankState:  # fmt: skip
        """Return the rank's pieces, and close the files. ``keep`` moves each parameter to the place where it is kept.

        Raises:
            RunError: a file can no longer be read.
        """
        role = self._build.role_at(self._coordinates)
        with self._reading():
            return RankState(
                # the data alone: a view of another tensor would keep its storage when it gets another one
                {name: keep(self._piece(name, type_).data) for name, type_ in parameters.items()},
                {name: self._piece(name, type_, self._build.manifest["constants"]) for name, type_ in buffers.items()},
                first_state(role.programs, self._build.manifest["state"], self._device),
            )

    def buffers(
        self, types: Mapping[str, TensorType], constants: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, torch.Tensor]:
        """Return the rank's pieces of buffers, and of ``constants`` of the model's code.

        Raises:
            RunError: a file can no longer be read.
        """
        with self._reading():
            return {name: self._piece(name, type_, constants) for name, type_ in types.items()}

    def own(self, name: str, value: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor in the form that the model has it in: complex numbers are joined from their parts. Without a
        ``value`` it is the initial one.

        Raises:
            RunError: a file can no longer be read.
        """
        return own_form(self.whole(name) if value is None else value, name in self._complex)

    def whole(self, name: str) -> torch.Tensor:
        """Return the whole initial value of a tensor of the model's state, complex numbers as their parts.

        Raises:
            RunError: a file can no longer be read.
        """
        stack, number = self._stacks.get(name, (name, None))
        recipe = self._recipes[stack]
        if self._weights is None or name not in self._names:
            return recipe.whole() if number is None else recipe.whole()[number]
        with self._reading():
            return self._weights.whole(self._names[name], recipe.dtype)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Enter a block that reads files of weights, which are closed at its end.

        Raises:
            RunError: a file can no longer be read.
        """
        try:
            yield
        except WeightsError as error:
            raise RunError(BAD_WEIGHTS, str(error), _PUT_BACK) from None
        finally:
            if self._weights is not None:
                self._weights.close()

    def _piece(
        self, name: str, type_: TensorType, constants: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    ) -> torch.Tensor:
        """Return this rank's piece of a tensor. Where that is possible only its entries are drawn or read, not the
        whole tensor. ``constants`` are those of the model's code."""
        pads = self._pads.get(name, ())
        if self._weights is not None and name in self._names:
            return self._weights.piece(self._names[name], type_, self._mesh, self._coordinates, pads).to(self._device)
        recipe = self._recipes.get(name)
        if recipe is None:
            facts = constants[name]
            return self._take(torch.tensor(facts["values"], dtype=getattr(torch, facts["dtype"])), type_)
        return self._drawn_piece(recipe, type_, pads)

    def _drawn_piece(self, recipe: Recipe, type_: TensorType, pads: Sequence[Pad]) -> torch.Tensor:
        if not type_.placement.split_axes() or not recipe.elementwise:
            return self._take(grow(recipe.whole(self._device), pads), type_)
        places = [real_entries(type_, dim, pads, self._mesh, self._coordinates) for dim in range(len(type_.shape))]
        index = torch.zeros((), dtype=torch.int64)
        for (_, entries), size in zip(places, recipe.shape, strict=True):
            index = index[..., None] * size + entries
        piece = spread(recipe.elements(index, self._device), [kept for kept, _ in places])
        return piece.contiguous().to(self._device, type_.dtype)

    def _take(self, whole: torch.Tensor, type_: TensorType) -> torch.Tensor:
        return take(whole, type_.placement, self._mesh, self._coordinates).to(self._device, type_.dtype)
