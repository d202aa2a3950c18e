"""Good builds to plant bugs in, and the judge: the check that is the first to refuse changed programs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from parc.checking.checks import case_of, faults_by_check
from parc.compiler.build.build import Build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import Action
from parc.compiler.program.program import Fault, Program
from parc.compiler.program.roles import SINGLE, JoinFault, join_roles
from parc.compiler.program.text import ProgramError, parse_program
from parc.compiling.compiled import Compiled
from parc.grammar.source import Source
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.model_run import Case
from parc.runtime.compare.own_types import varied_case
from parc.runtime.compare.simulate import compare
from tests.captured_once import compile_once
from tests.certified_judge import refused_in
from tests.checked_plans import in_texts
from tests.evaluated_plans import PLAN
from tests.evaluated_plans import PLANS as EVALUATED_PLANS
from tests.planted_edits import Programs

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # its words on shapes that do not fit

CHECKS = ("parse", "shapes", "types", "communication", "padding", "numbers", "certificate", "equal", "known")
"""The checks in the order in which they are asked."""
ROOT = Path(__file__).resolve().parent.parent

_GPT = """\
model "./gpt.py:GPT" (layers=2, width=16, heads=2, vocab=24, length=4, dropout=0.25)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=4
loss cross_entropy(output, targets)
optimizer sgd lr 0.1 clip 1.0
seed 1
mesh dp=2, tp=2
"""

_GPT_LINES = """\
shard tokens, targets [B/dp, _]
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
vocab embed, head over tp
schedule microbatches 2
"""

_ZERO_3 = """\
shard tokens, targets [B/dp, _]
schedule microbatches 2
precision bf16
zero 3 over dp
"""

_ZERO_2 = """\
mesh dp=2
shard x, wanted [B/dp, _]
schedule microbatches 2
precision bf16
zero 2 over dp
"""

_NODES = """\
mesh dp=4
node 2
shard x, wanted [B/dp, _]
schedule microbatches 2
"""

_COMPRESSED = """\
mesh dp=2
shard x, wanted [B/dp, _]
schedule microbatches 2
precision fp16 loss_scale dynamic
zero 1 over dp on b
compress gradients over dp using int8 on a, b
compress gradients over dp using fp16 on c
"""

_OFFLOAD = """\
offload optimizer, parameters, activations to "offloaded"
"""

_LLAMA = """\
model "./llama.py:llama" (layers=1, width=16, heads=4, kv_heads=2, ffn=16, vocab=24, length=8)
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=8
loss cross_entropy(output.logits, targets)
optimizer sgd lr 0.1
seed 1
mesh dp=2, tp=2
shard input_ids, targets [B/dp, _]
column model.layers.*.self_attn.{q,k,v}_proj over tp
row model.layers.*.self_attn.o_proj over tp
column model.layers.*.mlp.{gate,up}_proj over tp
row model.layers.*.mlp.down_proj over tp
vocab model.embed_tokens, lm_head over tp
"""

_STACK = """\
model "./planted_models.py:Stack" (width=8)
input x float32 [B, D]
input wanted float32 [B, D]
sizes B=16, D=8
loss "./planted_models.py:square"(output, wanted)
optimizer sgd lr 0.1
seed 1
mesh tp=2
shard x [B/tp, _]
shard wanted [_, D/tp]
column a over tp
shard b.weight, c.weight [o/tp, _]
schedule microbatches 2
"""

TIED = """\
model "./planted_models.py:Tied" (layers={layers})
input x float32 [B, 4]
input wanted float32 [B, 4]
sizes B=8
loss "./planted_models.py:square"(output, wanted)
optimizer sgd lr 0.1 clip 1.0"""
"""The task of plans that cut a model between its layers."""

_PADDED = """\
model "./padded_models.py:Mlp" (vocab=13, width=8, hidden=10, kind="sigmoid")
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=4
loss cross_entropy(output, targets)
optimizer adamw lr 1e-2 eps 1e-5 clip 1.0
mesh tp=4
column up over tp pad
row down over tp pad
vocab embed, head over tp pad
"""

_EXPERTS = """\
model "./moe_families.py:family" (name="Mixtral")
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=4, S=4
loss cross_entropy(output.logits, targets)
optimizer sgd lr 0.1
mesh ep=2
shard input_ids, targets [B/ep, _]
experts model.layers.*.mlp.experts over ep dropless
"""

_INSIDE = """\
shard model.layers.*.mlp.experts.gate_up_proj [_/ep, (2 _/tp), _]
shard model.layers.*.mlp.experts.down_proj [_/ep, _, _/tp]
"""

PLANS = {
    "gpt dp=2, tp=2, two microbatches": ("examples", _GPT + _GPT_LINES),
    "llama dp=2, tp=2, split sequences": ("examples", _LLAMA + "sequence model.layers.* over tp\n"),
    "stack tp=2, two microbatches": ("tests", _STACK),
    "stack tp=2, fp16": ("tests", _STACK + "precision fp16 loss_scale dynamic\n"),
    "padded tp=4": ("tests", _PADDED),
    "experts ep=2": ("tests", _EXPERTS),
    "experts with a capacity, ep=2": (
        "tests",
        _EXPERTS.replace("dropless", "capacity 1.5").replace("S=4", "S=8"),
    ),
    "gpt with batch over dp and sequence over tp": (
        "examples",
        _GPT.replace("layers=2", "layers=1") + "shard tokens, targets [B/dp, S/tp]\n",
    ),
    "gpt dp=2, zero 3": (
        "examples",
        _GPT.replace("tp=2", "tp=1") + "shard tokens, targets [B/dp, _]\nzero 3 over dp\nrecompute blocks.*\n",
    ),
    "stack dp=2, zero 2, bf16": ("tests", _STACK[: _STACK.index("mesh")] + _ZERO_2),
    "stack dp=4, two levels": ("tests", _STACK[: _STACK.index("mesh")] + _NODES + "hierarchical over dp\n"),
    "stack dp=4, zero 3 within node": (
        "tests",
        _STACK[: _STACK.index("mesh")] + _NODES + "zero 3 over dp within node\nhierarchical over dp\n",
    ),
}
COMPRESSED_BUILDS = ("stack dp=2, compressed", "stack dp=4 in nodes of 2, compressed across")
PLANS[COMPRESSED_BUILDS[0]] = ("tests", _STACK[: _STACK.index("mesh")] + _COMPRESSED)
PLANS[COMPRESSED_BUILDS[1]] = (
    "tests",
    PLANS[COMPRESSED_BUILDS[0]][1].replace("mesh dp=2\n", "mesh dp=4\nnode 2\nhierarchical over dp\n"),
)
BUILDS = tuple(PLANS)
EXPERT_BUILDS = (
    "experts dp=2, ep=2",
    "experts ep=2, tp=2",
    "experts dp=4 as ep=2, edp=2",
    "experts dp=2, tp=2 as ep=4",
)
PLANS[EXPERT_BUILDS[0]] = ("tests", _EXPERTS.replace("mesh ep=2", "mesh dp=2, ep=2").replace("B/ep", "B/dp/ep"))
PLANS[EXPERT_BUILDS[1]] = ("tests", _EXPERTS.replace("mesh ep=2", "mesh ep=2, tp=2") + _INSIDE)
_VIEW, _ATTENTION = (
    "view {} in model.layers.*.mlp.experts\n",
    """\
