"""The captured graph beside its module: right ones raise no alarm, changed ones do, and probes show what is hidden."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

from parc.checking.checks import case_of, check_build
from parc.checking.eager import compare_with_eager
from parc.checking.module_numbers import GraphRun, ModuleAgreement
from parc.checking.probes import ProbeBatches, moved
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.diagnostics import PlanError
from parc.grammar.source import Source
from tests.planted_bugs import CAPTURED
from tests.strategies import ModelSpec, input_shapes, models

_MODELS = """
import torch
from torch import nn


class Rooted(nn.Module):
    '''Parameters in the domain of a logarithm, a root and an arc cosine, at its end too, and a constant of the code.'''

    def __init__(self):
        super().__init__()
        self.log, self.root, self.cosine = (nn.Parameter(x) for x in (torch.ones(4), torch.zeros(4), torch.ones(4)))

    def forward(self, x):
        return x * self.log.log() + (self.root + 1e-12).sqrt() + (torch.tensor(0.99) * self.cosine).acos()


class Normed(nn.Module):
    '''A bias before BatchNorm, whose gradient is nothing but rounding.'''

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.norm(self.fc(x)).relu())


class Steep(nn.Module):
    '''A weight that only stays finite where it is hardly moved.'''

    def __init__(self, width=0.01):
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x):
        return x * (self.weight - 3 + 3 * self.width).sqrt()


class Cached(nn.Module):
    '''A buffer that the first forward makes, and later ones read.'''

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("slopes", None, persistent=False)

    def forward(self, x):
        if self.slopes is None:
            self.register_buffer("slopes", torch.arange(4) / 4, persistent=False)
        return self.fc(x) * self.slopes


class Casting(nn.Module):
    '''Code that names types: of a norm, of a softmax, of positions, of the smallest number, without an eps.'''

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.RMSNorm(4)

    def forward(self, x):
        place = torch.arange(4, dtype=torch.float32) / 7 + torch.arange(4) / 3
        y = self.norm(self.fc(x).float()).to(torch.bfloat16) + place
        mask = torch.full((4, 4), torch.finfo(x.dtype).min).triu(1)[2]
        return (y + mask).softmax(-1, dtype=torch.float32) + y


class Later(nn.Module):
    '''A forward that reads in its second step what it wrote in its first.'''

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.fc(x) + self.mean * (self.mean != 0)
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return y


class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if type(x) is torch.Tensor else self.fc(1.0005 * x)


class Table(nn.Module):
    def __init__(self, rows=4000):
        super().__init__()
        self.table = nn.Embedding(rows, 4)

    def forward(self, number):
        return self.table(number)


class Padded(Table):
    '''A forward that fails on padding where it is not traced.'''

    def forward(self, number):
        if not torch.compiler.is_compiling() and bool((number == 0).any()):
            raise ValueError("there is padding, and no mask")
        return self.table(number)


class Counted(nn.Module):
    '''Whole numbers that index after an addition, so no table's length is known to bound them.'''

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 4)

    def forward(self, number):
        return self.table(torch.where(number > 30, number - 1, number))


def square(output):
    return output.square().mean()


def sample(number):
    return {"number": torch.tensor(20 + number)}


def broken(number):
    raise OSError("the disk is away")
"""
_PLAN = """
model "./models.py:{model}
input x float32 [B, 4]
sizes B=8
loss "./models.py:square"(output)
optimizer sgd lr 1e-2
"""


def compiled(folder: Path, model: str, *changes: tuple[str, str]) -> Compiled:
    """Compile a model of four numbers a sample; ``changes`` are those of the plan."""
    (folder / "models.py").write_text(_MODELS)
    text = _PLAN.format(model=model)
    for change in changes:
        assert change[0] in text
        text = text.replace(*change)
    return compile_plan(read_plan(Source("plan.parc", text)), folder)


def compared(compilation: Compiled) -> ModuleAgreement:
    return compare_with_eager(compilation, case_of(compilation))


# ---- right graphs


@pytest.mark.parametrize("model", ["Rooted", "Normed", "Later", "Casting", "Cached"])
def test_a_graph_that_is_its_module_raises_no_alarm(tmp_path: Path, model: str) -> None:
    agreement = compared(compiled(tmp_path, f'{model}"()'))
    assert max(agreement.errors.values()) < 1e-12
    assert agreement.holds and agreement.compared.startswith("in float64, ") and agreement.share == 0.2
    assert not agreement.notes


@pytest.mark.parametrize("rows", [4000, 5])
def test_a_module_that_fails_at_the_end_of_a_range_is_compared_without_it(tmp_path: Path, rows: int) -> None:
    agreement = compared(compiled(tmp_path, f'Padded" (rows={rows})', ("x float32 [B, 4]", "number int64 [B]")))
    (note,) = (note for note in agreement.notes if "there is padding" in note)
    assert agreement.holds and note.startswith("no first and last numbers of ranges")


@pytest.mark.parametrize(("width", "share"), [(0.02, 0.02), (0.0001, 0.0)])
def test_weights_move_less_where_the_module_is_not_finite(tmp_path: Path, width: float, share: float) -> None:
    agreement = compared(compiled(tmp_path, f'Steep"(width={width})'))
    assert agreement.holds and agreement.share == share
    assert agreement.notes == ([] if share else ["not at moved weights: the loss is not finite"])


_SPEC = """
from tests.random_layers import Sizes
from tests.strategies import Layer, ModelSpec, RandomModel
from tests.trials import call_loss

