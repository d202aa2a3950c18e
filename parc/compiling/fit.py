"""``recompute … fit``: the choice of the blocks that backward makes again, so that a rank fits into a size.

Each block keeps what it would without a line, or makes all but its products again, or everything. Blocks of one kind
differ only in number, so the least work for every amount of kept bytes is found kind by kind (dynamic programming).
Which of these choices is the first that fits is found by compiling: memory is what the report will say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from parc.compiler.analysis.flops import BlockCost, block_costs
from parc.compiler.analysis.memory import Memory
from parc.compiler.capture.capture import Captured
from parc.compiler.capture.node_facts import noted
from parc.compiler.ops.recompute import RecomputeLine, in_modules
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.blocks import block_of, starred
from parc.compiler.program.roles import stage_key
from parc.compiling.compiled import Compiled
from parc.compiling.fitted import POLICIES, Fitted, RoleFit
from parc.grammar.codes import NO_FIT
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.syntax import size_text
from parc.report import memory_of

# ---- the blocks of a model

Scopes = Mapping[str, tuple[str, ...]]
"""The modules that a line means inside each block, by blocks in the order in which they run."""


def stages_of(compiled: Compiled, scopes: Scopes) -> dict[str, int]:
    """Return the stage of each block, in the order of the scopes."""
    stages = {
        line.origin.module: (stage_key(key) or (0, ""))[0]
        for role in compiled.build.roles.values() for key, program in role.programs.items()
        if program.action == FORWARD for line in program.main.lines
    }  # fmt: skip
    return {block: stages.get(block, 0) for block in scopes}


def scopes_of(line: RecomputeLine, captured: Captured) -> Scopes:
    """Return the modules that a line means inside each block. A module that holds numbered blocks means all of these;
    one that neither holds any nor lies in one is a block of its own."""
    scopes: dict[str, tuple[str, ...]] = {}
    outside = sorted((name for name in line.modules if name and block_of(name) is None), key=len)
    for node in captured.graph.nodes:
        module = noted(node).origin.module if node.op == "call_function" else ""
        numbered = block_of(module)
        if numbered is None:
            outer = next((name for name in outside if in_modules(module, (name,))), None)
            if outer and not any(block_of(name) and in_modules(name, (outer,)) for name in captured.modules):
                scopes.setdefault(outer, (outer,))
        elif line.holds(numbered):
            scopes.setdefault(numbered, (numbered,))
        elif inside := tuple(name for name in line.modules if block_of(name) == numbered):
            scopes.setdefault(numbered, inside)
    return scopes


def lines_for(policies: Mapping[str, int], line: RecomputeLine, scopes: Scopes) -> tuple[RecomputeLine, ...]:
    """Return the lines that a choice stands for."""
    modules = [tuple(name for block, inside in scopes.items() if policies.get(block) == policy for name in inside)
               for policy in range(len(POLICIES))]  # fmt: skip
    return tuple(RecomputeLine(meant, keep, line.line)
                 for meant, keep in zip(modules, POLICIES, strict=True) if meant and keep is not None)  # fmt: skip


# ---- the search


@dataclass(frozen=True, slots=True)
class _Option:
    """A choice for the blocks of a role: the bytes that a microbatch keeps, the work of a step, and the number of
    blocks of each kind by policy."""

    kept: int = 0
    work: int = 0
    counts: tuple[tuple[int, ...], ...] = ()


def options_of(kinds: Sequence[tuple[int, Sequence[BlockCost]]]) -> list[_Option]:
    """Return the choices of which none keeps and computes less than another, by growing work: of kinds of blocks, with
    their number and their cost under each policy."""
    options = [_Option()]
    for number, costs in kinds:
        merged = [
            _Option(
                option.kept + sum(n * cost.kept for n, cost in zip(counts, costs, strict=True)),
                option.work + sum(n * cost.work for n, cost in zip(counts, costs, strict=True)),
                (*option.counts, counts),
            )
            for option in options
            for counts in _compositions(number, len(costs))
        ]
        options = []
        for option in sorted(merged, key=lambda option: (option.work, option.kept)):
            if not options or option.kept < options[-1].kept:
                options.append(option)
    return options


def _compositions(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a sum of so many terms."""
    if parts == 1:
        yield (number,)
        return
    for first in range(number, -1, -1):
        yield from ((first, *rest) for rest in _compositions(number - first, parts - 1))


