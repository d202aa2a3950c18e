"""The functions of a person's own loop: a session of a build, and the batches of a dataset for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...compiler.capture.model_calls import free_parameters
from ..compare.first_check import first_check
from ..data.loader import Loader
from ..data.sizes import bound_build
from ..ranks.lockstep import Lockstep
from ..ranks.processes import default_device, join_processes, launched
from ..session.one_build import hold_one_build
from ..session.session import Session
from ..state.opening import open_build, task_of


def load(
    path: Path | str,
    device: torch.device | str | None = None,
    sizes: Mapping[str, int] | None = None,
    *,
    compile: bool = False,
    trace: bool = False,
    check: bool = False,
) -> Session:
    """Open a session of a build. If torchrun started the process, and there is no process group yet, make one.

    With ``check`` the session's backend, kernels and options first repeat one step of the small programs on which the
    build was tested, as ``parc run`` does; ``session.checked`` says what it covered. Every rank loads with it then.

    ``sizes`` are those of the batches of the plan's data, if the plan declares ranges.

    Raises:
        RunError: the build, torch, the sizes or the number of processes does not fit, ranks do not run one build, there
            is no compiler, or with ``check`` a tensor differs by more than roundings explain.
    """
    if launched() and not dist.is_initialized():
        device = join_processes(torch.device(device) if device is not None else None)
    device = torch.device(device) if device is not None else default_device()
    together = Lockstep.joined(device)
    build = together.agreed("parc.load", lambda: bound_build(open_build(path), sizes or {}))
    hold_one_build(together, build, device, {"compile": compile, "trace": trace, "check": check})
    outcome = first_check(build, device, compile=compile) if check else None
    session = Session(build, device, compile=compile, trace=trace)
    session.checked = "" if outcome is None else outcome.text()
    return session


def dataloader(
    session: Session,
    dataset: Any,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    workers: int = 0,
    drop_last: bool = False,
    name: str = "data",
) -> Loader:
    """Return the batches of a dataset. Each rank gets its own samples of a batch: ``session.step(local=batch)``.

    ``dataset`` has ``dataset[i]`` and a length, or it is an iterable of samples or batches. A sample is a dict by the
    names of the plan's inputs, or a tuple in the order of its ``input`` lines. With ``shuffle`` each epoch has another
    order, chosen by ``seed`` (default: the plan's). ``workers`` is the number of processes of each rank that read
    ahead. The last batch of an epoch may be smaller. If the plan has a range for B, it has its own size. Else it is
    completed by samples whose targets are ignored: its loss is the mean over its own samples. With ``drop_last`` it is
    left out. If a session has several loaders, give each a ``name``: each has its
    own position in checkpoints.

    Every rank makes the loader alike, with the same ``seed`` too: it chooses each rank's samples itself. A warning
    names entries of samples that the model's forward takes, and no ``input`` line.

    Raises:
        RunError: the dataset is not one, or is empty, or has less than one batch under ``drop_last``; its last batch is
            smaller, and the completing samples would change the loss; or another dataset has a loader with this name.
            With the first batch, on every rank: the loaders of two ranks differ.
    """
    seed = int(session.build.manifest["seed"]) if seed is None else seed
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "workers": workers, "drop_last": drop_last}
    free = free_parameters(session._initial.module, task_of(session.build.manifest))
    return Loader(session._by_sizes, session._together, dataset, free, **options, name=name)
