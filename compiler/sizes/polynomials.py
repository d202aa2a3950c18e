"""Polynomials of the sizes of a ranged plan, in exact arithmetic: fitted to numbers, and proved to be whole numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from operator import mul

from .size_range import SizeRange

Sizes = Mapping[str, int]
Ranges = Mapping[str, SizeRange]
Monomial = tuple[tuple[str, int], ...]
"""Names with their powers, sorted by name; the empty one is 1."""

_POWER = 3  # the highest power of one size in a fitted polynomial
_DEGREE = 4  # and the highest sum of powers of one term
_MOST_TERMS = 4
_MOST_SAMPLES = 8
_MOST_CASES = 1 << 16
_TERM = re.compile(r"([+-]?)(\d*)\*?((?:[A-Za-z_]\w*(?:\*\*\d+)?)?(?:\*[A-Za-z_]\w*(?:\*\*\d+)?)*)(?:/(\d+))?")


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A polynomial of sizes with rational coefficients; prints as ``B*S/2``, ``3*S**2-S+1``, in Python's syntax."""

    terms: tuple[tuple[Monomial, Fraction], ...]
    """The terms by falling degree, then by names."""

    @classmethod
    def of(cls, terms: Mapping[Monomial, Fraction]) -> Polynomial:
        """Return the polynomial with these coefficients."""
        kept = [(monomial, factor) for monomial, factor in terms.items() if factor]
        return cls(tuple(sorted(kept, key=lambda term: (-sum(power for _, power in term[0]), term[0]))))

    @classmethod
    def parse(cls, text: str) -> Polynomial:
        """Read the text of ``str``.

        Raises:
            ValueError: the text is not exactly one of ``str``.
        """
        terms: dict[Monomial, Fraction] = {}
        at = 0
        while at < len(text):
            match = _TERM.match(text, at)
            if match is None or match.end() == at:
                break
            sign, number, names, below = match.groups()
            powers = [word.partition("**") for word in re.split(r"(?<!\*)\*(?!\*)", names) if word]
            monomial = tuple(sorted({name: int(power or 1) for name, _, power in powers if power != "0"}.items()))
            terms[monomial] = Fraction(int(f"{sign}{number or 1}"), int(below or 1) or 1)
            at = match.end()
        polynomial = cls.of(terms)
        if str(polynomial) != text:
            raise ValueError(f"`{text}` is no polynomial of sizes such as `B*S/2`")
        return polynomial

    def __str__(self) -> str:
        words = []
        for monomial, factor in self.terms:
            names = "*".join(name if power == 1 else f"{name}**{power}" for name, power in monomial)
            above = abs(factor.numerator)
            head = "*".join(word for word in (str(above) if above != 1 or not names else "", names) if word)
            below = "" if factor.denominator == 1 else f"/{factor.denominator}"
            words.append(f"{'-' if factor < 0 else '+'}{head}{below}")
        return "".join(words).removeprefix("+") or "0"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for monomial, _ in self.terms for name, _ in monomial)

    def times(self, number: int) -> Polynomial:
        return Polynomial(tuple((monomial, number * factor) for monomial, factor in self.terms))

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: dict[Monomial, Fraction] = {}
        for (one, factor), (two, more) in itertools.product(self.terms, other.terms):
            monomial = tuple(sorted((Counter(dict(one)) + Counter(dict(two))).items()))
            terms[monomial] = terms.get(monomial, Fraction(0)) + factor * more
        return Polynomial.of(terms)

    def __sub__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, factor in other.terms:
            terms[monomial] = terms.get(monomial, Fraction(0)) - factor
        return Polynomial.of(terms)

    @property
    def course(self) -> Polynomial:
        """The polynomial without constant factor and summand, the same for all ``a * p + c``: ``B*S`` for
        ``3*B*S/2-1``."""
        terms = [(monomial, factor) for monomial, factor in self.terms if monomial]
        return Polynomial(tuple((monomial, factor / terms[0][1]) for monomial, factor in terms))

    def at(self, sizes: Sizes) -> Fraction:
        return sum((factor * _product_at(monomial, sizes) for monomial, factor in self.terms), Fraction(0))


def _product_at(monomial: Monomial, sizes: Sizes) -> int:
    return math.prod(sizes[name] ** power for name, power in monomial)


def moving(sizes: Ranges) -> dict[str, SizeRange]:
    """Return the sizes that have more than one value."""
    return {name: size for name, size in sizes.items() if not size.fixed}


# ---- sample sizes


