"""The clock: clusters and their faults, links, products, queues, timelines in closed form, and what `--time` prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parc.advice import warnings_of
from parc.cli import main
from parc.cli.terminal import text_table
from parc.compiler.analysis.across_nodes import NodeSpread
from parc.compiler.analysis.flops import stage_flops
from parc.compiler.analysis.lifetimes import aliases
from parc.compiler.clock.cluster import (
    Cluster,
    ClusterError,
    cluster_file,
    find_cluster,
    rate_of_size,
    read_cluster,
    shipped,
)
from parc.compiler.clock.lines import Habits, LineTimes, product_seconds
from parc.compiler.clock.links import Links
from parc.compiler.clock.programs import ProgramClock
from parc.compiler.clock.step import StepClock, StepTime
from parc.compiler.layout.mesh import Mesh
from parc.compiler.program.actions import ACTIONS, work_kinds
from parc.compiler.program.roles import Role
from parc.compiler.program.text import parse_program
from parc.compiler.schedules import timelines
from parc.measuring import (
    Bench,
    TimedLine,
    attention_probes,
    fitted_products,
    fitted_ramp,
    mixed_probes,
    operator_probes,
    program_text,
    sum_probe,
)
from tests.checked_plans import compiled
from tests.runtime.tiny import EXAMPLES

H100 = find_cluster("h100-sxm")
TEXT = cluster_file("h100-sxm").read_text()


def bare(**changes: Any) -> Cluster:
    """Return a cluster whose every time is one of bytes or operations: no latencies, and each share is 1."""
    link = replace(H100.node, start=0.0, hop=0.0, all_reduce=1.0, all_gather=1.0, reduce_scatter=1.0, send=1.0)
    device = replace(H100.device, launch=0.0, streaming=1.0)
    products = replace(H100.products, top=1.0, ramp=0.0, units=1.0)
    cluster = replace(
        H100, node=link, network=replace(link, bandwidth=50e9), device=device, products=products,
        tiles=((1.0, 1.0, 1.0),), algorithms=("ring",), peak={"fp32": 1e12},
    )  # fmt: skip
    return replace(cluster, **changes)


# ---- files


@pytest.mark.parametrize("name", shipped())
def test_shipped_clusters_are_read_and_say_their_sources(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.name == name and cluster.peak_of("float16") > 1e14 and cluster.ranks >= 8
    text = cluster_file(name).read_text()
    numbers = [line for line in text.splitlines() if re.match(r"(bandwidth|top|ramp|units|streaming|host) =", line)]
    assert numbers and all("#" in line or "[links" in text for line in numbers)


@pytest.mark.parametrize(
    ("change", "message", "help_"),
    [
        (("ramp = 200", "rump = 200"), "`products.rump` means nothing", "did you mean `ramp`"),
        (("launch = 4.0e-6", ""), "`device.launch` is missing", "expected seconds, as 4e-6"),
        (("bf16 = 989e12", "bf16 = 989"), "`peak.bf16` is 989", "operations a second, as 989e12, from 1e+08"),
        (("top = 0.80", "top = 80"), "`products.top` is 80", "expected a share, as 0.8"),
        (("ranks = 8", "ranks = 2.5"), "`node.ranks` is 2.5", "a whole number"),
        (("bandwidth = 3.35e12", 'bandwidth = "fast"'), "`device.bandwidth` is 'fast', no number", "bytes a second"),
        (("[peak]", "[peak"), "is no TOML", "copy a file"),
        (('kind = "cuda"', 'kind = "gpu"'), "`kind` is 'gpu'", "write `cuda` or `cpu`"),
        (("bf16 = 989e12", "bf17 = 989e12"), "`peak.bf17` is no type", "did you mean `bf16`"),
        (('"tree"', '"trees"'), "`library.algorithms` has 'trees'", "there are `ring`"),
        (("[128, 128, 0.92]", "[128, 128]"), "`tiles[1]` is [128, 128]", "expected `[rows, columns, share]`"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_wrong_number_is_named_with_what_is_expected(change: tuple[str, str], message: str, help_: str) -> None:
    assert change[0] in TEXT
    with pytest.raises(ClusterError) as caught:
        read_cluster(TEXT.replace(*change), "mine.toml")
    assert message in str(caught.value) and help_ in caught.value.help and "mine.toml" in str(caught.value)


def test_an_unknown_cluster_is_answered_by_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="there is no cluster `h100`") as caught:
        find_cluster("h100")
    assert "`h100-sxm`" in caught.value.help
    with pytest.raises(ClusterError, match="there is no file"):
        find_cluster("here.toml", tmp_path)
    with pytest.raises(ClusterError, match="no peak for products of float64") as caught:
        replace(H100, peak={"bf16": 1e15}).peak_of("float64")
    assert "`fp64 = ...`" in caught.value.help


def test_ranks_that_share_a_device_see_its_other_numbers() -> None:
    shared = read_cluster(TEXT + "\n[sharing.2.device]\nbandwidth = 1.0e12\n", "mine.toml")
    assert shared.shared_by(1).device.bandwidth == 3.35e12
    assert shared.shared_by(2).device.bandwidth == shared.shared_by(3).device.bandwidth == 1e12


# ---- measured machines


def test_products_are_fitted_by_the_constants_that_they_were_made_of() -> None:
    table = [[1e6, 4e10], [1e8, 2e10]]

    def seconds(rows: int, columns: int, inner: int) -> float:
        moved = 4 * (rows * inner + inner * columns + rows * columns)
        work = 2 * rows * columns * inner * (1 + 24 / inner) / 3e11
        return 1e-5 + work + 1.5 * moved / rate_of_size(table, moved)

    shapes = [(256, 256, 256), (512, 512, 512), (64, 1024, 1024), (1024, 512, 64), (1024, 1024, 1024)]
    fit = fitted_products([(*shape, seconds(*shape)) for shape in shapes], 4, 1e-5, table, True)
    assert (fit.ramp, fit.reading) == (24, 1.5)
    assert fit.peak == pytest.approx(3e11) and fit.error < 1e-6


def test_a_ramp_is_fitted_by_the_constants_that_it_was_made_of() -> None:
    each = [(keys, work, work * (1 + 80 / keys) / 0.5, 2.5 * work * (1 + 80 / keys) / 0.4)
            for keys, work in ((64, 1e-4), (256, 4e-4))]  # fmt: skip
    fit = fitted_ramp(each, (1.0, 2.5))
    assert fit.ramp == 80 and fit.error < 1e-6
    assert fit.shares == pytest.approx((0.5, 0.4))


@pytest.mark.parametrize(
    ("line", "type_", "entries"),
    [
        ("aten.embedding.default(t, i)", "f32[16, 64]", 16 * 64),
        ("aten.embedding_dense_backward.default(y, i, 512, -1, False)", "f32[512, 64]", 16 * 64),
        ("parc.row_max(t, '')", "f32[512, 1]", 512 * 64),
    ],
)
def test_a_slow_operator_takes_its_time_for_the_entries_that_it_reads(line: str, type_: str, entries: int) -> None:
    """Not for those of a table, of which it looks up or adds to few rows."""
    cluster = bare(operators={line.split(".")[1].partition("(")[0]: 1e-6})
    operands = {"t": "f32[512, 64]", "i": "i64[16]", "y": "f32[16, 64]"}
    operands = {name: text for name, text in operands.items() if re.search(rf"\b{name}[,)]", line)}
    program = parse_program(program_text("dp=1", [TimedLine("line", operands, line, type_)]))
    seconds = LineTimes(program, cluster, Habits(), aliases(program)).of(program.main)[0].seconds
    assert seconds == pytest.approx(entries * 1e-6)


@pytest.mark.parametrize("lines", [mixed_probes(), operator_probes(1 << 12), attention_probes(1, 2, 8, 4)])
def test_a_measured_program_runs_each_line_on_operands_of_its_own(lines: Iterable[TimedLine]) -> None:
    probes = tuple(lines)
    program = parse_program(program_text("dp=1", probes * 2))
    assert len(program.main.lines) == 2 * len(probes)
    reads = [name for line in program.main.lines for name in line.uses]
    assert len(reads) == len(set(reads)) == len(program.main.parameters)
    assert Bench(0, 1, torch.device("cpu")).seconds(probes[0]) > 0


@pytest.mark.parametrize(
    ("entries", "each", "copies"),
    [(64, 1.0, [(1, 1)]), (64, 0.04, [(1, 1), (2, 32)]), (64, 1e-6, [(1, 1), (64, 32)]),
     (1 << 17, 1e-6, [(1, 1), (64, 3)]), (1 << 20, 1e-6, [(1, 1), (24, 1)])],
)  # fmt: skip
def test_a_line_is_measured_in_no_more_copies_than_a_cache_holds_or_the_budget_has_time_for(
    entries: int, each: float, copies: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies in a program, and sets of operands with which it runs: 192 MiB together, of large lines."""
    programs = list[tuple[int, int]]()

    def run_of(_bench: Bench, lines: tuple[TimedLine, ...], sets: int = 1) -> Callable[[], float]:
        programs.append((len(lines), sets))
        return lambda: each * len(lines)

    monkeypatch.setattr(Bench, "_run_of", run_of)
    assert Bench(0, 1, torch.device("cpu")).seconds(sum_probe(entries)) == pytest.approx(each)
    assert programs == copies


