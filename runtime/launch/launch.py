"""The launch of a run's processes on this host: a thin layer over torch's elastic agent. A run of one host has no open
port; the hosts of others have met before."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn, final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ...grammar.scratch import scratch
from ..ranks.processes import DEVICE, KEEP_MEMORY, STORE, TIMEOUT_S
from .failures import Failure, Hanging, read_failure, stop_of
from .hosts import Hosts
from .voices import VOICES, Voices, stop_signals

_MET = "parc"
"""The name of parc's rendezvous in torch's registry."""
_STOP_S = 300  # seconds that ranks may take to save after SIGTERM, before they are killed


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run: ``nproc`` on this host, and as many on each of the other ``hosts``, if there are any."""

    nproc: int
    hosts: Hosts | None = None
    device: str | None = None
    logs: Path | None = None
    """The folder for the output of all ranks but each host's first; without it they print where the first does."""
    timeout_s: float = TIMEOUT_S
    """The seconds that ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run: the exit code of the command, and the failure that explains it."""

    exit_code: int
    failure: Failure | None = None


def launch(command: Sequence[str], processes: Processes) -> Outcome:
    """Run ``command`` (arguments of this Python) in every process until all end, or one fails and the rest are stopped.

    The first signal that stops runs is passed on to the processes, which then have time to save; more do nothing. So it
    is, too, after the end: only last words are left. The outcome is that of all hosts.
    """
    stops = _Stops()
    for name in logging.root.manager.loggerDict:  # torch gives each of them a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    hosts = processes.hosts
    with scratch("run") as folder:  # whose line ranks watch
        with (
            _environment(_variables(processes, folder)),
            Voices(folder, processes.logs),
            Hanging(folder, hosts, processes.timeout_s) as hanging,
        ):
            code, failures = _run(command, processes, folder, stops)
        failures, notes = _explained(failures, folder, hanging.late())
    codes, notes = [code], [*notes, *hanging.reports]
    if hosts is not None:
        try:
            with stops.heard():
                hosts.end(code, failures, notes)
        except SignalException as stopped:  # nobody waits for other hosts then
            return Outcome(128 + int(stopped.sigval))
        failures, notes = [*failures, *hosts.failures], [*notes, *hosts.reports]
        codes += [each for _, each in sorted(hosts.codes.items())]
    return _outcome(codes, failures, notes)


