"""Every form of `data`: what is read, what it is called, and what is said of data that does not fit."""

from __future__ import annotations

import gc
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from parc.runtime.data.reading import Closing, RowReader
from parc.runtime.data.samples import DataError, SampleSource
from parc.runtime.data.sources import Wanted, open_data

LINES = [
    {"name": "tokens", "dtype": "int64", "dims": ["B", "S"]},
    {"name": "targets", "dtype": "int64", "dims": ["B", "S"]},
]
PICTURES = [{"name": "x", "dtype": "float32", "dims": ["B", 2]}, {"name": "label", "dtype": "int64", "dims": ["B"]}]
LOSS = [{"kind": "cross_entropy", "target": "", "operands": ["output", "targets"], "ignore": -7, "factor": 1}]
CODE = """
import os
import torch
from torch.utils.data import Dataset, IterableDataset


class Pairs(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        if index == 7:
            raise LookupError("the shelf is empty")
        return torch.full((2,), float(index)), index


def pairs():
    return Pairs()


def documents(count=3):
    return [{"tokens": list(range(10 * n, 10 * n + n)), "text": "…"} for n in range(1, count + 1)]


class Stream(IterableDataset):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from ((torch.full((2,), 100.0 * self.epoch + n), n) for n in range(5))


def stream():
    return Stream()


def batches(size=3):
    for first in (0, size):
        yield {"x": torch.arange(first, first + size)[:, None].expand(size, 2).float(), "label": torch.arange(size)}


def words():
    for length in (3, 4, 2):
        yield list(range(10 * length, 10 * length + length))


def fails():
    yield torch.zeros(2), 0
    raise LookupError("the shelf is empty")


def number():
    return 3


class Dying(Pairs):
    def __getitem__(self, index):
        os._exit(9)


class Short(Pairs):
    def __len__(self):
        raise LookupError("no shelf")


class Broken(IterableDataset):
    begun = 0

    def __init__(self, last):
        self.last = last

    def __iter__(self):
        Broken.begun += 1
        if Broken.begun > self.last:
            raise RuntimeError("the shelf is empty")
        return iter([(torch.zeros(2), 0)] * 2)


class Stuck(Stream):
    def set_epoch(self, epoch):
        raise RuntimeError("the shelf is full")


def made(name, **given):
    return globals()[name](**given)


def dying():
    return Dying()
"""


def opened(
    folder: Path, form: str, held: bool = False, inputs: Any = LINES, batch: int = 2, **line: Any
) -> SampleSource:
    """Open samples of four tokens, as a `data` line of that form asks for."""
    names = line.pop("names", [])
    target = line.pop("target", None)
    said = {"form": form, "names": names, "callable": target, "arguments": line.pop("arguments", {}), **line}
    facts = {"inputs": inputs, "loss": LOSS, "sizes": {"B": batch, "S": 4}, "seed": 5}
    return open_data(Wanted(said, facts, folder), held)


def rows(source: SampleSource, count: int, name: str = "tokens") -> list[Any]:
    """Return what the first samples hold."""
    return [source(number)[name].tolist() for number in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 21 tokens in every form of token file, documents of which begin at 0, 6 and 13."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "code.py").write_text(CODE)
    tokens = np.arange(300, 321, dtype=np.uint16)
    tokens.tofile(folder / "bare.bin")
    np.save(folder / "saved.npy", tokens.astype(np.int32))
    np.save(folder / "big.npy", tokens.astype(">i4"))
    tokens.astype(np.int32).tofile(folder / "megatron.bin")
    lengths, pointers, documents = [2, 4, 7, 8], [0, 8, 24, 52], [0, 2, 3, 4]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(documents))
    body = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8")]
    (folder / "megatron.idx").write_bytes(head + b"".join(part.tobytes() for part in body))
    return folder


