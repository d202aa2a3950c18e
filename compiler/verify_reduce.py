"""The checker of REDUCE: it returns each gradient that it is given, summed, and the root of all their squares.

Types say that a sum is complete and whole on every rank; here it is what is summed. A norm that binds no clipping shows
in no weight, so it is proved, and tested beside that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .program import Line, Program, Ref
from .verify import Fault

_GRADIENT = "gradient "
_KEEPS = frozenset({"parc.all_reduce", "parc.reduce_scatter", "parc.all_gather", "aten._to_copy.default"})


@dataclass(frozen=True, slots=True)
class _Made:
    """What a value of REDUCE is: a parameter's role, or ``squares`` (their ``root``) of values by name."""

    role: str = ""
    squares: tuple[str, ...] = ()
    root: bool = False


def check_reduce(program: Program) -> Iterator[Fault]:
    """What is wrong with the gradients that REDUCE returns and with their norm."""
    main = program.main
    known: dict[str, _Made | None] = {value.name: _Made(value.role) for value in main.parameters}
    for line in main.lines:
        found = _made(line, [known[name] for name in line.uses()])
        known.update((value.name, found) for value in line.made)
    gradients = {name: key for key, name in main.returns if key.startswith(_GRADIENT)}
    for name, key in gradients.items():
        if known[name] != _Made(key):
            yield Fault("types", f"REDUCE {key}", "is not that gradient's sum")
    norm = known.get(dict(main.returns).get("grad_norm", ""))
    if norm is None or not norm.root:
        if gradients:
            yield Fault("types", "REDUCE grad_norm", "is not proved to be the root of the gradients' squares")
        return
    times = Counter(norm.squares)
    for name in {**gradients, **times}:
        if times[name] != (name in gradients):
            what = gradients.get(name, f"value {name}").replace(" ", " `", 1)
            yield Fault("types", "REDUCE grad_norm", f"counts the {what}` {times[name]} times")


def _made(line: Line, given: list[_Made | None]) -> _Made | None:
    """What a line makes of what it reads; None is nothing that REDUCE is there for."""
    known = [made for made in given if made is not None]
    if len(known) != len(given):
        return None
    if line.op == "aten.full.default" and line.args[1] == 0.0:  # what a role adds that has no gradients
        return _Made()
    if line.op in _KEEPS:
        return known[0]
    if line.op == "parc.square_sum.default" and known[0].role.startswith(_GRADIENT):
        return _Made(squares=tuple(line.uses()))
    summed = line.op in ("aten.stack.default", "aten.sum.default", "aten.sqrt.default") and len(line.args) == 1
    if line.op == "aten.add.Tensor" and not line.kwargs:
        summed = all(isinstance(item, Ref) for item in line.args)
    if not summed or any(made.role or made.root for made in known):
        return None
    return _Made(squares=tuple(name for made in known for name in made.squares), root=line.op == "aten.sqrt.default")
