"""Replicas: the state that several ranks hold alike, compared between steps: by hashes that go along with an exchange,
and, where these differ, tensor by tensor."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from ...compiler.build.build import Build
from ...compiler.initial.counter import bits, digest, stream
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType, parse_type
from ...compiler.plan.directives.check import DEFAULT
from ...compiler.program.binding import BUFFERS
from ...compiler.program.optimizers import AVERAGE, BESIDE, NUMBERS, OPTIMIZERS
from ...compiler.program.roles import Role
from ...grammar.codes import REPLICAS_DIFFER
from .communication import PeerLost
from .faults import RunError
from .gather import everywhere, keepers_of, owners_of
from .lockstep import Lockstep, ranks_text
from .wire import receive, send, sendable
from .work import RankState

# ---- the ranks that hold the same pieces


class Spread(NamedTuple):
    """The spread of tensors over ranks: the axes on whose coordinates a rank's piece depends, and the roles that hold
    them, if there are several; without roles each tensor is one role's."""

    axes: tuple[str, ...]
    roles: tuple[str, ...]


Key = tuple[str, str]
"""A tensor of the state: ``parameter``, ``buffer``, ``state`` or a slot of the optimizer's state, and its name."""


def state_types(build: Build, mesh: Mesh) -> Iterator[tuple[Key, TensorType, Sequence[Role]]]:
    """Yield every tensor of a build's state but the optimizer's, with its type and the roles that hold it."""
    roles = tuple(build.roles.values())
    parameters = {name: parse_type(text, mesh) for name, text in build.manifest["parameters"].items()}
    buffers = {
        name: value.type for role in roles for program in role.programs.values()
        for name, value in program.bound(*BUFFERS).items()
    }  # fmt: skip
    owners, keepers = owners_of(roles, parameters), keepers_of(roles, buffers)
    yield from ((("parameter", name), type_, owners[name]) for name, type_ in parameters.items())
    yield from ((("buffer", name), type_, keepers[name]) for name, type_ in buffers.items())
    states: dict[str, dict[str, tuple[Role, TensorType]]] = {}
    for role in roles:
        for program in role.programs.values():
            for name, value in program.bound("state").items():
                states.setdefault(name, {})[role.name] = role, value.type
    for name, held in states.items():
        yield ("state", name), next(iter(held.values()))[1], [role for role, _ in held.values()]


def spreads_of(build: Build, mesh: Mesh) -> dict[Key, Spread]:
    """Return the spread of every tensor of the state; the optimizer's tensors lie as their parameters."""
    return {
        key: Spread(
            (*type_.placement.split_axes(), *type_.placement.partial),
            tuple(role.name for role in roles) if len(roles) > 1 else (),
        )
        for key, type_, roles in state_types(build, mesh)
    }


def chains_of(spread: Spread, mesh: Mesh, roles: Sequence[str]) -> list[list[int]]:
    """Return the ranks that hold the same pieces, in lists of at least two. ``roles`` has the role of each rank."""
    chains: dict[tuple[object, ...], list[int]] = {}
    for rank, role in enumerate(roles):
        if not spread.roles or role in spread.roles:
            at = mesh.coordinates(rank)
            chains.setdefault(("" if spread.roles else role, *(at[axis] for axis in spread.axes)), []).append(rank)
    return [ranks for ranks in chains.values() if len(ranks) > 1]


# ---- what is taken for rounding


_FACTOR, _MOST, _SIGNS = 16, 1 / 16, 4
"""The factor on the rounding of a type; the most that rounding makes, relative to the largest entry; and the learning
rates that a moved entry may be apart, because the sign of its gradient was rounding."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of rounding, ``steps`` after ranks last agreed. ``eps`` is that of the narrowest type in which steps
    compute, ``rate`` the largest learning rate of an optimizer that moves entries by it, else 0."""

    steps: int
    eps: float
    rate: float

    def allowed(self, kind: str, dtype: torch.dtype, largest: float) -> float:
        """Return the largest difference that is taken for rounding, between tensors of a ``kind`` (see ``Key``) whose
        largest entry is ``largest``. Whole numbers and counts are never rounded."""
        if not dtype.is_floating_point or kind in NUMBERS:
            return 0.0
        noise, eps = _FACTOR * math.sqrt(max(1, self.steps)), torch.finfo(dtype).eps
        if self.rate and kind in ("parameter", *BESIDE):
            return min(noise * eps, _MOST) * largest + max(_SIGNS, noise * self.eps) * self.rate
        return min(noise * max(eps, self.eps), _MOST) * largest


