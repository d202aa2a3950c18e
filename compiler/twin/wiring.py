"""The wiring of a step: facts about the origin of each value that a call reads, without the number of its layer.

The captured graph is cut into pieces where the blocks that F calls begin and end. An operand of a call is then the n-th
value that its piece of the graph reads, made by a function of some kind; a gradient is that of such an operand; results
of REDUCE are sums of named terms. Such facts are the same for all layers, and a build and its twin have the same.
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
from ..program.program import Function, Line, LocalSize, Program, Ref, Value, operands, remembered
from ..program.step_values import residual_of
from .bodies import Body, FamilySlots, Numbers, function_body, sizeless, star

_LAYER_NUMBER = re.compile(r"\d+")
_KEY = "parc.stream_key.default"

PieceSource = tuple[Any, ...]
"""The origin of a value: ``("bound", binding)`` or ``("stream", name, seed)``; in the captured graph ``("made", place,
line, result)``, and in F ``("made", call, result)``."""


class WiringFault(ValueError):
    """The error of a step that is wired as no step may be, whatever its twin is."""


@dataclass(frozen=True, slots=True)
class PieceFact:
    """A fact about one place of a step, equal for all repetitions of a block. The twin must have the pair of ``key``
    and ``what`` somewhere, and all facts of both builds with that pair must share one of the ``options``."""

    key: Hashable
    what: Hashable
    options: frozenset[Hashable]
    where: str


class Kinds:
    """A number for every text; equal texts have equal numbers, in a build and its twin."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, text: Hashable) -> int:
        """The number of a text."""
        return self._known.setdefault(text, len(self._known))

    @staticmethod
    def alone(captured: Program) -> Kinds:
        """Return the kinds of a build that is compared with itself alone, the same for each caller."""
        kinds: Kinds = captured.main.derived.setdefault("kinds", Kinds())
        return kinds

    def graph(self, captured: Function, program: Program) -> Graph:
        """Return a captured graph as pieces, cut at the blocks that a program calls; programs with the same blocks
        share them."""
        blocks = frozenset(line.origin.module for line in program.main.lines if line.calls_function) - {""}
        return remembered(Graph)(captured, blocks, self)


@dataclass(slots=True)
class GraphPiece:
    """A piece of the captured graph: the values that it reads from outside, in order, and its numbers. Pieces of one
    ``kind`` are equal except for numbers; with the same ``numbers_kind`` these are equal too."""

    reads: list[tuple[PieceSource, Value, tuple[int, int]]]
    """The origin of each value, and its place in the short form with its number in its family."""
    families: list[list[str]]
    """Values that are read of every layer, by what they are in it."""
    numbers: tuple[Numbers, ...]
    kind: int
    numbers_kind: int
    returned: list[Binding] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PieceCall:
    """One call of F, with the piece of the captured graph at its place if there is one."""

    line: Line
    place: str
    piece: GraphPiece | None
    kind: int = -1
    """The kind of the function with its backward."""
    before: int = 0
    """The number of calls of this kind before it at its place: stages may cut a piece."""
    reads: list[PieceSource] = field(default_factory=list)
    """The origins of its operands."""

    @property
    def sort(self) -> tuple[int, int, int, str]:
        """The identity that repetitions of a block share: the kind of the captured graph's piece, that of the function,
        the number of such calls before, and the place without its numbers."""
        return self.piece.kind if self.piece else -1, self.kind, self.before, star(self.place)


def places(modules: Sequence[str], blocks: Collection[str], once: Collection[str] = ()) -> list[str]:
    """Return the place of each line: its block (one of ``blocks`` or a numbered module), or "after" the block before.
    If a place comes again later, its further runs are numbered, except for places that are in ``once``."""
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
        results = ((name, source) for name, source in zip(read, sources, strict=True) if source[0] == "made")
        families = _families((name, place, tuple(result)) for name, (_, place, *result) in results)
        function = Function("", tuple(values[name] for name in read), tuple(run), ())
        body = function_body(function, Mesh(), families=families)
        slots = body.form.operands
        kind = kinds.of((*(source[0] for source, slot in zip(sources, slots, strict=True) if slot[1] == 0), *body.rows))
        reads = [*zip(sources, function.parameters, slots, strict=True)]
        return GraphPiece(reads, families, body.numbers, kind, kinds.of(body.numbers))