def sample_points(ranges: Ranges) -> Iterator[dict[str, int]]:
    """Yield the choices of sizes to compile at, each once: the largest, the smallest and one in between; those next to
    the ends, where rounded sizes differ; then choices in which the sizes lie at different parts of their ranges. Small
    ranges are yielded completely."""
    seen: list[dict[str, int]] = []
    shares = (len(ranges) + 1) * 2
    parts: list[Sequence[float]] = [[1.0] * len(ranges), [0.0] * len(ranges)]
    parts += [[((place + 1) * turn % shares) / shares for place in range(len(ranges))] for turn in (2, 1, 3, 5)]
    wanted = [_at(ranges, part) for part in parts]
    wanted[3:3] = [
        {name: size.low + size.step if (place + turn) % 2 else size.high - size.step
         for place, (name, size) in enumerate(ranges.items())} for turn in (1, 0)
    ]  # fmt: skip
    every = itertools.islice(itertools.product(*(size.values for size in ranges.values())), _MOST_SAMPLES)
    for point in [*wanted, *(dict(zip(ranges, each, strict=True)) for each in every)]:
        if point not in seen and len(seen) < _MOST_SAMPLES:
            seen.append(point)
            yield point


def choices_of(ranges: Ranges) -> int:
    """Count the choices of sizes in the declared ranges."""
    return math.prod(len(size.values) for size in ranges.values())


def check_points(ranges: Ranges) -> list[dict[str, int]]:
    """Return the choices of sizes at which a template is checked: the largest, the smallest, and one in between. If
    possible that one was not compiled, and none of its sizes is the linear function of another that holds at the
    ends."""
    compiled = list(sample_points(ranges))
    ends = compiled[:2]
    tenths = (_at(ranges, [(tenth + 2 * place) % 10 / 10 for place in range(len(ranges))])
              for tenth in (7, 4, 6, 3, 8, 2, 5))  # fmt: skip
    # else one that is compiled last, which few templates need
    choices = [*(choice for choice in tenths if choice not in compiled), *reversed(compiled[2:])]
    independent = [choice for choice in choices if _are_independent(ranges, [*ends, choice])]
    return [*ends, *(independent or choices)[:1]]


def _are_independent(ranges: Ranges, points: Sequence[Sizes]) -> bool:
    """Return whether no size is ``a * x + c`` of another size x at these three points."""
    first, second, third = points
    return all(
        (second[x] - first[x]) * (third[y] - first[y]) != (third[x] - first[x]) * (second[y] - first[y])
        for x, y in itertools.combinations(moving(ranges), 2)
    )


def _at(ranges: Ranges, parts: Sequence[float]) -> dict[str, int]:
    pairs = zip(ranges.items(), parts, strict=True)
    return {name: size.values[round((len(size.values) - 1) * part)] for (name, size), part in pairs}


# ---- fits


def fit(points: Sequence[Sizes], numbers: Sequence[Fraction], ranges: Ranges) -> Polynomial | None:
    """Return the polynomial of fewest terms that has these values at these sizes, confirmed by at least one value that
    did not determine it. Return None if there is none, or if several differ at some declared size.

    If the points are all declared choices, return the first of these polynomials, confirmed or not.
    """
    all_known = len(points) == choices_of(ranges)
    values = {monomial: [_product_at(monomial, point) for point in points] for monomial in _monomials(tuple(ranges))}
    below = math.lcm(*(number.denominator for number in numbers))
    whole = [int(number * below) for number in numbers]
    for count in range(1, min(len(points) - 1 + all_known, _MOST_TERMS) + 1):
        fitting = []
        for chosen in itertools.combinations(values, count):
            rows = [*zip(*map(values.__getitem__, chosen), strict=True)]
            factors = _solve(rows[:count], whole[:count])
            if factors is None or 0 in factors:
                continue
            lower = math.lcm(*(factor.denominator for factor in factors))
            upper = [int(factor * lower) for factor in factors]
            if all(sum(map(mul, upper, row)) == number * lower
                   for row, number in zip(rows[count:], whole[count:], strict=True)):  # fmt: skip
                fitting.append(Polynomial.of({m: f / below for m, f in zip(chosen, factors, strict=True)}))
        if fitting:
            unique = all_known or all(_agree(fitting[0], other, ranges) for other in fitting[1:])
            return fitting[0] if unique else None
    return None