def test_a_measured_program_runs_with_each_set_of_operands_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "_once", lambda _bench, _machine, values: values["a0"].data_ptr())
    run = Bench(0, 1, torch.device("cpu"))._run_of((sum_probe(64),), 3)
    read = [run() for _ in range(6)]
    assert len(set(read)) == 3 and read[:3] == read[3:]


def test_a_slow_operator_on_packed_rows_counts_the_rows_that_are_there() -> None:
    slow = replace(H100, operators={"silu": 1e-6})

    def seconds(type_: str) -> float:
        text = program_text("dp=1", [TimedLine("silu", {"x": type_}, "aten.silu.default(x)", type_)])
        program = parse_program(text)
        return float(LineTimes(program, slow, Habits(), aliases(program)).of(program.main)[0].seconds)

    assert seconds("f32[64, 16] 2 of 8") == pytest.approx(seconds("f32[16, 16]")) == pytest.approx(256e-6)


def test_a_rank_multiplies_the_rows_of_its_own_experts() -> None:
    """On each of four ranks: a quarter of the rows that tokens choose, whether experts are split or not."""
    plan = (EXAMPLES / "moe.parc").read_text()
    layouts = [{"dp": 4, "ep": 1}, {"dp": 2, "ep": 2}, {"dp": 1, "ep": 4}]
    work = [stage_flops(compiled(plan, **sizes).build.roles) for sizes in layouts]
    assert work[0] == work[1] == work[2] and all(work[0][0].values())


