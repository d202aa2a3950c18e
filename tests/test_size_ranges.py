"""Ranges of sizes: one build serves them all, with the unsharded model's numbers at each size, and refuses all
others."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import parc
from parc.checking.checks import Checked, case_of, check_files, check_numbers, prove
from parc.checking.eager import compare_with_eager
from parc.checking.reports import report_of
from parc.checking.verification import verify_build
from parc.cli import main
from parc.compiler.build.build import Build, BuildError
from parc.compiler.build.directory import read_build, write_build
from parc.compiler.layout.mesh import Mesh
from parc.compiler.program.text import parse_program
from parc.compiler.sizes.polynomials import check_points, sample_points
from parc.compiler.verify.ranges import binding_faults, size_faults
from parc.compiling.compiled import Compiled, programs_of
from parc.compiling.driver import compile_plan
from parc.compiling.size_ranges import fixed
from parc.grammar.codes import BAD_DATA, OUT_OF_RANGE
from parc.runtime.compare.agreement import TOLERANCE
from parc.runtime.compare.simulate import compare
from parc.runtime.data.feed import Feed
from parc.runtime.data.sizes import bound_build
from parc.runtime.ranks.faults import RunError
from tests.checked_plans import compiled
from tests.planted_sizes import hidden_shifts, hidden_sizes
from tests.ranged_models import TASK, positions
from tests.runtime.forked import forked_ranks
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES, PLAN, TENSOR

ROOT = Path(__file__).parent.parent
RANGES = "sizes     B=4..16 by 4, S=4..32 by 4"
GPT = PLAN.replace("length=8", "length=32").replace("layers=2", "layers=1").replace("sizes     B=8, S=8", RANGES)


def compiled_of(text: str) -> Compiled:
    return compiled(text, ROOT)


def hold(compiled: Compiled, sizes: Mapping[str, int]) -> None:
    """Check that at these sizes all ranks have the captured graph's numbers, and the graph has the eager module's."""
    at = compiled.at(sizes)
    case = case_of(at)
    assert compare_with_eager(at, case).holds
    assert compare(case, 1).largest < TOLERANCE


def expressions(compiled: Compiled) -> set[str]:
    assert compiled.template is not None
    return {words for text in compiled.template.texts.values() for words in re.findall(r"\{([^{}\s]+)\}", text)}


# ---- what is made


@pytest.fixture(scope="module")
def two_sizes(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The tiny GPT over tp=2 with ranges of both sizes; its tables are just as long as the largest."""
    folder = tmp_path_factory.mktemp("ranged")
    shutil.copy(EXAMPLES / "gpt.py", folder)
    return compiled(GPT + TENSOR, folder)


FOLLOWING = positions("rate prefix moved statistics", "S=4..28 by 4, B=8")
"""A model whose programs follow a size in all ways; derivatives of statistics have numbers that no line of the model
has."""


def test_programs_follow_the_sizes() -> None:
    compiled = compiled_of(FOLLOWING)
    found = {"S", "8*S", "S+3", "S+4", "S+5", "S+6", "S/2+2", "1.0/(3*S/2)", "1.0/(S/2+3/2)", "1.0/(4*S+16)"}
    assert expressions(compiled) == found
    assert prove(compiled) == []
    hold(compiled, {"S": 12})


def test_programs_follow_both_sizes(two_sizes: Compiled) -> None:
    """Another test proves this build, and has its numbers at several sizes."""
    template = two_sizes.template
    assert template is not None
    assert expressions(two_sizes) == {"B/2", "S", "B*S/2"}
    sizes = {"B": 8, "S": 16}
    assert sizes not in list(sample_points(template.ranges))
    assert template.at(sizes) == programs_of(compile_plan(fixed(two_sizes.plan, sizes), two_sizes.folder))


