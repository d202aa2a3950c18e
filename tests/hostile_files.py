"""Every file that parc reads, in every form that a stranger may give it: ``python -m tests.hostile_files`` prints which
command got what for it, and what parc did not bear.

A row of ``READERS`` is a command and one file that it reads; a row of ``KINDS`` is a form of that file. A case is borne
where the command ends within seconds and a bound of memory, either as if all were well, or with exit code 1 (5 for a
build that a check refuses) and an error that has a code. Memory is what the process holds beyond what all commands held
on the good files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import parc
from parc.cli import main
from parc.cli.terminal import show_error
from parc.runtime.launch.hosts import read_secret
from tests.hostile_changes import HARD, mutate_bytes, mutate_json, mutate_text, rehash
from tests.hostile_inputs import Outcome, Summary, in_worker, read_input

LIMITS = (10.0, 512 << 20)
"""Seconds of a processor, and bytes beside those of the good files."""
CODE = re.compile(r"error\[P[0-9]{4}\]|would change|is there and")
MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab=64, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens))
"""
SAMPLES = """
import torch

def sample(number):
    return {name: torch.arange(4) + number % 9 for name in ("tokens", "targets")}
"""
PLAN = """
model     "./net.py:Net"
input     tokens  int64 [B, S]
input     targets int64 [B, S]
sizes     B=2, S=4
loss      cross_entropy(output, targets)
optimizer adamw lr 1e-2
seed      3
steps     1
"""
LINES = {
    "plan": 'data tokens "t.npy"\n',
    "bytes": 'data bytes "texts/**/*.txt"\n',
    "bin": 'data tokens "t.bin" dtype uint16\n',
    "megatron": 'data tokens "m.bin" pack\n',
    "rows": 'data folder "rows.jsonl"\n',
    "saved": 'data folder "saved"\n',
    "from": 'data synthetic\ninit from "w/model.safetensors"\n',
    "folder": 'data synthetic\ninit from "w"\n',
    "own": 'data "./samples.py:sample"\n',
    "include": 'data synthetic\ninclude "more.parc"\n',
}
"""The last lines of the plans, by name; each reads another file."""


def prepare(folder: Path) -> None:
    """Write the good files: plans, their data, a build of each, a checkpoint in one file and one of two ranks, weights,
    a configuration of transformers."""
    import datasets  # with pandas: half a second for every worker that collects a test of this file

    torch.set_num_threads(1)  # a forked process has no threads of its parent
    (folder / "texts" / "more").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("0123456789" * 8)
    (folder / "texts" / "more" / "b.txt").write_text("0123456789" * 8)
    (folder / "net.py").write_text(MODEL)
    (folder / "samples.py").write_text(SAMPLES)
    tokens = np.arange(64, dtype=np.uint16)
    np.save(folder / "t.npy", tokens)
    tokens.tofile(folder / "t.bin")
    tokens.tofile(folder / "m.bin")
    (folder / "m.idx").write_bytes(index_bytes([40, 24]))
    rows = [{"tokens": [n, 1, 2, 3], "targets": [1, 2, 3, n]} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    (folder / "w").mkdir()
    save_file({"embed.weight": torch.ones(64, 8), "head.weight": torch.ones(64, 8)}, folder / "w/model.safetensors")
    (folder / "more.parc").write_text("steps 1\n")
    (folder / "order.txt").write_text("rank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1F1 1B1 1B0\n")
    (folder / "secret.txt").write_text("known to few\n")
    (folder / "rates.txt").write_text("1 1e-2\n")
    plans = {name: PLAN + lines for name, lines in LINES.items()}
    plans["include"] = plans["include"].replace("steps     1\n", "")
    plans["rates"] = plans["plan"].replace("lr 1e-2", 'lr table "rates.txt"')
    plans["order"] = plans["plan"] + 'mesh pp=2\nstage before head over pp\nschedule table "order.txt" microbatches 2\n'
    plans["split"] = plans["plan"] + "mesh tp=2\nvocab embed, head over tp\n"
    for name, text in plans.items():
        (folder / f"{name}.parc").write_text(text)
    with chdir(folder):
        builds = (f"build {name}.parc -o b_{name}" for name in (*LINES, "split"))
        for words in (f"fmt {' '.join(f'{name}.parc' for name in plans)}", *builds, "run b_plan --save ck"):
            done = read_input(0, words, lambda words=words: run(words))  # type: ignore[misc]
            assert done.end == "accepted", f"{words}: {done.end}\n{done.said}"
    save_shards(folder / "b_split", folder / "shards")
    (folder / "hf").mkdir()
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1,
              "vocab_size": 64, "n_positions": 8}  # fmt: skip
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    hugging = PLAN.replace('"./net.py:Net"', '"parc.hf:folder" (path="hf")').replace("output,", "output.logits,")
    (folder / "hf.parc").write_text(hugging.replace("input     tokens ", "input     input_ids ") + LINES["plan"])