@pytest.mark.parametrize(
    "line",
    [
        {"names": ["bare.bin"], "dtype": "uint16"},
        {"names": ["saved.npy"]},
        {"names": ["big.npy"], "dtype": "int32"},
        {"names": ["megatron.*"]},
    ],
    ids=str,
)
def test_token_files_are_one_text(folder: Path, line: dict[str, Any]) -> None:
    source = opened(folder, "tokens", **line)
    assert source.count == 5
    assert rows(source, 6) == [list(range(300 + 4 * (n % 5), 304 + 4 * (n % 5))) for n in range(6)]
    assert rows(source, 5, "targets") == [[token + 1 for token in row] for row in rows(source, 5)]
    assert source(0)["tokens"].dtype == torch.int64


def test_packed_windows_have_no_target_where_a_document_begins(folder: Path) -> None:
    by_index = opened(folder, "tokens", names=["megatron.bin"], pack=True)
    by_token = opened(folder, "tokens", names=["bare.bin"], dtype="uint16", pack=True, end=305)
    whole = [number for row in rows(by_index, 5, "targets") for number in row]
    assert [at + 1 for at, number in enumerate(whole) if number == -7] == [6, 13]
    ended = [number for row in rows(by_token, 5, "targets") for number in row]
    assert [at + 1 for at, number in enumerate(ended) if number == -7] == [6]
    for form in ({"target": "./code.py:documents", "arguments": {"count": 5}}, {"target": "./code.py:words"}):
        source = opened(folder, "dataset", pack=True, **form)
        for number in range(2):
            sample = source(number)
            follows = sample["tokens"] + 1 == sample["targets"]
            assert bool((follows ^ (sample["targets"] == -7)).all())


def test_datasets_give_tuples_and_dicts(folder: Path) -> None:
    source = opened(folder, "dataset", target="./code.py:pairs", inputs=PICTURES, shuffle=True, split=0.1)
    assert source.count == 10
    held = opened(folder, "dataset", held=True, target="./code.py:pairs", inputs=PICTURES, shuffle=True, split=0.1)
    assert rows(held, 2, "label") == [10, 10]
    seen = [number for number in range(10) if number != source_of(source, 7)]
    assert sorted(int(source(number)["label"]) for number in seen) == [n for n in range(10) if n != 7]
    with pytest.raises(DataError, match="entry 7 of the dataset failed: LookupError: the shelf is empty"):
        source(source_of(source, 7))


def source_of(source: SampleSource, entry: int) -> int:
    """Return the number of the sample that is an entry of the dataset."""
    order = source._order  # type: ignore[attr-defined]
    return next(number for number in range(order.count) if order(number) == entry)


def test_iterables_are_numbered_as_they_come_epoch_after_epoch(folder: Path) -> None:
    stream = opened(folder, "dataset", target="./code.py:stream", inputs=PICTURES)
    assert [int(stream(number)["x"][0]) for number in range(12)] == [*range(5), *range(100, 105), 200, 201]
    assert [int(stream(number)["x"][0]) for number in (3, 3, 11, 4)] == [3, 3, 201, 4]
    batches = opened(folder, "dataset", target="./code.py:batches", inputs=PICTURES, arguments={"size": 3})
    assert [int(batches(number)["x"][1]) for number in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]
    with pytest.raises(DataError, match=r"sample 1 of the iterable failed: LookupError: the shelf is empty"):
        opened(folder, "dataset", target="./code.py:fails", inputs=PICTURES)(1)
    with pytest.raises(DataError, match="the iterable ends after 6 samples, and a step takes 7"):
        opened(folder, "dataset", target="./code.py:batches", inputs=PICTURES, batch=7)(6)
    for word in ({"shuffle": True}, {"split": 0.1}):
        with pytest.raises(DataError, match="an iterable has an order of its own and no length"):
            opened(folder, "dataset", target="./code.py:stream", inputs=PICTURES, **word)