@pytest.mark.parametrize("least", [(2, 0), (40, 4)], ids=["both sizes", "one size"])
def test_a_number_that_is_right_wherever_it_is_looked_at_is_refused(
    two_sizes: Compiled, least: tuple[int, int]
) -> None:
    compiled = compiled_of(FOLLOWING) if least[1] else two_sizes
    template = compiled.template
    assert template is not None
    mutants = list(hidden_sizes(template, numbers=True))
    assert all(
        mutant.at(point) == template.at(point) for _, mutant in mutants for point in check_points(template.ranges)
    )
    shifts = list(hidden_shifts(template))
    assert len(mutants) >= least[0] and len(shifts) >= least[1]
    operands = {what.rpartition(" = ")[2]: (what, mutant) for what, mutant in mutants}
    kinds = {(row.partition("(")[0], row.count(",")): each for row, each in operands.items()}
    for what, mutant in (*kinds.values(), *shifts):  # one of every operand of an operator
        assert size_faults(mutant, compiled.mesh), what
    assert not size_faults(template, compiled.mesh)
    programs = {file: parse_program(text, file) for file, text in template.at({"B": 8, "S": 12}).items()}
    assert not list(binding_faults(programs))
    other = parse_program(template.at({"B": 8, "S": 16})["programs/stage0.COUNT.py"])
    (fault,) = binding_faults({**programs, "programs/stage0.COUNT.py": other})
    assert fault.message == "`input targets` has other sizes where it is made"


def test_a_llama_serves_a_range() -> None:
    head = 'model "tests.family_models:decoder" (name="llama", num_hidden_layers=1)\n'
    head += 'include "parc:llama" (tp=2)\nschedule microbatches 2\n'
    task = TASK.replace("tokens", "input_ids").replace("output,", "output.logits,").partition("column")[0]
    compiled = compiled_of(f"{head}sizes B=8, S=8..16 by 8{task}")
    assert prove(compiled) == []
    hold(compiled, {"S": 8})


def pictures(sizes: str, lines: str = "mesh dp=2\n") -> str:
    """Return a plan of ``Pictures``, whose batch is split over dp."""
    return (
        'model "tests.ranged_models:Pictures"\ninput pictures float32 [B, 3, H, W]\ninput kinds int64 [B]\n'
        f"sizes {sizes}\nloss cross_entropy(output, kinds)\noptimizer sgd lr 0.1\n{lines}"
        "shard pictures [B/dp, ...]\nshard kinds [B/dp]\n"
    )


def test_pictures_of_many_heights_and_widths() -> None:
    """The sizes are no multiples of each other, and the mean is over their product."""
    compiled = compiled_of(pictures("B=4, H=8..16 by 4, W=8..10 by 2"))
    assert {"H-2", "H/2-1", "W/2-1", "4*H*W-8*H-8*W+16"} <= expressions(compiled)
    assert prove(compiled) == []
    hold(compiled, {"H": 12, "W": 8})


def test_batches_as_large_as_a_layer_has_channels() -> None:
    """At B=4 the size that dp splits cannot be told from the one that tp splits."""
    lines = "mesh dp=2, tp=2\ncolumn first over tp\nrow second over tp\n"
    compiled = compiled_of(pictures("B=2..4 by 2, H=8, W=8", lines))
    assert "B" in expressions(compiled)
    assert prove(compiled) == []


def test_fixed_sizes_make_no_template() -> None:
    compiled = compiled_of(positions(sizes="B=8, S=8"))
    assert compiled.template is None and compiled.cases() == [compiled]
    assert "ranges" not in compiled.build.manifest


def test_numbers_of_a_large_build_are_tested_at_several_sizes_of_its_twin() -> None:
    text = positions(sizes="B=64..128 by 64, S=16").replace("dp=2", "dp=8") + "verify S=8\n"
    checked = Checked({}, [])
    check_numbers(compiled_of(text), checked, uncertified=True)
    assert not checked.faults
    on = checked.report["numbers"]["on"]
    assert re.fullmatch(r"the twin: B=\d+\.\.\d+ by \d+, S=8, mesh dp=2, tp=2, at .*; .*", on)


# ---- builds, sessions and commands


@pytest.fixture(scope="module")
def gpt(two_sizes: Compiled) -> Path:
    """The build of ``two_sizes``, beside its model."""
    path = two_sizes.folder / "build"
    write_build(two_sizes.to_write(report_of(two_sizes)), path)
    return path


