"""Datasets in a loop of one's own and in a plan: ranks' parts, epochs, the last smaller batch, going on elsewhere."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import parc
from parc.grammar.codes import BAD_DATA
from parc.runtime.data import feed, reading
from parc.runtime.data.reading import Closing, RowReader, in_thread
from parc.runtime.launch.load import dataloader
from parc.runtime.ranks.faults import RunError
from parc.runtime.state.checkpoint import read_checkpoint
from tests.runtime.ranks import SERVER, run_ranks, start_server
from tests.runtime.tiny import DATA, ONE, PLAN, build

CALM = PLAN.replace("dropout=0.1", "dropout=0.0")
SAMPLES = """
import torch
from torch.utils.data import TensorDataset


def rows(count=21):
    tokens = torch.arange(count)[:, None] + torch.arange(8)
    return TensorDataset(tokens, (tokens + 1) % 256)

"""
ASKED = """
import threading
import time
import torch

HELD = threading.Lock()


def sample(number):
    if not HELD.acquire(blocking=False):
        raise LookupError("two threads ask at once")
    time.sleep(0.01)
    HELD.release()
    return {"tokens": torch.arange(8), "targets": torch.arange(8)}
"""
WITH_DATASET = CALM.replace('bytes "*.py"', 'dataset "./samples.py:rows" (count=40) shuffle split 0.1')


def dataset(count: int = 21) -> TensorDataset:
    """Return samples whose first token is their number."""
    tokens = torch.arange(count)[:, None] + torch.arange(8)
    return TensorDataset(tokens, (tokens + 1) % 256)


def rows_of(count: int) -> list[tuple[Tensor, ...]]:
    """Return the samples as a list."""
    return [dataset(count)[number] for number in range(count)]


def numbers(batch: dict[str, Tensor]) -> list[int]:
    """Return the numbers of the samples of a batch that have targets."""
    return [int(tokens[0]) for tokens, targets in zip(*batch.values(), strict=True) if int(targets[0]) != -100]


def epochs(path: str, saved: str) -> dict[str, Any]:
    """Train two epochs on this rank's samples, and save in the second, after two batches."""
    with parc.load(path) as session:
        loader = dataloader(session, dataset(), shuffle=True)
        seen: list[list[int]] = []
        losses = []
        for epoch in range(2):
            assert loader.epoch == epoch
            for batch in loader:
                seen.append(numbers(batch))
                losses.append(session.step(local=batch).loss)
                if len(seen) == 5:
                    session.save(saved)
        whole = {name: torch.stack([row[at] for row in rows_of(8)]) for at, name in enumerate(("tokens", "targets"))}
        rank, world = session.coordinates.get("dp", 0), session.mesh.world
        named: Any = [dict(zip(whole, row, strict=True)) for row in rows_of(8)]
        plain = DataLoader(named, batch_size=8 // world, sampler=DistributedSampler(named, world, rank))
        (part,) = plain
        same = float(session.gradients(local=part).loss), float(session.gradients(whole).loss)
        said = []
        for unlike in ({"seed": session.rank}, {"shuffle": session.rank == 1}, {}) if world > 1 else ():
            alone = dataset(21 + (session.rank if not unlike else 0))
            with pytest.raises(parc.RunError) as error:
                next(iter(dataloader(session, alone, name=str(unlike.keys()), **unlike)))
            said.append(str(error.value))
    return {"seen": seen, "losses": losses, "length": len(loader), "same": same, "said": said}


def test_every_sample_comes_once_an_epoch_on_any_mesh_and_a_run_goes_on_anywhere(tmp_path: Path) -> None:
    one, two = build(tmp_path, ONE, CALM, "one"), build(tmp_path, DATA, CALM, "two")
    alone = epochs(str(one), str(tmp_path / "alone"))
    ranks = run_ranks(epochs, 2, str(two), str(tmp_path / "ranks"))
    assert alone["length"] == 3 and [len(batch) for batch in alone["seen"]] == [8, 8, 5] * 2
    for epoch in (alone["seen"][:3], alone["seen"][3:]):
        assert sorted(number for batch in epoch for number in batch) == list(range(21))
    assert alone["seen"][:3] != alone["seen"][3:]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["same"][0] == pytest.approx(rank["same"][1], rel=1e-6)
        seed, shuffled, longer = rank["said"]
        unlike = (
            "[P0410] `parc.dataloader` has another `{}` on rank 1 than on rank 0: rank 0 has {} and rank 1 has {}; "
        )
        assert seed.startswith(unlike.format("seed", 0, 1))
        assert shuffled.startswith(unlike.format("shuffle", False, True))
        assert longer.startswith("[P0410] `parc.dataloader` has a dataset of another length on rank 1 than on rank 0: ")
    for whole, *parts in zip(alone["seen"], *(rank["seen"] for rank in ranks), strict=True):
        assert sorted(whole) == sorted(number for part in parts for number in part)
    with parc.load(one) as session:
        loader = dataloader(session, dataset(), shuffle=True)
        session.restore(tmp_path / "ranks")
        (last,) = list(loader)
        assert numbers(last) == alone["seen"][5] and loader.epoch == 2
        assert session.step(local=last).loss == pytest.approx(alone["losses"][5], rel=1e-5)


MASKED = """
from gpt import GPT


class Masked(GPT):
    def forward(self, tokens, attention_mask=None):
        return super().forward(tokens)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_entry_that_forward_takes_and_the_plan_leaves_out_is_warned_of_once(workers: int, tmp_path: Path) -> None:
    (tmp_path / "masked.py").write_text(MASKED)
    path = build(tmp_path, ONE, CALM.replace("gpt.py:GPT", "masked.py:Masked"))
    rows = [
        {"tokens": one, "targets": other, "attention_mask": torch.ones(8), "text": "a"} for one, other in rows_of(16)
    ]
    with parc.load(path) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = dataloader(session, rows, workers=workers)
        assert [len(batch["tokens"]) for batch in (*loader, *loader)] == [8] * 4
        plain: Any = [{name: row[name] for name in ("tokens", "targets")} for row in rows]
        assert len(list(dataloader(session, plain, workers=workers, name="plain"))) == 2
    (one,) = [str(one.message) for one in caught if one.category is UserWarning]
    assert one.startswith("`attention_mask` of the dataset is left out: the model's forward takes it, and no `input`")


def test_a_plan_with_a_dataset_goes_on_where_it_was_under_another_batch_and_mesh(tmp_path: Path) -> None:
    (tmp_path / "samples.py").write_text(SAMPLES)
    first = build(tmp_path, ONE, WITH_DATASET, "first")
    halved = WITH_DATASET.replace("B=8", "B=4").replace("microbatches 2", "microbatches 1")
    other = build(tmp_path, DATA.replace("dp=2", "dp=1"), halved, "other")
    with parc.load(first) as session:
        order = [int(row[0]) for step in range(5) for part in session.feed.next(step) for row in part["tokens"]]
        session.step()
        session.save(tmp_path / "saved")
    assert sorted(order[:36]) == [number for number in range(40) if number % 10 != 9]
    with parc.load(other) as session:
        session.restore(tmp_path / "saved")
        (part,) = session.feed.next(session.step_number)
        assert part["tokens"][:, 0].tolist() == order[8:12]
        session.step()
        session.save(tmp_path / "later")
    with parc.load(first) as session:
        session.restore(tmp_path / "later")
        parts = session.feed.next(session.step_number)
        assert [int(row[0]) for part in parts for row in part["tokens"]] == order[12:20]


def test_a_rest_that_another_batch_leaves_of_an_epoch_is_completed_not_filled_from_the_next(tmp_path: Path) -> None:
    halved = CALM.replace("B=8", "B=4").replace("microbatches 2", "microbatches 1")
    with parc.load(build(tmp_path, ONE, halved, "four")) as session:
        session.step(local=next(iter(dataloader(session, dataset(16)))))
        session.save(tmp_path / "saved")
    with parc.load(build(tmp_path, ONE, CALM, "eight")) as session:
        session.restore(tmp_path / "saved")
        loader = dataloader(session, dataset(16))
        assert [numbers(batch) for batch in loader] == [[*range(4, 12)], [*range(12, 16)]]
        assert loader.epoch == 1 and [len(numbers(batch)) for batch in loader] == [8, 8]


def ranged(path: str) -> tuple[list[list[int]], list[int], float]:
    """Read an epoch that ends with half a batch, and return this rank's numbers and rows, and the last loss."""
    with parc.load(path) as session:
        batches = list(dataloader(session, dataset(12)))
        *_, last = (session.step(local=batch).loss for batch in batches)
        return [numbers(batch) for batch in batches], [len(batch["tokens"]) for batch in batches], last


def test_a_last_batch_has_its_own_size_where_the_plan_has_a_range_for_it(tmp_path: Path) -> None:
    plan = CALM.replace("B=8", "B=4..8 by 4")
    seen = run_ranks(ranged, 2, str(build(tmp_path, DATA, plan)))
    assert [rows for _, rows, _ in seen] == [[4, 2], [4, 2]]
    assert sorted(number for read, _, _ in seen for number in read[1]) == [8, 9, 10, 11]
    with parc.load(build(tmp_path, ONE, plan, "one")) as session:
        first, last, rest = ({"tokens": t, "targets": y} for t, y in map(dataset(15).__getitem__, (
            slice(8), slice(8, 12), slice(12, 15))))  # fmt: skip
        session.step(first)
        assert [loss for _, _, loss in seen] == pytest.approx([session.step(last).loss] * 2, rel=1e-5)
        (*_, completed) = dataloader(session, dataset(11))  # of three samples there is no size
        assert len(completed["tokens"]) == 8 and len(numbers(completed)) == len(rest["tokens"])


class HalfUnreadable(list[Any]):
    """Samples of which this rank cannot read those from 8 on."""

    def __getitem__(self, number: Any) -> Any:
        if number >= 8:
            raise LookupError("the shelf is empty")
        return super().__getitem__(number)


def one_rank_fails(path: str, saved: str) -> tuple[str, int]:
    """Read until rank 1 cannot, and save then. Return what was said, and the steps of the checkpoint."""
    with parc.load(path) as session:
        rows = rows_of(16)
        loader = dataloader(session, HalfUnreadable(rows) if session.rank else rows)
        said = ""
        try:
            for batch in loader:
                session.step(local=batch)
        except parc.RunError as error:
            said = str(error)
        session.save(saved)
        session.restore(saved)
        return said, session.step_number


def test_where_one_rank_cannot_read_all_say_so_and_save(tmp_path: Path) -> None:
    path = build(tmp_path, DATA, CALM)
    for said, steps in run_ranks(one_rank_fails, 2, str(path), str(tmp_path / "saved")):
        assert "epoch 0: entry 10 of the dataset failed: LookupError: the shelf is empty" in said and steps == 1


def test_a_callable_is_asked_by_one_thread_at_a_time_in_evaluation_too(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text(ASKED)
    plan = CALM.replace('bytes "*.py"', '"./asked.py:sample" ()') + "eval every 1 batches 1\n"
    with parc.load(build(tmp_path, ONE, plan)) as session:
        for _ in range(2):
            session.step()  # a thread reads the next step's samples now
            session.evaluation.mean(session.state)


def test_workers_of_a_plan_change_no_number(tmp_path: Path) -> None:
    (tmp_path / "samples.py").write_text(SAMPLES)
    losses = []
    for name, words in {"here": "shuffle", "workers": "shuffle workers 2"}.items():
        with parc.load(build(tmp_path, ONE, WITH_DATASET.replace("shuffle", words), name)) as session:
            losses.append([session.step().loss for _ in range(3)])
    assert losses[0] == losses[1]


HANGING = """
import threading, time
class Rows:
    def __len__(self):
        return 40
    def __getitem__(self, number):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()  # of a library, say
        time.sleep(3600 * (number == 21))
        return [number] * 8, [number] * 8
"""


def test_a_worker_of_a_plan_that_hangs_is_said_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.py").write_text(HANGING)
    plan = CALM.replace('bytes "*.py"', 'dataset "./rows.py:Rows" () workers 2')
    monkeypatch.setattr(feed, "data_limit_s", lambda: 3.0)
    monkeypatch.setattr(reading, "data_limit_s", lambda: 60.0)
    before = set(multiprocessing.active_children())
    with parc.load(build(tmp_path, ONE, plan)) as session:
        said = r"entry 21 of the dataset was not read within 3 s(.*\n)+.*it is at \S*rows.py:8 in __getitem__"
        with pytest.raises(RunError, match=said):
            for _ in range(3):
                session.step()
        until = time.monotonic() + 10
        while (left := set(multiprocessing.active_children()) - before) and time.monotonic() < until:
            time.sleep(0.02)
        assert not left


class Stuck:
    """Samples whose second batch leaves the worker that reads it stopped, or in C with Python's lock for an hour."""

    count = None

    def __init__(self, how: str, place: Path) -> None:
        self._how, self._place = how, place

    def __call__(self, number: int) -> dict[str, Tensor]:
        """Return a sample."""
        if number >= 8:
            self._place.write_text(str(os.getpid()))
            if self._how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            ctypes.PyDLL(None).sleep(3600)
        return {"tokens": torch.arange(8)}


def reads_until_stuck(how: str, place: Path) -> None:
    """Read two batches by a worker, the first in a thread that ends with it."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore # it may have children
    reader = RowReader(Closing(Stuck(how, place), threading.Event()), range(8), 8, 1)
    assert in_thread(lambda: reader(0), threading.Event()).result()
    time.sleep(0.1)
    reader(8)


@pytest.mark.parametrize("how", ["stopped", "in C"])
def test_a_worker_ends_with_its_rank_wherever_it_is(how: str, tmp_path: Path) -> None:
    start_server()
    rank = SERVER.Process(target=reads_until_stuck, args=(how, tmp_path / "worker"), daemon=True)
    rank.start()
    try:
        worker = wait_until(lambda: (tmp_path / "worker").read_text(), "a worker that reads the second batch")
        wait_until(lambda: (state_of(worker) == "T") == (how == "stopped"), "a worker that is stuck")
    finally:
        rank.kill()
    wait_until(lambda: state_of(worker) in ("", "Z"), "the end of the worker")


def test_the_end_of_reading_waits_for_no_worker_that_is_stopped(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    reader = RowReader(Closing(Stuck("stopped", tmp_path / "worker"), threading.Event()), range(4), 4, 1)
    assert len(reader(0)["tokens"]) == 4
    wait_until(lambda: state_of((tmp_path / "worker").read_text()) == "T", "a worker that is stopped")
    begun = time.monotonic()
    del reader
    assert time.monotonic() - begun < 3 and set(multiprocessing.active_children()) <= before


def wait_until(ready: Callable[[], Any], what: str) -> Any:
    """Wait until a value is there, and return it."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with suppress(FileNotFoundError):
            if value := ready():
                return value
        time.sleep(0.01)
    pytest.fail(f"there is no {what}")


def state_of(process: str) -> str:
    """Return Linux's letter for the state of a process, "" for one that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_what_a_loader_cannot_do_is_said(tmp_path: Path) -> None:
    (tmp_path / "samples.py").write_text(SAMPLES)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "the dataset has 5 samples, and a step takes 8": (dataset(5), {"drop_last": True}),
        "the dataset has 0 samples, and a step takes 8": ([], {}),
        "an iterable has an order of its own, so there is no `shuffle`": (iter(rows_of(9)), {"shuffle": True}),
        "it returns int, which is no dataset": (3, {}),
    }
    with parc.load(build(tmp_path, ONE, CALM)) as session:
        for message, (given, options) in cases.items():
            with pytest.raises(parc.RunError, match=message) as error:
                dataloader(session, given, **options)
            assert error.value.code is BAD_DATA
        dropping = dataloader(session, dataset(21), drop_last=True)
        assert len(dropping) == 2 and [numbers(batch) for batch in dropping] == [list(range(8)), list(range(8, 16))]
        with pytest.raises(parc.RunError, match=r"another dataset has a loader with the name `data` already"):
            dataloader(session, dataset(16))
        again = dataloader(session, dropping._dataset)
        assert [numbers(batch) for batch in again] == [[*range(16, 21)]]  # the same dataset goes on at its place
        del again
        del dropping
        dataloader(session, dataset(16))
        stream = dataloader(session, iter(rows_of(20)), name="stream")
        assert [numbers(batch) for _, batch in zip(range(2), stream, strict=False)] == [[*range(8)], [*range(8, 16)]]
        with pytest.raises(parc.RunError, match="epoch 0: the iterator has ended, and cannot start again"):
            next(iter(stream))
        with pytest.raises(TypeError, match="an iterable has no length"):
            len(stream)


class Failing:
    """Rows whose 29th ends or hangs the worker that reads it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number == 29 and self.how == "hangs":
            time.sleep(3600)
        if number == 29:
            os._exit(0)
        return torch.full((8,), number), torch.arange(8)


def lost_worker(made: str, how: str, folder: str) -> tuple[str, int]:
    """Return the error of a loop whose data fails on one rank, and the step that can be saved then."""
    with pytest.MonkeyPatch.context() as patch, parc.load(made) as session:
        patch.setattr(reading, "data_limit_s", lambda: 2.0)
        patch.setitem(multiprocessing.current_process()._config, "daemon", False)  # type: ignore # may have children
        with pytest.raises(RunError) as error:
            for batch in dataloader(session, Failing(how), shuffle=True, workers=1):
                session.step(local=batch)
        session.save(folder)
        return str(error.value), read_checkpoint(Path(folder)).step


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("ends", r"entry 29 of the dataset was not read: its worker process ended with code 0; read without `workers`"
                 r" to see why\n  it was at \S+test_loader.py:\d+ in Failing.__getitem__"),
        ("hangs", r"entry 29 of the dataset was not read within 2 s; .*\n"
                  r"  it is at \S+test_loader.py:\d+ in (Failing\.)?__getitem__"),
    ],
)  # fmt: skip
def test_a_worker_that_is_lost_is_one_error_on_all_ranks_and_the_session_can_be_saved(
    how: str, said: str, tmp_path: Path
) -> None:
    made = build(tmp_path, DATA)
    (first, step), (second, _) = run_ranks(lost_worker, 2, str(made), how, str(tmp_path / "saved"))
    assert first == second and re.search(rf"\[P0303\] epoch 0: {said}\n  so it is on rank [01]$", first), first
    assert step >= 0
