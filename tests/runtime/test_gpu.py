"""A GPU: its kernels, NCCL, and sessions on it beside the CPU and the plain module. They are skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parc
from parc.checking.checks import case_of
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import Placement, TensorType
from parc.runtime.backends.distributed import Distributed
from parc.runtime.compare.simulate import compare
from parc.runtime.machine.attention import Attention, AttentionBackward, AttentionCall
from parc.runtime.machine.flash import flash_for
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.machine.registry import KernelContext
from parc.runtime.ranks.processes import STORE, join_processes, leave
from tests.checked_plans import compiled
from tests.evaluated_plans import PLAN as EVALUATED
from tests.evaluated_plans import PLANS
from tests.family_plans import EXPERT_FAMILIES, MODELS, expert_plan_text, plan_text
from tests.runtime.conformance import WRONG, program
from tests.runtime.test_compiled import LLAMA, ODD, ODD_PLAN, SPLIT
from tests.runtime.tiny import ONE, PLAN, batch, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parent.parent.parent


def masks(rows: int) -> dict[str, torch.Tensor]:
    """Return masks of scores. The second query of `hidden` sees no key. Those of numbers are float32, also for narrow
    queries, and `slopes` are numbers that bfloat16 would round away."""
    seen = torch.rand(2, 1, rows, rows) < 0.7
    seen[..., 0] = True
    hidden = seen.clone()
    hidden[:, :, 1] = False
    slopes = torch.tensor([1.0, 0.25, 0.06, 0.01])[None, :, None, None] * (torch.arange(float(rows)) + 30)
    numbers = torch.randn(1, 1, rows, rows)
    return {"bools": seen, "numbers": numbers, "hidden": hidden, "row": seen[:, :, :1], "slopes": slopes}


class _Traced(KernelContext):
    """A context on which kernels are chosen as for a compiler."""

    @property
    def traced(self) -> bool:
        return True


@pytest.mark.parametrize("context", [KernelContext, _Traced])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "causal", "bools", "numbers", "hidden", "row", "slopes"])
@pytest.mark.parametrize(("rows", "heads", "size"), [(48, 4, 64), (37, 2, 16), (40, 1, 12)])
def test_attention_is_that_of_wide_numbers_on_a_cpu(
    rows: int, heads: int, size: int, kind: str, dtype: torch.dtype, context: type[KernelContext]
) -> None:
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 4, rows, size) for _ in range(2))
    k, v = (torch.randn(2, heads, rows, size).mT.contiguous().mT for _ in range(2))
    mask = masks(rows).get(kind)

    def run(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [x.to(device, dtype) for x in (grad, q, k, v)]
        bias = mask if mask is None else mask.to(device)
        types = [TensorType(dtype, tuple(x.shape), Placement(())) for x in given]
        arguments = (bias, None)
        out, lse = KERNELS["parc.attention.default"](
            context(Mesh(), {}, types[1:], [], device), *given[1:], *arguments, kind == "causal", None, 0.0
        )
        gradients = KERNELS["parc.attention_backward.default"](
            context(Mesh(), {}, types, [], device), *given, *arguments, out, lse, kind == "causal", None, 0.0
        )
        return [x.double().cpu() for x in (out, lse, *gradients)]

    found, expected = run(GPU, dtype), run(torch.device("cpu"), torch.float64)
    for one, other in zip(found, expected, strict=True):
        error = float((one - other).norm() / other.norm())
        assert error < (2e-5 if dtype == torch.float32 else 2e-2), error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_keys_are_joined_as_on_a_cpu(dtype: torch.dtype, causal: bool) -> None:
    """A rank of a zigzag has the first and the last queries, and meets keys of other places one after the other."""
    torch.manual_seed(0)
    q, grad = (torch.randn(1, 4, 32, 16) for _ in range(2))
    k, v = (torch.randn(1, 2, 64, 16) for _ in range(2))
    rows, blocks = [(0, 16), (48, 16)], [[(0, 16), (48, 16)], [(16, 32)]]

    def run(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        grad_, q_, k_, v_ = (x.to(device, dtype) for x in (grad, q, k, v))
        types = [TensorType(dtype, tuple(x.shape), Placement(())) for x in (grad_, q_, k_)]
        call = AttentionCall(
            KernelContext(Mesh(), {}, types, [], device), types[1], types[2], None, None, causal, 0.25, 0.0
        )
        made = Attention(call, q_, rows)
        parts = [[torch.cat([x[:, :, at : at + many] for at, many in block], 2) for x in (k_, v_)] for block in blocks]
        for block, (keys, values) in zip(blocks, parts, strict=True):
            made.add(keys, values, block)
        out, lse = made.result()
        back = AttentionBackward(call, (grad_, q_, out, lse), rows)
        gradients = [back.add(keys, values, block) for block, (keys, values) in zip(blocks, parts, strict=True)]
        return [x.double().cpu() for x in (out, lse, back.result(), *gradients[0], *gradients[1])]

    for one, other in zip(run(GPU, dtype), run(torch.device("cpu"), torch.float64), strict=True):
        assert float((one - other).norm() / other.norm()) < (2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_ranks_get_equal_bits(dtype: torch.dtype) -> None:
    """Ranks along an axis that splits nothing compute attention's gradient alike, and nothing makes it equal later."""
    grad, q, k, v = (torch.randn(1, 4, 4096, 64, dtype=dtype, device=GPU) for _ in range(4))
    flash = flash_for(q, k, v, None, True, False)
    assert flash is not None
    out, lse = flash.forward(q, k, v, None, True, 0.125)
    first, *more = (flash.in_order(grad, out, lse, q, k, v, None, True, 0.125) for _ in range(4))
    assert all(torch.equal(a, b) for made in more for a, b in zip(first, made, strict=True))
    torch.testing.assert_close(first, flash.backward(grad, out, lse, q, k, v, None, True, 0.125), rtol=0.05, atol=0.05)


