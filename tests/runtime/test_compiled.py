"""Regions compiled by Inductor: the losses of line by line, the same dropout, each region once, and clear refusals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import config

import parc
from parc.cli import main
from parc.compiler import counter
from parc.compiler.artifact import Build
from parc.compiler.padded_tensors import grow
from parc.compiler.padding import pads_from
from parc.compiler.placement import parse_type, take
from parc.compiler.roles import SINGLE
from parc.compiler.torch_private import compile_graph, fake_mode
from parc.grammar.codes_build import NO_COMPILER
from parc.runtime.backends.in_process import InProcess
from parc.runtime.compiled import Regions, check_compiler
from parc.runtime.execute import Machine
from parc.runtime.faults import RunError
from parc.runtime.feed import Feed
from parc.runtime.opening import mesh_of, open_build
from parc.runtime.step import RankState, Stepper
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import DATA, ONE, PLAN, TENSOR, batch, build

CPU = torch.device("cpu")
STEPS = 10
BOTH = f"{DATA.replace('dp=2', 'dp=2, tp=2')}{TENSOR.replace('mesh      tp=2', '')}"
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24,
        vocab_size=256, max_position_embeddings=8, attention_dropout=0.2, use_cache=False, tie_word_embeddings=False,
    ))
"""
LLAMA_PLAN = (
    PLAN.replace("tokens", "input_ids")
    .replace("(output, targets)", "(output.logits, targets)")
    .replace("./gpt.py:GPT", "./llama.py:model")
    .replace("(layers=2, width=16, heads=2, vocab=256, length=8, dropout=0.1)", "()")
)


ODD = """
import torch
from torch import nn


class Odd(nn.Module):
    \"\"\"Vocabulary and hidden dim are odd, and the softmax sees the hidden dim whole.\"\"\"

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)
        self.up, self.down = nn.Linear(16, 9), nn.Linear(9, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(torch.softmax(self.up(x), -1)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an Inductor cache of its own."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def gpt(folder: Path) -> Path:
    """The build of a GPT with dropout over dp=2, tp=2."""
    return build(folder, BOTH, name="gpt")


def train(made: Build, machine: Callable[..., Machine]) -> list[list[float]]:
    """The losses and norms of all ranks in this process over ``STEPS`` steps of plain descent."""
    mesh = mesh_of(made)
    module = parc.reference(made.path).module
    pads = pads_from(made.manifest["padding"])
    named = {**module.state_dict(), **dict(module.named_buffers())}
    state = {name: grow(value, pads.get(name, ())) for name, value in named.items()}
    types = {name: parse_type(text, mesh) for name, text in made.manifest["parameters"].items()}
    constants = {value.role.split(" ", 1)[1]: value.type for value in made.programs["F"].main.parameters
                 if value.role.startswith(("buffer ", "constant "))}  # fmt: skip
    places = [mesh.coordinates(rank) for rank in range(mesh.world)]
    states = [
        RankState(*({n: take(state[n].clone(), t.placement, mesh, at) for n, t in table.items()}
                    for table in (types, constants)))
        for at in places
    ]  # fmt: skip
    feeds = [Feed(made, mesh, at, CPU) for at in places]
    stepper = Stepper(made.programs, made.roles[SINGLE].actions, InProcess(mesh), CPU, machine)
    rows = []
    for step in range(STEPS):
        given = dict(zip((line["name"] for line in made.manifest["inputs"]), batch(step).values(), strict=True))
        results = stepper.gradients(states, [feed.cut(given) for feed in feeds], step)
        for state_, result in zip(states, results, strict=True):
            for name, gradient in result.gradients.items():
                state_.parameters[name] -= 0.5 * gradient
        rows.append([float(number) for r in results for number in (r.loss, r.grad_norm) if number is not None])
    return rows


def hold(compiled: list[list[float]], plain: list[list[float]]) -> None:
    """Numbers are equal within what float32 leaves open."""
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=2e-5, atol=1e-6)


def test_a_gpt_with_dropout_on_real_ranks_of_which_one_compiles_each_region(folder: Path, gpt: Path) -> None:
    plain = parc.reference(gpt)
    expected = [[report.loss, report.grad_norm] for report in (plain.step(batch(step)) for step in range(STEPS))]
    for rows, fault, distinct in run_ranks(session, 4, str(gpt), str(folder / "cache"), wait_s=240):
        hold(rows, expected)
        assert (
            "[P0302] step 12: " in fault and "  the first is NaN made in `blocks." in fault and " at gpt.py:" in fault
        )
        assert 10 < sum(1 for _ in (folder / "cache" / "fxgraph").glob("*/*")) <= distinct


def session(path: str, cache: str) -> tuple[list[list[float]], str, int]:
    """On one rank: the losses and norms of a session, what is said of a step whose numbers are not finite, and the
    number of regions."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with parc.load(path, compile=True) as session:
        assert session.regions is not None
        rows = [[report.loss, report.grad_norm] for report in (session.step(batch(step)) for step in range(STEPS))]
        session.step(batch(0), lr=1e30)
        with pytest.raises(RunError) as caught:
            session.step(batch(1))
    return rows, str(caught.value), session.regions.distinct


