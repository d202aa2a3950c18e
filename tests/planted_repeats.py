"""Ways to get one repetition wrong: the block that reads, saves or gets a value, and numbers of one size of the
model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.program.binding import Binding, Kind
from parc.compiler.program.program import Line, Ref, map_references
from tests.planted_sites import Mutants, Programs, Site, reading, sites, with_argument, with_lines, with_main
from tests.planted_slips import unreduced


def _swapped(item: Any, one: str, other: str) -> Any:
    names = {one: other, other: one}
    return map_references(item, lambda name: Ref(names.get(name, name)))


def _calls(programs: Programs, action: str) -> list[tuple[int, Line]]:
    return [(at, line) for at, line in enumerate(programs[action].main.lines) if line.calls_function]


def _alike(programs: Programs, action: str) -> Iterator[tuple[int, Line, int, Line]]:
    """Yield pairs of calls of one function."""
    for (i, a), (j, b) in combinations(_calls(programs, action), 2):
        if a.op == b.op:
            yield i, a, j, b


def _roles(programs: Programs, action: str) -> dict[str, str]:
    """Return the role of each parameter of a main function; keys of streams have one too."""
    main = programs[action].main
    keys = {v.name: "stream" for line in main.lines if line.op == "parc.stream_key.default" for v in line.made}
    return {v.name: str(v.binding) for v in main.parameters} | keys


def exchanged(action: str, kind: str, every: bool, programs: Programs) -> Mutants:
    """Let two calls of one function read one another's operands: all of a kind, or one."""
    roles = _roles(programs, action)
    for i, a, j, b in _alike(programs, action):
        places = [at for at, (x, y) in enumerate(zip(a.uses, b.uses, strict=True))
                  if x != y and roles.get(x, "").startswith(kind)]  # fmt: skip
        for chosen in [places] if every else [[place] for place in places]:
            first = tuple(b.args[at] if at in chosen else item for at, item in enumerate(a.args))
            second = tuple(a.args[at] if at in chosen else item for at, item in enumerate(b.args))
            if chosen:
                what = (
                    f"{action} {a.origin.module} and {b.origin.module}: {[str(a.args[at].name) for at in chosen][:3]}"
                )
                yield what, with_lines(programs, action, {i: replace(a, args=first), j: replace(b, args=second)})


def within(action: str, kind: str, programs: Programs) -> Mutants:
    """Let a call read two operands of a kind and of one type in each other's place."""
    roles, values = _roles(programs, action), programs[action].main.values()
    for at, line in _calls(programs, action):
        read = [name for name in line.uses if roles.get(name, "").startswith(kind)]
        for one, other in combinations(read, 2):
            if values[one].type == values[other].type:
                what = f"{action} {line.origin.module}: {one} and {other}"
                yield what, with_lines(programs, action, {at: replace(line, args=_swapped(line.args, one, other))})


def skipped(programs: Programs) -> Mutants:
    """Let a call of F read the result of an earlier call of the same function, or of another, in the same place."""
    main = programs["F"].main
    values = main.values()
    made: dict[str, tuple[str, int]] = {}
    for at, line in enumerate(main.lines):
        for place, item in enumerate(line.args):
            if line.calls_function and item.name in made:
                like = [n for n in made if n != item.name and made[n][1] < made[item.name][1]
                        and values[n].type == values[item.name].type]  # fmt: skip
                for name in like[-3:]:
                    other = with_argument(line, place, Ref(name))
                    what = f"{line.origin.module} reads {name} for {item.name}"
                    yield what, with_lines(programs, "F", {at: other})
        made.update((v.name, (line.op, at)) for v in line.made if line.calls_function)


def inputs(programs: Programs) -> Mutants:
    """Let all calls read two inputs of one type in each other's place."""
    main = programs["F"].main
    found = [v for v in main.parameters if v.kind == "input"]
    for one, other in combinations(found, 2):
        if one.type == other.type:
            swapped = {one: replace(one, binding=other.binding), other: replace(other, binding=one.binding)}
            parameters = tuple(swapped.get(v, v) for v in main.parameters)
            yield f"{one.name} and {other.name}", with_main(programs, "F", parameters=parameters)