def test_torch_has_kernels_without_scores_for_the_usual_heads() -> None:
    narrow = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device=GPU)
    wide = narrow.float()
    made = [
        flash_for(x, x, x, mask, False, traced)
        for x in (narrow, wide) for mask in (None, torch.ones(8, 8, device=GPU)) for traced in (False, True)
    ]  # fmt: skip
    assert None not in made
    double = wide.double()
    assert flash_for(double, double, double, None, False, False) is None
    # so no scores are kept: those of a sequence of 32,768 would take 32 GiB
    q = torch.randn(1, 8, 1 << 15, 64, dtype=torch.bfloat16, device=GPU)
    type_ = TensorType(q.dtype, tuple(q.shape), Placement(()))
    context = KernelContext(Mesh(), {}, [type_] * 3, [], GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    KERNELS["parc.attention.default"](context, q, q, q, None, None, True, None, 0.0)
    assert torch.cuda.max_memory_allocated() - before < 1 << 28


@pytest.fixture
def nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process alone over NCCL."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", STORE: str(tmp_path / "store")}.items():
        monkeypatch.setenv(name, value)
    assert join_processes(GPU) == GPU and dist.get_backend() == "nccl"
    yield
    leave()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("name", WRONG)
def test_nccl_gives_the_plain_results(name: str) -> None:
    mesh = Mesh((("dp", 1),))
    backend = Distributed(mesh, [program(mesh)], 0, GPU)
    assert not (wrong := [*filter(None, WRONG[name](backend, mesh, GPU))]), wrong[:5]


def trained(session: Any, steps: int = 3) -> list[tuple[float, float]]:
    reports = [session.step(batch(step)) for step in range(steps)]
    return [(report.loss, report.grad_norm) for report in reports]