def test_errors_in_a_persons_dataset_are_said_as_theirs(folder: Path) -> None:
    def of(name: str, **more: Any) -> SampleSource:
        return opened(folder, "dataset", target="./code.py:made", inputs=PICTURES, arguments={"name": name, **more})

    with pytest.raises(DataError, match="the length of the dataset failed: LookupError: no shelf"):
        of("Short")
    with pytest.raises(DataError, match="beginning epoch 0 of the iterable failed: RuntimeError: the shelf is full"):
        of("Stuck")(0)
    twice = of("Broken", last=2)
    assert [int(twice(number)["label"]) for number in range(4)] == [0] * 4  # each epoch is begun once
    message = "beginning epoch 2 of the iterable failed: RuntimeError: the shelf is empty"
    with pytest.raises(DataError, match=message):
        twice(4)
    message = "beginning epoch 0 of the iterable failed: RuntimeError: the shelf is empty"
    with pytest.raises(DataError, match=message) as error:
        RowReader(Closing(of("Broken", last=0), threading.Event()), [0, 1], 2, 1)(0)
    assert "code.py:" in error.value.place


def test_a_folder_that_is_not_there_is_said_where_the_package_is_not_there_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="there is no folder or file"):
        opened(tmp_path, "folder", names=["rows"])
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match="`folder` needs the package `datasets`"):
        opened(tmp_path, "folder", names=["rows"])


def test_folders_of_datasets_are_read(tmp_path: Path) -> None:
    import datasets  # pandas comes with it, half a second for every worker that collects this file

    tables = {"tokens": [[n, n + 1, n + 2, n + 3] for n in range(6)], "targets": [[1, 2, 3, 4]] * 6, "text": ["a"] * 6}
    datasets.Dataset.from_dict(tables).save_to_disk(tmp_path / "rows")
    source = opened(tmp_path, "folder", names=["rows"])
    assert (
        source.count == 6 and source(2)["tokens"].tolist() == [2, 3, 4, 5] and set(source(0)) == {"tokens", "targets"}
    )
    (tmp_path / "rows.json").write_text('{"tokens": [0, 1, 2, 3]}\n{"tokens": [2, 3, 4, 5]}\n')
    source = opened(tmp_path, "folder", names=["rows.json"])
    assert source.count == 2 and source(1)["tokens"].tolist() == [2, 3, 4, 5]
    (tmp_path / "broken.json").write_text("{{{")
    documents = {"tokens": [[1, 2, 3], [10, 11, 12, 13], [20, 21], [30]]}
    datasets.Dataset.from_dict(documents).save_to_disk(tmp_path / "documents")
    packed = opened(tmp_path, "folder", names=["documents"], pack=True)
    assert rows(packed, 2) == [[1, 2, 3, 10], [11, 12, 13, 20]]
    assert rows(packed, 2, "targets") == [[2, 3, -7, 11], [12, 13, -7, 21]]
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(tables)}).save_to_disk(tmp_path / "several")
    for name, message in {
        "several": r"holds 1 datasets",
        "nothing": r"there is no folder or file .*nothing",
        "broken.json": r"row 0 of .*broken.json cannot be read: Expecting",
    }.items():
        with pytest.raises(DataError, match=message):
            opened(tmp_path, "folder", names=[name])
    with pytest.raises(DataError, match="has columns `tokens`, `targets`, `text`, and none is an input"):
        opened(tmp_path, "folder", names=["rows"], inputs=PICTURES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"names": ["bare.bin"]}, r"bare\.bin does not say which type its tokens have"),
        ({"names": ["bare.bin"], "dtype": "uint32"}, r"bare\.bin has 42 bytes, which are no whole number of uint32"),
        ({"names": ["saved.npy"], "dtype": "uint16"}, r"saved\.npy says that it holds int32, not uint16"),
        ({"names": ["wide.bin"], "dtype": "uint16"}, r"every second number of .*wide\.bin is 0, read as uint16"),
        ({"names": ["real.npy"]}, r"real\.npy holds float32, and tokens are whole numbers"),
        ({"names": ["square.npy"]}, r"square\.npy holds an array of 2 dims"),
        ({"names": ["below.npy"]}, r"below\.npy holds -3: read as int64 its numbers are not tokens"),
        ({"names": ["short.bin"], "dtype": "uint16"}, r"short\.bin has 8 bytes, and short\.idx counts 21 tokens"),
        ({"names": ["bare.bin"], "dtype": "uint16", "pack": True}, r"nothing says where documents end in .*bare\.bin"),
    ],
    ids=str,
)  # fmt: skip
def test_token_files_of_another_type_are_refused(folder: Path, line: dict[str, Any], message: str) -> None:
    np.arange(100, dtype=np.uint32).tofile(folder / "wide.bin")
    np.save(folder / "real.npy", np.ones(50, dtype=np.float32))
    np.save(folder / "square.npy", np.ones((5, 5), dtype=np.int32))
    np.save(folder / "below.npy", np.full(50, -3))
    (folder / "short.bin").write_bytes(b"\1\0" * 4)
    (folder / "short.idx").write_bytes((folder / "megatron.idx").read_bytes())
    with pytest.raises(DataError, match=message) as error:
        opened(folder, "tokens", **line)
    assert error.value.help