@final
class _Stops:
    """The signals that stop runs, in a launcher. In a block where one is ``heard`` the first raises `SignalException`,
    which torch's agent passes on to the ranks. All others only are noted, as those of a person who presses Ctrl-C
    again, or of a scheduler that tells each process: the launcher does not leave ranks that save."""

    def __init__(self) -> None:
        self._asked, self._heard, self._ending = 0, False, False
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or number
        if self._heard:
            self._raise()
        elif self._ending and number == signal.SIGINT:
            self._ending = False
            with suppress(OSError):  # a print could be inside another
                os.write(2, b"ranks finish their step and save; `kill -9 %d` ends them within seconds\n" % os.getpid())

    def _raise(self) -> NoReturn:
        self._heard = False
        number = signal.Signals(self._asked)
        raise SignalException(f"stopped by {number.name}", number)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Enter a block that a signal ends, also one that came before it and after the last such block.

        Raises:
            SignalException: one came.
        """
        self._heard = True
        try:
            if self._asked:
                self._raise()
            self._ending = True
            yield
        finally:
            self._heard = self._ending = False
            self._asked = 0


def _run(command: Sequence[str], processes: Processes, folder: Path, stops: _Stops) -> tuple[int, list[Failure]]:
    """Run the processes of this host. Return their exit code and their failures."""
    rendezvous_handler_registry.register(_MET, _Met)
    count = 1 if processes.hosts is None else processes.hosts.count
    config = LaunchConfig(
        min_nodes=count, max_nodes=count, nproc_per_node=processes.nproc, run_id=uuid.uuid4().hex, role="parc",
        max_restarts=0, monitor_interval=0.1, logs_specs=DefaultLogsSpecs(log_dir=str(folder)), rdzv_backend=_MET,
        rdzv_configs={"hosts": processes.hosts},
        signals_to_handle="",
    )  # fmt: skip
    try:
        with stops.heard():
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        failures = [
            read_failure(rank, failure.exitcode, Path(failure.error_file)) for rank, failure in error.failures.items()
        ]
        return min(failures, key=lambda failure: (failure.follows, failure.time_s)).exit_code, failures
    except SignalException as stopped:
        number = int(stopped.sigval)
        return 128 + number, [*filter(None, [stop_of(number, folder)])]
    return 0, []


def _explained(failures: Sequence[Failure], folder: Path, late: bool) -> tuple[list[Failure], list[str]]:
    """Return the failures of this host's ranks, and what ranks waited for. If ranks of any host waited too long, a rank
    that was killed is one for which they waited, as it does not end on SIGTERM: its failure follows theirs."""
    # Ranks that ended after the agent gave up are not in `failures`: all files are read for what ranks waited for.
    waited = {read_failure(0, 1, place).waited for place in folder.rglob("error.json")} - {""}
    marked = [replace(each, follows=each.follows or (late and each.killed)) for each in failures]
    return marked, sorted(waited)


def _outcome(codes: Collection[int], failures: Sequence[Failure], notes: Sequence[str]) -> Outcome:
    """Return the outcome of a run that ended with these exit codes, this host's first. The earliest failure that does
    not follow another explains the others."""
    if not failures:
        return Outcome(next(filter(None, codes), 0))
    first = min(failures, key=lambda failure: (failure.follows, failure.time_s))
    more = [note for note in dict.fromkeys(notes) if note != first.waited]
    silent = first.exit_code > 128 and first.rank is not None  # the rank has said what it saved
    return Outcome(first.exit_code, None if silent else replace(first, message="\n".join([first.message, *more])))


@final
class _Alone(dist.HashStore):  # type: ignore[name-defined] # torch does not declare what it exports there
    """A store that torch's agent keeps to itself. It would wait there, at its end, for the agents of other hosts."""

    def wait(self, *_: object) -> None:
        """Return at once: the launchers wait for each other, with deadlines."""


@final
class _Met(RendezvousHandler):
    """The rendezvous of an agent whose hosts have met already, or are one. torch's own starts a TCPStore, which listens
    on all interfaces, and unpickles what it finds there."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._hosts: Hosts | None = parameters.config["hosts"]
        self._store = _Alone()

    def get_backend(self) -> str:
        """Return the name under which this rendezvous is registered."""
        return _MET

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the number of this host and of how many it is. Processes meet through a file or a store of their own,
        so address and port are not used."""
        hosts = self._hosts
        if hosts is None:
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))
        return RendezvousInfo(self._store, hosts.number, hosts.count, RendezvousStoreInfo(hosts.address, hosts.port))

    def is_closed(self) -> bool:
        """Return False: it ends with its process."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nothing is open."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """Return a name of the run, which nobody asks for."""
        return _MET

    def shutdown(self) -> bool:
        """Do nothing: the launcher leaves the other hosts."""
        return True


def _variables(processes: Processes, folder: Path) -> dict[str, str]:
    """Return the environment variables beside those that the agent sets. A person's own settings are kept."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {
        "OMP_NUM_THREADS": str(max(1, cores // processes.nproc)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_STOP_S),
        **KEEP_MEMORY,
    }
    hosts = processes.hosts
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if hosts is None and loopback is not None:
        variables.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback))
    if hosts is not None and hosts.interface:  # gloo's own choice is where the host's name leads, often to itself
        variables["GLOO_SOCKET_IFNAME"] = hosts.interface
    variables = {name: value for name, value in variables.items() if name not in os.environ}
    variables[VOICES] = str(folder)
    variables[STORE] = str(folder / "store") if hosts is None else hosts.store
    variables["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # agents number the ranks without asking each other
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
