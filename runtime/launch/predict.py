"""The loop of ``parc run --predict`` on one rank: the model's results for all samples of some data, in their order, as
a folder of safetensors files."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from ...compiler.build.folders import FolderKind, replacing
from ...grammar.bounded import read_json, real_path
from ...grammar.syntax import size_text
from ..session.session import Session
from ..state.checkpoint import check_target
from ..state.saving import writing_folder
from ..state.shards import Piece, write_shard
from .failures import begin, stop_said
from .train import Stop

FIRST_WEIGHTS = (
    "warning: the weights are the model's first ones, which no step has trained: name a checkpoint with `--resume"
    " CHECKPOINT`, or weights of other tools with an `init from` line in the plan"
)
PREDICTIONS = "predictions.json"
"""The index of the other files; it is written last."""
PART_BYTES = 64 << 20
"""The bytes after which a file ends, with a whole batch."""
_SHOWN_S = 2.0
"""The seconds between two lines of progress."""


def check_predictions(folder: Path) -> None:
    """Check that predictions may be written at ``folder``.

    Raises:
        RunError: it holds something else, which is left as it is, or is the current folder.
    """
    check_target(folder, _PREDICTED)


def _prediction_files(folder: Path) -> tuple[str, ...] | None:
    """Return the names of a folder's files, as the index of predictions tells; None without such an index."""
    try:
        index = read_json(folder / PREDICTIONS)
        names = [part["file"] for part in index["parts"]] if {"samples", "dims", "build"} <= index.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    known = names is not None and all(isinstance(name, str) and _PART.fullmatch(name) for name in names)
    return (*names, PREDICTIONS) if names is not None and known else None


_PART = re.compile(r"part-\d{5,9}\.safetensors")
_PREDICTED = FolderKind("a folder of predictions", _prediction_files)


@final
class _PredictionFiles:
    """The files of predictions, in a folder that gets its name at the ``end``; an error that unwinds the ``stack``
    removes it. ``dims`` are the dims along which tensors have their samples; a tensor without one is only in the first
    file."""

    def __init__(self, out: Path, dims: Mapping[str, int | None], stack: ExitStack) -> None:
        self._out, self._dims, self._stack = out, dims, stack
        self._replaces = out.exists()
        self._parts: list[dict[str, Any]] = []
        self._waiting: list[tuple[int, Mapping[str, torch.Tensor]]] = []
        self._bytes = 0

    def begin(self) -> None:
        """Make the folder."""
        check_predictions(self._out)
        with writing_folder(self._out):
            self._folder = self._stack.enter_context(replacing(self._out, _PREDICTED))

    def add(self, samples: int, returned: Mapping[str, torch.Tensor]) -> None:
        """Add a batch; write a file once there are bytes enough."""
        self._waiting.append((samples, returned))
        if sum(tensor.nbytes for _, batch in self._waiting for tensor in batch.values()) >= PART_BYTES:
            self._write()

    def _write(self) -> None:
        batches = [batch for _, batch in self._waiting]
        tensors = {name: torch.cat([batch[name] for batch in batches], dim) if dim is not None else batches[0][name]
                   for name, dim in self._dims.items() if dim is not None or not self._parts}  # fmt: skip
        file = f"part-{len(self._parts):05d}.safetensors"
        with writing_folder(self._out, file):
            pieces = {name: Piece.whole(tensor) for name, tensor in tensors.items()}
            self._bytes += write_shard(self._folder / file, pieces).bytes
        self._parts.append({"file": file, "samples": sum(samples for samples, _ in self._waiting)})
        self._waiting = []

    def end(self, facts: Mapping[str, Any]) -> None:
        """Write the last file and the index, give the folder its name, and say so."""
        if self._waiting:
            self._write()
        text = json.dumps({**facts, "dims": dict(self._dims), "parts": self._parts}, indent=1)
        with writing_folder(self._out):
            self._bytes += (self._folder / PREDICTIONS).write_bytes(f"{text}\n".encode())
            self._stack.close()
        files = f"{len(self._parts):,} file{'s' * (len(self._parts) != 1)} of tensors and {PREDICTIONS}"
        older = ", in place of older ones" * self._replaces
        print(f"written {self._out}: {files}, {size_text(self._bytes)}{older}", file=sys.stderr)


class _Stopped(Exception):
    """A signal asked every rank to stop."""


def predict(session: Session, out: Path, resume: Path | None = None) -> int:
    """Write the model's results for all samples that a session ``with_samples`` reads, with the weights of a checkpoint
    if there is one. The first rank writes, and holds one file at a time. Return 0, or 128 + the number of the signal
    that stopped every rank.

    Raises:
        RunError: data, checkpoint or folder are at fault, or the model returns nothing to predict.
    """
    if resume is not None:
        session.restore(resume)
    elif session.build.manifest["init"] is None and session.rank == 0:
        print(FIRST_WEIGHTS, file=sys.stderr)
    checkpoint = None if resume is None else str(real_path(resume))
    try:
        with session, Stop() as stop, ExitStack() as stack:
            begin()
            _write_all(
                session, _PredictionFiles(out, session.evaluation.sample_dims, stack), stop, {"checkpoint": checkpoint}
            )
    except _Stopped as stopped:
        (number,) = stopped.args
        if session.rank == 0:
            print(f"stopped by {signal.Signals(number).name}; nothing was written", file=sys.stderr)
        stop_said()
        return int(128 + number)
    return 0


def _write_all(session: Session, files: _PredictionFiles, stop: Stop, facts: Mapping[str, Any]) -> None:
    def first(act: Callable[..., None], *arguments: Any) -> Callable[[], None] | None:
        return partial(act, *arguments) if session.rank == 0 else None

    total, done, began = session.evaluation.count, 0, time.perf_counter()
    shown = began
    session.exchange([], first(files.begin))
    for samples, returned in session.evaluation.predict_all(session.state):
        rows = session.exchange([stop.signal], first(files.add, samples, returned))
        if number := max(row[0] for row in rows):
            raise _Stopped(number)
        done, now = done + samples, time.perf_counter()
        if session.rank == 0 and (now - shown >= _SHOWN_S or done == total):
            shown = now
            print(f"{done:,} of {total:,} samples, {done / (now - began):.4g} a second", file=sys.stderr)
    session.exchange([], first(files.end, {"samples": total, "build": str(real_path(session.build.path)), **facts}))
