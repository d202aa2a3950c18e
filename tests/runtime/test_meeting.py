"""The meeting of a run's hosts, with launchers that are threads of one process: who meets, who is refused, and what
each hears of the others. No rank runs here."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parc.grammar.codes import NOT_MET
from parc.runtime.launch import failures
from parc.runtime.launch import hosts as module
from parc.runtime.launch.endpoint import Endpoint, interface_of
from parc.runtime.launch.failures import Failure
from parc.runtime.launch.hosts import Hosts, read_secret
from parc.runtime.launch.meeting import Join, Table, Told
from parc.runtime.ranks.faults import RunError

MINE = Join("4711", "big", nnodes=2, nproc=2, number=None, host="a")
SAID: list[str] = []


@pytest.fixture
def at() -> Iterator[Endpoint]:
    """An endpoint whose port is free."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    SAID.clear()
    yield Endpoint("127.0.0.1", port)


def hosts(at: Endpoint, host: str = "a", secret: bytes = b"s", timeout_s: float = 20.0, **other: Any) -> Hosts:
    """Return the hosts as the launcher on ``host`` sees them, before they meet."""
    return Hosts(replace(MINE, host=host, **other), at, secret, timeout_s, SAID.append)


def meet(stack: ExitStack, *launchers: Hosts) -> list[Hosts]:
    """Let launchers meet, the first before the others, and return them by their numbers."""
    with ThreadPoolExecutor() as pool:
        entered: list[Future[Hosts]] = []
        for launcher in launchers:
            entered.append(pool.submit(launcher.__enter__))
            until = time.monotonic() + 10
            while launcher._channel is None and not entered[-1].done() and time.monotonic() < until:
                time.sleep(0.01)
        met = sorted((each.result() for each in entered), key=lambda each: each.number)
    for launcher in launchers:
        stack.callback(launcher._leave)  # the one that serves leaves last
    return met


def ended(*ends: Callable[[], None]) -> None:
    """Let launchers end together."""
    with ThreadPoolExecutor() as pool:
        for end in [pool.submit(end) for end in ends]:
            end.result()


def refused(launcher: Hosts) -> RunError:
    """Return the error of a launcher that does not meet."""
    with pytest.raises(RunError) as error:
        launcher.__enter__()
    assert error.value.code is NOT_MET and error.value.exit_code == 4
    return error.value


