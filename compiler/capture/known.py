"""Known values: what a forward computes from constants alone, of which a trace may ask the numbers.

A trace runs on fake tensors. Every operator is noted whose operands are known: literals of the code, buffers, and what
is made of them. Nothing is computed until the code asks for numbers (a branch, an ``assert``, a mask that chooses
entries): then those operators run, on real tensors, that lead to the value.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from typing import Any, NamedTuple, final
from unittest import mock

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..ops.own_ops import aten
from ..ops.rules import facts
from .faults import CaptureError

MOST_BYTES = 64 << 20
"""The largest value that is computed."""
_MOST_ENTRIES = 1 << 20
"""The most entries of a value that is written into a graph as a literal."""
_CPU = torch.device("cpu")


class _Seen(NamedTuple):
    """A fake tensor as it lies in its storage. The tensor itself is not held: torch would copy it."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """An operator on known values, with `_Seen` in the places of tensors; storages by number."""

    function: Any
    arguments: tuple[Any, Any]
    results: list[_Seen]
    read: frozenset[int]
    changed: frozenset[int]
    """The storages that it makes or writes."""
    written: frozenset[int]
    """The ones of them that were there before."""


@final
class KnownValues:
    """The known values of one capture. ``buffers`` computes the initial values of those that may be known, by name."""

    def __init__(self, buffers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._calls: list[_Call] = []
        self._real: dict[int, UntypedStorage] = {}
        self._held: dict[int, UntypedStorage] = {}
        """The fake storages of known values, whose numbers are theirs as long as they are held."""
        self._initial = buffers
        self._buffers: dict[int, tuple[str, Callable[[], Tensor]]] = {}
        self._within = False
        self.asked: dict[str, str] = {}
        """The buffers whose numbers the forward asked for, or what is made of them, with hashes of these."""

    def read(self, model: nn.Module) -> None:
        """Note the buffers that a forward begins with."""
        for name, tensor in model.named_buffers():
            nbytes = tensor.untyped_storage().nbytes()
            whole = tensor.is_contiguous() and nbytes == tensor.numel() * tensor.element_size()
            if name in self._initial and whole and nbytes <= MOST_BYTES:
                self._hold(tensor)
                self._buffers[_storage_of(tensor)] = name, self._initial[name]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Enter a block in which the operators on fake tensors are noted, whichever mode they are of."""
        original = FakeTensorMode.dispatch

        def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.call(func, (args, kwargs or {}), lambda: original(mode, func, types, args, kwargs or {}))

        with mock.patch.object(FakeTensorMode, "dispatch", dispatch):
            yield

    def check_unwritten(self, updates: Collection[str]) -> None:
        """Check that a step writes none of the buffers by which the forward decided.

        Raises:
            CaptureError: it does.
        """
        for name in self.asked.keys() & {*updates}:
            message = f"the model's control flow depends on the buffer `{name}`, which a step writes"
            help_ = (
                "give it the value that training goes on with, or leave it a tensor: choose with `torch.where`, and "
                f"write a queue with `index_copy_` at `({name} + torch.arange(n)) % size`"
            )
            raise CaptureError("control", message, help=help_)

    def _hold(self, tensor: Tensor) -> None:
        self._held[_storage_of(tensor)] = tensor.untyped_storage()

    def value(self, tensor: object) -> Tensor | None:
        """Return the numbers of a fake tensor, which nobody may write, or None if they depend on more than
        constants."""
        if not isinstance(tensor, FakeTensor):
            return tensor if isinstance(tensor, Tensor) else None
        if self._within or tensor.is_complex() or _storage_of(tensor) not in self._held:
            return None
        with _really():
            self._compute(_storage_of(tensor))
            return self._view(_seen(tensor))

    def call(self, function: Any, arguments: tuple[Any, Any], compute: Callable[[], Any]) -> Any:
        """Return the result of an operator: its number, if it asks for one of known values, else what ``compute``
        returns. Notes which results are known."""
        if self._within or not isinstance(function, torch._ops.OpOverload):
            return compute()
        operands = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, FakeTensor)]
        known = torch.Tag.nondeterministic_seeded not in function.tags and (
            all(_storage_of(operand) in self._held for operand in operands)
            or (facts(function).creates and len(operands) < 2)
        )
        if known and torch.Tag.data_dependent_output in function.tags:
            values = pytree.tree_map_only(FakeTensor, self.value, arguments)
            if not any(leaf is None for leaf in pytree.tree_leaves(values)):
                with _really():
                    return function(*values[0], **values[1])
        self._within = True
        try:
            result = compute()
        finally:
            self._within = False
        self._note(function, arguments, operands, result, known)
        return result

    def _note(self, function: Any, arguments: tuple[Any, Any], operands: list[Any], result: Any, known: bool) -> None:
        written = frozenset(_storage_of(operand) for operand in _written(function, arguments))
        before = frozenset(map(_storage_of, operands))
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, FakeTensor)]
        known = known and all(_is_static(leaf) and leaf.untyped_storage().nbytes() <= MOST_BYTES for leaf in results)
        if not known or not written <= self._held.keys():
            for storage in written | ({_storage_of(leaf) for leaf in results} - before):
                self._held.pop(storage, None)
            return
        changed = written | (frozenset(map(_storage_of, results)) - before)
        for leaf in (*operands, *results):
            if _storage_of(leaf) in changed:
                self._hold(leaf)
        if changed:
            arguments = pytree.tree_map_only(FakeTensor, _seen, arguments)
            self._calls.append(_Call(function, arguments, [*map(_seen, results)], before, changed, written))

    def _compute(self, storage: int) -> None:
        """Run the operators that lead to the numbers of a storage, and those before them that read what they write."""
        needed, written, chosen = {storage}, set[int](), set[int]()
        while True:
            count = len(chosen)
            for at, call in reversed([*enumerate(self._calls)]):
                if at not in chosen and (call.changed & needed or (call.read | call.changed) & written):
                    chosen.add(at)
                    needed |= call.read | call.changed
                    written |= call.written
            if len(chosen) == count:
                break
        for at in sorted(chosen):
            self._run(self._calls[at])
        self._calls = [call for at, call in enumerate(self._calls) if at not in chosen]
        for name, compute in (self._buffers[one] for one in needed & self._buffers.keys()):
            if name not in self.asked:
                self.asked[name] = fingerprint(compute())

    def _run(self, call: _Call) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, _Seen):
                known = leaf.storage in self._held or leaf.storage in self._real
                return self._view(leaf) if known else torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)
            return _CPU if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(real, call.arguments, is_leaf=lambda leaf: isinstance(leaf, _Seen))
        empty = facts(call.function).creates and "empty" in call.function._schema.name
        for seen, value in zip(call.results, _tensors(call.function(*args, **kwargs)), strict=True):
            if seen.storage in call.changed - call.written:
                place = torch.empty(0, dtype=seen.dtype).set_(_room(seen), seen.offset, seen.shape, seen.stride)
                self._real[seen.storage] = (place.zero_() if empty else place.copy_(value)).untyped_storage()

    def _view(self, seen: _Seen) -> Tensor:
        """Return the numbers of a fake tensor in the real storage of its own."""
        if seen.storage not in self._real:
            self._real[seen.storage] = self._buffers[seen.storage][1]().clone().untyped_storage()
        empty = torch.empty(0, dtype=seen.dtype)
        return empty.set_(self._real[seen.storage], seen.offset, seen.shape, seen.stride)


