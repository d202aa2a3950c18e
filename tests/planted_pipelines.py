"""Good pipelines to plant bugs in, bugs that no generic mutator makes of them, and the reasons why the checks of texts
refuse them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from parc.checking.checks import check_schedule, static_faults
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import parse_schedule
from parc.compiler.program.binding import Binding
from parc.compiler.program.program import Function, Line, Program, Ref, Value
from parc.compiler.program.roles import group, join_roles, roles_of
from parc.compiling.compiled import Compiled
from parc.grammar.source import Source
from tests.captured_once import compile_once
from tests.certified_judge import refused_in
from tests.planted_builds import ROOT, TIED, reread
from tests.planted_edits import Programs, stacked, with_main
from tests.planted_mutators import Mutant, mutants, sites

PIPELINE = f"""\
{TIED}
mesh dp=2, pp=2
shard x, wanted [B/dp, _]
stage before {{cuts}} over pp
schedule {{schedule}}
"""
PIPELINES = {
    "two stages": PIPELINE.format(layers=2, cuts="layers.1", schedule="1f1b microbatches 2"),
    "four stages on two ranks": PIPELINE.format(
        layers=4, cuts="layers.1, layers.2, layers.3", schedule="interleaved microbatches 2 chunks 2"
    ),
    "four stages side by side": PIPELINE.format(
        layers=4, cuts="layers.1, layers.2, layers.3", schedule='table "side_by_side.txt" microbatches 2 chunks 2'
    ),
    "a stage that reads a parameter without a gradient": PIPELINE.format(
        layers=1, cuts="b", schedule="gpipe microbatches 2"
    ).replace('Tied" (layers=1)', 'Looked"'),
}

GPT = """\
model "../examples/gpt.py:GPT" (layers=4, width=8, heads=2, vocab=12, length=4, dropout=0.25)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=4
loss cross_entropy(output, targets)
optimizer sgd lr 0.1 clip 1.0
mesh dp=2, pp=2
shard tokens, targets [B/dp, _]
stage before blocks.2 over pp
"""
PHASES = {
    "zb-h1, two stages": PIPELINE.format(layers=2, cuts="layers.1", schedule="zb-h1 microbatches 2"),
    "1f1b, three stages": PIPELINE.format(layers=3, cuts="layers.1, layers.2", schedule="1f1b microbatches 4").replace(
        "pp=2", "pp=3"
    ),
    "async, blocks": GPT + "schedule async microbatches 2\n",
    "zb-h1, blocks": GPT + "zero 2 over dp\nschedule zb-h1 microbatches 2\n",
    "zbv, blocks": GPT.replace("blocks.2", "blocks.1, blocks.2, blocks.3") + "schedule zbv microbatches 2\n",
}
"""Builds with backwards in two phases: stages that do I and W, B, or both; sums that start in the last W; calls of
halves; a V; steps that overlap."""


@dataclass(frozen=True)
class Good:
    """A build that every check accepts."""

    compiled: Compiled
    texts: Mapping[str, str]
    programs: Programs


@cache
def good(name: str, evaluates: bool = False) -> Good:
    """Return one of the builds, or what evaluates its model."""
    lines = {**PIPELINES, **PHASES}[name] + "eval\n" * evaluates
    compiled = compile_once(read_plan(Source("stages.parc", lines)), ROOT / "tests")
    if compiled.evaluated is not None:
        compiled = compiled.evaluated
    programs = {file_of(p): p for role in compiled.build.roles.values() for p in role.programs.values()}
    return Good(compiled, compiled.build.texts, programs)


def refusals(build: Good, programs: Programs | None = None, schedule: str | None = None) -> list[str]:
    """Return the reasons for which changed programs or actions are refused, after they are read back from their
    texts."""
    compiled = build.compiled
    programs = build.programs if programs is None else programs
    try:
        found = group(reread(programs, build.programs).values(), compiled.timelines)
        actions = parse_schedule(build.texts["schedule.txt"] if schedule is None else schedule)
        roles = roles_of(found, {name: actions.get(name, ()) for name in found})
        if schedule is not None:
            return list(map(str, check_schedule(roles, compiled.plan.microbatches, compiled.build.purpose)))
        faults = static_faults(replace(compiled.build, programs=join_roles(found), roles=roles))
    except ValueError as error:
        return [str(error)]
    if faults:
        return [str(fault) for fault in faults]
    missing = refused_in(compiled.build, texts_with(build, programs))
    return [missing] if missing else []


def texts_with(build: Good, programs: Programs) -> dict[str, str]:
    """Return the texts of a build with other programs."""
    texts = {name: text for name, text in build.texts.items() if not name.startswith("programs/stage")}
    texts = {name: text for name, text in texts.items() if not re.match(r"programs/pp\d", name)}
    written = {f"programs/{name}.py": (name, program.text()) for name, program in programs.items()}
    # programs that do nothing, as those of training in an evaluation, have no file
    return texts | {file: text for file, (name, text) in written.items()
                    if file in build.texts or name not in build.programs}  # fmt: skip


def file_of(program: Program) -> str:
    """Return a program's file name: ``stage0.F``."""
    return f"{program.role}.{program.action}"


# ---- bugs of several programs: each yields what it did, and the programs

