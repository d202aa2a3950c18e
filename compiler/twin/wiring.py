"""The wiring of a step: the piece of the captured graph that each call of F stands for, and the origins of the values
that it reads.

The captured graph is cut where the modules that F calls as one (blocks) begin and end. What a call reads is then
told without saying which repetition it is: the n-th value that its own piece of the graph reads, made by such and such
a function. Facts that are told so are what a build and its twin have in common.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any

from ..analysis.dataflow import WeightSources, stored_sources
from ..layout.collectives import MESSAGE
from ..layout.mesh import Mesh
from ..ops.rules import facts
from ..program.binding import GRAD_NORM, LOSS, SCALE, UNSCALE, Binding
from ..program.blocks import block_of
from ..program.program import Function, Line, LocalSize, Program, Ref, Value, operands
from ..program.step_values import residual_of
from .bodies import Body, Numbers, function_body, sizeless, star
from .repeats import FamilySlots

_NUMBER = re.compile(r"\d+")
_KEY = "parc.stream_key.default"

PieceSource = tuple[Any, ...]
"""The origin of a value: ``("bound", binding)`` or ``("stream", name, seed)``; in the captured graph ``("made", place,
line, result)``, and in F ``("made", call, result)``."""


class WiringFault(ValueError):
    """The error of a step that is put together as no step is, whatever its twin is."""


@dataclass(frozen=True, slots=True)
class PieceFact:
    """A fact about one place of a step, in words that are equal for all repetitions of a block. The twin must have the
    pair of ``key`` and ``what`` somewhere, and where both builds have the key, they must share one of the
    ``options``."""

    key: Hashable
    what: Hashable
    options: frozenset[Hashable]
    where: str


class Kinds:
    """A number for every text. Equal texts have equal numbers, in a build and its twin."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, text: Hashable) -> int:
        """The number of a text."""
        return self._known.setdefault(text, len(self._known))

    @staticmethod
    def alone(captured: Program) -> Kinds:
        """Return the kinds of a build that is compared with itself alone: whoever asks again gets the same."""
        kinds: Kinds = captured.main.derived.setdefault("kinds", Kinds())
        return kinds

    def graph(self, captured: Function, program: Program) -> Graph:
        """Return the pieces of a captured graph where a program that computes it by calls has its blocks; it is cut
        once for all programs with the same blocks."""
        blocks = frozenset(line.origin.module for line in program.main.lines if line.calls_function) - {""}
        key = "graph", self, blocks
        if key not in captured.derived:
            captured.derived[key] = Graph(captured, blocks, self)
        graph: Graph = captured.derived[key]
        return graph


@dataclass(slots=True)
class GraphPiece:
    """A piece of the captured graph: the values that it reads from outside, in order, and its numbers. Pieces of one
    ``kind`` are equal except for numbers; with the same ``numbers_kind`` these are equal too."""

    reads: list[tuple[PieceSource, Value, tuple[int, int]]]
    """The origin of each value, and its place in the short form with its number in its family."""
    families: list[list[str]]
    """The values that are one part of every layer."""
    numbers: tuple[Numbers, ...]
    kind: int
    numbers_kind: int
    returned: list[Binding] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PieceCall:
    """One call of F: its place, the piece of the captured graph at that place if there is one, the ``kind`` of the
    function with its backward, the number of calls of this kind before it at its place (stages may cut a piece), and
    the origins of the values that it reads."""

    line: Line
    place: str
    piece: GraphPiece | None
    kind: int = -1
    before: int = 0
    reads: list[PieceSource] = field(default_factory=list)

    @property
    def sort(self) -> tuple[int, int, int, str]:
        """The identity that repetitions of a block share: the kind of the captured graph's piece, that of the function,
        the number of such calls before, and the place but for its numbers."""
        return self.piece.kind if self.piece else -1, self.kind, self.before, star(self.place)


def places(modules: Sequence[str], blocks: Collection[str], once: Collection[str] = ()) -> list[str]:
    """Return the place of each line: the block that it is in, one of ``blocks`` or a numbered module, or "after" that
    block. If a place comes again later, its further runs are numbered, except for places that are in ``once``."""
    names, before = [], ""
    for module in modules:
        block = block_of(module, blocks)
        before = block or before
        names.append(block or f"after {before}")
    labels: list[str] = []
    runs: dict[str, int] = {}
    for name, run in groupby(names):
        runs[name] = runs.get(name, 0) + 1
        label = name if runs[name] == 1 or name in once else f"{name} ({runs[name]})"
        labels += [label for _ in run]
    return labels


