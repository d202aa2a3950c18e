"""Planted bugs of ranges of sizes: expressions that are right at every size looked at, and wrong at others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from math import lcm, prod
from pathlib import Path

from parc.compiler.program.program import REFERENCE_FILE
from parc.compiler.sizes.polynomials import Polynomial, check_points, moving
from parc.compiler.sizes.template import Expression, Template
from parc.compiler.verify.ranges import size_faults
from tests.checked_plans import compiled
from tests.planted_builds import Row
from tests.ranged_models import positions

ROOT = Path(__file__).resolve().parent.parent

_PLACE = re.compile(r"\{([^{}\s]+)\}")
_MOVED = re.compile(r"aten\.(roll|replication_pad1d)\w*\.default\([^\[\n]*\[([-\d, ]+)\]")


def vanishing(template: Template) -> Polynomial:
    """Return a polynomial of one size that is 0 at the sizes at which a template is checked, and whole at all."""
    name = min(moving(template.ranges))
    seen = sorted({point[name] for point in check_points(template.ranges)})
    size, one = Polynomial.of({((name, 1),): Fraction(1)}), Polynomial.of({(): Fraction(1)})
    return prod((size - one.times(number) for number in seen), start=one)


def hidden(expression: Expression, template: Template) -> Expression:
    """Return the expression plus a term that is 0 at the sizes at which the template is checked."""
    return replace(expression, size=expression.size - vanishing(template))


def hidden_sizes(template: Template, numbers: bool) -> Iterator[tuple[str, Template]]:
    """Yield every expression of every program so changed, one place after the other. With ``numbers`` it changes those
    that make no shape, else all others."""
    for file, text in template.texts.items():
        for match in _PLACE.finditer(text) if file != REFERENCE_FILE else ():
            row = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
            alone = "(" in row and "  # " not in row and row.count("[") == row.count("]")
            if alone == numbers:
                other = f"{{{hidden(Expression.parse(match[1]), template)}}}"
                changed = text[: match.start()] + other + text[match.end() :]
                what = f"{file}: {match[1]} after {row.strip()}"
                yield what, replace(template, texts={**template.texts, file: changed})


def hidden_shifts(template: Template) -> Iterator[tuple[str, Template]]:
    """Change whole numbers of operators that move values, written in no size: shift further by all lengths looked at,
    or make one pad longer by what another is made shorter."""
    lengths = {size for point in check_points(template.ranges) for size in point.values()}
    around, more = lcm(*lengths), vanishing(template)
    for file, text in template.texts.items():
        for match in _MOVED.finditer(text) if file != REFERENCE_FILE else ():
            op, numbers = match[1], [int(number) for number in match[2].split(", ")]
            if op == "roll":
                written = [str(number + around) for number in numbers]
            else:
                pads = zip(numbers, (1, -1), strict=True)
                written = [f"{{{Polynomial.of({(): Fraction(pad)}) - more.times(sign)}}}" for pad, sign in pads]
            changed = f"{text[: match.start(2)]}{', '.join(written)}{text[match.end(2) :]}"
            yield f"{file}: {match[0]}", replace(template, texts={**template.texts, file: changed})


def size_refusals(every: int) -> dict[str, Row]:
    """Return by class how many mutants of ranged builds are refused for all sizes: of numbers all, of shapes one of
    ``every``."""
    kinds = ("hide in a number of some sizes", "hide in a shape of some sizes", "move values further at some sizes")
    rows = {kind: Row() for kind in kinds}
    for how in ("", "rate", "prefix", "moved"):
        made = compiled(positions(how), ROOT)
        assert made.template is not None
        ways = (
            hidden_sizes(made.template, True),
            islice(hidden_sizes(made.template, False), 0, None, every),
            hidden_shifts(made.template),
        )
        for row, mutants in zip(rows.values(), ways, strict=True):
            for what, mutant in mutants:
                faults = mutant.faults(made.mesh) or size_faults(mutant, made.mesh)
                row.note(f"{how}: {what}", "shapes" if faults else "")
    return rows
