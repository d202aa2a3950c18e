"""Clusters: what a TOML file says of devices, links and libraries, in SI units (bytes, seconds, operations a second).

Every number of a file has a bound, so that a slip of the unit is an error that names the number and what is expected.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, cast

from ...grammar.bounded import read_bounded, real_path
from ...grammar.nearest import did_you_mean, listed

_SHIPPED = Path(__file__).parent / "clusters"
_MOST_BYTES = 1 << 20
"""The most bytes of a file."""
KNOWN_ALGORITHMS = ("ring", "tree", "nvls")
"""The ways in which a library makes an all-reduce."""
TYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
"""The types of products that a file can give a peak for."""
OF_DTYPE = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class ClusterError(Exception):
    """The error of a cluster that is unknown, of a file with a wrong number, or of one that lacks what a plan needs.
    ``help`` is advice."""

    def __init__(self, message: str, help: str) -> None:
        super().__init__(message)
        self.help = help


@dataclass(frozen=True, slots=True)
class NumberBound:
    """The least and the most that a number may be, and the words for what is expected."""

    low: float
    high: float
    words: str
    whole: bool = False


_BYTES = NumberBound(1e6, 1e15, "bytes, as 80e9")
_SOME_BYTES = NumberBound(0, 1e13, "bytes, as 1.2e9, or 0")
_RATE = NumberBound(1e6, 1e14, "bytes a second, as 3.35e12")
_SECONDS = NumberBound(0, 0.1, "seconds, as 4e-6")
_SHARE = NumberBound(0.01, 1.5, "a share, as 0.8")
_PART = NumberBound(0, 1, "a share from 0 to 1")
_RANKS = NumberBound(1, 1e6, "a whole number of at least 1", True)
_FLOPS = NumberBound(1e8, 1e17, "operations a second, as 989e12")


def _number(bound: NumberBound, default: float | None = None) -> Any:
    """Declare a number of a section; without a default a file must have it."""
    return field(metadata={"bound": bound, "default": default})


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the part of a CPU that one rank has."""

    memory: float = _number(_BYTES)
    bandwidth: float = _number(_RATE)
    """Bytes a second between the device and its memory."""
    streaming: float = _number(_SHARE)
    """The share of the bandwidth that a kernel reaches that only reads and writes."""
    launch: float = _number(_SECONDS)
    """The least time of a kernel."""
    call: float = _number(_SECONDS, 0.0)
    """The time of the process for each line of a program, added to the line's own: 0 where a device computes while the
    process goes on."""
    taken_by_messages: float = _number(_PART, 0.0)
    """The part of a message's time during which the device does not compute: the cores that copy and add."""
    update: float = _number(NumberBound(0.01, 10, "a share, as 0.9"), 1.0)
    """The share of the bandwidth at which an optimizer's kernel runs, of that of ``streaming``."""


@dataclass(frozen=True, slots=True)
class ProductShares:
    """The efficiency of products by shape: ``top * whole tiles / (1 + ramp / k)``.

    A product of ``[m, k]`` and ``[k, n]`` is cut into tiles, which ``units`` work on at once, so the last round may
    leave some of them idle. Each tile begins with reads that nothing hides, worth ``ramp`` steps of the inner dim. Of
    the sizes of tiles the library takes the fastest; small ones read more for each operation.
    """

    top: float = _number(_SHARE)
    """The share of the peak that the largest products reach."""
    ramp: float = _number(NumberBound(0, 1e5, "a number of steps of the inner dim, as 200"))
    reading: float = _number(NumberBound(0, 10, "a share, as 1.5"), 0.0)
    """The share of the time of a product's bytes that comes on top of its operations, as on a CPU. 0 where a product
    reads while it computes, and takes the longer of the two."""
    units: float = _number(_RANKS, 1.0)
    attention: float = _number(_SHARE)
    """The share of the peak that attention's forward reaches with many keys, counted without the hidden half of a
    causal mask."""
    attention_backward: float = _number(_SHARE)
    attention_ramp: float = _number(NumberBound(0, 1e5, "a number of keys, as 200"), 0.0)
    """The keys with which attention reaches half of these shares: blocks on the diagonal of a causal mask are computed
    whole."""
    grouped: float = _number(_SHARE)
    """The share of the peak that products over the experts' packed rows reach with many rows for each expert."""
    grouped_ramp: float = _number(NumberBound(0, 1e5, "a number of rows of an expert, as 200"), 0.0)
    """The rows of an expert with which they reach half of that share: an expert's last tiles are not full, and its
    weights are read for few rows."""


