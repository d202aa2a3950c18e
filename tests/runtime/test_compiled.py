"""Regions compiled by Inductor: the losses of a run line by line, the same dropout, each region once, clear
refusals."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import parc
from parc.checking.checks import case_of
from parc.compiler.analysis import products as facts
from parc.compiler.build.build import Build
from parc.compiler.initial import counter
from parc.compiler.program.binding import LOSS
from parc.compiler.program.roles import SINGLE
from parc.compiler.program.text import parse_program
from parc.compiler.torch_private import compile_graph, fake_mode, onednn_linear, quiet
from parc.compiling.compiled import Compiled
from parc.grammar.codes import NO_COMPILER
from parc.runtime.backends.in_process import InProcess
from parc.runtime.compare.simulate import Simulation
from parc.runtime.machine import products
from parc.runtime.machine.compiled import CompiledRegion, Regions, check_compiler
from parc.runtime.machine.execute import Machine
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.opening import build_mesh
from parc.runtime.step import Stepper
from tests.checked_plans import compiled
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, ONE, PLAN, TENSOR, batch, build, without_onednn

CPU = torch.device("cpu")
STEPS = 10
LLAMA = (
    PLAN.replace("tokens", "input_ids")
    .replace("(output, targets)", "(output.logits, targets)")
    .replace("./gpt.py:GPT", "tests.family_models:decoder")
    .replace("layers=2, width=16, heads=2, vocab=256, length=8, dropout=0.1",
             'name="llama", kv_heads=1, heads=2, vocab_size=256, attention_dropout=0.2')
)  # fmt: skip


ODD = """
import torch
from torch import nn


class Odd(nn.Module):
    \"\"\"Vocabulary and hidden dim are odd, and the softmax sees the hidden dim whole. Few regions, seconds each.\"\"\"

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)
        self.up, self.down, self.drop = nn.Linear(16, 9), nn.Linear(9, 16), nn.Dropout(0.1)

    def forward(self, tokens):
        x = self.embed(tokens)
        one = x[:, None]
        x = x + nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True)[:, 0]
        return self.head(x + self.down(torch.softmax(self.drop(self.up(x)), -1)))
"""
NET = """
from torch import nn


def net():
    return nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))
"""
ODD_PLAN = re.sub("model .*", 'model "./odd.py:Odd" ()', PLAN)
SPLIT = """
mesh tp=2
vocab embed, head over tp pad
column up over tp pad
row down over tp pad
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an Inductor cache of its own."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def odd(folder: Path) -> Path:
    """The build of a model with dropout and odd dims over tp=2."""
    (folder / "odd.py").write_text(ODD)
    return build(folder, SPLIT, ODD_PLAN, name="odd")


def train(compilation: Compiled, machine: Callable[..., Machine]) -> list[list[float]]:
    """Return the losses and norms of all ranks in this process over ``STEPS`` steps of plain descent."""
    simulation = Simulation(case_of(compilation), float64=False, machine=machine)
    rows = []
    for step in range(STEPS):
        halves = zip(*(value.chunk(2) for value in batch(step).values()), strict=True)
        parts = [dict(zip((line.name for line in compilation.plan.inputs), half, strict=True)) for half in halves]
        results = simulation.run(Stepper.gradients, parts, step)
        for state, result in zip(simulation.states, results, strict=True):
            assert (
                max(len(m.addable) for m in simulation.steppers[0].machines.values()) >= 3
            )  # of a linear layer, all but biases
            for name, gradient in result.gradients.items():
                state.parameters[name] -= 0.5 * gradient
        rows.append([float(number) for r in results for number in (r.loss, r.grad_norm) if number is not None])
    return rows


def hold(found: list[list[float]], plain: list[list[float]]) -> None:
    """Check that numbers are equal within float32's precision."""
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=2e-5, atol=1e-6)


def test_padded_parameters_and_dropout_on_real_ranks_of_which_one_compiles_each_region(folder: Path, odd: Path) -> None:
    plain = parc.reference(odd)
    expected = [[report.loss, report.grad_norm] for report in (plain.step(batch(step)) for step in range(STEPS))]
    for rows, fault, distinct in run_ranks(session, 2, str(odd), str(folder / "cache"), wait_s=240, before=inductor):
        hold(rows, expected)
        assert "[P0302] step 12: " in fault and "  the first is NaN, computed in " in fault and " at odd.py:" in fault
        assert 5 < sum(1 for _ in (folder / "cache" / "fxgraph").glob("*/*")) <= distinct


def inductor() -> None:
    """Import the compiler, which takes a second."""
    with quiet():
        importlib.import_module("torch._inductor.compile_fx")


