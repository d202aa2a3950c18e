"""Loops over experts without a form: those that are followed, and those that are refused or left as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parc.checking.checks import case_of
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.source import Source
from parc.runtime.compare.model_run import ReferenceRun
from tests.checked_plans import checked, compiled
from tests.draws import wide
from tests.moe_loops import LOOPS
from tests.planted_builds import ROOT
from tests.test_expert_forms import plan

TRAPS = """
import torch
from tests.moe_forms import WIDTH, Model
from tests.moe_loops import Looped

class Trap(Looped):
    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2, dim=-1)
        made, count = torch.zeros_like(tokens), torch.zeros(8)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(index == number)
            {body}
        return {result}.view_as(x)

def trap():
    return Model("trap", layers=dict(trap=Trap))
"""
ADD = "made[token] += weights[token, place, None] * expert(tokens[token])"
REFUSED = {
    "another expert's tokens": (
        "made[token] += weights[token, place, None] * self.experts[number - 1](tokens[token])",
        "given something else than the tokens that chose it",
    ),
    "statistics": ("made[token] += expert(tokens[token]).mean(0)", "`mean` reads the tokens of an expert"),
    "another weight for one": (
        "made[token] += (number + 1) * expert(tokens[token])", "it does not do the same for every expert"
    ),
    "one expert left out": (f"if number != 3: {ADD}", "it does not do the same for every expert"),
    "what others added": (
        "made[token] += expert(made[token])", "an expert reads the results of other experts"
    ),
    "written over": ("made[token] = expert(tokens[token])", "not added to the rows of its tokens"),
    "a count beside": (
        f"if len(token.shape) and token.numel() > 0:\\n                count[number] += 1\\n                {ADD}",
        "something else is written only if an expert has tokens",
    ),
    "tokens that change": (
        "rows = expert(tokens[token]); tokens *= 2; made[token] += rows",
        "something is written between the look-up",
    ),
    "a view": ("view = made.view(-1, WIDTH); view[token] += expert(tokens[token])", "added to a view: add them"),
    "experts that change": (
        f"index += 1; {ADD}", "it does not do the same for every expert"
    ),
    "many": (f"if token.numel() > 3: {ADD}", "compared with another number than 0"),
    "a value carried": (
        f"if token.numel() > 0:\\n                tokens = 2 * tokens\\n                {ADD}",
        "`tokens` may be another value than before only if an expert has tokens",
    ),
    "rows left": (f"{ADD}; left = expert(tokens[token])", "`sum` reads the tokens of an expert"),
}  # fmt: skip


def built(text: str) -> Compiled:
    return compiled(text.replace("moe_forms.py:Model", "moe_loops.py:looped"), ROOT / "tests")


@pytest.mark.parametrize(
    ("name", "ep"), [*((name, 2) for name in LOOPS), ("ByPlaces", 1), wide("ByPlaces", 4), ("ByPlaces", 8)]
)
def test_a_loop_over_a_list_computes_what_its_layer_does_on_any_number_of_ranks(name: str, ep: int) -> None:
    """Loss, gradients and the update of the simulated ranks in float64, beside those of the layer's own code."""
    compilation = built(plan(name, f"dp=1, ep={ep}"))
    assert checked(compilation).report["checks"]["numbers"] == "tested"
    stacks = {
        key: value.type
        for key, value in compilation.built.programs["F"].main.bound("parameter").items()
        if ".*." in key
    }
    assert len(stacks) == 8 and {type_.local(compilation.mesh)[0] for type_ in stacks.values()} == {8 // ep}


@pytest.mark.parametrize("trap", REFUSED)
def test_a_loop_that_does_something_else_is_refused(trap: str, tmp_path: Path) -> None:
    body, said = REFUSED[trap]
    result = "(made + 0 * left.sum())" if trap == "rows left" else "(made + tokens * count.sum())"
    body = body.replace("\\n", "\n")
    (tmp_path / "traps.py").write_text(TRAPS.format(body=body, result=result))
    text = plan("trap", "dp=1, ep=2").replace('./moe_forms.py:Model" (name="trap")', './traps.py:trap"')
    with pytest.raises(PlanError) as refusal:
        compile_plan(read_plan(Source("plan.parc", text)), tmp_path)
    message = "\n".join(map(render, refusal.value.diagnostics))
    assert "error[P0263]: a loop over experts is not followed where" in message and said in message, message
    assert "at " in message and "traps.py:" in message and "write the layer's form with `parc.routed`" in message


def test_a_loop_in_which_every_expert_takes_all_tokens_is_as_it_was(tmp_path: Path) -> None:
    """Its weights are not stacked: nothing in it depends on data."""
    dense = "chosen = (index == number).to(x.dtype)\n            made = made + (weights * chosen).sum(-1, keepdim=True)"
    body = f"{dense} * expert(tokens)"
    text = TRAPS.replace("token, place = torch.where(index == number)", "pass").format(body=body, result="made")
    (tmp_path / "traps.py").write_text(text)
    line = plan("trap", "dp=2, ep=1").replace('./moe_forms.py:Model" (name="trap")', './traps.py:trap"')
    compilation = compile_plan(
        read_plan(Source("plan.parc", line.replace("experts layers", "# experts layers"))), tmp_path
    )
    assert checked(compilation).report["checks"]["numbers"] == "tested"
    assert "layers.0.experts.experts.3.up.weight" in compilation.built.programs["F"].main.bound("parameter")


TWICE = """
from types import SimpleNamespace
from tests.moe_loops import LOOPS, Model

class Twice(Model):
    def forward(self, input_ids):
        layer, x = self.layers[0].experts, self.embed(input_ids)
        return SimpleNamespace(logits=self.head(x + layer(x + layer(x))))

def twice():
    return Twice("ByPlaces", layers=LOOPS)
"""


def test_a_layer_called_twice_counts_the_tokens_of_both_calls_and_a_line_may_name_its_list(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    text = plan("twice", "dp=1, ep=2").replace('./moe_forms.py:Model" (name="twice")', './twice.py:twice"')
    line = text.replace("layers.*.experts over ep dropless", "layers.*.experts.experts over ep dropless load 2")
    compilation = compile_plan(read_plan(Source("plan.parc", line)), tmp_path)
    (layer,) = compilation.build.manifest["experts"].values()
    assert (layer["load"], layer["ranks"]) == (2, 2)
    run, tokens = ReferenceRun(case_of(compilation)), torch.randint(32, (8, 4))
    run.gradients([{"input_ids": tokens, "targets": tokens}], 1)
    (counted,) = run.loads.values()
    assert int(counted.sum()) == 2 * tokens.numel() * 2  # two calls, two experts a token
    assert checked(compilation).report["checks"]["numbers"] == "tested"
