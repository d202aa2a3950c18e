"""Two hosts on one computer: network namespaces that a cable joins, with names and addresses of their own. It takes no
rights but those to make namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

HOSTS = {"host0": "10.209.0.1", "host1": "10.209.0.2"}
_MAKE = """
set -e
mount --bind "$1" /etc/hosts
test ! -f /etc/resolv.conf || mount --bind /dev/null /etc/resolv.conf
hostname host0
exec 3<&0
unshare --net --uts sh -c 'hostname host1; echo there; exec cat' <&3 > "$2" &
other=$!
until test -s "$2"; do sleep 0.02; done
ip link add cable0 type veth peer name cable1
ip link set cable1 netns "$other"
for each in lo cable0; do ip link set "$each" up; done
ip addr add 10.209.0.1/24 dev cable0
nsenter --target "$other" --net sh -c 'ip link set lo up; ip link set cable1 up; ip addr add 10.209.0.2/24 dev cable1'
echo "$other"
exec cat > /dev/null
"""
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class NoNetwork(Exception):
    """The error of a computer on which no such hosts can be made."""


@final
class Network:
    """Two hosts, by the processes that hold their namespaces."""

    def __init__(self, holders: Mapping[str, int]) -> None:
        self._holders = holders

    def inside(self, host: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs another on a host, in the present folder."""
        enter = ["nsenter", f"--target={self._holders[host]}", "--user", "--preserve-credentials", "--net", "--uts"]
        return [*enter, "--mount", f"--wd={os.getcwd()}", "--", *command]

    def start(self, host: str, command: Sequence[str], out: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on a host; ``out`` gets what it prints."""
        with open(out, "wb") as file:
            return subprocess.Popen(
                self.inside(host, command), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**env, "PATH": _PATH}, start_new_session=True,
            )  # fmt: skip

    def namespaces(self, host: str) -> list[str]:
        """Return the files of a host's namespaces, in the order in which a process may enter them."""
        return [f"/proc/{self._holders[host]}/ns/{kind}" for kind in ("user", "net", "uts", "mnt")]

    def listening(self, host: str) -> set[tuple[str, int]]:
        """Return the addresses and ports of IPv4 and IPv6 at which a host listens."""
        text = subprocess.run(
            self.inside(host, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]), capture_output=True, text=True, check=True
        ).stdout
        rows = (line.split() for line in text.splitlines())
        return {_place(row[1]) for row in rows if len(row) > 3 and row[3] == "0A"}


def _place(text: str) -> tuple[str, int]:
    """Return an address and a port as Linux prints them: hexadecimal, each word of the address in the host's order."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Make two hosts, which see one file system, for as long as the block lasts.

    Raises:
        NoNetwork: this computer lets nobody make them; the message says why.
    """
    names = folder / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in HOSTS.items()))
    if sys.platform != "linux" or any(shutil.which(tool, path=_PATH) is None for tool in ("unshare", "nsenter", "ip")):
        raise NoNetwork("it needs Linux, util-linux and iproute2")
    with subprocess.Popen(
        ["unshare", "--map-root-user", "--net", "--mount", "--uts", "sh", "-c", _MAKE, "sh", names, folder / "there"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"PATH": _PATH},
    ) as holder:  # fmt: skip
        assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
        try:
            other = holder.stdout.readline().strip()
            if not other:
                raise NoNetwork(holder.stderr.read().strip())
            yield Network({"host0": holder.pid, "host1": int(other)})
        finally:
            holder.stdin.close()  # both hosts end with this process, however it ends
