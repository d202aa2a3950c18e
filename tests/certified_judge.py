"""The certificate's checker for many changed texts of one build: what it knows of the model is read once."""

from __future__ import annotations

import json
import signal
from collections.abc import Hashable
from functools import lru_cache
from typing import Any
from unittest import mock

import certificate.build
from certificate.build import EVALUATION, read_build, read_manifest
from certificate.nodes import Form
from certificate.step import ATTEMPTS, Step, certify_texts
from certificate.text import Malformed, Refused, read_program
from parc.compiler.build.build import Build
from parc.compiling.compiled import Compiled, files_of, manifest_of
from tests.certified_mutators import Edits, Texts


def texts_of(compiled: Compiled) -> dict[str, str]:
    """Return the texts of a build, with its manifest."""
    return {**files_of(compiled), "manifest.json": json.dumps(manifest_of(compiled))}


def _too_long(*_: Any) -> None:
    raise TimeoutError("does not end")


class Judge:
    """The checker of one build's mutants. Their model is the same, so its meaning is known, in all normal forms, and
    so is that of all functions that a mutant leaves as they are."""

    def __init__(self, texts: Texts, most_seconds: float = 60) -> None:
        self.texts, self._most_seconds = texts, most_seconds
        self._read = lru_cache(maxsize=None)(read_program)
        """Programs by their texts. All of them stay: what is known goes by the types that they hold."""
        self._models: dict[Hashable, Step] = {}

    def verdict(self, edits: Edits) -> str:
        """Return why the checker refuses a build with changed texts, "" if it accepts them.

        Raises:
            Exception: it does neither.
        """
        return self.verdict_of({**self.texts, **edits})

    def verdict_of(self, texts: Texts) -> str:
        """Return the same of all texts of a changed build."""
        signal.signal(signal.SIGVTALRM, _too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._most_seconds)
        try:
            self._certify(texts)
        except RecursionError:
            return "too deep"
        except Refused as error:
            return str(error) or "refused"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return ""

    def _certify(self, texts: Texts) -> None:
        manifest = read_manifest(texts)
        if manifest.get("ranges"):
            certify_texts(texts, manifest)
            return
        for part in ("", EVALUATION) if any(place.startswith(EVALUATION) for place in texts) else ("",):
            with mock.patch("certificate.build.read_program", self._read):
                build = read_build(texts, manifest, part)
            self._in_forms(build)

    def _in_forms(self, build: certificate.build.Build) -> None:
        """Prove a build in one of the normal forms."""
        refused: list[Exception] = []
        for form, most in dict(ATTEMPTS).items():
            try:
                return self._in_form(build, form, most)
            except (Refused, RecursionError) as error:
                if isinstance(error, Malformed):
                    raise
                refused.append(error)
        raise refused[0]

    def _in_form(self, build: certificate.build.Build, form: Form, most: int) -> None:
        """Prove a build in one normal form, with the model's meaning of another build if that is the same."""
        step = Step(build)
        trains = any(action == "B" for _, action in build.programs)
        key = form, id(build.model), step.microbatches, step.mesh, step.axis, trains
        known = self._models.get(key)
        if known is None:
            step.table.form, step.table.most = form, most
            step.read_model()
            known = self._models[key] = step
        for name in _OF_MODEL:
            setattr(step, name, getattr(known, name))
        facts, axes, step.table._made = dict(step.table.facts), dict(step.table.axes), 0
        step.reader._texts.clear()
        step.tensors._reversed = False
        try:
            step.run_to_end()
        finally:
            step.table.facts = facts
            if step.table.axes != axes:  # values of the next mutant count ranks by one letter again
                del self._models[key]


_OF_MODEL = ("table", "reader", "tensors", "whole", "expected", "updates", "scales", "gradients")
"""The attributes of a step that depend on its model alone."""


_JUDGES: dict[int, tuple[Build, Judge]] = {}
_MOST_JUDGES = 4


def refused_in(build: Build, texts: Texts | None = None) -> str:
    """Return why the checker refuses other texts in the place of a build's, or its own; "" if it accepts them. What is
    known of the models of the last few builds is kept."""
    known = _JUDGES.pop(id(build), None)
    _JUDGES[id(build)] = known or (build, Judge({**build.texts, "manifest.json": json.dumps(build.manifest)}))
    if len(_JUDGES) > _MOST_JUDGES:
        del _JUDGES[next(iter(_JUDGES))]
    judge = _JUDGES[id(build)][1]
    return (
        judge.verdict({})
        if texts is None
        else judge.verdict_of({**texts, "manifest.json": judge.texts["manifest.json"]})
    )