def session(path: str, cache: str) -> tuple[list[list[float]], str, int]:
    """Return from one rank: the losses and norms of a session, the message of a step whose numbers are not finite, and
    the number of regions."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with parc.load(path, compile=True) as session:
        assert session.regions is not None
        rows = [[report.loss, report.grad_norm] for report in (session.step(batch(step)) for step in range(STEPS))]
        session.step(batch(0), lr=1e30)
        with pytest.raises(RunError) as caught:
            session.step(batch(1))
    return rows, str(caught.value), session.regions.distinct


@pytest.mark.wide
def test_a_llama_with_attention_dropout_on_all_ranks_of_one_process(folder: Path) -> None:
    compilation = compiled(LLAMA + DATA.replace("tokens", "input_ids"), folder)
    hold(train(compilation, Regions(CPU).machine), train(compilation, Machine))


def test_padded_parameters_on_all_ranks_of_one_process(folder: Path, odd: Path) -> None:
    """The ranks of the test before have compiled most regions."""
    compilation = compiled(ODD_PLAN + SPLIT, folder)
    used = {
        line.op
        for program in compilation.build.programs.values()
        for function in program.functions
        for line in function.lines
    }
    assert {"parc.fill_pad.default", "parc.cut_pad.default", "parc.grow_pad.default"} <= used
    hold(train(compilation, Regions(CPU).machine), train(compilation, Machine))


def test_more_layers_are_no_more_regions() -> None:
    def distinct(build: Build) -> int:
        regions = Regions(CPU)
        Stepper(build.programs, build.roles[SINGLE].actions, InProcess(build_mesh(build)), CPU, regions.machine)
        return regions.distinct

    deep, gpt = (compiled(PLAN.replace("layers=2", f"layers={layers}") + TENSOR).build for layers in (3, 2))
    assert distinct(deep) == distinct(gpt)


def test_lines_that_differ_in_a_keyword_are_two_regions() -> None:
    """A region is compiled once for all that are equal, and types do not tell by which formula gelu is computed."""

    def distinct(*ways: str) -> int:
        lines = "".join(
            f"    g{at} = aten.gelu.default(s{at}{way})  # f32[4] | - -\n"
            f"    s{at + 1} = parc.all_reduce(g{at}, 'dp')  # f32[4] | - -\n"
            for at, way in enumerate(ways)
        )
        head = '"""parc program: role stage0, action F"""\n\nmesh(dp=2)\n\n\ndef forward(\n'
        head += '    s0: "f32[4]",  # input x\n):\n'
        program = parse_program(f'{head}{lines}    return {{\n        "loss": s{len(ways)},\n    }}\n')
        regions = Regions(CPU)
        regions.machine(program, InProcess(program.mesh), CPU)
        return regions.distinct

    assert distinct("", "") == 1 and distinct("", ", approximate='tanh'") == 2


def test_a_region_is_compiled_for_each_way_in_which_its_values_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"""parc program: role stage0, action F"""\n\nmesh()\n\n\ndef forward(\n    x: "f32[3, 4]",  # input x\n):\n'
    text += '    y = aten.tanh.default(x)  # f32[3, 4] | - -\n    return {\n        "loss": y,\n    }\n'
    seen = list[tuple[int, ...]]()

    def line_by_line(values: Sequence[torch.Tensor], *_: object) -> CompiledRegion:
        seen.extend(value.stride() for value in values)
        return CompiledRegion(None, (), ())

    monkeypatch.setattr("parc.runtime.machine.compiled._compile", line_by_line)
    program = parse_program(text)
    machine = Regions(CPU).machine(program, InProcess(program.mesh), CPU)
    for x in (torch.rand(3, 4), torch.rand(4, 3).t(), torch.rand(3, 4)):
        (results,) = machine.run([{"x": x}])
        assert torch.equal(results[LOSS], x.tanh())
    assert seen == [(4, 1), (1, 3)]


def test_compiled_dropout_keeps_the_same_bits(folder: Path) -> None:
    index = torch.arange(10**12, 10**12 + 1003)
    mode = fake_mode()

    def kept(words: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(counter.keep_mask((words[0], words[1]), index, p) for p in (0.1, 0.5, 0.9))

    call = compile_graph(kept, [mode.from_tensor(torch.zeros(2, dtype=torch.int64)), mode.from_tensor(index)])
    assert call is not None
    for key in (0, 1, 123456789, 2**62 + 12345, 2**63 - 1):
        found = call([torch.tensor(counter.words(key)), index])
        for p, mask in zip((0.1, 0.5, 0.9), found, strict=True):
            assert torch.equal(mask, counter.keep_mask(key, index, p))


@pytest.mark.skipif(onednn_linear() is None, reason="this torch has no oneDNN")
def test_a_compiled_step_by_onednn_is_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is one operator to Inductor."""
    (folder / "net.py").write_text(NET)
    plan = re.sub("model .*", 'model "./net.py:net"', PLAN).replace("microbatches 2", "microbatches 1")
    plan = plan.replace("tokens ", "tokens as input ")
    calls: list[int] = []
    opaque = products._opaque

    def counted(*operands: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return opaque(*operands)

    monkeypatch.setattr(products, "_is_faster", lambda threads: True)
    monkeypatch.setattr(facts, "LARGE_PRODUCT", 1)
    monkeypatch.setattr(products, "_opaque", counted)
    path = build(folder, ONE, plan, name="mlp")
    cpu = torch.device("cpu")
    with without_onednn(), parc.load(path, cpu) as plain:
        expected = plain.step(batch(0))
    assert not calls
    with parc.load(path, cpu, compile=True) as session:
        found = session.step(batch(0))
    assert calls
    hold([[found.loss, found.grad_norm]], [[expected.loss, expected.grad_norm]])


def test_a_gpu_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(RunError, match="needs Triton, with support of `cuda`") as caught:
        check_compiler(torch.device("cuda"))
    assert caught.value.code is NO_COMPILER