def reordered(programs: Programs) -> Mutants:
    """Run two consecutive calls of one function in the other order, each with its own weights."""
    calls = [(i, a, j, b) for i, a, j, b in _alike(programs, "F") if set(b.uses) & {v.name for v in a.made}]
    main = programs["F"].main
    for i, a, j, b in calls:
        (between,) = {v.name for v in a.made} & set(b.uses)
        place = [item.name for item in b.args].index(between)
        out = next(n.name for n, m in zip(b.results, a.results, strict=True) if n and m and m.name == between)
        first, second = with_argument(b, place, a.args[place]), with_argument(a, place, Ref(out))
        rest = reading(main, out, between).lines[j + 1 :]
        lines = (*main.lines[:i], *main.lines[i + 1 : j], first, second, *rest)
        yield f"{b.origin.module} before {a.origin.module}", with_main(programs, "F", lines=lines)


def streams(programs: Programs) -> Mutants:
    """Exchange two streams of random numbers."""
    lines = programs["F"].main.lines
    keys = [(at, line) for at, line in enumerate(lines) if line.op == "parc.stream_key.default"]
    for (i, a), (j, b) in combinations(keys, 2):
        changed = {i: replace(a, args=b.args), j: replace(b, args=a.args)}
        yield f"{a.args[1]} and {b.args[1]}", with_lines(programs, "F", changed)


def results(action: str, kind: Kind, programs: Programs) -> Mutants:
    """Exchange two values that a program returns, or return one for both."""
    main = programs[action].main
    values = main.values()
    found = [(key, name) for key, name in main.returns if key.kind == kind]
    for (one, x), (other, y) in combinations(found, 2):
        if values[x].type == values[y].type and x != y:
            swap = {one: y, other: x}
            returns = tuple((k, swap.get(k, n)) for k, n in main.returns)
            yield f"{one} and {other}", with_main(programs, action, returns=returns)


def exchanged_results(action: str, programs: Programs) -> Mutants:
    """Exchange the names of two results of two calls of one function: the readers of one get all that the other
    gives."""
    for i, a, j, b in _alike(programs, action):
        for place, (x, y) in enumerate(zip(a.results, b.results, strict=True)):
            if x is not None and y is not None:
                changed = {i: _with_result(a, place, y), j: _with_result(b, place, x)}
                order = programs[action].main.lines[i + 1 : j + 1]
                if not any(y.name in line.uses for line in order):
                    yield f"{action} {x.name} and {y.name}", with_lines(programs, action, changed)


def _with_result(line: Line, place: int, value: Any) -> Line:
    return replace(line, results=(*line.results[:place], value, *line.results[place + 1 :]))


def numbers(action: str, factor: float, programs: Programs) -> Mutants:
    """Change a number that is no size, in all repetitions of one program."""
    for site in sites(programs, lambda line: line.op not in COLLECTIVES, action):
        for place, item in enumerate(site.line.args):
            whole = isinstance(item, int) and not isinstance(item, bool) and "." in site.line.op and item > 1
            if whole or (isinstance(item, float) and 0 < item < 1e30):
                other = type(item)(item * factor)
                what = f"{action} {site.function.name}: {site.line.op} {other} for {item}"
                yield what, site.replaced(with_argument(site.line, place, other))


def other_numbers(action: str, others: Programs, programs: Programs) -> Mutants:
    """Take a number from the twin, as if a pass had taken it from the smaller model."""
    theirs = {function.name: function for function in others[action].functions[:-1]}
    for function in programs[action].functions[:-1]:
        mate = theirs.get(function.name)
        if mate is None or [line.op for line in mate.lines] != [line.op for line in function.lines]:
            continue
        for at, (line, other) in enumerate(zip(function.lines, mate.lines, strict=True)):
            for place, (item, small) in enumerate(zip(line.args, other.args, strict=True)):
                if isinstance(item, (int, float)) and item != small:
                    what = f"{action} {function.name}: {line.op} {small} for {item}"
                    yield what, Site(programs, action, function, at).replaced(with_argument(line, place, small))