def _agree(first: Polynomial, second: Polynomial, ranges: Ranges) -> bool:
    """Return whether two polynomials are equal at all declared sizes, as `B+1` and `B**2/3+5/3` are at 1 and 2. One
    value more of each size than its highest power is enough, or all values if there are fewer."""
    few = [list(itertools.islice(size.values, _POWER + 1)) for size in ranges.values()]
    return all(first.at(at) == second.at(at) for each in itertools.product(*few)
               for at in [dict(zip(ranges, each, strict=True))])  # fmt: skip


@lru_cache
def _monomials(names: tuple[str, ...]) -> tuple[Monomial, ...]:
    """Return all monomials of the names, by rising degree; the empty one is first."""
    powers = itertools.product(range(_POWER + 1), repeat=len(names))
    kept = sorted((choice for choice in powers if sum(choice) <= _DEGREE), key=lambda choice: (sum(choice), choice))
    return tuple(tuple(sorted((n, p) for n, p in zip(names, choice, strict=True) if p)) for choice in kept)


def _solve(rows: Sequence[Sequence[int]], right: Sequence[int]) -> list[Fraction] | None:
    """Return the solution of a square linear system, or None if it has none or many."""
    table = [[*row, number] for row, number in zip(rows, right, strict=True)]
    for column in range(len(table)):
        pivot = next((row for row in table[column:] if row[column]), None)
        if pivot is None:
            return None
        table.remove(pivot)
        table.insert(column, pivot)
        for index, row in enumerate(table):
            if index != column and row[column]:
                table[index] = [x * pivot[column] - row[column] * y for x, y in zip(row, pivot, strict=True)]
    return [Fraction(row[-1], row[column]) for column, row in enumerate(table)]


# ---- proofs of whole numbers


def is_whole(size: Polynomial, ranges: Ranges, multiples: Mapping[str, int] | None = None) -> bool:
    """Return whether a polynomial is a whole number for all declared sizes, by exact arithmetic: each of its
    coefficients is whole, or its value is whole for every residue of the sizes (residues repeat). ``multiples`` limits
    sizes to multiples of so many steps."""
    steps = {name: ranges[name].step for name in size.names}
    below = math.lcm(*(factor.denominator for _, factor in size.terms))
    # as a polynomial of the numbers of steps, for a size is `step * t`
    scaled = {m: int(f * below) * _product_at(m, steps) for m, f in size.terms}
    if all(number % below == 0 for number in scaled.values()):
        return True
    cases = [_residues(ranges[name], below, (multiples or {}).get(name, 1)) for name in steps]
    if math.prod(map(len, cases)) > _MOST_CASES:
        return False
    for case in itertools.product(*cases):
        at = dict(zip(steps, case, strict=True))
        if sum(number * _product_at(monomial, at) for monomial, number in scaled.items()) % below:
            return False
    return True


def _residues(size: SizeRange, modulus: int, multiple: int) -> range:
    """Return declared numbers of steps, one for each residue."""
    low, high = -(-size.low // (size.step * multiple)) * multiple, size.high // size.step
    return range(low, min(high, low + (modulus - 1) * multiple) + 1, multiple)


def constraint(size: Polynomial, ranges: Ranges) -> str:
    """Return the condition under which a polynomial is whole: ``S must be a multiple of 8`` for each size for which
    that is sufficient (for one size, also necessary), else ``not at H=8, H=10``; "" if it is whole nowhere."""
    names = sorted(size.names)
    every = itertools.product(*(ranges[name].values for name in names))
    choices = [dict(zip(names, each, strict=True)) for each in itertools.islice(every, _MOST_CASES)]
    whole = [size.at(choice).denominator == 1 for choice in choices]
    ways = []
    for name in names:
        declared = ranges[name]
        for multiple in range(2, declared.high // declared.step + 1):
            unit = multiple * declared.step
            # for all multiples, not only the few that are declared
            unlimited = {**ranges, name: SizeRange(declared.low, unit * 1024, declared.step)}
            if is_whole(size, unlimited, {name: multiple}):
                if len(names) > 1 or all((choice[name] % unit == 0) == fits
                                         for choice, fits in zip(choices, whole, strict=True)):  # fmt: skip
                    ways.append(f"{name} must be a multiple of {unit}")
                break
    if ways or not any(whole):
        return " or ".join(ways)
    bad = [choice for choice, fits in zip(choices, whole, strict=True) if not fits]
    words = [" with ".join(f"{name}={value}" for name, value in choice.items()) for choice in bad[:3]]
    return f"not at {', '.join(words)}{', ...' if len(bad) > 3 else ''}" if bad else ""
