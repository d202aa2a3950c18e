"""The checker of RESCALE: the loss scale after a step is made of the global norm and of the state before, by the rule
and the numbers of ``torch.amp.GradScaler``.

No number of float64 that is compared elsewhere depends on it, and a wrong rule shows only when a step is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..layout.mesh import Mesh
from ..layout.placement import Placement
from ..program.actions import REDUCE, RESCALE, SCALING
from ..program.binding import GRAD_NORM
from ..program.program import Fault, Program, Ref
from ..program.step_values import BACKOFF, GROWTH, INTERVAL, LOSS_SCALE, NEXT_SCALE, SCALER, residual_of


def check_rescale(programs: Mapping[str, Program], mesh: Mesh) -> Iterator[Fault]:
    """Find state of steps that is no loss scale's, and that RESCALE makes otherwise than it should."""
    whole = Placement.whole(mesh)
    for action, program in programs.items():
        for name, value in program.main.bound("state").items():
            row = SCALER.get(value.binding) if value.binding is not None else None
            dtype = str(value.type.dtype).removeprefix("torch.")
            if residual_of(value.binding) and action == REDUCE:
                continue  # `check_compressed`
            if row is None or (dtype, value.type.shape, value.type.placement) != (row.dtype, (), whole):
                yield Fault("types", f"{action} {name}", "is no state of a loss scale, whole on every rank")
            elif action not in (SCALING, RESCALE):
                yield Fault("types", f"{action} {name}", "reads the state of steps")
    if RESCALE not in programs:
        return
    main = programs[RESCALE].main
    bound = {value.name: value.binding for value in main.parameters}
    lines = [line for line in main.lines if line.op == NEXT_SCALE]
    if len(lines) != 1 or len(main.lines) != 1:
        yield Fault("types", RESCALE, f"is not one `{NEXT_SCALE}`")
        return
    operands, numbers = lines[0].args[:4], lines[0].args[4:]
    read = [bound.get(item.name) for item in operands if isinstance(item, Ref)]
    if read != [GRAD_NORM, *SCALER] or numbers != (GROWTH, BACKOFF, INTERVAL):
        yield Fault("types", RESCALE, "is not made of the norm and the state by the numbers of a loss scale")
    if dict(main.returns) != {key: value.name for key, value in zip(SCALER, lines[0].made, strict=False)}:
        yield Fault("types", RESCALE, "does not return the state that it makes, each number in its place")
    if LOSS_SCALE not in programs[SCALING].main.bindings:
        yield Fault("types", RESCALE, "changes a loss scale that nothing reads")
