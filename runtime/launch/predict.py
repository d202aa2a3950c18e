"""The loop of ``parc run --predict`` on one rank: all samples of some data in their order, and what the model returns
for them in a folder of safetensors files."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file

from ...compiler.build.folders import FolderError, check_place, replacing
from ...grammar.codes_build import BAD_STATE
from ..evaluation import Evaluation
from ..faults import RunError
from ..session import Session
from .failures import begin
from .train import Stop

PREDICTIONS = "predictions.json"
"""The file of a folder of predictions that says what is in the others; it is written last."""
PART_BYTES = 64 << 20
"""The bytes after which a part ends. A part has whole batches."""
_SHOWN_S = 2.0
"""The time between two lines of progress, in seconds."""


@dataclass(frozen=True, slots=True)
class Predict:
    """The options of a run that predicts: its ``samples``, as a `data` line's in a manifest, the folder of the files,
    and a checkpoint whose weights are used."""

    samples: Mapping[str, Any]
    out: Path
    resume: Path | None = None


def check_predictions(out: Path) -> None:
    """Check that predictions may be written to a folder.

    Raises:
        RunError: it holds something else, which is left as it is, or is the current folder.
    """
    try:
        check_place(out)
    except FolderError as error:
        raise RunError(BAD_STATE, str(error), "name a folder to be made in it") from None
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / PREDICTIONS).is_file())):
        message = f"`{out}` exists and does not hold predictions; it is left as it is"
        raise RunError(BAD_STATE, message, "name another folder with `-o`")


@final
@dataclass
class _Parts:
    """The files of predictions as they are written to a folder. ``dims`` are the dims along which tensors have their
    samples; those without one are in the first file alone."""

    folder: Path
    dims: Mapping[str, int | None]
    parts: list[dict[str, Any]] = field(default_factory=list)
    _waiting: list[tuple[int, Mapping[str, torch.Tensor]]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, samples: int, returned: Mapping[str, torch.Tensor]) -> None:
        """Add a batch; write a file once there are enough."""
        self._waiting.append((samples, returned))
        self._bytes += sum(tensor.nbytes for tensor in returned.values())
        if self._bytes >= PART_BYTES:
            self.write()

    def write(self) -> None:
        """Write what waits to a file."""
        if not self._waiting:
            return
        batches, tensors = [returned for _, returned in self._waiting], dict[str, torch.Tensor]()
        for name, dim in self.dims.items():
            if dim is not None:
                tensors[name] = torch.cat([batch[name] for batch in batches], dim)
            elif not self.parts:
                tensors[name] = batches[0][name].clone(memory_format=torch.contiguous_format)
        name = f"part-{len(self.parts):05d}.safetensors"
        save_file(tensors, self.folder / name)
        (self.folder / name).chmod(0o644)
        self.parts.append({"file": name, "samples": sum(samples for samples, _ in self._waiting)})
        self._waiting, self._bytes = [], 0

    def end(self, facts: Mapping[str, Any]) -> None:
        """Write the last file, and the index."""
        self.write()
        index = {**facts, "dims": dict(self.dims), "parts": self.parts}
        (self.folder / PREDICTIONS).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class _Stopped(Exception):
    """The end of a run of which a signal, the only argument, asked some rank."""


def predict(session: Session, options: Predict) -> int:
    """Write what the model returns for all samples. Rank 0 writes, and holds one part at a time; the folder gets its
    name once it is complete. Return 0, or 128 + the number of the signal that stopped every rank.

    Raises:
        RunError: data, checkpoint or folder are at fault, or the model returns nothing to predict.
    """
    if options.resume is not None:
        session.restore(options.resume, weights_only=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(session)
            stop = stack.enter_context(Stop())
            begin()
            evaluation = session.evaluation.on(options.samples)
            stack.callback(evaluation.close)
            _write(session, evaluation, options, lambda: stop.signal)
    except _Stopped as stopped:
        if session.rank == 0:
            print(f"stopped by {signal.Signals(stopped.args[0]).name}; nothing was written", file=sys.stderr)
        return 128 + int(stopped.args[0])
    return 0


def _write(session: Session, evaluation: Evaluation, options: Predict, stop: Callable[[], int]) -> None:
    """Write the parts and the index.

    Raises:
        _Stopped: a rank was asked to stop; what was written is gone.
    """
    batches = evaluation.predict_all(session.state)
    total, done, began = next(batches)[0], 0, time.perf_counter()
    shown, parts = began, list[_Parts]()
    with ExitStack() as folder:

        def first_rank(act: Callable[[], None]) -> None:
            """Do something on the first rank; where it fails, all ranks fail."""

            def doing() -> None:
                if session.rank == 0:
                    try:
                        act()
                    except (OSError, FolderError) as error:
                        message = f"`{options.out}` cannot be written: {error}"
                        raise RunError(BAD_STATE, message, "name another folder, or free some space") from None

            if asked := max(row[0] for row in session.exchange([stop()], doing)):
                raise _Stopped(asked)

        def begin_parts() -> None:
            check_predictions(options.out)
            parts.append(_Parts(folder.enter_context(replacing(options.out)), evaluation.sample_dims))

        def end_parts() -> None:
            checkpoint = None if options.resume is None else str(options.resume.resolve())
            parts[0].end({"samples": total, "build": str(session.build.path.resolve()), "checkpoint": checkpoint})
            folder.close()

        first_rank(begin_parts)
        for samples, returned in batches:
            first_rank(partial(_add, parts, samples, returned))
            done, now = done + samples, time.perf_counter()
            if session.rank == 0 and (now - shown >= _SHOWN_S or done == total):
                shown = now
                print(f"{done:,} of {total:,} samples, {done / (now - began):.4g} a second", file=sys.stderr)
        first_rank(end_parts)


def _add(parts: list[_Parts], samples: int, returned: Mapping[str, torch.Tensor]) -> None:
    parts[0].add(samples, returned)