class _RoleSearch:
    """The search for the first of a role's choices that fits, between one that is known to fit and one that is not."""

    def __init__(self, blocks: Mapping[str, Sequence[BlockCost]]) -> None:
        kinds: dict[tuple[object, ...], list[str]] = {}
        for block, costs in blocks.items():
            kinds.setdefault((starred(block), *(cost.work for cost in costs)), []).append(block)
        self.kinds = [*kinds.values()]
        # what two blocks both keep counts for the first: for a kind, the mean
        self.options = options_of([(len(kind), _mean_costs([blocks[block] for block in kind])) for kind in self.kinds])
        self.peaks: dict[int, int] = {}

    def policies(self, option: int) -> dict[str, int]:
        """Return the policy of each block under a choice. Blocks made again come first: when backward comes to them,
        those behind them have let go of what they kept."""
        policies: dict[str, int] = {}
        for kind, counts in zip(self.kinds, self.options[option].counts, strict=True):
            order = [policy for policy in reversed(range(len(counts))) for _ in range(counts[policy])]
            policies |= zip(kind, order, strict=True)
        return policies

    def next(self, size: int) -> int:
        """Return the choice to try next, or again the one that was found: the first, the last, and then that at which
        memory is ``size`` if it is linear in the bytes kept."""
        if not self.peaks or self.peaks[0] <= size:
            return 0
        fitting = [at for at, peak in self.peaks.items() if peak <= size]
        if not fitting:
            return len(self.options) - 1
        best = min(fitting)
        beyond = max(at for at in self.peaks if at < best)
        share = (self.peaks[beyond] - size) / (self.peaks[beyond] - self.peaks[best])
        wanted = self.options[beyond].kept - share * (self.options[beyond].kept - self.options[best].kept)
        guess = next(at for at in range(beyond, best + 1) if at == best or self.options[at].kept <= wanted)
        return best if best == beyond + 1 else min(max(guess, beyond + 1), best - 1)


