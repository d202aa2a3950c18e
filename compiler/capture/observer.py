"""The observer of a module: what a forward and its loss do beside returning numbers, of which a graph has nothing.

Each kind of thing is a row of ``SEEN``: a gradient hook, a parameter that a forward writes, a seed, a branch for
tracers. What lasts from one forward to the next in Python is told apart by ``PythonState``.
"""

from __future__ import annotations

import random
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from enum import Enum
from functools import cached_property
from inspect import GEN_CREATED, getgeneratorstate
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, final
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...grammar.bounded import real_path
from .callables import CallableError, load_callable
from .faults import CaptureError, calling_frame
from .tensors_left import Cache, ClosureCell, Names, Place
from .writes import CLAMPS, NO_LIMITS, WeightLimits, clamped_again, limits_of

# ---- what is refused


class Seen(NamedTuple):
    """A kind of thing that a graph does not have: the words about it, and a way out. ``{}`` is what was seen."""

    message: str
    help: str


SEEN: Mapping[str, Seen] = {
    "hook": Seen(
        "{} has a hook on gradients, which a build does not call",
        "clip with `clip` of the `optimizer` line, give parameters another rate by a line `optimizer on WHERE lr …` or"
        " none by `freeze`, and write a scaled gradient as `0.1 * x + (0.9 * x).detach()`",
    ),
    "packed": Seen(
        "{} packs what backward reads into other numbers; a build's gradients are the forward's derivative",
        "leave `saved_tensors_hooks` out; `recompute` and `offload activations` of the plan save memory exactly",
    ),
    "shared": Seen(
        "the parameters {} are on one memory, and a build would train them as two",
        "make them one parameter, `b.weight = a.weight`, which a build keeps tied; or `clone` the memory of one",
    ),
    "written": Seen(
        "the forward writes the parameter {}, which only the optimizer changes in a build",
        "leave the parameter as it is, and compute what the product reads from it: `F.linear(x, w / w.norm(dim=1,"
        " keepdim=True))`; if a package writes it, set the model's option that leaves this out",
    ),
    "followed": Seen(
        "the forward writes the frozen parameter {}, which nothing changes in a build",
        "register it as a buffer, which programs follow from step to step, and write that: `register_buffer(name,"
        " weight.detach().clone())`",
    ),
    "seed": Seen(
        "{}, so that it draws the same numbers in every step; a build has a stream of random numbers for each draw",
        "draw such numbers once, in `__init__`, and register them as a buffer; the `seed` line seeds all other draws",
    ),
    "traced": Seen(
        "the model computes other numbers while it is traced: {}",
        "compute the same whether `torch.compiler.is_compiling()` or not",
    ),
}
"""The kinds of things that are refused, by the kind of their `CaptureError`."""
_MOST_MARKS = 1 << 24


def fault_of(kind: str, seen: str, source: str = "") -> CaptureError:
    """Return the error of a thing that was seen."""
    row = SEEN[kind]
    return CaptureError(kind, row.message.format(seen), source, help=row.help)


def check_module(model: nn.Module) -> None:
    """Check that no gradient hook is registered on a parameter, a buffer or a module, and that no two parameters, of
    which one is trained, are on one memory. Hooks of forwards are part of these, and are captured.

    Raises:
        CaptureError: there are.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise fault_of("hook", f"`{name}`")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise fault_of("hook", f"the module `{path}`" if path else "the model")
    by_memory = defaultdict[int, list[tuple[str, nn.Parameter]]](list)
    for name, parameter in model.named_parameters():
        by_memory[parameter.untyped_storage()._cdata].append((name, parameter))
    for shared in by_memory.values():
        for (name, parameter), (other, second) in combinations(shared, 2):
            if (parameter.requires_grad or second.requires_grad) and _overlap(parameter, second):
                raise fault_of("shared", f"`{name}` and `{other}`")


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two views of one memory have entries in common; True too where there are too many to look at."""
    (low, high), (start, end) = map(_extent, (first, second))
    if high <= start or end <= low:
        return False
    if max(high, end) > _MOST_MARKS:
        return True
    with unset_fake_temporarily():
        marks = torch.zeros(max(high, end), dtype=torch.bool)
        marks.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
        return bool(marks.as_strided(second.shape, second.stride(), second.storage_offset()).any())


