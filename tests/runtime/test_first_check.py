"""The first check of a run: one step of small programs in their own types, as simulated, or the run does not begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import parc
from parc.build import Refused
from parc.build import build as build_checked
from parc.checking import twins
from parc.checking.checks import case_of
from parc.cli import main
from parc.compiler.build.directory import read_build
from parc.compiler.build.first_check import read_first_check
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.pieces import take
from parc.compiler.layout.placement import Placement, Split, TensorType
from parc.grammar.diagnostics import PlanError
from parc.runtime.compare import own_types
from parc.runtime.compare.first_check import CheckOutcome, first_check
from parc.runtime.compare.formula import planned_rate, rate_error
from parc.runtime.compare.full_step import full_step
from parc.runtime.compare.own_types import Signature, own_step, piece_signature, varied, whole_batch, whole_signature
from parc.runtime.machine import attention
from parc.runtime.ranks.faults import RunError
from parc.runtime.session import session as session_module
from parc.runtime.session.session import Session
from parc.runtime.state import initial, optimizer
from parc.runtime.state.optimizer import rate
from tests.checked_plans import compiled
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import ATTENTION, BOTH, DATA, EXAMPLES, FLAT

CPU = torch.device("cpu")
RATES = "optimizer adamw lr cosine 1e-2 warmup 2 to 1e-3 over 8 eps 1e-5 weight_decay 0.1 clip 0.1\nema 0.9\n"


def built(folder: Path, placements: str = "", plan: str = FLAT) -> Path:
    """Build a plan with every check, beside a copy of the example's model."""
    (folder / "gpt.py").write_text((EXAMPLES / "gpt.py").read_text())
    (folder / "plan.parc").write_text(plan + placements)
    build_checked(folder / "plan.parc", folder / "build", {})
    return folder / "build"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of one rank, with averages, clipping and a rate that warms up."""
    lines = [line for line in FLAT.splitlines() if not line.startswith("optimizer")]
    return built(tmp_path_factory.mktemp("one"), RATES, "\n".join(lines) + "\n")


def test_a_sound_run_agrees_with_what_was_simulated(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = first_check(read_build(path), CPU)
    assert outcome is not None and 0 < outcome.largest < 0.5
    assert outcome.text().startswith(f"first check: {outcome.tensors} tensors of a step as simulated, on the build")
    parc.load(path, check=True).close()
    metrics = path.parent / "metrics.jsonl"
    assert main(["run", str(path), "--steps", "1", "--metrics", str(metrics)]) == 0
    assert "first check:" in capsys.readouterr().err
    facts = json.loads(metrics.read_text().splitlines()[0])["run"]["first_check"]
    assert facts["tensors"] == outcome.tensors and facts["ranks"] == 1
    metrics.unlink()
    assert main(["run", str(path), "--steps", "1", "--metrics", str(metrics), "--no-first-check"]) == 0
    assert "first check" not in capsys.readouterr().err
    assert json.loads(metrics.read_text().splitlines()[0])["run"]["first_check"] is None


def test_state_that_is_allocated_before_the_first_step_begins_with_the_step_s_own_weights(tmp_path: Path) -> None:
    outcome = first_check(read_build(built(tmp_path, 'ema 0.9 every 2\noffload optimizer to "offloaded"\n')), CPU)
    assert outcome is not None and outcome.largest < 0.5


def test_nothing_is_left_of_it(path: Path) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with parc.load(path) as session, parc.load(path, check=True) as checked:
        pairs = zip(session.state.parameters.values(), checked.state.parameters.values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) and checked.step_number == 0
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


# ---- faults of a run's machine


def _late_rate(line: Any, step: int) -> float:
    return rate(line, max(step - 1, 1))


def _wrong_norm(real: Callable[..., Any]) -> Callable[..., Any]:
    def gradients(self: Session, *args: Any, **options: Any) -> Any:
        result = real(self, *args, **options)
        result.grad_norm = result.grad_norm * 1.01
        return result

    return gradients


def _one_entry(real: Callable[..., Any]) -> Callable[..., Any]:
    def gradients(self: Session, *args: Any, **options: Any) -> Any:
        result = real(self, *args, **options)
        next(iter(result.gradients.values())).view(-1)[0] += 0.01
        return result

    return gradients


def _lost_clip(real: Callable[..., Any]) -> Callable[..., Any]:
    def update(optimizer: Any, line: Any, step: int, parameters: Any, gradients: Any, norm: Any, *rest: Any) -> None:
        real(optimizer, line, step, parameters, gradients, None, *rest)

    return update


def _no_averages(real: Callable[..., Any]) -> Callable[..., Any]:
    def update(optimizer: Any, line: Any, *rest: Any) -> None:
        real(optimizer, {name: value for name, value in line.items() if name != "ema"}, *rest)

    return update


def _shifted(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: real(*args).roll(1, -1) if real(*args).dim() > 1 else real(*args)


FAULTS: list[tuple[Any, str, Callable[[Any], Any], str]] = [
    (optimizer, "rate", lambda _: _late_rate, "update"),
    (Session, "gradients", _one_entry, "gradient"),
    (Session, "gradients", _wrong_norm, "norm of the gradients"),
    (session_module, "update", _lost_clip, "update"),
    (session_module, "update", _no_averages, "ema of"),
    (initial.Initial, "_drawn_piece", _shifted, "initial value of"),
]


@pytest.mark.parametrize(("place", "name", "wrong", "what"), FAULTS, ids=[fault[3] + fault[1] for fault in FAULTS])
def test_a_fault_of_the_machine_ends_the_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, wrong: Callable[[Any], Any], what: str
) -> None:
    real = getattr(place, name)
    monkeypatch.setattr(place, name, wrong(real))
    if place is optimizer:
        monkeypatch.setattr("parc.runtime.session.session.rate", _late_rate)
    with pytest.raises(RunError, match=what) as caught:
        first_check(read_build(path), CPU)
    assert caught.value.code.name == "P0430"
    assert f"`parc verify --run {path}` looks for the line" in caught.value.help
    assert caught.value.notes == ("a second try differed in the same way",)


def test_averages_that_are_offloaded_begin_at_varied_parameters(tmp_path: Path) -> None:
    outcome = first_check(read_build(built(tmp_path, 'offload optimizer to "away"\nema 0.9\n')), CPU)
    assert outcome is not None and outcome.largest < 0.5


def test_a_kernel_that_differs_once_is_named_as_such(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Session.gradients, []

    def once(self: Session, *args: Any, **options: Any) -> Any:
        calls.append(0)
        return _one_entry(real)(self, *args, **options) if len(calls) == 1 else real(self, *args, **options)

    monkeypatch.setattr(Session, "gradients", once)
    with pytest.raises(RunError, match="times what roundings explain") as caught:
        first_check(read_build(path), CPU)
    assert "a kernel of this device may not give the same result twice" in caught.value.notes[0]


NARROW_MODEL = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(getattr(torch, form))
        self.form = getattr(torch, form)

    def forward(self, x):
        return self.layers(x.to(self.form)).float().square().mean()
"""
NARROW_PLAN = """\
model "./net.py:Net" (form="{form}")
input x float32 [B, 8]
sizes B=8
loss output
optimizer {optimizer}
"""


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [("bfloat16", "sgd lr 0.1 momentum 0.9\nema 0.9"), ("bfloat16", "rmsprop lr 1e-2"), ("float16", "adamw lr 1e-3")],
    ids=["sgd", "rmsprop", "adamw"],
)
def test_updates_of_narrow_parameters_may_round_as_their_type_does(tmp_path: Path, form: str, optimizer: str) -> None:
    (tmp_path / "net.py").write_text(NARROW_MODEL)
    (tmp_path / "plan.parc").write_text(NARROW_PLAN.format(form=form, optimizer=optimizer))
    build_checked(tmp_path / "plan.parc", tmp_path / "build", {})
    outcome = first_check(read_build(tmp_path / "build"), CPU)
    assert outcome is not None and outcome.largest < 0.5


