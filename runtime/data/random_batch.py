"""Random whole batches for a program: floats, indices below the count of the rows or classes that they name, and
offsets that rise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...compiler.layout.placement import TensorType
from ...compiler.ops.own_ops import NO_CLASS
from ...compiler.ops.rules import facts, has_rule
from ...compiler.program.program import Line, Program, Ref, Value, operator

NO_BOUND = 2**63 - 1
"""The bound of numbers that are no indices."""


class IndexBound(NamedTuple):
    """The number of rows or classes that an input's indices name, and the index that a loss ignores, if any. Where
    entries look up different tables, ``rows`` is a tensor that broadcasts against the input."""

    rows: int | torch.Tensor
    ignore: int | None = None

    @property
    def least(self) -> int:
        """The least number of rows or classes that an entry may name."""
        return self.rows if isinstance(self.rows, int) else int(self.rows.min())

    def of(self, value: torch.Tensor, most: bool = False) -> torch.Tensor:
        """Return the bound of each entry of a value: a whole input, some rows of it, or a sample. Along dims of another
        size the least bound counts, or the ``most``.

        >>> IndexBound(torch.tensor([[1000, 7]])).of(torch.zeros(3, 2)).tolist()
        [[1000, 7], [1000, 7], [1000, 7]]
        """
        if isinstance(self.rows, int):
            return torch.full((), self.rows, device=value.device).expand(value.shape)
        rows, one_of = self.rows.to(value.device), torch.amax if most else torch.amin
        rows = rows if rows.dim() <= value.dim() else rows[0]  # a sample has no dim of samples
        for dim in range(-rows.dim(), 0):
            if rows.shape[dim] not in (1, value.shape[dim]):
                rows = one_of(rows, dim, keepdim=True)
        return rows.expand(value.shape)

    def drawn(self, value: torch.Tensor) -> torch.Tensor:
        """Return the number below which each entry of a value is drawn at random: 2 for one that is no index."""
        rows = self.of(value)
        return torch.where(rows == NO_BOUND, 2, rows)

    def clamped(self, value: torch.Tensor) -> torch.Tensor:
        """Return numbers without the first and the last of their range, the ignored one apart."""
        rows = self.of(value)
        inner = torch.where(rows == NO_BOUND, value, value.clamp(1).minimum(rows - 2))
        return self._but_ignored(value, inner)

    def within(self, value: torch.Tensor) -> torch.Tensor:
        """Return numbers modulo the rows or classes that they name, the ignored one apart."""
        rows = self.of(value)
        return self._but_ignored(value, torch.where(rows == NO_BOUND, value, value % rows))

    def fault(self, name: str, value: torch.Tensor) -> tuple[str, str]:
        """Return the message about the first number of an input that names no row or class, and the advice; "" and ""
        if there is none."""
        rows = self.of(value, most=True)  # what may be right is not refused: a run looks at whole samples
        wrong = (rows != NO_BOUND) & ((value < 0) | (value >= rows))
        if self.ignore is not None:
            wrong &= value != self.ignore
        if not bool(wrong.any()):
            return "", ""
        bound, number = int(rows[wrong][0]), int(value[wrong][0])
        ignored = f", or {self.ignore} where the loss is to ignore it" if self.ignore is not None else ""
        if isinstance(self.rows, int):
            help_ = f"give numbers below {bound}{ignored}, or the model more rows or classes: 256 for `data bytes`"
            return f"`{name}` holds {number}, but the model knows 0 to {bound - 1}", help_
        at = ", ".join(map(str, wrong.nonzero()[0].tolist()))
        help_ = f"give numbers below {bound} there{ignored}, or the table more rows"
        return f"`{name}` holds {number} at [{at}], but the model knows 0 to {bound - 1} there", help_

    def _but_ignored(self, value: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        changed = changed.to(value.dtype)
        return changed if self.ignore is None else torch.where(value == self.ignore, value, changed)


def random_batch(reference: Program, microbatches: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Return whole inputs of each microbatch. Indices are below the count of rows or classes; another share of targets
    is ignored in each microbatch. What divides a loss is positive."""
    bounds, ends, positive = class_bounds(reference), _ends_of_offsets(reference), _divisors(reference)
    inputs, batches = inputs_of(reference), []
    for index in range(microbatches):
        batch = {}
        for name, value in inputs.items():
            bound = bounds.get(name, IndexBound(2))
            rows = bound.rows if name not in ends else ends[name] + 1
            batch[name] = _random_input(value.type, rows if isinstance(rows, int) else bound, generator)
            if name in ends and batch[name].dim():
                offsets = batch[name].sort(-1).values
                offsets[..., -1], offsets[..., 0] = ends[name], 0  # of all entries, the first and the last bag too
                batch[name] = offsets
            if name in positive:
                batch[name] = batch[name].abs() + 1
            if bound.ignore is not None:
                share = 0.1 + 0.5 * index / microbatches
                drop = torch.rand(value.type.shape, generator=generator) < share
                drop.view(-1)[[0, -1]] = False  # a loss may leave the first position of each sample out, or the last
                batch[name] = torch.where(drop, bound.ignore, batch[name])
        batches.append(batch)
    return batches


