"""The recorder of a module's building code, which runs on fake tensors: every storage gets the node that computes its
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..capture.known import with_numbers
from ..ops.own_ops import aten
from ..ops.results import changed, example, results_of
from ..ops.rules import facts
from . import counter
from .nodes import (
    CallNode,
    Count,
    Draw,
    Elementwise,
    Fill,
    LiteralNode,
    Read,
    RecipeNode,
    Replay,
    Result,
    Write,
    as_it_is,
    contiguous_strides,
    dense,
    is_contiguous,
    seen_as,
)

_MOST_OPERATORS = 200_000
"""The most operators that building a model may run, about two for each of its tensors: a mistyped number of layers
would keep a machine busy until its memory is full."""

_HASHED = 1024
"""The most bytes of a storage's numbers that are hashed, evenly spaced."""


class RecipeError(Exception):
    """The error of building code that does something with a tensor that cannot be recorded."""


def _check_dense(tensor: Tensor) -> None:
    """Check that a tensor is an array in memory.

    Raises:
        RecipeError: it is sparse.
    """
    if tensor.layout is not torch.strided:
        raise RecipeError(f"a tensor is made sparse ({tensor.layout}): keep it dense, as `to_dense()` gives it")


def _of_entries(_: int, dense: int, size: Sequence[int], indices: Tensor, values: Tensor) -> Tensor:
    """Return a tensor of values at places, and zeros, as a dense one."""
    return values.new_zeros(size).index_put(tuple(indices.unbind(0)), values, accumulate=values.dtype != torch.bool)