@pytest.mark.parametrize(("tokens", "share"), [(128, 0.25), (384, 0.375)])
def test_a_grouped_product_is_slow_if_experts_have_few_rows(tokens: int, share: float) -> None:
    """One of four experts a token: 32 and 96 rows, of an expert that needs 32 for half of its share."""
    cluster = bare(products=replace(bare().products, grouped=0.5, grouped_ramp=32.0))
    values = {"x": f"f32[{4 * tokens}, 8] 1 of 4", "m": f"bool[4, {tokens}]", "w": "f32[4, 16, 8]"}
    line = TimedLine(
        "product", values, "parc.expert_linear.default(x, m, w, False, 1)", f"f32[{4 * tokens}, 16] 1 of 4"
    )
    program = parse_program(program_text("dp=1", [line]))
    seconds = LineTimes(program, cluster, Habits(), aliases(program)).of(program.main)[0].seconds
    assert seconds == pytest.approx(2 * tokens * 8 * 16 / (1e12 * share))


# ---- links


def test_an_all_reduce_is_its_ring_in_closed_form() -> None:
    links = Links(Mesh.parse("dp=8"), replace(H100, algorithms=("ring",)), 8)
    size = 2 * 7 / 8 * 1e9
    node = H100.node
    assert links.seconds("all_reduce", ("dp",), 10**9) == pytest.approx(
        node.start + 14 * node.hop + size / (450e9 * node.all_reduce)
    )


def test_a_ring_across_nodes_has_the_nics_of_its_ranks_in_a_node() -> None:
    cluster, size = bare(), 10**9
    inner, outer = Mesh.parse("dp=16"), Mesh.parse("dp=4, tp=8")
    assert Links(inner, cluster, 8).place(("dp",)) == NodeSpread(16, 2, 8)
    assert Links(outer, cluster, 8).place(("dp",)) == NodeSpread(4, 4, 1)
    assert Links(inner, cluster, 8).seconds("all_gather", ("dp",), size) == pytest.approx(15 * size / (8 * 50e9))
    assert Links(outer, cluster, 8).seconds("all_gather", ("dp",), size) == pytest.approx(3 * size / 50e9)
    assert Links(outer, cluster, 8).seconds("all_gather", ("tp",), size) == pytest.approx(7 * size / 450e9)
    turned = Links(outer, cluster, 8, ("tp", "dp"))
    assert turned.seconds("all_gather", ("dp",), size) == pytest.approx(3 * size / 450e9)


