"""The endpoint of a run of several hosts: where they meet, and how this host sees its address."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

_ENDPOINT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):(\d{1,5})")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Return the endpoint that a text names.

        Raises:
            ValueError: it is not `HOST:PORT`, or names no host that others could reach; the message says so.
        """
        parts = _ENDPOINT.fullmatch(text)
        if parts is None:
            raise ValueError(f"`{text}` is not HOST:PORT, as host0:29500 or [fd00::1]:29500")
        host, port = parts[1] or parts[2], int(parts[3])
        if not 0 < port < 1 << 16:
            raise ValueError(f"{port} is no port: ports are 1 to 65535")
        if host in ("0", "0.0.0.0", "::"):
            raise ValueError(f"{host} stands for all addresses, and names no host")
        return cls(host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def addresses(self) -> list[str]:
        """Return the addresses of the host as this one knows them, those of a network first.

        Raises:
            OSError: it is not known.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except UnicodeError:  # a name that no host can have
            raise OSError(f"`{self.host}` is no name of a host") from None
        return sorted(dict.fromkeys(str(each[4][0]) for each in found), key=is_of_this_host_alone)

    def listening(self, addresses: Sequence[str], port: int) -> socket.socket | None:
        """Return a socket that listens at a port of the first address that is this host's, and at no other address;
        None if none of them is.

        Raises:
            OSError: the port is in use, or not allowed.
        """
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                listener.listen(1024)
                return listener
            except OSError as error:
                listener.close()
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        return None


def is_of_this_host_alone(address: str) -> bool:
    """Return whether no other host reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address of this host, "" where that is not known."""
    if ":" in address:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
