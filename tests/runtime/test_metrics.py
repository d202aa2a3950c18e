"""The figures of a run: the places that they are written to, the display on a terminal, and calls after steps."""

import io
import json
import re
import resource
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import parc
from parc.compiler.analysis.flops import product_type, step_flops
from parc.compiler.build.build import Build
from parc.grammar.codes import UNWRITTEN
from parc.runtime.observe.observer import Meter, Observe, Observer, ProgressDisplay, peak_flops, work_per_step
from parc.runtime.observe.writers import FigurePlaces, FiguresWriter, MetricsFile, TensorBoard, WandB
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.opening import open_build
from tests.runtime.tiny import ONE, PLAN, TENSOR, batch, build


def lines(path: Path) -> list[dict[str, object]]:
    """Return the file's lines, each parsed by itself."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_line_then_a_line_a_step_each_flushed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with closing(MetricsFile(path, {"mesh": {"dp": 2}, "torch": "2.13"})) as metrics:
        assert lines(path) == [{"run": {"mesh": {"dp": 2}, "torch": "2.13"}}]
        metrics.step(1, 5.5, tokens=8192, step_s=0.5, peak_bytes=[1, 2])
        assert lines(path)[1] == {"step": 1, "loss": 5.5, "tokens": 8192, "step_s": 0.5, "peak_bytes": [1, 2]}
        metrics.step(2, float("nan"), grad_norm=float("inf"))
    assert lines(path)[2] == {"step": 2, "loss": None, "grad_norm": None}


def test_a_disk_without_room_for_a_line_keeps_none_of_it(tmp_path: Path) -> None:
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(MetricsFile(path, {})) as metrics:
        metrics.step(1, 1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
        try:
            with pytest.raises(RunError, match="cannot be written: file too large"):
                metrics.step(2, 2.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [list(line) for line in lines(path)] == [["run"], ["step", "loss"]]


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for append in (False, True):
        with closing(MetricsFile(path, {}, append=append)) as metrics:
            metrics.step(1, 1.0)
    assert [list(line) for line in lines(path)] == [["run"], ["step", "loss"]] * 2
    MetricsFile(path, {}).close()
    assert lines(path) == [{"run": {}}]


def shown(console: Console, every_s: float) -> str:
    """Return the text that ten steps leave on a console."""
    with ProgressDisplay(10, "tokens", every_s, console) as progress:
        for step in range(1, 11):
            progress.step(step, 5.0 - step / 10, 1000, step_s=0.25)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    few = shown(Console(file=io.StringIO(), force_terminal=False, width=40), every_s=1000)
    assert few.splitlines() == [
        "step 1/10  loss 4.9000  4,000 tokens/s  0.250 s/step",
        "step 10/10  loss 4.0000  4,000 tokens/s  0.250 s/step",
    ]
    assert len(shown(Console(file=io.StringIO(), force_terminal=False), every_s=0).splitlines()) == 10


def test_on_a_terminal_there_is_a_bar() -> None:
    bar = shown(Console(file=io.StringIO(), force_terminal=True, width=120), every_s=0)
    assert "10/10" in bar and "loss 4.0000" in bar and "4,000 tokens/s" in bar


def test_a_bar_on_another_node_says_which() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with ProgressDisplay(1, console=console, node=3) as progress:
        progress.step(1, 2.0, 1000, 0.5, mfu=0.412)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "node 3: step 1/1  loss 2.0000  2,000 tokens/s  0.500 s/step  MFU 41.2%\n"


def test_words_are_shown_as_they_are() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with ProgressDisplay(1, console=console) as progress:
        progress.say("saved to [bold]out[/x] :smile:")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "saved to [bold]out[/x] :smile:\n"


class Lost(FiguresWriter):
    """A place that fails at a step, at its end, or not at all, and notes how it was closed."""

    note = ""

    def __init__(self, step: int = 0, close: bool = False) -> None:
        self._step, self._close = step, close
        self.closed: list[bool] = []

    def step(self, step: int, loss: float, **figures: Any) -> None:
        if step == self._step:
            raise RunError(UNWRITTEN, "the curves are lost")

    def close(self, failed: bool = False) -> None:
        self.closed.append(failed)
        if self._close:
            raise RunError(UNWRITTEN, "the rest is lost")


@pytest.mark.parametrize("broken", [False, True], ids=["a run that ends", "a run that fails"])
def test_figures_that_cannot_be_written_end_no_run_and_hide_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: bool
) -> None:
    writers = [Lost(step=1, close=True), Lost(close=True), Lost()]
    monkeypatch.setattr(FigurePlaces, "open", lambda *_: iter(writers))
    with parc.load(build(tmp_path, ONE), "cpu") as session:
        ending = pytest.raises(LookupError, match="the data end") if broken else nullcontext()
        with ending, Observer(session, Observe(), 2, {}, False) as observer:
            report = observer.step()
            observer.note(report, [observer.row(report)])
            if broken:
                raise LookupError("the data end")
    assert [writer.closed for writer in writers] == [[True], [broken], [broken]]
    told, _, last = capsys.readouterr().err.splitlines()
    assert told == "the curves are lost; the metrics end at step 0, the training goes on"
    assert last == "the rest is lost; the last of the metrics may be missing there"


def test_tensorboard_has_a_curve_for_each_number_and_a_resumed_run_hides_what_it_does_again(tmp_path: Path) -> None:
    for append, steps in ((False, (1, 2, 3)), (True, (2, 3))):
        writer = TensorBoard(tmp_path, {"start": 1 if append else 0, "mesh": {"dp": 2}}, append)
        for step in steps:
            writer.step(step, 5.0 - step - append, lr=0.1, peak_bytes=[7, 9], loads={"moe": [1, 2]})
        writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [(1, 4.0), (2, 2.0), (3, 1.0)]
    assert sorted(events.Tags()["scalars"]) == [
        "loss",
        "lr",
        *(f"peak_bytes/{of}" for of in ("most", "rank 0", "rank 1")),
    ]
    assert [events.Scalars(f"peak_bytes/{of}")[0].value for of in ("most", "rank 1", "rank 0")] == [9, 9, 7]


def test_a_writer_of_weights_and_biases_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, ends = object.__new__(WandB), list[int]()

    class Run:
        def log(self, *_: object, **__: object) -> None:
            raise ConnectionResetError("Connection lost")

        def finish(self, exit_code: int) -> None:
            ends.append(exit_code)
            raise ConnectionResetError("Connection lost")

    writer._run = Run()
    with pytest.raises(RunError, match="`wandb` keeps no figures: Connection lost"):
        writer.step(1, 2.0)
    for failed in (False, True):
        with pytest.raises(RunError, match="`wandb` does not finish its run: Connection lost"):
            writer.close(failed)
    assert ends == [0, 1]


def test_weights_and_biases_are_kept_and_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "")
    writer = WandB("project", {"start": 0})
    writer.step(1, 2.5, peak_bytes=[7, 9])
    writer.close()
    found = re.fullmatch(r"the figures are kept in (wandb/offline-run-\S+): `wandb sync \1` sends them", writer.note)
    assert found is not None and capfd.readouterr() == ("", "")
    (kept,) = (tmp_path / found[1]).glob("*.wandb")
    assert all(word in kept.read_bytes() for word in (b"project", b"loss", b"2.5", b"peak_bytes/rank 1"))


def flops_of(build: Build) -> int:
    """Return the floating-point operations of a build's step."""
    return step_flops(build.reference, build.microbatches)


