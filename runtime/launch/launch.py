"""The launch of a run's processes: a thin layer over torch's elastic agent, on one host without an open port."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..ranks.processes import DEVICE, STORE
from .failures import Failure, Hanging, read_failure, stop_of
from .lifeline import line_held
from .voices import VOICES, Voices, stop_signals

_ONE_HOST = "parc-one-host"
_STOP_S = 300  # seconds that ranks may take to save after SIGTERM, before they are killed


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run: ``nproc`` on this host, which is one of ``nnodes``."""

    nproc: int
    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str = ""
    device: str | None = None
    logs: Path | None = None
    """The folder for the output of all ranks but each host's first; without it they print where the first does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run: the exit code of the command, and the failure that explains it."""

    exit_code: int
    failure: Failure | None = None


def launch(command: Sequence[str], processes: Processes) -> Outcome:
    """Run ``command`` (arguments of this Python) in every process until all end, or one fails and the rest are stopped.

    SIGTERM and SIGINT are passed on to the processes, which then have time to save.
    """
    for name in logging.root.manager.loggerDict:  # torch gives each of them a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="parc-run-") as folder:
        config = LaunchConfig(
            min_nodes=processes.nnodes, max_nodes=processes.nnodes, nproc_per_node=processes.nproc,
            run_id=_run_id(processes), role="parc", max_restarts=0, monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(number.name for number in stop_signals()), **_rendezvous(processes),
        )  # fmt: skip
        with (
            _environment(_variables(processes, Path(folder))),
            line_held(Path(folder)),
            Voices(Path(folder), processes.logs),
            Hanging(Path(folder)) as hanging,
        ):
            try:
                elastic_launch(config, sys.executable)(*command)
            except ChildFailedError as error:
                return _outcome(error.failures, Path(folder), hanging.reports)
            except SignalException as stopped:
                number = int(stopped.sigval)
                return Outcome(128 + number, stop_of(number, Path(folder)))
            except KeyboardInterrupt:
                return Outcome(128 + signal.SIGINT)
            except (RendezvousError, dist.DistError) as error:
                message = f"the hosts of the run did not meet at `{processes.endpoint}`: {error}"
                message += "\nhelp: `--rdzv-endpoint` is where the first host is, at a port that the others reach"
                return Outcome(4, Failure(None, time.time(), 4, message))
    return Outcome(0)


def _rendezvous(processes: Processes) -> dict[str, Any]:
    if processes.nnodes == 1:
        rendezvous_handler_registry.register(_ONE_HOST, _OneHost)
        return {"rdzv_backend": _ONE_HOST}
    if processes.node_rank is None:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": processes.endpoint}
    configs = {"rank": processes.node_rank, "timeout": 900}
    return {"rdzv_backend": "static", "rdzv_endpoint": processes.endpoint, "rdzv_configs": configs}


def _run_id(processes: Processes) -> str:
    """Return the name of a run, which all of its hosts know: the place where they meet."""
    return uuid.uuid4().hex if processes.nnodes == 1 else f"parc-{processes.endpoint}"


@final
class _OneHost(RendezvousHandler):
    """The rendezvous of one agent with itself: torch's own would start a TCPStore, which listens on all interfaces."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        stores: Any = dist  # torch does not declare what it exports there
        self._store = stores.HashStore()

    def get_backend(self) -> str:
        """Return the name under which this rendezvous is registered."""
        return _ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rank and world of nodes: one. Processes meet through a file, so address and port are not used."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        """Return False: it ends with its process."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nothing is open."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: nothing is open."""
        return True


KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}  # fmt: skip
"""Settings of glibc. A step allocates the sizes that the last one freed, so freed memory stays with the process, as in
the caching allocator of a GPU. Large pages save misses of the TLB in products."""


def _variables(processes: Processes, folder: Path) -> dict[str, str]:
    """Return the environment variables beside those that the agent sets. A person's own settings are kept."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {
        "OMP_NUM_THREADS": str(max(1, cores // processes.nproc)),
        # In the agent's store, a group that is started again would find the entries of the group that failed.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_STOP_S),
        **KEEP_MEMORY,
    }
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if processes.nnodes == 1 and loopback is not None:
        variables.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback))
    variables = {name: value for name, value in variables.items() if name not in os.environ}
    variables[VOICES] = str(folder)
    if processes.nnodes == 1:
        variables[STORE] = str(folder / "store")
    if processes.device is not None:
        variables[DEVICE] = processes.device
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Enter a block in which child processes inherit a changed environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _outcome(failures: Mapping[int, ProcessFailure], folder: Path, hanging: Sequence[str] = ()) -> Outcome:
    """Return the outcome of failed processes. The earliest failure that does not follow another explains the others. A
    rank for which others waited too long does not end on SIGTERM, and is killed."""
    reports = {
        rank: read_failure(rank, failure.exitcode, Path(failure.error_file)) for rank, failure in failures.items()
    }
    late = any(failure.late for failure in reports.values())
    hung = {rank for rank, failure in failures.items() if late and failure.exitcode == -signal.SIGKILL}
    first = min(reports.items(), key=lambda item: (item[1].follows or item[0] in hung, item[1].time_s))[1]
    # Ranks that ended after the agent gave up are not in `failures`: all files are read for what ranks waited for.
    waited = sorted({read_failure(0, 1, place).waited for place in folder.rglob("error.json")} - {"", first.waited})
    first = replace(first, message="\n".join([first.message, *waited, *hanging]))
    return Outcome(first.exit_code, None if first.exit_code > 128 else first)
