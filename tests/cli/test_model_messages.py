"""The messages for a person whose model or rule is at fault: a diagnostic at its place, never a traceback."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parc.cli import main
from parc.compiler.ops import rules as op_rules
from parc.passes.canonical import rewriter
from parc.passes.canonical.canonicalize import canonical_form

Captured = pytest.CaptureFixture[str]

MODELS = """
import types
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import parc


def name_of(op):
    return f"messages.{op}.default"


if not hasattr(torch.ops.messages, "twice"):

    @torch.library.custom_op("messages::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("messages::twice_back", mutates_args=())
    def twice_back(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    twice_back.register_fake(lambda x: torch.empty_like(x))
    twice.register_autograd(lambda ctx, g: twice_back(g), setup_context=lambda ctx, inputs, output: None)


class Named(NamedTuple):
    logits: torch.Tensor
    loss: None


@dataclass(slots=True)
class Slots:
    logits: torch.Tensor
    loss: None


class Model(nn.Module):
    def __init__(self, op="", rule="", part="none"):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.part, self.op = part, op
        if rule:
            parc.register_rule(name_of(op), rule, linear="0")

    def forward(self, x):
        return getattr(self, self.part)(x)

    def none(self, x):
        return self.fc(x)

    def kept(self, x):
        return checkpoint(self.fc, x, use_reentrant=False)

    def kept_reentrant(self, x):
        return checkpoint(self.fc, x, use_reentrant=True)

    def penalized(self, x):
        x = (x * 2).requires_grad_()
        (slope,) = torch.autograd.grad(self.fc(x).sum(), x, create_graph=True)
        return self.fc(x) + slope.norm()

    def of_a_constant(self, x):
        table = torch.linspace(1, 2, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(table.square().sum(), table)
        return self.fc(x) * slope.sum()

    def inverse(self, x):
        return x * torch.linalg.inv(torch.fft.fft(self.fc.weight)).abs().sum()

    def branch(self, x):
        return self.fc(x) * 2 if x.sum() > 0 else self.fc(x)

    def number(self, x):
        return self.fc(x) * x.sum().item()

    def sliced(self, x):
        return self.fc(x)[: int((x[:, 0] > 0).sum())]

    def turned(self, x):
        return self.fc(x).view(-1, 2, 4).mT

    def some(self, x):
        return self.fc(x)[x > 0]

    def only_empty(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("there are numbers in it")
        return self.fc(x)

    def fields(self, x):
        kinds = {"space": types.SimpleNamespace, "dict": dict, "named": Named, "slots": Slots}
        return kinds[self.op](logits=self.fc(x), loss=None)

    def pair(self, x):
        logits = self.fc(x)
        return logits, [logits.mean(), {"hidden": logits.square().mean()}]

    def own(self, x):
        return torch.ops.messages.twice(self.fc(x))


def mean(output):
    return output.mean()


def wrong(output, x):
    return (output @ x.reshape(3, 5)).sum()
"""


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """Forget the rules that a test registers after it."""
    before = dict(op_rules.TABLE), dict(op_rules._REGISTERED)
    yield
    for table, old in zip((op_rules.TABLE, op_rules._REGISTERED), before, strict=True):
        kept: Any = table
        kept.clear()
        kept.update(old)


def said(capsys: Captured, folder: Path, arguments: str = "", lines: str = "", **options: str) -> tuple[int, str]:
    """Return the exit code and stderr of a build."""
    (folder / "models.py").write_text(textwrap.dedent(MODELS))
    loss, dtype = options.get("loss", '"./models.py:mean"(output)'), options.get("dtype", "float32")
    plan = folder / "some.parc"
    plan.write_text(
        f'model "./models.py:Model" ({arguments})\ninput x {dtype} [B, 8]\nsizes B=4\nloss {loss}\n'
        f"optimizer sgd lr 1e-2\nseed 3\nsteps 2\n{lines}\n"
    )
    capsys.readouterr()
    code = main(["build", str(plan), "-o", str(folder / "build")])
    return code, capsys.readouterr().err


def test_tensors_of_two_dtypes_in_a_product(capsys: Captured, tmp_path: Path) -> None:
    code, err = said(capsys, tmp_path, dtype="int64")
    assert code == 1
    assert err.startswith(
        "error[P0205]: in `fc`: aten.linear.default takes tensors of one dtype, not int64 and float32"
    )
    assert "at models.py:" in err


@pytest.mark.parametrize("part", ["kept", "kept_reentrant"])
def test_recomputed_activations(capsys: Captured, tmp_path: Path, part: str) -> None:
    code, err = said(capsys, tmp_path, f'part="{part}"')
    assert code == 1 and err.startswith("error[P0218]")


def test_a_gradient_that_a_forward_takes(capsys: Captured, tmp_path: Path) -> None:
    code, err = said(capsys, tmp_path, 'part="penalized"')
    assert code == 1 and err.startswith("error[P0205]: the model takes a gradient in its forward\n")
    assert re.search(r"= note: at .*models.py:\d", err) and "differentiates the loss once" in err


def test_a_gradient_of_a_constant_is_one(capsys: Captured, tmp_path: Path) -> None:
    code, err = said(capsys, tmp_path, 'part="of_a_constant"')
    assert code == 0, err


def test_complex_numbers_that_are_no_pairs(capsys: Captured, tmp_path: Path) -> None:
    code, err = said(capsys, tmp_path, 'part="inverse"')
    assert code == 1 and err.startswith("error[P0256]: aten.linalg_inv_ex.default of complex numbers")
    assert "at models.py:" in err


FIELDS = {
    ("none", "", '"./models.py:mean"(output.logits)'): "has no `logits`: it is a tensor\n|write `output`\n",
    ("fields", "space", "output.loss"): "the model's `output.loss` is None\n|it has `output.logits` (float32 [4, 8])\n",
    ("fields", "dict", '"./models.py:mean"(output.logist)'): "it is a dict\n|did you mean `output.logits`?\n",
    (
        "fields",
        "named",
        '"./models.py:mean"(output.hidden)',
    ): "it is a Named\n|it has `output.logits` (float32 [4, 8])\n",
    ("fields", "named", "cross_entropy(output, x)"): "`output` is a Named, not a tensor\n|it has `output.logits` (f",
    ("fields", "slots", "output.other"): "has no `other`: it is a Slots\n|it has `output.logits` (float32 [4, 8])\n",
    ("pair", "", "output.loss"): "has no `loss`: it is a tuple\n|`output.0` (float32 [4, 8]), `output.1` (a list)\n",
    ("pair", "", "output.2"): "has no `2`: it is a tuple\n|it has `output.0` (float32 [4, 8]), `output.1` (a list)\n",
    (
        "pair",
        "",
        "output.1",
    ): "`output.1` is a list, not a tensor\n|it has `output.1.0` (float32 []), `output.1.1` (a d",
    ("pair", "", "output.1.1.hiden"): "did you mean `output.1.1.hidden`?\n",
    ("pair", "", "output.0.1"): "the model's `output.0` has no `1`: it is a tensor\n|write `output.0`\n",
}


@pytest.mark.parametrize(("part", "op", "loss"), FIELDS)
def test_a_field_that_the_output_has_not(capsys: Captured, tmp_path: Path, part: str, op: str, loss: str) -> None:
    code, err = said(capsys, tmp_path, f'part="{part}", op="{op}"', loss=loss)
    assert code == 1 and err.startswith("error[P0224]") and f"4 | loss {loss}" in err and "Error" not in err
    assert all(text in err for text in FIELDS[part, op, loss].split("|")), err


FOUND = [
    *(("fields", op, '"./models.py:mean"(output.logits)') for op in ("space", "dict", "named", "slots")),
    *(("pair", "", loss) for loss in ('"./models.py:mean"(output.0)', "output.1.0", "output.1.1.hidden")),
]


@pytest.mark.parametrize(("part", "op", "loss"), FOUND)
def test_a_field_of_the_output_is_found_by_name(
    capsys: Captured, tmp_path: Path, part: str, op: str, loss: str
) -> None:
    code, err = said(capsys, tmp_path, f'part="{part}", op="{op}"', loss=loss)
    assert code == 0, err


def test_a_loss_that_fails_is_underlined_itself(capsys: Captured, tmp_path: Path) -> None:
    code, err = said(capsys, tmp_path, loss='"./models.py:wrong"(output, x)')
    assert code == 1 and err.startswith("error[P0205]")
    assert '4 | loss "./models.py:wrong"(output, x)' in err and '"<string>"' not in err


@pytest.mark.parametrize(
    ("dims", "way"),
    [
        ("B, 2", "classes are in dim 1 here: let the model return its logits with `.movedim(1, -1)`"),
        ("B", "let the model return logits with one row for each of the 4 targets, classes in the last dim"),
    ],
)
def test_logits_without_a_row_for_each_target_are_told_where_classes_go(
    capsys: Captured, tmp_path: Path, dims: str, way: str
) -> None:
    code, err = said(capsys, tmp_path, 'part="turned"', f"input y int64 [{dims}]", loss="cross_entropy(output, y)")
    targets = "[4, 2]" if "2" in dims else "[4]"
    assert code == 1 and err.startswith(
        f"error[P0205]: `output` is [4, 4, 2] and `y` {targets}, and `cross_entropy` has classes in the last dim\n"
    )
    assert "4 | loss cross_entropy(output, y)" in err and f"help: {way}\n" in err


@pytest.mark.parametrize(
    ("part", "message", "help_"),
    [
        ("number", "aten.item.default gives a number that depends on the values of tensors", "leave it a tensor"),
        ("sliced", "a size, a slice or a count in the model depends on the values of tensors", "keep the whole dim"),
        ("some", "aten.index.Tensor gives a tensor whose shape depends on the values of tensors", "multiply by a mask"),
    ],
)
def test_what_only_data_can_tell_is_named_where_the_model_asks_for_it(
    capsys: Captured, tmp_path: Path, part: str, message: str, help_: str
) -> None:
    code, err = said(capsys, tmp_path, f'part="{part}"')
    assert help_ in err
    assert code == 1 and err.startswith(f"error[P0202]: {message}\n") and re.search("= note: at .*models.py:", err)


def test_torch_says_nothing_of_its_own(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    level = logging.getLogger("torch").level
    code, err = said(capfd, tmp_path, 'part="branch"')
    assert code == 1 and err.startswith("error[P0202]")
    assert logging.getLogger("torch").level == level


RULES = {
    "of another rank": ("twice", "a b c -> a b c", "does not fit 3 dims"),
    "whose backward has none": ("twice", "... -> ...", "register a rule for that too"),
    "of no operator": ("twcie", "... -> ...", "did you mean `messages.twice.default`"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_does_not_fit(capsys: Captured, tmp_path: Path, name: str) -> None:
    op, rule, text = RULES[name]
    arguments = f'part="own", op="{op}", rule="{rule}"'
    code, err = said(capsys, tmp_path, arguments, "mesh tp=2\ncolumn fc over tp")
    assert code == 1 and err.startswith(f"error[P0216]: the rule `{rule}` of `messages.{op}.default` does not fit")
    assert text in err


def test_a_fault_of_parcs_own_says_where_it_was(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("nobody foresaw this")

    canonical_form.cache_clear()  # another test may have built this plan
    monkeypatch.setitem(rewriter.REWRITES, torch.ops.aten.linear.default, fails)
    code, err = said(capsys, tmp_path)
    assert code == 3 and "parc was at %linear" in err and ": fc models.py:" in err


def test_a_model_that_fails_on_data(capsys: Captured, tmp_path: Path) -> None:
    code, err = said(capsys, tmp_path, 'part="only_empty"')
    assert code == 1 and err.startswith("error[P0205]: the model fails on a batch: ValueError: there are numbers in it")
