"""Writers of a run's figures, one class for each form: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol, final

from ...compiler.build.output_files import FileKind, check_file, open_output
from ...compiler.torch_private import quiet
from ...grammar.codes import NO_PACKAGE, UNWRITTEN
from ..ranks.faults import RunError, writing


class FiguresWriter(Protocol):
    """A writer of the figures of every step. Only rank 0 opens one. ``note`` is a sentence for the start of the run."""

    note: str

    def step(self, step: int, loss: float, **figures: Any) -> None:
        """Write the figures of one step, whose number is from 1.

        Raises:
            RunError: they cannot be written.
        """

    def close(self, failed: bool = False) -> None:
        """Write what is buffered, and, where the form has a place for it, whether the run ``failed``.

        Raises:
            RunError: it cannot be written.
        """


_METRICS = FileKind("a file of metrics", re.compile(rb'\{"run": \{'))


@dataclass(frozen=True, slots=True)
class FigurePlaces:
    """The places for a run's figures that a person named."""

    metrics: Path | None = None
    tensorboard: Path | None = None
    wandb: str = ""

    def check(self) -> None:
        """Check that the packages of the named places are installed, and that a file of metrics is parc's to write.

        Raises:
            RunError: one is not.
        """
        if self.metrics is not None:
            with writing(self.metrics):
                check_file(self.metrics, _METRICS)
        for option, package, named in (("tensorboard", TensorBoard.package, self.tensorboard),
                                       ("wandb", WandB.package, self.wandb)):  # fmt: skip
            if named and find_spec(package) is None:
                message = f"--{option} needs the package `{package}`, which is not installed"
                raise RunError(NO_PACKAGE, message, f"`pip install {package}`; or run without --{option}")

    def open(self, run: Mapping[str, Any], append: bool) -> Iterator[FiguresWriter]:
        """Open a writer for each place. ``run`` has the facts of the run, among them the step at which it starts; with
        ``append`` the run goes on from a checkpoint.

        Raises:
            RunError: a place cannot be written.
        """
        if self.metrics is not None:
            yield MetricsFile(self.metrics, run, append)
        if self.tensorboard is not None:
            yield TensorBoard(self.tensorboard, run, append)
        if self.wandb:
            yield WandB(self.wandb, run)


@final
class MetricsFile:
    """A file of JSON lines: first ``{"run": …}``, then one object a step; a line is written whole, and at once.

    An older one is replaced, or continued with ``append=True`` (a resumed run writes another ``run`` line).
    A number that JSON does not have (NaN, infinity) becomes ``null``.

    Raises:
        RunError: the file cannot be written, now or later, or is there and is no file of metrics.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], append: bool = False) -> None:
        self._path, self.note = path, ""
        with writing(path):
            check_file(path, _METRICS)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open_output(path, "ab" if append else "wb")
        self._write({"run": dict(run)})

    def step(self, step: int, loss: float, **figures: Any) -> None:
        """Write one step's line: its number from 1, the global mean loss, and figures such as ``tokens`` and
        ``step_s``."""
        self._write({"step": step, "loss": loss, **figures})

    def _write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(_without_nan(line), allow_nan=False) + "\n").encode()
        start = self._file.tell() if self._file.seekable() else None
        with writing(self._path):
            try:
                while data:  # a disk that is almost full may write a part
                    data = data[self._file.write(data) :]
            except OSError:
                if start is not None:
                    self._file.truncate(start)  # no half lines
                raise

    def close(self, failed: bool = False) -> None:
        """Close the file; more than once does no harm."""
        with writing(self._path):
            self._file.close()


@final
class TensorBoard:
    """A folder of TensorBoard's event files: a curve for each number, and the run's facts as text.

    A resumed run hides the curves that an earlier one wrote beyond its start.

    Raises:
        RunError: the folder cannot be written, now or later.
    """

    package = "tensorboard"

    def __init__(self, folder: Path, run: Mapping[str, Any], append: bool = False) -> None:
        self._folder, self.note = folder, ""
        with quiet():
            summary = import_module("torch.utils.tensorboard").SummaryWriter
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = summary(str(folder), purge_step=run["start"] + 1 if append else None)
        self._writer.add_text("run", "\n".join(f"- {name}: {value}" for name, value in run.items()), run["start"])

    def step(self, step: int, loss: float, **figures: Any) -> None:
        """Write one point of each curve."""
        with writing(self._folder):
            for name, value in _curves({"loss": loss, **figures}):
                self._writer.add_scalar(name, value, step)

    def close(self, failed: bool = False) -> None:
        """Write buffered points, and close the file."""
        with writing(self._folder):
            self._writer.close()


@final
class WandB:
    """A run of Weights & Biases, kept in the folder ``wandb`` and sent nowhere, unless a person's ``WANDB_MODE`` and
    ``WANDB_DIR`` say otherwise.

    Raises:
        RunError: the run cannot be begun, or its figures can no longer be written.
    """

    package = "wandb"

    def __init__(self, project: str, run: Mapping[str, Any]) -> None:
        with quiet():
            wandb = import_module(self.package)
        self._teardown = wandb.teardown
        with _calling_wandb("begins no run"):
            self._run = wandb.init(
                project=project, config=dict(run), mode=os.environ.get("WANDB_MODE", "offline"),
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
            )  # fmt: skip
        folder = os.path.relpath(self._run.settings.sync_dir)
        self.note = f"the figures are kept in {folder}: `wandb sync {folder}` sends them" if self._run.offline else ""

    def step(self, step: int, loss: float, **figures: Any) -> None:
        """Write one point of each curve."""
        with _calling_wandb("keeps no figures"):
            self._run.log(dict(_curves({"loss": loss, **figures})), step=step)

    def close(self, failed: bool = False) -> None:
        """Finish the run, as a failed one if it ``failed``, and wait until its writer process has written all of it."""
        with _calling_wandb("does not finish its run"):
            self._run.finish(exit_code=int(failed))
            self._teardown()


@contextmanager
def _calling_wandb(refused: str) -> Iterator[None]:
    """Enter a block that calls the package ``wandb``, whose writer process may be gone.

    Raises:
        RunError: the call fails in any way; ``refused`` says for the message at what.
    """
    try:
        yield
    except Exception as error:
        raise RunError(UNWRITTEN, f"`wandb` {refused}: {error}", "run without --wandb") from error


_MOST_RANKS = 16  # curves of one figure


def _curves(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each number with the name of its curve. A list, of a number for each rank, has a curve of the largest, and
    one for each rank if they are few. Lists by name, as the loads of experts, have none: other figures summarize
    them."""
    for name, value in figures.items():
        if isinstance(value, list):
            yield f"{name}/most", max(value)
            if len(value) <= _MOST_RANKS:
                yield from ((f"{name}/rank {rank}", item) for rank, item in enumerate(value))
        elif not isinstance(value, Mapping):
            yield name, value


def _without_nan(value: Any) -> Any:
    """Return the value with None in place of every number that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