def batch(sizes: Mapping[str, int], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 256, (2, sizes["B"], sizes["S"]), generator=generator)
    targets[: 1 + seed % 3, 2:] = -100
    return {"tokens": tokens, "targets": targets}


SIZES = ({"B": 16, "S": 32}, {"B": 4, "S": 8}, {"B": 12, "S": 20}, {"B": 16, "S": 32})


def steps(path: str) -> tuple[list[parc.StepReport], str]:
    """Return from one rank: a step at each of several sizes, some with samples of the rank's own; and the messages
    where ranks differ."""
    with parc.load(path) as session:
        with pytest.raises(parc.RunError) as error:
            session.step(local=batch(SIZES[1 + session.rank]))
        given = [batch(sizes, seed) for seed, sizes in enumerate(SIZES)]
        reports = [session.step(local=one) if seed % 2 else session.step(one) for seed, one in enumerate(given)]
        return reports, str(error.value)


def test_real_ranks_train_at_several_sizes_as_the_plain_module(gpt: Path) -> None:
    plain = parc.reference(gpt)
    expected = [plain.step(batch(sizes, seed)) for seed, sizes in enumerate(SIZES)]
    for reports, said in run_ranks(steps, 2, str(gpt)):
        assert said.startswith("[P0410] the batch of rank 0 has B=4, S=8 and the batch of rank 1 has B=12, S=20; ")
        for found, wanted in zip(reports, expected, strict=True):
            assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def test_a_build_proves_and_tests_again(gpt: Path) -> None:
    found = verify_build(gpt)
    assert not found.faults and not found.altered
    assert found.checks == dict.fromkeys(("shapes", "types", "communication"), "proved") | {
        "equality": "certified",
        "numbers": "tested",
    }
    assert found.numbers["on"] == "the build itself, at B=16, S=32; B=4, S=4; B=12, S=28"


def test_a_build_reads_at_its_largest_sizes_and_binds_to_others(gpt: Path) -> None:
    build = read_build(gpt)
    assert build.manifest["sizes"] == {"B": 16, "S": 32}
    other = build.at({"S": 8})
    assert other.manifest["sizes"] == {"B": 16, "S": 8}
    assert other.programs["F"].main.bound("input")["tokens"].type.shape == (8, 8)
    assert {"{B/2}", "{S}"} <= set(re.findall(r"\{[^{}\s]+\}", build.text(build.programs["F"])))


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({"B": [4, 16, 0]}, "its manifest has sizes that are not the largest of its ranges"),
        ({"B": [4, 20, 4]}, "its manifest has sizes that are not the largest of its ranges"),
        ({"B": [4, 16]}, "`ranges.B` is a list of 2, not of 3"),
        ({"B": [4, "16", 4]}, "`ranges.B[1]` is str, not int"),
        ({"B": [4, 16, 4]}, "is of no size that has a range"),
    ],
)
def test_a_manifest_that_says_other_ranges_is_refused(gpt: Path, tmp_path: Path, ranges: Any, said: str) -> None:
    shutil.copytree(gpt, tmp_path / "build")
    file = tmp_path / "build" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "ranges": ranges}))
    with pytest.raises(BuildError) as error:
        read_build(tmp_path / "build")
    assert said in str(error.value)