RETURNING = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x):
        scores = self.layer(x)
        masked = scores.masked_fill(torch.arange(6) > 3, float("-inf"))
        return {"masked": masked, "classes": scores.argmax(-1), "above": scores > 0}
"""
RETURNED = 'model "./net.py:Net"\ninput x float32 [B, 8]\nsizes B=16\n'


@pytest.mark.parametrize(("lines", "tensors"), [("", 3), ("precision bf16\n", 1)], ids=["float32", "bfloat16"])
def test_returned_classes_and_masked_scores_are_compared(tmp_path: Path, lines: str, tensors: int) -> None:
    (tmp_path / "net.py").write_text(RETURNING)
    (tmp_path / "plan.parc").write_text(RETURNED + lines)
    build_checked(tmp_path / "plan.parc", tmp_path / "build", {})
    outcome = first_check(read_build(tmp_path / "build"), CPU)
    assert outcome is not None and outcome.tensors == tensors and outcome.largest < 0.5
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError, match="output masked"):
        patch.setattr("parc.runtime.compare.first_check.varied", lambda name, whole: 3 * whole)
        first_check(read_build(tmp_path / "build"), CPU)


# ---- several ranks


def _checked(folder: str) -> dict[str, tuple[CheckOutcome | None, float]]:
    """Check every build of a folder, and do the gradients of a step after it: the check's groups are gone, those of
    the run work."""
    outcomes = {}
    for path in sorted(Path(folder).glob("*/build")):
        outcome = first_check(read_build(path))
        with parc.load(path) as session:
            outcomes[path.parent.name] = outcome, float(session.gradients(whole_batch(session.build, 1)).loss)
    return outcomes


def test_ranks_check_as_many_as_the_small_programs_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("both", "twin"):
        (tmp_path / name).mkdir()
    built(tmp_path / "both", BOTH + "zero 1 over dp\nprecision bf16\n")
    monkeypatch.setattr(twins, "_LARGE_WORLD", 2)
    built(tmp_path / "twin", DATA.replace("dp=2", "dp=4"))
    twin = read_build(tmp_path / "twin" / "build")
    check = read_first_check(twin)
    assert check is not None and check.build.mesh.world == 2
    with pytest.raises(RunError, match="1 process for a mesh of dp=4, which has 4 ranks"):
        first_check(twin, CPU)
    first, *others = run_ranks(_checked, 4, str(tmp_path))
    for outcomes in (first, *others):
        assert {name: outcome.ranks for name, (outcome, _) in outcomes.items()} == {"both": 4, "twin": 2}
        assert all(outcome.largest < 0.5 and loss > 1 for outcome, loss in outcomes.values())


# ---- a step at full sizes

MASKED = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x):
        return (self.layer(x)[:, None] + self.mask).softmax(-1).square().mean()
"""