def index_bytes(
    lengths: Sequence[int],
    *,
    version: int = 1,
    code: int = 8,
    counts: tuple[int, int] | None = None,
    places: Sequence[int] | None = None,
    documents: Sequence[int] | None = None,
) -> bytes:
    """Return the index of Megatron's for sequences of these lengths, of two bytes a token; or one that lies."""
    places = [2 * sum(lengths[:at]) for at in range(len(lengths))] if places is None else places
    documents = [*range(len(lengths) + 1)] if documents is None else documents
    counts = counts or (len(lengths), len(documents))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, *counts)
    arrays = (np.array(lengths, "<i4"), np.array(places, "<i8"), np.array(documents, "<i8"))
    return head + b"".join(array.tobytes() for array in arrays)


def save_shards(build: Path, folder: Path) -> None:
    """Save a checkpoint of a build of two ranks."""
    from parc.runtime.state.opening import build_mesh, open_build
    from parc.runtime.state.saving import stored_of
    from tests.runtime.shard_ranks import numbers, ranks_of, save_all

    opened = open_build(build)
    stored, mesh = stored_of(opened), build_mesh(opened)
    save_all(folder, ranks_of(stored, mesh, [*opened.roles] * mesh.world, numbers(stored, 0)), stored)


def run(words: str) -> int:
    """Run a command: one of the command line; ``load``, which opens a session as a loop of one's own does; or
    ``secret``, which reads the file of `parc run --secret-file` as a launcher does that meets others."""
    command, *rest = words.split()
    if command not in ("load", "secret"):
        return main([command, *rest])
    try:
        (path,) = rest
        if command == "secret":
            read_secret(Path(path))
            return 0
        with parc.load(path) as session:
            session.step()
    except Exception as error:
        code = show_error(error)
        if code is None:
            raise
        return 1 if command == "secret" else code  # that of a run that failed
    return 0


# ---- the readers: a command, and a file that it reads


@dataclass(frozen=True)
class Reader:
    """A command and the file that it reads, or a folder if ``form`` is ``folder``. With ``optional`` it may do without
    one, or without anything in it; in the build ``rehash`` the manifest's hash is made that of the file."""

    words: str
    file: str
    form: str
    optional: bool = False
    rehash: str = ""