Changed = Iterator[tuple[str, Programs]]
AMONG, STACK = "parc.all_reduce_among", "aten.stack.default"
ROLES = ("pp0.REDUCE", "pp1.REDUCE")


def places(build: Good) -> Changed:
    """Put programs on other roles, or take others' programs."""
    for name, program in build.programs.items():
        rest = {key: other for key, other in build.programs.items() if key != name}
        yield f"{name} is not there", rest
        for other in build.programs.values():
            if other.action == program.action and other.role != program.role:
                yield f"{name} says it is {other.role}", {**rest, file_of(other): replace(program, role=other.role)}
                if other.functions == program.functions:  # as the idle ones of an evaluation
                    continue
                swapped = {name: replace(other, role=program.role), file_of(other): replace(program, role=other.role)}
                yield f"{name} and {file_of(other)} swapped", {**build.programs, **swapped}
        for role in ("stage4", "stage9", "pp0", "pp2", "stage0x"):
            if role != program.role:
                yield f"{name} says it is {role}", {**rest, f"{role}.{program.action}": replace(program, role=role)}


def _returned_twice(build: Good) -> Changed:
    """Let the last stage that a returned value can reach return it too, beside the stage that made it."""
    for kind, far in (("F", 1), ("B", -1)):
        work = {int(name[5:-2]): name for name in build.programs if name.endswith(f".{kind}")}
        for stage, name in work.items():
            for key, value in build.programs[name].main.returns:
                if key.kind in ("sent", "saved") or stage + far not in work:
                    continue
                changed, last = build.programs, stage
                taken = Value(value, build.programs[name].main.values()[value].type, Binding("received", value))
                while last + far in work:
                    last += far
                    giver, taker = changed[work[last - far]].main, changed[work[last]].main
                    returns = (*giver.returns, (Binding("sent", value), value))
                    changed = with_main(changed, work[last - far], returns=returns)
                    changed = with_main(changed, work[last], parameters=(*taker.parameters, taken))
                end = changed[work[last]].main
                if key not in dict(end.returns):
                    whole = with_main(changed, work[last], returns=(*end.returns, (key, value)))
                    yield f"{work[last]} returns {key} too", whole


def _counted_too(build: Good) -> Changed:
    """Count a gradient in the norm of a role that another role counts."""
    for name, program in build.programs.items():
        squares = [line for line in program.main.lines if line.op == "parc.square_sum.default"]
        gradients = program.main.returned("gradient").values() if program.action == "REDUCE" else ()
        for missing in [value for value in gradients if value not in {line.uses[0] for line in squares}]:
            extra = replace(squares[0], results=(replace(squares[0].made[0], name="again"),), args=(Ref(missing),))
            site = next(sites(build.programs, STACK, name))
            more = site.replaced(extra, stacked(site.line, [*site.line.args[0], Ref("again")]))
            yield f"{name} counts {missing} too", more


def _mixed(build: Good) -> Changed:
    """Sum gradients of different parameters, and pass the sum on as it is, or summed again."""
    alone: list[dict[str, tuple[Binding, str]]] = []
    for name in ROLES:
        main = build.programs[name].main
        met = {v.name for line in main.lines if line.op == AMONG for v in line.made}
        ends = [(key, value) for key, value in main.returns if key.kind == "gradient" and value not in met]
        alone.append({str(main.values()[value].type): (key, value) for key, value in ends})
    for text in sorted(alone[0].keys() & alone[1].keys()):
        for op, args in ((AMONG, ("pp", [0, 1])), ("aten.mul.Scalar", (1.0,))):
            changed = build.programs
            for name, ends_of_role in zip(ROLES, alone, strict=True):
                main, (key, value) = changed[name].main, ends_of_role[text]
                type_ = main.values()[value].type
                met_line = Line((Value("met", type_),), AMONG, (Ref(value), "pp", [0, 1]))
                more = (*main.lines, met_line, Line((Value("again", type_),), op, (Ref("met"), *args)))
                returns = tuple((k, "again" if k == key else v) for k, v in main.returns)
                changed = with_main(changed, name, lines=more, returns=returns)
            yield f"{alone[0][text]} and {alone[1][text]} are summed, then {op}", changed


def in_pipeline(build: Good) -> Iterator[Mutant]:
    """Yield mutants of what stages and roles take, return and sum: their texts alone say that it is wrong."""

    def between(name: str, function: Function) -> bool:
        return build.programs[name].action not in ("F", "B")

    numbers = re.compile(r"\.(F|B) .*aten.mul.Scalar")  # nothing but numbers tells that a stage computes another one
    zeros = re.compile(r" zeros by .*aten.mul.Scalar")  # they stay zeros
    for mutant in mutants(build.programs, between):
        if not numbers.search(mutant.what) and not zeros.search(mutant.what):
            yield mutant
    bugs = [("put a program elsewhere", places), ("return a value twice", _returned_twice)]
    if any("gradient" in str(key) for p in build.programs.values() for key, _ in p.main.returns):
        bugs += [("count a gradient of another role", _counted_too), ("sum other gradients", _mixed)]
    for kind, bug in bugs:
        for what, programs in bug(build):
            yield Mutant(kind, f"{kind} {what.split()[0]}", what, partial(dict, programs))