def until(ready: Callable[[], object]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def test_hosts_are_numbered_and_hear_of_failures_and_of_the_end_of_all(at: Endpoint) -> None:
    with ExitStack() as stack:
        first, second = meet(stack, hosts(at), hosts(at, "b"))
        assert (first.number, second.number, first.count) == (0, 1, 2)
        assert first.store == second.store and first.interface == interface_of("127.0.0.1") != ""
        address, port = first.address, first.port
        stores: Any = dist
        store = stores.TCPStore(address, port, None, False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        ago = time.time() - 3
        second.tell(Failure(3, ago, 4, "it fell", late=True))
        until(lambda: first.failures)
        assert first.failures[0] == replace(first.failures[0], rank=3, message="it fell", late=True)
        assert abs(first.failures[0].time_s - ago) < 2 and first.trouble_s is not None and second.trouble_s is None
        ended(lambda: first.end(0, [], []), lambda: second.end(4, [Failure(None, ago, 4, "lost")], ["rank 3 is at x"]))
        assert first.codes == second.codes == {0: 0, 1: 4}
        assert first.reports == ["rank 3 is at x"] and first.failures[-1].message == "on `b`: lost"


def test_numbers_that_are_given_count_and_the_rest_are_by_arrival(at: Endpoint) -> None:
    with ExitStack() as stack:
        three = [hosts(at, name, nnodes=3, number=number) for name, number in (("a", None), ("b", 0), ("a", None))]
        met = meet(stack, *three)
        assert SAID == ["warning: two launchers of this run are on a; if they are of two runs, these need two ports"]
        assert [met.index(launcher) for launcher in three] == [1, 0, 2]
        ended(*(lambda each=each: each.end(0, [], []) for each in met))


def test_times_of_hosts_whose_clocks_differ_by_hours_are_not_compared(at: Endpoint) -> None:
    with ExitStack() as stack:
        first, second = meet(stack, hosts(at), hosts(at, "b"))
        there = time.time() + 5 * 3600  # the clock of the other host
        first._hear(Told(1, there - (there - 7), 2, 4, "", False, False, False, "", False))
        assert abs(time.time() - first.failures[0].time_s - 7) < 1
        ended(lambda: first.end(0, [], []), lambda: second.end(0, [], []))


def test_a_launcher_that_does_not_fit_is_refused_at_once_and_the_others_meet(at: Endpoint) -> None:
    waiting = hosts(at)
    thread = threading.Thread(target=waiting.__enter__)
    thread.start()
    until(lambda: waiting._channel is not None)
    words = {
        "`--nnodes` is 3 on b, and 2 on a": hosts(at, "b", nnodes=3),
        f"`small` is to run on b, and at `{at}` meets a run of `big`": hosts(at, "b", hash="1", build="small"),
        f"job 7 started this launcher, and at `{at}` meets a run of job none": hosts(at, "b", job="7"),
        "`--nproc` is 1 on b, and 2 on a": hosts(at, "b", nproc=1),
        f"the launcher at `{at}` has another secret than this one": hosts(at, "b", secret=b"other"),
    }
    begun = time.monotonic()
    for message, launcher in words.items():
        assert refused(launcher).message == message
    assert time.monotonic() - begun < 5
    copied = hosts(at, "b", hash="1")  # a copy that is older: its ranks say which line of the plan differs
    with copied:
        thread.join()
        third = refused(hosts(at, "c"))
        assert third.message == f"all 2 hosts of the run that meets at `{at}` are there: a, b"
        assert "a port of its own" in third.help
        ended(lambda: waiting.end(0, [], []), lambda: copied.end(0, [], []))
    waiting._leave()
    assert sum("was refused" in line for line in SAID) == 6


def test_two_hosts_of_one_number_are_told_so(at: Endpoint) -> None:
    with ExitStack() as stack:
        waiting = hosts(at, number=1)
        thread = threading.Thread(target=waiting.__enter__)
        thread.start()
        until(lambda: waiting._channel is not None)
        assert refused(hosts(at, "b", number=1)).message == "`--node-rank` is 1 on two hosts: a and b"
        here = f"1 of 2 hosts is here (a), waiting for 1 more at `{at}`, with `--node-rank` 0; no other host reaches"
        until(lambda: waiting._news.startswith(here))
        with hosts(at, "b", number=0) as other:
            thread.join()
            stack.callback(waiting._leave)
            ended(lambda: waiting.end(0, [], []), lambda: other.end(0, [], []))


def test_hosts_that_nobody_joins_say_who_is_missing(at: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 0.1)
    begun, errors, waiting = time.monotonic(), list[RunError](), hosts(at, timeout_s=1)
    thread = threading.Thread(target=lambda: errors.append(refused(waiting)))
    thread.start()
    until(lambda: waiting._table is not None)
    refused(hosts(at, "b", secret=b"other"))
    thread.join()
    (error,) = errors
    assert 0.9 < time.monotonic() - begun < 5
    assert error.notes == ("127.0.0.1 was refused: it sent a message that is not sealed with this run's secret",)
    missing = f"1 of 2 hosts is here (a), waiting for 1 more at `{at}`"
    assert error.message.startswith(f"the hosts did not meet within 1 seconds: {missing}")
    assert any(line.startswith(missing) for line in SAID)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_endpoint_that_is_misspelt_or_of_another_host_ends_in_words(host: str) -> None:
    begun = time.monotonic()
    error = refused(hosts(Endpoint(host, 29500), timeout_s=1))
    why = f"no launcher of this run was found at `{host}:29500` within 1 seconds: "
    assert error.message.startswith(why) and error.message != why
    assert "an address of the first host" in error.help and time.monotonic() - begun < 10


def test_silence_of_a_name_server_or_of_a_firewall_ends_in_words_and_in_time(
    at: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.socket()) as full, ExitStack() as stack:
        full.bind(("127.0.0.2", 0))
        full.listen(0)
        place = full.getsockname()
        for _ in range(4):  # no more fit in its queue, and the kernel drops them
            caller = stack.enter_context(closing(socket.socket()))
            caller.setblocking(False)
            caller.connect_ex(place)
        error = refused(hosts(Endpoint(*place), timeout_s=0.5))
        assert (
            "within 0.5 seconds: 127.0.0.2 does not answer (perhaps a firewall is between the hosts)" in error.message
        )
    asked = threading.Event()
    monkeypatch.setattr(Endpoint, "addresses", lambda _: asked.wait(60) and [])
    begun = time.monotonic()
    assert "within 0.5 seconds: its address is not known yet" in refused(hosts(at, timeout_s=0.5)).message
    assert time.monotonic() - begun < 5 and all(
        each.daemon for each in threading.enumerate() if each.name == "parc-names"
    )
    asked.set()


def test_a_connection_that_comes_as_a_run_ends_prints_nothing(at: Endpoint) -> None:
    async def end() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: SAID.append(context["message"]))
        table = Table(MINE, at, b"", 1.0, lambda: (None, 0), SAID.append)
        server = await asyncio.start_server(table.take, at.host, at.port)
        with closing(socket.create_connection((at.host, at.port))):
            while not table._taking:
                await asyncio.sleep(0)
            (task,) = table._taking
            task.cancel()
            await asyncio.sleep(0.01)
            assert task.cancelled()  # before it began, or it would have ended well
        server.close()

    asyncio.run(end())
    assert not SAID


def test_each_address_of_the_first_host_is_tried(at: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        waiting = hosts(at)
        thread = threading.Thread(target=waiting.__enter__)
        thread.start()
        until(lambda: waiting._channel)
        monkeypatch.setattr(Endpoint, "addresses", lambda _: ["127.0.0.3", at.host])
        other = hosts(at, "b")
        monkeypatch.setattr(
            other, "_serve", lambda _: asyncio.sleep(0)
        )  # another computer, whose addresses these are not
        with other:
            thread.join()
            stack.callback(waiting._leave)
            assert other.address == at.host
            ended(lambda: waiting.end(0, [], []), lambda: other.end(0, [], []))


def test_a_host_that_has_found_the_first_one_says_for_whom_it_has_waited(at: Endpoint) -> None:
    early = hosts(at, "b", nnodes=3, timeout_s=0.5)
    with ThreadPoolExecutor() as pool:
        first = hosts(at, nnodes=3, timeout_s=1)
        waiting = pool.submit(refused, first)
        until(lambda: first._channel)
        missing = f"2 of 3 hosts are here (a, b), waiting for 1 more at `{at}`"
        assert refused(early).message.startswith(f"the hosts did not meet within 0.5 seconds: {missing}")
        assert "1 of 3 hosts is here (a)" in waiting.result().message


def test_a_secret_may_be_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b"\xff\xfe4\n")
    monkeypatch.setenv(module.SECRET, os.fsdecode(b"\xff\xfe4\n"))
    assert read_secret(None) == b"\xff\xfe4" == read_secret(tmp_path / "secret")


def test_a_port_that_another_program_holds_ends_in_words(at: Endpoint) -> None:
    with closing(socket.socket()) as holder:
        holder.bind((at.host, at.port))
        assert f"and port {at.port} of this host is in use" in refused(hosts(at, timeout_s=1)).message
        holder.listen()
        assert f"and port {at.port} of this host is in use" in refused(hosts(at, timeout_s=1)).message

        def answer() -> None:
            for _ in range(2):  # the first connection is that of the launcher before
                with holder.accept()[0] as connection, suppress(OSError):
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer).start()
        assert "something else than a launcher of parc" in refused(hosts(at, timeout_s=5)).message