@dataclass(frozen=True, slots=True)
class Link:
    """A level of links: the bytes a second of one rank in one direction, latencies, and the share of the bandwidth that
    each kind of collective reaches with large messages."""

    bandwidth: float = _number(_RATE)
    start: float = _number(_SECONDS)
    """The time before the first byte of a collective moves."""
    hop: float = _number(_SECONDS)
    """The time of one step from a rank to the next."""
    all_reduce: float = _number(_SHARE)
    all_gather: float = _number(_SHARE)
    reduce_scatter: float = _number(_SHARE)
    all_to_all: float = _number(_SHARE)
    send: float = _number(_SHARE)


@dataclass(frozen=True, slots=True)
class Framework:
    """The framework's own bytes on a device, which no program holds."""

    context: float = _number(_SOME_BYTES)
    """The process's own: the driver's context and the libraries' workspaces."""
    communicator: float = _number(_SOME_BYTES)
    """The buffers of each group of ranks that the rank is in."""


@dataclass(frozen=True, slots=True)
class StorageRates:
    """The way to memory beside the device: bytes a second in one direction."""

    host: float = _number(_RATE)
    disk: float = _number(_RATE)


_SECTIONS: Mapping[str, type] = {
    "device": Device, "products": ProductShares, "links.node": Link, "links.network": Link, "framework": Framework,
    "storage": StorageRates,
}  # fmt: skip
_KEYS = ("name", "about", "kind", "names", "peak", "library", "node", "sharing", "operators", "tiles", "table")


def rate_of_size(table: Sequence[Sequence[float]], size: float) -> float:
    """Return the bytes a second for a size, between those of the rows of a table: sizes, and bytes a second."""
    (low, rate), *rest = table
    for high, next_rate in rest:
        if size < high:
            part = min(1.0, max(0.0, log(max(size, 1) / low) / log(high / low)))
            return float(rate ** (1 - part) * next_rate**part)
        low, rate = high, next_rate
    return rate


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster: equal nodes of equal devices."""

    name: str
    about: str
    kind: str
    """``cuda`` or ``cpu``."""
    names: tuple[str, ...]
    """The names by which data and CUDA call the device."""
    peak: Mapping[str, float]
    """The operations a second of dense products, by type."""
    device: Device
    products: ProductShares
    node: Link
    network: Link
    framework: Framework
    storage: StorageRates
    algorithms: tuple[str, ...]
    nvls: float
    """The share of a node's bandwidth that an all-reduce reaches that the switches add up."""
    ranks: int
    """The ranks of a node."""
    nodes: int | None
    sharing: Mapping[int, Cluster]
    """The cluster as a rank sees it where so many share one device, as the cores of a CPU."""
    operators: Mapping[str, float]
    """The seconds of an entry, for operators that are slower than their bytes."""
    tiles: tuple[tuple[float, ...], ...]
    """The tiles of products: rows, columns, and the share of ``top`` that they reach."""
    table: tuple[tuple[float, ...], ...] = ()
    """Measured bandwidths by the bytes of a line, where caches make small ones faster."""

    def peak_of(self, dtype: str) -> float:
        """Return the operations a second in products of a type, by torch's name of it.

        Raises:
            ClusterError: the file has none.
        """
        kind = OF_DTYPE.get(dtype, dtype)
        if kind not in self.peak:
            message = f"the cluster `{self.name}` has no peak for products of {dtype}"
            raise ClusterError(message, f"add `{kind} = ...` to `[peak]` of its file; it has {listed(self.peak)}")
        return self.peak[kind]

    def bandwidth(self, size: Any) -> Any:
        """Return the bytes a second of a line that reads and writes so many bytes; of an array those of each place."""
        if not self.table:
            return self.device.bandwidth * self.device.streaming
        if not isinstance(size, int | float):
            return 0.0 * size + [self.bandwidth(one) for one in size.tolist()]
        return rate_of_size(self.table, size)

    def shared_by(self, ranks: int) -> Cluster:
        """Return the cluster as a rank sees it where so many lie on a node: on a CPU they share its cores."""
        most = max((count for count in self.sharing if count <= ranks), default=1)
        return self.sharing.get(most, self)


