"""The loop of ``parc run --predict`` on one rank: what the model returns for all samples of some data, in their order,
as a folder of safetensors files."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...compiler.build.folders import replacing
from ...grammar.syntax import size_text
from ..faults import writing
from ..session import Session
from .failures import begin
from .train import Stop

FIRST_WEIGHTS = (
    "warning: the weights are the model's first ones, which no step has trained: name a checkpoint with `--resume"
    " CHECKPOINT`, or weights of other tools with an `init from` line in the plan"
)
PREDICTIONS = "predictions.json"
"""The file that says what is in the others; it is written last."""
PART_BYTES = 64 << 20
"""The bytes after which a file ends, behind a whole batch."""
_SHOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Predict:
    """The options of a run that predicts: its ``samples``, as a `data` line's in a manifest, the folder of the files,
    and a checkpoint whose weights are used."""

    samples: Mapping[str, Any]
    out: Path
    resume: Path | None = None


@dataclass
class _Parts:
    """The files of predictions, in a folder that gets its name once all are ``ended``. ``dims`` are the dims along
    which tensors have their samples; a tensor without one is in the first file alone."""

    out: Path
    dims: Mapping[str, int | None]
    files: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[tuple[int, Mapping[str, torch.Tensor]]] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    folder: Path | None = None
    bytes: int = 0

    def add(self, samples: int, returned: Mapping[str, torch.Tensor]) -> None:
        """Add a batch; write a file once there are enough."""
        self.waiting.append((samples, returned))
        if sum(tensor.nbytes for _, batch in self.waiting for tensor in batch.values()) >= PART_BYTES:
            self.write()

    def write(self) -> None:
        """Write what waits to a file."""
        with writing(self.out):
            self.folder = self.folder or self.stack.enter_context(replacing(self.out))
            batches = [batch for _, batch in self.waiting]
            tensors = {
                name: torch.cat([batch[name] for batch in (batches if dim is not None else batches[:1])], dim or 0)
                for name, dim in self.dims.items() if batches and (dim is not None or not self.files)
            }  # fmt: skip
            name = f"part-{len(self.files):05d}.safetensors"
            save_file(tensors, self.folder / name)
            (self.folder / name).chmod(0o644)
            self.bytes += (self.folder / name).stat().st_size
        self.files.append({"file": name, "samples": sum(samples for samples, _ in self.waiting)})
        self.waiting = []

    def end(self, facts: Mapping[str, Any]) -> None:
        """Write the last file and the index, name the folder, and say so."""
        if self.waiting:
            self.write()
        with writing(self.out):
            assert self.folder is not None
            text = json.dumps({**facts, "dims": dict(self.dims), "parts": self.files}, indent=1)
            self.bytes += (self.folder / PREDICTIONS).write_bytes(f"{text}\n".encode())
            self.stack.close()
        files = f"{len(self.files):,} file{'s' * (len(self.files) != 1)} of tensors"
        print(f"written {self.out}: {files} and {PREDICTIONS}, {size_text(self.bytes)}", file=sys.stderr)


def predict(session: Session, options: Predict) -> int:
    """Write what the model returns for all samples. The first rank writes, and holds one file at a time. Return 0, or
    128 + the number of the signal that stopped every rank.

    Raises:
        RunError: data, checkpoint or folder are at fault, or the model returns nothing to predict.
    """
    if options.resume is not None:
        session.restore(options.resume, weights_only=True)
    with session, Stop() as stop, ExitStack() as stack:
        begin()
        if options.resume is None and session.build.manifest["init"] is None and session.rank == 0:
            print(FIRST_WEIGHTS, file=sys.stderr)
        evaluation = session.evaluation.on(options.samples)
        stack.callback(evaluation.close)
        total, done, began = evaluation.count, 0, time.perf_counter()
        shown, parts, first = began, _Parts(options.out, evaluation.sample_dims), session.rank == 0
        stack.push(lambda *_: parts.stack.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None))
        for samples, returned in evaluation.predict_all(session.state):
            rows = session.exchange([stop.signal], partial(parts.add, samples, returned) if first else None)
            if asked := max(row[0] for row in rows):
                if first:
                    print(f"stopped by {signal.Signals(asked).name}; nothing was written", file=sys.stderr)
                return 128 + asked
            done, now = done + samples, time.perf_counter()
            if first and (now - shown >= _SHOWN_S or done == total):
                shown = now
                print(f"{done:,} of {total:,} samples, {done / (now - began):.4g} a second", file=sys.stderr)
        checkpoint = None if options.resume is None else str(options.resume.resolve())
        facts = {"samples": total, "build": str(session.build.path.resolve()), "checkpoint": checkpoint}
        session.exchange([], partial(parts.end, facts) if first else None)
    return 0
