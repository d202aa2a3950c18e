"""The values of a plan: typed values, defaults, substitution, and its text as built."""

from __future__ import annotations

import pytest

from parc.compiler.build.plan_facts import plan_facts
from parc.compiler.layout.mesh import Mesh
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.step_values import LossTerm
from parc.compiler.sizes.size_range import SizeRange
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source

TEXT = """
let dp=2, width=64, file="gpt", folder = "texts"
model "./$file.py:GPT" (width=$width, name="n", bias=false, extra=none)
verify width=16
input tokens int64 [B, S]
input mask float32 [B, 4]
sizes B=32, S=128..4096 by 128
loss cross_entropy(output.logits, tokens)
data bytes "{stdlib}/*.py", "$folder/*.txt"
optimizer adamw lr 3e-4 betas 0.9, 0.95
mesh dp=$dp, tp=2
schedule microbatches 4
shard tokens [B/dp, S]
vocab embed over tp
"""


def test_values_and_defaults() -> None:
    plan = read_plan(Source("gpt.parc", TEXT), {"dp": "4", "file": "2"})
    assert plan.model.callable == "./2.py:GPT"
    assert plan.model.values == (("width", 64), ("name", "n"), ("bias", False), ("extra", None))
    assert plan.verify is not None and plan.verify.values == (("width", 16),)
    assert [(found.name, found.dtype, found.dims) for found in plan.inputs] == [
        ("tokens", "int64", ("B", "S")),
        ("mask", "float32", ("B", 4)),
    ]
    assert plan.sizes == {"B": SizeRange(32, 32), "S": SizeRange(128, 4096, 128)}
    assert plan.loss.terms == (LossTerm("cross_entropy", "cross_entropy", ("output.logits", "tokens"), -100),)
    assert plan.data is not None and plan.data.said.names == ("{stdlib}/*.py", "texts/*.txt")
    assert (plan.optimizer.lr, plan.optimizer.weight_decay, plan.optimizer.betas) == (3e-4, 0.01, (0.9, 0.95))
    assert plan.mesh == Mesh((("dp", 4), ("tp", 2)))
    assert (plan.seed, plan.steps, plan.microbatches, plan.precision) == (0, None, 4, ())
    assert len(plan.placements) == 2
    assert plan.defines == (("dp", "4"), ("file", "2"))


@pytest.mark.parametrize(
    ("shape", "over"), [("cosine 1e-3 over 40", 40), ("linear 1e-3 warmup 5 over 70", 70), ("cosine 1e-3", 100)]
)
def test_a_build_keeps_the_step_at_which_the_rate_has_fallen(shape: str, over: int) -> None:
    """A run and the simulation of a build both read it from the manifest: here it is what the plan says."""
    text = TEXT.replace("lr 3e-4", f"lr {shape}") + "steps 100\n"
    plan = read_plan(Source("gpt.parc", text))
    assert plan_facts(plan)["optimizer"]["over"] == over


def test_a_name_may_be_the_first_word_of_a_clause_of_several() -> None:
    plan = read_plan(Source("gpt.parc", TEXT.replace("mask", "keep") + "shard keep [B/dp, _]\n"))
    assert [line.arguments.span("values").text for line in plan.placements if line.verb == "shard"] == [
        "tokens",
        "keep",
    ]
    with pytest.raises(PlanError, match="`keep` needs `gathered`"):
        read_plan(Source("gpt.parc", TEXT + "shard mask [B/dp, _] keep\n"))


def test_the_text_as_built_is_a_plan_that_says_the_same() -> None:
    plan = read_plan(Source("gpt.parc", TEXT), {"dp": "4"})
    again = read_plan(Source("plan.parc", plan.text()))
    assert "$" not in plan.text() and "let" not in plan.text()
    assert again.text() == plan.text()
    assert (again.model, again.mesh, again.inputs, again.optimizer) == (
        plan.model,
        plan.mesh,
        plan.inputs,
        plan.optimizer,
    )


@pytest.mark.parametrize(
    ("text", "kind", "target", "operands"),
    [
        ("loss output.loss", "output", "loss", ()),
        ('loss "pkg.mod:fn"(output, tokens)', "callable", "pkg.mod:fn", ("output", "tokens")),
        ("loss cross_entropy(output, tokens, ignore=-1)", "cross_entropy", "cross_entropy", ("output", "tokens")),
    ],
)
def test_losses(text: str, kind: str, target: str, operands: tuple[str, ...]) -> None:
    lines = [text if line.startswith("loss") else line for line in TEXT.split("\n")]
    loss = read_plan(Source("gpt.parc", "\n".join(lines))).loss
    assert [term[:3] for term in loss.terms] == [(kind, target, operands)]


def test_a_loss_is_a_sum_of_terms() -> None:
    added = 'loss cross_entropy(output, tokens) + 0.5 output.aux + 2 "pkg.mod:fn"(output, mask)'
    lines = [added if line.startswith("loss") else line for line in TEXT.split("\n")]
    loss = read_plan(Source("gpt.parc", "\n".join(lines))).loss
    assert [(term.kind, term.target, term.factor) for term in loss.terms] == [
        ("cross_entropy", "cross_entropy", 1), ("output", "aux", 0.5), ("callable", "pkg.mod:fn", 2)
    ]  # fmt: skip
    assert loss.reads == ("output", "tokens", "mask")


def test_data_by_a_callable() -> None:
    lines = ['data "./d.py:fn" (size=3)' if line.startswith("data") else line for line in TEXT.split("\n")]
    data = read_plan(Source("gpt.parc", "\n".join(lines))).data
    assert data is not None
    said = data.said
    assert (said.form, said.names, said.callable, said.values) == ("callable", (), "./d.py:fn", (("size", 3),))


def test_every_error_comes_at_once() -> None:
    text = "mesh dp=\nseed\ncolum x over tp\nlet a=1, a=2\nsteps $b\n"
    with pytest.raises(PlanError) as caught:
        read_plan(Source("p", text), {"c": "1"})
    codes = [diagnostic.code.name for diagnostic in caught.value.diagnostics]
    assert codes == ["P0001", "P0003", "P0002", "P0006", "P0007", "P0008", *["P0009"] * 2]
