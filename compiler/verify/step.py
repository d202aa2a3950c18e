"""Checks of a whole step: what its programs hand to each other, and where offloaded values lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..ops.rules import facts
from ..program.actions import ACTIONS, AVERAGING, BACKWARD, FORWARD, ActionRow, step_kinds
from ..program.binding import KINDS, LOSS, OUTSIDE, PARAMETERS, UNSCALE, Binding, Kind
from ..program.program import Fault, Function, Line, Program, Value
from ..program.step_values import LOSS_SCALE

_HANDED_OVER = frozenset(kind for kind, row in KINDS.items() if row.home in ("stage", "step", "result"))
_OF_LOSS = ("loss", "scale")
"""The kinds of results that a step without a loss lacks."""
_PERSISTENT = frozenset(kind for kind, row in KINDS.items() if row.home in ("buffers", "state"))
"""The kinds of values that live from step to step."""


def _present_rows(programs: Mapping[str, Program]) -> list[ActionRow]:
    """Return the kinds of actions that have programs, in the order of a step."""
    return [row for row in step_kinds() if row.kind in programs]


def mesh_faults(programs: Mapping[str, Program], mesh: Mesh) -> list[Fault]:
    """Return a fault for each missing program, and for each with a wrong mesh, action or role."""
    missing = [row.kind for row in step_kinds() if row.program and not row.optional and row.kind not in programs]
    faults = [Fault("types", "step", f"has no program {', '.join(missing)}")] if missing else []
    for action, program in programs.items():
        if program.mesh != mesh:
            faults.append(Fault("types", action, f"is of mesh {program.mesh}, not {mesh}"))
        if program.action != action:
            faults.append(Fault("types", action, f"says that it is {program.action}"))
        if action not in ACTIONS or not ACTIONS[action].program:
            faults.append(Fault("types", action, "is no action that runs a program"))
    roles = sorted({program.role for program in programs.values()})
    return faults if len(roles) == 1 else [*faults, Fault("types", "step", f"is of the roles {roles}, not of one")]


def check_bindings(programs: Mapping[str, Program], stored: Mapping[str, TensorType]) -> list[Fault]:
    """Return the faults in what programs of a step hand to each other. A value has a reader, and the type that its
    reader declares. Gradients have the types in which parameters are stored. Nothing that leaves a step is still
    partial."""
    return [*_binding_faults(programs, stored), *_result_faults(programs, stored), *_saved_faults(programs)]


def _binding_faults(programs: Mapping[str, Program], stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    """Find parameters of a program that no earlier program returns, that occur twice, or whose type is not that of the
    returned value."""
    known_types: dict[Binding, TensorType] = {}
    updated: dict[Binding, str] = {}
    for row in _present_rows(programs):
        action, main = row.kind, programs[row.kind].main
        for twice in (binding for binding, count in Counter(main.bindings).items() if count > 1):
            yield Fault("types", action, f"takes `{twice}` twice")
        for value in main.parameters:
            kind, binding = value.kind, value.binding
            known = kind in _HANDED_OVER and (kind in row.reads or binding not in known_types)
            if binding is None or not (known or kind in OUTSIDE or kind in _PERSISTENT):
                yield Fault("types", f"{action} {value.name}", f"nothing is bound to `{binding or ''}`")
                continue
            expected = stored.get(binding.name) if kind in PARAMETERS else known_types.get(binding)
            if expected is None and kind in (*_HANDED_OVER, *PARAMETERS):
                yield Fault("types", f"{action} {value.name}", f"nothing makes `{binding}` before it")
            elif expected is not None and expected != value.type:
                yield Fault("types", f"{action} {value.name}", f"`{binding}` has another type where it is made")
            if binding in updated:
                yield Fault("types", f"{action} {value.name}", f"`{binding}` is another since {updated[binding]}")
            if kind in OUTSIDE or kind in _PERSISTENT:
                known_types.setdefault(binding, value.type)
        values = main.values()
        known_types.update((key, values[name].type) for key, name in main.returns)
        updated.update((key, action) for key, _ in main.returns if key.kind in _PERSISTENT)


def _result_faults(programs: Mapping[str, Program], stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    """Find missing results of a program, results without a reader, and results with a wrong placement."""
    trained: dict[Binding, None] = {}
    has_loss = any(LOSS in dict(programs[kind].main.returns) for kind in (FORWARD, AVERAGING))
    for row in _present_rows(programs):
        main = programs[row.kind].main
        keys = dict.fromkeys(key for key, _ in main.returns)
        kinds = row.returns if has_loss else [kind for kind in row.returns if kind not in _OF_LOSS]
        expected = {key: None for kind in kinds for key in _required_results(kind, row, main, stored, trained)}
        for key in {**expected, **keys}:
            if (key in keys) != (key in expected):
                why = "is not returned" if key in expected else "is returned, but nobody takes it"
                yield Fault("types", row.kind, f"`{key.key_in(row.kind)}` {why}")
        trained |= dict.fromkeys(key for key in keys if row.works and key.kind == "gradient")
    for row in _present_rows(programs):
        main, values = programs[row.kind].main, programs[row.kind].main.values()
        persistent = {v.binding: v.type for v in reversed(main.parameters)
                      if v.binding is not None and v.binding.kind in _PERSISTENT}  # fmt: skip
        for key, name in main.returns:
            before = persistent.get(key)
            if before is not None and before != values[name].type:
                yield Fault("types", f"{row.kind} {key}", f"is not placed as the {key.kind} that it updates")
            if key.kind == "output" and values[name].type.placement.partial:
                yield Fault("types", f"{row.kind} {key}", "is still to be summed")
            if row.place == "after" and key.kind != "state":
                yield from _final_faults(row.kind, key, values[name].type, stored)


def _required_results(
    kind: Kind, row: ActionRow, main: Function, stored: Mapping[str, TensorType], trained: Collection[Binding]
) -> Iterable[Binding]:
    """Return the bindings of a kind that a program must return; where it may return any of a kind, those that it does.
    ``trained`` are the gradients that earlier work returns."""
    if kind == "gradient" and kind in row.reads:
        return trained
    if kind == "unscale":
        return [UNSCALE] if LOSS_SCALE in main.bindings else []
    if KINDS[kind].text == "kind":
        return [Binding(kind)] if trained or kind != "grad_norm" else []
    keys = [key for key, _ in main.returns if key.kind == kind]
    if KINDS[kind].text == "kind [name]":
        return [Binding(kind), *keys]
    if kind == "gradient":
        return [key for key in keys if key.name in stored]
    return [key for key in keys if kind not in _PERSISTENT or key in main.bindings]


def _final_faults(action: str, key: Binding, type_: TensorType, stored: Mapping[str, TensorType]) -> Iterator[Fault]:
    if type_.placement.partial:
        yield Fault("types", f"{action} {key}", f"is still to be summed over {', '.join(type_.placement.partial)}")
    elif key.kind == "gradient" and stored.get(key.name) != type_:
        yield Fault("types", f"{action} {key}", "is not placed as its parameter is stored")
    elif key.kind == "buffer":
        return  # `_result_faults` compares it with the type in which it is read
    elif key.kind != "gradient" and (type_.placement.split_axes() or (type_.shape and key.kind != "metric")):
        yield Fault("types", f"{action} {key}", "is not one number, whole on every rank")


def _saved_faults(programs: Mapping[str, Program]) -> Iterator[Fault]:
    """Find saved values that are never read, or whose name in F, in their binding and in B is not one."""
    forward, backward = programs[FORWARD].main, programs[BACKWARD].main
    read = backward.bound("saved")
    for key, name in forward.returns:
        if key.kind == "saved" and key.name != name:
            yield Fault("types", f"F {key}", f"is not `{name}`")
        if key.kind == "saved" and key.name not in read:
            yield Fault("types", f"F {key}", "is saved and never read")
    for label, value in read.items():
        if label != value.name:
            yield Fault("types", f"B {value.name}", f"is not `{value.binding}`")
    for program in (programs[FORWARD], programs[BACKWARD]):
        for function in program.blocks:
            for key, name in function.returns:
                if key != Binding("value", name):
                    yield Fault("types", f"{program.action} {function.name}", f"returns `{name}` as `{key}`")


# ---- offloaded values


def check_places(programs: Mapping[str, Program], offload: Collection[str]) -> Iterator[Fault]:
    """Find offloaded values that are read without a ``load``, and others that are loaded. ``offload`` are the words of
    the plan's ``offload`` lines."""
    for program in programs.values():
        for function in program.functions:
            where = f"{program.role}.{program.action} {function.name}"
            faults = _main_faults(function, offload) if function is program.main else _inner_faults(function)
            yield from (Fault("types", f"{where}: {name}", message) for name, message in faults)


