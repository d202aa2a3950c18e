"""An operator is one row: one of each family comes from outside, states its facts, and no other code knows of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from certificate.step import certify_texts
from certificate.text import Refused
from parc.checking.verification import differences
from parc.compiler.ops.factors import RuleError
from parc.compiler.ops.rules import facts, register
from parc.compiler.program.program import Line
from parc.compiler.resolve.stage_cuts import FLOPS_PER_BYTE, PASSES, operations_of
from parc.compiling.compiled import Compiled

from .checked_plans import checked, compiled

MODEL = """
import torch
from torch import nn

import parc

@torch.library.custom_op("outside::squash", mutates_args=())
def squash(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)

@torch.library.custom_op("outside::total", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)

@torch.library.custom_op("outside::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()

@torch.library.custom_op("outside::rows", mutates_args=())
def rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index]

@torch.library.custom_op("outside::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).clone()

@torch.library.custom_op("outside::sevens", mutates_args=())
def sevens(size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(size, 7.0, dtype=dtype, device=device)

squash.register_fake(lambda x: torch.empty_like(x))
total.register_fake(lambda x: x.new_empty(x.shape[:-1]))
mix.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))
rows.register_fake(lambda table, index: table.new_empty(*index.shape, table.shape[1]))
turned.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[2], x.shape[1]))
sevens.register_fake(lambda size, **how: torch.empty(size, **how))

def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)

@torch.library.custom_op("outside::mix_back", mutates_args=())
def mix_back(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return g @ weight, g.flatten(0, -2).t() @ x.flatten(0, -2)

mix_back.register_fake(lambda g, x, weight: (torch.empty_like(x), torch.empty_like(weight)))

def rows_back(ctx, g):
    table, index, _ = ctx.saved_tensors
    return torch.ops.aten.embedding_dense_backward(g, index, table.shape[0], -1, False), None

squash.register_autograd(lambda ctx, g: g * (1 - ctx.saved_tensors[1] ** 2), setup_context=keep)
total.register_autograd(lambda ctx, g: g.unsqueeze(-1).expand(ctx.saved_tensors[0].shape), setup_context=keep)
mix.register_autograd(lambda ctx, g: mix_back(g, *ctx.saved_tensors[:2]), setup_context=keep)
rows.register_autograd(rows_back, setup_context=keep)
turned.register_autograd(lambda ctx, g: g.transpose(1, 2), setup_context=keep)

parc.register_rule("outside.squash.default", "... -> ...", elementwise=True, gradient="g * (1 - y ** 2)")
parc.register_rule("outside.total.default", "... d -> ...", linear="0", precision="sensitive", reduces="sum",
                   gradient="wide(g, x, -1)")
parc.register_rule("outside.mix.default", "... k, n k -> ... n", linear="0|1", precision="product",
                   gradient="outside.mix_back.default(g, x, weight)")
parc.register_rule("outside.mix_back.default", "... n, ... k, n k -> ... k, n k", linear="0", precision="product",
                   backward=True)
parc.register_rule("outside.rows.default", "v! d, ... -> ... d", linear="0", moves="index", counted=(0, 0),
                   gradient="aten.embedding_dense_backward.default(g, index, table.shape[0], -1, False)")
parc.register_rule("outside.turned.default", "b s d -> b d s", linear="0", moves="dims",
                   gradient="'b d s -> b s d'(g)")
parc.register_rule("outside.sevens.default", "-> b d s", number=7,
                   localize=lambda call, operands, results: [(0, "size", list(results[0]))])

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, tokens):
        return rows(self.weight, tokens)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table()
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, tokens):
        x = squash(self.table(tokens))
        x = mix(squash(mix(x, self.up.weight)), self.down.weight)
        x = turned(x)
        return total(x + sevens(list(x.shape), dtype=x.dtype, device=x.device))

def square(output):
    return (output ** 2).mean()
