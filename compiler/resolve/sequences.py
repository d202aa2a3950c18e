"""Sequences: the splits of values between modules by ``sequence`` lines, and of inputs by ``context`` lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ...grammar.codes_plan import NO_SEQUENCE, NOT_TENSOR_PARALLEL, UNEVEN_SHARD
from ...grammar.diagnostics import Diagnostic, Label
from ...grammar.nearest import listed
from ...grammar.source import Span
from ...grammar.syntax import Word
from ..layout.stretches import Outer, count, inside, zigzag
from ..plan.directives.sequence import Sequence
from ..plan.layouts import multiples
from ..plan.plan import Plan
from ..sizes.size_range import BATCH
from .names import InnerValue, PlanNames, find_modules
from .seeds import PlacementSeed, Seeds


def sequence_seeds(
    line: Sequence, plan: Plan, names: PlanNames, split: Collection[PlacementSeed]
) -> Iterator[PlacementSeed | Diagnostic]:
    """Yield the splits of what a line's modules read and return, or the errors. ``split`` has the splits of other
    lines."""
    if line.idle:
        return
    axis, uneven = line.axis.text, False
    ranks = plan.ranks(axis)
    why = f"the {ranks} ranks of `{axis}`"
    for word in line.where:
        modules = find_modules(word, names)
        if isinstance(modules, Diagnostic):
            yield modules
            continue
        for module in modules:
            sites = [site for kind in ("in", "out") for site in names.sites().named.get(f"{kind}({module})", ())]
            placed = {site: places for site in sites if (places := _sequence_dims(site, line, plan))}
            if not placed and not names.smaller:
                yield _no_sequence(line, module, word, plan, sites)
            elif not _split_inside(module, axis, split) and ranks > 1 and not names.smaller:
                yield _no_tensor_parallelism(line, module, word, split)
                return
            for name in sorted({name for places in placed.values() for name, _, _ in places}):
                if not uneven and (error := _uneven(plan, name, axis, ranks, why, line.axis.span)) is not None:
                    uneven = True
                    yield error
            for site, places in placed.items() if not uneven else ():
                if len(places) == 1:  # scores of attention have two
                    name, dim, outer = places[0]
                    inner = _inside_others(name, outer, axis, plan, split)
                    yield PlacementSeed(site.name, axis, dim, inner, word.span, fixed=False, gathered=line.gathered)


def _sequence_dims(site: InnerValue, line: Sequence, plan: Plan) -> list[tuple[str, int, Outer]]:
    wanted = line.dim.text if line.dim is not None else None
    return [place for place in site.sizes(plan) if place[0] == wanted or (wanted is None and place[0] != BATCH)]


def _inside_others(name: str, outer: Outer, axis: str, plan: Plan, split: Collection[PlacementSeed]) -> Outer:
    """Return the outer parts of a sequence inside all splits of it over other axes."""
    dims = {batch.name: batch.dims for batch in plan.inputs}
    others = [seed for seed in split if seed.dim is not None and seed.axis != axis and plan.ranks(seed.axis) > 1
              and seed.value in dims and dims[seed.value][seed.dim] == name]  # fmt: skip
    last = max(others, key=lambda seed: count(seed.outer), default=None)
    if last is None or not isinstance(outer, int):
        return outer
    parts = inside(last.outer, plan.ranks(last.axis))
    return outer * parts if isinstance(parts, int) else outer


def _split_inside(module: str, axis: str, split: Collection[PlacementSeed]) -> bool:
    return any(
        seed.axis == axis and seed.dim is not None and (not module or seed.value.startswith(f"{module}."))
        for seed in split
    )


def _uneven(plan: Plan, name: str, axis: str, unit: int, why: str, span: Span) -> Diagnostic | None:
    """Return the error of a length that ``unit`` does not divide, which ``why`` puts into words."""
    size = plan.sizes[name]
    if size.divisor % unit == 0:
        return None
    what = f"`{name}` is {size.divisor}" if size.fixed else f"`{name}` has steps of {size.divisor}"
    related = (Label(plan.mesh_spans[axis], "declared here"),)
    help_ = f"choose a multiple of {unit}, such as {' or '.join(map(str, multiples(size.divisor, unit)))}"
    return Diagnostic(UNEVEN_SHARD, f"{what}, which does not divide by {why}", Label(span), related, help=help_)


def _no_sequence(line: Sequence, module: str, word: Word, plan: Plan, sites: list[InnerValue]) -> Diagnostic:
    """Return the error of a module whose values have no sequence dim."""
    dims = {dim for batch in plan.inputs for dim in batch.dims if isinstance(dim, str)} - {BATCH}
    called = module or "the model"
    wanted = f"the dim `{line.dim.text}`" if line.dim is not None else f"a dim {listed(sorted(dims), 'or')}"
    message = f"nothing that `{called}` reads or returns has {wanted} of the inputs"
    help_ = "name blocks that compute with sequences, as `model.layers.*`"
    if not dims:
        message = f"`{called}` has no sequence: the inputs have no named dim beside `{BATCH}`"
        help_ = "name the dim in the `input` and `sizes` lines, as `input tokens int64 [B, S]`"
    shapes = listed([f"`{site.name}` is {list(site.shape)}" for site in sites[:3]])
    return Diagnostic(NO_SEQUENCE, message, Label(word.span, shapes), help=help_)


def _no_tensor_parallelism(line: Sequence, module: str, word: Word, split: Collection[PlacementSeed]) -> Diagnostic:
    """Return the error of a module of which the line's axis splits no weight."""
    axis = line.axis.text
    others = sorted({seed.axis for seed in split if seed.dim is not None and seed.value.startswith(f"{module}.")})
    message = f"no line splits a weight of `{module or 'the model'}` over `{axis}`"
    help_ = f"split the weights by `column` and `row` lines over `{axis}`, or name an axis that splits them"
    if others:
        help_ = f"name {listed(others, 'or')}, which splits them, or split them over `{axis}` too"
    notes = ("every product would work on a part of each sequence, with whole weights",)
    return Diagnostic(NOT_TENSOR_PARALLEL, message, Label(word.span), (Label(line.axis.span, "over this axis"),),
                      help=help_, notes=notes)  # fmt: skip