column model.layers.*.self_attn.{q,k,v}_proj over tp
row model.layers.*.self_attn.o_proj over tp
""",
)
PLANS[EXPERT_BUILDS[2]] = (
    "tests", _EXPERTS.replace("mesh ep=2", "mesh dp=4").replace("B/ep", "B/dp") + _VIEW.format("dp as ep=2, edp=2")
)  # fmt: skip
PLANS[EXPERT_BUILDS[3]] = (
    "tests",
    _EXPERTS.replace("mesh ep=2", "mesh dp=2, tp=2").replace("B/ep", "B/dp")
    + _VIEW.format("dp, tp as ep=4")
    + _ATTENTION,
)
AUXILIARY_BUILD = "experts dp=2, ep=2, auxiliary loss"
PLANS[AUXILIARY_BUILD] = (
    "tests",
    PLANS[EXPERT_BUILDS[0]][1]
    .replace('name="Mixtral"', 'name="Mixtral", output_router_logits=true')
    .replace("(output.logits, targets)", "(output.logits, targets) + 0.01 output.aux_loss"),
)
CONTEXT_BUILDS = ("window, cp=3 in zigzag", "causal, dp=2, cp=2 in a ring")
_CONTEXT = """\
model "./context_models.py:Net" (mask="{}", groups=2)
input tokens int64 [B, S]
input document int64 [B, S]
input targets int64 [B, S]
sizes B=2, S=12
loss cross_entropy(output, targets)
optimizer sgd lr 0.1
mesh {}
shard tokens, document, targets [B/dp, _]
context blocks.* dim S over cp using {}
"""
PLANS[CONTEXT_BUILDS[0]] = ("tests", _CONTEXT.format("window", "dp=1, cp=3", "zigzag"))
PLANS[CONTEXT_BUILDS[1]] = ("tests", _CONTEXT.format("causal", "dp=2, cp=2", "ring"))
MOODY_BUILD = "batch norm, dp=2, tp=2"
PLANS[MOODY_BUILD] = ("tests", PLAN.replace("\neval\n", "\n") + EVALUATED_PLANS["dp, tp"])
WINDOWS = "windows, dp=2, a sample a rank"
PLANS[WINDOWS] = (
    "tests",
    """\
