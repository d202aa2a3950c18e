"""The search of ``parc plan``: choices of open `let`s, estimates beside prices of compiled programs, and what is said
where nothing fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from parc.cli import main
from parc.compiler.clock.cluster import find_cluster
from parc.compiler.plan.open_plan import OpenPlan, read_open
from parc.compiler.plan.plan import read_plan
from parc.compiling.build_cache import BuildCache
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.source import Source
from parc.searching.drafts import with_open_sizes
from parc.searching.estimates import Estimator, SizedChoice, StructureKey
from parc.searching.pricing import ExactPrices, PricedPlan, effect_of
from parc.searching.search import search
from parc.searching.shorter import counted_layers

EXAMPLES = Path(__file__).parent.parent / "examples"
DEEP = """
let dp=?, pp=1 | 2 | 4, tp=1 | 2, zero=0 | 1 | 2 | 3, schedule=1f1b | zbv | interleaved, chunks=1 | 2
let m=8, again=none | model.layers.*
model "./llama.py:llama" (layers=16, width=512, heads=8, kv_heads=4, ffn=1024, vocab=4096, length=256)
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=64, S=256
loss cross_entropy(output.logits, targets)
optimizer adamw lr 3e-4
precision bf16
recompute $again
mesh dp=$dp, pp=$pp, tp=$tp
stage balanced over pp
schedule $schedule microbatches $m chunks $chunks
shard input_ids, targets [B/dp, _]
include "parc:llama" (tp=$tp)
zero $zero over dp
"""
SHALLOW = """
let dp=?, tp=1 | 2, zero=0 | 1
model "./gpt.py:GPT" (layers=1, width=32, heads=2, vocab=64, length=8)
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=8, S=8
loss cross_entropy(output, targets)
optimizer adamw lr 3e-4
mesh dp=$dp, tp=$tp
shard tokens, targets [B/dp, _]
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
zero $zero over dp
"""


def opened(text: str, *, batch: int | None = None, **defines: str) -> OpenPlan:
    return read_open(Source("open.parc", text, path=EXAMPLES / "open.parc"), defines, batch)


def refused(text: str, ranks: int | None = 4) -> str:
    with pytest.raises(PlanError) as raised:
        search(opened(text), ExactPrices(EXAMPLES, find_cluster("h100-sxm")), ranks)
    return "\n".join(map(render, raised.value.diagnostics))


def test_choices_are_all_combinations_whose_mesh_has_so_many_ranks() -> None:
    plan = opened(SHALLOW)
    choices = [*plan.choices(4)]
    assert [(one["dp"], one["tp"], one["zero"]) for one in choices] == [
        ("4", "1", "0"), ("4", "1", "1"), ("2", "2", "0"), ("2", "2", "1"),
    ]  # fmt: skip
    assert plan.combinations == 4 and not [*plan.choices(3)][2:]
    assert [one["dp"] for one in opened(SHALLOW, tp="4").choices(8)] == ["2", "2"]


def test_several_open_axes_take_every_factorization() -> None:
    plan = opened(SHALLOW.replace("tp=1 | 2", "tp=?"), zero="0")
    assert [(one["dp"], one["tp"]) for one in plan.choices(4)] == [("1", "4"), ("2", "2"), ("4", "1")]


def test_the_closed_plan_is_the_text_with_values_in_place_of_choices() -> None:
    plan = opened(SHALLOW, batch=16)
    closed = plan.closed({"dp": "2", "tp": "2", "zero": "1"}, ("tp", "dp"))
    assert "let dp=2, tp=2, zero=1\n" in closed.text
    assert "mesh tp=$tp, dp=$dp\n" in closed.text and "sizes B=16, S=8\n" in closed.text
    assert read_plan(closed).mesh.axes == (("tp", 2), ("dp", 2))


def test_the_names_that_size_the_mesh_are_opened_in_their_let_alone() -> None:
    comment = "# smaller: -D dp=4\n"
    closed = opened(SHALLOW + "schedule microbatches 1\n").closed({"dp": "2", "tp": "2", "zero": "1"}).text
    closed = comment + closed.replace("zero=1", "zero=1, m=2").replace("microbatches 1", "microbatches $m")
    text = with_open_sizes(Source("a.parc", closed, path=EXAMPLES / "a.parc"), EXAMPLES, 16, 8).text
    assert comment in text
    assert "let dp=?, tp=1 | 2 | 4 | 8, zero=0 | 1 | 2 | 3, m=1 | 2 | 4 | 8 | 16 | 32, again=none | blocks.*" in text


def test_lines_that_do_nothing_make_no_other_plan() -> None:
    plan = opened(DEEP)
    alone = {"dp": "1", "pp": "1", "tp": "2", "again": "none"}
    effects = {
        effect_of(plan.plan(alone | {"zero": zero, "schedule": schedule, "chunks": chunks}))
        for zero in ("0", "3") for schedule, chunks in (("1f1b", "1"), ("interleaved", "2"))
    }  # fmt: skip
    assert len(effects) == 1


@pytest.mark.parametrize(
    "pipe, tensor, schedule, chunks, zero, again",
    [
        ("4", "2", "1f1b", "1", "1", "none"),
        ("4", "1", "zbv", "2", "0", "none"),
        ("2", "2", "interleaved", "2", "2", "model.layers.*"),
        ("4", "2", "interleaved", "2", "0", "model.layers.*"),
        ("1", "2", "1f1b", "1", "3", "none"),
        ("2", "2", "async", "1", "1", "none"),
    ],
)
def test_an_estimate_of_a_structure_is_the_price_of_the_compiled_plan(
    pipe: str, tensor: str, schedule: str, chunks: str, zero: str, again: str
) -> None:
    text = DEEP if schedule != "async" else DEEP.replace("1f1b | zbv | interleaved", "async").replace("2 | 4", "2")
    plan, cluster = opened(text), find_cluster("h100-sxm")
    ranks = 16
    values = {"pp": pipe, "tp": tensor, "schedule": schedule, "chunks": chunks, "zero": zero, "again": again}
    choice = next(one for one in plan.choices(ranks) if {**values, **one} == {**one, **values})
    example = plan.example()[1]
    layers = counted_layers(example, EXAMPLES)
    assert layers is not None and (layers.number, layers.prefix) == (16, "model.layers")
    estimator = Estimator(plan, example, layers, cluster, keep_order=True)
    sizes = estimator.sizes_of(choice)
    assert estimator.misfit(sizes) is None
    (estimate,), rejections = estimator.estimates(estimator.key_of(choice, sizes), [(choice, sizes)])
    assert not rejections
    exact = ExactPrices(EXAMPLES, cluster).price(choice, plan.read(estimator.closed(estimate)), keep_order=True)
    assert isinstance(exact, PricedPlan)
    assert estimate.figures.seconds == pytest.approx(exact.figures.seconds, rel=0.02)
    memory, exactly = (figures.memory - figures.framework for figures in (estimate.figures, exact.figures))
    assert memory == pytest.approx(exactly, rel=0.03)


def test_estimates_count_the_buckets_of_each_size_of_the_weights() -> None:
    sizes = "layers=12, width=2048, heads=16, vocab=8192, length=128"
    text = SHALLOW.replace("layers=1, width=32, heads=2, vocab=64, length=8", sizes)
    text = text.replace("tp=1 | 2, zero=0 | 1", "tp=2 | 8, zero=1").replace("B=8, S=8", "B=64, S=128")
    text += "column blocks.*.attn.qkv over tp rows (3 h/tp d)\nrow blocks.*.attn.out over tp\n"
    text += "vocab embed, head over tp\n"
    plan, cluster = opened(text), find_cluster("h100-sxm")
    example, prices = plan.example()[1], ExactPrices(EXAMPLES, cluster)
    layers = counted_layers(example, EXAMPLES)
    assert layers is not None
    estimator = Estimator(plan, example, layers, cluster, keep_order=True)
    sized = [(choice, estimator.sizes_of(choice)) for choice in plan.choices(64)]
    estimates, _ = estimator.estimates(estimator.key_of(*sized[0]), sized)
    assert [one.choice["tp"] for one in estimates] == ["2", "8"]
    for one in estimates:
        exact = prices.price(one.choice, plan.read(estimator.closed(one)), keep_order=True)
        assert isinstance(exact, PricedPlan) and one.figures.seconds == pytest.approx(exact.figures.seconds, rel=0.01)


def test_structures_are_compiled_once_for_all_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(text: str, cluster: str) -> tuple[float, int]:
        plan = opened(text, pp="1", tp="1", m="1", schedule="1f1b", chunks="1", zero="1", again="none")
        example = plan.example()[1]
        layers = counted_layers(example, EXAMPLES)
        assert layers is not None
        estimator = Estimator(plan, example, layers, find_cluster(cluster), cache=BuildCache(tmp_path))
        (choice,) = plan.choices(8)
        sizes = estimator.sizes_of(choice)
        (estimate,), _ = estimator.estimates(estimator.key_of(choice, sizes), [(choice, sizes)])
        return estimate.figures.seconds, estimate.figures.memory

    seconds, memory = figures(DEEP, "h100-sxm")
    builds = {file.name for file in tmp_path.iterdir()}
    for at, file in enumerate(tmp_path.iterdir()):
        content = file.read_bytes()  # a disk was full, or wrote something else
        file.write_bytes(content[:-40] if at else content[:99] + bytes(99) + content[198:])
    assert figures(DEEP, "h100-sxm") == (seconds, memory)
    with monkeypatch.context() as without_compiler:
        without_compiler.setattr("parc.searching.estimates.compile_with", None)
        assert figures(DEEP, "h100-sxm") == (seconds, memory) and figures(DEEP, "a100-80")[0] > seconds
    wider = figures(DEEP.replace("ffn=1024", "ffn=2048"), "h100-sxm")
    assert wider[0] > seconds and wider[1] > memory and {file.name for file in tmp_path.iterdir()} > builds


def test_layers_are_counted_where_only_the_signature_says_how_many(tmp_path: Path) -> None:
    code = (EXAMPLES / "llama.py").read_text()
    assert "layers: int = 2," in code
    (tmp_path / "llama.py").write_text(code.replace("layers: int = 2,", "layers: int = 16,"))
    layers = counted_layers(opened(DEEP.replace("layers=16, ", "")).example()[1], tmp_path)
    assert layers is not None
    assert (layers.argument, layers.number, layers.prefix) == ("layers", 16, "model.layers")


def test_a_search_ends_in_plans_that_are_priced_from_their_own_programs() -> None:
    outcome = search(opened(SHALLOW), ExactPrices(EXAMPLES, find_cluster("h100-sxm")), 4)
    assert outcome.priced == 4 and not outcome.structures
    seconds = [one.figures.seconds for one in outcome.best]
    assert seconds == sorted(seconds) and all(one.step is not None for one in outcome.best)


def test_the_command_prints_the_best_and_writes_the_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpt.py").write_text((EXAMPLES / "gpt.py").read_text())
    (tmp_path / "open.parc").write_text(SHALLOW)
    words = ["plan", str(tmp_path / "open.parc"), "--ranks", "4", "--cluster", "h100-sxm"]
    best = tmp_path / "best.parc"
    assert main([*words, "-o", str(best), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["priced"] == 4 and found["best"][0]["step_s"] <= found["best"][-1]["step_s"]
    winner = read_plan(best)
    assert (
        winner.mesh.world == 4
        and winner.cluster is not None
        and best.read_text().startswith("# chosen by `parc plan` of 4 plans:")
    )
    assert main([*words, "-o", str(best)]) == 1 and "is there, and stays" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert main([*words, "-o", str(tmp_path / "other" / "best.parc")]) == 1
    assert f"write `-o {tmp_path / 'best.parc'}`" in capsys.readouterr().err  # the model's file is not there
    assert main(words[:2]) == 1 and "--cluster" in capsys.readouterr().err
    assert main([*words, "--batch", "32", "--top", "1"]) == 0
    assert "4 times that of the plan's text (8)" in capsys.readouterr().out
    assert main(["plan", f"{tmp_path / 'gpt.py'}:GPT"]) == 2 and "parc init" in capsys.readouterr().err
    assert main([*words[:2], *words[4:]]) == 2 and "--ranks" in capsys.readouterr().err
    assert main(["build", words[1], "-o", str(tmp_path / "built")]) == 1
    assert "`-D dp=2` closes it" in capsys.readouterr().err
    assert main(["check", "--static", words[1]]) == 0 and "open: `dp = ?`" in capsys.readouterr().err


def test_where_nothing_fits_the_nearest_misses_are_said() -> None:
    assert "4 have a mesh of another number of ranks than 3" in refused(SHALLOW.replace("dp=?", "dp=1"), 3)
    text = refused(SHALLOW, 32)
    assert "none of 4 choices is a plan that fits" in text and "are cut (" in text and "do not divide by dp=32" in text


def test_a_budget_that_none_keeps_names_the_choice_that_needs_least() -> None:
    text = refused(SHALLOW + "budget memory 1KB\n")
    assert "4 are cut (budget): needs" in text and "with tp=2 zero=1 dp=2" in text


def test_an_error_that_all_choices_share_is_said_as_it_is() -> None:
    text = refused(SHALLOW.replace("gpt.py:GPT", "gpt.py:GPX"))
    assert "error[P0201]" in text and "has no `GPX`" in text and "no choice of the open names" in text


def test_on_one_stage_the_schedule_and_its_chunks_make_no_other_plan() -> None:
    plan = opened(DEEP)
    example = plan.example()[1]
    layers = counted_layers(example, EXAMPLES)
    assert layers is not None
    estimator = Estimator(plan, example, layers, find_cluster("h100-sxm"))
    alone = [one for one in plan.choices(16) if (one["pp"], one["tp"], one["zero"]) == ("1", "2", "0")]
    assert len(alone) > 6 and len({estimator.sizes_of(one) for one in alone}) == 1


def test_axes_that_an_included_file_adds_count_as_ranks(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text((EXAMPLES / "gpt.py").read_text())
    (tmp_path / "more.parc").write_text("let tp=1\nmesh tp=$tp\ncolumn blocks.*.mlp.up over tp\n")
    text = SHALLOW.replace("mesh dp=$dp, tp=$tp", "mesh dp=$dp").replace("column blocks.*.mlp.up over tp\n", "")
    text = text.replace("row blocks.*.mlp.down over tp", 'include "more.parc" (tp=$tp)')
    plan = read_open(Source("open.parc", text, path=tmp_path / "open.parc"), {})
    outcome = search(plan, ExactPrices(tmp_path, find_cluster("h100-sxm")), 4)
    assert {one.plan.mesh.world for one in outcome.best} == {4} and outcome.cut["ranks"] == 2


def test_a_search_that_is_interrupted_keeps_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = opened(DEEP, pp="4", tp="2", again="none")

    def stopped(estimator: Estimator, structures: Mapping[StructureKey, list[SizedChoice]]) -> Iterator[object]:
        key, members = next(iter(structures.items()))
        yield len(members), *estimator.estimates(key, members)
        raise KeyboardInterrupt

    monkeypatch.setattr("parc.searching.search.each_structure", stopped)
    outcome = search(plan, ExactPrices(EXAMPLES, find_cluster("h100-sxm")), 16, top=1)
    assert outcome.stopped and len(outcome.best) == 1


def test_what_may_not_be_open_is_said_with_both_lines() -> None:
    with pytest.raises(PlanError) as raised:
        opened(SHALLOW.replace("B=8", "B=$dp"))
    assert "`--batch N`" in render(raised.value.diagnostics[0])
    assert opened(SHALLOW.replace("B=8", "B=$dp"), batch=8).lets
    with pytest.raises(PlanError, match="twice among"):
        opened(SHALLOW.replace("tp=1 | 2", "tp=1 | 1"))
    many = ", ".join(f"x{at}={' | '.join(map(str, range(1, 9)))}" for at in range(7))
    assert "combinations of values" in refused(f"let {many}\n" + SHALLOW.lstrip())
