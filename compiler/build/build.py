"""A build in memory: its programs, schedule and facts, whether they were just compiled or read from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...grammar.bounded import real_path
from ...grammar.nearest import listed
from ..capture.model_code import moved_files
from ..layout.mesh import Mesh
from ..layout.placement import TensorType, parse_type
from ..ops.precision import Rounding, regions
from ..padding.pads import Pads, pads_from
from ..program.actions import ACTIONS, Action, Purpose, StageRanks, parse_schedule
from ..program.program import REFERENCE_FILE, Fault, Program
from ..program.roles import SINGLE, Role, group, join_roles, ranks_of, roles_of, with_idle
from ..program.text import ProgramError, parse_program
from ..sizes.polynomials import check_points
from ..sizes.size_range import SizeRange
from ..sizes.template import Template, sizes_text
from .facts import evaluation_facts, evaluation_faults, fact_faults, purpose_of

_PROGRAMS = "programs/"
EVALUATION = "evaluation/"
"""The folder of a build that holds the programs of its evaluation."""


class BuildError(Exception):
    """The error of a directory that is not a build, or not the one that was checked. ``help`` is advice, or ""."""

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__(message)
        self.help = help


def program_file(program: Program) -> str:
    """Return the path of a program's file in a build's folder."""
    return f"{_PROGRAMS}{program.role}.{program.action}.py"


@dataclass(frozen=True)
class Build:
    """A build: its roles, the reference (the captured graph), and the manifest's facts. ``programs`` are those of the
    whole step by action, as if one role ran it."""

    path: Path
    texts: Mapping[str, str]
    """The texts of the build's files by name, without the manifest."""
    manifest: Mapping[str, Any]
    programs: Mapping[str, Program]
    reference: Program
    roles: Mapping[str, Role]
    report: Mapping[str, Any]
    template: Template | None = None
    """The programs for all sizes, where the plan declares ranges; ``programs`` and ``manifest`` are those of one
    choice."""
    purpose: Purpose = "training"
    """The purpose of the programs. Those of a training step that have no file, as it does not need them, do nothing."""
    evaluation: Build | None = None
    """The programs that evaluate the model, if the plan asks for them."""

    @classmethod
    def of(
        cls, path: Path, texts: Mapping[str, str], manifest: Mapping[str, Any], report: Mapping[str, Any],
        purpose: Purpose | None = None,
    ) -> Build:  # fmt: skip
        """Return the build of these texts and of a manifest of the right form, for a ``purpose`` or for the manifest's.

        Raises:
            ValueError: a program or the schedule cannot be read, or they are not of one build.
        """
        template, purpose = None, purpose or purpose_of(manifest)
        if "ranges" in manifest:
            ranges = {n: SizeRange(low, high, step) for n, (low, high, step) in manifest["ranges"].items()}
            if any(size.problem or manifest["sizes"].get(name) != size.high for name, size in ranges.items()):
                raise ValueError("its manifest has sizes that are not the largest of its ranges")
            template = Template.read(ranges, {n: text for n, text in texts.items() if n.startswith(_PROGRAMS)})
        timelines = parse_schedule(texts["schedule.txt"])
        read = texts if template is None else template.at(manifest["sizes"])
        programs, reference = read_programs(read, timelines, purpose)
        roles, evaluation = roles_of(programs, timelines), None
        if "evaluation" in manifest:
            inner = {name.removeprefix(EVALUATION): text for name, text in texts.items() if name.startswith(EVALUATION)}
            evaluation = cls.of(path, inner, evaluation_facts(manifest), {}, "evaluation")
        whole = join_roles(programs)
        return cls(path, texts, manifest, whole, reference, roles, report, template, purpose, evaluation)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the build's ranks, with axes factored into the sub-axes of its programs."""
        return next(iter(self.programs.values())).mesh

    @property
    def trains(self) -> bool:
        """False for a build of an evaluation or of inference, whose model is in ``eval()``."""
        return self.purpose == "training"

    @property
    def microbatches(self) -> int:
        """The number of microbatches in a step's batch."""
        return int(self.manifest["microbatches"])

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Each parameter's type as a rank stores it."""
        return {name: parse_type(text, self.mesh) for name, text in self.manifest["parameters"].items()}

    @cached_property
    def pads(self) -> Pads:
        """The padding of parameters: dims that are longer in programs than in the model."""
        return pads_from(self.manifest["padding"])

    @property
    def rounding(self) -> Rounding:
        """The types to which the plan lets programs round, and where; the type of sums over microbatches; and the
        formats in which gradients travel."""
        lines = regions((line["type"], line["modules"], line["line"]) for line in self.manifest["precision"])
        sent = ((line["format"], part) for line in self.manifest["compress"]
                for part in line.get("over", self.mesh.parts(line["axis"])))  # fmt: skip
        return Rounding(lines, getattr(torch, self.manifest["accumulate"]), frozenset(sent))

    @property
    def axis(self) -> str:
        """The pipeline's axis; "" where there are no stages."""
        return next(iter(self.roles.values())).axis

    @property
    def stage_ranks(self) -> StageRanks:
        """The number of the role that has each stage."""
        return ranks_of({name: role.programs for name, role in self.roles.items()})

    def at(self, sizes: Mapping[str, int]) -> Build:
        """Return the build for these sizes; sizes that are not named stay as they are.

        Raises:
            BuildError: its programs cannot be read at these sizes.
        """
        assert self.template is not None
        sizes = {**self.manifest["sizes"], **sizes}
        try:
            texts = self.template.at(sizes)
            timelines = {name: role.actions for name, role in self.roles.items()}
            programs, reference = read_programs(texts, timelines, self.purpose)
            roles = {name: replace(role, programs=programs[name]) for name, role in self.roles.items()}
            whole = join_roles(programs)
        except (ProgramError, ValueError) as error:
            raise BuildError(f"`{self.path}` at {sizes_text(sizes)}: {error}") from None
        manifest = {**self.manifest, "sizes": sizes}
        evaluation = self.evaluation.at(sizes) if self.evaluation is not None else None
        return replace(self, manifest=manifest, programs=whole, reference=reference, roles=roles, evaluation=evaluation)

    def cases(self) -> list[Build]:
        """Return the builds that are checked: this one, or, where sizes have ranges, those at the largest and a few
        other sizes."""
        return [self] if self.template is None else [self.at(sizes) for sizes in check_points(self.template.ranges)]

    def fact_faults(self) -> list[Fault]:
        """Return the faults of the manifest beside the programs and the schedule."""
        faults = fact_faults(self.manifest, self.programs, self.reference, self.roles)
        if faults or self.evaluation is None:
            return faults
        other = self.evaluation
        return evaluation_faults(other.manifest, other.programs, other.reference, other.roles, self.roles)

    def role_at(self, coordinates: Mapping[str, int]) -> Role:
        """The role of the ranks at some coordinates."""
        return self.roles[f"{self.axis}{coordinates[self.axis]}"] if self.axis else self.roles[SINGLE]

    def files(self) -> Iterator[Program]:
        """Return every program that has a file in the build."""
        programs = (
            program for role in self.roles.values() for program in role.programs.values()
            if ACTIONS[program.action].serves(self.purpose)
        )  # fmt: skip
        yield from {program_file(program): program for program in programs}.values()

    def every_program(self) -> Iterator[Program]:
        """Yield the programs of every role, and those of the evaluation."""
        for role in self.roles.values():
            yield from role.programs.values()
        if self.evaluation is not None:
            yield from self.evaluation.every_program()

    def text(self, program: Program) -> str:
        """Return a program's text as the build has it: a template where sizes have ranges."""
        return program.text() if self.template is None else self.template.texts[program_file(program)]

    def moved(self) -> str:
        """Return a sentence that lines of the model's files have moved since the build, "" if they have not. Nothing is
        imported."""
        hashes, lines = self.manifest["model_source"], self.manifest["model_lines"]
        moved = moved_files(sources_of(self.manifest), self.folder, hashes, lines)
        return f"lines of {listed(moved)} moved since the build, whose programs name the old ones" if moved else ""

    @property
    def folder(self) -> Path:
        """The plan's folder, to which the names of its files are relative."""
        return real_path(self.path / str(self.manifest["folder"]))


def read_programs(
    texts: Mapping[str, str], timelines: Mapping[str, Sequence[Action]], purpose: Purpose = "training"
) -> tuple[dict[str, dict[str, Program]], Program]:
    """Return the programs of a build by role and key, and the reference. ``timelines`` say which role does a stage's
    work. Kinds of actions that do not serve the ``purpose`` have programs that do nothing.

    Raises:
        ValueError: they are not the programs of the roles of one build.
    """
    programs = [
        parse_program(texts[name], name)
        for name in sorted(texts)
        if name.startswith(_PROGRAMS) and name != REFERENCE_FILE
    ]
    roles = {name: with_idle(name, of_role, purpose) for name, of_role in group(programs, timelines).items()}
    return roles, parse_program(texts[REFERENCE_FILE], REFERENCE_FILE)


def sources_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the callables of the plan whose code a build hashes."""
    of_loss = (term["target"] for term in manifest["loss"] if term["kind"] == "callable")
    return (manifest["model"]["callable"], *of_loss)