def test_a_llama_with_attention_dropout_on_all_ranks_of_one_process(folder: Path) -> None:
    (folder / "llama.py").write_text(LLAMA)
    made = open_build(build(folder, DATA.replace("tokens", "input_ids"), LLAMA_PLAN, name="llama"))
    hold(train(made, Regions(CPU).machine), train(made, Machine))


def test_padded_parameters_on_all_ranks_of_one_process(folder: Path) -> None:
    (folder / "odd.py").write_text(ODD)
    plan = PLAN.replace("./gpt.py:GPT", "./odd.py:Odd").replace("vocab=256", "vocab=257")
    plan = plan.replace("(layers=2, width=16, heads=2, vocab=257, length=8, dropout=0.1)", "()")
    lines = "mesh tp=2\nvocab embed, head over tp pad\ncolumn up over tp pad\nrow down over tp pad\n"
    made = open_build(build(folder, lines, plan, name="odd"))
    used = {line.op for program in made.programs.values() for function in program.functions for line in function.lines}
    assert {"parc.fill_pad.default", "parc.cut_pad.default", "parc.grow_pad.default"} <= used
    hold(train(made, Regions(CPU).machine), train(made, Machine))


def test_more_layers_are_no_more_regions(folder: Path, gpt: Path) -> None:
    def distinct(made: Build) -> int:
        regions = Regions(CPU)
        Stepper(made.programs, made.roles[SINGLE].actions, InProcess(mesh_of(made)), CPU, regions.machine)
        return regions.distinct

    deep = build(folder, BOTH, PLAN.replace("layers=2", "layers=4"), name="deep")
    assert distinct(open_build(deep)) == distinct(open_build(gpt))


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


def test_a_machine_without_a_compiler_is_told_so(gpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert main(["run", str(gpt), "--compile", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[:2] == [
        "error[P0305]: --compile needs a C++ compiler (`no-such-compiler`), which is not here",
        "help: install g++, or set CXX to a C++ compiler; or run without it",
    ]
    with pytest.raises(RunError, match="needs Triton, with support of `cuda`") as caught:
        check_compiler(torch.device("cuda"))
    assert caught.value.code is NO_COMPILER


def test_a_compiler_that_fails_is_quoted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\ncase "$1" in -*) exec g++ "$@";; esac\necho "x.cpp:1: error: no Python.h" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    one = build(folder, ONE, name="one")
    with config.patch({"cpp.cxx": (None, str(broken))}):
        assert main(["run", str(one), "--compile", "--device", "cpu", "--steps", "1"]) == 1
    err = capsys.readouterr().err
    assert "error[P0306]: the lines from gpt.py:84 on cannot be compiled" in err
    assert "error: no Python.h" in err and "run without --compile" in err and "Traceback" not in err
