"""A step's weights, gathered unit by unit beside the first forwards: UNSHARD starts, and F awaits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import parc
from parc.checking.reports import report_of
from parc.compiler.layout.collectives import MESSAGE, WAIT
from parc.compiler.program.program import Function
from parc.compiler.program.roles import Programs
from parc.compiler.verify.communication import check_messages
from parc.passes.programs import overlap

from ..checked_plans import checked, compiled
from ..planted_edits import reading, with_main
from ..runtime.ranks import run_ranks
from ..runtime.tiny import DATA, EXAMPLES, PLAN, build
from .test_early import own
from .test_zero import built, told


def unit_of(module: str) -> str:
    """Return the block that a module is in, or else ``rest``."""
    return ".".join(module.split(".")[:2]) if module.startswith("blocks.") else "rest"


def starts(main: Function) -> list[set[str]]:
    """Return the units of the weights of each message that a function starts, in order."""
    messages: dict[int, set[str]] = {}
    for line in main.lines:
        if (number := dict(line.kwargs).get(MESSAGE)) is not None:
            messages.setdefault(number, set()).add(unit_of(line.origin.module))
    return [*messages.values()]


def awaited(main: Function) -> list[set[str]]:
    """Return the weights that a function awaits before each of its calls."""
    names = {value.name: value.binding.name for value in main.parameters if value.binding is not None}
    before = [set[str]()]
    for line in main.lines:
        if line.calls_function:
            before.append(set())
        elif line.op == WAIT and line.uses[0] in names:
            before[-1].add(names[line.uses[0]])
    assert not before.pop()
    return before


@pytest.mark.parametrize("level", [1, 2])
def test_each_unit_is_a_message_that_forward_awaits_before_the_call_that_reads_it(level: int) -> None:
    programs = own(f"zero {level} over dp", microbatches=2)
    unshard, forward = programs["UNSHARD"].main, programs["F"].main
    assert starts(unshard) == [{"rest"}, {"blocks.0"}, {"blocks.1"}, {"rest"}]
    assert not any(line.op == WAIT for line in unshard.lines)
    units = awaited(forward)
    assert [{unit_of(name) for name in unit} for unit in units] == starts(unshard)
    assert sum(map(len, units)) == len(unshard.returns) == len(forward.bound("weight"))
    assert "embed.weight" in units[0] and "blocks.1.mlp.up.weight" in units[2]


def test_the_first_units_alone_are_exposed() -> None:
    rows = report_of(built("zero 1 over dp", microbatches=2))["communication"]
    exposed = {row["module"] for row in rows if row["carries"] == "weights" and not row["hidden"]}
    assert {"embed", "position", "blocks.0.mlp.up"} <= exposed  # an embedding is no product
    assert not any(module.startswith("blocks.1") or module == "norm" for module in exposed)


def test_the_first_of_two_levels_is_awaited_before_the_step_and_the_second_beside_it() -> None:
    programs = built("zero 1 over dp\nnode 2\nhierarchical over dp", dp=4).built.programs
    assert told(programs["UNSHARD"].main) == (
        "all_gather 1, all_gather 2, all_gather 3, all_gather 4, wait 1, all_gather 5, wait 2, all_gather 6, wait 3, "
        "all_gather 7, wait 4, all_gather 8"
    )
    assert len(awaited(programs["F"].main)) == 4


def test_weights_from_which_padding_is_cut_come_first_and_hold_up_no_others() -> None:
    programs = built("zero 1 over dp", width=10, dp=4).built.programs  # 30 rows on 4 ranks are padded
    unshard = programs["UNSHARD"].main
    cut = {line.made[0].name for line in unshard.lines if line.op == "parc.cut_pad.default"}
    assert cut and all((name in cut) == key.name.endswith(("qkv.weight", "qkv.bias")) for key, name in unshard.returns)
    assert told(unshard) == "all_gather 1, all_gather 2, all_gather 3, all_gather 4, wait 1"
    assert not any("qkv" in name for unit in awaited(programs["F"].main) for name in unit)


def test_weights_that_are_offloaded_are_awaited_where_they_are_gathered() -> None:
    programs = own("zero 1 over dp\noffload parameters to cpu")
    assert not any(awaited(programs["F"].main))
    assert told(programs["UNSHARD"].main).endswith("wait 1")


STAGES = """\
mesh pp=2, dp=2
shard tokens, targets [B/dp, _]
zero 1 over dp
stage before blocks.0 over pp
stage before blocks.1 over pp
stage before norm over pp
schedule {schedule} microbatches 2 chunks 2
"""


@pytest.mark.parametrize("schedule", ["interleaved", 'table "in_a_v.txt"'])
def test_every_stage_awaits_what_its_forward_reads(schedule: str, tmp_path: Path) -> None:
    """Embedding and head are one matrix. In a V one role has both ends, and whichever comes first awaits it."""
    for file in (EXAMPLES / "gpt.py", Path(__file__).parent.parent / "in_a_v.txt"):
        shutil.copy(file, tmp_path)
    compilation = compiled(PLAN.replace("schedule  microbatches 2\n", "") + STAGES.format(schedule=schedule), tmp_path)
    checked(compilation)
    programs = [pair for role in compilation.build.roles.values() for pair in role.programs.items()]
    reads = {name: awaited(program.main) for name, program in programs if program.action == "F"}
    assert len(reads) == 4 and all(map(any, reads.values()))
    assert all("embed.weight" in set().union(*reads[name]) for name in ("0F", "3F"))


def faults(programs: Programs) -> str:
    return "\n".join(map(str, check_messages(programs, 1)))


def test_weights_that_are_not_awaited_are_refused() -> None:
    programs = own("zero 1 over dp")
    assert not faults(programs)
    forward, name = programs["F"].main, "blocks_1_mlp_up_weight"
    wait = next(line for line in forward.lines if line.op == WAIT and line.uses == (name,))
    at = forward.at(wait)
    lines = (*forward.lines[:at], *forward.lines[at + 1 :])
    read = reading(replace(forward, lines=lines), wait.made[0].name, name)
    text = faults(with_main(programs, "F", lines=read.lines))
    assert f"{name}: is read by `blocks` on its way" in text and f"{name}: is never awaited" in text


def test_weights_that_a_backward_reads_and_no_forward_awaits_are_refused() -> None:
    programs = own("zero 1 over dp")
    forward = programs["F"].main
    gone = next(value for value in forward.parameters if value.name == "blocks_1_mlp_up_weight")
    lines = [line for line in forward.lines if gone.name not in line.uses]
    parameters = [value for value in forward.parameters if value is not gone]
    text = faults(with_main(programs, "F", lines=tuple(lines), parameters=tuple(parameters)))
    assert f"B {gone.binding}: is read on its way" in text and f"UNSHARD {gone.binding}: is never awaited" in text


def ranks_train(*folders: str) -> list[list[object]]:
    """Train each build for two steps. Return the losses and the bytes of the weights at the end."""
    ends: list[list[object]] = []
    for folder in folders:
        with parc.load(folder) as session:
            ends.append([session.step().loss for _ in range(2)])
            ends[-1] += [(name, value.numpy().tobytes()) for name, value in session.state_dict().items()]
    return ends


def test_processes_train_bit_by_bit_as_without_prefetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after = build(tmp_path, DATA + "zero 1 over dp\n", PLAN, name="after")
    monkeypatch.setattr(overlap, "_awaitable", lambda programs: set())
    before = build(tmp_path, DATA + "zero 1 over dp\n", PLAN, name="before")
    text = {name: (tmp_path / name / "programs" / "stage0.UNSHARD.py").read_text() for name in ("before", "after")}
    assert "parc.wait" in text["before"] and "parc.wait" not in text["after"]
    for first, second in run_ranks(ranks_train, 2, str(before), str(after)):
        assert first == second
