"""Words that people know from other tools, on the command line."""

from __future__ import annotations

from parc.cli import COMMANDS, parser_of
from parc.cli.usage import COMMANDS_MEANT, OPTIONS_MEANT
from tests.cli.commands import Captured, parc


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
