"""A kind of action that is added from outside, by one row and the function that makes its program: a step has it
everywhere."""

from __future__ import annotations

import ast
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

import parc
from parc.actions import TABLES, register_action
from parc.build import build
from parc.checking.certified import certificate_of
from parc.checking.checks import case_of, check_files, static_faults
from parc.compiler.build.build import Build
from parc.compiler.build.directory import read_build
from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.placement import Placement
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import ACTIONS, ActionRow, parse_schedule, schedule_text
from parc.compiler.program.binding import LOSS, Binding
from parc.compiler.program.program import Program, Ref
from parc.compiler.program.roles import join_roles
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from parc.passes.programs.emit import identifier
from parc.passes.programs.segments import node_type
from parc.passes.programs.step_programs import StepMaterials
from parc.passes.programs.writer import whole_type
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from tests.planted_builds import ROOT, TIED
from tests.planted_edits import Programs, stacked, with_main
from tests.planted_mutators import sites
from tests.runtime.ranks import run_ranks
from tests.test_house import python_files, shown, tree

KIND = "CHECKSUM"
_PLAN = f"""\
{TIED.format(layers=3)}
mesh tp=2, pp=2
column layers.1 over tp
stage before layers.1 over pp
schedule 1f1b microbatches 2
"""
_CUT = ("stage before layers.1 over pp\n", "1f1b ", ", pp=2")
PLANS = {"pipeline": _PLAN, "one role": reduce(lambda text, word: text.replace(word, ""), _CUT, _PLAN)}


# ---- the kind: a row, what makes its program, and the numbers of a model that is not cut


def make_checksum(step: StepMaterials) -> Iterator[Program]:
    """Write the sum of the squares of all parameters; each role adds those that no role before it reads."""
    nodes = {noted(node).binding: node for node in step.graph.find_nodes(op="placeholder")}
    reads, one = step.assembled.reads, whole_type(step.mesh, torch.float32)
    for rank, role in enumerate(step.roles):
        write, squares = step.writer(), []
        for name in sorted({name for names in reads for name in names}):
            if rank == min(step.stage_ranks[stage] for stage, names in enumerate(reads) if name in names):
                binding = Binding("parameter", name)
                value = write.take(identifier(name), node_type(nodes[binding]), binding)
                axes = value.type.placement.split_axes()
                partial = replace(one, placement=Placement.of(step.mesh, dict.fromkeys(axes, "P")))
                squares.append(write.total(write.emit("parc.square_sum.default", (Ref(value.name),), partial)))
        total = write.among(write.stacked_sum(squares) if squares else write.zeros(one), range(len(step.roles)))
        yield write.program(role, KIND, [(Binding("metric", "checksum"), total.name)])