def inputs_of(reference: Program) -> dict[str, Value]:
    """Return the inputs that the functions of a captured graph read: those of its forward first, then those that are
    only counted."""
    counted = {name: value for count in reference.functions[:-1] for name, value in count.bound("input").items()}
    read = reference.main.bound("input")
    return {**read, **{name: value for name, value in counted.items() if name not in read}}


def _divisors(reference: Program) -> set[str]:
    """Return the inputs whose sums divide something, or count what divides a loss."""
    divisors = set[str]()
    for function in reference.functions:
        origin = {value.name: name for name, value in function.bound("input").items()}
        for line in function.lines:
            first, *others = line.uses or ("",)
            row = facts(line.op)
            if not others and first in origin and (row.keeps_values or row.casts or row.reduces == "sum"):
                origin.update((value.name, origin[first]) for value in line.made)
            if row.computes == "ratio" and isinstance(line.args[1], Ref):
                divisors.update(origin[name] for name in [line.args[1].name] if name in origin)
        divisors.update(origin[name] for key, name in function.returns if key.kind == "count" and name in origin)
    return divisors


def _random_input(type_: TensorType, bound: int | IndexBound, generator: torch.Generator) -> torch.Tensor:
    if type_.dtype.is_floating_point:
        return torch.randn(type_.shape, generator=generator, dtype=torch.float64)
    if type_.dtype is torch.bool:
        return torch.rand(type_.shape, generator=generator) < 0.5
    if isinstance(bound, int):
        return torch.randint(0, bound, type_.shape, generator=generator, dtype=type_.dtype)
    share = torch.rand(type_.shape, generator=generator, dtype=torch.float64)
    return (share * bound.drawn(share)).to(type_.dtype)


Box = tuple[slice, ...]
"""Slices of the dims of a tensor."""


class _Entries(NamedTuple):
    """The entries of an input that a value holds: the input's name, slices of its dims that hold them all, and a view
    of the input without memory, None where they are in an order that no view has."""

    name: str
    box: Box
    view: torch.Tensor | None


def _inputs_behind(program: Program) -> dict[str, _Entries]:
    """Return, for each value that holds entries of one input, these."""
    origin: dict[str, _Entries] = {}
    shapes = {name: value.type.shape for name, value in program.main.bound("input").items()}
    for name, value in program.main.bound("input").items():
        whole = torch.empty(shapes[name], device="meta")
        origin[value.name] = _Entries(name, _box(shapes[name], whole), whole)
    for line in program.main.lines:
        row, first = facts(line.op), line.args[0] if line.args else None
        if (row.keeps_values or row.casts) and isinstance(first, Ref) and first.name in origin:
            before = origin[first.name]
            for result, view in zip(line.results, _views(line, before.view), strict=True):
                box = before.box if view is None else _narrower(before.box, _box(shapes[before.name], view))
                if result is not None:
                    origin[result.name] = before._replace(view=view, box=box)
    return origin


def _narrower(one: Box, other: Box) -> Box:
    """Return along each dim the slice that has fewer entries, of two that both hold some."""
    pairs = zip(one, other, strict=True)
    return tuple(min(pair, key=lambda part: len(range(part.start, part.stop, part.step))) for pair in pairs)


