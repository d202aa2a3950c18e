"""User code that the captured graph cannot be compared with, and a model that does not run in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from parc.checking.checks import case_of, check_build
from parc.checking.eager import compare_with_eager
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.text import parse_program
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError

MODELS = """
import random

import numpy
import torch
from torch import nn


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.time, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, tokens):
        time = self.time(torch.arange(16, dtype=torch.float32) / 16)
        return self.head(nn.functional.gelu(self.table(tokens) + time))


class Refusing(Timed):
    def forward(self, tokens):
        made = super().forward(tokens)
        if made.dtype == torch.float64:
            raise TypeError("no kernel for Double")
        return made


class Choosing(Timed):
    def forward(self, tokens):
        made = super().forward(tokens)
        return made.tanh() if made.dtype == torch.float64 else made


class Random(Timed):
    def forward(self, tokens):
        return super().forward(tokens) * random.random()


class Coin(Timed):
    def forward(self, tokens):
        return super().forward(tokens) * int(1 + 2 * random.random())


class NumPyCoin(Timed):
    def forward(self, tokens):
        return super().forward(tokens) * int(1 + numpy.random.randint(2))


class Unread(Timed):
    def forward(self, tokens):
        random.random()
        return super().forward(tokens)


class Counts(Timed):
    def forward(self, tokens):
        self.calls += 1
        return super().forward(tokens) * self.calls


class Moves(Timed):
    def forward(self, tokens):
        self.seen.add_(1)
        return super().forward(tokens) * self.seen


class Log(Timed):
    def forward(self, tokens):
        return super().forward(tokens).log()


class Unlucky(Timed):
    def forward(self, tokens):
        if random.random() > 0.5:
            raise ValueError("unlucky")
        return super().forward(tokens)


class Asks(Timed):
    def forward(self, tokens, more):
        return super().forward(tokens) + more


class Draws(Timed):
    def forward(self, tokens):
        nn.functional.dropout(self.table(tokens), 0.5)  # nobody reads it, but later draws follow it
        return nn.functional.dropout(super().forward(tokens), 0.1)


class DrawsAndWrites(Draws):
    def forward(self, tokens):
        return super().forward(tokens).mul_(2)


class Laws(Timed):
    def forward(self, tokens):
        torch.randperm(4), torch.normal(0.0, 1.0, (3,)), torch.empty(3).exponential_(), torch.randint(0, 3, (2,))
        made = nn.functional.dropout(super().forward(tokens), 0.1)
        return made + torch.normal(2.0, 3.0, (32,)) + torch.empty(32).uniform_(-1) + torch.empty(32).normal_(1)


class Root(Timed):
    def forward(self, tokens):
        return super().forward(tokens) + (self.time.weight - self.time.weight).abs().sqrt().sum()


class Amplified(Timed):
    def forward(self, tokens):
        rows = 1 + 2e-3 * self.head(self.table(tokens))
        return 1.7 * nn.functional.layer_norm(rows.float(), (32,), eps=1e-300)  # its squares do not depend on the rows


