"""Certificates: the proof of a build by the independent checker, in the words of parc's checks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from certificate import VERSION
from certificate.step import certify_texts
from certificate.text import Refused
from parc.compiler.build.build import Build
from parc.compiler.plan.directive import Directive
from parc.grammar.codes import NOT_CERTIFIED
from parc.grammar.diagnostics import Diagnostic, Label

_MOST_NOTES = 4


@dataclass(frozen=True)
class Certificate:
    """The answer of the checker for a build: what it proved of each role, or why it proved nothing."""

    proved: tuple[str, ...] = ()
    missing: str = ""
    """The value or the line that is not proved, in one line; "" where all are."""
    notes: tuple[str, ...] = ()
    """The lines on where the meanings part."""

    @property
    def word(self) -> str:
        """The outcome among those of other checks."""
        return "not certified" if self.missing else "certified"

    @property
    def facts(self) -> dict[str, Any]:
        """The row of ``report.json``."""
        return {"version": VERSION, "proved": list(self.proved), "missing": self.missing}


NOT_ASKED = Certificate(missing="the checker was not asked")
"""The certificate of a build before it is asked for."""


def certificate_of(build: Build) -> Certificate:
    """Prove from a build's texts alone that its roles together compute what its model says."""
    try:
        return Certificate(tuple(certify_texts(build.texts, build.manifest).lines))
    except Refused as refused:
        missing, *notes = str(refused).splitlines()
        return Certificate(missing=missing, notes=tuple(notes))


def not_certified(model: Directive, certificate: Certificate, on: str) -> Diagnostic:
    """Return the error of a build without a certificate whose numbers are tested on a smaller one."""
    message = f"not certified, and too large to be tested itself: {certificate.missing}"
    help_ = "write the build all the same with `--uncertified`"
    if re.search(r"no (rule|derivative) for `", certificate.missing):
        help_ = f'give the operator a rule, `parc.register_rule("…", "…", gradient="…")` (docs/adding.md), or {help_}'
    notes = (f"its numbers are tested on {on}", *certificate.notes[:_MOST_NOTES])
    return Diagnostic(NOT_CERTIFIED, message, Label(model.arguments.statement.span), help=help_, notes=notes)
