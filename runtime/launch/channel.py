"""A channel between two launchers of a run: messages as JSON, each with an HMAC of the run's secret. Whoever does not
know the secret can send nothing that is read, and cannot repeat, reorder or turn back what was sent."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from contextlib import suppress
from typing import Any, final

from ..ranks.wire import ForeignMessage, from_bytes, to_bytes

MOST_LINE = 1 << 20
"""The most bytes of a message."""
_GREETING = b"parc meeting 1 "
_NONCE = 32
"""The hexadecimal digits of the random number that each side says first, so that no message of another channel fits."""


class Stranger(Exception):
    """The error of a peer that is no launcher of parc: it says something else."""


class OtherSecret(Exception):
    """The error of a message whose HMAC is not of this run's secret."""


@final
class Channel:
    """One side of a channel. ``peer`` is the address of the other side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.peer = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        self._key, self._sides, self._sent, self._received = b"", (b"", b""), 0, 0

    @classmethod
    async def open(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, serves: bool
    ) -> Channel:
        """Greet the other side of a connection; one of both ``serves``.

        Raises:
            Stranger: the other side is no launcher.
            OSError, EOFError: the connection ended.
        """
        channel, mine = cls(reader, writer), secrets.token_hex(_NONCE // 2).encode()
        writer.write(_GREETING + mine + b"\n")
        greeting = b""
        while len(greeting) < len(_GREETING) + _NONCE + 1:
            part = await reader.read(len(_GREETING) + _NONCE + 1 - len(greeting))
            greeting += part
            if not part or not greeting.startswith(_GREETING[: len(greeting)]):
                raise Stranger(greeting[:40]) if greeting else EOFError("the connection was closed")
        theirs = greeting[len(_GREETING) : -1]
        nonces = mine + theirs if serves else theirs + mine
        channel._key = hmac.digest(secret, b"parc meeting" + nonces, "sha256")
        channel._sides = (b"serving", b"joining") if serves else (b"joining", b"serving")
        return channel

    @property
    def local(self) -> str:
        """The address of this side."""
        return str((self._writer.get_extra_info("sockname") or ("",))[0])

    def send(self, message: object) -> None:
        """Send a message, which may be anything that ranks send each other. It does not wait, and what the other side
        can no longer receive is lost."""
        if self._writer.is_closing():  # asyncio would print a line for each of these
            return
        text = to_bytes(message)
        self._writer.write(self._sealed(self._sides[0], self._sent, text) + b" " + text + b"\n")
        self._sent += 1

    async def receive(self) -> Any:
        """Return the next message.

        Raises:
            OtherSecret: it is not of this run.
            OSError, EOFError: the connection ended.
        """
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            raise OtherSecret("a message without an end") from None
        seal, _, text = line[:-1].partition(b" ")
        if not hmac.compare_digest(seal, self._sealed(self._sides[1], self._received, text)):
            raise OtherSecret("a message that is not sealed with this run's secret")
        self._received += 1
        try:
            return from_bytes(text)
        except ForeignMessage as error:
            raise OtherSecret(str(error)) from None

    def _sealed(self, side: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, b"%b %d %b" % (side, number, text), "sha256").hex().encode()

    async def close(self) -> None:
        """Close the connection, once what was sent is on its way."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