def planted(gpt: Path, old: str, new: str, file: str = "stage0.F.py") -> Build:
    """Return the build with a changed template."""
    build = read_build(gpt)
    assert build.template is not None
    name = f"programs/{file}"
    assert old in build.template.texts[name]
    texts = {**build.template.texts, name: build.template.texts[name].replace(old, new, 1)}
    return replace(build, template=replace(build.template, texts=texts))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(norm1_native_layer_norm, [{B*S/2}", "(norm1_native_layer_norm, [{B*S/2+1}"),
        ("(norm1_native_layer_norm, [{B*S/2}", "(norm1_native_layer_norm, [{B*S/4}"),
        ("(norm1_native_layer_norm, [{B*S/2}", "(norm1_native_layer_norm, [{8*S}"),  # right at B=16
        ("iota.default({S}", "iota.default({S+1}"),
        ("iota.default({S}", "iota.default({2*S-32}"),  # right at the largest
        ("iota.default({S}, 0", "iota.default({S}, {S**2-32*S}"),  # right at the largest, and of the same shape
        ("f32[{B/2}, {S}, 16]", "f32[{B/2}, {S+4}, 16]"),
        ("f32[{B/2}, {S}, 16]", "f32[{B/2-2}, {S}, 16]"),
    ],
)
def test_a_wrong_expression_is_refused_by_a_proof(gpt: Path, old: str, new: str) -> None:
    try:
        faults = check_files(planted(gpt, old, new))
    except BuildError:
        return
    assert any(fault.check in ("shapes", "types") for fault in faults)


def test_batches_of_other_sizes_are_refused(gpt: Path) -> None:
    module = parc.reference(gpt)
    for sizes, said in [
        (
            {"B": 16, "S": 36},
            "S=36 is not a size that the build was made for: S=4..32 by 4; the nearest is S=32",
        ),
        (
            {"B": 16, "S": 10},
            "S=10 is not a size that the build was made for: S=4..32 by 4; the nearest is S=8 or S=12",
        ),
        ({"B": 2, "S": 8}, "B=2 is not a size that the build was made for: B=4..16 by 4; the nearest is B=4"),
    ]:
        with pytest.raises(RunError) as error:
            module.step(batch(sizes))
        assert error.value.code is OUT_OF_RANGE
        assert said in str(error.value)
        assert error.value.notes == (f"line 4 of the build's plan.parc: {' '.join(RANGES.split())}",)
    uneven = {**batch({"B": 8, "S": 8}), "targets": batch({"B": 8, "S": 12})["targets"]}
    with pytest.raises(RunError, match="`tokens` has S=8, but `targets` has S=12") as error:
        module.step(uneven)
    assert error.value.code is BAD_DATA


def test_runs_take_the_largest_sizes_or_those_asked_for(gpt: Path, tmp_path: Path, capfd: Any) -> None:
    arguments = ["run", str(gpt), "--device", "cpu", "--nproc", "2"]
    assert main([*arguments, "--steps", "1", "--sizes", "S=36"]) == 1
    said = capfd.readouterr().err
    assert "error[P0307]: S=36 is not a size that the build was made for" in said and "S=32" in said
    assert main([*arguments, "--steps", "1", "--sizes", "T=36"]) == 1
    assert (
        "error[P0307]: the plan has no size `T`\nhelp: its sizes are B=4..16 by 4, S=4..32 by 4"
        in capfd.readouterr().err
    )
    with forked_ranks():
        assert main([*arguments, "--steps", "1", "--sizes", "B=8,S=12", "--metrics", str(tmp_path / "m")]) == 0
    assert '"tokens": 96' in (tmp_path / "m").read_text()


def test_samples_of_another_size_say_how_to_run_at_theirs(gpt: Path) -> None:
    lines = "def sample(number, size, dtype):\n    row = torch.zeros(size, dtype=getattr(torch, dtype))\n"
    (gpt.parent / "sized.py").write_text(f"import torch\n\n\n{lines}    return dict(tokens=row, targets=row)\n")
    build = read_build(gpt)

    def said(size: int, dtype: str = "int64") -> str:
        arguments = {"size": size, "dtype": dtype}
        line = {"form": "callable", "names": [], "callable": "./sized.py:sample", "arguments": arguments}
        feed = Feed(replace(build, manifest={**build.manifest, "data": line}), Mesh(()), {}, torch.device("cpu"))
        with pytest.raises(RunError, match="`tokens` of sample 0 is ") as error:
            feed.next(0, 1)
        return error.value.help

    assert said(12) == "`parc run --sizes S=12` runs the build at the samples' sizes"
    assert said(13) == "the build was made for S=4..32 by 4"
    assert "or the plan's `input` and `sizes` lines" in said(32, "int32")


def test_the_plans_own_data_is_read_at_the_sizes_asked_for(gpt: Path) -> None:
    made = bound_build(read_build(gpt), {"B": 8, "S": 12})
    feed = Feed(made, Mesh(()), {}, torch.device("cpu"))
    first, _ = feed.next(0, 1)
    assert first["tokens"].shape == (4, 12)
    assert torch.equal(first["tokens"][:, 1:], first["targets"][:, :-1])