def test_a_launcher_that_is_gone_or_silent_is_named_by_all_others(
    at: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        first, second, third = meet(stack, *(hosts(at, name, nnodes=3) for name in "abc"))
        assert second._channel is not None
        second._loop.call_soon_threadsafe(second._channel._writer.transport.abort)
        ended(lambda: first.end(0, [], []), lambda: third.end(0, [], []))
        gone = "the launcher of ranks 2 and 3 on `b` is gone"
        assert [failure.message for failure in first.failures] == [gone] == [each.message for each in third.failures]
    at = Endpoint(at.host, at.port + 1)
    with ExitStack() as stack:
        first, second, third = meet(stack, *(hosts(at, name, nnodes=3, timeout_s=2) for name in "abc"))
        third._loop.call_soon_threadsafe(lambda: time.sleep(4))  # as a process that is stopped
        begun = time.monotonic()
        ended(lambda: first.end(0, [], []), lambda: second.end(0, [], []))
        assert time.monotonic() - begun < 4
        for launcher in (first, second):
            assert "the launcher of ranks 4 and 5 on `c`" in launcher.failures[0].message


def test_a_launcher_that_serves_and_is_gone_is_named(at: Endpoint) -> None:
    with ExitStack() as stack:
        first, second = meet(stack, hosts(at), hosts(at, "b"))
        assert first._table is not None
        for member in first._table._members:
            first._loop.call_soon_threadsafe(member.channel._writer.transport.abort)
        until(lambda: second.failures)
        assert second.failures[0].message == "the launcher of ranks 0 and 1 on `a` is gone"
        second.end(0, [], [])


def test_a_host_that_fails_before_its_ranks_begin_tells_why(at: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAVE_S", 0.1)
    with ExitStack() as stack:
        first, second = meet(stack, hosts(at), hosts(at, "b"))
        error = RunError(NOT_MET, "another run saves there", "wait")
        first.__exit__(RunError, error, None)
        until(lambda: second.failures)
        assert "another run saves there" in second.failures[0].message and second.failures[0].expected
        second.end(0, [], [])


class Elsewhere:
    """Another host of a run, on which a rank has failed."""

    def __init__(self, *failures: Failure) -> None:
        self.failures = list(failures)
        self.trouble_s: float | None = time.monotonic()
        self.told: list[Failure] = []

    def tell(self, failure: Failure) -> None:
        self.told.append(failure)


def test_ranks_are_stopped_when_another_host_fails_and_ended_when_it_waited_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_FAILING_S", 0.1)
    for elsewhere, timeout_s, number in (
        (Elsewhere(Failure(0, time.time(), 4, "it fell")), 60.0, signal.SIGTERM),
        (Elsewhere(Failure(0, time.time(), 4, "it waited", late=True)), 60.0, signal.SIGKILL),
        (Elsewhere(), 1.0, signal.SIGKILL),  # it did not stop in time
    ):
        with subprocess.Popen(["sleep", "60"]) as rank, failures.Hanging(tmp_path, elsewhere, timeout_s) as hanging:
            if number == signal.SIGKILL:
                rank.send_signal(signal.SIGSTOP)
            (tmp_path / "whole").write_text(f"{rank.pid} 3")
            (tmp_path / "whole").rename(tmp_path / "process0")
            assert rank.wait(10) == -number
        said = [f"rank 3 does not answer: process {rank.pid} is stopped (SIGSTOP)"]
        assert hanging.reports == said * (number == signal.SIGKILL)
