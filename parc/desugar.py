"""Plans in the language's primitives: every placement as ``shard`` or ``replicate`` of concrete names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import TensorType
from parc.compiler.layout.stretches import terms
from parc.compiler.plan.layouts import KEEP_GATHERED
from parc.compiler.program.actions import COUNTING, FORWARD
from parc.compiling.compiled import Compiled
from parc.compiling.fitted import Fitted
from parc.grammar.format import VERB_WIDTH, format_statement
from parc.grammar.source import Span
from parc.report import seen_from

PLACEMENTS = ("column", "replicate", "row", "sequence", "shard", "vocab")


def desugar(compiled: Compiled) -> str:
    """Return the plan's canonical text, with a ``shard`` or ``replicate`` line in place of every line that places
    something.

    Each tensor is in place of the first line that places it, with its placement in the build on every axis.
    """
    types = _types(compiled)
    placed: dict[int, list[str]] = {}
    seen: set[str] = set()
    for seed in compiled.resolved.seeds:
        at = _statement(compiled, seed.span)
        if seed.value not in seen and compiled.plan.statements[at].verb.text in PLACEMENTS:
            seen.add(seed.value)
            placed.setdefault(at, []).append(seed.value)
    gathered = {seed.span.root.line for seed in compiled.resolved.seeds if seed.gathered}
    lines: list[str] = []
    fit_line = compiled.fitted.line.line if compiled.fitted is not None else None
    for index, statement in enumerate(compiled.plan.statements):
        if statement.verb.text not in PLACEMENTS:
            fitted = compiled.fitted if statement.span.root.line == fit_line else None
            lines += [format_statement(statement)] if fitted is None else _chosen(compiled, fitted)
            continue
        layouts: dict[str, list[str]] = {}
        for name in (name for name in placed.get(index, ()) if name in types):  # programs read it
            mesh = seen_from(name, compiled.plan, compiled.mesh)
            layouts.setdefault(layout(types[name], mesh, _padded(compiled, name)), []).append(name)
        keeps = statement.span.root.line in gathered
        for text, names in layouts.items():
            shared = f"{'shard' if text else 'replicate':{VERB_WIDTH}} {', '.join(names)} {text}".rstrip()
            lines.append(f"{shared} {KEEP_GATHERED}" if keeps and text else shared)
    return "\n".join(lines) + "\n"


def _chosen(compiled: Compiled, fitted: Fitted) -> Iterator[str]:
    """Yield the `recompute` lines that the choice of a `fit` line stands for."""
    for line in compiled.resolved.recompute:
        if line.line == fitted.line.line:
            keep = f" keep {', '.join(sorted(line.keep))}" if line.keep else ""
            yield f"{'recompute':{VERB_WIDTH}} {', '.join(line.modules)}{keep}"


def layout(type_: TensorType, mesh: Mesh, padded: Mapping[int, int] = MappingProxyType({})) -> str:
    """Return the layout of a tensor as a plan writes it, or "" if it is whole.

    ``padded`` has the padded dims, each with the entries of a group that stay together.
    """
    if not type_.placement.split_axes():
        return ""
    return f"[{', '.join(_dim(type_, dim, mesh, padded) for dim in range(len(type_.shape)))}]"


def _padded(compiled: Compiled, name: str) -> dict[int, int]:
    """Return the padded dims of a parameter, with the number of entries that stay together in each."""
    seeds = [seed for seed in compiled.resolved.seeds if seed.value == name]
    return {pad.dim: max(seed.inner for seed in seeds if seed.dim == pad.dim)
            for pad in compiled.resolved.pads.get(name, ())}  # fmt: skip


def _dim(type_: TensorType, dim: int, mesh: Mesh, padded: Mapping[int, int]) -> str:
    """Return the layout of one dim: with sub-dims if a split is inside it, with ``+`` if parts are unequal."""
    stretches = terms(type_.shape[dim], type_.placement.splits(dim))
    if len(stretches) > 1:
        return f"({' + '.join(' '.join(_factors(size, splits, mesh)) for size, splits in stretches)})"
    factors = list(_factors(None, stretches[0][1], mesh))
    if padded.get(dim, 1) > 1:
        factors.append(str(padded[dim]))
    text = factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
    return f"{text} pad" if dim in padded else text


def _factors(size: int | None, splits: Sequence[tuple[int, str]], mesh: Mesh) -> Iterator[str]:
    """Yield sub-dims, major first; the last one has a size if the ``size`` of the dim is given."""
    axes: list[str] = []
    start = inside = 1  # the product of the sub-dims before this one, and with the ranks that split this one
    for outer, axis in splits:
        if outer != inside:
            yield _factor(axes, outer // start)
            axes, start, inside = [], outer, outer
        axes.append(next((name for name in mesh.seen if axis in mesh.parts(name)), mesh.owner(axis)))
        inside *= mesh.size(axis)
    yield _factor(axes, None if size is None else size // start)


def _factor(axes: list[str], size: int | None) -> str:
    if not axes:
        return "_" if size is None else str(size)
    return "/".join(["_", *dict.fromkeys(axes)]) + (f"={size}" if size is not None else "")


def _types(compiled: Compiled) -> dict[str, TensorType]:
    """Return the types, and so the placements, of all parameters, inputs and placed values inside the model."""
    types = {**compiled.build.types, **compiled.built.sites}
    sequences = [part for line in compiled.plan.context for part in compiled.mesh.parts(line.axis.text)]
    for action in (COUNTING, FORWARD):
        if action in compiled.build.programs:
            inputs = compiled.build.programs[action].main.bound("input")
            types |= {name: _without(value.type, sequences) for name, value in inputs.items()}
    return types


def _without(type_: TensorType, axes: Sequence[str]) -> TensorType:
    """Return a type with these axes unsplit: other lines of the plan split it over them."""
    return replace(type_, placement=type_.placement.replace(dict.fromkeys(axes, "I")))


def _statement(compiled: Compiled, span: Span) -> int:
    """Return the number of the statement that contains a span."""
    return next(
        index
        for index, statement in enumerate(compiled.plan.statements)
        if statement.span.source == span.source and statement.span.start <= span.start < statement.span.end
    )
