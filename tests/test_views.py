"""Views: experts along other axes of the same ranks, beside the same experts along axes of the mesh."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import parc
from parc.advice import warnings_of
from parc.checking.reports import report_of
from parc.checking.twins import subject_of
from parc.compiler.build.directory import json_text, write_build
from parc.compiler.build.facts import fact_faults
from parc.compiler.layout.mesh import Mesh, NoCommonParts, View, view_cuts, viewed
from parc.compiler.program.text import parse_program
from parc.compiling.compiled import Compiled
from parc.desugar import desugar
from parc.grammar.diagnostics import PlanError, Severity, render
from parc.report import report_faults
from tests.checked_plans import checked, compiled, held, simulated
from tests.draws import all_but
from tests.planted_builds import ROOT
from tests.runtime.ranks import run_ranks
from tests.test_expert_forms import plan as own_plan
from tests.test_experts import BACKWARD, FORWARD, plan, ranks_train

ATTENTION = """\
column model.layers.*.self_attn.{q,k,v}_proj over tp
row model.layers.*.self_attn.o_proj over tp
"""
EXPERTS = "model.layers.*.mlp.experts"
BESIDE = {
    "one group of experts": (
        "Mixtral",
        "dp=2, tp=2",
        "dp, tp as edp=1, ep=4",
        f"zero 1 over dp\nexpect 4 exchange in {EXPERTS} over ep\nforbid exchange in ** over edp\n",
    ),
    "replicas over dp": ("Mixtral", "dp=2, tp=2", "dp, tp as edp=2, ep=2", "zero 2 over dp\n"),
    "inside dp": ("Mixtral", "dp=4", "dp as edp=2, ep=2", f"zero 1 over dp\nexpect 4 exchange in {EXPERTS} over ep\n"),
    "inside dp, level 3": ("Mixtral", "dp=4", "dp as edp=2, ep=2", "zero 3 over dp\nprecision bf16\n"),
    "zero over the view": ("Mixtral", "dp=4", "dp as ep=2, edp=2", "zero 3 over edp\n"),
    "parts of tp": ("Mixtral", "dp=2, tp=4", "dp, tp as edp=4, ep=2", ""),
    "experts split inside": (
        "Mixtral",
        "dp=2, tp=2",
        "dp, tp as ep=2, etp=2",
        f"shard {EXPERTS}.gate_up_proj [_/ep, (2 _/etp), _]\nshard {EXPERTS}.down_proj [_/ep, _, _/etp]\n",
    ),
    "a pipeline": (
        "Mixtral",
        "pp=2, dp=2, tp=2",
        "dp, tp as edp=1, ep=4",
        "zero 1 over dp\nstage before model.layers.1 over pp\nschedule 1f1b microbatches 2\n",
    ),
    "two levels, rounded weights": (
        "Mixtral",
        "dp=2, tp=2",
        "dp, tp as edp=1, ep=4",
        f"node 2\nhierarchical over ep\nexpect 8 exchange in {EXPERTS}\nprecision bf16\n",
    ),
    "few heads": ("Mixtral", "dp=1, tp=4", "tp as edp=2, ep=2", ""),
    "a capacity": ("Mixtral", "dp=2, tp=2", "dp, tp as edp=1, ep=4", ""),
    "a capacity inside dp": ("Mixtral", "dp=4", "dp as edp=2, ep=2", ""),
}


def folded(family: str, mesh: str, view: str, lines: str = "", **sizes: int) -> str:
    """Return the text of a plan whose experts lie along a view's axes; tokens are split over dp alone."""
    text = plan(
        family, mesh, (ATTENTION if "tp=" in mesh else "") + lines, **{"num_attention_heads": 4, **sizes}
    ).replace("B/dp/ep", "B/dp")
    return text.replace("\nshard input", f"\nview {view} in {EXPERTS}\nshard input")


def folded_beside(beside: str) -> Compiled:
    """Compile one of ``BESIDE``."""
    family, mesh, view, lines = BESIDE[beside]
    text = folded(family, mesh, view, lines, **({"num_hidden_layers": 2} if "pp" in mesh else {}))
    text = text.replace("dropless", "capacity 1.25") if "capacity" in beside else text
    return compiled(text, ROOT / "tests")


@pytest.mark.parametrize("beside", all_but(["a capacity inside dp", "inside dp"], BESIDE))
def test_experts_along_a_view_train_as_on_one_rank(beside: str) -> None:
    compilation = folded_beside(beside)
    assert held(compilation)
    assert not [warning for warning in warnings_of(compilation) if warning.severity is not Severity.NOTE]


