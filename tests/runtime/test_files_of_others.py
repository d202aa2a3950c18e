"""Files that other people wrote: what parc reads of them, and which of their lies it tells."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from parc.compiler.initial.files import opened_tensors
from parc.grammar.bounded import MOST_JSON, parse_json, read_bounded, real_path
from parc.runtime.data import saved_rows
from parc.runtime.data.samples import DataError
from parc.runtime.data.saved_rows import JsonRows
from parc.runtime.data.sources import matching_files
from parc.runtime.data.token_files import token_file
from tests.hostile_files import index_bytes
from tests.runtime.test_sources import opened, rows


def test_links_that_lead_back_are_the_path_of_an_ordinary_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        read_bounded(real_path(tmp_path / "loop"), 10)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert real_path(tmp_path / "link") == (tmp_path / "file").resolve() and read_bounded(tmp_path / "link", 1) == b"x"


ENDLESS = {
    "nested too deeply": "[" * 10**5,
    "too many values": "[" + "{}," * 2 * 10**6 + "1]",
    "no number of JSON": "NaN",
    "half of a character": '{"a": "\\ud800"}',
    "larger than 32": f'"{"x" * MOST_JSON}"',
    "4300 digits": "9" * 5000,
}
"""Texts of JSON by what is said of them."""


@pytest.mark.parametrize("why", ENDLESS)
def test_json_without_bounds_is_refused(why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(ENDLESS[why])
    assert parse_json('"\\ud83d\\ude00"') == "\N{GRINNING FACE}"


def test_a_header_of_tensors_is_bounded(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    with opened_tensors(tmp_path / "w.safetensors") as file:
        assert [*file.keys()] == ["w"]
    (tmp_path / "w.safetensors").write_bytes((MOST_JSON + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(SafetensorError, match="its header has 33,554,433 bytes, and at most 32"):  # noqa: SIM117
        with opened_tensors(tmp_path / "w.safetensors"):
            pass


# ---- texts of tokens


def test_an_index_of_megatrons_with_kinds_of_sequences_is_read(tmp_path: Path) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "m.bin")
    for kinds in (b"", b"\0\0"):
        (tmp_path / "m.idx").write_bytes(index_bytes([40, 24]) + kinds)
        file = token_file(str(tmp_path / "m.bin"), None)
        assert file.count == 64 and file.starts is not None and file.starts.tolist() == [0, 40]


@pytest.mark.parametrize(
    ("lie", "why"),
    [({"places": [0, -80]}, "do not lie one after the other"), ({"places": [0, 90]}, "do not lie one after the other"),
     ({"lengths": [80, -16]}, "do not lie one after the other"), ({"documents": [0, 10**15]}, "the documents of"),
     ({"documents": [0, -1, 2]}, "the documents of"), ({"counts": (2**62, 3)}, "has 82 bytes, and those that it"),
     ({"version": 2}, "version 2"), ({"code": 0}, "type 0")],
)  # fmt: skip
def test_an_index_of_megatrons_that_lies_is_told(tmp_path: Path, lie: dict[str, Any], why: str) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "m.bin")
    (tmp_path / "m.idx").write_bytes(index_bytes(lie.pop("lengths", [40, 24]), **lie))
    with pytest.raises(DataError, match=why) as caught:
        token_file(str(tmp_path / "m.bin"), None)
    assert caught.value.help


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "|u1", "<i8"])
def test_arrays_of_numpys_are_read_in_every_order_of_bytes(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "t.npy", np.arange(100, 170).astype(dtype))
    file = token_file(str(tmp_path / "t.npy"), None)
    assert file.read(3, 4).astype(int).tolist() == [103, 104, 105, 106] and file.count == 70


@pytest.mark.parametrize(
    ("dtype", "count", "why"),
    [(np.uint16, 0, "holds no tokens"), (np.float32, 64, "float32, and tokens are whole"), (object, 64, "object, and"),
     ("u2,u2", 64, "and tokens are whole"), (complex, 8, "complex128, and tokens are whole")],
)  # fmt: skip
def test_arrays_of_other_things_are_told(tmp_path: Path, dtype: Any, count: int, why: str) -> None:
    np.save(tmp_path / "t.npy", np.zeros(count, dtype))
    with pytest.raises(DataError, match=why):
        token_file(str(tmp_path / "t.npy"), None)


def test_an_array_that_is_cut_off_is_told_before_it_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(64, dtype=np.uint16))
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes()[:-1])
    with pytest.raises(DataError, match="has 255 bytes, and its header counts 64 numbers of uint16"):
        token_file(str(tmp_path / "t.npy"), None)
    (tmp_path / "t.bin").touch()
    with pytest.raises(DataError, match="holds no tokens"):
        token_file(str(tmp_path / "t.bin"), "uint16")


# ---- files of a pattern


def test_patterns_match_what_glob_matches(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", "b/d/f.md", ".hidden/g.txt", "b/.h.txt", "b[1]/i.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "link").symlink_to("b")  # which goes elsewhere, and is followed
    for pattern in ("**/*.txt", "b/**/*.txt", "**", "*/**/d/*", "**/d/**", "b**/*.txt", "*.txt"):
        found = {name for name in glob.glob(str(tmp_path / pattern), recursive=True) if os.path.isfile(name)}
        assert matching_files([pattern], tmp_path) == sorted(found), pattern


def test_links_that_lead_back_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.txt").write_text("x")
    for name in "abcdefgh":
        (tmp_path / name).symlink_to(".")
        (tmp_path / "below" / name).symlink_to("..")
    assert matching_files(["**/*.txt"], tmp_path) == [str(tmp_path / "below" / "a.txt")]


def test_a_pattern_has_a_bound_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parc.runtime.data.sources._MOST_FOLDERS", 100)
    for rung in range(10):  # two ways from each to the next
        (tmp_path / f"{rung}").mkdir()
        for name in "ab":
            (tmp_path / f"{rung}" / name).symlink_to(f"../{rung + 1}")
    with pytest.raises(DataError, match="goes into more than 100 folders"):
        matching_files(["0/**/*.txt"], tmp_path)


# ---- rows of JSON


@given(st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["", "\n", "\r\n\n", "\n\n\n"])), max_size=20),
       st.booleans(), st.integers(16, 64))  # fmt: skip
def test_rows_are_the_objects_of_a_file(drawn: list[tuple[int, str]], ended: bool, block: int) -> None:
    text = "".join(f'{{"n": {number}}}\n{blank}' for number, blank in drawn)
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"parc-rows-{os.getpid()}.jsonl")
    path.write_text(text if ended else text.rstrip("\n"))
    most, saved_rows._MOST_LINE = saved_rows._MOST_LINE, block  # so that lines go over the ends of what is read at once
    try:
        read = JsonRows(path)
        assert [read[number]["n"] for number in range(len(read))] == [number for number, _ in drawn]
    finally:
        saved_rows._MOST_LINE = most
        path.unlink()


def test_rows_of_json_are_samples_and_documents(tmp_path: Path) -> None:
    samples = [{"tokens": [n, 1, 2, 3], "targets": [1, 2, 3, n], "id": f"{n}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, samples)))
    source = opened(tmp_path, "folder", names=["rows.jsonl"])
    assert source.count == 4 and rows(source, 2) == [[0, 1, 2, 3], [1, 1, 2, 3]]
    documents = [{"tokens": [10 * n + m for m in range(n)]} for n in range(1, 7)]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    packed = opened(tmp_path, "folder", names=["documents.jsonl"], pack=True)
    assert rows(packed, 2) == [[10, 20, 21, 30], [31, 32, 40, 41]]


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "has no rows"), ("\n\n", "has no rows"), ("[1, 2]\n", "row 0 of .* is no object"),
     ('{"other": 1}\n', "has columns `other`, and none is an input"), ("\x1f\x8b\x08", "row 0 of .* cannot be read"),
     ("x" * 200 + "\n", "a line of .* is longer than 64 B")],
)  # fmt: skip
def test_a_file_without_rows_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    monkeypatch.setattr(saved_rows, "_MOST_LINE", 64)
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=why):
        opened(tmp_path, "folder", names=["rows.jsonl"])


def test_fractions_are_not_cut_off(tmp_path: Path) -> None:
    row = {"tokens": [0.5, 1, 2, 3], "targets": [1, 2, 3, 4]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    with pytest.raises(DataError, match="entry 0 of the dataset is not a sample: `tokens` is list"):
        opened(tmp_path, "folder", names=["rows.jsonl"])(0)