def test_what_is_no_dataset_is_said(folder: Path) -> None:
    with pytest.raises(DataError, match="it returns int, which is no dataset"):
        opened(folder, "dataset", target="./code.py:number")
    with pytest.raises(
        DataError, match="entry 0 of the dataset is not a sample: it is tuple of 2, and the plan has 1 input"
    ):
        opened(folder, "dataset", target="./code.py:pairs", inputs=PICTURES[:1])(0)
    with pytest.raises(DataError, match="entry 0 of the dataset holds `tokens`, `text`, and none is an input"):
        opened(folder, "dataset", target="./code.py:documents", inputs=PICTURES)(0)


def test_workers_read_what_is_read_without_them_and_name_the_sample_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal of theirs interrupts what the process does, as a message to other ranks."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    handler = signal.getsignal(signal.SIGCHLD)
    source = opened(folder, "dataset", target="./code.py:pairs", inputs=PICTURES, shuffle=True)
    closed = threading.Event()
    ahead = RowReader(Closing(source, closed), [0, 1], 2, 2)
    here = RowReader(Closing(source, closed), [0, 1], 2, 0)
    bad = source_of(source, 7) // 2 * 2
    for first in (0, 2, 4, 8, 6, 8):  # also after a jump
        if first != bad:
            found, wanted = ahead(first, 10), here(first, 10)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(DataError, match="entry 7 of the dataset failed: LookupError: the shelf is empty") as error:
        ahead(bad, 10)
    assert "code.py:13" in error.value.place
    bounded, (one, two, *_) = RowReader(Closing(source, closed), [0, 1], 2, 1), {0, 2, 4, 6} - {bad}
    for first, end in ((one, one + 2), (two, 9)):  # its end moves, as when a run is to train on
        assert torch.equal(bounded(first, end)["label"], here(first)["label"])
    dying = opened(folder, "dataset", target="./code.py:dying", inputs=PICTURES)
    with pytest.raises(DataError, match="entry 0 of the dataset was not read: its worker process ") as error:
        RowReader(Closing(dying, closed), [0, 1], 2, 1)(0)
    assert "read without `workers`" in error.value.help
    assert not signal_handling._SIGCHLD_handler_set and signal.getsignal(signal.SIGCHLD) == handler


@pytest.mark.parametrize("read", [(0,), (0, 2, 4, 6)], ids=["left", "failed"])
def test_workers_that_nobody_needs_any_more_are_told_to_end(
    folder: Path, read: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, seconds = _MultiProcessingDataLoaderIter._shutdown_workers, []

    def timed(loader: _MultiProcessingDataLoaderIter) -> None:
        start = time.monotonic()
        end(loader)
        seconds.append(time.monotonic() - start)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_shutdown_workers", timed)
    source = opened(folder, "dataset", target="./code.py:pairs", inputs=PICTURES)
    cycle: list[object] = []
    cycle += [cycle, reader := RowReader(Closing(source, threading.Event()), [0, 1], 2, 2)]
    try:
        for first in read:
            reader(first)
    except DataError as error:
        cycle.append(error)
    assert (len(cycle) == 3) == (len(read) > 1)
    del cycle, reader
    gc.collect(0)
    assert seconds
    assert max(seconds) < 4  # torch waits five for each worker that was not told
