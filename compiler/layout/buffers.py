"""Buffers: the memory that collectives take beside their operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .stretches import Outer


@dataclass(frozen=True, slots=True)
class Buffers:
    """The bytes that a collective needs beside its operand and its result, over gloo: ``at_once`` where it is done at
    once; as a message ``travelling``, until it is awaited, and ``on_arrival``, while the result is put together. A
    message that ``holds`` its operand sends it from where it is, others send a copy."""

    at_once: int = 0
    travelling: int = 0
    on_arrival: int = 0
    holds: bool = False


SMALL_SUM = 1 << 16
"""The bytes from which a tensor is summed by itself; smaller ones of a message are summed in one packed copy."""


def parts_in_order(dim: int, outer: Outer) -> bool:
    """Return whether the parts of a dim lie one behind the other in memory."""
    return dim == 0 and outer == 1


def gather_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of a gather: the parts are received where they lie in the result, or apart and then joined."""
    apart = 0 if parts_in_order(*args[1:]) else result
    return Buffers(at_once=result, travelling=apart, on_arrival=apart, holds=True)


def sum_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of a sum, which is made over the operand or over a copy: small ones travel packed."""
    return Buffers(travelling=operand if operand < SMALL_SUM else 0)


def scatter_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of a scattered sum: the parts of all ranks are received, to be summed into the first; what is
    sent is the operand, or cut from it."""
    cut = 0 if parts_in_order(*args[1:]) else operand
    return Buffers(at_once=2 * operand + cut, travelling=operand - result + cut, holds=not cut)


def exchange_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of an all-to-all: what is sent is put together, and so is what is received."""
    sent = 2 * operand + (0 if parts_in_order(*args[3:]) else operand)
    return Buffers(at_once=sent, travelling=2 * operand, on_arrival=operand)


def rows_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of an exchange of packed rows: those that are sent in the order of ranks, and those received,
    unless rows lie in that order."""
    sent = 0 if parts_in_order(*args[3:5]) else operand
    received = 0 if parts_in_order(*args[1:3]) else result
    return Buffers(at_once=sent + received, travelling=sent + received, on_arrival=received, holds=not sent)


def round_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of rounding to int8: parts that do not lie one behind the other are rounded apart."""
    return Buffers(at_once=0 if parts_in_order(*args[1:]) else operand)


def packed_scatter_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of a scattered sum of float32 in int8: the packed parts that are sent and received, and each
    received one, unpacked."""
    return Buffers(at_once=operand // 2 + result, travelling=operand // 2, on_arrival=result)


def packed_gather_buffers(operand: int, result: int, args: Sequence[Any]) -> Buffers:
    """Return the buffers of a gather of float32 in int8: what is sent and received is packed, and unpacked where it
    lies in the result, or apart and then joined."""
    packed, apart = (operand + result) // 4, 0 if parts_in_order(*args[1:]) else result
    return Buffers(at_once=packed + apart, travelling=packed, on_arrival=apart)