# ---- context: inputs, split along a sequence


def split_inputs(plan: Plan, seeds: Seeds) -> tuple[dict[str, set[str]], list[Diagnostic]]:
    """Add the splits of ``context`` lines to the seeds. Return their axes for each input, which a layout may then leave
    out, and the errors."""
    axes: dict[str, set[str]] = {}
    errors: list[Diagnostic] = []
    for result in _seeds_of(plan):
        error = result if isinstance(result, Diagnostic) else seeds.add(result)
        if error is not None:
            errors.append(error)
        elif isinstance(result, PlacementSeed):
            axes.setdefault(result.value, set()).add(result.axis)
    return axes, errors


def _seeds_of(plan: Plan) -> Iterator[PlacementSeed | Diagnostic]:
    """Yield the splits of inputs along the sequences of ``context`` lines, or the error of a length that does not
    divide."""
    position: dict[str, int] = {}  # the parts into which earlier lines cut a sequence
    for line in plan.context:
        axis, name, halves = line.axis.text, line.dim.text, 2 if line.method == "zigzag" else 1
        outer = position.get(name, 1) * halves
        position[name] = unit = outer * plan.mesh.size(axis)
        why = f"{unit}: {f'{halves} parts' if halves > 1 else 'a part'} for each rank"
        if plan.mesh.size(axis) > 1 and (error := _uneven(plan, name, axis, unit, why, line.dim.span)) is not None:
            yield error
            continue
        dealt = zigzag(outer) if halves > 1 else outer
        for batch in plan.inputs:
            for dim in (at for at, called in enumerate(batch.dims) if called == name):
                yield PlacementSeed(batch.name, axis, dim, dealt, line.span, fixed=False)
