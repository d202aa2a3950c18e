"""The costs of a block in programs: the bytes that it keeps for backward, and its multiply-adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parc.compiler.build.flops import function_work
from parc.compiler.program.actions import BACKWARD, FORWARD
from parc.compiler.program.liveness import Liveness
from parc.compiler.program.program import Program
from parc.compiler.program.roles import Role


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The bytes that a microbatch keeps of a block, and the multiply-adds of its forward and backward, on a rank."""

    kept: int = 0
    work: int = 0

    def __add__(self, other: BlockCost) -> BlockCost:
        return BlockCost(self.kept + other.kept, self.work + other.work)


def block_costs(role: Role) -> dict[str, BlockCost]:
    """Return the costs of a role's blocks, by their modules; what lies outside blocks is under ""."""
    costs: dict[str, BlockCost] = {}
    for program in role.programs.values():
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