def narrowest_eps(roles: Iterable[Role]) -> float:
    """Return the largest distance of 1 to the next number among the types of all values that roles' programs make."""
    programs = {id(program): program for role in roles for program in role.programs.values()}
    types = {
        value.type.dtype for program in programs.values() for function in program.functions
        for line in function.lines for value in line.made
    }  # fmt: skip
    return max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point), default=0.0)


# ---- the difference of two ranks' tensors


_PIECE = 1 << 20
"""The entries of a tensor that are sent and compared at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@sendable
@dataclass(slots=True)
class ReplicaDifference:
    """The difference of a tensor's piece on two ``ranks``: how many of its ``entries`` differ in a bit, the largest
    distance ``apart`` with its place and both values, the largest entry of each rank in ``sizes``, and the distance
    that is ``allowed`` for rounding. Without entries only one of the ranks has the tensor in this form."""

    key: Key
    ranks: tuple[int, int]
    entries: int = 0
    count: int = 0
    apart: float = math.inf
    at: int = 0
    values: tuple[float, float] = (0.0, 0.0)
    sizes: tuple[float, float] = (0.0, 0.0)
    allowed: float = 0.0

    def compare(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take the next entries of both ranks, flat and of one type."""
        word = _INTEGERS[first.element_size()]
        differ, a, b = first.view(word) != second.view(word), first.double(), second.double()
        apart = (a - b).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
        if not first.dtype.is_floating_point:
            apart = torch.where(differ, apart.clamp_(min=1.0), 0.0)  # float64 has not every whole number
        apart[(a == b) & first.dtype.is_floating_point | a.isnan() & b.isnan()] = 0.0
        place = int(apart.argmax())
        if not self.entries or float(apart[place]) > self.apart:
            self.apart, self.at = float(apart[place]), self.entries + place
            self.values = float(a[place]), float(b[place])
        tops = (float(each.abs().nan_to_num_(0.0, posinf=0.0).max()) for each in (a, b))
        self.sizes = max(self.sizes[0], next(tops)), max(self.sizes[1], next(tops))
        self.entries, self.count = self.entries + first.numel(), self.count + int(differ.sum())

    @property
    def share(self) -> float:
        """The distance over what is allowed: above 1 it is no rounding."""
        return self.apart / self.allowed if self.allowed else math.inf if self.apart else 0.0

    def __str__(self) -> str:
        first, second = self.ranks
        what = f"{_words_of(self.key)} of rank {second}"
        if not self.entries:
            return f"{what} is not in the form of rank {first}, or only one of them has it"
        if not self.count:
            return f"a hash of {what} is not that of rank {first}, and their numbers are the same"
        entries = f"{self.count:,} of {self.entries:,} entries differ{'s' * (self.count == 1)}"
        values = f"entry {self.at:,} is {self.values[0]:.9g} on rank {first}, {self.values[1]:.9g} on rank {second}"
        return f"{what} is not that of rank {first}: {entries}, at most by {self.apart:.3g} ({values})"


def _words_of(key: Key) -> str:
    kind, name = key
    if kind in ("parameter", "buffer", "state"):
        return f"{kind} `{name}`"
    return f"average of `{name}`" if kind == AVERAGE else f"`{kind}` of `{name}`"


# ---- the comparison


_SHOWN = 4
"""The differences that a message names."""


class ReplicaCheck(NamedTuple):
    """A check after a step: the largest difference over what is taken for rounding, 0 where all ranks agree, and the
    seconds that it took on this rank."""

    step: int
    apart: float
    seconds: float


