"""Values on the wire: what ranks and launchers tell each other, as JSON. Reading it makes plain values and a few known
classes; nothing that comes from another process is unpickled or executed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .processes import all_ranks

_Sent = TypeVar("_Sent", bound=type)
_Classes = dict[str, tuple[tuple[str, ...], Callable[..., Any]]]
_CLASSES: _Classes = {}
"""The classes whose objects may be sent, by name: the fields that are sent, and the call that makes one of them."""
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MOST_BYTES = 1 << 31
"""The bytes that a rank takes from another at a time; an announcement of more comes from no rank of the run."""


class ForeignMessage(RuntimeError):
    """The error of bytes that no process of this run has sent."""


def sendable(kind: _Sent, names: Sequence[str] = ()) -> _Sent:
    """Let objects of a class be sent: a dataclass, a named tuple, or a class that its fields ``names`` make again."""
    own = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else getattr(kind, "_fields", ())
    _CLASSES[kind.__name__] = (tuple(names) or own, kind)
    return kind


def to_bytes(value: object) -> bytes:
    """Return a value as JSON: None, numbers, texts, lists, tuples, dicts, dtypes, tensors on the CPU, and objects of
    the classes that are ``sendable``.

    Raises:
        TypeError: there is another value in it.
    """
    return json.dumps(_row(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """Return the value that ``to_bytes`` has written.

    Raises:
        ForeignMessage: it has not written this.
    """
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ForeignMessage(f"a message that no rank of this run sends: {error}") from error


def _row(value: object) -> object:
    """Return a value as what JSON has: a list is itself, and all else is an object with one key, which says what it
    is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is list:
        return [_row(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [_row(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_row(key), _row(each)] for key, each in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype), [*value.shape], base64.b64encode(plain).decode()]}
    name = type(value).__name__
    names, made_by = _CLASSES.get(name, ((), None))
    if made_by is not type(value):
        raise TypeError(f"a {name} is no value that ranks send each other")
    return {name: [_row(getattr(value, field)) for field in names]}


def _value(row: Any) -> Any:
    if isinstance(row, list):
        return [_value(each) for each in row]
    if not isinstance(row, dict):
        return row
    ((kind, rest),) = row.items()
    if kind == "tuple":
        return tuple(_value(each) for each in rest)
    if kind == "dict":
        return {_value(key): _value(each) for key, each in rest}
    if kind == "dtype":
        return _DTYPES[rest]
    if kind == "tensor":
        dtype, shape, plain = rest
        return _flat(base64.b64decode(plain, validate=True)).view(_DTYPES[dtype]).view(shape)
    names, made_by = _CLASSES[kind]
    if len(rest) != len(names):
        raise ValueError(f"a {kind} with {len(rest)} fields")
    return made_by(*(_value(each) for each in rest))


# ---- collectives and messages of values


def gathered(value: object, world: int) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    data = _tensor(to_bytes(value))
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=data.device), group=all_ranks())
    counts = [_checked(int(size)) for size in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(rows, padded, group=all_ranks())
    return [from_bytes(_plain(row[:count])) for row, count in zip(rows, counts, strict=True)]


def broadcast(value: object, source: int) -> Any:
    """Return the value of rank ``source`` on every rank."""
    mine = dist.get_rank(all_ranks()) == source
    data = _tensor(to_bytes(value) if mine else b"")
    size = torch.tensor([data.numel()], device=data.device)
    dist.broadcast(size, source, group=all_ranks())
    if not mine:
        data = torch.empty(_checked(int(size)), dtype=torch.uint8, device=data.device)
    dist.broadcast(data, source, group=all_ranks())
    return value if mine else from_bytes(_plain(data))


def send(value: object, rank: int) -> None:
    """Send a value to a rank, which receives it."""
    data = _tensor(to_bytes(value))
    dist.send(torch.tensor([data.numel()], device=data.device), rank)
    dist.send(data, rank)


def receive(rank: int) -> Any:
    """Receive a value that a rank sends."""
    size = torch.zeros_like(_tensor(b"\0"), dtype=torch.int64)
    dist.recv(size, rank)
    data = torch.empty(_checked(int(size)), dtype=torch.uint8, device=size.device)
    dist.recv(data, rank)
    return from_bytes(_plain(data))


def _tensor(data: bytes) -> torch.Tensor:
    """Return bytes where this run's collectives take them."""
    return _flat(data).cuda() if dist.get_backend(all_ranks()) == "nccl" else _flat(data)


def _flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _plain(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _checked(count: int) -> int:
    if not 0 <= count <= _MOST_BYTES:
        raise ForeignMessage(f"a message of {count:,} bytes, which no rank of this run sends")
    return count