class Graph:
    """The captured graph as pieces by their place, cut where ``blocks`` and numbered modules begin and end."""

    def __init__(self, captured: Function, blocks: frozenset[str], kinds: Kinds) -> None:
        self.blocks = blocks
        lines = [line for line in captured.lines if line.op != _KEY]
        self.sources: dict[str, PieceSource] = {v.name: ("bound", v.binding) for v in captured.parameters}
        for line in captured.lines:
            self.sources.update((v.name, ("stream", *line.args[1:])) for v in line.made if line.op == _KEY)
        runs: dict[str, list[Line]] = {}
        for line, place in zip(lines, places([line.origin.module for line in lines], self.blocks), strict=True):
            run = runs.setdefault(place, [])
            for at, result in enumerate(line.results):
                if result is not None:
                    self.sources[result.name] = ("made", place, len(run), at)
            run.append(line)
        self.once = frozenset(name for name in runs if f"{name} (2)" not in runs)
        values = captured.values()
        self.pieces = {place: self._piece(run, values, kinds) for place, run in runs.items()}
        self.returns = {key: self.sources[name] for key, name in captured.returns}
        for key, source in self.returns.items():
            if source[0] == "made":
                self.pieces[source[1]].returned.append(key)

    def _piece(self, run: Sequence[Line], values: Mapping[str, Value], kinds: Kinds) -> GraphPiece:
        read = operands(run)
        sources = [self.sources[name] for name in read]
        made = ((name, source) for name, source in zip(read, sources, strict=True) if source[0] == "made")
        families = _families((name, place, tuple(result)) for name, (_, place, *result) in made)
        function = Function("", tuple(values[name] for name in read), tuple(run), ())
        body = function_body(function, Mesh(), families=families)
        slots = body.form.operands
        kind = kinds.of((*(source[0] for source, slot in zip(sources, slots, strict=True) if slot[1] == 0), *body.rows))
        reads = [*zip(sources, function.parameters, slots, strict=True)]
        return GraphPiece(reads, families, body.numbers, kind, kinds.of(body.numbers))


