"""Liveness: the bytes that one run of a program holds, line by line, and what it saves for backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..layout.collectives import COLLECTIVES, MESSAGE, RINGS, SUMS, WAIT, Buffers
from ..layout.placement import Split, TensorType
from ..layout.sweep import rounded_up
from ..ops.rules import facts
from ..program.blocks import complete
from ..program.program import Function, Line, Origin, Program, Ref
from .dataflow import local_call
from .lifetimes import (
    addable,
    adds_itself,
    aliases,
    bucket_numbers,
    form_over,
    operand_over,
    reducible_in_place,
    spare_operands,
)
from .products import BLAS, Products


def local_bytes(type_: TensorType, program: Program, load: float = 1.0) -> int:
    """Return the bytes of one rank's piece; of packed rows those that are present if all experts are chosen equally
    often. Where ranks hold rows by experts, the busiest has ``load`` times as many."""
    size = type_.local_bytes(program.mesh)
    if type_.packed is None:
        return size
    present, rows = type_.packed
    by_experts = any(kind == Split(0) for _, kind in type_.placement.items())
    return rounded_up(size * present // rows * (load if by_experts else 1.0))  # type: ignore[no-any-return]


Share = Literal["values", "messages", "gradients", "weights"]
"""The use of bytes that a run holds: ``messages`` are results of collectives and their buffers, ``gradients`` those
that it returns, ``weights`` what is held beside weights until they have arrived, ``values`` all the rest."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a run holds at once, by their use, and ``kept``, the storages of its results, which it still
    holds at its end."""

    shares: Mapping[Share, int]
    kept: Mapping[str, int]
    highs: Mapping[Share, int] = field(default_factory=dict)
    """The most bytes of each use, which may be at other moments."""
    at: int = -1
    """The index of the line at which the run holds most, -1 before its first."""

    @property
    def most(self) -> int:
        """The most bytes at once."""
        return sum(self.shares.values())


class _Alive:
    """The bytes that are held now, by storage and by use, and the most so far."""

    def __init__(self) -> None:
        self.size: dict[str, int] = {}
        self.share: dict[str, Share] = {}
        self.shares: dict[Share, int] = dict.fromkeys(get_args(Share), 0)
        self.total = self.most = 0
        self.peak, self.highs = dict(self.shares), dict(self.shares)
        self.line = self.at = -1

    def add(self, name: str, size: int, share: Share = "values") -> None:
        self.size[name], self.share[name] = size, share
        self.hold(size, share)

    def hold(self, size: int, share: Share = "values") -> None:
        """Hold bytes from now on that belong to no storage."""
        self.shares[share] += size
        self.total += size

    def drop(self, name: str) -> int:
        size = self.size.pop(name, 0)
        self.hold(-size, self.share.pop(name, "values"))
        return size

    def resize(self, name: str, size: int) -> None:
        """Change the bytes of a storage, if it is held."""
        if name in self.size:
            self.hold(size - self.size[name], self.share[name])
            self.size[name] = size

    def note(self, more: int = 0) -> None:
        """Note as a candidate for the peak what is held at this moment, and ``more`` bytes of temporaries."""
        shares: dict[Share, int] = {**self.shares, "values": self.shares["values"] + more}
        for share, size in shares.items():
            if size > self.highs[share]:
                self.highs[share] = size
        if self.total + more > self.most:
            self.most, self.at, self.peak = self.total + more, self.line, shares


class Liveness:
    """The liveness of one program. ``load`` is that of the busiest rank of experts, and ``products`` the library that
    multiplies. Methods take, for each function, the gradients that are ``added`` to existing totals as they are
    made."""

    def __init__(self, program: Program, load: float = 1.0, products: Products = BLAS) -> None:
        self.program, self._load, self.products = program, load, products
        self.addable, self.buckets = addable(program), bucket_numbers(program, products)
        self.aliases = aliases(program)
        self.reducible = {main.name: reducible_in_place(program, main) for main in program.mains}
        self._bytes: dict[tuple[str, str], int] = {}
        self._peaks: dict[object, Peak] = {}

    def bytes_of(self, function: Function, name: str) -> int:
        """Return the bytes of a value of a function."""
        key = function.name, name
        if key not in self._bytes:
            self._bytes[key] = local_bytes(function.values()[name].type, self.program, self._load)
        return self._bytes[key]

    def temporaries(self, function: Function, line: Line) -> int:
        """Return the bytes of temporaries that a line's kernel holds at once."""
        takes = facts(RINGS[line.op].attention if line.op in RINGS else line.op).takes
        if takes is None:
            return 0
        values = function.values()
        return takes(local_call(line, values, self.program.mesh), [values[name].type.dtype for name in line.uses])

    def root(self, function: Function) -> Mapping[str, str]:
        """Return the storage of each value of a function: the first value that lies in it."""
        return self.aliases[function.name].root

    def peak(
        self, function: Function, owned: Mapping[str, int], added: Mapping[str, frozenset[str]],
    ) -> Peak:  # fmt: skip
        """Return the peak of a run that owns parameters of so many bytes, which it frees after their last use; other
        parameters are the caller's."""
        key = function.name, tuple(owned.items()), added.get(function.name)
        if key not in self._peaks:
            self._peaks[key] = _Run(self, function, owned, added).peak()
        return self._peaks[key]


