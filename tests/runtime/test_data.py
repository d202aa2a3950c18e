"""Samples by global number: deterministic, shuffled, each window once an epoch, and only the rows asked for."""

import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parc.runtime.data.random_batch import IndexBound
from parc.runtime.data.samples import DataError, Order, Ordered, permuted, read_rows
from parc.runtime.data.sources import CallableData, SyntheticData, matching_files
from parc.runtime.data.token_files import JoinedFiles, WindowForm, Windows, byte_file


def windows(patterns: list[str], root: Path, length: int) -> Windows:
    """Return the windows of files' bytes."""
    text = JoinedFiles([byte_file(path) for path in matching_files(patterns, root)])
    return Windows(text, WindowForm(length, "tokens", "targets"), f"the files hold {text.size} bytes")


def shuffled(source: Windows, seed: int = 0) -> Ordered:
    """Return the samples of a source, shuffled."""
    return Ordered(source, Order(source.count, seed, True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three text files, one empty, one below, of 0..9 and so on."""
    (tmp_path / "b.txt").write_bytes(bytes(range(10, 25)))
    (tmp_path / "a.txt").write_bytes(bytes(range(10)))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.txt").write_bytes(bytes(range(25, 62)))
    return tmp_path


def test_windows_without_targets_need_no_token_behind_them(folder: Path) -> None:
    text = JoinedFiles([byte_file(str(folder / "a.txt"))])
    source = Windows(text, WindowForm(5, "tokens", None), "10 bytes")
    assert [source(number)["tokens"].tolist() for number in range(source.count)] == [[*range(5)], [*range(5, 10)]]
    assert [*source(0)] == ["tokens"] and Windows(text, WindowForm(10, "tokens", None), "10 bytes").count == 1
    with pytest.raises(DataError, match="a sample of 11 tokens needs 11"):
        Windows(text, WindowForm(11, "tokens", None), "10 bytes")


def test_windows_cover_the_sorted_text_once_an_epoch(folder: Path) -> None:
    data = shuffled(windows(["*.txt", "below/*"], folder, 5))
    assert data.count == 12
    epochs = [[data(epoch * 12 + i) for i in range(12)] for epoch in range(2)]
    for samples in epochs:
        for sample in samples:
            assert sample["tokens"].dtype == torch.int64 and sample["tokens"].shape == (5,)
            assert torch.equal(sample["targets"], sample["tokens"] + 1)  # also across the ends of files
        starts = [int(sample["tokens"][0]) for sample in samples]
        assert sorted(starts) == list(range(0, 60, 5)) and starts != sorted(starts)
    assert [int(s["tokens"][0]) for s in epochs[0]] != [int(s["tokens"][0]) for s in epochs[1]]


def test_samples_do_not_depend_on_what_was_read_before(folder: Path) -> None:
    one, other = windows(["**/*.txt"], folder, 7), windows(["b.txt", "**/*.txt"], folder, 7)
    assert torch.equal(shuffled(one, 3)(5)["tokens"], [shuffled(other, 3)(i) for i in (9, 2, 5)][2]["tokens"])
    first, second = (shuffled(one, seed) for seed in (3, 4))
    assert [first(i)["tokens"].tolist() for i in range(8)] != [second(i)["tokens"].tolist() for i in range(8)]


def test_standard_library_is_text_on_every_machine() -> None:
    data = windows(["{stdlib}/*.py"], Path("/nowhere"), 128)
    assert data.count > 10_000
    assert int(data(0)["tokens"].max()) < 256
    deep = matching_files(["{stdlib}/**/*.py"], Path("/nowhere"))
    assert all(file.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in file for file in deep)


def test_what_cannot_be_read_is_said(folder: Path) -> None:
    with pytest.raises(DataError, match=r'no file matches "\*\.md"'):
        windows(["*.txt", "*.md"], folder, 5)
    with pytest.raises(DataError, match=r"the files hold 25 bytes: a sample of 25 tokens needs 26"):
        windows(["*.txt"], folder, 25)
    with pytest.raises(DataError, match="0 bytes"):
        windows(["empty.txt"], folder, 1)
    with pytest.raises(DataError, match="at least one token"):
        windows(["*.txt"], folder, 0)
    data = windows(["*.txt"], folder, 24)
    (folder / "b.txt").write_bytes(b"short")
    with pytest.raises(DataError, match=r"b\.txt became shorter"):
        data(0)


@given(st.integers(1, 500), st.text(max_size=5))
def test_permutations_are_permutations(count: int, key: str) -> None:
    assert sorted(permuted(i, count, key) for i in range(count)) == list(range(count))


def test_synthetic_samples_have_the_types_and_ranges_of_the_inputs() -> None:
    types = {"ids": "int32", "mask": "bool", "pixels": "bfloat16", "scale": "float64", "flag": "uint8"}
    dims = {"scale": ["S"], "flag": ["B"]}
    inputs = [{"name": name, "dtype": type_, "dims": dims.get(name, ["B", "S", 3])} for name, type_ in types.items()]
    data = SyntheticData(inputs, {"B": 4, "S": 50}, {"ids": IndexBound(7)}, seed=1)
    sample, again = data(3), SyntheticData(inputs[::-1], {"B": 8, "S": 50}, {"ids": IndexBound(7)}, seed=1)(3)
    assert all(torch.equal(value, again[name]) for name, value in sample.items())
    assert {name: str(value.dtype) for name, value in sample.items()} == {n: f"torch.{t}" for n, t in types.items()}
    assert [list(value.shape) for value in sample.values()] == [[50, 3], [50, 3], [50, 3], [50], []]
    assert set(sample["ids"].unique().tolist()) == set(range(7))
    assert 0.3 < sample["mask"].double().mean() < 0.7
    assert abs(sample["pixels"].double().mean()) < 0.3 and 0.8 < sample["pixels"].double().std() < 1.2
    assert not torch.equal(data(4)["scale"], sample["scale"])


def test_ranks_read_their_rows_and_no_others() -> None:
    asked: list[int] = []

    def sample(number: int) -> dict[str, Tensor]:
        asked.append(number)
        return {"x": torch.full((2, 3), number), "y": torch.tensor(number)}

    source = CallableData(sample)
    whole = read_rows(source, 24, range(8))
    assert whole["x"].shape == (8, 2, 3) and whole["y"].tolist() == list(range(24, 32))
    asked.clear()
    assert torch.equal(read_rows(source, 24, range(2, 4))["x"], whole["x"][2:4])
    assert torch.equal(read_rows(source, 24, [7, 0])["y"], whole["y"][[7, 0]])
    assert asked == [26, 27, 31, 24]


def test_samples_of_another_form_are_refused() -> None:
    others = {"`x` is int": {"x": 3}, "it is list": [3], "it is a tensor": torch.zeros(3)}
    for said, sample in others.items():
        with pytest.raises(DataError, match=f"sample 4 is not a dict of tensors: {said}") as error:
            read_rows(CallableData(dict.fromkeys(range(8), sample).__getitem__), 4, [0])  # type: ignore[arg-type]
        assert "torch.tensor(3)" in error.value.help
    with pytest.raises(DataError, match=r"sample 5 is x: int64 \[5\], but 4 is x: int64 \[4\]"):
        read_rows(CallableData(lambda number: {"x": torch.arange(number)}), 4, [0, 1])
    with pytest.raises(DataError, match="at least one row"):
        read_rows(CallableData(lambda number: {}), 0, [])