def _mean_costs(costs: Sequence[Sequence[BlockCost]]) -> list[BlockCost]:
    """Return the mean cost of blocks under each policy."""
    return [BlockCost(sum(cost.kept for cost in each) // len(each), each[0].work) for each in zip(*costs, strict=True)]


class _Search:
    """The search for every role at once: one compilation tries a choice for each."""

    def __init__(self, line: RecomputeLine, scopes: Scopes, make: Callable[..., Compiled]) -> None:
        self.line, self.scopes, self.make = line, scopes, make
        self.tried: dict[tuple[tuple[str, int], ...], tuple[Compiled, dict[str, Memory]]] = {}

    def compiled(self, policies: Mapping[str, int]) -> tuple[Compiled, dict[str, Memory]]:
        """Return the compilation under policies, and the memory of each role."""
        key = tuple((block, policies.get(block, 0)) for block in self.scopes)
        if key not in self.tried:
            compiled = self.make(lines_for(dict(key), self.line, self.scopes))
            build, plan = compiled.build, compiled.plan
            self.tried[key] = compiled, {name: memory_of(build, plan, role) for name, role in build.roles.items()}
        return self.tried[key]

    @cached_property
    def costs(self) -> list[dict[str, dict[str, BlockCost]]]:
        """The costs of each role's blocks, with every policy for all blocks."""
        every = (self.compiled(dict.fromkeys(self.scopes, policy))[0] for policy in range(len(POLICIES)))
        return [{name: block_costs(role) for name, role in one.build.roles.items()} for one in every]

    def run(self) -> tuple[Compiled, Fitted]:
        """Return the compilation and the choice with which every role fits.

        Raises:
            PlanError: nothing fits.
        """
        assert self.line.fit is not None
        size = self.line.fit
        roles = {
            # of two policies with the same products, the one that makes less again comes first
            name: _RoleSearch({block: [costs[name].get(block, BlockCost()) + BlockCost(0, policy)
                                       for policy, costs in enumerate(self.costs)]
                               for block in self.scopes if block in kept})
            for name, kept in self.costs[0].items()
        }  # fmt: skip
        while True:
            chosen = {name: role.next(size) for name, role in roles.items()}
            policies = {
                block: policy for name, role in roles.items() for block, policy in role.policies(chosen[name]).items()
            }
            known = all(chosen[name] in role.peaks for name, role in roles.items())
            compiled, memory = self.compiled(policies)
            for name, role in roles.items():
                role.peaks[chosen[name]] = memory[name].peak_bytes
            if known:
                break
        if max(peak.peak_bytes for peak in memory.values()) > size:
            raise PlanError([self._refusal(compiled)])
        policies = {block: policies[block] for block in self.scopes}
        fits = tuple(self._role_fit(name, role, chosen[name]) for name, role in roles.items())
        return compiled, Fitted(self.line, policies, stages_of(compiled, self.scopes), fits)

    def _role_fit(self, name: str, role: _RoleSearch, chosen: int) -> RoleFit:
        policies = role.policies(chosen)
        counts, plain = Counter(policies.values()), self.costs[0][name]
        step = sum(cost.work for cost in plain.values())
        more = sum(self.costs[policy][name][block].work - plain[block].work for block, policy in policies.items())
        again = more / step if step else 0.0
        return RoleFit(name, tuple(counts[policy] for policy in range(len(POLICIES))), role.peaks[chosen],
                       round(again, 4), role.peaks.get(chosen - 1))  # fmt: skip

    def _refusal(self, compiled: Compiled) -> Diagnostic:
        memories = [max(memory.values(), key=lambda m: m.peak_bytes) for _, memory in self.tried.values()]
        least = min(memories, key=lambda memory: memory.peak_bytes)
        line = next(line for line in compiled.plan.recompute if line.fit is not None)
        shares = ", ".join(f"{name} {size_text(size)}" for name, size in least.shares.items() if size)
        message = f"a rank needs at least {size_text(least.peak_bytes)}, whichever blocks are recomputed"
        unit, word = (10**6, "MB") if least.peak_bytes > 10**9 else (10**3, "KB")
        size = f"{-(-least.peak_bytes // unit)}{word}"
        help_ = f"write `fit {size}` or more, or split the largest of these over more ranks"
        label = Label(line.arguments.span("fit"))
        return Diagnostic(NO_FIT, message, label, help=help_, notes=(f"it holds {shares}",))


def compile_fitted(
    lines: Sequence[RecomputeLine], captured: Captured, larger: Fitted | None,
    make: Callable[[tuple[RecomputeLine, ...], frozenset[str]], Compiled],
) -> tuple[Compiled, Fitted | None]:  # fmt: skip
    """Compile with the lines of a plan. One that has a size to fit into becomes the lines that it chooses, or those
    that were chosen for a ``larger`` model, or for the same one at larger sizes. ``make`` takes lines, and modules that
    are called as one because a choice is made for each.

    Raises:
        PlanError: the step does not fit, whatever is made again; or the plan is at fault.
    """
    line = next((line for line in lines if line.fit is not None), None)
    if line is None:
        return make(tuple(lines), frozenset()), None
    scopes, at = scopes_of(line, captured), lines.index(line)
    units = frozenset(block for block in scopes if block_of(block) is None)

    def make_chosen(chosen: tuple[RecomputeLine, ...]) -> Compiled:
        return make((*lines[:at], *chosen, *lines[at + 1 :]), units)

    if larger is None:
        return _Search(line, scopes, make_chosen).run()
    fitted = larger.smaller(stages_of(make_chosen(()), scopes))
    return make_chosen(lines_for(fitted.policies, line, scopes)), fitted