class Forward:
    """F's main function as calls, beside the captured graph. What it makes of a stored parameter by conversions counts
    as that parameter."""

    def __init__(
        self, program: Program, backward: Program | None, graph: Graph, kinds: Kinds, weights: WeightSources
    ) -> None:
        self.program, self.graph = program, graph
        self.functions = {f.name: f for f in program.functions}
        self.undoing = _undoing(backward, self.functions) if backward is not None else {}
        self.bodies: dict[str, Body] = {}
        self.backward: dict[str, Body] = {}
        """The bodies of functions that undo others, by the names of these."""
        kind: dict[str, int] = {}
        stored = stored_sources(program, weights)
        self.sources: dict[str, PieceSource] = {
            value.name: ("bound", stored.get(value.name, value.binding)) for value in program.main.parameters
        }
        self.calls: list[PieceCall] = []
        called_before = Counter[tuple[str, int]]()
        self.values = program.main.values()
        called = [line for line in program.main.lines if line.calls_function]
        where = iter(places([line.origin.module for line in called], graph.blocks, graph.once))
        for line in program.main.lines:
            if line.op == _KEY:
                self.sources[line.made[0].name] = ("stream", *line.args[1:])
            elif line.calls_function:
                place = next(where)
                call = PieceCall(line, place, graph.pieces.get(place), reads=[self.sources[name] for name in line.uses])
                if line.op not in kind:
                    kind[line.op] = kinds.of(self._rows(call))
                call.kind, call.before = kind[line.op], called_before[place, kind[line.op]]
                called_before[place, call.kind] += 1
                self._take_results(call)
                self.calls.append(call)
            elif line.made[0].name in stored:
                self.sources[line.made[0].name] = "bound", stored[line.made[0].name]
            elif facts(line.op).carries:
                self.sources[line.made[0].name] = self.sources[line.uses[0]]
            else:
                raise WiringFault(f"F computes `{line.op}` outside its functions")
        self.returned = {key: self.sources[name] for key, name in program.main.returns}

    def _rows(self, call: PieceCall) -> Hashable:
        """Return the text of a call's function, with that of its backward; both have families where the piece has."""
        function = self.functions[call.line.op]
        families = []
        if call.piece is not None and call.piece.families:
            reads = zip((value.name for value in function.parameters), call.reads, strict=True)
            made = [(name, self.calls[source[1]], source[2]) for name, source in reads if source[0] == "made"]
            families = _families((name, maker.place, (maker.kind, maker.before, at)) for name, maker, at in made)
        body = function_body(function, self.program.mesh, families=families)
        self.bodies[function.name] = body
        if (undoing := self.undoing.get(function.name)) is None:
            return body.rows, None
        shared = (value.name for value in undoing.parameters if value.name in body.names)
        names = {name: f"F {body.names[name]}" for name in shared}  # B's own lines are numbered from 0 too
        tangents = (value.name for value in undoing.parameters if value.name not in names)
        names.update((name, f"tangent {number}") for number, name in enumerate(tangents))
        saved = [family for family in body.form.families if {*family} <= names.keys()]
        self.backward[function.name] = function_body(undoing, self.program.mesh, names, saved)
        return body.rows, self.backward[function.name].rows

    def _take_results(self, call: PieceCall) -> None:
        """Note the origin of each result of a call. A result that the function returns as it was given has the origin
        of that operand."""
        function = self.functions[call.line.op]
        origins = {v.name: source for v, source in zip(function.parameters, call.reads, strict=True)}
        for at, (result, (_, name)) in enumerate(zip(call.line.results, function.returns, strict=True)):
            if result is not None:
                self.sources[result.name] = origins.get(name, ("made", len(self.calls), at))

    def facts(self) -> Iterator[PieceFact]:
        """Yield the facts about F: the function and the operands of each call, and what F returns."""
        for call in self.calls:
            yield PieceFact(("call", call.kind), call.sort[0], NONE, f"F {call.place}")
            for at, (source, name) in enumerate(zip(call.reads, call.line.uses, strict=True)):
                yield from self._read(call, at, source, self.values[name])
        for key, name in self.program.main.returns:
            if key.kind != "saved":
                yield from self._returned(key, self.sources[name])

    def _read(self, call: PieceCall, at: int, source: PieceSource, value: Value) -> Iterator[PieceFact]:
        """Yield the facts about one operand of a call: which of the values that its piece of the graph reads it may
        be."""
        place, number = self.bodies[call.line.op].form.operands[at]
        slot, where = ("reads", call.sort, place), f"F {call.place} operand {at}"
        wanted = call.piece.reads if call.piece is not None else []

        def options(reads: Iterable[tuple[PieceSource, Value, tuple[int, int]]]) -> frozenset[Hashable]:
            """Return places in the piece's short form, with the distance of a member of a family from this one."""
            return frozenset((other, member - number) for _, _, (other, member) in reads)

        if source[0] != "made":
            matches = options(read for read in wanted if read[0] == source)
            kind = source[1].kind if source[0] == "bound" else "stream"
            yield PieceFact(slot, (kind, bool(matches)), matches or _names(str(source[1]), call.place), where)
            return
        maker = self.calls[source[1]]
        result = self.bodies[maker.line.op].form.results[source[2]][0]
        origin = maker.kind, result
        near = [read for read in wanted if read[0][:2] == ("made", maker.place)]
        near = [read for read in near if read[1].type.shape == value.type.shape] or near
        if maker.place == call.place:
            yield PieceFact(slot, (origin, "own"), NONE, where)
        elif near:
            yield PieceFact(slot, (origin, "graph"), options(near), where)
            lines = frozenset(made[2:] for made, _, _ in near)
            yield PieceFact(("makes", maker.sort, result), "graph", lines, where)
        else:
            yield PieceFact(slot, (origin, "other"), self._otherwise(call, source), where)

    def _otherwise(self, call: PieceCall, source: PieceSource) -> frozenset[Hashable]:
        """Return the options for a value that the captured graph does not have: how it is made of values that belong to
        no repetition, or how many calls before its reader it is made."""
        said = self._said(source)
        return frozenset({said}) if said is not None else _names(self.calls[source[1]].place, call.place)

    def _said(self, source: PieceSource) -> Hashable:
        if source[0] != "made":
            return source if _NUMBER.search(str(source[1])) is None else None
        maker = self.calls[source[1]]
        operands = tuple(self._said(read) for read in maker.reads)
        return None if None in operands else (maker.kind, source[2], operands)

    def _returned(self, key: Binding, source: PieceSource) -> Iterator[PieceFact]:
        wanted = self.graph.returns.get(key)
        if wanted is None:
            raise WiringFault(f"F returns `{key}`, which the model does not")
        if source[0] != "made" or wanted[0] != "made":
            if source != wanted:
                raise WiringFault(f"F returns as `{key}` what the model does not")
            return
        call = self.calls[source[1]]
        piece = self.graph.pieces[wanted[1]]
        own = call.place == wanted[1]
        options = frozenset({piece.returned.index(key)}) if own else _names(wanted[1], call.place)
        place = piece.returned.index(key)
        yield PieceFact(("returns", key.kind, call.sort, source[2]), own, options, f"F {key}")
        yield PieceFact(("returned", key.kind, piece.kind, place), (*call.sort, source[2], own), NONE, f"F {key}")


