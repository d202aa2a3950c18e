"""Planted bugs of large builds: their texts and the certificate must refuse them. Beside generic mutants there are ways
to get one repetition wrong: its order, its function, a block left out, a twin's number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from typing import Any

from parc.checking.checks import faults_by_check
from parc.checking.twins import find_twin
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Fault, Line, Ref
from parc.compiler.program.roles import SINGLE
from parc.compiler.program.text import ProgramError
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from tests.certified_judge import refused_in
from tests.checked_plans import in_texts
from tests.planted_builds import ROOT, reread
from tests.planted_edits import Programs, reading, with_argument, with_main
from tests.planted_mutators import OTHER_OPERATOR, Mutant, Site, mutants
from tests.planted_special import unreduced

_GPT = """\
model "./gpt.py:GPT" (layers=4, width=32, heads=4, vocab=24, length=8, dropout=0.1)
verify layers=2, width=16, heads=2
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=32, S=8
loss cross_entropy(output, targets)
optimizer sgd lr 0.1 clip 1.0
seed 1
mesh dp=8, tp=2
shard tokens, targets [B/dp, _]
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
vocab embed, head over tp
schedule microbatches 2
"""

_LLAMA = """\
model "./llama.py:llama" (layers=5, width=64, heads=4, kv_heads=2, ffn=48, vocab=24, length=16)
verify layers=2, width=16, heads=4, kv_heads=2, ffn=16
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=16
loss cross_entropy(output.logits, targets)
optimizer sgd lr 0.1
seed 1
mesh dp=8, tp=2
shard input_ids, targets [B/dp, _]
column model.layers.*.self_attn.{q,k,v}_proj over tp
row model.layers.*.self_attn.o_proj over tp
column model.layers.*.mlp.{gate,up}_proj over tp
row model.layers.*.mlp.down_proj over tp
vocab model.embed_tokens, lm_head over tp
"""

_TOWER = """\
model "./planted_models.py:Tower" (layers=4, width=16)
verify layers=2, width=8, D=8
input x float32 [B, D]
input other float32 [B, D]
sizes B=32, D=16
loss "./planted_models.py:square"(output, other)
optimizer sgd lr 0.1
mesh dp=8, tp=2
shard x, other [B/dp, _]
column layers.*.up over tp
row layers.*.down over tp
freeze layers.*.scale
schedule microbatches 2
"""

_EXPERTS = """\
model "./moe_families.py:family" (name="Mixtral", num_hidden_layers=4)
verify num_hidden_layers=2, num_local_experts=4, hidden_size=8
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=32, S=8
loss cross_entropy(output.logits, targets)
optimizer sgd lr 0.1 clip 1.0
mesh dp=4, ep=4
shard input_ids, targets [B/dp/ep, _]
experts model.layers.*.mlp.experts over ep dropless
schedule microbatches 2
"""

_LOSSES = """\
model "./moe_families.py:family" (name="Mixtral", num_hidden_layers=5, output_router_logits=true)
verify num_hidden_layers=2, hidden_size=8
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=8
loss cross_entropy(output.logits, targets) + 0.02 output.aux_loss
optimizer sgd lr 0.1
mesh dp=16
shard input_ids, targets [B/dp, _]
"""

_ROUTERS = """\
model "./router_losses.py:Routers" (way="{way}", layers=7)
verify layers=2, width=8
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=8
loss cross_entropy(output.logits, targets) + 0.1 output.aux
optimizer sgd lr 0.1
mesh dp=16
shard tokens, targets [B/dp, _]
"""

ROUTERS = {
    f"routers, {way}": ("tests", _ROUTERS.format(way=way)) for way in ("from zero", "zeros", "reversed", "means")
}

PLANS = {
    "gpt dp=8, tp=2": ("examples", _GPT),
    "gpt dp=8, tp=2, bf16": ("examples", _GPT + "precision bf16\n"),
    "llama dp=8, tp=2": ("examples", _LLAMA),
    "tower dp=8, tp=2": ("tests", _TOWER),
    "experts dp=4, ep=4": ("tests", _EXPERTS),
    "losses of all routers dp=16": ("tests", _LOSSES),
    **ROUTERS,
}


@dataclass(frozen=True)
class LargeBuild:
    """The inputs of a large build's checks: its texts, and its twin."""

    compiled: Compiled
    twin: Compiled
    programs: Programs

    def faults(self, programs: Programs) -> tuple[str, list[Fault]]:
        """Return the name of the check that refuses programs in the place of the build's own, and its faults."""
        try:
            read = reread(programs, self.programs)
        except ProgramError as error:
            return "parse", [Fault("parse", "", str(error))]
        build = replace(self.compiled.build, programs=read)
        build = replace(build, roles={SINGLE: replace(build.roles[SINGLE], programs=read)})
        if found := next((each for each in faults_by_check(build) if each), []):
            return found[0].check, found
        missing = refused_in(self.compiled.build, in_texts(build, read).texts)
        return ("certificate", [Fault("certificate", "", missing)]) if missing else ("", [])


@cache
def large_build(name: str) -> LargeBuild:
    """Return one of ``PLANS``."""
    folder, text = PLANS[name]
    compiled = compile_plan(read_plan(Source("large.parc", text)), ROOT / folder)
    return LargeBuild(compiled, find_twin(compiled), compiled.build.programs)


# ---- bugs of one repetition: each yields what it did, and the programs


def _calls(programs: Programs, action: str) -> list[tuple[int, Line]]:
    return [(at, line) for at, line in enumerate(programs[action].main.lines) if line.calls_function]


def _alike(programs: Programs, action: str) -> Iterator[tuple[int, Line, int, Line]]:
    """Yield pairs of calls of one function."""
    for (i, a), (j, b) in combinations(_calls(programs, action), 2):
        if a.op == b.op:
            yield i, a, j, b


Changed = Iterator[tuple[str, Programs]]


def reordered(programs: Programs) -> Changed:
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


def other_numbers(action: str, others: Programs, programs: Programs) -> Changed:
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


def one_apart(action: str, programs: Programs) -> Changed:
    """Let one call alone run another function, in which an operator is another."""
    program = programs[action]
    for at, call in _calls(programs, action)[1:3]:
        function = program.function(call.op)
        for place, line in enumerate(function.lines):
            if line.op in OTHER_OPERATOR:
                changed = replace(line, op=OTHER_OPERATOR[line.op])
                apart = replace(
                    function, name="apart", lines=(*function.lines[:place], changed, *function.lines[place + 1 :])
                )
                lines = program.main.lines
                main = replace(program.main, lines=(*lines[:at], replace(call, op="apart"), *lines[at + 1 :]))
                made = replace(program, functions=(*program.functions[:-1], apart, main))
                yield f"{action} {call.origin.module}: {changed.op} for {line.op}", {**programs, action: made}


def dropped(programs: Programs) -> Changed:
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


def in_large(build: LargeBuild) -> Iterator[Mutant]:
    """Yield mutants of a large build: generic ones, and those of one repetition."""
    yield from mutants(build.programs)
    small = build.twin.build.programs
    for kind, changes in (
        ("run blocks in another order", reordered(build.programs)), ("leave a block out", dropped(build.programs)),
        ("take a number of the twin", (c for a in "FB" for c in other_numbers(a, small, build.programs))),
        ("run another function in one block", (c for a in "FB" for c in one_apart(a, build.programs))),
    ):  # fmt: skip
        for what, programs in changes:
            yield Mutant(kind, kind, what, partial(dict, programs))
