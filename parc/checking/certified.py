"""Certificates: the proof of a build by the independent checker, in the words of parc's checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from certificate import VERSION
from certificate.step import certify_texts
from certificate.text import Refused
from parc.compiler.build.build import Build


@dataclass(frozen=True)
class Certificate:
    """What the checker says of a build: what it proved of each role, or why it proved nothing."""

    proved: tuple[str, ...] = ()
    missing: str = ""
    """The value or the line that is not proved, in one line; "" where all are."""
    notes: tuple[str, ...] = ()
    """Where the meanings part."""

    @property
    def word(self) -> str:
        """The outcome among those of other checks."""
        return "not certified" if self.missing else "certified"

    @property
    def facts(self) -> dict[str, Any]:
        """The row of ``report.json``."""
        return {"version": VERSION, "proved": list(self.proved), "missing": self.missing}



def certificate_of(build: Build) -> Certificate:
    """Prove from a build's texts alone that its roles together compute what its model says."""
    try:
        return Certificate(tuple(certify_texts(build.texts, build.manifest).lines))
    except Refused as refused:
        missing, *notes = str(refused).splitlines()
        return Certificate(missing=missing, notes=tuple(notes))