SPEC = {spec}


def make():
    return RandomModel(SPEC)


def loss(output, y):
    return call_loss(SPEC, output, {{"y": y}})


def alone(output):
    return call_loss(SPEC, output, {{}})
"""


def random_module(folder: Path, spec: ModelSpec) -> Compiled:
    """Compile a random model from a file of its own."""
    (folder / "model.py").write_text(_SPEC.format(spec=spec))
    shapes = input_shapes(spec)
    loss = 'loss "./model.py:loss"(output, y)' if "y" in shapes else 'loss "./model.py:alone"(output)'
    inputs = [f"input {name} {dtype} {[*shape]}" for name, (dtype, shape) in shapes.items()]
    text = "\n".join(['model "./model.py:make"', *inputs, loss, "optimizer sgd lr 0.1"])
    return compile_plan(read_plan(Source("plan.parc", text)), folder)


@pytest.mark.hypothesis
def test_graphs_of_random_modules_raise_no_alarm(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=max(4, settings().max_examples // 10), suppress_health_check=list(HealthCheck))
    @given(models(3))
    def run(spec: ModelSpec) -> None:
        note(f"model: {spec}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            agreement = compared(random_module(tmp_path_factory.mktemp("random"), spec))
        assert agreement.holds, agreement

    run()


# ---- wrong ones


def test_changes_of_a_captured_graph_are_noticed_behind_weights_of_zeros() -> None:
    rows = CAPTURED.rows(most=1, share=2)
    assert rows.keys() == {"add a share", "change a small number", "take another function", "drop a row"}
    assert not [what for row in rows.values() for what in row.accepted]


def test_a_difference_is_said_with_its_tensor_and_what_rounding_explains(tmp_path: Path) -> None:
    compilation = compiled(tmp_path, 'Typed"()')
    with pytest.raises(PlanError) as caught:
        check_build(compilation)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code.name == "P0280" and "of `fc." in diagnostic.message
    assert "in float64: rounding explains" in diagnostic.notes[0] and "please report" in diagnostic.help


@pytest.mark.parametrize(("model", "steps"), [("Later", [0, 1, 0, 1]), ("Rooted", [0, 0])])
def test_a_second_step_is_compared_where_the_first_changed_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, steps: list[int]
) -> None:
    taken, step = [], GraphRun.step

    def noted(run: GraphRun, inputs: dict[str, torch.Tensor], number: int) -> Any:
        taken.append(number)
        return step(run, inputs, number)

    monkeypatch.setattr(GraphRun, "step", noted)
    assert compared(compiled(tmp_path, f'{model}"()')).holds and taken == steps


# ---- probes


def test_moved_weights_keep_signs_and_what_was_zero_gets_the_size_of_its_neighbours() -> None:
    weights = {"a.weight": torch.randn(50, 4), "a.bias": torch.zeros(50), "b.count": torch.arange(3),
               "a.mask": torch.tensor([0.0, -torch.inf, 1.0])}  # fmt: skip
    found = moved(weights, 0.2)
    share = 1 - found["a.weight"] / weights["a.weight"]
    assert share.min() >= -1e-6 and 0.1 < share.max() <= 0.2
    assert found["a.bias"].min() >= 0 and 0.05 < found["a.bias"].max() < 0.3
    assert torch.equal(found["b.count"], weights["b.count"]) and found["a.mask"][1] == -torch.inf
    assert 0 < found["a.mask"][0] <= 0.2 and 0.8 <= found["a.mask"][2] <= 1
    assert all(torch.equal(value, moved(weights, 0.2)[name]) for name, value in found.items())


def test_a_batch_holds_the_ends_of_ranges_and_samples_of_the_data(tmp_path: Path) -> None:
    table = ("input x float32 [B, 4]", "input number int64 [B]")
    data = ("optimizer", 'data "./models.py:{}"\noptimizer')
    bounded = compiled(tmp_path, 'Table"()', ("input x float32 [B, 4]", "input number int64 [B, 3]"))
    batch = ProbeBatches(bounded, case_of(bounded)).batch(0)["number"]
    assert {0, 3999} <= {*batch.flatten().tolist()}
    for name, numbers, guessed in (("sample", {20, 21, 22, 23}, ""), ("broken", {0, 1}, "OSError: the disk is away")):
        compilation = compiled(tmp_path, 'Counted"()', table, (data[0], data[1].format(name)))
        batches = ProbeBatches(compilation, case_of(compilation))
        assert {*batches.batch(0)["number"].tolist()} <= numbers
        assert guessed in batches.guessed and bool(guessed) == bool(batches.guessed)
    report: dict[str, Any] = check_build(compilation).report["numbers"]
    assert "numbers of `number` are 0 or 1: the data cannot be read here" in report["module"]["notes"][0]
    broken = compiled(tmp_path, 'Later"()', (data[0], data[1].format("broken")))
    assert compared(broken).notes[0].startswith("no samples are the plan's own: the data cannot be read here")