def _extent(view: Tensor) -> tuple[int, int]:
    """Return where a view begins in its memory, and the end of it."""
    if not view.numel():
        return 0, 0
    start = int(view.storage_offset())
    return start, start + 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))


# ---- one forward under the observer


_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")


_DATA: Any = Tensor.data
_SET_DATA = _DATA.__set__


@final
class _Functions(TorchFunctionMode):
    """A mode that notes the hooks on gradients that a forward registers, and where it assigns to ``x.data``."""

    def __init__(self, faults: list[CaptureError]) -> None:
        super().__init__()
        self._faults = faults
        self.assigned: dict[int, str] = {}
        """The place that last gave other memory to a tensor, by its id."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _SET_DATA:
            self.assigned[id(args[0])] = calling_frame()
        if function in _HOOKS:
            self._faults.append(fault_of("hook", "a tensor of the forward", calling_frame()))
        return function(*args, **(kwargs or {}))


@final
class _Operators(TorchDispatchMode):
    """A mode that notes writes to the memory of parameters, and draws from generators of their own. Parameters with
    ``limits`` may be clamped to these, by one call or several, before anything reads them."""

    def __init__(
        self, faults: list[CaptureError], parameters: Mapping[str, Tensor], limits: Mapping[str, WeightLimits]
    ) -> None:
        super().__init__()
        self._faults, self._parameters, self._limits = faults, parameters, limits
        self._memory = {p.untyped_storage()._cdata: name for name, p in parameters.items() if p.numel()}
        self._read = set[str]()
        self.clamped: dict[str, WeightLimits] = {}
        """The limits to which parameters were clamped before they were read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema, written = func._schema, list[Any]()
        if schema.is_mutable:
            by_name = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
            written = tree_leaves(
                [by_name.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write]
            )
            for name in filter(None, map(self._name_of, written)):
                if not self._clamps(name, func, args, kwargs):
                    self._faults.append(_write_fault(name, self._parameters[name], calling_frame()))
        if self._limits and func is not torch.ops.aten.detach.default:
            read = (x for x in tree_leaves((args, kwargs)) if not any(x is other for other in written))
            self._read.update(filter(None, map(self._name_of, read)))
        if kwargs.get("generator") is not None:
            self._faults.append(fault_of("seed", "the forward draws from a generator of its own", calling_frame()))
        return func(*args, **kwargs)

    def _name_of(self, value: Any) -> str | None:
        """Return the name of the parameter in whose memory a tensor is."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        return self._memory.get(value.untyped_storage()._cdata)

    def _clamps(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a write clamps all of a parameter, before anything reads it or without changing a thing."""
        operator, parameter = func._schema.name.removeprefix("aten::").removesuffix("_"), self._parameters[name]
        limits = limits_of(operator, args, kwargs) if operator in CLAMPS else None
        if limits is None or args[0].numel() != parameter.numel():
            return False
        before = self.clamped.get(name, NO_LIMITS)
        if (both := clamped_again(before, limits)) == before:
            return True
        self.clamped[name] = both
        return parameter.requires_grad and name in self._limits and name not in self._read


def _write_fault(name: str, parameter: Tensor, source: str = "") -> CaptureError:
    return fault_of("written" if parameter.requires_grad else "followed", f"`{name}`", source)