class _Run:
    """One run of a function: the bytes that it holds, line by line."""

    def __init__(
        self, liveness: Liveness, function: Function, owned: Mapping[str, int],
        added: Mapping[str, frozenset[str]],
    ) -> None:  # fmt: skip
        self.liveness, self.function, self.added = liveness, function, added
        self.root = liveness.root(function)
        self.added_here = added.get(function.name, frozenset[str]())
        self.written = {value.name for value in function.bound("gradient").values() if function.returned("gradient")}
        self.spare = spare_operands(function, liveness.aliases[function.name])
        self.gradients = {self.root[name] for name in function.returned("gradient").values()}
        self.buckets, self.allocated = liveness.buckets.get(function.name, {}), set[int]()
        self.travels = {line.made[0].name: line for line in function.lines if MESSAGE in dict(line.kwargs)}
        self.arrived = set[object]()
        self.alive = _Alive()
        shares: dict[str, Share] = {value.name: "weights" for value in function.bound("weight").values()}
        shares |= dict.fromkeys(self.written, "gradients")
        for name, size in owned.items():
            self.alive.add(name, size, shares.get(name, "values"))
        self.alive.note()
        self.last = self._last()
        self.dying: dict[int, list[str]] = {}
        for name, index in self.last.items():
            self.dying.setdefault(index, []).append(name)

    def _last(self) -> dict[str, int]:
        """Return the index of the last line that reads each storage. A message reads the operands that it holds until
        the first of its results is awaited; what is returned lives to the end."""
        lines, root, last = self.function.lines, self.root, dict[str, int]()
        for index, line in enumerate(lines):
            for name in (*line.uses, *(value.name for value in line.made)):
                last[root[name]] = last[root[name]] if name in last and self._in_total(name) else index
        arrivals = dict[object, int]()
        for index, line in enumerate(lines):
            if line.op == WAIT and line.uses[0] in self.travels:
                arrivals.setdefault(self.travels[line.uses[0]].kwargs, index)
        for line in self.travels.values():
            if self._buffers(line).holds:
                arrival = arrivals.get(line.kwargs, len(lines))
                last.update((root[name], max(last[root[name]], arrival)) for name in line.uses)
        last.update((root[name], len(lines)) for _, name in self.function.returns if not self._in_total(name))
        return last

    def peak(self) -> Peak:
        """Run the lines, and return the peak."""
        for index, line in enumerate(self.function.lines):
            self.alive.line = index
            if line.calls_function:
                self._call(index, line)
            elif line.op == WAIT:
                self._arrival(self.root[line.made[0].name])
            elif facts(line.op).carries != "away":
                self._line(index, line)
            self.alive.note()
            for name in self.dying.get(index, ()):
                self.alive.drop(name)
        returned = dict.fromkeys(self.root[name] for _, name in self.function.returns)
        kept = {name: self.alive.size[name] for name in returned if name in self.alive.size}
        for name in kept.keys() & self.travels.keys():
            line = self.travels[name]
            if line.kwargs not in self.arrived and self._buffers(line).holds:
                kept[name] += sum(map(self.alive.drop, {self.root[operand] for operand in line.uses} - kept.keys()))
        return Peak(self.alive.peak, kept, self.alive.highs, self.alive.at)

    def _call(self, index: int, line: Line) -> None:
        callee = self.liveness.program.function(line.op)
        root, alive = self.root, self.alive
        read = [root[name] for name in line.uses]
        dying = {
            value.name: name
            for value, name in zip(callee.parameters, read, strict=True)
            if name in alive.size and self.last[name] == index and read.count(name) == 1
        }
        owned = {parameter: alive.size[name] for parameter, name in dying.items()}
        inner = self.liveness.peak(callee, owned, self.added)
        alive.note(inner.most - sum(owned.values()))
        for name in dying.values():
            alive.drop(name)
        inner_root = self.liveness.root(callee)
        for value, (_, name) in zip(line.results, callee.returns, strict=True):
            if value is not None and root[value.name] == value.name and not self._in_total(value.name):
                first = inner_root[name]
                size = owned.get(first, self.liveness.bytes_of(callee, first))
                alive.add(value.name, size, self._share(value.name))

    def _size(self, name: str) -> int:
        return self.liveness.bytes_of(self.function, name)

    def _in_total(self, name: str) -> bool:
        """Return whether a value is accumulated into an existing total, and so has no storage of its own."""
        return name in self.added_here

    def _line(self, index: int, line: Line) -> None:
        if line.op in COLLECTIVES and line.op not in RINGS:
            self._collective(index, line)
            return
        names = [value.name for value in line.made if self.root[value.name] == value.name]
        apart = self.liveness.products.apart(line, self.function, self.liveness.program.mesh)
        fused = self.added_here if adds_itself(self.function, line) and not apart else frozenset[str]()
        names = [name for name in names if name not in fused]
        if len(names) == 1 and (over := self._written_over(index, line)):
            self.alive.add(names[0], self.alive.drop(over), self._share(names[0]))
            return
        for name in names:
            self._take_from_bucket(name)
            self.alive.add(name, self._size(name), self._share(name))
        self.alive.note(self.liveness.temporaries(self.function, line))
        if line.op in RINGS:  # double buffers: what is computed with, and what arrives meanwhile
            operands = [self.function.values()[name].type for name in line.uses]
            travelling = COLLECTIVES[line.op].travelling(operands)
            self.alive.note(2 * sum(local_bytes(type_, self.liveness.program) for type_ in travelling))

    def _take_from_bucket(self, name: str) -> None:
        """Hold a gradient's whole bucket from its first gradient on, and release the part that this gradient takes."""
        if (bucket := self.buckets.get(name)) is None:
            return
        if bucket not in self.allocated:
            self.allocated.add(bucket)
            lines = (line for line in self.function.lines if not line.calls_function)
            parts = (value.name for line in lines for value in line.made if self.buckets.get(value.name) == bucket)
            self.alive.hold(sum(map(self._size, parts)), self._share(name))
        self.alive.hold(-self._size(name), self._share(name))

    def _share(self, name: str, otherwise: Share = "values") -> Share:
        return "gradients" if name in self.gradients else otherwise

    def _collective(self, index: int, line: Line) -> None:
        name, (source, *_) = line.made[0].name, line.uses
        message, buffers = name in self.travels, self._buffers(line)
        travelling = buffers.travelling if message else 0
        if line.op in SUMS and (
            source in self.liveness.reducible.get(self.function.name, ()) if message else self._dies(index, source)
        ):
            self.alive.add(name, self.alive.drop(self.root[source]) + travelling, self._share(name))
            return
        self.alive.add(name, self._size(name) + travelling, self._share(name, "messages"))
        self.alive.note(0 if message else buffers.at_once)

    def _buffers(self, line: Line) -> Buffers:
        """Return the buffers that a collective takes beside operand and result."""
        operand, result = map(self._size, (line.uses[0], line.made[0].name))
        return COLLECTIVES[line.op].buffers(operand, result, line.args[1:])

    def _arrival(self, name: str) -> None:
        """Free the buffers of a message when the first of its results is awaited: all of them have arrived then. The
        result of a message that another program started is a parameter, with the buffers of that message; of a weight,
        which is the caller's, the run owns these buffers alone."""
        line = self.travels.get(name)
        if line is None and self.function.values()[name].kind == "weight":
            self.alive.drop(name)
        elif line is None:
            self.alive.resize(name, self._size(name))
        elif line.kwargs not in self.arrived:
            self.arrived.add(line.kwargs)
            together = [(result, other) for result, other in self.travels.items() if other.kwargs == line.kwargs]
            self.alive.note(max(self._buffers(other).on_arrival for _, other in together))
            for result, _ in together:
                self.alive.resize(result, self._size(result))

    def _dies(self, index: int, name: str) -> bool:
        """Return whether an operand dies at a line, in storage that this run may write over."""
        first = self.root[name]
        return name in self.spare[index] and (first in self.alive.size or first in self.written)

    def _written_over(self, index: int, line: Line) -> str:
        """Return the storage of the operand that a line writes its result over, or ""."""
        if form_over(line.op) is None:
            return ""
        root = self.root
        spare = {name for name in line.uses if self._dies(index, name)}
        at = operand_over(line, self.function, spare, self.liveness.program.mesh)
        operand = None if at is None else line.args[at]
        return root[operand.name] if isinstance(operand, Ref) else ""


