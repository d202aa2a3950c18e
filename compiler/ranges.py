"""Ranges: local sizes are whole numbers for all sizes that a plan declares, or the constraint that must hold.

The placed graph is taken at a few sizes, and each dim is fitted by a polynomial in the sizes' multiples: capture with
symbolic sizes would bring torch's guards into the proof, while a fit that a further sample confirms brings nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import sympy

from .directives.sizes import SizeRange
from .mesh import Mesh
from .placement import Placement, Shape, Split
from .shapes import Size, quotient, tidy

_POINTS = 4  # samples of one size: three determine a polynomial of degree two, one confirms it
_MOST_CASES = 1 << 16


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """One value of the placed graph at one choice of sizes; ``line`` is the plan's line that last placed it."""

    name: str
    op: str
    module: str
    line: int
    shape: Shape
    placement: Placement


@dataclass(frozen=True, slots=True)
class Sample:
    """All values of the placed graph, in order, at one choice of the plan's sizes."""

    sizes: Mapping[str, int]
    values: tuple[PlacedValue, ...]


@dataclass(frozen=True, slots=True)
class ShapeFault:
    """A local size that is not a whole number for every declared size, or that cannot be known to be."""

    value: str
    module: str
    line: int
    message: str

    def __str__(self) -> str:
        where = f" of `{self.module}`" if self.module else ""
        return f"`{self.value}`{where}: {self.message}" + (f" (placed by line {self.line})" if self.line else "")


def sample_points(ranges: Mapping[str, SizeRange]) -> list[dict[str, int]]:
    """The choices of sizes at which ``prove_shapes`` needs the placed graph: the largest sizes first, then each range
    by itself, then all of them together."""
    largest = {name: size.high for name, size in ranges.items()}
    points = [largest]
    for name, size in ranges.items():
        points += [{**largest, name: other} for other in _others(size)]
    moving = [name for name, size in ranges.items() if not size.fixed]
    if len(moving) > 1:
        points.append({**largest, **{name: _others(ranges[name])[0] for name in moving}})
    return points


def _others(size: SizeRange) -> list[int]:
    """Sizes of a range to look at beside its largest; all of them if they are few."""
    return list(range(size.low, size.high, size.step))[: _POINTS - 1]


def prove_shapes(samples: Sequence[Sample], ranges: Mapping[str, SizeRange], mesh: Mesh) -> list[ShapeFault]:
    """What is wrong with the local sizes of the placed graph over all declared sizes: nothing, if they are proved.

    ``samples`` are the graph at ``sample_points(ranges)``, in that order. A fixed size is a range of one.
    """
    first = samples[0]
    for sample in samples[1:]:
        fault = _other_graph(first, sample)
        if fault is not None:
            return [fault]
    prover = _Prover(samples, ranges, mesh)
    faults = [fault for index in range(len(first.values)) for fault in prover.check(index)]
    alike: dict[tuple[int, str], ShapeFault] = {}
    for fault in faults:  # one line often places many values by one constraint
        alike.setdefault((fault.line, fault.message), fault)
    return list(alike.values())


def _other_graph(first: Sample, other: Sample) -> ShapeFault | None:
    """Where the graph at other sizes is not the same graph."""
    for here, there in itertools.zip_longest(first.values, other.values):
        at = f"at {_sizes(other.sizes)}, unlike at {_sizes(first.sizes)}"
        if here is None or there is None or (here.op, len(here.shape)) != (there.op, len(there.shape)):
            value = here or there
            return ShapeFault(value.name, value.module, value.line, f"the model computes something else {at}")
        for (axis, kind), (_, kind_) in zip(here.placement.items(), there.placement.items(), strict=True):
            if getattr(kind, "dim", kind) != getattr(kind_, "dim", kind_):
                return ShapeFault(here.name, here.module, here.line, f"it is {kind_} over `{axis}` {at}: {kind}")
    return None


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _outer(axis: str, value: PlacedValue) -> int:
    kind = value.placement[axis]
    assert isinstance(kind, Split) and isinstance(kind.outer, int)
    return kind.outer


def _size(dim: int, value: PlacedValue) -> int:
    return value.shape[dim]