def readers() -> Iterator[Reader]:
    """Yield every command with each of the files that it reads."""
    for words in ("check --static", "check", "fmt --check", "build -o out", "show", "show --list", "run"):
        yield Reader(f"{words} plan.parc", "plan.parc", "plan", optional=words.startswith("fmt"))
    for name, file in (("include", "more.parc"), ("rates", "rates.txt")):
        for words in ("check --static", "check", "build -o out"):
            yield Reader(f"{words} {name}.parc", file, "plan", optional=name == "include")
    for words in ("check order.parc", "build order.parc -o out"):
        yield Reader(words, "order.txt", "plan")
    yield Reader("secret secret.txt", "secret.txt", "secret", optional=True)  # any text may be one
    for words in ("check --static plan.parc", "check plan.parc", "run b_plan", "verify b_plan", "show b_plan",
                  "export b_plan ck -o out", "init ./net.py:Net -o new.parc", "load b_plan"):  # fmt: skip
        yield Reader(words, "net.py", "python", optional=words.startswith("show"))
    for name, file, form in (
        ("plan", "t.npy", "npy"), ("bytes", "texts/a.txt", "text"), ("bytes", "texts/more", "data folder"),
        ("bin", "t.bin", "tokens"), ("megatron", "m.bin", "tokens"), ("megatron", "m.idx", "idx"),
        ("rows", "rows.jsonl", "rows"), ("saved", "saved/state.json", "json"), ("saved", "saved", "folder"),
        ("saved", "saved/dataset_info.json", "json"), ("saved", "saved/data-00000-of-00001.arrow", "arrow"),
        ("from", "w/model.safetensors", "safetensors"), ("folder", "w/model.safetensors", "safetensors"),
        ("folder", "w", "folder"), ("own", "samples.py", "python"),
    ):  # fmt: skip
        some = file in ("texts/a.txt", "texts/more")
        for words in (f"check {name}.parc", f"build {name}.parc -o out", f"run b_{name}"):
            yield Reader(words, file, form, optional=some)
    for words in ("check hf.parc", "init hf -o new.parc --sizes S=8"):
        yield Reader(words, "hf/config.json", "config")
    yield Reader("example gpt .", "gpt.parc", "out", optional=True)
    yield Reader("verify b_plan", "net.py", "python")
    for words in ("import b_plan w -o out", "import b_plan w/model.safetensors -o out"):
        yield Reader(words, "w/model.safetensors", "safetensors")
    yield Reader("import b_plan w -o out", "w", "folder")
    for file, form in (
        ("manifest.json", "json"), ("report.json", "json"), ("first_check.json", "json"), ("plan.parc", "plan"),
        ("schedule.txt", "text"), ("programs/stage0.F.py", "text"), ("programs/model.py", "text"), ("", "folder"),
    ):  # fmt: skip
        for words in ("show b_plan", "verify --static b_plan", "run b_plan", "load b_plan", "export b_plan ck -o out"):
            fits = "b_plan" if file and file != "manifest.json" else ""
            unread = file in ("plan.parc", "first_check.json") and not words.startswith("run")
            yield Reader(words, f"b_plan/{file}".rstrip("/"), form, unread, fits)
    for words in ("run b_plan --resume ck --steps 2", "export b_plan ck -o out", "export ck -o out"):
        for file, form in (("state.json", "json"), ("state.safetensors", "safetensors"), ("", "folder")):
            yield Reader(words, f"ck/{file}".rstrip("/"), form)
    for file, form in (("state.json", "json"), ("index.json", "json"), ("state-00000.safetensors", "safetensors"),
                       ("", "folder")):  # fmt: skip
        yield Reader("export b_split shards -o out", f"shards/{file}".rstrip("/"), form)
    for words in ("build plan.parc -o out", "export b_plan ck -o out", "import b_plan w -o out",
                  "run b_plan --save out"):  # fmt: skip
        yield Reader(words, "out", "out", optional=True)


# ---- the kinds of hostility


Change = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Kind:
    """A form of a file. ``forms`` are the files that may have it, all without any. ``refused``: no command may do as
    if all were well."""

    name: str
    change: Change
    forms: tuple[str, ...] = ()
    refused: bool = False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _gone(path: Path) -> Path:
    _remove(path)
    return path


def _link(to: str) -> Change:
    return lambda path, draw: _gone(path).symlink_to(to)


def _loop(path: Path, draw: random.Random) -> None:
    _gone(path).symlink_to(f"{path.name}.other")
    path.with_name(f"{path.name}.other").symlink_to(path.name)


def _socket(path: Path, draw: random.Random) -> None:
    with chdir(_gone(path).parent), socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)


def _sparse(path: Path, draw: random.Random) -> None:
    """A file of 4 TiB that takes no place on the disk."""
    with open(path, "r+b") as file:
        file.truncate(4 << 40)


def _bytes(make: Callable[[bytes], bytes]) -> Change:
    return lambda path, draw: _written(path, make(path.read_bytes()))