def test_the_operations_of_a_model_are_the_same_under_any_plan_and_follow_from_its_sizes(tmp_path: Path) -> None:
    one, split = (open_build(build(tmp_path, lines, PLAN, f"made{at}")) for at, lines in enumerate((ONE, TENSOR)))
    tokens, layers, width, vocab, length = 64, 2, 16, 256, 8
    weights = layers * 12 * width**2 + vocab * width
    scores = layers * 2 * length * width  # for each token
    assert flops_of(one) == flops_of(split) == 6 * tokens * (weights + scores)
    frozen = open_build(build(tmp_path, ONE, PLAN + "freeze blocks.**\n", "frozen"))
    assert flops_of(one) - flops_of(frozen) == 2 * tokens * layers * 12 * width**2
    narrow = open_build(build(tmp_path, TENSOR, PLAN + "precision bf16\n", "narrow"))
    types = [type_.dtype for made in (one, narrow) if (type_ := product_type(made.programs.values())) is not None]
    assert types == [torch.float32, torch.bfloat16]


def test_peaks_are_known_by_the_name_of_a_device() -> None:
    assert peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_flops("NVIDIA H200", torch.float16) == 989e12
    assert peak_flops("NVIDIA H200", torch.float32) is peak_flops("Voodoo 2", torch.bfloat16) is None


def test_calls_after_steps_and_the_figures_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    with parc.load(build(tmp_path, ONE), "cpu") as session:
        meter, calls = Meter(session, peak=1e9), list[tuple[str, int]]()
        session.on_step(lambda report: calls.append(("first", report.step)))
        session.on_step(lambda report: calls.append(("second", report.step)))
        session.step(batch(0))
        result = session.gradients(batch(1))
        assert calls == [("first", 1), ("second", 1)]
        report = session.update(result)
        assert calls[2:] == [("first", 2), ("second", 2)]
        assert report.seconds > report.waited_for_data + report.waited_for_ranks >= report.waited_for_ranks == 0
        figures = meter.figures(report, 0.5, session.exchange(meter.row(report)) * 3)
        assert figures["mfu"] == figures["model_flops_per_s"] / 1e9 == flops_of(session.build) / 0.5e9
        assert figures["tokens_per_s"] == 128 and len(figures["peak_bytes"]) == 3

        def fails(report: object) -> None:
            raise LookupError("the board is down")

        session.on_step(fails)
        with pytest.raises(LookupError, match="the board is down"):
            session.step(batch(2))
        assert session.step_number == 3 and calls[-1] == ("second", 3)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ({"dims": ["B", "S"], "dtype": "int64"}, ("tokens", 64)),
        ({"dims": ["B", 3, "S"], "dtype": "uint8"}, ("samples", 8)),
        ({"dims": ["B", "S"], "dtype": "float32"}, ("samples", 8)),
        ({"dims": ["B"], "dtype": "int64"}, ("samples", 8)),
    ],
)
def test_tokens_are_counted_of_text_alone(tmp_path: Path, first: dict[str, Any], expected: tuple[str, int]) -> None:
    opened = open_build(build(tmp_path, ONE))
    assert work_per_step(replace(opened, manifest={**opened.manifest, "inputs": [first]})) == expected