def test_experts_along_a_view_train_at_all_sizes_of_a_range_with_compressed_gradients() -> None:
    text = own_plan("stacked", "dp=4", "compress gradients over dp using int8\n").replace("B/dp/ep", "B/dp")
    text = text.replace("\nshard input", "\nview dp as edp=2, ep=2 in layers.*.experts\nshard input")
    compilation = compiled(text.replace("B=8", "B=8..16 by 8"), ROOT / "tests")
    assert checked(compilation).report["checks"]["numbers"] == "tested"


def test_a_view_inside_dp_gives_the_programs_of_a_mesh_with_these_axes() -> None:
    plain = compiled(
        plan(num_attention_heads=4).replace("\nshard input", "\n# as many lines\nshard input"), ROOT / "tests"
    ).built
    made = compiled(folded("Mixtral", "dp=4", "dp as edp=2, ep=2"), ROOT / "tests").built
    atomic = Mesh((("dp_0", 2), ("dp_1", 2)))  # says parts apart
    for name, program in plain.programs.items():
        text = "".join(function.text(atomic, program.action) for function in made.programs[name].functions)
        wanted = "".join(function.text(program.mesh, program.action) for function in program.functions)
        assert text.replace("dp_0", "dp").replace("dp_1", "ep") == wanted


def test_an_exchange_over_a_view_is_one_message_of_the_bytes_that_travel() -> None:
    """Tokens of a data rank are alike on its tp ranks, so each sends a slice of them: tokens * k * width * itemsize *
    (ep - 1) / ep. Gradients of experts without replicas are not summed at all."""
    dp, tp, k, width = 2, 2, 2, 16
    tokens, ep = 8 * 4 // dp // tp, 4
    rows = report_of(compiled(folded("Mixtral", "dp=2, tp=2", "dp, tp as edp=1, ep=4"), ROOT / "tests"))[
        "communication"
    ]
    for phase in (FORWARD, BACKWARD):
        sent = [(row["axis"], row["wire_bytes"]) for row in rows if row["op"] == "exchange" and row["phase"] == phase]
        assert sent == [("ep", tokens * k * width * 4 * (ep - 1) // ep)] * 2
    assert not [row for row in rows if row["carries"] == "gradients" and "experts" in row["module"]]


@pytest.mark.parametrize(("mesh", "view"), [("dp=4", "dp as ep=2, edp=2"), ("dp=2, tp=4", "dp, tp as edp=4, ep=2")])
def test_replicas_of_experts_route_different_tokens_and_sum_their_gradients(mesh: str, view: str) -> None:
    """Each of four replicas over dp and a part of tp has a slice of the tokens that are alike on tp."""
    rows = report_of(compiled(folded("Mixtral", mesh, view), ROOT / "tests"))["communication"]
    sums = [row for row in rows if row["carries"] == "gradients"]
    assert {row["axis"] for row in sums if "experts" in row["module"]} == {"edp"}
    assert {row["axis"] for row in sums if "gate.weight" in row["module"]} == {"dp"}
    ranks, k, width, ep = math.prod(map(int, re.findall(r"\d", mesh))), 2, 16, 2
    sent = {row["wire_bytes"] for row in rows if row["op"] == "exchange"}
    assert sent == {8 * 4 // ranks * k * width * 4 * (ep - 1) // ep}


def test_zero_over_the_mesh_s_axis_stores_experts_over_their_replicas() -> None:
    compilation = folded_beside("inside dp")
    types = {name: type_.text(compilation.mesh) for name, type_ in compilation.build.types.items()}
    assert types["model.layers.0.mlp.experts.down_proj"] == "f32[8/ep/edp, 16, 16]"
    assert types["model.layers.0.mlp.gate.weight"] == "f32[8/dp, 16]"


def test_a_large_view_s_twin_keeps_the_parts_of_factored_axes_at_two() -> None:
    lines = "verify num_local_experts=8, num_hidden_layers=1\nzero 1 over dp\n"
    sizes = {"num_local_experts": 16, "num_key_value_heads": 4}
    text = folded("Mixtral", "dp=4, tp=4", "dp, tp as edp=2, ep=8", lines, **sizes)
    compilation = compiled(text.replace("B=8", "B=16"), ROOT / "tests")
    assert str(compilation.mesh) == "dp=2*2, tp=4, edp=dp_0, ep=dp_1*tp"
    twin = subject_of(compilation)
    assert "mesh dp=2*2, tp=2, edp=dp_0, ep=dp_1*tp" in twin.text
    assert simulated(twin.compiled)


def test_a_plan_in_primitives_names_the_axes_of_the_view() -> None:
    compilation = folded_beside("experts split inside")
    expanded = desugar(compilation)
    assert "mlp.experts.gate_up_proj [_/ep, (2 _/etp), _]" in expanded and f"as ep=2, etp=2 in {EXPERTS}" in expanded
    again = compiled(expanded, ROOT / "tests")
    assert again.build.types == compilation.build.types


def test_tokens_that_do_not_divide_over_a_view_s_axis_are_refused_by_its_name() -> None:
    text = folded("Mixtral", "dp=1, tp=4", "dp, tp as ep=4")
    with pytest.raises(PlanError) as refused:
        compiled(text.replace("B=8, S=4", "B=2, S=3"), ROOT / "tests")
    assert "P0135" in (message := render(refused.value.diagnostics[0])) and "do not divide over `ep`" in message


@pytest.mark.parametrize(
    ("was", "then"), [("edp=dp_0, ep=dp_1", "edp=dp_1, ep=dp_0"), (", edp=dp_0, ep=dp_1", ", ep=dp_1"),
                      ("edp=dp_0, ep=dp_1", "edp=dp_0, ep=dp_1, more=dp_0")],
)  # fmt: skip
def test_programs_whose_views_are_not_the_plan_s_are_refused(was: str, then: str) -> None:
    build = compiled(folded("Mixtral", "dp=4", "dp as edp=2, ep=2"), ROOT / "tests").build
    assert not fact_faults(build.manifest, build.programs, build.reference, build.roles)
    texts = {name: program.text().replace(was, then) for name, program in build.programs.items()}
    if "edp" not in then:  # its name is in no line then
        texts = {name: re.sub(r"(?<=[/+'])edp\b", "dp_0", text) for name, text in texts.items()}
    programs = {name: parse_program(text) for name, text in texts.items()}
    faults = fact_faults(build.manifest, programs, build.reference, build.roles)
    assert any("`views`" in fault.message for fault in faults)


def test_a_report_without_the_plan_s_views_is_refused() -> None:
    compilation = compiled(folded("Mixtral", "dp=4", "dp as edp=2, ep=2"), ROOT / "tests")
    report = json.loads(json_text(report_of(compilation)))
    assert report_faults(replace(compilation.build, report=report), compilation.plan) == []
    del report["views"]
    (fault,) = report_faults(replace(compilation.build, report=report), compilation.plan)
    assert fault.message == "`views` is not what the programs say"


@given(st.data())
def test_a_view_s_ranks_are_those_of_the_mesh_in_its_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = Mesh(tuple((f"a{at}", size) for at, size in enumerate(sizes)))
    first = data.draw(st.integers(0, len(sizes) - 1))
    over = mesh.names[first : data.draw(st.integers(first + 1, len(sizes)))]
    empty = View(over, tuple((f"v{at}", 1) for at in range(data.draw(st.integers(1, 3)))))
    fitting = [*empty.fitting(mesh, [])]
    chosen = data.draw(st.sampled_from(fitting))
    view = View(over, tuple((name, size) for (name, _), size in zip(empty.axes, chosen, strict=True)))
    seen = viewed(mesh, [view], view_cuts(mesh, [view]))
    assert Mesh.parse(str(seen)) == seen and seen.declared == mesh
    inner = math.prod(size for name, size in mesh.axes[first + len(over) :])
    stride = inner * math.prod(size for _, size in view.axes)
    for name, size in view.axes:
        stride //= size
        groups = seen.groups(seen.parts(name)) if size > 1 else []
        assert all([rank - group[0] for rank in group] == [stride * at for at in range(size)] for group in groups)
    whole = math.prod(mesh.size(axis) for axis in over)
    for other in {tuple(data.draw(st.permutations(chosen))), (whole, *[1] * (len(chosen) - 1))} - {*fitting}:
        with pytest.raises(NoCommonParts):
            View(over, tuple((name, size) for (name, _), size in zip(empty.axes, other, strict=True))).cuts(mesh)


def ranks_train_all(folders: list[str]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Train builds of one mesh, one after the other."""
    return [ranks_train(folder) for folder in folders]


def test_the_ranks_of_a_view_train_as_one(tmp_path: Path) -> None:
    """Four processes over gloo: tp for attention, with tokens in slices, and experts over dp and tp, to which tokens go
    in one exchange, or in one over each."""
    wanted: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for lines, over in (("zero 1 over dp\n", {"ep"}), ("node 2\nhierarchical over ep\n", {"dp", "tp"})):
        text = folded("Mixtral", "dp=2, tp=2", "dp, tp as edp=1, ep=4", f"{lines}data synthetic\n")
        made, folder = compiled(text, ROOT / "tests"), tmp_path / str(len(wanted))
        assert {row["axis"] for row in report_of(made)["communication"] if row["op"] == "exchange"} == over
        write_build(made.to_write(report_of(made)), folder)
        plain = parc.reference(folder)
        wanted.append(([plain.step().loss for _ in range(2)], plain.module.state_dict()))
    folders = [str(tmp_path / str(at)) for at in range(len(wanted))]
    for trained in run_ranks(ranks_train_all, 4, folders, wait_s=200):
        for (losses, state), (expected, weights) in zip(trained, wanted, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5)
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