def _seen(tensor: Tensor) -> _Seen:
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return _Seen(_storage_of(tensor), tensor.dtype, *place)


def _room(seen: _Seen) -> UntypedStorage:
    """Return a real storage that is large enough for a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(seen.shape, seen.stride, strict=True))
    return torch.empty((seen.offset + last + 1) * seen.dtype.itemsize, dtype=torch.uint8).untyped_storage()


@contextmanager
def _really() -> Iterator[None]:
    """Enter a block in which operators run on real tensors, and no trace sees them."""
    with unset_fake_temporarily(), _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def fingerprint(value: Tensor) -> str:
    """Return a hash of numbers that every machine computes: whole numbers as they are, of others the signs and which
    are infinite."""
    exact = value.sign().nan_to_num(3) * (1 + value.isinf().int()) if value.is_floating_point() else value
    return blake2b(exact.to(torch.int64).numpy().tobytes(), digest_size=16).hexdigest()


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_static(tensor: Tensor) -> bool:
    return all(type(size) is int for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def _written(function: Any, arguments: tuple[Any, Any]) -> Iterator[Tensor]:
    args, kwargs = arguments
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


# ---- what a model's code asks of values


_CHOOSES: Any = (Tensor.__getitem__, Tensor.__setitem__)
_OF_ENTRIES: Any = (
    torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select,
    torch.unique, Tensor.unique, torch.bincount, Tensor.bincount, torch.repeat_interleave, Tensor.repeat_interleave,
)  # fmt: skip
"""The functions whose results have shapes that may follow from numbers."""
_NUMBERS: Any = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


@final
class AsksValues(TorchFunctionMode):
    """A mode in which code gets the numbers of known values, and a mask of them chooses entries by their positions. A
    check that only raises an error passes, whatever it checks."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _CHOOSES:
            args = (args[0], self._positions(args[1]), *args[2:])
        elif function in _NUMBERS or _follows_from_numbers(function, args, kwargs):
            values = pytree.tree_map_only(Tensor, self._known.value, (args, kwargs))
            if not any(leaf is None for leaf in _replaced((args, kwargs), values)):
                return self._computed(function, *values)
        elif function in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            data, options = with_numbers(args[0], self._known.value)
            args, kwargs = (data, *args[1:]), {**options, **kwargs}
        elif function in (Tensor.__bool__, Tensor.item) and args[0].dtype == torch.bool and args[0].numel() == 1:
            passes = _passing() if self._known.value(args[0]) is None else None
            if passes is not None:
                return passes
        elif function is Tensor.item and self._known.value(args[0]) is None and (number := _passing_number()):
            return number
        return function(*args, **kwargs)

    def _positions(self, index: Any) -> Any:
        """Return an index with the positions that known masks choose in their place."""
        items = list(index) if isinstance(index, tuple) else [index]
        places: list[Any] = []
        for item in items:
            mask = self._known.value(item) if _is_mask(item) else None
            if mask is None or mask.numel() > _MOST_ENTRIES:
                places.append(item)
            else:
                with _really():
                    chosen = mask.nonzero(as_tuple=True)
                places += map(_literal, chosen)
        return tuple(places) if isinstance(index, tuple) or len(places) > 1 else places[0]

    def _computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        with _really():
            result = function(*args, **kwargs)
        return pytree.tree_map_only(Tensor, _literal, result)


