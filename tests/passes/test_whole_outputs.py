"""Outputs that a line keeps whole, of layers that another line splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.advice import warnings_of
from parc.checking.checks import Checked
from tests.draws import each_once
from tests.passes.few_lines import X, Y, made

SOME = """
def more(self):
    self.last = nn.Linear(8, 8, bias=False)

def forward(self, x):
    return self.last(self.fc(x).relu())
"""
HEAD = f'{X}\n{Y}\nloss "torch.nn.functional:mse_loss" (output, y)\nmesh dp=2, tp=2\nshard x, y [B/dp, ...]'
KEPT = "column fc over tp\nshard out(fc) [B/dp, ...]"


def sent(checked: Checked, *wanted: str) -> list[tuple[str, ...]]:
    """Return phase, operator and contents of what ranks of `tp` send, without numbers."""
    rows = checked.report["communication"]
    return [(row["phase"], row["op"], row["carries"]) for row in rows
            if row["axis"] == "tp" and row["carries"] != "numbers" and row["module"] in wanted]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "more"),
    each_once((4, 64), ("", "precision bf16", "schedule microbatches 2", "zero 3 over dp", "eval")),
)
def test_a_whole_output_is_gathered_and_not_its_weight(tmp_path: Path, count: int, more: str) -> None:
    _, checked = made(tmp_path, SOME, f"{HEAD}\n{KEPT}\n{more}", sizes=f"B={count}")
    assert sent(checked, "fc") == [("forward", "all_gather", "activations")]
    gather = next(row for row in checked.report["communication"] if row["axis"] == "tp" and row["op"] == "all_gather")
    assert (tmp_path / "some.parc").read_text().splitlines()[gather["line"] - 1].startswith("shard out(fc)")


@pytest.mark.parametrize(
    ("lines", "then"),
    [
        ("column last over tp", [("backward", "all_reduce", "activations")]),
        ("column last over tp\nshard out(last) [B/dp, ...]", [("forward", "all_gather", "activations")]),
    ],
)
def test_its_readers_may_be_split_too(tmp_path: Path, lines: str, then: list[tuple[str, ...]]) -> None:
    _, checked = made(tmp_path, SOME, f"{HEAD}\n{KEPT}\n{lines}")
    assert ("forward", "all_gather", "activations") in sent(checked, "fc")
    assert {*then} <= {*sent(checked, "last")}
    assert not any(row["carries"] == "weights" for row in checked.report["communication"])


def test_no_more_is_sent_if_each_reader_takes_its_part(tmp_path: Path) -> None:
    lines = "column fc over tp\nrow last over tp"
    tables = [made(tmp_path, SOME, f"{HEAD}\n{more}")[1].report["communication"]
              for more in (lines, f"{lines}\nshard out(fc) [B/dp, ...]")]  # fmt: skip
    assert tables[0] == tables[1]


def test_padded_outputs_are_gathered(tmp_path: Path) -> None:
    body = SOME.replace("self.last =", "self.fc = nn.Linear(8, 5); self.last =").replace(
        "nn.Linear(8, 8", "nn.Linear(5, 8"
    )
    _, checked = made(tmp_path, body, f"{HEAD}\n{KEPT.replace('tp', 'tp pad', 1)}")
    assert sent(checked, "fc") == [("forward", "all_gather", "activations")]


def test_outputs_larger_than_weights_are_warned_of_with_both_numbers(tmp_path: Path) -> None:
    """The numbers are those of this build, and of the one with the line that the warning names."""

    def gathered(lines: str, count: int) -> tuple[list[str], int]:
        compiled, checked = made(tmp_path, SOME, f"{HEAD}\nschedule microbatches 2\n{lines}", sizes=f"B={count}")
        rows = [row for row in checked.report["communication"] if row["axis"] == "tp" and row["op"] == "all_gather"]
        return [warning.message for warning in warnings_of(compiled)], sum(
            row["count_per_step"] * row["wire_bytes"] for row in rows
        )

    assert gathered(KEPT, 4)[0] == []
    (message,), outputs = gathered(KEPT, 64)
    _, weights = gathered("zero 3 over tp on fc", 64)
    assert message == (
        f"a rank sends {outputs / 1024:.1f} KiB a step to gather the outputs of `fc`, and would send {weights} B to "
        "gather the weights"
    )


def test_a_weight_that_an_operator_reads_whole_is_called_a_weight(tmp_path: Path) -> None:
    body = """
    def forward(self, x):
        return F.linear(x, self.fc.weight.softmax(0)).square().mean()
    """
    compiled, checked = made(tmp_path, body, f"{X}\nmesh tp=2\nshard fc.weight [O/tp, _]")
    rows = [row for row in checked.report["communication"] if row["op"] == "all_gather"]
    assert [row["carries"] for row in rows] == ["weights"]
    assert "`zero 3 over tp on fc`" in next(one.help for one in warnings_of(compiled) if one.code.name == "P0209")