_OTHER = {
    "aten.silu.default": "aten.gelu.default",
    "aten.gelu.default": "aten.silu.default",
    "aten.add.Tensor": "aten.sub.Tensor",
    "aten.mul.Tensor": "aten.div.Tensor",
    "aten.tanh.default": "aten.sigmoid.default",
    "aten.neg.default": "aten.abs.default",
    "aten.rsqrt.default": "aten.reciprocal.default",
}


def one_apart(action: str, programs: Programs) -> Mutants:
    """Let one call alone run another function, in which an operator is another."""
    program = programs[action]
    for at, call in _calls(programs, action)[1:3]:
        function = program.function(call.op)
        for place, line in enumerate(function.lines):
            if line.op in _OTHER:
                changed = replace(line, op=_OTHER[line.op])
                apart = replace(
                    function, name="apart", lines=(*function.lines[:place], changed, *function.lines[place + 1 :])
                )
                lines = program.main.lines
                main = replace(program.main, lines=(*lines[:at], replace(call, op="apart"), *lines[at + 1 :]))
                made = replace(program, functions=(*program.functions[:-1], apart, main))
                yield f"{action} {call.origin.module}: {changed.op} for {line.op}", {**programs, action: made}


def dropped(programs: Programs) -> Mutants:
    """Leave a block out of all programs, with its weights and their gradients."""
    for _, a, _, b in _alike(programs, "F"):
        between = {v.name for v in a.made} & set(b.uses)
        if len(between) != 1:
            continue
        name = between.pop()
        place = b.uses.index(name)
        mine = {v.name for v in a.made}
        forward = programs["F"].main
        saved = {Binding("saved", v) for v in mine}
        gone = [key.name for key, _ in forward.returns if key in saved]
        rest = replace(forward, lines=tuple(line for line in forward.lines if line is not a))
        lines = reading(rest, name, a.args[place].name).lines
        returns = [pair for pair in forward.returns if pair[0] not in saved]
        made = with_main(programs, "F", lines=lines, returns=tuple(returns))
        backward = programs["B"].main
        call = next(x for _, x in _calls(programs, "B") if x.op == f"{a.op}_backward" and set(gone) & set(x.uses))
        instead = next(v for v in call.made if v.type == forward.values()[name].type)
        rest = replace(backward, lines=tuple(line for line in backward.lines if line is not call))
        lines = reading(rest, instead.name, call.args[-1].name).lines
        kept = [(key, v) for key, v in backward.returns if v not in {made.name for made in call.made}]
        made = with_main(made, "B", lines=lines, returns=tuple(kept))
        for key, v in backward.returns:
            if (key, v) not in kept:
                made = unreduced(made, key)
        yield (
            a.origin.module,
            with_main(with_main(made, "F", parameters=_read(made, "F")), "B", parameters=_read(made, "B")),
        )


def _read(programs: Programs, action: str) -> tuple[Any, ...]:
    main = programs[action].main
    read = {name for line in main.lines for name in line.uses} | {name for _, name in main.returns}
    return tuple(value for value in main.parameters if value.name in read)


def norm_twice(programs: Programs) -> Mutants:
    """Count a gradient twice in the norm, and one of its type not at all."""
    main = programs["REDUCE"].main
    squares = [line for line in main.lines if line.op == "parc.square_sum.default"]
    for one, other in combinations(squares, 2):
        if one.made[0].type == other.made[0].type:
            x, y = one.made[0].name, other.made[0].name
            rest = replace(main, lines=tuple(line for line in main.lines if line is not other))
            yield f"{x} for {y}", with_main(programs, "REDUCE", lines=reading(rest, y, x).lines)


def reduced(programs: Programs) -> Mutants:
    """Exchange two sums over ranks in REDUCE."""
    main = programs["REDUCE"].main
    sums = [(at, line) for at, line in enumerate(main.lines) if line.op == "parc.all_reduce"]
    for (i, a), (j, b) in combinations(sums, 2):
        if a.made[0].type == b.made[0].type and a.args[1:] == b.args[1:]:
            changed = {i: replace(a, args=b.args), j: replace(b, args=a.args)}
            yield f"{a.made[0].name} and {b.made[0].name}", with_lines(programs, "REDUCE", changed)
