"""The meeting of a run's hosts: what launchers tell each other, and the launcher that serves.

It is the one on the endpoint's host. Every launcher, that one too, joins over a `Channel`. When all are there their
hosts are numbered, and from then on what one tells goes to all others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, final, get_type_hints

from ..ranks.wire import sendable
from .channel import Channel, OtherSecret, Stranger
from .endpoint import Endpoint

GREETING_S = 10.0
"""The seconds that a peer has to say who it is."""
_MOST_UNKNOWN = 64
"""The most connections at a time that have not said who they are; one more ends the oldest."""

# ---- what launchers tell each other


@sendable
@dataclass(frozen=True, slots=True)
class Join:
    """A launcher's wish to take part: the build that it runs, by hash and by name; of how many hosts this is one, with
    how many processes; its number, if it was given; its name; and the job of a scheduler that started it, if one
    did."""

    hash: str
    build: str
    nnodes: int
    nproc: int
    number: int | None
    host: str
    job: str = ""


@sendable
@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer that a launcher does not take part; ``again`` if it may soon."""

    message: str
    help: str
    again: bool = False


@sendable
@dataclass(frozen=True, slots=True)
class Waiting:
    """The news of who is there, in words."""

    text: str


@sendable
@dataclass(frozen=True, slots=True)
class Met:
    """The outcome of a meeting for one host: its number, that of the one that serves, the names of all, a line for
    each, and the port and the prefix of the store for their ranks, which listens where they met."""

    number: int
    serving: int
    hosts: str
    port: int
    prefix: str


@sendable
@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life."""


@sendable
@dataclass(frozen=True, slots=True)
class Told:
    """A failure on a host. Clocks of hosts differ, so it is told how many seconds ago it was."""

    host: int
    ago_s: float
    rank: int | None
    exit_code: int
    message: str
    follows: bool
    late: bool
    expected: bool
    waited: str
    killed: bool


@sendable
@dataclass(frozen=True, slots=True)
class HostEnd:
    """The end of a host's ranks: the exit code, and where ranks were that did not answer, a line for each."""

    host: int
    code: int
    reports: str = ""


@sendable
@dataclass(frozen=True, slots=True)
class Lost:
    """The news that a host's launcher is gone, or has long been ``silent``."""

    host: int
    silent: bool


_Message = TypeVar("_Message")


def expected(message: object, *kinds: type[_Message]) -> _Message:
    """Return a message if it is of one of these kinds, with fields of their types.

    Raises:
        OtherSecret: it is not; no launcher sends it.
    """
    for kind in kinds:
        if type(message) is kind:
            wrong = [
                name for name, hint in get_type_hints(kind).items() if not isinstance(getattr(message, name), hint)
            ]
            if not wrong:
                return message
    raise OtherSecret(f"a {type(message).__name__} that no launcher sends now")


# ---- the launcher that serves


@dataclass(eq=False, slots=True)
class _Member:
    """A launcher that has joined. ``number`` is that of its host, once all are there."""

    channel: Channel
    join: Join
    serves: bool
    number: int = -1
    ended: bool = False