def test_small_sums_go_by_the_tree_and_large_ones_by_the_switches() -> None:
    across = Links(Mesh.parse("dp=64"), H100, 8)
    ring = Links(Mesh.parse("dp=64"), replace(H100, algorithms=("ring",)), 8)
    assert across.seconds("all_reduce", ("dp",), 1000) < ring.seconds("all_reduce", ("dp",), 1000)
    inside, alone = Links(Mesh.parse("dp=8"), H100, 8), Links(Mesh.parse("dp=4"), H100, 8)
    assert inside.seconds("all_reduce", ("dp",), 10**9) < alone.seconds("all_reduce", ("dp",), 10**9)


# ---- lines and programs


def test_a_product_of_whole_tiles_takes_its_operations_and_others_their_last_round() -> None:
    cluster = replace(H100, products=replace(H100.products, top=1.0, ramp=0.0), tiles=((128.0, 256.0, 1.0),))
    whole = (1, 128 * 132, 256)
    assert product_seconds(cluster, "bfloat16", whole, 128 * 132 * 256 * 64) == pytest.approx(
        2 * 128 * 132 * 256 * 64 / 989e12
    )
    one = product_seconds(cluster, "bfloat16", (1, 128, 256), 128 * 256 * 64)
    assert one == pytest.approx(product_seconds(cluster, "bfloat16", whole, 128 * 132 * 256 * 64))


PROGRAM = '''"""parc program: role stage0, action F"""

mesh(dp=2)


def forward(
    w: "f32[1024/dp, 1024]",  # parameter w
    x: "f32[2048/dp, 1024]",  # input x
):
    coming = parc.all_gather(w, 'dp', 0, 1, message=1)  # f32[1024, 1024] | w - plan:3
    y = aten.mm.default(x, x_t)  # f32[2048/dp, 1024] | up - plan:2
    whole = parc.wait(coming)  # f32[1024, 1024] | w - plan:3
    z = aten.mm.default(y, whole)  # f32[2048/dp, 1024] | up - plan:2
    return {
        "output z": z,
    }
'''.replace("x_t", "v").replace('    x: "f32', '    v: "f32[1024, 1024]",  # parameter v\n    x: "f32')


@pytest.mark.parametrize(("bandwidth", "waits"), [(1e13, False), (1e8, True)])
def test_a_message_is_hidden_behind_a_product_or_waited_for(bandwidth: float, waits: bool) -> None:
    cluster = bare(node=replace(bare().node, bandwidth=bandwidth))
    program = parse_program(PROGRAM)
    time = ProgramClock(program, Links(program.mesh, cluster, 8), Habits()).run()
    product, message = 2 * 1024**3 / 1e12, 1024 * 512 * 4 / bandwidth
    assert time.seconds == pytest.approx(2 * product + max(0.0, message - product))
    assert (time.spent.exposed["dp", 3] > 0) == waits
    assert time.spent.parts["products"] == pytest.approx(2 * product)
    assert sum(time.spent.lines.values()) == pytest.approx(time.seconds)


# ---- timelines


def stage_program(role: str, stage: int, kind: str, products: int) -> str:
    """Return a program of a stage whose work is so many products of equal times."""
    lines = [f"    y{at} = aten.mm.default(x, w)  # f32[1024, 1024] | up - plan:2" for at in range(products)]
    head = ['    x: "f32[1024, 1024]",  # input x', '    w: "f32[1024, 1024]",  # parameter w']
    return "\n".join([
        f'"""parc program: role {role}, action {kind}"""', "", "mesh(pp=4)", "", "", f"def stage{stage}(", *head, "):",
        *lines, "    return {", f'        "sent y": y{products - 1},', "    }", "",
    ])  # fmt: skip


def pipeline(schedule: str, stages: int, count: int, cluster: Cluster, **habits: bool) -> StepTime:
    """Play a pipeline whose forwards take one product, and backwards two, one for each phase if they are split."""
    roles: dict[str, Role] = {}
    for rank, (name, actions) in enumerate(timelines(schedule, stages, count, axis="pp").items()):
        programs = {f"{rank}{kind}": parse_program(stage_program(name, rank, kind, ACTIONS[kind].slots))
                    for kind in work_kinds()}  # fmt: skip
        roles[name] = Role(name, programs, tuple(actions), "pp")
    links = Links(Mesh.parse(f"pp={stages}"), cluster, 8)
    return StepClock(roles, links, Habits(**habits), dict.fromkeys(roles, 0.0)).run()