def _follows_from_numbers(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the shape of a function's result follows from the numbers of its arguments: it does not where each
    entry is repeated equally often."""
    if function is torch.where:
        return len(args) == 1
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    return function in _OF_ENTRIES and not ("repeat" in function.__name__ and isinstance(repeats, int))


def with_numbers(
    data: Sequence[Any], numbers: Callable[[Tensor], Tensor | None]
) -> tuple[Sequence[Any], dict[str, torch.dtype]]:
    """Return what ``torch.tensor`` is to make a tensor of, with the numbers of the tensors in it, and the option that
    says the type that torch finds for it. It stays as it is where a tensor has no known numbers."""
    leaves, structure = pytree.tree_flatten(data)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    known = {id(leaf): numbers(leaf) for leaf in tensors}
    if not tensors or any(value is None for value in known.values()):
        return data, {}
    types = [leaf.dtype if isinstance(leaf, Tensor) else torch.tensor(leaf).dtype for leaf in leaves]
    plain = [value.tolist() if (value := known.get(id(leaf))) is not None else leaf for leaf in leaves]
    return pytree.tree_unflatten(plain, structure), {"dtype": reduce(torch.promote_types, types)}


def _replaced(before: Any, after: Any) -> Iterator[Any]:
    """Yield what has come in the place of each tensor."""
    for old, new in zip(
        pytree.tree_leaves(before), pytree.tree_leaves(after, is_leaf=lambda x: x is None), strict=True
    ):
        if isinstance(old, Tensor):
            yield new


def _is_mask(item: object) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.dim() > 0


def _literal(value: Tensor) -> Tensor:
    """Return a tensor that a trace takes for one that the code writes out.

    Raises:
        CaptureError: it has too many entries.
    """
    if value.numel() > _MOST_ENTRIES:
        message = f"{value.numel():,} positions are chosen by a mask"
        raise CaptureError("control", message, help="choose with `torch.where`, or multiply by the mask")
    return aten.lift_fresh.default(value)  # type: ignore[no-any-return]


class _Unchecked:
    """The number of a tensor that only a check compares: each comparison comes out as the check wants it."""

    def __init__(self, passes: bool) -> None:
        self._passes = passes

    def _compared(self, _: object) -> bool:
        return self._passes

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __hash__ = None  # type: ignore[assignment]


def _passing() -> bool | None:
    """Return the truth value with which the check passes that the code is running; None where it is no check: an
    ``assert``, or an ``if`` that only raises."""
    frame = _asking_frame()
    if frame.f_code is _detect_is_causal_mask.__code__:
        return False  # torch asks whether it may leave the mask out
    return _way_past(*_instructions(frame))


_OPERANDS = ("LOAD_", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "BINARY_", "NOP")
"""The beginnings of instructions that make the other operand of a comparison."""


def _passing_number() -> _Unchecked | None:
    """Return a number with which the check passes that the code is running, ``assert x.max().item() < n``; None where
    the number is read by something else."""
    code, at = _instructions(_asking_frame())
    above = 0  # the values on the stack above the number
    for place in range(at + 1, len(code)):
        one = code[place]
        if one.opname == "COMPARE_OP":
            passes = _way_past(code, place + 1) if above <= 1 else None
            return None if passes is None else _Unchecked(passes)
        reads_number = not above and one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
        above += dis.stack_effect(one.opcode, one.arg, jump=False)
        if reads_number or above < 1 or not one.opname.startswith(_OPERANDS):
            return None
    return None


def _asking_frame() -> Any:
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def _instructions(frame: Any) -> tuple[list[dis.Instruction], int]:
    """Return the instructions of a frame's code, and the place of the one that it is at."""
    code = [*dis.get_instructions(frame.f_code)]
    return code, next((at for at, one in enumerate(code) if one.offset == frame.f_lasti), len(code))


def _way_past(code: Sequence[dis.Instruction], at: int) -> bool | None:
    """Return the truth value, made at an instruction, with which a jump there goes past an error; None where it decides
    something else."""
    jump = next((one for one in code[at : at + 3] if one.opname.startswith("POP_JUMP")), None)
    between = code[at : code.index(jump)] if jump is not None else []
    if jump is None or not all(one.opname in ("CALL", "PRECALL", "TO_BOOL") for one in between):
        return None
    jumps, stays = _raises(code, jump.argval), _raises(code, code[code.index(jump) + 1].offset)
    return jump.opname.endswith("TRUE") is stays if jumps != stays else None


def _raises(code: Sequence[dis.Instruction], offset: int) -> bool:
    """Return whether the instructions from an offset on raise an error, without any further branch."""
    for one in code:
        if one.offset >= offset and (one.opname == "RAISE_VARARGS" or "JUMP" in one.opname or "RETURN" in one.opname):
            return one.opname == "RAISE_VARARGS"
    return False
