"""The first check of a build: one step of its small programs in their own types, tested here and repeated by each
run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parc.checking.twins import Subject
from parc.compiler.build.build import Build
from parc.compiler.build.first_check import FirstCheck
from parc.compiler.program.program import Fault
from parc.compiling.compiled import Compiled
from parc.runtime.compare.model_run import Case
from parc.runtime.compare.own_types import OwnStep, own_step


def first_check_of(compiled: Compiled, chosen: Subject, case: Case) -> tuple[FirstCheck, list[Fault]]:
    """Return the first check of a build, tested on the chosen subject, whose ``case`` has its largest sizes; and the
    faults of that step in the programs' own types."""
    small, plan = _small_build(compiled, chosen.compiled), chosen.compiled.plan
    formats = [line["format"] for line in small.manifest["compress"]]
    step = own_step(case, plan.unbatched, formats, plan.trains)
    expected = {key: (of.signature.squares, of.signature.product, of.bound) for key, of in step.expected.items()}
    return FirstCheck(small, chosen.text, step.seed, step.state, expected), [*_faults(step)]


def _faults(step: OwnStep) -> Iterator[Fault]:
    times, name = step.worst
    if times > 1:
        message = f"in the programs' own types it differs by {times:.1f} times what their roundings explain"
        yield Fault("numbers", f"the {name}", message)
    for operator in step.narrow:
        message = f"a kernel computes {operator}, which the plan's `precision` lines leave in float32"
        yield Fault("numbers", "the programs' own types", message)


def _small_build(compiled: Compiled, subject: Compiled) -> Build:
    """Return the subject as a build that a run can open: it has the arguments of its own model, whose initial values
    are those of the model's code."""
    manifest = {key: value for key, value in subject.build.manifest.items() if key != "evaluation"}
    model = manifest["model"]
    manifest |= {"init": None, "model": {**model, "arguments": {**model["arguments"], **subject.overrides}}}
    texts = compiled.build.texts if subject is compiled else subject.build.texts
    return replace(subject.build, texts=texts, manifest=manifest, evaluation=None)