def _inner_faults(function: Function) -> Iterator[tuple[str, str]]:
    for line in function.lines:
        if facts(line.op).carries:
            yield line.made[0].name, "is stored or loaded within a block: that stands in main functions alone"


def _main_faults(main: Function, offload: Collection[str]) -> Iterator[tuple[str, str]]:
    values = main.values()
    words = ((value.name, _offload_word(value.binding, value, offload)) for value in main.parameters)
    away = {name: word for name, word in words if word}
    for line in main.lines:
        way = "" if line.calls_function else facts(line.op).carries
        for name in line.uses:
            if name in away and way != "back":
                yield name, f"is kept away, and `{line.op}` reads it: it lacks a `load`"
            elif name not in away and way == "back":
                yield name, "is loaded, though it lies in memory"
            elif way and name in away and _word_of_line(line) != away[name]:
                yield name, f"is loaded as `{_word_of_line(line)}`, and kept as `{away[name]}`"
        if way == "away":
            away[line.made[0].name] = _word_of_line(line)
    for key, name in main.returns:
        word = _offload_word(key, values[name], offload)
        if away.get(name, "") != word:
            wanted = f"is to be kept as `{word}`" if word else "is to lie in memory"
            have = f"as `{away[name]}`" if name in away else "in memory"
            yield name, f"is returned as {key.words}, which {wanted}; it lies {have}"


def _word_of_line(line: Line) -> str:
    """Return the word under which a line stores or loads."""
    return str(line.args[1]) if len(line.args) > 1 else ""


def _offload_word(binding: Binding | None, value: Value, offload: Collection[str]) -> str:
    """Return the word under which the plan offloads a bound value; "" for one in memory, as single numbers are."""
    word = KINDS[binding.kind].offloaded if binding is not None and value.type.shape else ""
    return word if word in offload else ""