class Tilted(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        return 1.03 * grad


class Cancelled(Timed):
    def forward(self, tokens):
        small = 3e-6  # float32 loses what is beside 1, float64 does not
        return ((1 + small * Tilted.apply(self.head(self.table(tokens)))) - 1) / small


def mean(output):
    return output.square().mean()


def drawn(output):
    return output.square().mean() * random.random()


def minus(output):
    return (output.square().mean() - 1e9).log()
"""
PLAN = """
model "./models.py:Timed" ()
input tokens int64 [B, S]
sizes B=4, S=4
loss "./models.py:mean" (output)
optimizer sgd lr 1e-2
"""


def compiled(folder: Path, *changes: tuple[str, str]) -> Compiled:
    """Compile the plan with changes."""
    text = PLAN
    for change in changes:
        assert change[0] in text
        text = text.replace(*change)
    (folder / "models.py").write_text(MODELS)
    (folder / "timed.parc").write_text(text)
    return compile_plan(read_plan(folder / "timed.parc"), folder)


@pytest.mark.parametrize(
    ("model", "why"),
    [("Refusing", "the module fails: TypeError: no kernel for Double"), ("Choosing", "it calls aten.tanh.default()")],
)
def test_a_model_that_is_another_in_float64_is_compared_in_its_own_types(tmp_path: Path, model: str, why: str) -> None:
    compilation = compiled(tmp_path, ("Timed", model))
    case = case_of(compilation)
    agreement = compare_with_eager(compilation, case)
    assert agreement.holds and why in agreement.notes[0]
    assert agreement.compared == "in float32, at the initial weights and at weights moved by up to 20%"
    wrong = parse_program(case.reference.text().replace("aten.gelu.default(", "aten.silu.default("), "model")
    assert not compare_with_eager(compilation, replace(case, reference=wrong)).holds


def test_gradients_that_are_nothing_but_rounding_may_differ_as_far_as_that(tmp_path: Path) -> None:
    compilation = compiled(tmp_path, ("Timed", "Amplified"))
    case = case_of(compilation)
    text = case.reference.text()
    same = parse_program(text.replace("(add, 0.002)", "(add, 0.0020000000000000005)"), "model")
    agreement = compare_with_eager(compilation, replace(case, reference=same))
    assert agreement.holds and agreement.error("gradient") > 1e-3
    wrong = parse_program(text.replace("1e-300", "0.1"), "model")
    assert not compare_with_eager(compilation, replace(case, reference=wrong)).holds


def test_what_rounds_in_float32_alone_is_compared_in_float64(tmp_path: Path) -> None:
    compilation = compiled(tmp_path, ("Timed", "Cancelled"))
    with pytest.raises(PlanError) as error:
        compare_with_eager(compilation, case_of(compilation))
    assert "Tilted" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "code", "line", "text"),
    [
        ([("Timed", "Random")], "P0227", 2, "the next time, with the same inputs, weights and seeds of torch"),
        ([("Timed", "Coin")], "P0227", 2, "the next time, with the same inputs, weights and seeds of torch"),
        ([("Timed", "NumPyCoin")], "P0227", 2, "the next time, with the same inputs, weights and seeds of torch"),
        ([("Timed", "Counts")], "P0227", 2, "the next time, with the same inputs, weights and seeds of torch"),
        ([("mean", "drawn")], "P0227", 5, "the next time, with the same inputs, weights and seeds of torch"),
        ([("Timed", "Log")], "P0233", 2, "the loss is nan on a batch of random data"),
        ([("mean", "minus")], "P0233", 5, "the loss is nan on a batch of random data"),
        ([("Timed", "Root")], "P0233", 2, "the gradient of `time.weight` is not finite"),
        ([("1e-2", "1e200")], "P0233", 6, "in step 2 on random data"),
    ],
)
def test_faults_of_the_users_code_are_said_at_its_line(
    tmp_path: Path, changes: list[tuple[str, str]], code: str, line: int, text: str
) -> None:
    with pytest.raises(PlanError) as caught:
        check_build(compiled(tmp_path, *changes))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code.name == code and text in diagnostic.message, diagnostic.message
    assert diagnostic.primary is not None and diagnostic.primary.span.line == line


def test_draws_of_pythons_that_nothing_follows_are_none(tmp_path: Path) -> None:
    assert not check_build(compiled(tmp_path, ("Timed", "Unread"))).faults


def test_a_model_that_fails_for_some_draws_leaves_pythons_as_they_were(tmp_path: Path) -> None:
    random.seed(1)  # the first draw is lucky
    compilation = compiled(tmp_path, ("Timed", "Unlucky"))
    random.seed(1)
    with pytest.raises(PlanError) as caught:
        check_build(compilation)
    drawn = random.random()
    assert "unlucky" in caught.value.diagnostics[0].message
    random.seed(1)
    assert drawn == random.random()


def test_a_parameter_that_no_input_fills_is_met_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        compiled(tmp_path, ("Timed", "Asks"))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code.name == "P0206" and "no input fills `more`" in diagnostic.message
    assert "add an `input` line of that name" in diagnostic.help


def test_a_result_that_follows_a_buffer_is_a_function(tmp_path: Path) -> None:
    assert not check_build(compiled(tmp_path, ("Timed", "Moves"))).faults


@pytest.mark.parametrize("model", ["Draws", "DrawsAndWrites", "Laws"])
def test_random_numbers_that_nobody_reads_are_drawn_as_in_the_model(tmp_path: Path, model: str) -> None:
    assert not check_build(compiled(tmp_path, ("Timed", model))).faults