# ---- bytes saved for backward


def saved_bytes_by_module(program: Program, load: float = 1.0) -> dict[str, int]:
    """Return the bytes that a rank saves of one microbatch for backward, each storage once, by the module that makes
    the first saved value in it; what a stage has received is under ``""``. The busiest rank of experts has ``load``
    times the mean of their rows."""
    main, live = program.main, Liveness(program, load)
    owned = {
        value.name: local_bytes(value.type, program, load)
        for value in main.parameters
        if value.binding is not None and value.binding.home in ("stage", "neighbour")
    }
    kept, root = dict(live.peak(main, owned, {}).kept), live.root(main)
    modules = _making_modules(program, main, Origin())
    sizes: dict[str, int] = {}
    for name in main.returned("saved").values():
        module = modules.get(name, "")
        sizes[module] = sizes.get(module, 0) + kept.pop(root[name], 0)
    return sizes


def _making_modules(program: Program, function: Function, caller: Origin) -> dict[str, str]:
    """Return the module that makes each value of a function; the lines of called functions are followed inside."""
    modules: dict[str, str] = {}
    for line in function.lines:
        module = complete(line.origin.module, caller.module)
        if not line.calls_function:
            modules.update((value.name, module) for value in line.made)
            continue
        callee = program.function(line.op)
        inner = _making_modules(program, callee, line.origin)
        for value, (_, name) in zip(line.results, callee.returns, strict=True):
            if value is not None:
                modules[value.name] = inner.get(name, module)
    return modules