def checksum(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Compute the same from whole parameters."""
    return {"checksum": torch.stack([value.detach().double().square().sum() for value in parameters.values()]).sum()}


def register() -> None:
    register_action(
        ActionRow(KIND, "after", "role", returns=("metric",), optional=True), make_checksum, metrics=checksum
    )


# ---- held


@pytest.fixture
def registered() -> Iterator[None]:
    """Enter a block with the kind, which no other test sees."""
    register()
    yield
    for table in TABLES:
        table.pop(KIND, None)


@cache
def compiled(plan: str) -> Compiled:
    """Compile one of the plans, where the kind is registered."""
    return compile_plan(read_plan(Source("own.parc", PLANS[plan])), ROOT / "tests")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.usefixtures("registered")
def test_a_kind_is_built_checked_and_simulated(plan: str) -> None:
    compilation = compiled(plan)
    for role in compilation.build.roles.values():
        words = [str(action) for action in role.actions[-3:]]
        assert words == [f"{role.stages[0]}{kind}" for kind in ("REDUCE", KIND, "STEP")]
    assert not refusals(compilation) and metric_error(compilation) < 1e-12
    certificate = certificate_of(compilation.build)
    assert not certificate.missing, certificate
    assert f"{KIND} returns metrics of one's own, which are not proved" in certificate.proved[-1]


@pytest.mark.usefixtures("registered")
def test_a_kind_is_printed_read_and_run(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "planted_models.py", tmp_path)
    (tmp_path / "own.parc").write_text(PLANS["pipeline"])
    build(tmp_path / "own.parc", tmp_path / "out", {})
    text = (tmp_path / "out" / "programs" / f"pp1.{KIND}.py").read_text()
    assert text.startswith('"""parc program: role pp1, action CHECKSUM"""') and '"metric checksum":' in text
    opened = read_build(tmp_path / "out")
    assert not check_files(opened)
    assert opened.roles["pp1"].programs[KIND].text() == text
    sums = [line for line in opened.report["communication"] if line["op"] == "all_reduce_among"]
    assert Counter(line["role"] for line in sums) == {"pp0": 4, "pp1": 4}  # a weight of both, loss, norm, and this
    expected = checksum(dict(parc.reference(tmp_path / "out").module.named_parameters()), {})["checksum"]
    for value in run_ranks(metric_of_a_step, 4, str(tmp_path / "out")):
        assert value == pytest.approx(float(expected), rel=1e-6)


def metric_of_a_step(path: str) -> float:
    """Return the metric from one rank, which has the kind by one call."""
    register()
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(8, 4, generator=generator) for name in ("x", "wanted")}
    with parc.load(path) as session:
        return session.step(batch).metrics["checksum"]


def test_a_kind_has_one_name_and_a_maker() -> None:
    with pytest.raises(ValueError, match="`REDUCE` is the name of another"):
        register_action(ActionRow("REDUCE", "after", "role"), make_checksum)
    with pytest.raises(ValueError, match="not in capital letters"):
        register_action(ActionRow("SEND_F", "after", ""))
    with pytest.raises(ValueError, match="has a maker just if"):
        register_action(ActionRow(KIND, "after", "role"))


# ---- bugs planted in it


def with_programs(compilation: Compiled, changed: Mapping[str, Program], schedule: str = "") -> Build:
    """Return the build with another program of the kind in some roles, or another schedule in all.

    Raises:
        ValueError: the programs are no pieces of one step.
    """
    timelines = parse_schedule(schedule) if schedule else compilation.timelines
    roles = {
        name: replace(
            role, programs={**role.programs, KIND: changed.get(name, role.programs[KIND])}, actions=timelines[name]
        )
        for name, role in compilation.build.roles.items()
    }
    programs = join_roles({name: role.programs for name, role in roles.items()})
    return replace(compilation.build, programs=programs, roles=roles)


def refusals(compilation: Compiled, changed: Mapping[str, Program] = MappingProxyType({}), schedule: str = "") -> str:
    """Return the reasons for a refusal by the checks of texts alone, "" if there is none."""
    try:
        return "; ".join(map(str, static_faults(with_programs(compilation, changed, schedule))))
    except ValueError as error:
        return str(error)


def metric_error(compilation: Compiled, changed: Mapping[str, Program] = MappingProxyType({})) -> float:
    """Return the largest error of the action's metrics beside those of a model that is not cut."""
    agreement = compare(case_of(replace(compilation, written=with_programs(compilation, changed))), steps=1)
    assert max(agreement.loss, agreement.gradient, agreement.parameter) < TOLERANCE
    return agreement.metric


def without(programs: Programs, name: str, op: str) -> Programs:
    """Return programs of which one lacks its first line of an operator, whose operand replaces its result."""
    site = next(sites(programs, op, name))
    return site.replaced(read=site.source.name)


@pytest.mark.usefixtures("registered")
def test_bugs_in_a_kind_are_refused() -> None:
    compilation = compiled("pipeline")
    programs = {name: role.programs[KIND] for name, role in compilation.build.roles.items()}
    first = programs["pp0"]
    assert "still to be summed over `tp`" in refusals(compilation, without(programs, "pp0", "parc.all_reduce"))
    for name in programs:
        one = refusals(compilation, without(programs, name, "parc.all_reduce_among"))
        assert f"{name}.{KIND} checksum: is not summed once over all roles" in one
    (name, value), *_ = first.main.bound("parameter").items()
    gradient = replace(value, binding=Binding("gradient", name))
    parameters = tuple(gradient if v is value else v for v in first.main.parameters)
    assert "nothing is bound to `gradient" in refusals(compilation, with_main(programs, "pp0", parameters=parameters))
    first_alone = with_main(programs, "pp0", returns=((LOSS, first.main.returns[0][1]),))
    both = with_main(first_alone, "pp1", returns=((LOSS, programs["pp1"].main.returns[0][1]),))
    assert "`loss` is returned, but nobody takes it" in refusals(compilation, both)
    assert "makes `loss`" in refusals(compilation, first_alone)


@pytest.mark.usefixtures("registered")
def test_numbers_that_are_wrong_are_seen_in_a_simulation() -> None:
    compilation = compiled("pipeline")
    site = next(sites({"pp1": compilation.build.roles["pp1"].programs[KIND]}, "aten.stack.default"))
    (items,) = site.line.args
    changed = site.replaced(stacked(site.line, [*items, items[0]]))
    assert not refusals(compilation, changed) and metric_error(compilation, changed) > 1e-3


@pytest.mark.usefixtures("registered")
def test_roles_that_meet_in_another_order_are_refused() -> None:
    compilation = compiled("pipeline")
    text = schedule_text(compilation.timelines)
    assert not refusals(compilation, schedule=text)
    swapped = text.replace(f"1REDUCE 1{KIND}", f"1{KIND} 1REDUCE")
    assert f"pp1: `1{KIND}` comes before `1REDUCE`" in refusals(compilation, schedule=swapped)
    assert f"`1{KIND}` is there 0 times" in refusals(compilation, schedule=text.replace(f" 1{KIND}", ""))
    assert f"`0{KIND}` is there 2 times" in refusals(compilation, schedule=text.replace(f"0{KIND}", f"0{KIND} 0{KIND}"))


# ---- kinds are named in one place


def test_kinds_are_named_in_their_table_and_in_schedules_alone() -> None:
    """Other code asks the table, or names a constant of it. The results of B and W have a form of their own in their
    text, and the batch is called B too. I is also a placement, of which much code speaks."""
    named = Counter(
        shown(file)
        for file in python_files("compiler", "passes", "runtime", "parc")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in {*ACTIONS} - {"I"}
    )
    allowed = {
        "compiler/program/actions.py": len(ACTIONS) - 1,
        "compiler/program/binding.py": 2,
        "compiler/sizes/size_range.py": 1,
        "parc/page/page.py": 1,  # billions
    }
    assert {name: count for name, count in named.items() if not name.startswith("compiler/schedules/")} == allowed