def test_a_step_at_full_sizes_agrees_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(MASKED)
    (tmp_path / "plan.parc").write_text(RETURNED + "loss output\noptimizer sgd lr 0.1\n")
    build_checked(tmp_path / "plan.parc", tmp_path / "build", {})
    outcome = full_step(read_build(tmp_path / "build"), CPU)
    assert outcome.tensors == 4 and outcome.largest < 0.5  # the loss, two gradients, and the mask with its infinities
    monkeypatch.setattr(Session, "run_step", _one_entry(Session.run_step))
    with pytest.raises(RunError, match=r"the gradient layer\.\w+ on rank 0 differs by") as caught:
        full_step(read_build(tmp_path / "build"), CPU)
    assert caught.value.notes[0].startswith("line by line no result differs")


def test_bounds_of_a_step_at_full_sizes_are_those_of_its_narrow_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = read_build(built(tmp_path, "precision bf16\n"))
    assert full_step(build, CPU).largest < 0.5
    real = Session.run_step

    def scaled(self: Session, *args: Any) -> Any:
        result = real(self, *args)
        result.gradients["blocks.0.mlp.up.weight"].mul_(1.5)
        return result

    monkeypatch.setattr(Session, "run_step", scaled)
    with pytest.raises(RunError, match=r"the gradient blocks\.0\.mlp\.up\.weight on rank 0 differs by"):
        full_step(build, CPU)