class _Prover:
    """Fits sizes by polynomials in ``t``, where a declared size is ``step * t``, and divides them."""

    def __init__(self, samples: Sequence[Sample], ranges: Mapping[str, SizeRange], mesh: Mesh) -> None:
        self.samples, self.ranges, self.mesh = samples, ranges, mesh
        self.symbols = {name: sympy.Symbol(name, positive=True, integer=True) for name in ranges}
        self.moving = [name for name, size in ranges.items() if not size.fixed]

    def check(self, index: int) -> Iterator[ShapeFault]:
        """Every dim of one value: each split nests in the last and divides the dim."""
        value = self.samples[0].values[index]
        for dim in range(len(value.shape)):
            splits = value.placement.splits(dim)
            if not splits:
                continue
            if any(not isinstance(outer, int) for outer, _ in splits):  # unequal parts have sizes that are numbers
                values = [sample.values[index] for sample in self.samples]
                if len({(v.shape[dim], tuple(v.placement.splits(dim))) for v in values}) > 1:
                    message = f"dim {dim}, split over `{splits[0][1]}`, is in unequal parts that differ with the sizes"
                    yield ShapeFault(value.name, value.module, value.line, message)
                continue
            before: Size = 1
            for _, axis in splits:
                outer = self.fit(partial(_outer, axis), index)
                yield from self.divides(value, dim, axis, outer, before)
                before = None if outer is None else tidy(outer * self.mesh.size(axis))
            yield from self.divides(value, dim, splits[-1][1], self.fit(partial(_size, dim), index), before)

    def fit(self, read: Callable[[PlacedValue], int], index: int) -> Size | None:
        """The polynomial of one number of a value; None where no such polynomial meets every sample."""
        numbers = [read(sample.values[index]) for sample in self.samples]
        if len(set(numbers)) == 1:
            return numbers[0]
        base, factors = numbers[0], []
        for name in self.moving:
            pairs = [
                (sample.sizes[name] // self.ranges[name].step, number)
                for sample, number in zip(self.samples, numbers, strict=True)
                if all(sample.sizes[n] == self.samples[0].sizes[n] for n in self.ranges if n != name)
            ]
            unique = sorted(set(pairs))
            known = unique[: _POINTS - 1] if len(unique) >= _POINTS else unique
            symbol = self.symbols[name]
            factors.append(sympy.expand(sympy.interpolate(known, symbol)))
        together = sympy.prod(factors) / sympy.Integer(base) ** (len(factors) - 1)
        apart = sum(factors) - base * (len(factors) - 1)
        for candidate in (together, apart):
            found = sympy.expand(candidate)
            if all(found.subs(self.at(s.sizes)) == n for s, n in zip(self.samples, numbers, strict=True)):
                return found
        return None

    def at(self, sizes: Mapping[str, int]) -> dict[sympy.Symbol, int]:
        """The symbols' values at some sizes."""
        return {self.symbols[name]: sizes[name] // self.ranges[name].step for name in self.moving}

    def divides(
        self, value: PlacedValue, dim: int, axis: str, size: Size | None, by: Size | None
    ) -> Iterator[ShapeFault]:
        """A fault unless ``by`` divides ``size`` for all declared sizes."""

        def fault(message: str) -> ShapeFault:
            return ShapeFault(value.name, value.module, value.line, f"dim {dim}, split over `{axis}`, {message}")

        if size is None or by is None:
            yield fault("is no polynomial of the declared sizes, so nothing is known of its parts")
            return
        if quotient(size, by) is not None:
            return
        numerator, denominator = sympy.fraction(sympy.together(sympy.cancel(sympy.sympify(size) / by)))
        if not denominator.is_Integer:
            yield fault(f"has {self.text(size)} entries, of which nothing shows that {self.text(by)} divides them")
            return
        if self.integral(numerator, int(denominator)):
            return
        ways = [self.constraint(numerator, int(denominator), name) for name in self.moving]
        found = " or ".join(way for way in ways if way)
        yield fault(f"has {self.text(size)} entries, which do not divide by {self.text(by)}: "
                    + (found or "choose other sizes, or split another dim"))  # fmt: skip

    def text(self, size: Size) -> str:
        """A size in the plan's own names."""
        whole = sympy.sympify(size)
        names = {self.symbols[name]: self.symbols[name] / self.ranges[name].step for name in self.moving}
        return str(tidy(whole.subs(names, simultaneous=True)))

    def integral(self, numerator: sympy.Expr, denominator: int, multiples: Mapping[str, int] | None = None) -> bool:
        """Whether the quotient is a whole number for all declared sizes: every coefficient divides; or, since residues
        repeat, every residue of the sizes does."""
        used = [name for name in self.moving if self.symbols[name] in numerator.free_symbols]
        polynomial = sympy.Poly(numerator, *(self.symbols[name] for name in used)) if used else None
        if polynomial is None:
            return int(numerator) % denominator == 0
        if any(not coefficient.is_Integer for coefficient in polynomial.coeffs()):
            scale = math.lcm(*(int(coefficient.q) for coefficient in polynomial.coeffs()))
            return self.integral(sympy.expand(numerator * scale), denominator * scale, multiples)
        if all(int(coefficient) % denominator == 0 for coefficient in polynomial.coeffs()):
            return True
        cases = [self.residues(name, denominator, (multiples or {}).get(name, 1)) for name in used]
        if math.prod(map(len, cases)) > _MOST_CASES:
            return False
        return all(int(polynomial.eval(case)) % denominator == 0 for case in itertools.product(*cases))

    def residues(self, name: str, modulus: int, multiple: int) -> range:
        """Values of ``t`` that stand for all declared ones."""
        size = self.ranges[name]
        low, high = -(-size.low // size.step // multiple) * multiple, size.high // size.step
        low += 0 if low * size.step >= size.low else multiple
        return range(low, min(high, low + (modulus - 1) * multiple) + 1, multiple)

    def constraint(self, numerator: sympy.Expr, denominator: int, name: str) -> str:
        """``S must be a multiple of 8``, if that is enough."""
        if self.symbols[name] not in numerator.free_symbols:
            return ""
        for multiple in range(2, denominator + 1):
            if denominator % multiple == 0 and self.integral(numerator, denominator, {name: multiple}):
                return f"{name} must be a multiple of {multiple * self.ranges[name].step}"
        return ""
