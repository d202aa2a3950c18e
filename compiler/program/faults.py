"""Faults, which checks report and for which a build is refused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A thing that a check refuses. ``check`` is ``shapes``, ``types``, ``communication``, ``numbers`` or ``facts``;
    ``where`` is a program, function and value."""

    check: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.message}"