class Forward:
    """F's main function as calls, beside the captured graph. A conversion of a stored parameter counts as that
    parameter."""

    def __init__(
        self, program: Program, backward: Program | None, graph: Graph, kinds: Kinds, weights: WeightSources
    ) -> None:
        self.program, self.graph = program, graph
        self.functions = {f.name: f for f in program.functions}
        self.backward_of = _backward_of(backward, self.functions) if backward is not None else {}
        self.bodies: dict[str, Body] = {}
        self.backward: dict[str, Body] = {}
        """The bodies of backward functions, by the names of their forward ones."""
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
                self._note_results(call)
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
            results = [(name, self.calls[source[1]], source[2]) for name, source in reads if source[0] == "made"]
            families = _families((name, maker.place, (maker.kind, maker.before, at)) for name, maker, at in results)
        body = function_body(function, self.program.mesh, families=families)
        self.bodies[function.name] = body
        if (backward := self.backward_of.get(function.name)) is None:
            return body.rows, None
        shared = (value.name for value in backward.parameters if value.name in body.names)
        names = {name: f"F {body.names[name]}" for name in shared}  # B's own lines are numbered from 0 too
        tangents = (value.name for value in backward.parameters if value.name not in names)
        names.update((name, f"tangent {number}") for number, name in enumerate(tangents))
        saved = [family for family in body.form.families if {*family} <= names.keys()]
        self.backward[function.name] = function_body(backward, self.program.mesh, names, saved)
        return body.rows, self.backward[function.name].rows

    def _note_results(self, call: PieceCall) -> None:
        """Note the origin of each result of a call: for a parameter that the function returns, that of the operand."""
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
            yield PieceFact(slot, (kind, bool(matches)), matches or _names_from(str(source[1]), call.place), where)
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
            lines = frozenset(read[0][2:] for read in near)
            yield PieceFact(("makes", maker.sort, result), "graph", lines, where)
        else:
            yield PieceFact(slot, (origin, "other"), self._otherwise(call, source), where)

    def _otherwise(self, call: PieceCall, source: PieceSource) -> frozenset[Hashable]:
        """Return the options for a value that the captured graph does not have: its expression in values of no layer,
        or the distance of its maker's layer from its reader's."""
        expression = self._expression(source)
        if expression is not None:
            return frozenset({expression})
        return _names_from(self.calls[source[1]].place, call.place)

    def _expression(self, source: PieceSource) -> Hashable:
        """Return the calls that make a value from values of no layer; None if it depends on a layer's."""
        if source[0] != "made":
            return source if _LAYER_NUMBER.search(str(source[1])) is None else None
        maker = self.calls[source[1]]
        operands = tuple(self._expression(read) for read in maker.reads)
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
        same, place = call.place == wanted[1], piece.returned.index(key)
        options = frozenset({place}) if same else _names_from(wanted[1], call.place)
        yield PieceFact(("returns", key.kind, call.sort, source[2]), same, options, f"F {key}")
        yield PieceFact(("returned", key.kind, piece.kind, place), (*call.sort, source[2], same), NONE, f"F {key}")


NONE: frozenset[Hashable] = frozenset({None})


def _families(results: Iterable[tuple[str, str, Hashable]]) -> list[list[str]]:
    """Return the families among values with the place and the result of their maker: the same result at places that
    differ in their numbers alone."""
    families: dict[Hashable, dict[str, str]] = {}
    for name, place, result in results:
        families.setdefault((star(place), result), {})[place] = name
    return [[*members.values()] for members in families.values() if len(members) > 1]


def _names_from(name: str, place: str) -> frozenset[Hashable]:
    """Return the options to name a thing: its name; and, if it and the ``place`` have numbers, its name with the
    distance of the first from that of the place."""
    here, there = _LAYER_NUMBER.findall(place), _LAYER_NUMBER.findall(name)
    if not here or not there:
        return frozenset({name})
    return frozenset({name, (star(name), *there[1:], int(there[0]) - int(here[0]))})


def _backward_of(backward: Program, forward: Mapping[str, Function]) -> dict[str, Function]:
    """Return B's functions by the names of the functions of F that they differentiate."""
    backward_of = {function.name.removesuffix("_backward"): function for function in backward.blocks}
    for name, function in backward_of.items():
        if name == function.name or name not in forward:
            raise WiringFault(f"B has a function `{function.name}`, which is of none of F's")
    return backward_of


# ---- gradients of a step, followed by name


_Term = tuple[PieceCall, int] | Binding
"""A result of a call of B, with the call of F that it differentiates; or the binding of a parameter of B or REDUCE."""
_Sum = tuple[tuple[_Term, tuple[str, ...]], ...]
"""The terms of a sum, each with the operators through which it went."""