PRODUCT = 2 * 1024**3 / 1e12
FREE = bare(node=replace(bare().node, bandwidth=1e30))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8)])
def test_the_bubble_of_a_pipeline_is_its_closed_form(schedule: str, stages: int, count: int) -> None:
    time = pipeline(schedule, stages, count, FREE)
    assert time.seconds == pytest.approx((count + stages - 1) * 3 * PRODUCT)
    for name in time.roles:
        parts = time.parts(name)
        assert parts["bubble"] == pytest.approx((stages - 1) * 3 * PRODUCT)
        assert sum(parts.values()) == pytest.approx(time.seconds)


@pytest.mark.parametrize("stages", [2, 4])
def test_without_a_barrier_ranks_of_zb_h2_never_wait(stages: int) -> None:
    count = 2 * stages
    barrier, free = (pipeline("zb-h2", stages, count, FREE, barrier=barrier) for barrier in (True, False))
    assert barrier.seconds == pytest.approx((3 * count + stages - 1) * PRODUCT)
    assert free.seconds == pytest.approx(3 * count * PRODUCT)
    for name in free.roles:
        assert free.parts(name)["bubble"] == pytest.approx(0.0, abs=1e-9)
        assert sum(free.parts(name).values()) == pytest.approx(free.seconds)
    gpipe = [pipeline("gpipe", stages, count, FREE, barrier=barrier).seconds for barrier in (True, False)]
    assert gpipe[0] == pytest.approx(gpipe[1])  # its first rank begins and ends a step


def test_a_stage_that_waits_for_its_sends_takes_longer() -> None:
    slow = bare(node=replace(bare().node, bandwidth=1024 * 1024 * 4 / PRODUCT))  # a message takes a product's time
    free, sent, blocked = (pipeline("1f1b", 4, 8, FREE), pipeline("1f1b", 4, 8, slow),
                           pipeline("1f1b", 4, 8, slow, blocking_sends=True))  # fmt: skip
    assert free.seconds < sent.seconds < blocked.seconds
    for name in blocked.roles:
        assert sum(blocked.parts(name).values()) == pytest.approx(blocked.seconds)
    assert pipeline("gpipe", 2, 1, slow).seconds == pytest.approx((2 * 3 + 2) * PRODUCT)


# ---- a plan


PLAN = """\
model "./gpt.py:GPT" (layers=2, width=64, heads=4, vocab=256, length=32)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=32
loss cross_entropy(output, targets)
optimizer adamw lr 1e-3
precision bf16
mesh dp=2, pp=2, tp=2
stage balanced over pp
schedule 1f1b microbatches 4
shard tokens, targets [B/dp, _]
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
vocab embed, head over tp
zero 1 over dp
"""


def priced(**habits: bool) -> Mapping[str, Any]:
    """Return the JSON of the plan's time."""
    from parc.step_time import price, step_json

    compilation = compiled(PLAN)
    return step_json(price(compilation.build, compilation.plan, H100, Habits(**habits)), 1e9)


def test_the_parts_of_every_role_sum_to_the_step() -> None:
    form = priced()
    assert [*form["roles"]] == ["pp0", "pp1"] and form["parts"] == form["roles"][form["longest"]]
    for parts in form["roles"].values():
        assert sum(parts.values()) == pytest.approx(form["step_s"])
    assert form["tokens"] == 512 and form["tokens_per_s"] == pytest.approx(512 / form["step_s"])
    assert form["tokens_per_s_per_gpu"] == pytest.approx(form["tokens_per_s"] / 8)
    assert form["mfu"] == pytest.approx(form["model_flops"] / form["step_s"] / (8 * 989e12))
    assert sum(one["s"] for one in form["exposed"]) == pytest.approx(form["parts"]["exposed"])
    assert {one["axis"] for one in form["exposed"]} >= {"tp", "dp", "pp"}
    assert form["for_tokens"]["gpu_hours"] == pytest.approx(1e9 / 512 * form["step_s"] * 8 / 3600)


def test_fused_lines_take_less_and_scores_in_memory_more() -> None:
    usual = priced()["step_s"]
    assert priced(compiled=True)["step_s"] < usual < priced(fused_attention=False)["step_s"]
    assert priced(overlap=False)["step_s"] >= usual


