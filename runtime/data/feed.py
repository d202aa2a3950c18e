"""The feed of a rank: its part of each step's microbatches, cut from whole batches, or read from the plan's data row by
row. Batches of fewer samples than a step takes are padded, where that is proved to change nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final
from weakref import WeakSet

import torch

from ...compiler.build.build import Build
from ...compiler.initial.counter import digest
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import dim_index, take
from ...compiler.layout.placement import TensorType
from ...compiler.ops.rules import facts
from ...compiler.program.actions import COUNTING, FORWARD
from ...compiler.program.program import Function, Program, Ref
from ...compiler.program.step_values import biases_in
from ...compiler.sizes.size_range import BATCH, SizeRange
from ...compiler.sizes.template import sizes_text
from ...grammar.codes import BAD_DATA
from ..ranks.faults import RunError
from ..ranks.processes import data_limit_s
from ..ranks.waits import WAITS
from .random_batch import class_bounds
from .reading import Closing, RowReader, in_thread
from .samples import DataError, raised_at, sample_misfit
from .sources import OWN_CODE, line_of, make_data

# ---- batches of fewer samples, padded


@final
class Tails:
    """The padding of one build's batches; ``batched`` says which of its inputs have a batch dim."""

    def __init__(self, build: Build, batched: Mapping[str, bool]) -> None:
        self._reference, self._balanced = build.reference, bool(biases_in(build.manifest))
        self._lossless = build.purpose == "inference"
        self._names = [name for name, has in batched.items() if has]
        self._unbatched = frozenset(batched) - {*self._names}
        self._size = int(build.manifest["sizes"].get(BATCH, 1))

    @cached_property
    def _ignored(self) -> dict[str, int]:
        """The fill value of padded samples for each input that decides what the loss counts: a cross entropy's
        ``ignore_index``, a mask's comparand, or 0."""
        fills = dict[str, int]()
        for function in (each for each in self._reference.functions if each.name == "count"):
            numbers = _comparands(function)
            fills = {name: numbers.get(name, 0) for name in self._names if name in function.bound("input")}
        for name, bound in class_bounds(self._reference).items():
            if name in self._names and bound.ignore is not None:
                fills[name] = bound.ignore
            elif not 0 <= fills.get(name, 0) < bound.least:
                del fills[name]  # the input is an index too, and no row or class has this number
        return fills

    @cached_property
    def fault(self) -> str:
        """The reason why padded samples would change the loss or the gradients, "" where they do not."""
        from ...compiler.verify.padding import tail_fault  # proves in sympy, which most runs need not import

        if self._lossless:
            return "there are no targets to ignore; `session.predict(batch)` completes a whole batch, and cuts it again"
        if self._balanced:
            return "the biases that balance its experts move by the tokens of all samples"
        return tail_fault(self._reference, self._ignored, self._unbatched)

    def ignored_targets(self, count: int) -> Mapping[str, int]:
        """Return the fill value of the inputs that decide what the loss counts, with which a batch of ``count`` samples
        is padded.

        Raises:
            RunError: padded samples would change the loss.
        """
        if self.fault:
            message = f"the last batch of an epoch has {count} samples, and a step takes {self._size}"
            help_ = (
                f"`drop_last=True` leaves them out; a line `sizes B=LOW..{self._size} by STEP` allows smaller batches"
            )
            raise RunError(BAD_DATA, message, help_, [f"fewer would change its numbers: {self.fault}"])
        return self._ignored

    def completed(self, batch: Mapping[str, torch.Tensor], shares: Mapping[str, int]) -> Mapping[str, torch.Tensor]:
        """Return a whole step's batch, or one rank's share of it, padded by copies of its first sample with all targets
        ignored.

        A batch whose inputs have no common number of samples is returned as it is.

        Raises:
            RunError: there are too many samples, or none, or too few for a loss that sees how many there are.
        """
        batched = {name: value for name, value in batch.items() if name in self._names}
        if not batched or any(not isinstance(value, torch.Tensor) or not value.dim() for value in batched.values()):
            return batch
        size, *others = {self._size // shares.get(name, 1) for name in batched}
        if others:  # inputs that are divided over different axes have no common number of samples
            return batch
        counts = {value.shape[0] for value in batched.values()}
        count = counts.pop()
        if counts or count == size:
            return batch
        if not 0 < count < size or self.fault:
            legal = f"{size}" if self.fault else f"1 to {size}"
            why = "B of the plan's `sizes` line"
            samples = f"{count} sample{'s' * (count != 1)}"
            help_ = f"give {legal} samples, or build the plan for another B"
            if self.fault and count < size:
                why = f"fewer would change its numbers: {self.fault}"
                help_ += f"; a line `sizes B=LOW..{self._size} by STEP` is for several"
            what, takes = ("this rank's part", "of a step it takes") if shares else ("the batch", "a step takes")
            raise RunError(BAD_DATA, f"{what} has {samples}; {takes} {legal}", help_, [why])
        missing = size - count
        return {**batch, **{name: self._longer(name, value, missing) for name, value in batched.items()}}

    def _longer(self, name: str, value: torch.Tensor, missing: int) -> torch.Tensor:
        more = value[:1].expand(missing, *value.shape[1:])
        return torch.cat([value, torch.full_like(more, self._ignored[name]) if name in self._ignored else more])


def _comparands(count: Function) -> dict[str, int]:
    """Return the numbers with which a count compares inputs, as -100 in ``(targets != -100).sum()``."""
    origin, comparands = {value.name: name for name, value in count.bound("input").items()}, dict[str, int]()
    for line in count.lines:
        first, *others = line.args or (None,)
        name, row = origin.get(first.name, "") if isinstance(first, Ref) else "", facts(line.op)
        if name and (row.keeps_values or row.casts or row.moves == "shape"):
            origin.update((value.name, name) for value in line.made)
        elif (
            name and row.elementwise and others and isinstance(others[0], int) and line.made[0].type.dtype == torch.bool
        ):
            comparands.setdefault(name, others[0])
    return comparands


# ---- the feed


LocalParts = list[dict[str, torch.Tensor]]
"""One rank's part of each microbatch of a step."""


@dataclass(frozen=True, slots=True)
class HashedParts:
    """One rank's part of a step: its microbatches, and for each input a hash of its samples before they were cut. Ranks
    that should have the same samples compare the hashes. A hash is 0 where the samples cannot differ."""

    parts: LocalParts
    hashes: Sequence[int | torch.Tensor]


MISFIT_HELP = "change the data, or the plan's `input` and `sizes` lines"


@final
class Feed:
    """The cutting and reading of batches for the rank at ``coordinates``. The next step's rows are read ahead. Feeds
    that may call the same function of a person share the lock ``reading``, so that one thread at a time is in it."""

    def __init__(
        self, build: Build, mesh: Mesh, coordinates: Mapping[str, int], device: torch.device,
        reading: threading.Lock | None = None,
    ) -> None:  # fmt: skip
        self._build, self._mesh, self._coordinates, self.device = build, mesh, coordinates, device
        self.inputs: Sequence[Mapping[str, Any]] = build.manifest["inputs"]
        """The plan's ``input`` lines."""
        self.types = input_types(build.programs)
        self._count = int(build.manifest["microbatches"])
        self._batched = {line["name"]: line["dims"][:1] == [BATCH] for line in self.inputs}
        self._bounds = class_bounds(build.reference)
        self.shares = {name: math.prod(mesh.size(axis) for axis in self.batch_axes(name)) for name in self.types}
        """The number of ranks among which the samples of an input are divided."""
        self.tails = Tails(build, self._batched)
        self._reader: RowReader | None = None
        self._reading = threading.Lock() if reading is None else reading
        self._closed = threading.Event()
        self._ahead: tuple[int, Future[HashedParts]] | None = None
        self._line = line_of(build)
        self.batch = int(build.manifest["sizes"].get(BATCH, 1))
        """The samples of a step."""
        self._origin = 0, 0
        self.places: dict[str, tuple[int, int]] = {}
        """The places of ``parc.dataloader``'s loaders, by name: an epoch, and how many of its samples were taken."""
        self.loaders: WeakSet[Any] = WeakSet()
        """These loaders, as long as anyone holds them."""

    def position(self, step: int) -> int:
        """Return the number of the first sample of the plan's data that step ``step`` (from 0) takes."""
        first, sample = self._origin
        return sample + (step - first) * self.batch

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts of a checkpoint after ``step`` steps about data: the number of steps, of samples of the
        plan's data, and the places of loaders. None depends on the mesh."""
        return {"step": step, "samples": self.position(step), "loaders": self.places}

    def go_on(self, facts: Mapping[str, Any]) -> int:
        """Go on with the data where a checkpoint with these facts ends. Return the number of steps done."""
        step = int(facts["step"])
        self.close()
        self._origin = step, int(facts.get("samples", step * self.batch))
        self.places = {name: (epoch, taken) for name, (epoch, taken) in facts.get("loaders", {}).items()}
        return step

    def samples(self, name: str, shares: Mapping[str, int]) -> int:
        """Return the samples of an input in a whole batch, or in a rank's part of one; 0 for an input without any."""
        return self.types[name].shape[0] // shares.get(name, 1) * self._count if self._batched[name] else 0

    def batch_axes(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes that divide the samples of an input."""
        return tuple(axis for _, axis in self.types[name].placement.splits(0)) if self._batched[name] else ()

    def cut(self, batch: Mapping[str, torch.Tensor]) -> LocalParts:
        """Return this rank's part of each microbatch of a step's *whole* batch. One of fewer samples is padded, where
        that is proved to change nothing.

        Raises:
            RunError: an input is missing, or has another shape, dtype or range than the plan's.
        """
        return self.cut_hashed(batch).parts

    def cut_hashed(self, batch: Mapping[str, torch.Tensor], local: bool = False, hashed: bool = False) -> HashedParts:
        """Return this rank's part of a step's whole batch. With ``local`` the batch has only this rank's samples, in
        the order of the microbatches and whole in their other dims. Without ``hashed`` all hashes are 0.

        Raises:
            RunError: an input is missing, or has another shape, dtype or range than the plan's.
        """
        needs = f"give a dict with {', '.join(f'`{name}`' for name in self._batched)}"
        if not isinstance(batch, Mapping):
            raise RunError(BAD_DATA, f"a batch is a dict of tensors by name, not {type(batch).__name__}", needs)
        unknown = [name for name in batch if name not in self._batched]
        if unknown:
            raise RunError(BAD_DATA, f"the batch has `{unknown[0]}`, which is no input of the plan", needs)
        shares = self.shares if local else {}
        unpadded, batch = batch, self.tails.completed(batch, shares)
        parts: LocalParts = [{} for _ in range(self._count)]
        for name, type_ in self.types.items():
            if name not in batch:
                raise RunError(BAD_DATA, f"the batch has no `{name}`", needs)
            value, rows = batch[name], type_.shape[0] // shares.get(name, 1) if self._batched[name] else 0
            samples = [rows * self._count if batch is unpadded else len(unpadded[name])] if rows else type_.shape[:1]
            what = "this rank's samples" if local else "a whole step's batch"
            self._check(name, unpadded[name], (*samples, *type_.shape[1:]), what)
            for index, part in enumerate(parts):
                piece = value[index * rows : (index + 1) * rows] if rows else value
                if local and rows:
                    part[name] = self._cut_rest(piece, type_, 1).to(self.device)
                else:
                    part[name] = take(piece, type_.placement, self._mesh, self._coordinates).to(self.device)
        return HashedParts(parts, [digest(batch[name]) if hashed else 0 for name in self.types])

    def next(self, step: int, steps: int | None = None) -> LocalParts:
        """Return the parts of ``read``."""
        return self.read(step, steps).parts

    def read(self, step: int, steps: int | None = None) -> HashedParts:
        """Return this rank's part of the microbatches of step ``step`` (from 0), from the plan's ``data`` line.

        With ``steps`` nothing is read ahead beyond the last of so many steps: there may be no more data.

        Raises:
            RunError: the plan has no data, or it cannot be read.
        """
        reader = self._opened()
        ahead, self._ahead = self._ahead, None
        with WAITS.data():
            hit = ahead is not None and ahead[0] == step
            ready = (
                self._awaited(reader, ahead[1], step) if ahead is not None and hit else self._read(reader, step, steps)
            )
        if steps is None or step + 1 < steps:
            self._ahead = step + 1, in_thread(lambda: self._read(reader, step + 1, steps), self._closed)
        parts = [{name: value.to(self.device) for name, value in part.items()} for part in ready.parts]
        return HashedParts(parts, ready.hashes)

    def _awaited(self, reader: RowReader, ahead: Future[HashedParts], step: int) -> HashedParts:
        """Return what a reader reads ahead.

        Raises:
            RunError: it cannot be read, or not before other ranks give up on this one.
        """
        limit = data_limit_s()
        try:
            return ahead.result(None if math.isinf(limit) else limit)
        except TimeoutError:
            late = reader.late(limit)
            notes = [note for note in (self._line, late.place) if note]
            raise RunError(BAD_DATA, f"step {step + 1}: {late.message}", late.help, notes) from None

    @property
    def count(self) -> int | None:
        """The number of samples of an epoch of the plan's data; None where there is no end, or none that is known.

        Raises:
            RunError: the plan has no data, or it cannot be read.
        """
        return self._opened().count

    def beginning(self, step: int, count: int) -> dict[str, torch.Tensor]:
        """Return the first ``count`` samples of step ``step`` (from 0) of the plan's data, the same on every rank.

        Raises:
            RunError: the plan has no data, or it cannot be read.
        """
        reader, rows = self._opened(), range(count)
        with self._reading:
            samples = self._samples(lambda: reader.rows(self.position(step), rows), step, 0)
        return {name: samples[name] if self._batched[name] else samples[name][0] for name in self.types}

    def _opened(self) -> RowReader:
        if self._reader is None:
            self._closed = threading.Event()
            line = self._build.manifest["data"] or {}
            source = Closing(make_data(self._build), self._closed)
            workers = int(line.get("workers", 0))
            self._reader = RowReader(source, self.rows, self.batch, workers)
        return self._reader

    def close(self) -> None:
        """Stop reading ahead, without waiting for a sample that is being made."""
        self._closed.set()
        self._reader = self._ahead = None

    @cached_property
    def _wanted(self) -> dict[tuple[str, int], torch.Tensor]:
        """The rows of a batch that this rank needs of each input in each microbatch."""
        return {
            (name, index): index * type_.shape[0] + self._index(type_, 0)
            if self._batched[name]
            else torch.zeros(1).long()
            for name, type_ in self.types.items()
            for index in range(self._count)
        }

    @cached_property
    def rows(self) -> list[int]:
        """The rows of a batch that this rank needs of any input, in their order."""
        return sorted({int(row) for numbers in self._wanted.values() for row in numbers})

    def rows_of(self, name: str) -> torch.Tensor:
        """Return the rows of a batch that this rank has of an input, in the order of its microbatches."""
        every = [self._wanted[name, index] for index in range(self._count)]
        return torch.cat(every) if self._batched[name] else every[0]

    def local_batch(self, samples: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's ``local`` batch, from the samples of all rows that it needs.

        Raises:
            DataError: an input is missing.
        """
        if missing := [name for name in self.types if name not in samples]:
            held = ", ".join(f"`{name}`" for name in samples) or "nothing"
            raise DataError(f"samples hold {held}, and no `{missing[0]}`", "name their entries as the inputs")
        rows = torch.tensor(self.rows)
        batch = {name: samples[name][torch.searchsorted(rows, self.rows_of(name))] for name in self.types}
        return {name: value if self._batched[name] else value[0] for name, value in batch.items()}

    def tail_fault(self, count: int) -> str:
        """Return the reason why there can be no batch of ``count`` samples, fewer than a step takes, or ""."""
        ranges = self._build.template.ranges if self._build.template is not None else {}
        if BATCH not in ranges or count in ranges[BATCH].values:
            return "" if BATCH in ranges else self.tails.fault
        return f"the build was made for {sizes_text({BATCH: ranges[BATCH]})}"

    def _read(self, reader: RowReader, step: int, steps: int | None) -> HashedParts:
        """Return this rank's part of a step on the CPU; each sample is read once, also if several inputs need it."""
        rows, end = self.rows, None if steps is None else self.position(steps)
        with self._reading:
            samples = self._samples(lambda: reader(self.position(step), end), step, rows[0])
        parts: LocalParts = [{} for _ in range(self._count)]
        read: dict[str, list[torch.Tensor]] = {name: [] for name in self.types}
        for (name, index), numbers in self._wanted.items():
            type_ = self.types[name]
            at = torch.searchsorted(torch.tensor(rows), numbers)
            value = samples[name].index_select(0, at)
            value = value if self._batched[name] else value[0]
            self._check_numbers(name, value, [self._line] if self._line else [])
            read[name].append(value)
            parts[index][name] = self._cut_rest(value, type_, 1 if self._batched[name] else 0)
        hashed = self._build.manifest["data"]["form"] in OWN_CODE
        return HashedParts(parts, [int(digest(torch.cat(read[name]))) if hashed else 0 for name in self.types])

    def _samples(self, read: Callable[[], dict[str, torch.Tensor]], step: int, row: int) -> dict[str, torch.Tensor]:
        """Return the samples of a step that ``read`` reads, the first of them for a ``row`` of its batch. Inputs that
        no program needs may be missing: they are zeros.

        Raises:
            RunError: they cannot be read, or have other names, types or shapes.
        """
        notes = [self._line] if self._line else []
        try:
            samples = read()
        except DataError as error:
            raised = [note for note in (raised_at(error),) if note]
            at = f"{'step' if self._build.trains else 'batch'} {step + 1}"
            raise RunError(BAD_DATA, f"{at}: {error}", error.help, [*notes, *raised]) from error
        needed, count = self._build.manifest.get("needed", self.types), max(map(len, samples.values()), default=0)
        for name in self.types.keys() - samples.keys() - {*needed}:
            shape = self.types[name].shape[1:] if self._batched[name] else self.types[name].shape
            samples[name] = torch.zeros((), dtype=self.types[name].dtype).expand(count, *shape)
        if missing := [name for name in self.types if name not in samples]:
            held = ", ".join(f"`{name}`" for name in samples) or "nothing"
            help_ = f"name inputs as the data does: samples hold {held}"
            raise RunError(BAD_DATA, f"samples have no `{missing[0]}`", help_, notes)
        first = {name: value[0] for name, value in samples.items()}
        lines = [line for line in self.inputs if line["name"] in self.types]
        sizes = {name: SizeRange(value, value) for name, value in self._build.manifest["sizes"].items()}
        if wrong := sample_misfit(first, self.position(step) + row, lines, sizes):
            help_ = self._sizes_of(wrong[0], first[wrong[0]].shape) or MISFIT_HELP
            raise RunError(BAD_DATA, wrong[1], help_, notes)
        return samples

    def _index(self, type_: TensorType, dim: int) -> torch.Tensor:
        return dim_index(type_.shape[dim], dim, type_.placement, self._mesh, self._coordinates, None)

    def _cut_rest(self, value: torch.Tensor, type_: TensorType, first: int) -> torch.Tensor:
        """Cut a rank's rows along their dims from ``first`` on."""
        for dim in range(first, value.dim()):
            if type_.placement.splits(dim):
                value = value.index_select(dim, self._index(type_, dim))
        return value.contiguous()

    def _sizes_of(self, name: str, shape: Sequence[int]) -> str:
        """Return the advice how to run the build at a sample's sizes, or "" where it runs at these sizes now."""
        ranges = self._build.template.ranges if self._build.template is not None else {}
        dims = next(line["dims"] for line in self.inputs if line["name"] == name)
        dims = dims[self._batched[name] :]
        pairs = zip(dims, shape, strict=True) if len(dims) == len(shape) else ()
        sizes = {dim: size for dim, size in pairs if dim in ranges}
        if all(self._build.manifest["sizes"][dim] == size for dim, size in sizes.items()):
            return ""
        if not all(size in ranges[dim].values for dim, size in sizes.items()):
            return f"the build was made for {sizes_text({dim: ranges[dim] for dim in sizes})}"
        words = ",".join(f"{dim}={size}" for dim, size in sizes.items())
        return f"`parc run --sizes {words}` runs the build at the samples' sizes"

    def _check(self, name: str, value: Any, shape: tuple[int, ...], what: str) -> None:
        """Check an input's shape, dtype and numbers; ``what`` says for messages what it is of."""
        type_ = self.types[name]
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != type_.dtype:
            have = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            wanted = f"{type_.dtype} {list(shape)}".replace("torch.", "")
            help_ = f"the shape of {what} follows from the plan's `input` and `sizes` lines"
            if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
                help_ = f'give `batch["{name}"].to({type_.dtype})`, or change the type in the plan: `input {name} …`'
            raise RunError(BAD_DATA, f"`{name}` is {have.replace('torch.', '')}, not {wanted}", help_)
        self._check_numbers(name, value)

    def _check_numbers(self, name: str, value: torch.Tensor, notes: Sequence[str] = ()) -> None:
        """Check that indices of rows and classes are below their count: a split table would not notice."""
        message, help_ = self._bounds[name].fault(name, value) if name in self._bounds else ("", "")
        if message:
            raise RunError(BAD_DATA, message, help_, notes)


def input_types(programs: Mapping[str, Program]) -> dict[str, TensorType]:
    """Return the type of each input that the programs read, in one microbatch."""
    readers = [programs[action] for action in (FORWARD, COUNTING) if action in programs]
    return {name: value.type for program in readers for name, value in program.main.bound("input").items()}