"""
PLAN = """
model "./outside_model.py:Net"
input tokens int64 [B, 4]
sizes B=8
loss "./outside_model.py:square"(output)
optimizer sgd lr 0.1
"""
DATA = "mesh dp=2\nshard tokens [B/dp, ...]\n"
TENSOR = "mesh tp=2\ncolumn up over tp\nrow down over tp\n"
NAMES = {"squash", "total", "mix", "rows", "turned", "sevens"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder of the model. A module that is made twice registers its operators twice; torch then forgets the
    first ones, which captured graphs still hold."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "outside_model.py").write_text(MODEL)
    return folder


def built(folder: Path, lines: str) -> Compiled:
    return compiled(PLAN + lines, folder)


def outside_lines(compilation: Compiled) -> list[Line]:
    lines = [line for function in compilation.built.programs["F"].functions for line in function.lines]
    return [line for line in lines if line.op.startswith("outside.")]


@pytest.mark.parametrize("lines", [DATA, TENSOR], ids=["dp", "tp"])
def test_an_operator_of_each_family_is_one_row(folder: Path, lines: str) -> None:
    """Its programs are proved, its numbers are those of the plain model, and it is computed in parts."""
    compilation = built(folder, lines)
    assert checked(compilation).report["checks"]["numbers"] == "tested"
    found = outside_lines(compilation)
    assert {line.op.split(".")[1] for line in found} == NAMES
    split = {line.op.split(".")[1] for line in found if line.made[0].type.placement.split_axes()}
    assert split == (NAMES if lines == DATA else {"mix", "squash"})


@pytest.mark.parametrize("lines", [DATA, TENSOR], ids=["dp", "tp"])
def test_a_build_with_operators_from_outside_is_certified_by_their_rules(folder: Path, lines: str) -> None:
    """The certificate says what it takes as given: each rule, and the gradient that it has."""
    build = built(folder, lines).build
    proof = certify_texts(build.texts, build.manifest)
    assert proof.lines[0] == "stage0: the loss, 3 gradients, the norm"
    told = "outside.squash.default is what its rule says, `... -> ...` with the gradient `g * (1 - y ** 2)`"
    assert f"{told}, which is not proved" in proof.lines


@pytest.mark.parametrize(
    ("op", "fact", "other", "why"),
    [
        ("squash", "gradient", "g * (1 - y)", "is not proved to be what model.py says"),
        ("mix", "gradient", "outside.mix_back.default(g, x, x)", "has no such gradient"),
        ("total", "rule", "... d! -> ... d!", "`total` has the shape"),
        ("mix", "rule", "... k!, n k! -> ... n", "is not proved to be what model.py says"),
        ("squash", "gradient", "", "no derivative for `outside.squash.default`: give its rule `gradient="),
        ("squash", "gradient", "g * (", "its operators are none"),
        ("squash", "gradient", "unknown.op.default(g)", "`unknown.op.default` has no rule"),
        ("rows", "gradient", "g", "is reshaped to"),
    ],
)
def test_a_certificate_holds_by_the_rules_in_the_manifest_alone(
    folder: Path, op: str, fact: str, other: str, why: str
) -> None:
    build = built(folder, TENSOR).build
    name = f"outside.{op}.default"
    rows = {**build.manifest["operators"], name: {**build.manifest["operators"][name], fact: other}}
    with pytest.raises(Refused, match=why):
        certify_texts(build.texts, {**build.manifest, "operators": rows})


def test_verify_compares_the_rules_in_a_manifest_with_those_registered(folder: Path) -> None:
    compilation, name = built(folder, TENSOR), "outside.squash.default"
    build = compilation.build
    rows = build.manifest["operators"]

    def faults(rows: dict[str, Any]) -> list[str]:
        changed = replace(build, manifest={**build.manifest, "operators": rows})
        every = map(str, differences(changed, compilation))
        return [fault for fault in every if not fault.startswith("recompilation: report.json")]

    assert faults(rows) == []
    (other,) = faults({**rows, name: {**rows[name], "gradient": "g * (1 - y)"}})
    assert f"the gradient of `{name}` is `g * (1 - y)`, but `g * (1 - y ** 2)` is registered" in other
    (missing,) = faults({op: row for op, row in rows.items() if op != name})
    assert f"has no rule of `{name}`, which is registered" in missing
    (more,) = faults({**rows, "outside.other.default": rows[name]})
    assert "`outside.other.default` has no rule any more" in more


def test_operators_of_torch_get_no_rule_from_a_manifest(folder: Path) -> None:
    build = built(folder, DATA).build
    rows = {"aten.mm.default": build.manifest["operators"]["outside.mix.default"]}
    with pytest.raises(Refused, match=r"`aten\.mm\.default` is no operator of one's own"):
        certify_texts(build.texts, {**build.manifest, "operators": rows})
    with pytest.raises(Refused, match=r"no rule for `outside\.rows\.default`"):
        certify_texts(build.texts, {**build.manifest, "operators": {}})


def test_an_operator_from_outside_is_costed_by_its_row(folder: Path) -> None:
    compilation = built(folder, DATA)
    cost = {str(node.target).split(".")[1]: operations_of(node) for node in compilation.captured.graph.nodes
            if str(node.target).startswith("outside.") and "down" not in str(node.args)}  # fmt: skip
    samples = 8
    assert cost["mix"] == PASSES * 2 * samples * 4 * 8 * 12
    assert cost["rows"] == PASSES * FLOPS_PER_BYTE * (samples * 4 * 8 * 4 + samples * 4 * 8)  # of its table no more
    assert cost["squash"] == PASSES * FLOPS_PER_BYTE * 2 * 4 * samples * 4 * 12


def test_an_operator_from_outside_computes_in_the_type_that_its_row_says(folder: Path) -> None:
    compilation = built(folder, DATA + "precision bf16\n")
    checked(compilation)
    types = {line.op.split(".")[1]: line.made[0].type.dtype for line in outside_lines(compilation)}
    assert types["mix"] == torch.bfloat16
    assert types["total"] == torch.float32


def test_facts_that_are_none_are_refused(folder: Path) -> None:
    built(folder, DATA)
    assert facts("outside.mix.default").precision == "product"
    with pytest.raises(RuleError, match="'colour' is no fact of an operator; these are: addable"):
        register("outside.other.default", "... -> ...", colour="red")
    with pytest.raises(RuleError, match="already has the rule"):
        register("outside.mix.default", "... k, n k -> ... n", linear="0|1")
