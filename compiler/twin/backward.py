"""Gradients of a step, followed by name: B undoes the calls of F one by one, and REDUCE sums each parameter's
gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ..analysis.dataflow import WeightSources, stored_sources
from ..layout.collectives import MESSAGE
from ..ops.rules import facts
from ..program.binding import GRAD_NORM, LOSS, SCALE, UNSCALE, Binding
from ..program.program import Line, LocalSize, Program, Ref, Value
from ..program.step_values import residual_of
from .bodies import sizeless, star
from .repeats import FamilySlots
from .wiring import NONE, Forward, PieceCall, PieceFact, PieceSource, WiringFault

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