class Backward:
    """B's main function beside F's calls, with the operands of F's calls of which each result is the gradient."""

    def __init__(self, program: Program, forward: Forward, weights: WeightSources) -> None:
        self.program, self.forward = program, forward
        self.stored = stored_sources(program, weights)
        self.sources: dict[str, PieceSource] = {}
        """The origins of values that are no gradients."""
        self.sums: dict[str, _Sum] = {}
        """The terms of gradients."""
        for value in program.main.parameters:
            binding = value.binding
            if binding is not None and binding.kind == "saved":
                if binding.name not in forward.sources:
                    raise WiringFault(f"B reads `{binding}`, which F does not have")
                self.sources[value.name] = forward.sources[binding.name]
            else:
                self.sources[value.name] = "bound", self.stored.get(value.name, binding)
            if binding == SCALE:
                self.sums[value.name] = ((SCALE, ()),)
        self.readers: dict[tuple[PieceCall, int], list[list[int]]] = {}
        """For each result of a call of B, and each use of it, the operands of its call of F that it may be of."""

    def facts(self) -> Iterator[PieceFact]:
        """Yield the facts about B: the operands of each of its calls, and the values that each gradient is of.

        Raises:
            WiringFault: calls are not those of F in reverse, or read what another call of F has; or a gradient counts
                as that of a value which its call does not read.
        """
        remaining = [call for call in reversed(self.forward.calls) if call.line.op in self.forward.backward]
        for line in self.program.main.lines:
            result = next((value.name for value in line.made), "")
            if not line.calls_function and result in self.stored:
                self.sources[result] = "bound", self.stored[result]
            elif facts(line.op).carries:
                self.sources[result] = self.sources[line.uses[0]]
            elif not line.calls_function:
                self.sums[result] = _terms_of_result(line, self.sums, self.program, _JoinedParts({}))
            elif not remaining or line.op != f"{remaining[0].line.op}_backward":
                following = remaining[0].place if remaining else "nothing"
                raise WiringFault(f"B calls `{line.op}` where {following} is next in reverse")
            else:
                call = remaining.pop(0)
                yield from self._call_facts(call, line)
                for at, value in enumerate(line.results):
                    if value is not None:
                        self.sums[value.name] = (((call, at), ()),)
                        self.readers[call, at] = []
        if remaining:
            raise WiringFault(f"B does not call `{remaining[0].line.op}_backward` of {remaining[0].place}")
        for name, gradient in self.program.main.returned("gradient").items():
            terms = self.sums[gradient]
            self._note_readers(terms, ("bound", Binding("parameter", name)), f"B {name}")
            yield PieceFact(("whole gradient", star(name)), frozenset(path for _, path in terms), NONE, f"B {name}")
        for (call, at), uses in self.readers.items():
            operands = self.forward.bodies[call.line.op].form.operands
            place, number = self.forward.backward[call.line.op].form.results[at]
            read = ([(operands[slot][0], operands[slot][1] - number) for slot in slots] for slots in uses)
            choices = frozenset(_with_whole_families(choice, operands) for choice in product(*read))
            count = frozenset(map(len, choices))
            yield PieceFact(("goes", call.sort, place), count, choices, f"B {call.place} result {at}")

    def _call_facts(self, call: PieceCall, line: Line) -> Iterator[PieceFact]:
        """Yield the facts about one call of B, which reads the operands and results of its call of F and the gradients
        of those results."""
        function = self.forward.functions[call.line.op]
        results = [(name, self.forward.sources[result.name]) for result, (_, name)
                   in zip(call.line.results, function.returns, strict=True) if result is not None]  # fmt: skip
        sources = {**dict(zip((value.name for value in function.parameters), call.reads, strict=True)), **dict(results)}
        values = function.values()
        for at, (value, name) in enumerate(zip(self.program.function(line.op).parameters, line.uses, strict=True)):
            where = f"B {call.place} operand {at}"
            if value.name in sources:
                if self.sources.get(name) != sources[value.name]:
                    raise WiringFault(f"{where}, `{name}`, is not `{value.name}` of its call of F")
                continue
            terms = self.sums.get(name)
            if terms is None:
                raise WiringFault(f"{where}, `{name}`, is no gradient")
            alike = [result for result in results if values[result[0]].type.shape == value.type.shape]
            fits = [(of, source) for of, source in alike if all(self._slots(term, source) for term, _ in terms)]
            if not fits:
                raise WiringFault(f"{where}, `{name}`, is the gradient of something else")
            for term, _ in terms:
                if not isinstance(term, Binding):
                    self.readers[term].append([slot for _, source in fits for slot in self._slots(term, source)])
            paths = frozenset(path for _, path in terms)
            names = self.forward.bodies[call.line.op].names
            place = self.forward.backward[call.line.op].form.operands[at]
            yield PieceFact(("gradient", call.sort, place), paths, frozenset(names[of] for of, _ in fits), where)

    def _note_readers(self, terms: _Sum, source: PieceSource, where: str) -> None:
        """Note that the sum of these terms is the gradient of a value of F."""
        for term, _ in terms:
            slots = self._slots(term, source)
            if not slots or isinstance(term, Binding):
                raise WiringFault(f"{where} is given what is no gradient of it")
            self.readers[term].append(slots)

    def _slots(self, term: _Term, source: PieceSource) -> list[int]:
        """Return the operand positions at which the call of F behind a gradient's term reads a value of F. The loss,
        which no call reads, has the position 0."""
        if isinstance(term, Binding):
            return [0] * (source == self.forward.returned.get(LOSS))
        return [slot for slot, read in enumerate(term[0].reads) if read == source]


