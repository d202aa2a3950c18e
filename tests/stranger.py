"""A stranger at the cable of two hosts: it listens to what they tell each other, and sends messages to their ports.
``python -m tests.stranger FOLDER COUNT SEED`` begins to send when the folder has a list of ports. It needs no torch."""

from __future__ import annotations

import json
import pickle
import random
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final


@final
class Canary:
    """An object that leaves a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def messages(draw: random.Random, count: int, heard: Sequence[bytes], canary: Path) -> list[bytes]:
    """Return what a stranger sends: random bytes, what was heard of others, as it was, cut or changed, pickles, and
    what a launcher says that has another secret."""
    pickles = [pickle.dumps(Canary(canary), protocol) for protocol in (0, 2, 4, 5)]
    sent = []
    for _ in range(count):
        kind = draw.choice(("random", "heard", "changed", "pickle", "launcher"))
        if kind == "pickle":
            data = draw.choice((b"", len(pickles[2]).to_bytes(8, "little"))) + draw.choice(pickles)
        elif kind == "launcher":
            greeting = b"parc meeting 1 %b\n" % draw.randbytes(16).hex().encode()
            body = draw.choice((*pickles, b'{"Join":["","",2,1,null,"host2",""]}'))
            data = greeting + draw.randbytes(32).hex().encode() + b" " + body + b"\n"
        elif kind == "random" or not heard:
            data = draw.randbytes(draw.choice((1, 8, 64, 1000)))
        else:
            data = draw.choice(heard)
            if kind == "changed":
                at = draw.randrange(len(data))
                data = data[:at] + draw.choice((b"", draw.randbytes(4), draw.choice(pickles))) + data[at + 1 :]
        sent.append(data)
    return sent


def sniffed(seconds: float, most: int) -> list[bytes]:
    """Return what TCP carries over this host's cable for some seconds: at most so many payloads."""
    payloads: list[bytes] = []
    until = time.monotonic() + seconds
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as tap:
        tap.settimeout(0.2)
        while time.monotonic() < until and len(payloads) < most:
            try:
                packet = tap.recv(1 << 16)
            except TimeoutError:
                continue
            header = (packet[0] & 15) * 4
            data = packet[header + (packet[header + 12] >> 4) * 4 :] if packet[9] == socket.IPPROTO_TCP else b""
            payloads += [data] if data else []
    return payloads


def send_all(place: tuple[str, int], messages: Sequence[bytes], at_once: int = 20) -> int:
    """Send messages to a port, some over each connection, and the next over a new one where the other side ends it.
    Return how many were sent before nobody listened there any more."""
    sent = 0
    while sent < len(messages):
        begun = sent
        try:
            with socket.create_connection(place, timeout=2) as connection:
                for message in messages[sent : sent + at_once]:
                    sent += 1  # also one that the other side did not take
                    connection.sendall(message)
        except ConnectionRefusedError:
            break
        except OSError:
            sent = max(sent, begun + 1)  # a message that found no connection counts, or this might not end
    return sent


def main(folder: Path, count: int, seed: int) -> None:
    """Listen until a file says which ports there are, send so many messages to each, and print what was done."""
    places, heard = folder / "ports.json", list[bytes]()
    while not places.exists():
        heard += sniffed(0.5, 2000 - len(heard))
    draw, sent = random.Random(seed), dict[str, int]()
    for address, port in json.loads(places.read_text()):
        sent[f"{address}:{port}"] = send_all((address, port), messages(draw, count, heard, folder / "canary"))
    print(json.dumps({"heard": len(heard), "sent": sent}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