def test_another_order_of_the_mesh_is_told_if_it_is_faster() -> None:
    wide = 'model "./gpt.py:GPT" (layers=2, width=1024, heads=16, vocab=256, length=256)'
    text = PLAN.replace(PLAN.splitlines()[0], wide).replace("S=32", "S=256").replace("B=16", "B=64")
    text = text.replace("mesh dp=2, pp=2, tp=2", 'mesh tp=8, dp=8\ncluster "h100-sxm"')
    text = text.replace("stage balanced over pp\n", "").replace("schedule 1f1b", "schedule")
    (warning,) = (one for one in warnings_of(compiled(text)) if one.code.name == "P0149")
    assert warning.help == "write `mesh dp=8, tp=8`"
    assert "in another order of the mesh" in warning.message
    better = text.replace("mesh tp=8, dp=8", "mesh dp=8, tp=8")
    assert not [one for one in warnings_of(compiled(better)) if one.code.name == "P0149"]


def test_more_ranks_than_nodes_hold_are_refused() -> None:
    from parc.step_time import price

    compilation = compiled(PLAN)
    with pytest.raises(ClusterError, match="8 ranks, and the cluster `h100-sxm` 1 nodes of 4"):
        price(compilation.build, compilation.plan, replace(H100, nodes=1, ranks=4))


def test_time_says_how_to_name_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "list"]) == 0 and "h100-sxm" in capsys.readouterr().out
    assert main(["cluster", "show", "h200"]) == 0 and 'name = "h200"' in capsys.readouterr().out
    assert main(["cluster", "show", "h20"]) == 1
    assert "help: did you mean `h200`" in capsys.readouterr().err


def test_the_time_of_a_plan_looks_as_it_did() -> None:
    """To accept a change, delete the golden file and run this once."""
    from parc.step_time import plan_line_rows, price, time_rows

    compilation = compiled(PLAN)
    step = price(compilation.build, compilation.plan, H100)
    rows = [f"{name:13}{text}" for name, text in time_rows(step, 1e9)]
    texts = {number: " ".join(text.split()) for number, text in enumerate(PLAN.splitlines(), 1)}
    text = "\n".join(
        [*rows, "", text_table(plan_line_rows(step, texts), ("plan line", "time", "", ""), right=(0, 1, 2)), ""]
    )
    golden = Path(__file__).parent / "golden" / "time.txt"
    if not golden.exists():
        golden.write_text(text)
        pytest.fail(f"{golden.name} was missing and is written anew: look at it and run again")
    assert golden.read_text() == text


LINES = '''"""parc program: role stage0, action F"""

mesh(dp=2)


def forward(
    x: "bf16[1024, 1024]",  # input x
    v: "bf16[1024, 1024]",  # parameter v
):
    wide = aten._to_copy.default(x, dtype=torch.float32)  # f32[1024, 1024] | norm - plan:2
    twice = aten.mul.Tensor(wide, 2.0)  # f32[1024, 1024] | norm - plan:2
    t = aten.t.default(v)  # bf16[1024, 1024] | up - plan:2
    y = aten.mm.default(x, t)  # bf16[1024, 1024] | up - plan:2
    flat = aten.reshape.default(y, [512, 2048])  # bf16[512, 2048] | up - plan:2
    turned = aten.t.default(flat)  # bf16[2048, 512] | up - plan:2
    copied = aten.reshape.default(turned, [1024, 1024])  # bf16[1024, 1024] | up - plan:2
    total = aten.add.Tensor(wide, twice)  # f32[1024, 1024] | norm - plan:2
    return {
        "output z": total,
        "output c": copied,
    }
'''


def test_views_move_no_bytes_and_a_cast_to_a_wider_type_is_repeated_where_it_is_read() -> None:
    program, cluster, entries = parse_program(LINES), bare(peak={"bf16": 1e12}), 1024**2
    links = Links(program.mesh, cluster, 8)
    eager, fused = (ProgramClock(program, links, Habits(compiled=on)) for on in (False, True))
    bytes_ = [cluster.device.bandwidth * time.seconds / entries for time in eager.line_times(program.main)]
    assert bytes_ == pytest.approx([6, 8, 0, bytes_[3], 0, 0, 4, 12])
    bytes_ = [cluster.device.bandwidth * time.seconds / entries for time in fused.line_times(program.main)]
    assert bytes_[:3] == pytest.approx([0, 2 + 4, 0])  # reads `x`, writes `twice`
    assert bytes_[4:] == pytest.approx([0, 0, 2 + 2, 2 + 4 + 4])  # reads `x` and `twice` again