def _with_whole_families(choice: Sequence[tuple[int, int]], operands: FamilySlots) -> tuple[Hashable, ...]:
    """Return the operands that a result is the gradient of, in order; a family of which it is that of each member once
    is one."""
    sizes, uses = Counter(place for place, _ in operands), Counter(choice)
    whole = {place for place, size in sizes.items() if size > 1 and all(uses[place, n] == 1 for n in range(size))}
    return (*sorted(slot for slot in choice if slot[0] not in whole), *((place, "each") for place in sorted(whole)))


def reduce_facts(reduce: Program) -> Iterator[PieceFact]:
    """Yield the facts about REDUCE, or another program that a role runs once a step: the terms of each gradient, of the
    norm, of the loss, of weights and of other results.

    Raises:
        WiringFault: a gradient is made of another parameter's, or the norm is not of all gradients, each once.
    """
    main = reduce.main
    # one over the loss scale is no term: ``check_scaling`` proves what is multiplied by it
    sums: dict[str, _Sum] = {value.name: ((value.binding, ()),) if value.binding != UNSCALE else ()
                             for value in main.parameters if value.binding}  # fmt: skip
    joined = _JoinedParts(main.values())
    for line in main.lines:
        sliced = joined.sliced(line, sums)
        sums[line.made[0].name] = _terms_of_result(line, sums, reduce, joined) if sliced is None else sliced
        joined.note(line, sums)
    gradients = sorted(str(binding) for binding in main.bindings if binding.kind == "gradient")
    for key, name in main.returns:
        # the residual of the step before is no term of a gradient: ``check_compressed`` proves where it is added
        terms = sorted(str(term) for term, _ in sums[name]
                       if key.kind == "state" or not isinstance(term, Binding) or not residual_of(term))  # fmt: skip
        if key.kind == "gradient" and terms != [str(key)]:
            raise WiringFault(f"REDUCE makes `{key}` of {', '.join(terms) or 'nothing'}")
        if key.kind == "weight" and len(terms) != 1:
            raise WiringFault(f"UNSHARD makes `{key}` of {', '.join(terms) or 'nothing'}")
        if key == GRAD_NORM and terms != gradients:
            raise WiringFault("the norm in REDUCE is not of every gradient once")
        for term, path in sums[name]:
            times = (f"{terms.count(str(term))} times",) if key.kind == "metric" else ()
            place = "reduced", star(str(key)), star(str(term))
            yield PieceFact(place, (*path, *times), NONE, f"{reduce.action} {key}")


class _JoinedParts:
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

    def sliced(self, line: Line, sums: Mapping[str, _Sum]) -> _Sum | None:
        """Return the terms of the parts that a slice of joined values takes; None for another line."""
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


def _terms_of_result(line: Line, known: dict[str, _Sum], program: Program, joined: _JoinedParts) -> _Sum:
    """Return the terms of a line's result. A sum has its operands' terms; any other line adds itself to the path of
    each term."""
    if unknown := [name for name in line.uses if name not in known]:
        raise WiringFault(f"{program.action} computes `{line.op}` of `{unknown[0]}` outside its functions")
    operands = [known[name] for name in line.uses]
    counts = [joined.counts(name, len(known[name])) for name in line.uses]
    args = [item for item in line.args if not isinstance(item, Ref)]
    row = facts(line.op)
    if row.makes_zeros(line.args):
        return ()
    plain = not line.kwargs and all(isinstance(item, list) for item in args)
    if plain and (row.computes == "total" or row.moves == "join" or row.reduces == "sum"):
        return tuple(term for operand in operands for term in operand)
    arguments = (*line.args, *(item for item in line.kwargs if item[0] != MESSAGE))
    words = ", ".join(map(_sizeless_text, arguments))
    types = "; ".join(sizeless(value, program.mesh) for value in line.made)
    return tuple(
        (term, (*path, f"{line.op}({words}) {at} of {'many' if count > 1 else 'one'}: {types}"))
        for at, operand in enumerate(operands) for (term, path), count in zip(operand, counts[at], strict=True)
    )  # fmt: skip


def _sizeless_text(item: Any) -> str:
    """Return an argument without sizes and names."""
    if isinstance(item, (Ref, LocalSize)) or (isinstance(item, int) and not isinstance(item, bool)):
        return "/".join(["#", *item.axes]) if isinstance(item, LocalSize) else "#"
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_sizeless_text, item))}]"
    return repr(item)