# ---- the step in the programs' own types


IN_CONTEXT = ATTENTION + "sizes B=2, S=24\nmesh cp=2\ncontext blocks.* dim S over cp using ring\n"
NARROW = IN_CONTEXT + "precision bf16\n"


def simulated_step(plan: str) -> own_types.OwnStep:
    return own_step(case_of(compiled(plan, ROOT / "tests")), ())


def test_what_only_float64_computes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated_step(IN_CONTEXT).worst[0] < 0.5
    real = attention._weights

    def wrong(scores: Tensor, lse: Tensor) -> Tensor:
        weights = real(scores, lse)
        return weights if weights.dtype == torch.float64 else weights * 0.9

    monkeypatch.setattr(attention, "_weights", wrong)
    worst, name = simulated_step(IN_CONTEXT).worst
    assert worst > 10 and name.startswith("gradient")


def test_a_narrow_type_inside_a_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = simulated_step(NARROW)
    assert step.narrow == () and step.worst[0] < 0.5
    monkeypatch.setattr(attention, "_wide", lambda q: q.dtype)
    assert simulated_step(NARROW).worst[0] < 1  # errors alone do not tell
    (tmp_path / "context_models.py").write_text((ROOT / "tests" / "context_models.py").read_text())
    (tmp_path / "plan.parc").write_text(NARROW)
    with pytest.raises(Refused, match=r"a kernel computes \w+ in bfloat16"):
        build_checked(tmp_path / "plan.parc", tmp_path / "build", {})


@pytest.mark.parametrize(
    ("draws", "kept", "drawn"),
    [
        ([(0.3, True), (0.5, False)], 1, 2),
        ([(0.5, True), (1.5, False), (0.3, True)], 2, 3),
        ([(1.5, False), (0.5, False)], 1, 2),
        ([(0.9, True), (0.5, True), (0.7, True)], 1, 3),
        ([(0.5, False)], 0, 1),
    ],
)
def test_data_at_which_no_top_k_nearly_ties_are_kept(
    draws: list[tuple[float, bool]], kept: int, drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draw is the largest error beside its bound, and whether rounding may decide a top-k."""
    seeds = []

    def drawn_step(case: Any, unbatched: Any, formats: Any, trains: bool, seed: int) -> tuple[own_types.OwnStep, bool]:
        seeds.append(seed)
        worst, tied = draws[seed]
        return own_types.OwnStep(seed, {}, worst=(worst, "loss")), tied

    monkeypatch.setattr(own_types, "_own_step", drawn_step)
    assert simulated_step(IN_CONTEXT).seed == kept and len(seeds) == drawn


OVERFLOWS = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return (self.second(self.first(x) * 1e6) * 1e-6).square().mean()
"""


@pytest.mark.parametrize("line", ["precision fp16 loss_scale dynamic", "precision fp16 loss_scale 8"])
def test_numbers_that_no_loss_scale_makes_finite_are_an_error_of_the_plan(line: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OVERFLOWS)
    text = RETURNED.replace("B=16", "B=8") + f"loss output\noptimizer adamw lr 1e-3\n{line}\n"
    (tmp_path / "plan.parc").write_text(text)
    with pytest.raises(PlanError) as caught:
        build_checked(tmp_path / "plan.parc", tmp_path / "build", {})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code.name == "P0233" and diagnostic.primary is not None and diagnostic.primary.span.text == line
    assert diagnostic.message == "the loss is not finite in the programs' own types, and is in float64"


@pytest.mark.parametrize(("scale", "code"), [("", "P0016"), (" loss_scale dynamic", "")], ids=["none", "dynamic"])
def test_gradients_that_become_zero_without_a_loss_scale_are_an_error_of_the_plan(
    scale: str, code: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(OVERFLOWS.replace(" * 1e6) * 1e-6)", ").float() * 1e-3)"))
    text = RETURNED.replace("B=16", "B=8") + f"loss output\noptimizer adamw lr 1e-3\nprecision fp16{scale}\n"
    (tmp_path / "plan.parc").write_text(text)
    try:
        build_checked(tmp_path / "plan.parc", tmp_path / "build", {})
    except PlanError as error:
        (diagnostic,) = error.diagnostics
        assert (
            diagnostic.code.name == code and diagnostic.is_error and "become zero: the gradient" in diagnostic.message
        )
    else:
        assert not code


def test_gradients_of_repeated_heads_are_added_up_in_any_type() -> None:
    plan = f"""\
model     "{ROOT}/examples/llama.py:llama" (layers=1, width=32, heads=8, kv_heads=2, ffn=32, vocab=32, length=16)
input     input_ids int64 [B, S]
input     targets   int64 [B, S]
sizes     B=2, S=16
loss      cross_entropy(output.logits, targets)
optimizer adamw lr 1e-3
precision bf16
mesh      cp=2
context   model.layers.* dim S over cp using zigzag
"""
    step = simulated_step(plan)
    assert step.narrow == () and step.worst[0] < 0.5


# ---- signatures and rates


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1), st.sampled_from([1, 2]))
def test_signatures_of_pieces_add_up(rows: int, columns: int, dim: int, outer: int) -> None:
    whole = torch.randn(4 * rows, 4 * columns, generator=torch.Generator().manual_seed(rows))
    mesh = Mesh((("a", 2),))
    type_ = TensorType(torch.float32, tuple(whole.shape), Placement((("a", Split(dim, outer)),)))
    pieces = [take(whole, type_.placement, mesh, mesh.coordinates(rank)) for rank in range(2)]
    parts = [piece_signature("w", piece, type_, mesh, mesh.coordinates(rank)) for rank, piece in enumerate(pieces)]
    assert sum(parts, Signature()).apart(whole_signature("w", whole)) < 1e-9
    assert whole_signature("w", whole.flip(0)).apart(whole_signature("w", whole)) > 1e-3


