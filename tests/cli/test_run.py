"""Real runs of two gloo processes: metrics, checkpoints, torchrun, and ranks that fail."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as agent

import parc
from parc.cli import main
from parc.grammar.scratch import line_held
from parc.runtime.launch.voices import VOICES
from parc.runtime.observe.writers import MetricsFile
from parc.runtime.ranks.faults import writing
from tests.runtime.forked import Forked, forked_ranks
from tests.runtime.tiny import DATA, FLAT, ONE, TENSOR, build, profiled

SAMPLES = """
import os
import pathlib
import resource
import signal
import time
import torch


def good(number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 256, (8,), generator=generator)
    return {"tokens": tokens, "targets": tokens}


def killed(number):
    if number >= 12 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return good(number)


def stops(number):
    if number >= 12 and os.environ["RANK"] == "1":
        pathlib.Path(__file__).with_name("stops").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return good(number)


def sleeps(number):
    if number >= 12 and os.environ["RANK"] == "1":
        pathlib.Path(__file__).with_name("sleeps").touch()
        time.sleep(1000)
    return good(number)


def fails(number):
    if number == 23 and os.environ["RANK"] == "1":
        raise LookupError("the shelf is empty")
    return good(number)


def large(number):
    bytes([1]) * (64 << 20)
    with open(pathlib.Path(__file__).with_name("faults"), "a") as file:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt, file=file)
    return good(number)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with builds of one model: over dp=2, over tp=2, and of one rank."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "samples.py").write_text(SAMPLES)
    build(folder, DATA, name="dp")
    build(folder, TENSOR, name="tp")
    build(folder, ONE, name="one")
    return folder


def environment() -> dict[str, str]:
    """Return this process's environment without variables by which a command would take itself for a rank."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def run(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Run a command in this process, and return the exit code and stderr, also of its ranks, which are forked; stdout
    is empty."""
    capfd.readouterr()
    with forked_ranks():
        code = main(["run", *map(str, words)])
    out, err = capfd.readouterr()
    assert out == ""
    return code, err


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the steps in a metrics file."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if "step" in line]


