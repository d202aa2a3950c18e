"""The hosts of a run, as the launcher of one of them sees them: it meets the others, tells them how its ranks fare,
and hears how theirs do, until the last has ended. Nobody waits for another without a deadline."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, final

import torch.distributed as dist

from ...grammar.bounded import read_bounded
from ...grammar.codes import NOT_MET
from ...grammar.diagnostics import render
from ..ranks.faults import RunError
from ..ranks.lockstep import ranks_text
from .channel import MOST_LINE, Channel, OtherSecret, Stranger
from .endpoint import Endpoint, interface_of, is_of_this_host_alone
from .failures import Failure
from .meeting import GREETING_S, Beat, HostEnd, Join, Lost, Met, Refusal, Table, Told, Waiting, expected

SECRET = "PARC_RUN_SECRET"
"""The environment variable with what all hosts of a run know, and others do not."""
_BEAT_S = 5.0
"""The most seconds between two signs of life."""
_AGAIN_S, _QUIET_S, _LEAVE_S = 0.3, 2.0, 5.0
"""The seconds before another try to join, before a word of who is missing, and for which the last messages travel."""
_OPTION = "give `--rdzv-endpoint` an address of the first host that all reach, and a port that is free there"
_UNKNOWN, _NO_LAUNCHER = (
    "its address is not known yet", "what listens there does not answer as a launcher of parc does",
)  # fmt: skip
_MOST_SECRET = 1 << 16
"""The most bytes of a file with a secret."""
_MOST_REFUSED = 8
"""The most refusals that an error repeats."""
_MOST_TEXT = 30_000
"""The most characters of a failure that are told."""


def read_secret(file: Path | None) -> bytes:
    """Return the secret that the hosts of a run share: that of a file, or of an environment variable, or none.

    Raises:
        RunError: the file cannot be read, or is empty.
    """
    if file is None:
        return os.fsencode(os.environ.get(SECRET, "")).strip()  # it may be any bytes
    secret = b""
    try:
        secret = read_bounded(file, _MOST_SECRET).strip()
    except OSError as error:
        what = f"`{file}` cannot be read: {(error.strerror or str(error)).lower()}"
    else:
        what = f"`{file}` has no secret: it is empty"
    if secret:
        return secret
    raise RunError(NOT_MET, what, "`openssl rand -hex 32` prints a secret; every host of the run needs the same")


@final
class Hosts:
    """The hosts of a run, as the launcher of one of them sees them. ``mine`` is what it says of itself; ``say`` prints
    a line. What it hears of others is in ``failures``, ``codes`` (by host) and ``reports``.

    A context: it is left when this host's ranks have ended, and stays for others until they have.
    """

    def __init__(
        self, mine: Join, endpoint: Endpoint, secret: bytes, timeout_s: float, say: Callable[[str], None]
    ) -> None:
        self._mine, self._endpoint, self._secret, self._timeout_s, self._say = mine, endpoint, secret, timeout_s, say
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="parc-hosts", daemon=True)
        self._met: Future[Met] = Future()
        self._table: Table | None = None
        self._server: asyncio.Server | None = None
        self._channel: Channel | None = None
        self._address, self._news, self._why = "", "", ""
        self._held = self._deaf = False
        """Marks that the endpoint's port is in use on this host, and that nothing more is heard of others."""
        self.failures: list[Failure] = []
        self.codes: dict[int, int] = {}
        self.reports: list[str] = []
        self.trouble_s: float | None = None
        """The time of the first news that ranks of another host do not go on, by the monotonic clock."""

    # ---- for the launcher's main thread

    def __enter__(self) -> Self:
        """Meet the other hosts.

        Raises:
            RunError: they do not meet, within the timeout.
        """
        self._thread.start()
        try:
            self._met.result()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.number not in self.codes:  # before any rank was started
            known = isinstance(error, RunError)
            text = render(error.diagnostic()) if isinstance(error, RunError) else f"the launcher ended: {error!r}"
            code = error.exit_code if isinstance(error, RunError) else 4
            self._tell_end(code, [Failure(None, time.time(), code, text, expected=known)], ())
        self._leave()

    @property
    def number(self) -> int:
        """The number of this host."""
        return self._met.result().number

    @property
    def count(self) -> int:
        """The number of hosts."""
        return self._mine.nnodes

    @property
    def address(self) -> str:
        """The address at which the hosts met."""
        return self._address

    @property
    def port(self) -> int:
        """The port of the store for the ranks, at ``address``."""
        return self._met.result().port

    @property
    def store(self) -> str:
        """The store for the ranks, as ``join_processes`` takes it."""
        met = self._met.result()
        return f"tcp://{replace(self._endpoint, host=self._address, port=met.port)!s}/{met.prefix}"

    @property
    def interface(self) -> str:
        """The network interface of this host from which it reached the others, "" where that is not known."""
        return interface_of(self._channel.local) if self._channel is not None else ""

    def tell(self, failure: Failure) -> None:
        """Tell the other hosts of a failure here, while other ranks still run."""
        values = {field.name: getattr(failure, field.name) for field in fields(Failure) if field.name != "time_s"}
        values["message"] = failure.message[:_MOST_TEXT]
        self._send(Told(host=-1, ago_s=time.time() - failure.time_s, **values))

    def end(self, code: int, failures: Sequence[Failure], reports: Sequence[str]) -> None:
        """Tell the others how the ranks of this host ended, and wait until theirs have. If ranks failed anywhere, that
        is within the timeout; else it is for as long as the others show that they are there."""
        self._tell_end(code, failures, reports)
        self._trouble(code != 0)
        while not self._deaf and len(self.codes) < self.count:
            if self.trouble_s is not None and time.monotonic() > self.trouble_s + self._timeout_s:
                break
            time.sleep(0.02)
        for host in sorted({*range(self.count)} - self.codes.keys()):
            self._lose(host, f"did not end within {self._timeout_s:g} seconds" if not self._deaf else "is not heard of")

    def _tell_end(self, code: int, failures: Sequence[Failure], reports: Sequence[str]) -> None:
        for failure in failures:
            self.tell(failure)
        self._send(HostEnd(-1, code, "\n".join(reports)[:_MOST_TEXT]))
        self.codes[self.number] = code

    def _send(self, message: object) -> None:
        if self._channel is not None:
            self._loop.call_soon_threadsafe(self._channel.send, message)

    def _leave(self) -> None:
        """End the thread, once what was told has arrived."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._close()))
        self._thread.join(2 * _LEAVE_S)

    # ---- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            if self._met.done():
                raise
            self._met.set_exception(error)
        finally:
            self._deaf = True
            if self._server is not None:
                self._server.close()
            while left := asyncio.all_tasks(self._loop):  # one may begin while others end
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()

    async def _live(self) -> None:
        beating, noting = asyncio.ensure_future(self._beat()), asyncio.ensure_future(self._note())
        try:
            async with asyncio.timeout(self._timeout_s):
                met = await self._meet()
        except TimeoutError:
            error = self._not_met()
            if self._table is not None:
                self._table.give_up(Refusal(error.message, error.help))
            raise error from None
        finally:
            noting.cancel()
        self._met.set_result(met)
        await self._listen(met)
        await beating  # which others hear until this launcher leaves

    async def _close(self) -> None:
        until = time.monotonic() + _LEAVE_S
        if self._table is not None:
            self._table.over = True
            while len([*self._table.channels]) > (self._channel is not None) and time.monotonic() < until:
                await asyncio.sleep(0.02)
        if self._channel is not None:
            await self._channel.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    async def _meet(self) -> Met:
        """Join until all hosts are there."""
        self._wait_for_first(_UNKNOWN)
        while True:
            addresses: list[str] = []
            with self._explained():
                addresses = await self._addresses()
                await self._serve(addresses)
            for address in addresses:
                self._address = address
                with self._explained():
                    if (met := await self._join(address)) is not None:
                        return met
            await asyncio.sleep(_AGAIN_S)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Enter a block that is tried again where it cannot reach the first host, and keep the reason."""
        try:
            yield
        except TimeoutError:
            self._wait_for_first(_NO_LAUNCHER)
        except EOFError:
            self._wait_for_first("it closed the connection")
        except OSError as error:
            number = error.errno or 0  # that of an unknown name is below zero, and asyncio has texts of its own
            self._wait_for_first((os.strerror(number) if number > 0 else error.strerror or str(error)).lower())

    def _wait_for_first(self, why: str) -> None:
        self._why, self._news = why, f"waiting for the first host at `{self._endpoint}`: {why}"

    async def _addresses(self) -> list[str]:
        """Return the addresses of the endpoint's host. A name server may be silent for long, and asking cannot be
        stopped: the thread that asks ends with this process.

        Raises:
            OSError: the host is not known.
        """
        answer: Future[list[str]] = Future()
        answer.set_running_or_notify_cancel()  # so that nobody cancels it under the thread

        def ask() -> None:
            try:
                answer.set_result(self._endpoint.addresses())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="parc-names", daemon=True).start()
        return await asyncio.wrap_future(answer)

    async def _serve(self, addresses: Sequence[str]) -> None:
        """Serve, if the endpoint is on this host, and no other launcher here serves it."""
        if self._table is not None:
            return
        try:
            listener = self._endpoint.listening(addresses, self._endpoint.port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            self._held = True
            return
        if listener is None:
            return
        address = str(listener.getsockname()[0])
        store = partial(self._store_at, address)
        self._table = Table(self._mine, self._endpoint, self._secret, self._timeout_s, store, self._say)
        self._server = await asyncio.start_server(self._table.take, sock=listener, limit=MOST_LINE)

    def _store_at(self, address: str) -> tuple[object, int]:
        """Start the store of the ranks. It listens at this address alone."""
        listener = replace(self._endpoint, host=address).listening([address], 0)
        assert listener is not None, f"{address} is this host's"
        port = int(listener.getsockname()[1])
        stores: Any = dist  # torch does not declare what it exports there
        wait = timedelta(seconds=self._timeout_s)
        store = stores.TCPStore(
            address, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return store, port

    async def _join(self, address: str) -> Met | None:
        """Join the meeting at an address, and wait there until all are. Return None if it takes nobody now."""
        silent = f"{address} does not answer (perhaps a firewall is between the hosts)"
        if self._why == _UNKNOWN:
            self._wait_for_first(silent)
        try:
            async with asyncio.timeout(GREETING_S):
                reader, writer = await asyncio.open_connection(address, self._endpoint.port, limit=MOST_LINE)
        except TimeoutError:
            raise OSError(silent) from None
        if self._why == silent:
            self._wait_for_first(_NO_LAUNCHER)
        met = None
        try:
            if self._table is not None:
                self._table.mine = writer.get_extra_info("sockname")
            async with asyncio.timeout(GREETING_S):
                channel = await Channel.open(reader, writer, self._secret, serves=False)
                channel.send(self._mine)  # before it is known who listens, who then says that the secret is another
                expected(await channel.receive(), Beat)
            self._channel = channel
            met = await self._admitted(channel, address)
            return met
        except Stranger as error:
            what = f"at `{self._endpoint}` listens something else than a launcher of parc; it says {error}"
            raise RunError(NOT_MET, what, _OPTION) from None
        except OtherSecret:
            what = f"the launcher at `{self._endpoint}` has another secret than this one"
            help_ = "give every host the same, by `PARC_RUN_SECRET` or `--secret-file`"
            raise RunError(NOT_MET, what, help_) from None
        finally:
            if met is None:
                self._channel = None
                writer.close()

    async def _admitted(self, channel: Channel, address: str) -> Met | None:
        """Wait until all hosts are there. Return None if this one is to try again."""
        while True:
            async with asyncio.timeout(self._timeout_s):
                message = expected(await channel.receive(), Beat, Waiting, Refusal, Met)
            if isinstance(message, Met):
                return message
            if isinstance(message, Waiting):
                alone = f"; no other host reaches {address}" if is_of_this_host_alone(address) else ""
                self._why, self._news = "", message.text + alone
            if isinstance(message, Refusal):
                if not message.again:
                    raise RunError(NOT_MET, message.message, message.help)
                self._wait_for_first(message.message)
                return None

    def _not_met(self) -> RunError:
        """Return the error of hosts that did not meet in time."""
        within = f"within {self._timeout_s:g} seconds"
        if self._table is not None or not self._why:  # the first host is here, and others are not
            more = f"start the same command on every host; {_OPTION}; `--timeout` waits longer"
            refused = self._table.refused if self._table is not None else ()
            return RunError(NOT_MET, f"the hosts did not meet {within}: {self._news}", more, refused[:_MOST_REFUSED])
        held = f", and port {self._endpoint.port} of this host is in use" if self._held else ""
        what = f"no launcher of this run was found at `{self._endpoint}` {within}: {self._why}{held}"
        return RunError(NOT_MET, what, f"{_OPTION}, and start parc there, too")

    async def _note(self) -> None:
        """Say who is missing, when that takes a while, and again when it changes."""
        said = ""
        await asyncio.sleep(_QUIET_S)
        while True:
            if self._news != said:
                said = self._news
                self._say(said)
            await asyncio.sleep(_AGAIN_S)

    async def _beat(self) -> None:
        """Show the others that this launcher is there."""
        while True:
            await asyncio.sleep(min(_BEAT_S, self._timeout_s / 4))
            for channel in [*(self._table.channels if self._table else ()), *filter(None, [self._channel])]:
                channel.send(Beat())

    async def _listen(self, met: Met) -> None:
        """Hear what other hosts tell."""
        channel = self._channel
        assert channel is not None, "the host has met others"
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    message = expected(await channel.receive(), Beat, Told, HostEnd, Lost)
                if isinstance(message, Told):
                    self._hear(message)
                elif isinstance(message, HostEnd):
                    self.codes[message.host] = message.code
                    self.reports += message.reports.split("\n") if message.reports else []
                    self._trouble(message.code != 0)
                elif isinstance(message, Lost):
                    self._lose(message.host, self._silent if message.silent else "is gone")
        except TimeoutError:
            self._lose(met.serving, self._silent)
        except (OSError, EOFError, OtherSecret):
            self._lose(met.serving, "is gone")
        finally:
            self._deaf = True

    def _hear(self, told: Told) -> None:
        values = {field.name: getattr(told, field.name) for field in fields(Failure) if field.name != "time_s"}
        if told.rank is None and not told.expected:
            values["message"] = f"on {self._name(told.host)}: {told.message}"
        self.failures.append(Failure(time_s=time.time() - told.ago_s, **values))
        self._trouble(True)

    @property
    def _silent(self) -> str:
        return f"has not answered for {self._timeout_s:g} seconds"

    def _lose(self, host: int, how: str) -> None:
        """Note that nothing more is heard of a host."""
        if host in self.codes:
            return
        self.codes[host] = 4
        first = host * self._mine.nproc
        ranks = ranks_text(range(first, first + self._mine.nproc))
        text = f"the launcher of {ranks} on {self._name(host)} {how}"
        self.failures.append(Failure(None, time.time(), 4, text))
        self._trouble(True)

    def _name(self, host: int) -> str:
        names = self._met.result().hosts.split("\n")
        return f"`{names[host]}`" if host < len(names) else "another host"

    def _trouble(self, is_there: bool) -> None:
        if is_there and self.trouble_s is None:
            self.trouble_s = time.monotonic()