model "./window_models.py:Net"
input x float32 [B, 4, 4, 4]
sizes B=4
loss "./window_models.py:square_and_mean"(output)
optimizer sgd lr 0.1
mesh dp=2
shard x [B/dp, _, _, _]
schedule microbatches 2
""",
)
OFFLOADED = "gpt dp=2, zero 3, bf16, offloaded"
PLANS[OFFLOADED] = (
    "examples",
    _GPT.replace("layers=2", "layers=1").replace("tp=2", "tp=1") + _ZERO_3 + _OFFLOAD,
)


@dataclass
class Row:
    """A class of mutants: their number, the checks that are the first to refuse them, and the number that types
    refuse."""

    mutants: int = 0
    by_types: int = 0
    first: Counter[str] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)

    def note(self, what: str, check: str, by_types: bool = False) -> None:
        """Count one more mutant, and note it if no check refuses it."""
        self.mutants += 1
        self.by_types += by_types
        self.first[check] += 1
        self.accepted += [what] if not check else []

    def add(self, other: Row) -> None:
        """Count another build's mutants too."""
        self.mutants, self.by_types = self.mutants + other.mutants, self.by_types + other.by_types
        self.first += other.first
        self.accepted += other.accepted


def table_text(rows: Mapping[str, Row], title: str = "class") -> str:
    """Return the table: a line for each class, a column for each check that refuses any, sums, and what is accepted."""
    total = sum((row.first for row in rows.values()), Counter[str]())
    checks = [check for check in CHECKS if total[check]]
    lines = [f"{title:<44}{'mutants':>9}" + "".join(f"{check:>15}" for check in checks) + f"{'accepted':>10}"]
    for kind, first in [*((kind, row.first) for kind, row in rows.items()), ("all", total)]:
        counts = "".join(f"{first[check]:>15}" for check in checks)
        lines.append(f"{kind:<44}{first.total():>9}{counts}{first['']:>10}")
    return "\n".join([*lines, *(f"accepted: {kind}: {what}" for kind, row in rows.items() for what in row.accepted)])