def _written(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _json(make: Callable[[Any], Any]) -> Change:
    return lambda path, draw: _written(path, json.dumps(make(json.loads(path.read_bytes()))).encode())


def _each(value: Any) -> Change:
    """Replace each value of an object by another one."""
    return _json(lambda row: dict.fromkeys(row, value) if isinstance(row, dict) else value)


def _some(make: Callable[[random.Random, bytes], bytes]) -> Change:
    return lambda path, draw: _written(path, make(draw, path.read_bytes()))


def _changed_json(draw: random.Random, data: bytes) -> bytes:
    return json.dumps(mutate_json(draw, json.loads(data))).encode()


def _changed_text(draw: random.Random, data: bytes) -> bytes:
    return mutate_text(draw, data.decode()).encode("utf-8", "ignore")


def _array(make: Callable[[], np.ndarray[Any, Any]]) -> Change:
    return lambda path, draw: np.save(path, make())


def _npy(header: str, version: int = 1, length: int | None = None) -> Change:
    """A file of numpy's with this header, which may lie about its length."""
    text = header.encode()
    size = (len(text) if length is None else length).to_bytes(2 if version == 1 else 4, "little")
    return _bytes(lambda _: b"\x93NUMPY" + bytes([version, 0]) + size + text + bytes(128))


def _shape(shape: str, descr: str = "'<u2'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


def _index(*lengths: int, **lies: Any) -> Change:
    return _bytes(lambda _: index_bytes(lengths or (40, 24), **lies))


def _header(make: Callable[[dict[str, Any]], Any]) -> Change:
    """A file of safetensors with another header."""

    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        text = make(json.loads(data[8 : 8 + size]))
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return _bytes(change)


def _tensor(**facts: Any) -> Change:
    def make(header: dict[str, Any]) -> dict[str, Any]:
        first = next(name for name in header if name != "__metadata__")
        return {**header, first: {**header[first], **facts}}

    return _header(make)


def _many(path: Path, draw: random.Random) -> None:
    """A header of as many tensors as fit in 90 MB."""
    row = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    text = ("{" + ",".join(f'"t{number}":{row}' for number in range(1_300_000)) + "}").encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def _ladder(path: Path, draw: random.Random) -> None:
    """Folders with links to each other, so that there are more paths than atoms."""
    for name in "abcdefgh":
        (path / name).symlink_to(".")


def _named(name: bytes) -> Change:
    """A folder with a file of another name."""

    def change(path: Path, draw: random.Random) -> None:
        with open(os.path.join(os.fsencode(path), name), "wb") as file:
            file.write(b"x" * 64)

    return change


_FILES = ("plan", "python", "npy", "text", "tokens", "idx", "rows", "json", "arrow", "safetensors")
_TEXTS = ("plan", "python", "text", "rows", "json")
_JSON = ("json", "config")
"""A configuration that is changed a little may be that of a large model, whose capture takes its time."""
_DEEP = 100_000
KINDS = (
    Kind("missing", lambda path, draw: _remove(path), refused=True),
    Kind("empty", lambda path, draw: _gone(path).touch(), refused=True),
    Kind("a folder", lambda path, draw: _gone(path).mkdir(), refused=True),
    Kind("a link to itself", lambda path, draw: _gone(path).symlink_to(path.name), refused=True),
    Kind("a loop of links", _loop, refused=True),
    Kind("a link to nothing", _link("nowhere"), refused=True),
    Kind("a link to its folder", _link("."), refused=True),
    Kind("a link out", _link("/etc/hostname"), refused=True),
    Kind("/dev/zero", _link("/dev/zero"), refused=True),
    Kind("/dev/null", _link("/dev/null"), refused=True),
    Kind("a pipe", lambda path, draw: os.mkfifo(_gone(path)), refused=True),
    Kind("a socket", _socket, refused=True),
    Kind("not readable", _link("/proc/self/mem"), refused=True),
    Kind("4 TiB of zeros behind it", _sparse, (*_FILES, "config")),
    Kind("its half", _bytes(lambda data: data[: len(data) // 2]), _FILES),
    Kind("a byte less", _bytes(lambda data: data[:-1]), _FILES),
    Kind("a byte more", _bytes(lambda data: data + b"\1"), _FILES),
    Kind("random bytes", _some(lambda draw, data: draw.randbytes(4096)), _FILES),
    Kind("bytes of 0", _bytes(lambda data: bytes(4096)), _FILES),
    Kind("bytes of 255", _bytes(lambda data: b"\xff" * 4096), _FILES),
    Kind("one line of 40 MB", _bytes(lambda data: b"x" * 40_000_000), _TEXTS),
    Kind("40 MB of lines", _bytes(lambda data: b"x\n" * 20_000_000), _TEXTS),
    Kind("not UTF-8", _bytes(lambda data: data + b"\xff\xfe"), _TEXTS),
    Kind("UTF-16", _bytes(lambda data: data.decode("latin-1").encode("utf-16")), _TEXTS),
    Kind("deep brackets", _bytes(lambda data: data + b"(" * _DEEP), ("plan", "python", "text")),
    Kind("deep lists", _bytes(lambda data: b"[" * _DEEP + b"]" * _DEEP), (*_JSON, "rows"), refused=True),
    Kind("deep objects", _bytes(lambda data: b'{"a":' * _DEEP + b"1" + b"}" * _DEEP), (*_JSON, "rows"), refused=True),
    Kind("a number of 10^6 digits", _bytes(lambda data: b"9" * 10**6), (*_JSON, "rows"), refused=True),
    *(Kind(f"all of it {word}", _bytes(lambda data, word=word: word.encode()), (*_JSON, "rows"), refused=True)  # type: ignore[misc]
      for word in ("null", "[]", "3", '"x"', "NaN", "[[[[]]]]", '"\\ud800"')),
    *(Kind(f"each value {str(value)[:12]!r}", _each(value), _JSON) for value in (*HARD, "\ud800", "\x1b[2J", "\0")),
    Kind("keys twice", _bytes(lambda data: data.rstrip()[:-1] + b"," + data.lstrip()[1:]), _JSON),
    Kind("paths that leave", _json(lambda row: _leaving(row)), _JSON),
    *(Kind(f"JSON changed {number}", _some(_changed_json), ("json",)) for number in range(12)),
    *(Kind(f"text changed {number}", _some(_changed_text), _TEXTS) for number in range(6)),
    *(Kind(f"bytes changed {number}", _some(mutate_bytes), _FILES) for number in range(6)),
    # numpy
    *(Kind(f"an array of {name}", _array(make), ("npy",), refused=True) for name, make in {
        "objects": lambda: np.array([{}, []], object), "no dims": lambda: np.array(3, np.uint16),
        "two dims": lambda: np.ones((8, 8), np.uint16), "no numbers": lambda: np.ones(0, np.uint16),
        "fractions": lambda: np.ones(64), "complex": lambda: np.ones(64, complex),
        "dates": lambda: np.ones(64, "M8[s]"), "negative": lambda: -np.ones(64, np.int16),
        "texts": lambda: np.array(["a"] * 64), "records": lambda: np.ones(64, "u2,u2"),
        "beyond int64": lambda: np.full(64, 2**63 + 5, np.uint64),
    }.items()),
    *(Kind(f"numpy: {name}", _npy(_shape(shape, descr), **more), ("npy",), refused=True)
      for name, shape, descr, more in (
        ("2^62 numbers", f"({1 << 62},)", "'<u2'", {}), ("-5 numbers", "(-5,)", "'<u2'", {}),
        ("10^30 numbers", f"({10**30},)", "'<u2'", {}), ("no type", "(64,)", "'nothing'", {}),
        ("a type that is code", "(64,)", "__import__('os').abort()", {}), ("65 numbers", "(65,)", "'<u2'", {}),
        ("a shape of text", "'64'", "'<u2'", {}), ("a deep type", "(64,)", "[" * 5000 + "]" * 5000, {}),
        ("a header of 4 GB", "(64,)", "'<u2'", {"version": 2, "length": 2**32 - 1}),
        ("version 9", "(64,)", "'<u2'", {"version": 9}), ("numbers of 0 bytes", "(64,)", "'V0'", {}),
        ("a long header", "(64,)" + " " * 60_000, "'<u2'", {}), ("2^61 dims", f"(0, {1 << 61})", "'<u2'", {}),
    )),
    # Megatron's index
    *(Kind(f"index: {name}", change, ("idx",), refused=True) for name, change in {
        "negative lengths": _index(80, -16), "lengths that pass int32": _index(2**31 - 1, -(2**31), 65),
        "negative places": _index(places=[0, -80]), "places beyond": _index(places=[0, 10**15]),
        "places apart": _index(places=[0, 90]), "places in each other": _index(places=[0, 40]),
        "negative documents": _index(documents=[0, -1, 2]), "documents beyond": _index(documents=[0, 10**15]),
        "documents backwards": _index(documents=[2, 1, 0]), "2^62 sequences": _index(counts=(2**62, 3)),
        "2^64 - 1 documents": _index(counts=(2, 2**64 - 1)), "2^63 sequences": _index(counts=(2**63, 3)),
        "no sequences": _index(counts=(0, 0)), "version 2": _index(version=2), "type 0": _index(code=0),
        "type 250": _index(code=250), "fractions": _index(code=7), "other sizes": _index(code=4),
    }.items()),
    # safetensors
    Kind("a header of 2^63 bytes", _bytes(lambda data: b"\xff" * 8 + data[8:]), ("safetensors",), refused=True),
    Kind("a header beyond the end", _bytes(lambda data: (99_999).to_bytes(8, "little") + data[8:]), ("safetensors",),
         refused=True),
    Kind("a header of 1.3 million tensors", _many, ("safetensors",), refused=True),
    *(Kind(f"safetensors: {name}", change, ("safetensors",), refused=True) for name, change in {
        "deep": _header(lambda header: b'{"a":' * _DEEP), "a list": _header(lambda header: [header]),
        "negative offsets": _tensor(data_offsets=[-8, 0]), "offsets beyond": _tensor(data_offsets=[0, 1 << 60]),
        "offsets backwards": _tensor(data_offsets=[64, 0]), "a type that is none": _tensor(dtype="F33"),
        "2^63 rows": _tensor(shape=[2**63, 8]), "-1 rows": _tensor(shape=[-1, 8]), "many": _tensor(shape=[10**30]),
        "shapes of nothing": _tensor(shape=[0, 2**62]), "another shape": _tensor(shape=[8, 64]),
        "a name with a 0": _header(lambda header: {f"{name}\0": fact for name, fact in header.items()}),
    }.items()),
    # data of Hugging Face's
    Kind("packed", _bytes(lambda data: _packed(data)), ("rows",)),
    *(Kind(f"rows: {name}", _bytes(lambda data, text=text: text.encode() * 8), ("rows",), refused=True)  # type: ignore[misc]
      for name, text in {
        "of other lengths": '{"tokens": [1], "targets": [2, 3]}\n',
        "of text": '{"tokens": "abcd", "targets": "abcd"}\n',
        "negative": '{"tokens": [-1, 1, 2, 3], "targets": [1, 2, 3, 4]}\n', "of lists": "[[1, 2, 3, 4]]\n",
        "of fractions": '{"tokens": [0.5, 1, 2, 3], "targets": [1, 2, 3, 4]}\n',
        "of nothing": '{"tokens": null, "targets": null}\n',
        "too large": f'{{"tokens": [{10**40}, 1, 2, 3], "targets": [1, 2, 3, 4]}}\n',
        "without columns": "{}\n",
    }.items()),
    # folders
    Kind("a thousand links to itself", _ladder, ("data folder",)),
    Kind("a name that is not UTF-8", _named(b"\xff.txt"), ("data folder",)),
    Kind("a name with a line end", _named(b"a\nb\x1b[2J.txt"), ("data folder",)),
)  # fmt: skip


def _leaving(value: Any) -> Any:
    """Return a value in which each text is a path out of the folder."""
    if isinstance(value, dict):
        return {name: _leaving(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_leaving(inner) for inner in value]
    return "../../../../../../etc/passwd" if isinstance(value, str) else value


def _packed(data: bytes) -> bytes:
    """Return a gzip of rows that is a thousand times as large when it is unpacked."""
    import gzip

    return gzip.compress(data * 200_000, 1)


# ---- the cases


@dataclass(frozen=True)
class Case:
    """A command on a file of a kind."""

    reader: Reader
    kind: Kind

    def __str__(self) -> str:
        return f"{self.reader.words} | {self.reader.file}: {self.kind.name}"

    def outcome(self, number: int, made: Path) -> Outcome:
        """Run the command on a copy of the good files, in which the one is changed."""
        with tempfile.TemporaryDirectory(prefix="parc-hostile-") as place:
            folder = Path(shutil.copytree(made, Path(place) / "files", symlinks=True))
            self.kind.change(folder / self.reader.file, random.Random(str(self)))
            if self.reader.rehash and (folder / self.reader.file).is_file() and _is_small(folder / self.reader.file):
                rehash(folder / self.reader.rehash)
            with chdir(folder):
                outcome = read_input(number, str(self), lambda: run(self.reader.words))
        if outcome.end == "refused" and not CODE.search(outcome.said):
            outcome.end = f"an error without a code\n{outcome.said[-3000:]}"
        if outcome.end == "accepted" and self.kind.refused and not self.reader.optional:
            outcome.end = f"accepted\n{outcome.said[-1000:]}"
        return outcome


def _is_small(path: Path) -> bool:
    return path.stat().st_size < 1 << 27 and not str(path.resolve()).startswith("/proc")


def cases() -> list[Case]:
    """Return every kind for every reader whose file may be of it."""
    outside = ("folder", "out", "data folder")
    return [
        Case(reader, kind) for reader in readers() for kind in KINDS
        if (reader.form in kind.forms if kind.forms else reader.form not in outside or kind.name != "a folder")
    ]  # fmt: skip


def sample(every: int, chosen: Iterable[Case]) -> list[Case]:
    """Return one of ``every`` cases, of all kinds and readers about as many."""
    return sorted(chosen, key=lambda case: random.Random(str(case)).random())[::every]


def run_cases(
    made: Path,
    chosen: Sequence[Case],
    each: Callable[[Outcome], None] = lambda _: None,
    limits: tuple[float, int] = LIMITS,
) -> Summary:
    """Run cases, each in a process of its own kind, and sum them up."""
    summary = Summary(0)
    for outcome in in_worker(lambda at: chosen[at].outcome(at, made), range(len(chosen)), limits):
        outcome.what = str(chosen[outcome.number])
        each(outcome)
        summary.add(outcome)
    return summary


def warm(made: Path) -> list[str]:
    """Run every command on the good files, so that what it loads is not counted. Return those that fail."""
    wrong = []
    for words in dict.fromkeys(reader.words for reader in readers()):
        with tempfile.TemporaryDirectory(prefix="parc-hostile-") as place:
            folder = Path(shutil.copytree(made, Path(place) / "files"))
            with chdir(folder):
                outcome = read_input(0, words, lambda words=words: run(words))  # type: ignore[misc]
        wrong += [] if outcome.end == "accepted" else [f"{words}: {outcome.end}\n{outcome.said}"]
    return wrong


def command() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose line matches this pattern")
    parser.add_argument("--every", type=int, default=1, help="one of so many cases")
    parser.add_argument("--seconds", type=float, default=LIMITS[0], help="the most that a case may take")
    parser.add_argument("--all", action="store_true", help="print a line for each case")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="parc-hostile-") as folder:
        made = Path(folder) / "files"
        prepare(made)
        wrong = warm(made)
        chosen = sample(given.every, (case for case in cases() if re.search(given.only, str(case))))
        heads: Counter[str] = Counter()

        def each(outcome: Outcome) -> None:
            code = CODE.search(outcome.said)
            heads[code[0] if code else "-"] += 1
            if given.all:
                end = outcome.end.partition("\n")[0]
                size = f"{outcome.seconds:5.1f} s {outcome.bytes >> 20:5} MiB"
                print(f"{end:10.10} {code[0] if code else '':12} {size}  {outcome.what}", flush=True)

        summary = run_cases(made, chosen, each, (given.seconds, LIMITS[1]))
    kinds = len({case.kind.name for case in chosen})
    print("\n".join(f"not good: {line}" for line in wrong))
    for outcome in summary.bad:
        print(f"--- {outcome.what}:\n{outcome.end}")
    print(f"{len(chosen)} cases, {kinds} kinds: {summary.ends['refused']} refused with a code, "
          f"{summary.ends['accepted']} accepted, {summary.ends['not borne']} not borne; slowest "
          f"{summary.slowest.seconds:.1f} s ({summary.slowest.what}); largest {summary.largest >> 20} MiB")  # fmt: skip
    print(", ".join(f"{code} {count}" for code, count in heads.most_common()))
    return int(bool(summary.bad or wrong))


if __name__ == "__main__":
    sys.exit(command())
