"""The values that a forward saves for backward, by the module that makes them."""

from __future__ import annotations

from .blocks import complete
from .liveness import Liveness, local_bytes
from .program import Function, Origin, Program


def saved_bytes_by_module(program: Program, load: float = 1.0) -> dict[str, int]:
    """Return the bytes that a rank saves of one microbatch for backward, each storage once, by the module that makes
    the first saved value in it; what a stage has received is under ``""``. The busiest rank of experts has ``load``
    times the mean of their rows."""
    main, live = program.main, Liveness(program, load)
    owned = {
        value.name: local_bytes(value.type, program, load)
        for value in main.parameters
        if value.binding is not None and value.binding.home in ("stage", "neighbour")
    }
    kept, root = dict(live.peak(main, owned, {}, {}).kept), live.root(main)
    makers = _makers(program, main, Origin())
    sizes: dict[str, int] = {}
    for name in main.returned("saved").values():
        module = makers.get(name, "")
        sizes[module] = sizes.get(module, 0) + kept.pop(root[name], 0)
    return sizes


def _makers(program: Program, function: Function, caller: Origin) -> dict[str, str]:
    """Return the module of the line that makes each value; a line of a called function is that of the value inside."""
    makers: dict[str, str] = {}
    for line in function.lines:
        inner: dict[str, str] = {}
        module = complete(line.origin.module, caller.module)
        if line.calls_function:
            callee = program.function(line.op)
            inside = _makers(program, callee, line.origin)
            returned = [inside.get(name, module) for _, name in callee.returns]
            inner = {value.name: own for value, own in zip(line.results, returned, strict=True) if value is not None}
        makers.update((value.name, inner.get(value.name, module)) for value in line.made)
    return makers