NONE: frozenset[Hashable] = frozenset({None})


def _families(made: Iterable[tuple[str, str, Hashable]]) -> list[list[str]]:
    """Return the values that are one part of every layer, of values with the place and the result of their maker: they
    are the same result at places that differ in their numbers alone."""
    parts: dict[Hashable, dict[str, str]] = {}
    for name, place, result in made:
        parts.setdefault((star(place), result), {})[place] = name
    return [[*members.values()] for members in parts.values() if len(members) > 1]


def _names(name: str, place: str) -> frozenset[Hashable]:
    """Return the options to name a thing: its name, and, if the place has a number, the name with its distance from
    that number."""
    own, other = _NUMBER.findall(place), _NUMBER.findall(name)
    if not own or not other:
        return frozenset({name})
    return frozenset({name, (star(name), *other[1:], int(other[0]) - int(own[0]))})


def _undoing(backward: Program, forward: Mapping[str, Function]) -> dict[str, Function]:
    """Return B's functions by the names of those of F that they undo."""
    undoing = {function.name.removesuffix("_backward"): function for function in backward.blocks}
    for name, function in undoing.items():
        if name == function.name or name not in forward:
            raise WiringFault(f"B has a function `{function.name}`, which is of none of F's")
    return undoing


# ---- gradients of a step, followed by name


_Term = tuple[PieceCall, int] | Binding
"""A result of a call of B, named by the call of F that it undoes; or the binding of a parameter of B or REDUCE."""
_Sum = tuple[tuple[_Term, tuple[str, ...]], ...]
"""The terms of a sum, each with the operators through which it went."""


