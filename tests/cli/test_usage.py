"""Words that people know from other tools, on the command line."""

from __future__ import annotations

from parc.cli import COMMANDS, parser_of
from parc.cli.usage import COMMANDS_MEANT, OPTIONS_MEANT
from tests.cli.commands import Captured, parc


def test_costs_of_work_are_read_as_a_whole(capsys: Captured) -> None:
    way = "write costs as `F=1,I=1,W=1`"
    mistakes = {
        "F=4": f"`F=4` has no cost of I, W: {way}",
        "F=4,I=5,W=3,Q=1": f"`Q` is no kind of work: {way}",
        "F=4,F=5,I=5,W=3": f"`F=4,F=5,I=5,W=3` names a kind of work twice: {way}",
        "F=0,I=5,W=3": "`0` is not a number above 0",
        "F=4,I=-5,W=3": "`-5` is not a number above 0",
        "F=nan,I=5,W=3": "`nan` is not a number above 0",
        "4,5,3": "`4` is not name=value",
    }
    for text, message in mistakes.items():
        code, _, err = parc(capsys, "show", "x", "--pipeline", "--costs", text)
        assert code == 2 and err.endswith(f": {message}\n"), err
    code, _, err = parc(capsys, "show", "x", "--costs", "F=4,I=5,W=3")
    assert code == 2 and err.startswith("parc show: `--costs` is for `--pipeline`"), err


def test_words_of_other_tools_are_answered_by_those_of_parc(capsys: Captured) -> None:
    line, lists = "a line of the plan says it, as", "`parc {} --help` lists what it takes"
    run, build = lists.format("run"), lists.format("build")
    answers = {
        "train x": "did you mean `run`?",
        "run x --lr 3": f"{line} `optimizer adamw lr 3e-4`; a value of the plan's `let` is given by `-D lr=3`; {run}",
        "run x --batch-size 4": f"{line} `sizes B=16, S=512`; {run}",
        "build x --mesh dp=2": f"{line} `mesh dp=2, tp=2`; {build}",
        "run x --nproc_per_node 2": "did you mean `--nproc`?",
        "run x --checkpoint y": "did you mean `--save` or `--resume`?",
        "build x --output y": "did you mean `-o`?",
        "run x --stepps 5": "did you mean `--steps`?",
    }
    for words, answer in answers.items():
        code, _, err = parc(capsys, *words.split())
        assert code == 2 and err.endswith(f"\nhelp: {answer}\n"), err
    assert {*COMMANDS_MEANT.values()} <= {*COMMANDS} and not {*COMMANDS_MEANT} & {*COMMANDS}
    known = {option for command in COMMANDS for option in parser_of([command])[1].options}
    assert {option for options in OPTIONS_MEANT.values() for option in options} <= known