# ---- reading


def shipped() -> tuple[str, ...]:
    """Return the names of the clusters that parc knows."""
    return tuple(sorted(file.stem for file in _SHIPPED.glob("*.toml")))


def is_file(name: str) -> bool:
    """Return whether a word is the path of a cluster's file, and no name."""
    return "/" in name or name.endswith(".toml")


def find_cluster(name: str, folder: Path | None = None) -> Cluster:
    """Return a cluster by its name, or by the path of a file, from ``folder`` or the current one.

    Raises:
        ClusterError: there is none, or the file is wrong.
    """
    return _read(cluster_file(name, folder))


def cluster_file(name: str, folder: Path | None = None) -> Path:
    """Return the file of a cluster, by its name or its path.

    Raises:
        ClusterError: there is none.
    """
    if name in shipped():
        return _SHIPPED / f"{name}.toml"
    if not is_file(name):
        help_ = did_you_mean(name, shipped(), f"there are {listed(shipped())}, and any file by its path")
        raise ClusterError(f"there is no cluster `{name}`", help_)
    path = (folder or Path()) / name
    if not path.is_file():
        message = f"there is no file `{path}` of a cluster"
        raise ClusterError(message, "`parc cluster measure -o here.toml` writes one of this machine")
    return real_path(path)


def cluster_text(path: Path) -> str:
    """Return the text of a cluster's file.

    Raises:
        ClusterError: it cannot be read.
    """
    try:
        return read_bounded(path, _MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise ClusterError(f"cannot read `{path}`: {error.strerror}", "name a file that can be read") from None
    except UnicodeDecodeError:
        raise ClusterError(f"`{path}` is no text", "name a TOML file") from None


@cache
def _read(path: Path) -> Cluster:
    return read_cluster(cluster_text(path), str(path))


def read_cluster(text: str, file: str) -> Cluster:
    """Read a cluster's file.

    Raises:
        ClusterError: it is no TOML, or a number is missing or absurd; it says which, and what is expected.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"`{file}` is no TOML: {error}", "copy a file that parc ships, and change it") from None
    return _Reader(file, data).cluster()


def _merged(data: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's data with those changed that hold where ranks share a device."""
    whole = {key: value for key, value in data.items() if key != "sharing"}
    for key, value in change.items():
        before = whole.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        whole[key] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return whole


class _Reader:
    """The reader of one file."""

    def __init__(self, file: str, data: Mapping[str, Any]) -> None:
        self.file, self.data = file, data

    def cluster(self) -> Cluster:
        parts = {name: self.section(name, kind) for name, kind in _SECTIONS.items()}
        known = {*_KEYS, *(name.partition(".")[0] for name in _SECTIONS)}
        for name in (name for name in self.data if name not in known):
            raise self.wrong(f"`{name}` means nothing", did_you_mean(name, sorted(known), f"it has {listed(known)}"))
        kind = self.text("kind")
        if kind not in ("cuda", "cpu"):
            raise self.wrong(f"`kind` is {kind!r}", "write `cuda` or `cpu`")
        library, node = self.table("library"), self.table("node")
        algorithms = tuple(library.get("algorithms", KNOWN_ALGORITHMS[:1]))
        if unknown := [name for name in algorithms if name not in KNOWN_ALGORITHMS]:
            raise self.wrong(f"`library.algorithms` has {unknown[0]!r}", f"there are {listed(KNOWN_ALGORITHMS)}")
        sharing = {
            int(ranks): _Reader(f"{self.file}: `sharing.{ranks}`", _merged(self.data, change)).cluster()
            for ranks, change in self.table("sharing").items() if self.whole_key("sharing", ranks)
        }  # fmt: skip
        table = self.rows("table", ("bytes", _SOME_BYTES), ("bytes a second", _RATE))
        if any(row[0] <= before[0] for before, row in pairwise(table)):
            raise self.wrong("the bytes of `table` do not rise", "expected `[bytes, bytes a second]` with rising bytes")
        tiles = self.rows("tiles", ("rows", _RANKS), ("columns", _RANKS), ("share", _SHARE)) or ((1.0, 1.0, 1.0),)
        peaks = self.numbers("peak", _FLOPS)
        for name in (name for name in peaks if name not in TYPES):
            raise self.wrong(f"`peak.{name}` is no type", did_you_mean(name, TYPES, f"there are {listed(TYPES)}"))
        if not peaks:
            raise self.wrong("`peak` is missing", "add a section `[peak]` with operations a second, as `bf16 = 989e12`")
        return Cluster(
            self.text("name"), str(self.data.get("about", "")), kind, tuple(map(str, self.data.get("names", ()))),
            peaks, parts["device"], parts["products"], parts["links.node"], parts["links.network"],
            parts["framework"], parts["storage"], algorithms,
            self.number("library.nvls", library.get("nvls", 1.0), _SHARE),
            int(self.number("node.ranks", node.get("ranks"), _RANKS)),
            int(self.number("node.count", node["count"], _RANKS)) if "count" in node else None,
            sharing, self.numbers("operators", NumberBound(0, 1e-3, "seconds of an entry, as 1e-9")), tiles, table,
        )  # fmt: skip

    def section(self, name: str, kind: type) -> Any:
        """Read a section of numbers."""
        table, names = self.table(name), [one.name for one in fields(kind)]
        for key in (key for key in table if key not in names):
            raise self.wrong(f"`{name}.{key}` means nothing", did_you_mean(key, names, f"it has {listed(names)}"))
        values = {}
        for one in fields(kind):
            default = one.metadata["default"]
            values[one.name] = self.number(f"{name}.{one.name}", table.get(one.name, default), one.metadata["bound"])
        return kind(**values)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table by its dotted name, empty where the file has none."""
        inner: Any = self.data
        for part in name.split("."):
            inner = inner.get(part, {})
            if not isinstance(inner, Mapping):
                raise self.wrong(f"`{name}` is no section", f"write `[{name}]`, and its numbers below")
        return cast(Mapping[str, Any], inner)

    def text(self, name: str) -> str:
        """Return a word of the file."""
        value = self.data.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(f"`{name}` is missing", f'write `{name} = "..."`')
        return value

    def numbers(self, name: str, bound: NumberBound) -> dict[str, float]:
        """Return the numbers of a section with free names."""
        return {key: self.number(f"{name}.{key}", value, bound) for key, value in self.table(name).items()}

    def number(self, name: str, value: Any, bound: NumberBound) -> float:
        """Return a number within its bounds."""
        if value is None:
            raise self.wrong(f"`{name}` is missing", f"expected {bound.words}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"`{name}` is {value!r}, no number", f"expected {bound.words}")
        if not bound.low <= value <= bound.high or (bound.whole and value != int(value)):
            between = f", from {bound.low:g} to {bound.high:g}"
            raise self.wrong(f"`{name}` is {value:g}", f"expected {bound.words}{between}")
        return float(value)

    def whole_key(self, name: str, key: str) -> bool:
        """Check that a key is a number of ranks."""
        if not key.isdecimal() or int(key) < 2:
            raise self.wrong(f"`{name}.{key}` is no number of ranks", f"write `[{name}.2.device]` for two ranks")
        return True

    def rows(self, name: str, *columns: tuple[str, NumberBound]) -> tuple[tuple[float, ...], ...]:
        """Return the rows of a list of equally long lists of numbers."""
        table, words = self.data.get(name, ()), ", ".join(column for column, _ in columns)
        for at, row in enumerate(table):
            if not isinstance(row, Sequence) or len(row) != len(columns):
                raise self.wrong(f"`{name}[{at}]` is {row!r}", f"expected `[{words}]`")
        return tuple(
            tuple(self.number(f"{name}[{at}] {column}", value, bound)
                  for value, (column, bound) in zip(row, columns, strict=True))
            for at, row in enumerate(table)
        )  # fmt: skip

    def wrong(self, what: str, help: str) -> ClusterError:
        """Return the error of this file."""
        return ClusterError(f"{self.file}: {what}", help)
