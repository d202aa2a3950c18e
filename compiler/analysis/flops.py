"""Floating-point operations of lines, blocks and steps, counted from the products in programs; and the timeline of a
step in which each action takes as long as its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..layout.sweep import SizeSweep, each_shape
from ..ops.factors import OpCall
from ..ops.rules import facts
from ..program.actions import BACKWARD, FORWARD, Action, work_kinds
from ..program.plain import whole_steps, without_rings
from ..program.program import Line, Program, Value
from ..program.roles import Role
from ..schedules.timeline import Timeline, simulate
from .dataflow import local_call
from .liveness import Liveness

_MOST_GRADIENTS = 2
"""The most gradients that the backward of a product makes, one for each operand and each by as many multiply-adds as
the product. Attention has two products, and four in its backward."""


def multiply_adds(line: Line, values: Mapping[str, Value], mesh: Mesh) -> int:
    """Count the multiply-adds of a line on a rank; 0 for one that is no product."""
    count = None if line.calls_function else facts(line.op).flops
    if count is None:
        return 0
    return counted(count, local_call(line, values, mesh), mesh)


def counted(count: Callable[[OpCall], int], call: OpCall, mesh: Mesh) -> int:
    """Return what a row counts of a call with local shapes; in a sweep of meshes an array, where shapes have arrays."""
    if not isinstance(mesh, SizeSweep):
        return count(call)

    def of(shapes: Sequence[tuple[int, ...]]) -> int:
        number = len(call.operands)
        return count(replace(call, operands=tuple(shapes[:number]), results=tuple(shapes[number:])))

    return each_shape(of, [*call.operands, *call.results])  # type: ignore[no-any-return]


def function_work(program: Program) -> dict[str, int]:
    """Return the multiply-adds on a rank of each function of a program, with those of the functions that it calls.
    Recomputed values count in backward; a ring counts as its attention."""
    work: dict[str, int] = {}
    for function in without_rings(program).functions:  # main functions stand behind the blocks that they call
        values = function.values()
        work[function.name] = sum(
            work[line.op] if line.calls_function else multiply_adds(line, values, program.mesh)
            for line in function.lines
        )
    return work


def stage_flops(roles: Mapping[str, Role]) -> dict[int, dict[str, int]]:
    """Return, for each stage and kind of its work, the floating-point operations of one microbatch on a rank."""
    flops: dict[int, dict[str, int]] = {}
    for role in roles.values():
        for stage in role.stages:
            of_kind = {kind: role.programs.get(Action(stage, kind).program_in(role.programs)) for kind in work_kinds()}
            flops[stage] = {
                kind: 2 * function_work(program)[program.main.name] for kind, program in of_kind.items() if program
            }
    return dict(sorted(flops.items()))


def step_timeline(roles: Mapping[str, Role], costs: Mapping[str, float] | None = None) -> Timeline:
    """Play the step of a build's roles on a clock: work takes as long as ``costs`` say of its kind, by default as a
    rank's floating-point operations in it, and messages take no time. If nothing is a product, work takes its
    ``slots``.

    Raises:
        ValueError: an order that deadlocks.
    """
    actions = {name: role.actions for name, role in roles.items()}
    if costs is not None:
        return simulate(actions, work=lambda action: costs[action.kind])
    flops = stage_flops(roles)
    if not any(any(of_kind.values()) for of_kind in flops.values()):
        return simulate(actions)
    return simulate(actions, work=lambda action: flops[action.stage].get(action.kind, 0))


def step_flops(reference: Program, microbatches: int) -> int:
    """Count the model FLOPs of a step on its whole batch, two for each multiply-add: those of the forward, and of a
    backward that makes the gradients of what is trained. What ranks repeat, or recompute in backward, counts once, and
    of experts with a capacity no more slots than tokens choose them."""
    total = 0
    for function in reference.functions:
        values, taken = function.values(), dict[str, Fraction]()
        trained = {value.name for value in function.parameters if _is_trained(value)}
        for line in function.lines:
            with_gradient = [name for name in line.uses if name in trained]
            if with_gradient and not facts(line.op).stops_gradient:
                trained.update(value.name for value in line.made if value.type.dtype.is_floating_point)
            _follow_slots(line, values, taken)
            share = next((taken[value.name] for value in line.made if value.name in taken), Fraction(1))
            work = int(share * multiply_adds(line, values, reference.mesh))
            total += work * (1 + min(_MOST_GRADIENTS, len(with_gradient)))
    return 2 * total * microbatches


def _follow_slots(line: Line, values: Mapping[str, Value], taken: dict[str, Fraction]) -> None:
    """Add to ``taken`` what a line makes of slots: the share of them that tokens take if all experts are chosen equally
    often."""
    effect = "" if line.calls_function else facts(line.op).of_slots
    if effect == "assigns":
        (experts, _, tokens), (_, _, capacity) = values[line.uses[0]].type.shape, line.made[0].type.shape
        taken[line.made[0].name] = min(Fraction(1), Fraction(int(line.args[2]) * tokens, experts * capacity))
    elif not effect and (shares := [taken[name] for name in line.uses if name in taken]):
        taken.update((value.name, shares[0]) for value in line.made)


def _is_trained(value: Value) -> bool:
    return value.binding is not None and value.binding.kind == "parameter"


def product_type(programs: Iterable[Program]) -> TensorType | None:
    """Return the type of the result of the largest product of programs; None where they have none."""
    products = [
        (multiply_adds(line, function.values(), program.mesh), line.made[0].type)
        for program in programs
        for function in program.functions
        for line in function.lines
        if not line.calls_function and facts(line.op).flops is not None
    ]
    return max(products, key=lambda pair: pair[0])[1] if products else None


# ---- costs of blocks


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The bytes that a microbatch saves of a block for backward, and the multiply-adds of its forward and backward, on
    a rank."""

    kept: int = 0
    work: int = 0

    def __add__(self, other: BlockCost) -> BlockCost:
        return BlockCost(self.kept + other.kept, self.work + other.work)


def block_costs(role: Role) -> dict[str, BlockCost]:
    """Return the costs of a role's blocks, by their modules; what lies outside blocks is under ""."""
    costs: dict[str, BlockCost] = {}
    for program in whole_steps({role.name: role.programs})[role.name].values():
        if program.action in (FORWARD, BACKWARD):
            for module, cost in _call_costs(program):
                costs[module] = costs.get(module, BlockCost()) + cost
    return costs


def _call_costs(program: Program) -> Iterator[tuple[str, BlockCost]]:
    main, values, live = program.main, program.main.values(), Liveness(program)
    work = function_work(program)
    root, counted = live.root(main), set[str]()
    for line in main.lines:
        if not line.calls_function:
            continue
        kept = 0
        for name in line.uses:
            if values[name].kind == "saved" and root[name] not in counted:
                counted.add(root[name])
                kept += live.bytes_of(main, name)
        yield line.origin.module, BlockCost(kept, work[line.op])