@dataclass(frozen=True)
class GoodBuild:
    """A build, and the case that compares it with the captured graph."""

    name: str
    case: Case
    build: Build

    @property
    def programs(self) -> Programs:
        return self.case.programs


@cache
def compiled_plan(name: str, more: str = "") -> Compiled:
    """Compile the plan of a build, with more lines."""
    folder, text = PLANS[name]
    return compile_once(read_plan(Source("planted.parc", text + more)), ROOT / folder)


def step_of(name: str) -> Mapping[str, Program]:
    """Return the programs of the step beside an ``evaluated_build``."""
    return case_of(compiled_plan(name, "eval\n")).programs


def evaluated_build(name: str) -> GoodBuild:
    """Return what evaluates the model of a build."""
    evaluation = compiled_plan(name, "eval\n").evaluated
    assert evaluation is not None
    return GoodBuild(name, varied_case(case_of(evaluation)), evaluation.build)


@cache
def good_build(name: str, early: bool = False) -> GoodBuild:
    """Return one of ``BUILDS``, one with experts, or the offloaded one; ``early`` leaves sums of gradients where
    backward starts them."""
    compiled = compiled_plan(name)
    build = compiled.build
    if not early:  # most bugs are planted where the sums of gradients stand in REDUCE, as checks read them
        build = replace(build, roles={SINGLE: replace(build.roles[SINGLE], programs=build.programs)})
    return GoodBuild(name, replace(case_of(compiled), programs=build.roles[SINGLE].programs), build)


def reread(programs: Programs, good: Programs) -> dict[str, Program]:
    """Return programs as their texts say, where they are not those of the good build: nothing else counts."""
    return {name: p if p is good.get(name) else parse_program(p.text()) for name, p in programs.items()}


@dataclass(frozen=True)
class Verdict:
    """The first check that refuses, "" if none does, ``equal`` where numbers agree and the certificate proves that
    nothing is changed; and whether the checks of types refuse by themselves."""

    check: str
    reason: str
    by_types: bool


def judge(
    build: GoodBuild,
    programs: Programs,
    actions: Sequence[Action] | None = None,
) -> Verdict:
    """Check changed programs with every check in order; numbers only if nothing before refuses."""
    case = build.case
    actions = case.actions if actions is None else actions
    try:
        read = reread(programs, case.programs)
    except ProgramError as error:
        return Verdict("parse", str(error), False)
    role = build.build.roles[SINGLE]
    roles = {SINGLE: replace(role, actions=tuple(actions), programs={**role.programs, **read})}
    try:
        faults: list[Fault] = []
        for found in faults_by_check(replace(build.build, programs=join_roles({SINGLE: read}), roles=roles)):
            faults += found
            if any(fault.check == "types" for fault in found):
                break  # shapes are checked before, and all else counts less
    except JoinFault as fault:
        return Verdict("types", str(fault), True)
    by_types = any(fault.check == "types" for fault in faults)
    for check in CHECKS:
        if first := next((fault for fault in faults if fault.check == check), None):
            return Verdict(check, str(first), by_types)
    try:
        for steps in (2,) if programs is case.programs else (1, 2):  # most changes are seen in the first step
            agreement = compare(replace(case, programs=read, actions=actions), steps)
            if not agreement.largest <= TOLERANCE:
                break
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        return Verdict("numbers", f"does not run: {error}", False)
    if not agreement.largest <= TOLERANCE:
        return Verdict("numbers", str(agreement.worst), False)
    if refused_in(build.build) or role.actions != tuple(actions):
        return Verdict("", "every check accepts it", False)
    missing = refused_in(build.build, in_texts(build.build, read).texts)
    same = programs is case.programs
    return Verdict("certificate", missing, False) if missing else Verdict("" if same else "equal", "it is equal", False)