def test_a_parameter_whose_entries_are_alike_is_varied() -> None:
    for start in (torch.zeros(5), torch.ones(3, 3), torch.full((1,), 2.0)):
        value = varied("w", start)
        assert not torch.equal(value, start) and float((value - start).abs().max()) < 0.2
        assert torch.equal(value, varied("w", start)) and not torch.equal(value, varied("v", start))
        assert bool((value >= 0).all()) and bool((value <= start.clamp(min=0.2)).all())
    for kept in (torch.arange(3.0), torch.full((3,), -torch.inf)):
        assert torch.equal(varied("w", kept), kept)
    assert torch.equal(varied("w", torch.ones(3, dtype=torch.int64)), torch.ones(3, dtype=torch.int64))


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]), st.integers(0, 5), st.integers(6, 12), st.integers(1, 5),
    st.floats(1e-6, 1.0), st.integers(1, 15),
)  # fmt: skip
def test_rates_are_those_of_the_formula(shape: str, warmup: int, over: int, fall: int, lr: float, step: int) -> None:
    line = {"shape": shape, "lr": lr, "warmup": warmup, "to": lr / 3, "over": over, "fall": min(fall, over - warmup)}
    assert rate(line, step) == pytest.approx(planned_rate(line, step), rel=1e-9)
    assert rate_error(line, rate) < 1e-9
    assert rate_error(line, lambda line, step: rate(line, max(step - 1, 1))) > 1e-4 or (shape, warmup < 2) == (
        "constant", True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "table", [[[2, 1.0], [4, 0.0], [9, 0.5]], [[1, 0.0], [5, 0.3], [7, 0.1], [9, 0.02]], [[3, 0.5]]]
)
def test_rates_of_a_table_are_those_of_the_formula(table: list[list[float]]) -> None:
    line = {"shape": "table", "table": table, "lr": 1.0, "warmup": 0, "over": None}
    rates = [rate(line, step) for step in range(1, 11)]
    assert [planned_rate(line, step) for step in range(1, 11)] == pytest.approx(rates, rel=1e-12)