@final
class Replicas:
    """The comparison of the state that one rank holds, in ``state`` and ``optimizer``, with that of other ranks. It
    goes along with the next exchange when it is ``due``: after each N-th step, and before each checkpoint. ``roles``
    are those of all ranks."""

    def __init__(
        self, build: Build, mesh: Mesh, roles: Sequence[Role], together: Lockstep, state: RankState,
        optimizer: torch.optim.Optimizer,
    ) -> None:  # fmt: skip
        self._build, self._mesh, self._roles, self._together = build, mesh, roles, together
        self._state, self._optimizer = state, optimizer
        every = build.manifest.get("replicas", DEFAULT)
        self.every: int = every if build.trains and together.world > 1 else 0
        """The steps between two checks, 0 for none."""
        self.last: ReplicaCheck | None = None
        """The last check that found ranks alike, up to rounding."""
        self.warn: Callable[[str], object] = _warn
        """The function that is called on the first rank with a warning."""
        self._step = self._agreed = 0
        self._rate = 0.0
        self._saved = ""
        self._digests: dict[Spread, dict[Key, torch.Tensor]] = {}
        self._seconds = 0.0
        self._warned: set[Key] = set()

    # ---- when it is due

    def due(self) -> None:
        """Check the state as it is now, with the next exchange."""
        if self.every and self._chains and (self.last is None or self.last.step != self._step):
            self._together.passenger = self

    def stepped(self, step: int) -> None:
        """Note that the optimizer has done a step, counted from 1."""
        self._step = step
        if self.every:
            self._rate = max(self._rate, *(float(group["lr"]) for group in self._optimizer.param_groups))
            if not step % self.every:
                self.due()

    def saved(self, path: Path, step: int) -> None:
        """Note a checkpoint of ranks that agree, at this step."""
        self._saved = f"`{path}`, which is after step {step}"

    def restored(self, path: Path, step: int) -> None:
        """Note that all ranks have read a checkpoint, which is after this step."""
        self._step = self._agreed = step
        self._rate, self.last, self._together.passenger = 0.0, None, None
        self._warned.clear()
        self.saved(path, step)

    # ---- hashes

    @cached_property
    def _spreads(self) -> dict[Key, Spread]:
        return spreads_of(self._build, self._mesh)

    @cached_property
    def _chains(self) -> dict[Spread, list[list[int]]]:
        """The ranks that hold the same pieces, for each spread in which some do, in an order of all ranks."""
        names = [role.name for role in self._roles]
        chains = {spread: chains_of(spread, self._mesh, names) for spread in sorted({*self._spreads.values()})}
        return {spread: held for spread, held in chains.items() if held}

    def _tensors(self) -> Iterator[tuple[Spread, Key, torch.Tensor]]:
        """Yield the tensors of this rank that others may hold too."""
        tables = ("parameter", self._state.parameters), ("buffer", self._state.buffers), ("state", self._state.steps)
        for kind, table in tables:
            for name, value in table.items():
                spread = self._spreads[kind, name]
                if spread not in self._chains:
                    continue
                yield spread, (kind, name), value.detach()
                if kind == "parameter":
                    for slot, moment in self._optimizer.state.get(value, {}).items():
                        if isinstance(moment, torch.Tensor):
                            yield spread, (slot, name), moment

    def row(self) -> list[int]:
        """Return a hash of what this rank holds of each spread; 0 where it holds nothing of it."""
        begun, device = time.perf_counter(), self._together.device
        self._digests = {spread: {} for spread in self._chains}
        for spread, key, tensor in self._tensors():
            self._digests[spread][key] = digest(tensor).to(device)
        row = []
        for digests in self._digests.values():
            salts = torch.tensor([stream(0, " ".join(key)) for key in digests], dtype=torch.int64, device=device)
            row.append(bits(0, torch.stack([*digests.values()]) ^ salts).sum() if digests else salts.sum())
        numbers: list[int] = torch.stack(row).tolist()  # the exchange waits for the device anyway
        self._seconds = time.perf_counter() - begun
        return numbers

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Compare the hashes of all ranks, and the tensors where they differ.

        Raises:
            RunError: on all ranks: they differ by more than rounding.
        """
        begun = time.perf_counter()
        hashes = {spread: [row[place] for row in rows] for place, spread in enumerate(self._chains)}
        pairs = [
            (spread, pair, place % 2) for spread, chains in self._chains.items() for chain in chains
            for place, pair in enumerate(pairwise(chain)) if hashes[spread][pair[0]] != hashes[spread][pair[1]]
        ]  # fmt: skip
        count, worst = self._differences(pairs) if pairs else (0, [])
        share = max((difference.share for difference in worst), default=0.0)
        if share > 1:
            raise self._refusal(worst, hashes)
        if not pairs:
            self._agreed, self._rate = self._step, 0.0
        elif not self._together.rank and not {difference.key for difference in worst} <= self._warned:
            self.warn(self._warning(worst, count))
        self._warned |= {difference.key for difference in worst}
        self._together.passenger = None
        self.last = ReplicaCheck(self._step, share, self._seconds + time.perf_counter() - begun)

    # ---- tensors

    def _differences(self, pairs: Sequence[tuple[Spread, tuple[int, int], int]]) -> tuple[int, list[ReplicaDifference]]:
        """Compare the tensors of pairs of ranks whose hashes differ. Return, on every rank, the number of tensors that
        differ on two ranks, and the worst of them."""
        together, mine = self._together, list[ReplicaDifference]()
        try:
            with together.doing("the comparison of what ranks hold alike", self._state):
                for parity in (0, 1):  # a rank has one pair at a time, and all pairs come in one order: none waits
                    for spread, pair, side in pairs:
                        if side == parity and together.rank in pair:
                            mine += self._compare(spread, pair)
                rows = everywhere((len(mine), _worst(mine)), together.world)
        except RuntimeError as error:
            raise PeerLost(
                f"rank {together.rank} compares its state with other ranks, and one has ended", error
            ) from error
        return sum(count for count, _ in rows), _worst(each for _, part in rows for each in part)

    def _compare(self, spread: Spread, pair: tuple[int, int]) -> list[ReplicaDifference]:
        """Compare the tensors of two ranks. The first one sends hashes, then the tensors whose hash the second one,
        which returns the differences, asks for."""
        first, second = pair
        tensors = {key: tensor for other, key, tensor in self._tensors() if other == spread}
        forms = {
            key: (tuple(tensor.shape), tensor.dtype, int(self._digests[spread][key])) for key, tensor in tensors.items()
        }
        if self._together.rank == first:
            send(forms, second)
            for piece in (piece for key in receive(second) for piece in tensors[key].reshape(-1).split(_PIECE)):
                dist.send(piece.to(self._together.device).view(torch.uint8), second)
            return []
        theirs: dict[Key, Any] = receive(first)
        unlike = [key for key in sorted({*forms, *theirs}) if forms.get(key) != theirs.get(key)]
        comparable = [key for key in unlike if forms.get(key, ())[:2] == theirs.get(key, ())[:2]]
        send(comparable, first)
        return [self._difference(key, pair, tensors[key] if key in comparable else None) for key in unlike]

    def _difference(self, key: Key, pair: tuple[int, int], tensor: torch.Tensor | None) -> ReplicaDifference:
        """Receive the first rank's tensor piece by piece, and return the difference of the second rank's."""
        difference = ReplicaDifference(key, pair)
        if tensor is None:
            return difference
        for piece in tensor.reshape(-1).split(_PIECE):
            other = torch.empty_like(piece, device=self._together.device)
            dist.recv(other.view(torch.uint8), pair[0])
            difference.compare(other, piece.to(other.device))
        difference.allowed = self._bounds.allowed(key[0], tensor.dtype, min(difference.sizes))  # a bad entry is large
        return difference

    @property
    def _bounds(self) -> Bounds:
        moves = OPTIMIZERS[self._build.manifest["optimizer"]["name"]].moves_by_rate
        return Bounds(self._step - self._agreed, self._eps, self._rate if moves else 0.0)

    @cached_property
    def _eps(self) -> float:
        return narrowest_eps(self._build.roles.values())

    # ---- words

    def _refusal(self, worst: Sequence[ReplicaDifference], hashes: Mapping[Spread, Sequence[int]]) -> RunError:
        """Return the error of ranks that are further apart than rounding."""
        first, *others = (difference for difference in worst if difference.share > 1)
        notes = [str(other) for other in others if other.key != first.key]
        if first.allowed:
            steps = self._step - self._agreed
            notes.append(
                f"rounding explains at most {first.allowed:.3g}, {steps} step{'s' * (steps != 1)} after they agreed"
            )
        notes += self._odd_ones(first, hashes)
        help_ = "nothing was saved of this step; " + (
            f"go on from the checkpoint {self._saved}, by `session.restore` or `--resume`"
            if self._saved
            else "begin again; with `session.save` now and then, or `parc run --save FOLDER --save-every K`, there is a"
            " checkpoint to go on from"
        )
        return RunError(REPLICAS_DIFFER, f"after step {self._step}, {first}", help_, notes)

    def _odd_ones(self, difference: ReplicaDifference, hashes: Mapping[Spread, Sequence[int]]) -> Iterator[str]:
        """Yield which ranks most others contradict."""
        spread = self._spread_of(difference.key)
        for chain in self._chains[spread]:
            ((usual, times),) = Counter(hashes[spread][rank] for rank in chain).most_common(1)
            if difference.ranks[0] in chain and times > len(chain) / 2:
                alike = [rank for rank in chain if hashes[spread][rank] == usual]
                odd = [rank for rank in chain if rank not in alike]
                yield f"{ranks_text(alike)} agree, so look at {ranks_text(odd)}"

    def _spread_of(self, key: Key) -> Spread:
        return self._spreads.get(key) or self._spreads["parameter", key[1]]

    def _warning(self, worst: Sequence[ReplicaDifference], count: int) -> str:
        """Return the warning of ranks that are apart by rounding."""
        more = f", and so do {count - 1:,} more" if count > 1 else ""
        return (
            f"after step {self._step}, {worst[0]}; up to {worst[0].allowed:.3g} is taken for rounding{more}. A kernel"
            " that adds in another order each time may do this; `torch.use_deterministic_algorithms(True)` before the"
            " run avoids such kernels, or names them. The run goes on"
        )


def _worst(differences: Iterable[ReplicaDifference]) -> list[ReplicaDifference]:
    """Return the differences that a message names, the largest first."""
    return sorted(differences, key=lambda each: (-each.share, -each.apart, each.key, each.ranks))[:_SHOWN]


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