@final
class Table:
    """The side of a meeting that serves: it takes the launchers that join, numbers their hosts when all are there, and
    passes on what each tells. ``make_store`` starts the store of the ranks, and returns it and its port."""

    def __init__(
        self, mine: Join, endpoint: Endpoint, secret: bytes, timeout_s: float,
        make_store: Callable[[], tuple[object, int]], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._mine, self._endpoint, self._secret, self._timeout_s = mine, endpoint, secret, timeout_s
        self._make_store, self._say = make_store, say
        self._members: list[_Member] = []
        self._taking: set[asyncio.Task[None]] = set()
        self._unknown: dict[asyncio.Task[None] | None, None] = {}
        self.refused: list[str] = []
        """The refusals, in words, each once."""
        self._store: object = None
        self.over = False
        """Mark of a run that ends: another one may soon meet here."""
        self.mine: object = None
        """The address and port of this launcher's own connection."""

    @property
    def channels(self) -> Iterator[Channel]:
        """The channels to the launchers that are here."""
        return (member.channel for member in self._members)

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection until it ends. asyncio, of a task of its own that is ended before it has begun, would print
        that as an error."""
        task = asyncio.get_running_loop().create_task(self._take(reader, writer))
        self._taking.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._taking.discard(task)
            writer.close()

        task.add_done_callback(over)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        try:
            channel, join = await self._greeted(reader, writer)
            serves = writer.get_extra_info("peername") == self.mine
            if (refused := self._refusal(join, serves)) is not None:
                self._say_once(f"{join.host} at {peer} was refused: {refused.message}" * (not refused.again))
                channel.send(refused)
                await channel.close()
                return
            await self._keep(_Member(channel, join, serves))
        except OtherSecret as error:
            self._say_once(f"{peer} was refused: it sent {error}")
        except (Stranger, EOFError, OSError, asyncio.CancelledError):
            pass  # who it was is not known, and it gets no answer

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Channel, Join]:
        task = asyncio.current_task()
        self._unknown[task] = None
        if len(self._unknown) > _MOST_UNKNOWN and (oldest := next(iter(self._unknown))) is not None:
            oldest.cancel()
        try:
            async with asyncio.timeout(GREETING_S):
                channel = await Channel.open(reader, writer, self._secret, serves=True)
                channel.send(Beat())
                join = expected(await channel.receive(), Join)
            if not all(text.isprintable() and len(text) < 256 for text in (join.host, join.build, join.job)):
                raise OtherSecret("a name that no host has")
            return channel, join
        finally:
            del self._unknown[task]

    def _say_once(self, text: str) -> None:
        if text and text not in self.refused and len(self.refused) < _MOST_UNKNOWN:
            self.refused.append(text)
            self._say(text)

    def _refusal(self, join: Join, serves: bool) -> Refusal | None:
        """Return why a launcher cannot join, None if it can."""
        mine, at = self._mine, f"`{self._endpoint}`"
        port = "give each run a port of its own in `--rdzv-endpoint`"
        if self.over or not (serves or any(member.serves for member in self._members)):
            return Refusal(f"the run at {at} is about to end, or to begin", port, again=True)
        if join.nnodes != mine.nnodes:
            what = f"`--nnodes` is {join.nnodes} on {join.host}, and {mine.nnodes} on {mine.host}"
            return Refusal(what, f"start every host with the same options; of another run, {port}")
        if join.hash != mine.hash and join.build != mine.build:
            return Refusal(f"`{join.build}` is to run on {join.host}, and at {at} meets a run of `{mine.build}`", port)
        if join.job != mine.job:
            what = (
                f"job {join.job or 'none'} started this launcher, and at {at} meets a run of job {mine.job or 'none'}"
            )
            return Refusal(what, f"start all hosts in one job; of another run, {port}")
        if self._store is not None:
            hosts = ", ".join(member.join.host for member in self._members)
            what = f"all {mine.nnodes} hosts of the run that meets at {at} are there: {hosts}"
            return Refusal(what, f"start one `parc run` on each of `--nnodes` hosts; of another run, {port}")
        if join.nproc != mine.nproc:
            what = f"`--nproc` is {join.nproc} on {join.host}, and {mine.nproc} on {mine.host}"
            return Refusal(what, "every host runs the same number of ranks")
        if join.number is not None and not 0 <= join.number < mine.nnodes:
            return Refusal(f"`--node-rank` is {join.number} on {join.host}", f"there are {mine.nnodes} hosts, from 0")
        if twin := next((each for each in self._members if None is not join.number == each.join.number), None):
            what = f"`--node-rank` is {join.number} on two hosts: {twin.join.host} and {join.host}"
            return Refusal(what, "give each host a number of its own, or none")
        return None

    async def _keep(self, member: _Member) -> None:
        """Hear a launcher until it leaves."""
        self._members.append(member)
        silent = False
        try:
            self._arrived()
            while True:
                async with asyncio.timeout(self._timeout_s):
                    message = expected(await member.channel.receive(), Beat, Told, HostEnd)
                if isinstance(message, Told | HostEnd) and member.number >= 0:
                    member.ended |= isinstance(message, HostEnd)
                    self._pass_on(member, replace(message, host=member.number))
        except TimeoutError:
            silent = True
        finally:
            self._members.remove(member)
            if member.number >= 0 and not member.ended:
                self._pass_on(member, Lost(member.number, silent))
            elif member.number < 0:
                self._arrived()

    def _pass_on(self, member: _Member, message: Told | HostEnd | Lost) -> None:
        for other in self._members:
            if other is not member:
                other.channel.send(message)

    def _arrived(self) -> None:
        """Tell who is here; if all are, their numbers: those that were given, and the first host's before others."""
        count = self._mine.nnodes
        if self._store is not None:
            return
        if len(self._members) < count:
            text = Waiting(self.here())
            for member in self._members:
                member.channel.send(text)
            return
        times = Counter(member.join.host for member in self._members)
        if twice := [host for host in times if times[host] > 1]:
            self._say(
                f"warning: two launchers of this run are on {twice[0]}; if they are of two runs, these need two ports"
            )
        self._store, port = self._make_store()
        free = iter(sorted({*range(count)} - {member.join.number for member in self._members}))
        for member in sorted(self._members, key=lambda each: not each.serves):
            member.number = next(free) if member.join.number is None else member.join.number
        self._members.sort(key=lambda each: each.number)
        hosts, prefix = "\n".join(member.join.host for member in self._members), secrets.token_hex(16)
        serving = next(each.number for each in self._members if each.serves)
        for member in self._members:
            member.channel.send(Met(member.number, serving, hosts, port, prefix))

    def here(self) -> str:
        """Return who is here, and who is missing, in words."""
        count, here = self._mine.nnodes, [member.join for member in self._members]
        names = ", ".join(join.host for join in here)
        missing = {*range(count)} - {join.number for join in here}
        numbered = here and all(join.number is not None for join in here)
        which = f", with `--node-rank` {', '.join(map(str, sorted(missing)))}" if numbered else ""
        are = "is" if len(here) == 1 else "are"
        lacking = f"waiting for {count - len(here)} more at `{self._endpoint}`{which}"
        return f"{len(here)} of {count} hosts {are} here ({names}), {lacking}"

    def give_up(self, refused: Refusal) -> None:
        """Tell those that wait that nobody comes any more."""
        for member in self._members:
            if not member.serves:
                member.channel.send(refused)