class Backward:
    """B's main function beside F's calls, with the calls that each result goes to."""

    def __init__(self, program: Program, forward: Forward, weights: WeightSources) -> None:
        self.program, self.forward = program, forward
        self.stored = stored_sources(program, weights)
        self.given: dict[str, PieceSource] = {}
        self.sums: dict[str, _Sum] = {}
        for value in program.main.parameters:
            binding = value.binding
            if binding is not None and binding.kind == "saved":
                if binding.name not in forward.sources:
                    raise WiringFault(f"B reads `{binding}`, which F does not have")
                self.given[value.name] = forward.sources[binding.name]
            else:
                self.given[value.name] = "bound", self.stored.get(value.name, binding)
            if binding == SCALE:
                self.sums[value.name] = ((SCALE, ()),)
        self.goes: dict[tuple[PieceCall, int], list[list[int]]] = {}

    def facts(self) -> Iterator[PieceFact]:
        """Yield the facts about B: the operands of each of its calls, and the destination of each gradient.

        Raises:
            WiringFault: calls are not those of F in reverse, read what another call of F has, or a gradient goes to
                what its call does not read.
        """
        turn = [call for call in reversed(self.forward.calls) if call.line.op in self.forward.backward]
        for line in self.program.main.lines:
            if not line.calls_function and line.made[0].name in self.stored:
                self.given[line.made[0].name] = "bound", self.stored[line.made[0].name]
                continue
            if facts(line.op).carries:
                self.given[line.made[0].name] = self.given[line.uses[0]]
                continue
            if not line.calls_function:
                self.sums[line.made[0].name] = _sum_of(line, self.sums, self.program, _Joined({}))
                continue
            if not turn or line.op != f"{turn[0].line.op}_backward":
                raise WiringFault(
                    f"B calls `{line.op}` where {turn[0].place if turn else 'nothing'} is next in reverse"
                )
            call = turn.pop(0)
            yield from self._undo(call, line)
            for at, result in enumerate(line.results):
                if result is not None:
                    self.sums[result.name] = (((call, at), ()),)
                    self.goes[call, at] = []
        if turn:
            raise WiringFault(f"B does not call `{turn[0].line.op}_backward` of {turn[0].place}")
        for name, value in self.program.main.returned("gradient").items():
            gradient = self.sums[value]
            self._note(gradient, ("bound", Binding("parameter", name)), f"B {name}")
            yield PieceFact(("whole gradient", star(name)), frozenset(way for _, way in gradient), NONE, f"B {name}")
        for (call, at), slots in self.goes.items():
            operands = self.forward.bodies[call.line.op].form.operands
            place, number = self.forward.backward[call.line.op].form.results[at]
            read = ([(operands[slot][0], operands[slot][1] - number) for slot in own] for own in slots)
            choices = frozenset(_with_whole_families(choice, operands) for choice in product(*read))
            count = frozenset(map(len, choices))
            yield PieceFact(("goes", call.sort, place), count, choices, f"B {call.place} result {at}")

    def _undo(self, call: PieceCall, line: Line) -> Iterator[PieceFact]:
        """Yield the facts about one call of B, which reads the operands and results of its call of F and the gradients
        of those results."""
        function = self.forward.functions[call.line.op]
        own = dict(zip((value.name for value in function.parameters), call.reads, strict=True))
        outs = [(name, self.forward.sources[result.name]) for result, (_, name)
                in zip(call.line.results, function.returns, strict=True) if result is not None]  # fmt: skip
        own.update(outs)
        values = function.values()
        for at, (value, name) in enumerate(zip(self.program.function(line.op).parameters, line.uses, strict=True)):
            where = f"B {call.place} operand {at}"
            if value.name in own:
                if self.given.get(name) != own[value.name]:
                    raise WiringFault(f"{where}, `{name}`, is not `{value.name}` of its call of F")
                continue
            terms = self.sums.get(name)
            if terms is None:
                raise WiringFault(f"{where}, `{name}`, is no gradient")
            alike = [out for out in outs if values[out[0]].type.shape == value.type.shape]
            fits = [(name, source) for name, source in alike if all(self._slots(term, source) for term, _ in terms)]
            if not fits:
                raise WiringFault(f"{where}, `{name}`, is the gradient of something else")
            for term, _ in terms:
                if not isinstance(term, Binding):
                    self.goes[term].append([slot for _, source in fits for slot in self._slots(term, source)])
            ways = frozenset(way for _, way in terms)
            names = self.forward.bodies[call.line.op].names
            place = self.forward.backward[call.line.op].form.operands[at]
            yield PieceFact(("gradient", call.sort, place), ways, frozenset(names[name] for name, _ in fits), where)

    def _note(self, terms: _Sum, source: PieceSource, where: str) -> None:
        """Note that a sum is the gradient of a value of F."""
        for term, _ in terms:
            slots = self._slots(term, source)
            if not slots or isinstance(term, Binding):
                raise WiringFault(f"{where} is given what is no gradient of it")
            self.goes[term].append(slots)

    def _slots(self, term: _Term, source: PieceSource) -> list[int]:
        """Return the operand positions at which the call behind a gradient's term reads a value of F. The loss has no
        reader: its position is 0."""
        if isinstance(term, Binding):
            return [0] * (source == self.forward.returned.get(LOSS))
        return [slot for slot, read in enumerate(term[0].reads) if read == source]


def _with_whole_families(choice: Sequence[tuple[int, int]], operands: FamilySlots) -> tuple[Hashable, ...]:
    """Return the operands that a gradient goes to, in order; a family of which each member gets it once is one."""
    sizes, goes = Counter(place for place, _ in operands), Counter(choice)
    whole = {place for place, size in sizes.items() if size > 1 and all(goes[place, n] == 1 for n in range(size))}
    return (*sorted(slot for slot in choice if slot[0] not in whole), *((place, "each") for place in sorted(whole)))


