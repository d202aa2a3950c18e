"""Random whole batches for a program: floats, indices below the count of the rows or classes that they name, and
offsets that rise."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...compiler.layout.placement import TensorType
from ...compiler.ops.own_ops import NO_CLASS
from ...compiler.ops.rules import facts, has_rule
from ...compiler.program.program import Program, Ref, Value


def random_batch(reference: Program, microbatches: int, generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Return whole inputs of each microbatch. Indices are below the count of rows or classes; another share of targets
    is ignored in each microbatch. What divides a loss is positive."""
    bounds, ends, positive = class_bounds(reference), _ends_of_offsets(reference), _divisors(reference)
    inputs, batches = inputs_of(reference), []
    for index in range(microbatches):
        batch = {}
        for name, value in inputs.items():
            bound, ignore = bounds.get(name, (2, None))
            batch[name] = _random_input(value.type, ends.get(name, bound - 1) + 1, generator)
            if name in ends and batch[name].dim():
                offsets = batch[name].sort(-1).values
                offsets[..., -1], offsets[..., 0] = ends[name], 0  # of all entries, the first and the last bag too
                batch[name] = offsets
            if name in positive:
                batch[name] = batch[name].abs() + 1
            if ignore is not None:
                share = 0.1 + 0.5 * index / microbatches
                drop = torch.rand(value.type.shape, generator=generator) < share
                drop.view(-1)[[0, -1]] = False  # a loss may leave the first position of each sample out, or the last
                batch[name] = torch.where(drop, ignore, batch[name])
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


def _random_input(type_: TensorType, bound: int, generator: torch.Generator) -> torch.Tensor:
    if type_.dtype.is_floating_point:
        return torch.randn(type_.shape, generator=generator, dtype=torch.float64)
    if type_.dtype is torch.bool:
        return torch.rand(type_.shape, generator=generator) < 0.5
    return torch.randint(0, bound, type_.shape, generator=generator, dtype=type_.dtype)


def beyond(name: str, value: torch.Tensor, bound: int, ignore: int | None) -> str:
    """Return the message about the first number of an input that names none of the model's ``bound`` rows or classes;
    "" if there is none."""
    wrong = (value < 0) | (value >= bound)
    if ignore is not None:
        wrong &= value != ignore
    return f"`{name}` holds {int(value[wrong][0])}, but the model knows 0 to {bound - 1}" if bool(wrong.any()) else ""


def beyond_help(bound: int, ignore: int | None) -> str:
    """Return the advice for a number that names no row or class."""
    ignored = f", or {ignore} where the loss is to ignore it" if ignore is not None else ""
    return f"give numbers below {bound}{ignored}, or the model more rows or classes: 256 for `data bytes`"


def _inputs_behind(program: Program) -> dict[str, str]:
    """Return, for each value that holds entries of one input, that input's name."""
    origin = {value.name: name for name, value in program.main.bound("input").items()}
    for line in program.main.lines:
        row, first = facts(line.op), line.args[0] if line.args else None
        moved = row.keeps_values or row.casts
        if moved and isinstance(first, Ref) and first.name in origin and line.results[0] is not None:
            origin[line.results[0].name] = origin[first.name]
    return origin


def _ends_of_offsets(program: Program) -> Mapping[str, int]:
    """Return, for each input of offsets, the count of the entries whose parts they begin."""
    values, origin = program.main.values(), _inputs_behind(program)
    ends = dict[str, int]()
    for line in program.main.lines:
        at = facts(line.op).rises_at
        entries, offsets = (line.args[0], line.args[at]) if at is not None else (None, None)
        if isinstance(entries, Ref) and isinstance(offsets, Ref) and offsets.name in origin:
            ends[origin[offsets.name]] = values[entries.name].type.shape[-1]
    return ends


def class_bounds(program: Program) -> dict[str, tuple[int, int | None]]:
    """Return, for each input of indices, the count of rows or classes, and the index that a loss ignores, if any. An
    input that indexes a tensor too, as in ``weight[target] * cross_entropy(output, target)``, has none to ignore."""
    main = program.main
    values = main.values()
    origin = _inputs_behind(program)
    bounds: dict[str, tuple[int, int | None]] = {}
    indices = set[str]()
    for line in main.lines:
        names = [item.name if isinstance(item, Ref) else "" for item in line.args]
        row = facts(line.op)
        if row.counted is not None and names[row.named_at] in origin:
            table, dim = row.counted
            name, size = origin[names[row.named_at]], values[names[table]].type.shape[dim]
            bound, ignore = bounds.get(name, (size, None))
            ignore = ignore if row.ignored_at is None else line.args[row.ignored_at]
            bounds[name] = (min(bound, size), ignore)
            if ignore == NO_CLASS:
                indices.add(name)
        if row.ignored_at is None and (row.moves in ("index", "scatter") or not has_rule(line.op)):
            indices.update(origin[name] for name in line.uses if name in origin)
    return {name: (bound, None if name in indices else ignore) for name, (bound, ignore) in bounds.items()}