class RecipeRecorder(TorchDispatchMode):
    """A mode that runs every operator on fake tensors, and records the node of every storage that it writes."""

    def __init__(self, mode: FakeTensorMode, seed: int) -> None:
        super().__init__()
        self._mode = mode
        self._seed = seed
        self._nodes: dict[int, tuple[object, RecipeNode]] = {}  # by storage; holding it keeps its number from reuse
        self._fakes: dict[int, UntypedStorage] = {}  # by real storage
        self.read_storages: dict[int, UntypedStorage] = {}  # by their numbers: real ones that readers of files fill
        self._draws = self._operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._operators += 1
        if self._operators > _MOST_OPERATORS:
            most = f"it takes more than {_MOST_OPERATORS:,} operators to make its tensors"
            raise RecipeError(f"{most}: does it have more layers than you meant?")
        leaves = [*_leaves((args, kwargs))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func is aten.from_file.default:
            with unset_fake_temporarily():
                func, args, kwargs = aten.lift_fresh.default, (func(*args, **kwargs),), {}
        if func is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            fake = self.adopt(func(*args), args[0])
            self._forget_references()
            return fake
        if func.overloadpacket is aten.set_ and len(args) > 1 and isinstance(args[1], UntypedStorage):
            return func(args[0], self._of_file(args[1], args[0].dtype), *args[2:], **kwargs)
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():  # numbers from outside stay numbers
                return func(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.overloadpacket is aten._sparse_coo_tensor_with_dims_and_tensors:
            with self:
                return _of_entries(*args)
        if func.namespace == "aten" and func.__name__.startswith("_to_sparse"):  # a recipe has all entries
            with self:
                return args[0].clone()
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return self._compute_now(func, args, kwargs)
        written = _written_arguments(func, args, kwargs)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            return self._write_outside(func, args, kwargs, written)
        # ``t_`` and the like change the strides of an operand
        before = changed((args, kwargs), self.read) if written else None
        try:
            filled = not kwargs and _fills_first(func, args, written, tensors)
            out = args[0] if filled else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._compute_now(func, args, kwargs)
        self._forget_references()
        self._note(func, before or (args, kwargs), leaves, written, out)
        return out

    def _forget_references(self) -> None:
        """Drop torch's weak references to fake tensors: they forbid modules to swap their tensors with others, as at a
        change of dtype."""
        converter = self._mode.fake_tensor_converter
        converter.meta_converter.tensor_memo.clear()
        converter.constant_storage_mapping.clear()  # of tensors of one number

    def read(self, tensor: Tensor) -> Read:
        """Return the present values of a tensor, as a strided read of the node of its storage.

        Raises:
            RecipeError: the tensor sees its storage as another dtype than the one it was written as.
        """
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
            return dense(LiteralNode(flat.numel(), flat.dtype, flat), tensor.shape)
        _, node = self._nodes.get(tensor.untyped_storage()._cdata, (None, None))
        if node is None and tensor.untyped_storage().device.type != "meta":  # of a real tensor, set as its ``data``
            with unset_fake_temporarily():
                flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone()
            node = LiteralNode(flat.numel(), flat.dtype, flat)
        if node is None:
            raise RecipeError(f"a fake tensor of sizes {tuple(tensor.shape)} was made outside of the building code")
        seen = seen_as(node, tensor.dtype) if tensor.numel() else node
        if seen is None:
            raise RecipeError(f"memory written as {node.dtype} is read as {tensor.dtype}: write it in that type")
        return Read(seen, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the present numbers of a fake tensor: the building code needs them at once."""
        read = self.read(tensor)
        with unset_fake_temporarily(), _disable_current_modes():
            return Replay(self._seed).whole(read)

    def hash_of_files(self) -> str:
        """Return a hash of the numbers that were read from files, "" if none were: of some of each storage, so a file
        mapped into memory is not read as a whole. A step of training changes nearly all numbers."""
        with unset_fake_temporarily():
            flats = [torch.empty(0, dtype=torch.uint8).set_(real.cpu()) for real in self.read_storages.values()]
            parts = sorted(f"{len(flat)} {flat[:: len(flat) // _HASHED + 1].tolist()}" for flat in flats)
        return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest() if parts else ""

    def adopt(self, fake: Tensor, real: Tensor) -> Tensor:
        """Record the numbers of a real tensor as those of a fake one."""
        _check_dense(real)
        self._store(fake, self.read(real).node)
        return fake

    def _of_file(self, storage: UntypedStorage, dtype: torch.dtype) -> UntypedStorage:
        """Return the fake storage of a real one, as readers of files fill it, with its numbers as a literal. They are
        not copied: of a file that is mapped into memory, only what a rank asks for is read.

        Raises:
            RecipeError: it has no numbers.
        """
        if storage.device.type == "meta":
            if storage._cdata in self._nodes:  # a fake tensor's
                return storage
            raise RecipeError('a tensor of the device "meta" has no numbers: give `torch.load` `map_location="cpu"`')
        if storage._cdata not in self._fakes:
            with unset_fake_temporarily():
                flat = torch.empty(0, dtype=dtype, device=storage.device).set_(storage).cpu()
            fake = torch.empty(flat.numel(), dtype=dtype, device=storage.device).untyped_storage()
            self._nodes[fake._cdata] = (fake, LiteralNode(flat.numel(), dtype, flat))
            self._fakes[storage._cdata], self.read_storages[storage._cdata] = fake, storage
        return self._fakes[storage._cdata]

    def draw_truncated_normal(self, tensor: Tensor, mean: float, std: float, a: float, b: float) -> Tensor:
        """Fill a fake tensor from a normal distribution truncated to ``a`` and ``b``, by inversion."""
        low, high = (0.5 * (1.0 + math.erf((bound - mean) / (std * math.sqrt(2.0)))) for bound in (a, b))

        def law(key: int, index: Tensor) -> Tensor:
            return counter.normal(key, index, low, high).mul_(std).add_(mean).clamp_(a, b)

        self._store(tensor, self._draw(law, None, tensor.numel(), tensor.dtype))
        return tensor

    def _compute_now(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on real values: the building code needs the result at once, as with ``item``."""
        if _written_arguments(func, args, kwargs):
            raise RecipeError(f"`{func}` writes a tensor in a way that depends on values")
        replay = Replay(self._seed)
        reads = changed((args, kwargs), self.read)
        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map(lambda leaf: replay.whole(leaf) if isinstance(leaf, Read) else leaf, reads)
            out = func(*args, **kwargs)
        return pytree.tree_map(
            lambda leaf: self.adopt(self._mode.from_tensor(leaf), leaf) if isinstance(leaf, Tensor) else leaf, out
        )

    def _write_outside(self, func: Any, args: Any, kwargs: Any, written: Sequence[Any]) -> Any:
        """Run an operator that writes real tensors, such as globals of the model's file, with the numbers of fake
        ones."""
        if any(isinstance(tensor, FakeTensor) for tensor in written):
            raise RecipeError(f"`{func}` writes tensors of the model and others together: write them one by one")
        numbers = pytree.tree_map_only(FakeTensor, self.whole, (args, kwargs))
        with unset_fake_temporarily():
            return func(*numbers[0], **numbers[1])

    def _note(self, func: Any, call: tuple[Any, Any], leaves: Sequence[Any], written: Sequence[Any], out: Any) -> None:
        """Set the nodes of all storages that an operator allocated or wrote. Views share their storage's node. ``call``
        has its arguments, already as reads if it wrote one."""
        results = [out] if isinstance(out, Tensor) else [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        for result in results:
            _check_dense(result)
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in self._nodes]
        targets = written or fresh
        if not targets:
            return
        reads = changed(call, self.read)
        if len(targets) == 1 and (written or len(results) == 1):
            places = tuple(place for place, leaf in enumerate(leaves) if leaf is targets[0])
            node = self._elements(func, reads, places, targets[0])
            if node is not None:
                self._store(targets[0], node)
                return
        places = tuple(next(i for i, leaf in enumerate(leaves) if leaf is tensor) for tensor in written)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        draw = self._draw(counter.uniform, None, 0, torch.float64) if is_random else None
        args, kwargs = pytree.tree_map(lambda leaf: "cpu" if isinstance(leaf, torch.device) else leaf, reads)
        if kwargs.get("dtype", 0) is None and len(results) == 1:  # the default dtype of then, not of the replay
            kwargs["dtype"] = results[0].dtype
        whole_call = CallNode(func, args, kwargs, places, draw)
        for place, tensor in enumerate([*results, *written]):
            if any(tensor is target for target in targets) and not (place < len(results) and written):
                self._store(tensor, Result(tensor.numel(), tensor.dtype, whole_call, place))

    def _elements(
        self, func: Any, reads: tuple[Any, Any], written: tuple[int, ...], target: Tensor
    ) -> RecipeNode | None:
        """Return the node of an operator that computes each element by itself, or None for other operators."""
        name = func.overloadpacket.__name__.removesuffix("_")
        bound = bind_arguments(func, *reads)
        law = law_of(func, bound, target.dtype)
        if law is not None:
            return self._draw(*law, target.numel(), target.dtype)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        return elements_of(Elements(func, name, bound, reads, written, tuple(target.shape), target.dtype))

    def _draw(self, law: Callable[[int, Tensor], Tensor], below: float | None, count: int, dtype: torch.dtype) -> Draw:
        self._draws += 1
        return Draw(count, dtype, law, self._draws, below)

    def _store(self, tensor: Tensor, node: RecipeNode) -> None:
        """Set the elements of ``tensor`` to those of ``node``, from now on."""
        storage = tensor.untyped_storage()
        if not tensor.numel() and storage._cdata in self._nodes:
            return
        sizes, strides = tuple(tensor.shape), tensor.stride()
        count = storage.nbytes() // tensor.element_size()
        in_order = is_contiguous(sizes, strides) and tensor.storage_offset() == 0
        if not (in_order and tensor.numel() == count):
            if not _is_nested(sizes, strides):
                raise RecipeError(f"a tensor of sizes {sizes} and strides {strides} is written: its elements overlap")
            before = self._nodes.get(storage._cdata, (None, Fill(count, tensor.dtype, 0)))[1]
            before = seen_as(before, tensor.dtype) or before
            if tensor.numel() == count:
                before = Fill(count, tensor.dtype, 0)  # all of it is overwritten
            node = Write(count, tensor.dtype, before, dense(node, sizes), strides, int(tensor.storage_offset()))
        self._nodes[storage._cdata] = (storage, node)


@contextmanager
def truncated_normals_by(recorder: RecipeRecorder) -> Iterator[None]:
    """Enter a block in which ``nn.init.trunc_normal_`` of a fake tensor is one draw.

    Torch's own code redraws until all elements are inside: its control flow depends on every value, so recording it
    would compute the whole tensor; and what it did in earlier versions put about one element in 2**24 on the bound.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def fill(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return recorder.draw_truncated_normal(tensor, mean, std, a, b)
        return original(tensor, mean, std, a, b, generator)

    with mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", fill):
        yield


@contextmanager
def deep_copies_by_operators() -> Iterator[None]:
    """Enter a block in which ``copy.deepcopy`` copies fake tensors by operators, which a recorder sees; views of one
    memory are views of one memory afterwards. Torch's own code asks for the storage's bytes."""
    original = Tensor.__deepcopy__

    def deep_copy(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        if not isinstance(tensor, FakeTensor) or not tensor.is_leaf or tensor.layout is not torch.strided:
            return original(tensor, memo)  # type: ignore[no-any-return]
        if id(tensor) not in memo:
            storage = tensor.untyped_storage()
            key = "memory", storage._cdata, tensor.dtype
            with torch.no_grad():
                if key not in memo:
                    memo[key] = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).clone()
                view = memo[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(view) if is_parameter else view
            memo[id(tensor)].requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]  # type: ignore[no-any-return]

    with mock.patch.object(Tensor, "__deepcopy__", deep_copy):
        yield


@contextmanager
def dense_for_sparse() -> Iterator[None]:
    """Enter a block in which a fake tensor that stands for a sparse one may be coalesced."""
    original = Tensor.coalesce

    def coalesce(tensor: Tensor) -> Tensor:
        stands = isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
        return tensor if stands else original(tensor)

    with mock.patch.object(Tensor, "coalesce", coalesce):
        yield


@contextmanager
def arrays_and_buffers(recorder: RecipeRecorder) -> Iterator[None]:
    """Enter a block in which ``numpy`` returns a fake tensor's numbers, in an array that cannot be written,
    ``torch.tensor`` reads those of tensors in a list, and ``torch.frombuffer`` returns a fake tensor. Storages that
    safetensors fills are noted: transformers does so in threads, which are under no mode, so their tensors are real."""
    as_array, of_buffer, as_tensor, of_list = Tensor.numpy, torch.frombuffer, torch.asarray, torch.tensor

    def numpy(tensor: Tensor, **options: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return as_array(tensor, **options)
        array = recorder.whole(tensor).numpy()
        array.setflags(write=False)  # torch's would write the tensor
        return array

    def frombuffer(buffer: Any, **options: Any) -> Tensor:
        return aten.lift_fresh.default(of_buffer(buffer, **options))  # type: ignore[no-any-return]

    def asarray(source: Any, **options: Any) -> Tensor:
        if isinstance(source, UntypedStorage):
            recorder.read_storages[source._cdata] = source
        return as_tensor(source, **options)

    def tensor(data: Any, **options: Any) -> Tensor:
        types: dict[str, Any] = {}
        if isinstance(data, (list, tuple)):
            data, types = with_numbers(data, recorder.whole)
        return of_list(data, **{**types, **options})

    functions = mock.patch.multiple(torch, frombuffer=frombuffer, asarray=asarray, tensor=tensor)
    with mock.patch.object(Tensor, "numpy", numpy), functions:
        yield


def _leaves(item: Any) -> Iterator[Any]:
    """Yield the leaves of an operator's arguments, in order."""
    if isinstance(item, (tuple, list, dict)):
        for inner in item.values() if isinstance(item, dict) else item:
            yield from _leaves(inner)
    else:
        yield item


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that the operator writes, by its schema."""
    written: list[Any] = []
    for place, name in _written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        written += value if isinstance(value, list | tuple) else [value] if value is not None else []
    return written


def _fills_first(func: Any, args: tuple[Any, ...], written: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Return whether a call fills its first operand without reading a tensor, as ``normal_`` does. Such calls are half
    of the operators of most models. torch's checks of their numbers depend on the dtype alone, so they run on one
    number.

    Raises:
        Exception: whatever torch raises for numbers that it does not take.
    """
    row = facts(func)
    if not (row.law or row.creates) or len(written) != 1 or len(tensors) != 1 or args[0] is not written[0]:
        return False
    with unset_fake_temporarily():  # examples outlive the mode
        return results_of(func, (example(tensors[0].dtype, (1,)), *args[1:]), {}).in_place


@cache
def _written_places(func: Any) -> Sequence[tuple[int, str]]:
    """Return the places and names of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write)


def _is_nested(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether each stride steps over all that the smaller ones reach: then no two elements share a storage
    index."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


# ---- operators as nodes that compute each element by itself


Bound = dict[str, Any]


Law = tuple[Callable[[int, Tensor], Tensor], float | None]
"""A distribution: a function from (key, index) to numbers in float64, and an upper bound, if any, that rounding to a
dtype must not reach."""


@dataclass(frozen=True)
class Elements:
    """An operator's call, of which the functions below compute the one result, or the one tensor that it writes."""

    func: Any
    name: str  # without the underscore of the in-place form
    bound: Bound  # arguments by name, defaults filled in, tensors as reads
    reads: tuple[Any, Any]  # args and kwargs, tensors as reads
    written: tuple[int, ...]  # places of the written tensor among the flattened arguments
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def each(self, function: Callable[..., Tensor], *reads: Read, exact: bool = True) -> Elementwise:
        """Return the node that applies ``function`` to the reads, element by element."""
        return Elementwise(self.count, self.dtype, function, exact, reads, {}, self.sizes)


def bind_arguments(func: Any, args: tuple[Any, ...], kwargs: Bound) -> Bound:
    """Return an operator's arguments by the names of its schema."""
    arguments = func._schema.arguments
    defaults = {one.name: one.default_value if one.has_default_value() else None for one in arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def elements_of(call: Elements) -> RecipeNode | None:
    """Return the node of an operator whose element i needs only element i of each operand; None for any other."""
    row = facts(call.func)
    if row.creates:
        return _fill(call, row.number_in(list(call.bound.values())))
    if row.moves == "copy" or row.casts:
        return _copy(call, call.bound["self"])
    if call.name in _ELEMENT_MOVES:
        return _ELEMENT_MOVES[call.name](call)
    return _pointwise(call)


def _fill(call: Elements, number: Any) -> RecipeNode | None:
    """Return the node of one number everywhere, which may be the one entry of another tensor."""
    return _copy(call, number) if isinstance(number, Read) else Fill(call.count, call.dtype, number)


def _copy(call: Elements, source: Read) -> RecipeNode:
    return call.each(as_it_is, source.expand(call.sizes))


def _arange(call: Elements) -> RecipeNode | None:
    start, step = call.bound.get("start") or 0, call.bound.get("step") or 1
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return Count(call.count, call.dtype, start, step)


def _concatenate(call: Elements) -> RecipeNode:
    """Return the node of a concatenation along a dim, or of a stack along a new one."""
    stacks = call.name == "stack"
    dim = call.bound["dim"] % max(len(call.sizes), 1)
    strides = contiguous_strides(call.sizes)
    inner = strides[:dim] + strides[dim + 1 :] if stacks else strides
    node: RecipeNode = Fill(call.count, call.dtype, 0)
    start = 0
    for piece in call.bound["tensors"]:
        if math.prod(piece.sizes):
            node = Write(call.count, call.dtype, node, _as_dtype(piece, call.dtype), inner, start * strides[dim])
            start += 1 if stacks else piece.sizes[dim]
    return node


_ELEMENT_MOVES: dict[str, Callable[[Elements], RecipeNode | None]] = {
    "copy": lambda call: _copy(call, call.bound["src"]),
    "fill": lambda call: _fill(call, call.bound["value"]),
    "arange": _arange,
    "cat": _concatenate,
    "stack": _concatenate,
}


def _pointwise(call: Elements) -> RecipeNode | None:
    if torch.Tag.pointwise not in call.func.tags and call.name != "masked_fill":
        return None
    leaves = pytree.tree_leaves(call.reads)
    operands = [leaf for leaf in leaves if isinstance(leaf, Read)]
    if not operands or tuple(torch.broadcast_shapes(*(read.sizes for read in operands))) != call.sizes:
        return None
    if (
        call.name == "erfinv" and operands[0].dtype.is_floating_point
    ):  # of truncated normals: the same bits on every device
        return call.each(counter.inverse_erf, operands[0])
    exact = facts(call.func).exact and not any(read.dtype.is_complex for read in operands)
    exact = exact and call.bound.get("alpha") in (None, 1) and call.bound.get("rounding_mode") is None
    function = _on_copies(call.func, call.written) if call.written else call.func
    return Elementwise(call.count, call.dtype, function, exact, *call.reads, call.sizes)


def _on_copies(func: Any, written: tuple[int, ...]) -> Callable[..., Tensor]:
    """Return an operator that writes into copies of the arguments at these places: others read the originals."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place in written:
            leaves[place] = leaves[place].clone()
        copies, options = pytree.tree_unflatten(leaves, spec)
        result: Tensor = func(*copies, **options)
        return result

    return run


def _as_dtype(read: Read, dtype: torch.dtype) -> Read:
    if read.dtype == dtype:
        return read
    return dense(Elementwise(math.prod(read.sizes), dtype, as_it_is, True, (read,), {}, read.sizes), read.sizes)


# ---- laws of random operators


def law_of(func: Any, bound: Bound, dtype: torch.dtype) -> Law | None:
    """Return the law by which an operator draws, or None if it does not draw each number by itself. Both parts of a
    complex number are drawn, as in torch: those of a normal number have half of the variance each."""
    name = facts(func).law
    if not name or not dtype.is_complex:
        return _LAWS[name](bound) if name else None
    if name == "normal" and not isinstance(std := bound.get("std", 1.0), Read):
        bound = {**bound, "std": std * math.sqrt(0.5)}
    if (law := _LAWS[name](bound)) is None:
        return None
    draw, _ = law
    return (lambda key, index: torch.complex(draw(key, 2 * index), draw(key, 2 * index + 1))), None


def _uniform(bound: Bound) -> Law:
    low, high = float(bound.get("from", 0.0)), float(bound.get("to", 1.0))
    return lambda key, index: counter.uniform(key, index).mul_(high - low).add_(low), high if high > low else None


def _normal(bound: Bound) -> Law | None:
    mean, std = bound.get("mean", 0.0), bound.get("std", 1.0)
    if isinstance(mean, Read) or isinstance(std, Read):
        return None
    return (lambda key, index: counter.normal(key, index).mul_(float(std)).add_(float(mean))), None


def _bernoulli(bound: Bound) -> Law | None:
    p = bound.get("p")
    if p is None or isinstance(p, Read):
        return None
    return (lambda key, index: counter.keep_mask(key, index, 1.0 - p).to(torch.float64)), None


def _integers(bound: Bound) -> Law | None:
    low = bound.get("low", bound.get("from")) or 0
    high = bound.get("high", bound.get("to"))
    if high is None or high - low > 1 << 53:
        return None
    return (lambda key, index: counter.uniform(key, index).mul_(float(high - low)).floor_().add_(float(low))), None


def _exponential(bound: Bound) -> Law | None:
    return (lambda key, index: counter.exponential(key, index).mul_(1.0 / bound["lambd"])), None


_LAWS: dict[str, Callable[[Bound], Law | None]] = {
    "uniform": _uniform, "normal": _normal, "integers": _integers, "bernoulli": _bernoulli, "exponential": _exponential,
    "permutation": lambda bound: None, "classes": lambda bound: None,
}  # fmt: skip
"""The laws by their names in operator rows; None for a call whose numbers can only be drawn all together."""
