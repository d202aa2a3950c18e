"""Planted bugs of ranges of sizes: expressions that are right at every size that is looked at, and wrong at others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

from parc.compiler.program.program import REFERENCE_FILE
from parc.compiler.sizes.polynomials import Monomial, Polynomial, check_points
from parc.compiler.sizes.template import Expression, Template
from parc.compiler.verify.sizes import size_faults
from tests.checked_plans import compiled
from tests.ranged_models import positions

ROOT = Path(__file__).resolve().parent.parent

_PLACE = re.compile(r"\{([^{}\s]+)\}")


def hidden(expression: Expression, template: Template) -> Expression:
    """The expression, and more, which is nothing at the sizes at which the template is checked: a product of the
    differences to these."""
    name = min(expression.size.names)
    more: dict[Monomial, Fraction] = {(): Fraction(1)}
    for seen in sorted({point[name] for point in check_points(template.ranges)}):
        longer: dict[Monomial, Fraction] = {}
        for monomial, factor in more.items():
            power = monomial[0][1] if monomial else 0
            for raised, part in ((power + 1, factor), (power, -seen * factor)):
                key: Monomial = ((name, raised),) if raised else ()
                longer[key] = longer.get(key, Fraction(0)) + part
        more = longer
    terms = dict(expression.size.terms)
    every = {monomial: terms.get(monomial, 0) + more.get(monomial, Fraction(0)) for monomial in {**terms, **more}}
    return replace(expression, size=Polynomial.of(every))


def hidden_sizes(template: Template, numbers: bool) -> Iterator[tuple[str, Template]]:
    """Every expression of every program so changed, one place after the other: ``numbers`` that operators compute with,
    which make no shape, or all others."""
    for file, text in template.texts.items():
        for match in _PLACE.finditer(text) if file != REFERENCE_FILE else ():
            row = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
            alone = "(" in row and "  # " not in row and row.count("[") == row.count("]")
            if alone == numbers:
                other = f"{{{hidden(Expression.parse(match[1]), template)}}}"
                changed = text[: match.start()] + other + text[match.end() :]
                what = f"{file}: {match[1]} after {row.strip()}"
                yield what, replace(template, texts={**template.texts, file: changed})


def size_refusals(every: int) -> dict[str, Counter[str]]:
    """By class how many mutants of ranged builds are refused for all sizes: of numbers all, of shapes one of ``every``;
    the names of those that nothing refuses are counted as they are."""
    rows: dict[str, Counter[str]] = {
        "hide in a number of some sizes": Counter(),
        "hide in a shape of some sizes": Counter(),
    }
    for how in ("", "rate", "prefix"):
        made = compiled(positions(how), ROOT)
        assert made.template is not None
        for kind, numbers in zip(rows, (True, False), strict=True):
            for what, mutant in islice(hidden_sizes(made.template, numbers), 0, None, 1 if numbers else every):
                faults = mutant.faults(made.mesh) or size_faults(mutant, made.mesh)
                rows[kind]["shapes" if faults else f"accepted: {how}: {what}"] += 1
    return rows