def test_a_run_its_checkpoint_and_another_plan_that_goes_on(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint"
    trace, profile = tmp_path / "trace.json", tmp_path / "profile"
    options = "--metrics", metrics, "--trace", trace, "--profile", profile, "--save", checkpoint, "--save-every", 1
    code, err = run(capfd, folder / "tp", "--steps", 2, *options)
    assert code == 0, err
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    actions = ["0COUNT0", "0COUNT1", "0SCALE", "0F0", "0B0", "0F1", "0B1", "0LOSS", "0REDUCE", "0STEP"]
    for rank in (0, 1):
        assert [span["name"] for span in spans if span["pid"] == rank] == 2 * actions
    first_line, second, last = err.splitlines()
    assert (
        first_line.startswith("step 1/2  loss 5.") and second.startswith("step 2/2") and "a profile of step 2" in last
    )
    for rank in (0, 1):  # the line of the plan is the range's last word
        ranges = [event["name"] for event in profiled(profile / f"rank{rank}.json.gz") if " | " in event["name"]]
        assert {name.split()[-1] for name in ranges if "mlp_up_addmm = aten.addmm" in name} == {"plan:16"}
    code, err = run(capfd, folder / "dp", "--steps", 4, "--metrics", metrics, "--resume", checkpoint)
    assert code == 0, err
    begin, first, *_ = map(json.loads, metrics.read_text().splitlines())
    assert begin["run"]["mesh"] == {"tp": 2} and begin["run"]["start"] == 0
    usual = {"step", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "model_flops_per_s", "peak_bytes"}
    assert set(first) == usual | {"data_wait", "rank_wait"}
    assert all(0 < share < 1 for waits in ("data_wait", "rank_wait") for share in first[waits])
    assert first["tokens"] == 64 and len(first["peak_bytes"]) == 2 and first["lr"] == 1e-2
    plain = parc.reference(folder / "dp")
    for found, expected in zip(steps_of(metrics), [plain.step() for _ in range(4)], strict=True):
        assert found["step"] == expected.step
        assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
    plain.close()


def test_a_run_with_nothing_left_to_train_says_so_before_any_check(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    assert main(["run", str(folder / "one"), "--steps", "2", "--save", str(checkpoint)]) == 0
    monkeypatch.setattr("parc.runtime.compare.first_check.first_check", lambda *_, **__: pytest.fail("a first check"))
    for last in (1, 2):
        capsys.readouterr()
        assert main(["run", str(folder / "one"), "--steps", str(last), "--resume", str(checkpoint)]) == 0
        said = f"`{checkpoint}` is at step 2, and the last step is {last}: there is nothing left to train"
        assert capsys.readouterr().err == f"{said}; `--steps K` trains until step K\n"


def test_steps_after_the_rates_fall_are_announced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = str(build(folder, ONE, FLAT.replace("lr 1e-2", "lr cosine 1e-2 to 1e-4"), name="falls"))
    for steps, announced in ((3, False), (4, True)):
        capsys.readouterr()
        assert main(["run", made, "--steps", str(steps)]) == 0
        said = (
            "the learning rate falls to 0.0001 at step 3 and stays there; with `over 4` in the plan's `optimizer` line"
        )
        assert capsys.readouterr().err.startswith(said) == announced


def test_a_padded_plan_goes_on_from_its_own_checkpoint_and_so_does_an_unpadded_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = FLAT.replace("vocab=256", "vocab=257")
    padded = build(tmp_path, TENSOR.replace("head over tp", "head over tp pad"), odd, "padded")
    one, checkpoint = build(tmp_path, ONE, odd, "one"), tmp_path / "checkpoint"
    losses: list[Any] = []
    for made, words in ((padded, ("--save", checkpoint)), (padded, ()), (one, ())):
        metrics = tmp_path / f"{len(losses)}.jsonl"
        steps = ("--steps", 1, *words) if words else ("--steps", 2, "--resume", checkpoint)
        code, err = run(capfd, made, *steps, "--metrics", metrics)
        assert code == 0, err
        losses += [(step["step"], step["loss"]) for step in steps_of(metrics)]
    plain = parc.reference(one)
    expected = [(report.step, pytest.approx(report.loss, rel=1e-5)) for report in (plain.step(), plain.step())]
    plain.close()
    assert losses == [*expected, expected[1]]
    code, err = run(capfd, build(tmp_path, ONE, name="even"), "--steps", 2, "--resume", checkpoint)
    assert code == 1 and "`embed.weight` is [257, 16] there and [256, 16] in the model" in err


def test_a_run_that_torchrun_started(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The agent of torchrun is in this process, and its ranks are forked."""
    metrics = tmp_path / "metrics.jsonl"

    def torchrun(ranks: int, *words: object) -> None:
        with forked_ranks():
            agent(["--standalone", "--nproc-per-node", str(ranks), "-m", "parc", "run", *map(str, words)])

    torchrun(2, folder / "dp", "--steps", 2, "--metrics", metrics)
    assert len(steps_of(metrics)) == 2
    for ranks, processes in ((1, "1 process"), (3, "3 processes")):
        said = f"error[P0301]: {processes} for a mesh of dp=2, which has 2 ranks\n{{}}help: start 2: "
        with pytest.raises(ChildFailedError) as failed:
            torchrun(ranks, folder / "dp")
        assert capfd.readouterr().err.count(said.format("")) == 1, "said once a host"
        assert f"traceback : {said.format('  ')}" in str(failed.value)


def two_hosts(folder: Path, *commands: tuple[object, ...], launched: bool = False) -> list[tuple[int | None, str]]:
    """Return the exit codes of two ranks and what each printed. Each is the first of its host, as torchrun starts it
    there, or with ``launched`` as ``parc run --nnodes 2`` does. ``folder`` gets the files of both."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes, texts = [], [folder / f"host{rank}" / "err" for rank in (0, 1)]
    with ExitStack() as launchers:
        for rank, words in enumerate(commands):
            texts[rank].parent.mkdir(parents=True)
            env = {**environment(), **place, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            if launched:
                env[VOICES] = str(texts[rank].parent)
                launchers.enter_context(line_held(texts[rank].parent))
            with open(texts[rank], "w") as err:
                command = [sys.executable, "-m", "parc", "run", *map(str, words)]
                processes.append(Forked(command, env, stderr=err.fileno()))
        return [(process.wait(90), text.read_text()) for process, text in zip(processes, texts, strict=True)]


def test_memory_that_a_rank_alone_frees_stays_with_its_process(folder: Path, tmp_path: Path) -> None:
    """The kernel would give it again page by page, in each step."""
    built = build(folder, ONE, FLAT.replace('bytes "*.py"', '"./samples.py:large" ()'), name="large")
    command = [sys.executable, "-m", "parc", "run", str(built), "--steps", "1", "--no-first-check"]
    env = {name: value for name, value in environment().items() if not name.startswith("MALLOC_")}
    with open(tmp_path / "err", "w") as err:
        assert Forked(command, env, stderr=err.fileno()).wait(60) == 0, (tmp_path / "err").read_text()
    faults = [*map(int, (folder / "faults").read_text().split())]
    assert len(faults) >= 8
    assert faults[7] - faults[1] < (64 << 20) / os.sysconf("SC_PAGE_SIZE"), "the first of 64 MiB alone is new"


def test_two_hosts_with_other_builds_or_options_are_told_so_at_once(folder: Path, tmp_path: Path) -> None:
    other = build(folder, DATA, FLAT.replace("seed      3", "seed 4"), name="seed")
    text = (
        "error[P0417]: rank 1 runs another build than rank 0\n"
        " = note: the plan has `seed 4` on rank 1, and `seed 3` on rank 0\n"
        "help: build the plan once, and copy the folder to every host, or name one that all hosts share:"
        f" `{folder / 'dp'}`\n"
    )
    assert two_hosts(tmp_path / "builds", (folder / "dp",), (other,)) == [(1, text)] * 2
    text = (
        "error[P0417]: `--steps` is 3 on rank 1, and 2 on rank 0\n"
        " = note: `--save` is given on rank 1, and not given on rank 0\n"
        "help: start every rank with the same options\n"
    )
    saves = folder / "dp", "--save", tmp_path / "saved"
    assert two_hosts(tmp_path / "options", (folder / "dp", "--steps", 2), saves) == [(1, text)] * 2
    assert not (tmp_path / "saved").exists()


def test_ranks_of_two_hosts_save_to_one_folder(folder: Path, tmp_path: Path) -> None:
    saves = folder / "dp", "--steps", 1, "--save", tmp_path / "saved"
    hosts = two_hosts(tmp_path, saves, saves, launched=True)
    assert [code for code, _ in hosts] == [0, 0], hosts
    assert json.loads((tmp_path / "saved" / "state.json").read_text())["step"] == 1
    assert all((tmp_path / f"host{rank}" / "began").exists() for rank in (0, 1)), "each launcher knows that it trains"


@pytest.mark.parametrize(
    ("data", "code", "expected"),
    [
        ("killed", 4, ["rank 1 failed: it was killed by SIGKILL, often because memory ran out"]),
        ("fails", 1, ["error[P0303]: step 3: making sample 23 failed: LookupError: the shelf is empty"]),
    ],
)
def test_a_rank_that_fails_is_said_once(
    folder: Path, capfd: pytest.CaptureFixture[str], data: str, code: int, expected: list[str]
) -> None:
    made = build(folder, DATA, FLAT.replace('bytes "*.py"', f'"./samples.py:{data}" ()'), name=data)
    found, err = run(capfd, made, "--steps", 5, "--save", folder / f"{data}-saved", "--save-every", 1)
    assert found == code, err
    assert all(err.count(text) == 1 for text in expected), err
    saved = re.search(
        r"-saved` has step 1: `--resume \S+` goes on from there|nothing was saved to `", err
    )  # it is read ahead
    assert (saved is not None) == (data == "killed"), err
    assert "Traceback" not in err and "torch.distributed" not in err, err


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        ("stops", 4, ["rank 0 failed: it waited too long for another rank",
                      r"^rank 1 does not answer: process \d+ is stopped \(SIGSTOP\)$"]),
        ("sleeps", 1, [r"^error\[P0303\]: step \d: the data was not read within \d s$",
                       r"^ = note: it is at \S+/samples\.py:\d+ in sleeps$", "^ = note: so it is on rank 1$"]),
    ],
)  # fmt: skip
def test_a_rank_that_does_not_answer_is_named_at_once(
    folder: Path, data: str, code: int, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    made = build(folder, DATA, FLAT.replace('bytes "*.py"', f'"./samples.py:{data}" ()'), name=f"{data}-build")
    got, err = run(capfd, made, "--steps", 5, "--timeout", 4)
    waited = time.time() - (folder / data).stat().st_mtime
    assert got == code and all(re.search(text, err, re.MULTILINE) for text in said), err
    assert waited < 30, "torch's agent alone waits so long for a rank that it ends"


def test_numbers_that_are_not_finite_stop_a_run_and_the_last_good_ones_are_saved(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made, checkpoint = build(folder, TENSOR, FLAT.replace("lr 1e-2", "lr 1e30"), name="steep"), tmp_path / "good"
    code, err = run(capfd, made, "--steps", 5, "--save", checkpoint)
    assert code == 4, err
    assert f"note: the state after step 1 was saved to {checkpoint}" in err
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert err.count("error[P0302]: step 2: ") == 1 and "note: the first is " in err and "nothing was updated" in err


def test_a_disk_that_is_full_ends_metrics_and_no_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = MetricsFile.step

    def filling(metrics: MetricsFile, number: int, loss: float, **figures: object) -> None:
        with writing(Path("m.jsonl")):
            if number == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            step(metrics, number, loss, **figures)

    monkeypatch.setattr(MetricsFile, "step", filling)
    words = ["run", str(folder / "one"), "--steps", "3"]
    assert main([*words, "--metrics", str(tmp_path / "m.jsonl"), "--save", str(tmp_path / "kept")]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert (
        "`m.jsonl` cannot be written: no space left on device; the metrics end at step 1, the training goes on" in err
    )
    assert len(steps_of(tmp_path / "m.jsonl")) == 1
    assert json.loads((tmp_path / "kept" / "state.json").read_text())["step"] == 3
    (tmp_path / "file").write_text("")
    for option in ("--metrics", "--trace"):
        assert main([*words, option, str(tmp_path / "file" / "out")]) == 1
        assert "error[P0412]" in capsys.readouterr().err


def test_a_plan_is_built_and_run(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = folder / "alone.parc"
    plan.write_text(FLAT)
    monkeypatch.chdir(tmp_path)
    code, err = run(capfd, plan, "--steps", 1)
    assert code == 0, err
    assert "built alone.parc.build" in err and (tmp_path / "alone.parc.build" / "manifest.json").is_file()