def hold(found: list[tuple[float, float]], expected: list[tuple[float, float]], rtol: float = 2e-5) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=1e-6)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(
    "lines", [ONE, "precision bf16\n", "precision fp16 loss_scale dynamic\n", "recompute blocks.*\n"]
)
def test_a_session_trains_as_on_the_cpu_and_as_the_plain_module(tmp_path: Path, lines: str) -> None:
    """Dropout draws the same numbers; a checkpoint goes from one device to the other."""
    made = build(tmp_path, lines, PLAN)
    rtol = 2e-2 if "precision" in lines else 2e-5
    session, plain = parc.load(made, GPU), parc.reference(made, GPU)
    assert {value.device for value in session.state.parameters.values()} == {GPU}
    cpu = trained(parc.load(made, "cpu"))
    found = trained(session)
    hold(found, cpu, rtol)
    hold(found, trained(plain), rtol)
    session.save(tmp_path / "saved")
    further = [session.step(batch(step)).loss for step in (3, 4)]
    for device in (torch.device("cpu"), GPU):
        again = parc.load(made, device)
        again.restore(tmp_path / "saved")
        losses = [again.step(batch(step)).loss for step in (3, 4)]
        torch.testing.assert_close(losses, further, rtol=rtol if device != GPU else 1e-6, atol=0)


def test_state_in_files_and_in_memory_is_trained_as_on_the_gpu(tmp_path: Path) -> None:
    words = 'optimizer, parameters, activations to "kept"', "optimizer, parameters, activations to cpu"
    made = {where: build(tmp_path / str(at), f"offload {where}\n", PLAN) for at, where in enumerate(words)}
    expected = trained(parc.load(build(tmp_path / "plain", ONE, PLAN), GPU))
    for where, path in made.items():
        with parc.load(path, GPU) as session:
            hold(trained(session), expected)
            assert {value.device.type for value in session.state.parameters.values()} == {"cpu"}, where


@pytest.mark.parametrize("name", ["gpt", "llama", "odd"])
def test_compiled_regions_compute_what_lines_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "odd.py").write_text(ODD)
    made = build(tmp_path, ONE, {"gpt": PLAN, "llama": LLAMA, "odd": ODD_PLAN}[name])

    def losses(compile: bool) -> list[tuple[float, float]]:
        session = parc.load(made, GPU, compile=compile)
        given = [batch(step) for step in range(3)]
        if name == "llama":
            given = [{"input_ids": each["tokens"], "targets": each["targets"]} for each in given]
        return [(report.loss, report.grad_norm) for report in map(session.step, given)]

    hold(losses(True), losses(False), 1e-4)


def test_a_command_trains_over_nccl(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from parc.cli import main
    from tests.runtime.forked import forked_ranks

    made = build(tmp_path, ONE, PLAN)
    with forked_ranks():
        assert main(["run", str(made), "--device", "cuda", "--steps", "3", "--compile"]) == 0, capfd.readouterr().err
    assert main(["verify", str(made), "--device", "cuda"]) == 0, capfd.readouterr().err


def test_weights_begin_with_the_bits_that_they_have_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    for name, plan in {"gpt": PLAN, "llama": LLAMA, "odd": ODD_PLAN}.items():
        made = build(tmp_path, ONE, plan, name=name)
        one, other = (parc.load(made, device).state.parameters for device in ("cpu", GPU))
        assert all(torch.equal(other[key].cpu(), value) for key, value in one.items()), name


FAMILIES = {name: (plan_text(name), {"dp": 2, "tp": 2}) for name in MODELS}
EXPERTS = {name: (expert_plan_text(name), {"dp": 2, "tp": 1, "ep": 2, "zero": 3}) for name in EXPERT_FAMILIES}
PIPELINES = {f"{name}, pp": (expert_plan_text(name), {"pp": 2, "tp": 2}) for name in ("Mixtral", "DeepseekV3")}
ALL: dict[str, tuple[str, dict[str, int]]] = {
    **FAMILIES, **EXPERTS, **PIPELINES, **{name: (EVALUATED + plan, {}) for name, plan in PLANS.items()}
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_all_ranks_together_compute_on_a_gpu_what_the_captured_graph_does(name: str) -> None:
    text, sizes = ALL[name]
    agreement = compare(replace(case_of(compiled(text, ROOT, **sizes)), device=GPU), 2)
    assert agreement.largest <= 1e-10, agreement


def test_an_odd_model_padded_over_ranks_computes_on_a_gpu_what_the_captured_graph_does(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    agreement = compare(replace(case_of(compiled(ODD_PLAN + SPLIT, tmp_path)), device=GPU), 2)
    assert agreement.largest <= 1e-10, agreement