def reduce_facts(reduce: Program) -> Iterator[PieceFact]:
    """Yield the facts about REDUCE, or another program that a role runs once a step: the terms of each gradient, of the
    norm, of the loss, of weights and of other results.

    Raises:
        WiringFault: a gradient is made of another parameter's, or the norm is not of all gradients, each once.
    """
    main = reduce.main
    # one over the loss scale is no term: ``scaling`` proves what is multiplied by it
    sums: dict[str, _Sum] = {value.name: ((value.binding, ()),) if value.binding != UNSCALE else ()
                             for value in main.parameters if value.binding}  # fmt: skip
    joined = _Joined(main.values())
    for line in main.lines:
        taken = joined.taken_out(line, sums)
        sums[line.made[0].name] = _sum_of(line, sums, reduce, joined) if taken is None else taken
        joined.note(line, sums)
    gradients = sorted(str(binding) for binding in main.bindings if binding.kind == "gradient")
    for key, name in main.returns:
        # what the last step left is no term of a gradient: ``compressed`` proves where it is added
        terms = sorted(str(term) for term, _ in sums[name]
                       if key.kind == "state" or not isinstance(term, Binding) or not residual_of(term))  # fmt: skip
        if key.kind == "gradient" and terms != [str(key)]:
            raise WiringFault(f"REDUCE makes `{key}` of {', '.join(terms) or 'nothing'}")
        if key.kind == "weight" and len(terms) != 1:
            raise WiringFault(f"UNSHARD makes `{key}` of {', '.join(terms) or 'nothing'}")
        if key == GRAD_NORM and terms != gradients:
            raise WiringFault("the norm in REDUCE is not of every gradient once")
        for term, way in sums[name]:
            times = (f"{terms.count(str(term))} times",) if key.kind == "metric" else ()
            place = "reduced", star(str(key)), star(str(term))
            yield PieceFact(place, (*way, *times), NONE, f"{reduce.action} {key}")


class _Joined:
    """The parts that values of a function join along their first dim: the size of each, and the number of its terms.
    What is done to joined values is done to each part, so a part counts as if it stood alone."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values
        self.parts: dict[str, tuple[tuple[int, int], ...]] = {}

    def note(self, line: Line, sums: Mapping[str, _Sum]) -> None:
        """Note the parts of a line's result, if it joins values or keeps the parts of one."""
        (result,), uses = line.made, line.uses
        if line.op == "aten.cat.default" and line.args[1:] in ((), (0,)):
            self.parts[result.name] = tuple((self.values[name].type.shape[0], len(sums[name])) for name in uses)
        elif len(uses) == 1 and uses[0] in self.parts and self.values[uses[0]].type.shape == result.type.shape:
            self.parts[result.name] = self.parts[uses[0]]

    def taken_out(self, line: Line, sums: Mapping[str, _Sum]) -> _Sum | None:
        """Return the terms of the parts that a line takes out; None if it does something else."""
        name = next(iter(line.uses), "")
        if line.op != "aten.slice.Tensor" or name not in self.parts or line.args[1] != 0:
            return None
        start, end = line.args[2:4]
        at, first, terms = 0, 0, list[tuple[_Term, tuple[str, ...]]]()
        for size, count in self.parts[name]:
            if start <= at and at + size <= end:
                terms += sums[name][first : first + count]
            elif start < at + size and at < end:
                return None  # a part of a part
            at, first = at + size, first + count
        return tuple(terms)

    def counts(self, name: str, terms: int) -> Sequence[int]:
        """Return for each of a value's terms how many its part has."""
        return [count for _, count in self.parts.get(name, ((0, terms),)) for _ in range(count)]


def _sum_of(line: Line, known: dict[str, _Sum], program: Program, joined: _Joined) -> _Sum:
    """Return a line's result as a sum. An addition has its operands' terms; any other line adds itself to the way of
    each term."""
    if unknown := [name for name in line.uses if name not in known]:
        raise WiringFault(f"{program.action} computes `{line.op}` of `{unknown[0]}` outside its functions")
    operands = [known[name] for name in line.uses]
    counts = [joined.counts(name, len(known[name])) for name in line.uses]
    args = [item for item in line.args if not isinstance(item, Ref)]
    row = facts(line.op)
    if row.makes_zeros(line.args):
        return ()
    plain = not line.kwargs and not any(not isinstance(item, list) for item in args)
    if plain and (row.computes == "total" or row.moves == "join" or row.reduces == "sum"):
        return tuple(term for operand in operands for term in operand)
    words = ", ".join(_word(item) for item in (*line.args, *(item for item in line.kwargs if item[0] != MESSAGE)))
    types = "; ".join(sizeless(value, program.mesh) for value in line.made)
    return tuple(
        (term, (*way, f"{line.op}({words}) {at} of {'many' if count > 1 else 'one'}: {types}"))
        for at, operand in enumerate(operands) for (term, way), count in zip(operand, counts[at], strict=True)
    )  # fmt: skip


def _word(item: Any) -> str:
    """Return an argument without sizes and names."""
    if isinstance(item, (Ref, LocalSize)) or (isinstance(item, int) and not isinstance(item, bool)):
        return "/".join(["#", *item.axes]) if isinstance(item, LocalSize) else "#"
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_word, item))}]"
    return repr(item)