@contextmanager
def observing(
    model: nn.Module, limits: Mapping[str, WeightLimits] = MappingProxyType({})
) -> Iterator[list[CaptureError]]:
    """Enter a forward of a model, and of its loss. The list gets what it does that a graph does not have, in order.

    A parameter counts as written if an operator writes its memory, or if it has other memory afterwards, unless it is
    clamped to its ``limits`` before it is read. One that has limits counts as written, too, if it is not clamped.
    """
    faults: list[CaptureError] = []
    before = {name: (p, p.untyped_storage()._cdata) for name, p in model.named_parameters()}

    def seeded(seed: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            faults.append(fault_of("seed", "the forward seeds torch's random numbers", calling_frame()))
            return seed(*args)

        return call

    with ExitStack() as within:
        for of in (torch, torch.random):
            within.enter_context(mock.patch.object(of, "manual_seed", seeded(torch.random.manual_seed)))
        functions = within.enter_context(_Functions(faults))
        operators = within.enter_context(_Operators(faults, {name: p for name, (p, _) in before.items()}, limits))
        yield faults
    faults += [_write_fault(name, before[name][0]) for name in limits if operators.clamped.get(name) != limits[name]]
    for name, parameter in model.named_parameters():
        first, memory = before.get(name, (None, 0))
        if parameter is not first or parameter.untyped_storage()._cdata != memory:
            faults.append(_write_fault(name, parameter, functions.assigned.get(id(parameter), "")))


@contextmanager
def noting_packs(active: bool = True) -> Iterator[list[str]]:
    """Enter a block in which the list gets the places that enter ``saved_tensors_hooks`` of their own; torch's own, as
    ``save_on_cpu``, give back what they took. Unless ``active`` the hooks are not called."""
    places, hooks = list[str](), torch.autograd.graph.saved_tensors_hooks
    enter, leave = hooks.__enter__, hooks.__exit__

    def is_own(of: Any) -> bool:
        return type(of) is not hooks and type(of).__module__.startswith("torch.")

    def entered(of: Any) -> None:
        if not is_own(of):
            places.append(calling_frame())
        if active or is_own(of):
            enter(of)

    def left(of: Any, *error: Any) -> None:
        if active or is_own(of):
            leave(of, *error)

    with mock.patch.object(hooks, "__enter__", entered), mock.patch.object(hooks, "__exit__", left):
        yield places


@contextmanager
def as_if_traced() -> Iterator[None]:
    """Enter a block in which ``torch.compiler.is_compiling()`` and ``is_exporting()`` are true, as in a capture."""
    with ExitStack() as within:
        for flag in _FLAGS:
            if hasattr(torch.compiler, flag):
                within.enter_context(mock.patch.object(torch.compiler, flag, True))
        yield


def own_backwards(loss: Tensor) -> tuple[str, ...]:
    """Return the names of the `autograd.Function`s behind a loss, which define a backward of their own."""
    seen, pending = set[Any](), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [of for of, _ in node.next_functions]
    nodes: Any = (node for node in seen if isinstance(node, BackwardCFunction))
    return tuple(sorted({node._forward_cls.__qualname__ for node in nodes}))


# ---- random numbers of Python and NumPy

_WORDS, _FORCED = 624, 400
"""The words of the state of a Mersenne Twister, and the words that are forced: code that rejects a draw and draws again
gets other numbers at last."""
_LARGEST = 0x12DD9BB3
"""The word of the state from which a Mersenne Twister makes the largest number."""
LEAST_DRAWS, LARGEST_DRAWS = -1, -2


@contextmanager
def kept_draws() -> Iterator[None]:
    """Enter a block that leaves the random numbers of Python, NumPy and torch as they were."""
    python, state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(state)


def python_draws() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's random numbers, which torch's seeds do not govern."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


def seed_draws(seed: int) -> None:
    """Set Python's and NumPy's random numbers by a seed, or so that the next draws are the least or the largest: a
    branch on a draw, as of a layer that is left out with a probability of 0.001, then goes both ways."""
    random.seed(seed)
    numpy.random.seed(abs(seed))
    if seed < 0:
        word = 0 if seed == LEAST_DRAWS else _LARGEST
        words = [word] * _FORCED + list(random.getstate()[1][_FORCED:_WORDS])
        random.setstate((3, (*words, 0), None))
        numpy.random.set_state(("MT19937", numpy.array(words, numpy.uint32), 0, 0, 0.0))


# ---- state in Python


_PLAIN = (int, float, complex, str, bytes, bool, type(None), Enum, torch.dtype, torch.device, range, slice)
_MOST_ENTRIES = 1000
"""The entries of a container up to which these are looked into; of a larger one only which objects they are."""
_MOST_OBJECTS = 200_000
_OPAQUE = ("torch", "builtins", "numpy", "logging", __name__.partition(".")[0])
"""The packages whose objects are not looked into."""
_SAME_NAME = "'"
_GENERATOR = "generator"
"""The first word of what tells one state of a generator of random numbers from another."""
_OF_MODULES = frozenset(vars(nn.Module()))
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")


@final
class PythonState:
    """The state of a model and its loss in Python, beside registered tensors: attributes, of classes too;
    containers and objects in them; closures, defaults and globals of functions whose code is under ``home``.
    ``roots`` are the model, or the function that makes it, and the functions of its loss."""

    def __init__(self, roots: Iterable[Any], home: Path) -> None:
        self._roots = [("", root) for root in roots]
        self._home, self._kept = f"{real_path(home)}/", list[Any]()
        self.whole = True
        """False where some of it cannot be compared: an iterator, or too many objects."""

    def take(self) -> dict[str, Any]:
        """Return the state now: by the path of each value something that differs once the value does."""
        state: dict[str, Any] = {}
        kept = list[Any]()  # an id may not come back while states are compared
        seen, pending = set[int](), deque(self._roots)
        while pending and len(seen) < _MOST_OBJECTS:
            path, value = pending.popleft()
            while path in state:  # an attribute and a global of one name
                path += _SAME_NAME
            if isinstance(value, _PLAIN):
                state[path] = (type(value).__name__, repr(value))
                continue
            if id(value) in seen:
                state[path] = id(value)
                continue
            seen.add(id(value))
            kept.append(value)
            token, inside = self._look(path, value)
            state[path] = token
            pending.extend(inside)
        self.whole, self._kept = self.whole and not pending, [*self._kept, *kept]
        return state

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Enter a block after which lists, dicts, sets and deques hold what they do now, and all else of the state has
        no other tensors: a trace leaves fake ones in what outlives it, and a run those of its types."""
        self.take()
        before = [(held, copy(held)) for held in self._kept if type(held) in (list, dict, set, deque)]
        places = [place for held in self._kept for place in self._places(held)]
        try:
            yield
        finally:
            for place in places:
                place.restore()
            for held, copied in before:
                if _entries(held) != _entries(copied):
                    held.clear()
                    held.extend(copied) if isinstance(held, (list, deque)) else held.update(copied)

    def _places(self, held: Any) -> Iterator[Place]:
        """Yield the places of an object of the state to which code assigns."""
        if isinstance(held, types.FunctionType):
            yield from map(ClosureCell, held.__closure__ or ())
            if self._is_at_home(held.__code__.co_filename):
                yield Names(held.__globals__)
        if hasattr(held, "cache_clear"):
            yield Cache(held)
        if isinstance(held, nn.Module):  # its own tensors are the trace's
            yield from (Names(vars(of), of) for of in type(held).__mro__ if self._is_own(of))
        elif hasattr(held, "__dict__") and not isinstance(held, types.ModuleType):
            yield Names(vars(held), held)

    def _is_at_home(self, file: str | None) -> bool:
        return file is not None and file.startswith(self._home) and "/site-packages/" not in file

    def _is_own(self, value: Any) -> bool:
        """Return whether a class or a module is of the model's own files."""
        module = sys.modules.get(value.__module__) if isinstance(value, type) else value
        return self._is_at_home(getattr(module, "__file__", None))

    def _look(self, path: str, value: Any) -> tuple[Any, Iterable[tuple[str, Any]]]:
        """Return what tells a value from another, and the values in it by their paths."""
        if isinstance(value, Tensor):
            return ("tensor", id(value), 0 if value.is_inference() else value._version), ()
        if isinstance(value, numpy.ndarray):
            return ("array", hash(value.tobytes())) if value.nbytes < 1 << 20 else id(value), ()
        if isinstance(value, (random.Random, numpy.random.Generator, torch.Generator)):
            return (_GENERATOR, hash(repr(_generator_state(value)))), ()
        if isinstance(value, nn.Module):
            return id(value), self._of_module(path, value)
        if isinstance(value, dict):
            if len(value) > _MOST_ENTRIES:
                return (len(value), hash(tuple(map(id, value.values())))), ()
            return len(value), [(f"{path}[{key!r}]", entry) for key, entry in [*value.items()]]
        if isinstance(value, (list, tuple, deque)):
            if len(value) > _MOST_ENTRIES:
                return (len(value), hash(tuple(map(id, value)))), ()
            return len(value), [(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return (len(value), hash(frozenset(map(hash, value)))), ()
        if isinstance(value, (types.FunctionType, types.MethodType)) or hasattr(value, "__wrapped__"):
            return id(value), self._of_function(path, value)
        if hasattr(type(value), "__next__"):
            is_fresh = isinstance(value, types.GeneratorType) and getgeneratorstate(value) == GEN_CREATED
            self.whole = self.whole and is_fresh  # a context manager that decorates a function holds a fresh one
            return (id(value), is_fresh), ()
        package = type(value).__module__.partition(".")[0]
        if isinstance(value, type) and self._is_own(value):
            return id(value), _of_class(path, value)
        if isinstance(value, (type, types.ModuleType)) or package in _OPAQUE:
            return id(value), ()
        attributes = getattr(value, "__dict__", None)
        inside = [(_dotted(path, name), entry) for name, entry in [*(attributes or {}).items()]]
        return id(value), [(path, type(value)), *inside]

    def _of_module(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for name, child in module._modules.items():
            yield _dotted(path, name), child
        for of in reversed(type(module).__mro__):
            if not of.__module__.startswith("torch."):
                yield from _of_class(path, of)
        for name, entry in [*vars(module).items()]:  # after those of classes, which they hide
            if name not in _OF_MODULES or name == "training":
                yield _dotted(path, name), entry
        for table in _HOOK_TABLES:
            for hook in [*vars(module)[table].values()]:
                yield f"{path} hook", hook

    def _of_function(self, path: str, function: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(function, types.MethodType):
            yield path, function.__self__
            yield path, function.__func__
        elif hasattr(function, "__wrapped__"):
            yield path, function.__wrapped__
        if not isinstance(function, types.FunctionType):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:  # an empty cell
                continue
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield f"{function.__name__}'s default", default
        if self._is_at_home(function.__code__.co_filename):
            names = _names_of(function.__code__)
            for name in names & function.__globals__.keys():
                value = function.__globals__[name]
                yield name, value
                if isinstance(value, types.ModuleType) and self._is_own(value):
                    yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names & vars(value).keys())


@contextmanager
def code_undone(sources: Iterable[str], folder: Path) -> Iterator[None]:
    """Enter a block after which the code of these callables, those of a plan's model and loss, keeps no tensor that it
    did not keep before: the next model and its forwards make their own tables."""
    roots = []
    for target in sources:
        with suppress(CallableError):  # it is said where the callable is used
            roots.append(load_callable(target, folder))
    with PythonState(roots, folder).undone():
        yield


def _of_class(path: str, of: type) -> Iterator[tuple[str, Any]]:
    for name, entry in [*vars(of).items()]:
        if not name.startswith("__") or name in ("__init__", "__call__"):
            match entry:
                case property():
                    entry = entry.fget
                case cached_property():
                    entry = entry.func
                case classmethod() | staticmethod():
                    entry = entry.__func__
            yield _dotted(path, name), entry


def _entries(held: Any) -> list[int]:
    return [id(entry) for entry in (held.values() if isinstance(held, dict) else held)]


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _names_of(code: types.CodeType) -> set[str]:
    """Return the names that code reads, with those of functions and classes in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    return generator.bit_generator.state


def state_changes(before: Mapping[str, Any], after: Mapping[str, Any], tensors: bool = True) -> tuple[str, ...]:
    """Return what differs between two states, each once, without the keys and indices of entries. Without ``tensors``,
    another tensor in place of one is no change."""
    names = dict[str, None]()
    for path in (*before, *(path for path in after if path not in before)):
        old, new = before.get(path), after.get(path)
        if old != new and (tensors or not (_is_tensor(old) and _is_tensor(new))):
            names[path.partition("[")[0].rstrip(_SAME_NAME)] = None
    return tuple(names)


def drawn_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the generators of random numbers that have drawn between two states."""
    drawn = {path: token for path, token in after.items() if _starts_with(token, _GENERATOR)}
    return state_changes({path: before[path] for path in drawn if path in before}, drawn)


def _is_tensor(token: Any) -> bool:
    return _starts_with(token, "tensor")


def _starts_with(token: Any, word: str) -> bool:
    return isinstance(token, tuple) and token[:1] == (word,)
