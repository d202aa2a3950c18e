"""The comparison of a build's programs with those of its smaller twin: what holds of the twin's numbers then holds of
the build's."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, reduce
from operator import or_

from ..analysis.dataflow import weight_sources
from ..program.actions import BACKWARD, COUNTING, FORWARD, step_kinds
from ..program.program import Fault, Program
from ..program.roles import Programs
from .bodies import Pairs, function_body, number_problem
from .wiring import Backward, Forward, Kinds, PieceCall, PieceFact, WiringFault, reduce_facts


def compare_structure(full: Programs, captured: Program, twin: Programs, twin_captured: Program) -> list[Fault]:
    """Return the faults where a build's programs differ in structure from its twin's, each beside its own captured
    graph. The reasons are in docs/architecture.md, "What a twin carries over".
    """
    if full.keys() != twin.keys():
        return [Fault("numbers", "step", f"has the programs {', '.join(full)}, its twin {', '.join(twin)}")]
    kinds = Kinds()
    whose = "the twin"
    try:
        small = _WiredStep(twin, twin_captured, kinds)
        seen = list(small.facts())
        whose = "the build"
        large = _WiredStep(full, captured, kinds)
        fault = _fact_fault(list(large.facts()), seen)
    except WiringFault as problem:
        return [Fault("numbers", whose, str(problem))]
    fault = fault or _number_fault(large, small) or next(_step_faults(full, twin), None)
    return [] if fault is None else [fault]


def repetition_fault(programs: Programs, captured: Program) -> Fault | None:
    """Return the first fault that shows in a build alone: backward differentiates another call than forward's, or one
    repetition of a block is wired otherwise than the others."""
    try:
        facts = list(_WiredStep(programs, captured, Kinds.alone(captured)).facts())
    except WiringFault as problem:
        return Fault("types", "step", str(problem))
    fault = _fact_fault(facts, facts)
    return None if fault is None else Fault("types", fault.where, fault.message)


class _WiredStep:
    """The programs of a step beside their captured graph."""

    def __init__(self, programs: Programs, captured: Program, kinds: Kinds) -> None:
        self.programs = programs
        self.weights = weight_sources(programs)
        graph = kinds.graph(captured.main, programs[FORWARD])
        self.forwards = {FORWARD: Forward(programs[FORWARD], programs[BACKWARD], graph, kinds, self.weights)}
        if COUNTING in programs and len(captured.functions) > 1:
            graph = kinds.graph(captured.functions[0], programs[COUNTING])
            self.forwards[COUNTING] = Forward(programs[COUNTING], None, graph, kinds, {})

    def facts(self) -> Iterator[PieceFact]:
        """Yield all facts about the places of the step."""
        for forward in self.forwards.values():
            yield from forward.facts()
        yield from Backward(self.programs[BACKWARD], self.forwards[FORWARD], self.weights).facts()
        for row in step_kinds("before", "after"):
            if row.program == "role" and row.kind in self.programs:
                yield from reduce_facts(self.programs[row.kind])


def _fact_fault(facts: Sequence[PieceFact], of_twin: Sequence[PieceFact]) -> Fault | None:
    """Return the first fact of a build that its twin does not have, or for which no one option holds in both."""
    seen: dict[Hashable, set[Hashable]] = defaultdict(set)
    options: dict[Hashable, frozenset[Hashable]] = {}
    for fact in of_twin:
        seen[fact.key].add(fact.what)
    for whose, facts_of in (("the twin", of_twin), ("the build", facts)):
        for fact in facts_of:
            if fact.what not in seen[fact.key]:
                return Fault("numbers", fact.where, f"is as nothing is in the twin: {fact.key} {fact.what}")
            key = fact.key, fact.what
            options[key] = options.get(key, fact.options) & fact.options
            if not options[key]:
                return Fault("numbers", fact.where, f"is in {whose} not as in other repetitions: {fact.key}")
    return None


def _number_fault(large: _WiredStep, small: _WiredStep) -> Fault | None:
    """Return the first number of a call's functions that the captured graphs of the two builds do not have there."""
    for action, forward in large.forwards.items():
        numbers = _CallNumbers(forward, small.forwards[action])
        for call in forward.calls:
            problem = numbers.problem(call)
            if problem is not None:
                return Fault("numbers", f"{action} {call.place}", problem)
    return None


class _CallNumbers:
    """The numbers of F's calls beside those of the captured graph, both in a build and in its twin."""

    def __init__(self, ours: Forward, theirs: Forward) -> None:
        self.ours, self.theirs = ours, theirs
        self.calls = Counter(call.place for call in ours.calls)
        self.mates: dict[Hashable, dict[Hashable, PieceCall]] = defaultdict(dict)
        for call in theirs.calls:
            self.mates[call.sort][_numbers_key(call)] = call
        self.known: dict[Hashable, str | None] = {}

    def problem(self, call: PieceCall) -> str | None:
        """Return the fault of a call's numbers beside the equal calls of the twin; None if it has none beside one of
        them."""
        problem = None
        for key, mate in self.mates[call.sort].items():
            key = _numbers_key(call), key
            if key not in self.known:
                self.known[key] = self._beside(call, mate)
            problem = self.known[key]
            if problem is None:
                break
        return problem

    def _beside(self, call: PieceCall, mate: PieceCall) -> str | None:
        name, other = call.line.op, mate.line.op
        model = self._every
        if call.piece is not None and mate.piece is not None:
            model = Pairs.of(call.piece.numbers, mate.piece.numbers)
        ours, theirs = self.ours.bodies[name].numbers, self.theirs.bodies[other].numbers
        problem = number_problem(ours, theirs, model, whole=self.calls[call.place] == 1 and call.piece is not None)
        if problem is None and name in self.ours.backward:
            backward = self.ours.backward[name].numbers, self.theirs.backward[other].numbers
            problem = number_problem(*backward, model | Pairs.of(ours, theirs), whole=False)
        return problem

    @cached_property
    def _every(self) -> Pairs:
        """The numbers of all equal pieces of the captured graphs, for calls that belong to no piece."""
        theirs = {piece.kind: piece for piece in self.theirs.graph.pieces.values()}
        ours = {(piece.kind, piece.numbers_kind): piece for piece in self.ours.graph.pieces.values()}
        pairs = [Pairs.of(piece.numbers, theirs[kind].numbers) for (kind, _), piece in ours.items() if kind in theirs]
        return reduce(or_, pairs, Pairs())


def _numbers_key(call: PieceCall) -> tuple[str, int]:
    return call.line.op, call.piece.numbers_kind if call.piece is not None else -1


def _step_faults(full: Programs, twin: Programs) -> Iterator[Fault]:
    """Find programs that a step runs once, such as SCALE, and that differ from the twin's though they depend neither on
    sizes nor on repetitions."""
    for kind in (row.kind for row in step_kinds() if row.program == "step" and not row.each and row.kind in full):
        bodies = []
        for program in (full[kind], twin[kind]):
            body = function_body(program.main, program.mesh)
            written = [numbers.written for numbers in body.numbers]
            bodies.append((program.main.bindings, body.rows, written, program.main.returns))
        if bodies[0] != bodies[1]:
            yield Fault("numbers", kind, "is not as in the twin")