def _views(line: Line, view: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Return the views that a line's results are, None for those in another order than any view."""
    row, none = facts(line.op), [None] * len(line.results)
    if view is None or row.casts or row.moves == "copy":
        return none if view is None else [view] * len(line.results)
    if row.storage != "view" or "as_strided" in line.op:  # strides are those of memory, which copies change
        return none
    try:
        results = operator(line.op)(view, *line.args[1:], **dict(line.kwargs))
    except RuntimeError:  # the operand was copied, so its own memory has other strides
        return none
    views = [results] if isinstance(results, torch.Tensor) else results
    memory = view.untyped_storage()._cdata  # a reshape may copy too
    return [each if each.untyped_storage()._cdata == memory else None for each in views]


def _box(shape: Sequence[int], view: torch.Tensor) -> Box:
    """Return slices of the dims of a tensor of a shape that hold all entries of a view of it.

    >>> x = torch.empty(4, 6, device="meta")
    >>> _box(x.shape, x[:, 1::2]), _box(x.shape, x[:, :5].flatten())
    ((slice(0, 4, 1), slice(1, 6, 2)), (slice(0, 4, 1), slice(0, 6, 1)))
    """
    whole = tuple(slice(0, size, 1) for size in shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = [view.storage_offset() // stride % size for stride, size in zip(strides, shape, strict=True)]
    last, steps = list(first), [0] * len(shape)
    for stride, size in zip(view.stride(), view.shape, strict=True):
        if stride and size > 1:
            dim = next(dim for dim, below in enumerate(strides) if below <= stride)
            step = stride // strides[dim]
            last[dim], steps[dim] = last[dim] + step * (size - 1), math.gcd(steps[dim], step)
            if stride % strides[dim] or last[dim] >= shape[dim]:  # a diagonal, or several dims that became one
                return whole
    return tuple(slice(at, end + 1, step or 1) for at, end, step in zip(first, last, steps, strict=True))


def _ends_of_offsets(program: Program) -> Mapping[str, int]:
    """Return, for each input of offsets, the count of the entries whose parts they begin."""
    values, origin = program.main.values(), _inputs_behind(program)
    ends = dict[str, int]()
    for line in program.main.lines:
        at = facts(line.op).rises_at
        entries, offsets = (line.args[0], line.args[at]) if at is not None else (None, None)
        if isinstance(entries, Ref) and isinstance(offsets, Ref) and offsets.name in origin:
            ends[origin[offsets.name].name] = values[entries.name].type.shape[-1]
    return ends


def class_bounds(program: Program) -> dict[str, IndexBound]:
    """Return the bound of each input of indices. An input that indexes a tensor too, as in
    ``weight[target] * cross_entropy(output, target)``, has none to ignore."""
    main, origin = program.main, _inputs_behind(program)
    values, inputs = main.values(), main.bound("input")
    rows: dict[str, torch.Tensor] = {}
    ignored: dict[str, int | None] = {}
    indices = set[str]()
    for line in main.lines:
        names = [item.name if isinstance(item, Ref) else "" for item in line.args]
        row = facts(line.op)
        if row.counted is not None and names[row.named_at] in origin:
            table, dim = row.counted
            name, box, _ = origin[names[row.named_at]]
            bounds = _bounds(inputs[name].type.shape, box, values[names[table]].type.shape[dim])
            rows[name] = torch.minimum(rows[name], bounds) if name in rows else bounds
            ignored[name] = ignored.get(name) if row.ignored_at is None else line.args[row.ignored_at]
            if ignored[name] == NO_CLASS:
                indices.add(name)
        if row.ignored_at is None and (row.moves in ("index", "scatter") or not has_rule(line.op)):
            indices.update(origin[name].name for name in line.uses if name in origin)
    return {name: IndexBound(_alike(rows[name]), None if name in indices else ignored[name]) for name in rows}


def _bounds(shape: Sequence[int], box: Box, size: int) -> torch.Tensor:
    """Return the bounds of an input of which some entries are below a size: of one entry along each dim that has them
    all, and along the first, as ranks read other samples than the whole batch's."""
    whole = [not dim or part == slice(0, length, 1) for dim, (part, length) in enumerate(zip(box, shape, strict=True))]
    bounds = torch.full([1 if all_ else length for all_, length in zip(whole, shape, strict=True)], NO_BOUND)
    bounds[tuple(slice(None) if all_ else part for all_, part in zip(whole, box, strict=True))] = size
    return bounds


def _alike(bounds: torch.Tensor) -> int | torch.Tensor:
    first = bounds.flatten()[0]
    return int(first) if bool((bounds == first).all()) else bounds
