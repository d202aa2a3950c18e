"""The search for a model's inputs: its forward is called on fake tensors, one guess after the other.

A forward's parameters have names, perhaps types, and no shapes. Each gets one tensor after the other that the model's
layers might read; of calls that fail, the one that ran more operators is nearer. Of a forward that takes any names, the
errors tell them.
"""

from __future__ import annotations

import inspect
import re
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from parc.compiler.capture.callables import ending_said
from parc.compiler.capture.experts.forms import with_experts
from parc.compiler.capture.experts.lists import unstacked
from parc.compiler.capture.model_calls import with_entries
from parc.compiler.capture.model_output import tensors_in
from parc.compiler.capture.observer import as_if_traced
from parc.compiler.initial.recipes import Recorded
from parc.compiler.sizes.size_range import BATCH
from parc.compiler.torch_private import quiet
from parc.proposing.guesses import Guess, ReadLayers, model_numbers, named_dims

SAMPLES, LENGTH = 8, 128
_SECONDS = 40  # of the processor
_LARGE_WORK = 500_000_000
"""The multiply-adds of a forward from which on parc looks for smaller inputs."""
_MANY_LINES = 500  # of a forward that goes through its sequence in Python
_FEWER = 1.4  # times, for a sequence of half the length
_FEWEST_SIDES = 8
_OTHERS_TRIED = 16
_TARGETS = ("label", "target")
"""Words in the names of parameters that take targets: these are filled though they are optional."""
_MASK = "mask"
"""The word in the names of parameters that take masks, of ones and zeros or of booleans."""
_LENGTHS = (64, 32, 16, 8)
_LONGEST = 4096
_MOST_UNNAMED = 4  # inputs of a forward that names none
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
_UNPACKED = re.compile(r"not enough values to unpack \(expected (\d+), got 0\)")
_SYMBOL = re.compile(r"\bu\d+\b")
_OF_SEQUENCES = 3  # dims
_MOST_BESIDE = 200  # guesses for what stands beside the first input
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of a call: the output of the forward, or its error and the number of operators before it."""

    output: Any
    error: Exception | None
    operators: int
    work: int = 0
    """The multiply-adds of its products."""
    lines: int = 0
    """Its operators, views too."""
    missing: frozenset[str] = frozenset()
    """The words of the error, and the names that are None in its frames if it says that something is None."""

    @property
    def rank(self) -> tuple[bool, int]:
        """The key by which calls are compared: the largest is best."""
        return self.error is None, self.operators

    @property
    def words(self) -> str:
        """The words of the error, without the numbers of symbols for sizes that hang on values, which count on from
        call to call."""
        return _SYMBOL.sub("u", str(self.error))

    def fails_as(self, other: Tried) -> bool:
        """Return whether a call fails in the words of another one, after as many operators."""
        return self.error is not None and self.words == other.words and self.operators == other.operators


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A call of the forward: the guess for each parameter, the sizes that guesses name, and the outcome."""

    guesses: Mapping[str, Guess]
    sizes: Mapping[str, int]
    tried: Tried


class Caller:
    """A model on fake tensors, called with one guess after the other. ``known`` are guesses that the user has fixed."""

    def __init__(
        self, recorded: Recorded, sizes: Mapping[str, int], known: Mapping[str, Guess], loss: str = ""
    ) -> None:
        self.module, self.mode = recorded.module, recorded.mode
        self.sizes = {BATCH: SAMPLES, "S": LENGTH, **sizes}
        self._free = not {"S"} & sizes.keys()
        every = inspect.signature(recorded.module.forward).parameters
        kinds = {parameter.kind: name for name, parameter in every.items()}
        self._several, self._any_name = kinds.get(inspect.Parameter.VAR_POSITIONAL, ""), _VAR_KEYWORD in kinds
        self.parameters = {name: parameter for name, parameter in every.items()
                           if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, _VAR_KEYWORD)}  # fmt: skip
        self.loss_reads = names_in(loss)
        self.beside = {name: guess for name, guess in known.items()
                       if name in self.loss_reads and name not in self.parameters}  # fmt: skip
        """The known inputs that only the loss reads."""
        self.known = {name: self._placed(name, guess) for name, guess in known.items() if name not in self.beside}
        self._guesses = ReadLayers.of(recorded.module).guesses(model_numbers(recorded.module))
        self._lengths = [size for size in model_numbers(recorded.module) if _LENGTHS[-1] <= size <= _LONGEST]
        self._end = time.process_time() + _SECONDS
        self._failed: dict[Any, Tried] = {}
        """The calls that fail, which are made once: what they are given, and their outcomes."""
        self._traced = False
        """True where ``torch.compiler.is_compiling()``, as in a capture: some models make no mask of their own then."""

    def _placed(self, name: str, guess: Guess) -> Guess:
        """Return a guess with the parameter that it goes to, where its name is none of forward's."""
        named = name in self.parameters or self._any_name or not self._several
        return guess if named else replace(guess, place=self._several)

    def _entries(self, guesses: Mapping[str, Guess]) -> dict[str, list[str]]:
        """Return the guesses that are entries of a dictionary, by the parameter that takes it."""
        roots: dict[str, list[str]] = {}
        for name, guess in guesses.items():
            if "." in guess.place:
                roots.setdefault(guess.place.partition(".")[0], []).append(name)
        return roots

    def call(self, guesses: Mapping[str, Guess], sizes: Mapping[str, int], asked: Sequence[str] = ()) -> Tried:
        """Call the forward on tensors of these guesses; parameters that are ``asked`` get empty dictionaries."""
        used = {dim: sizes[dim] for guess in guesses.values() for dim in guess.dims if isinstance(dim, str)}
        key = tuple(guesses.items()), tuple(sorted(used.items())), tuple(asked), self._traced
        if (tried := self._failed.get(key)) is None:
            tried = self._call(guesses, sizes, asked)
            if tried.error is not None:
                self._failed[key] = tried
        return tried

    def _call(self, guesses: Mapping[str, Guess], sizes: Mapping[str, int], asked: Sequence[str]) -> Tried:
        counter = _Counter()
        checked = sdpa_kernel(SDPBackend.MATH)  # other kernels take fake masks of any shape
        traced = as_if_traced() if self._traced else nullcontext()
        with (self.mode, quiet(), with_experts(self.module), unstacked(self.module, parts=False), checked, traced,
              counter):  # fmt: skip
            shapes = {name: [dim if isinstance(dim, int) else sizes[dim] for dim in guess.dims]
                      for name, guess in guesses.items()}  # fmt: skip
            values: dict[str, Any] = {name: torch.zeros(shapes[name], dtype=getattr(torch, guess.dtype))
                                      for name, guess in guesses.items()}  # fmt: skip
            several = [name for name, guess in guesses.items() if guess.place == self._several != ""]
            first = [name for name, parameter in self.parameters.items() if name in values and (
                     parameter.kind is parameter.POSITIONAL_ONLY
                     or (several and parameter.kind is parameter.POSITIONAL_OR_KEYWORD))]  # fmt: skip
            positional = [values.pop(name) for name in (*first, *several)]
            for root, names in self._entries(guesses).items():
                keys = [guesses[name].place.split(".")[1:] for name in names]
                values[root] = with_entries(zip(keys, map(values.pop, names), strict=True))
            values |= {name: {} for name in asked}
            counter.count = counter.work = counter.lines = 0
            try:
                with ending_said():
                    output = self.module(*positional, **values)
            except Exception as error:
                missing = _missing(error)
                _clear_frames(error)
                return Tried(None, error, counter.count, counter.work, counter.lines, missing)
        return Tried(output, None, counter.count, counter.work, counter.lines)

    def idle(self) -> list[str]:
        """Return the known inputs that neither the forward nor the loss names."""
        return [name for name, guess in self.known.items()
                if name not in self.parameters and not guess.place and not self._any_name]  # fmt: skip

    def unknown(self, call: ForwardCall) -> list[str]:
        """Return the inputs that the loss names, but neither the call nor the user knows."""
        return [name for name in self.loss_reads if name not in {**call.guesses, **self.beside}]

    def find(self) -> ForwardCall:
        """Return the call that went furthest: with the required parameters, and, if it needs more, with optional
        ones."""
        required = [name for name, parameter in self.parameters.items() if parameter.default is parameter.empty]
        optional = [name for name, parameter in self.parameters.items() if parameter.default is None]
        main = getattr(self.module, "main_input_name", None)
        first = required or ([main] if main in optional else optional[:1])
        best = self._climb(ForwardCall({name: self.known.get(name) or self._options(name)[0]
                                        for name in [*self.known, *first]}, self.sizes,
                                       Tried(None, None, 0)))  # fmt: skip
        best = self._extended(best, required, optional)
        if best.tried.error is None:
            best = self._shorter(best) if best.tried.lines > _MANY_LINES else best
            self._traced = True
            again = replace(best, tried=self.call(best.guesses, best.sizes))
            traced = self._extended(again, required, optional)
            self._traced = traced.tried.error is None
            best = traced if self._traced else best
        return best if best.tried.error is not None else self._shorter(self._wider(best, optional))

    def _extended(self, best: ForwardCall, required: Sequence[str], optional: Sequence[str]) -> ForwardCall:
        """Return the call with as many inputs more as it needs to succeed, or the one that goes furthest."""
        while best.tried.error is not None and time.process_time() < self._end:
            told = [*self._with_entry(best), *(() if optional or required else self._with_unnamed(best))]
            more = told or self._with_one_more(best, optional)
            further = max(more, key=lambda call: call.tried.rank, default=best)
            if further is best or (not told and further.tried.rank <= best.tried.rank):
                break
            best = self._climb(further)
        return best

    def _with_entry(self, best: ForwardCall) -> Iterator[ForwardCall]:
        """Yield the call with one entry more of a parameter that is a dictionary or a tuple, which an error tells."""
        roots = self._entries(best.guesses)
        for root in roots or [name for name in best.guesses if name not in self.known]:
            guesses = {name: guess for name, guess in best.guesses.items() if name != root}
            error = best.tried.error if root in roots else self.call(guesses, best.sizes, [root]).error
            keys = [str(error.args[0])] if isinstance(error, KeyError) and error.args else []
            if (count := _UNPACKED.search(str(error))) is not None and root not in roots:
                keys = list(map(str, range(int(count[1]))))
            names = {key: key if key.isidentifier() else f"{root}{key}" for key in keys if key.isalnum() or "_" in key}
            if keys and not any(f"{root}.{key}" in {guess.place for guess in guesses.values()} for key in keys):
                new = {name: replace(self._options(name)[0], place=f"{root}.{key}") for key, name in names.items()}
                yield self._climb(replace(best, guesses={**guesses, **new}))

    def _with_unnamed(self, best: ForwardCall) -> Iterator[ForwardCall]:
        """Yield the call with one input more of a forward that names none: by the name that its error tells, or as one
        more of ``*inputs``."""
        error = best.tried.error
        named = _MISSING.search(str(error))
        names = re.findall(r"'(\w+)'", named[1]) if named else []
        names += map(str, error.args[:1]) if isinstance(error, KeyError) else ()
        new = next((name for name in names if name.isidentifier() and name not in best.guesses), "")
        if new and self._any_name:
            yield self._climb(replace(best, guesses={**best.guesses, new: self._options(new)[0]}))
        elif self._several and len(best.guesses) < _MOST_UNNAMED:
            new = f"x{len(best.guesses) + 1}" if best.guesses else "x"
            yield self._climb(replace(best, guesses={**best.guesses, new: self._options(new)[0]}))

    def _wider(self, best: ForwardCall, optional: Sequence[str]) -> ForwardCall:
        """Return a call with the optional inputs that more weights need, as the second tower of two."""
        read, trained = read_by_all(best.tried.output), sum(p.requires_grad for p in self.module.parameters())
        for name in optional:
            if len(read) >= trained or not read or time.process_time() > self._end:
                break
            if name in best.guesses or _is_target(name) or _MASK in name.lower():
                continue
            for call in self._with_input(best, name):
                if call.tried.error is None and read < (more := read_by_all(call.tried.output)):
                    best, read = call, more
                    break
        return best

    def _with_input(self, best: ForwardCall, name: str) -> Iterator[ForwardCall]:
        """Yield the calls with one input more, at other lengths too where it alone has one."""
        free = self._free and not any("S" in guess.dims for guess in best.guesses.values())
        for guess in self._options(name)[:_OTHERS_TRIED]:
            guesses = {**best.guesses, name: guess}
            for length in (best.sizes["S"], *(_LENGTHS + tuple(self._lengths)) * (free and "S" in guess.dims)):
                sizes = {**best.sizes, "S": length}
                yield ForwardCall(guesses, sizes, self.call(guesses, sizes))

    def _shorter(self, best: ForwardCall) -> ForwardCall:
        """Return a call on smaller pictures, as long as a forward has more work than a test of its numbers should have,
        and on shorter sequences, as long as its Python goes through them; it gives as many tensors."""
        results = len(list(tensors_in(best.tried.output)))
        while (large := best.tried.work > _LARGE_WORK) or best.tried.lines > _MANY_LINES:
            halved = {name: guess if name in self.known else _halved(guess) for name, guess in best.guesses.items()}
            length = max(best.sizes["S"] // 2, _LENGTHS[-1])
            sizes = {**best.sizes, "S": length} if self._free else best.sizes
            call = replace(best, guesses=halved) if large and halved != best.guesses else replace(best, sizes=sizes)
            if (call.guesses, call.sizes) == (best.guesses, best.sizes):
                return best
            tried = self.call(call.guesses, call.sizes)
            fewer = tried.lines * _FEWER <= best.tried.lines
            less = fewer or (call.sizes == best.sizes and tried.work < best.tried.work)
            if tried.error is not None or not less or len(list(tensors_in(tried.output))) != results:
                return best
            best = replace(call, tried=tried)
        return best

    def _with_one_more(self, best: ForwardCall, optional: Sequence[str]) -> Iterator[ForwardCall]:
        """Yield the calls with one more parameter, up to the first that succeeds. Targets are tried first: many models
        derive their other inputs from these. Then come those that the error tells."""
        missing = best.tried.missing
        unmoved: list[tuple[str, ForwardCall]] = []
        further = False
        for name in sorted(optional, key=lambda name: (not _is_target(name), name not in missing)):
            if name not in best.guesses and time.process_time() < self._end:
                guesses = {**best.guesses, name: self._options(name)[0]}
                more = replace(best, guesses=guesses, tried=self.call(guesses, best.sizes))
                if more.tried.fails_as(best.tried):
                    unmoved.append((name, more))
                    continue
                yield (more := self._climb(more, name))
                if more.tried.error is None:
                    return
                further = further or more.tried.rank > best.tried.rank
        for name, more in () if further else unmoved:  # they change nothing in their first form
            yield (more := self._climb(more, name))
            if more.tried.error is None:
                return

    def with_targets(self, call: ForwardCall) -> Iterator[tuple[str, ForwardCall]]:
        """Yield the calls that succeed with one more parameter, an optional one with the name of targets."""
        for name, parameter in self.parameters.items():
            if name in call.guesses or parameter.default is parameter.empty or not _is_target(name):
                continue
            for guess in self._targets(call):
                guesses = {**call.guesses, name: guess}
                if (tried := self.call(guesses, call.sizes)).error is None:
                    yield name, ForwardCall(guesses, call.sizes, tried)

    def _climb(self, start: ForwardCall, only: str = "") -> ForwardCall:
        """Return the best call by hill climbing: one guess, or the length of sequences, is changed at a time; of the
        guesses ``only`` that for one parameter, if it is named."""
        best = replace(start, tried=self.call(start.guesses, start.sizes))
        moved = True
        while moved and best.tried.error is not None:
            moved = False
            for changed in self._changes(best, only):
                if time.process_time() > self._end:
                    return best
                if not any(BATCH in guess.dims for guess in changed.guesses.values()):
                    continue
                changed = replace(changed, tried=self.call(changed.guesses, changed.sizes))
                if changed.tried.rank > best.tried.rank:
                    best, moved = changed, True
                if best.tried.error is None:
                    break
        return best

    def _changes(self, best: ForwardCall, only: str) -> Iterator[ForwardCall]:
        """Yield calls that differ in one thing: the length of sequences, first as a power of two, or one guess."""
        sized = self._free and any("S" in guess.dims for guess in best.guesses.values())
        lengths = self._lengths if sized else []
        powers = _LENGTHS if sized else ()
        for length in (length for length in powers if length != best.sizes[BATCH]):
            yield replace(best, sizes={**best.sizes, "S": length})
        for name in [only] if only else best.guesses:
            for guess in self._options(name) if len(best.guesses) == 1 or self._matters(best, name) else ():
                yield replace(best, guesses={**best.guesses, name: replace(guess, place=best.guesses[name].place)})
        for length in (*powers, *lengths):  # a length equal to B fits where a sample and a position are confused
            yield replace(best, sizes={**best.sizes, "S": length})

    def _matters(self, best: ForwardCall, name: str) -> bool:
        """Return whether a call fails elsewhere, or in other words, with a tensor of other dims for a parameter."""
        firsts = {len(guess.dims): guess for guess in reversed(self._options(name))}
        tries = [self.call({**best.guesses, name: replace(guess, place=best.guesses[name].place)}, best.sizes)
                 for guess in firsts.values()]  # fmt: skip
        return any(tried.rank != best.tried.rank or tried.words != best.tried.words for tried in tries)

    def _options(self, name: str) -> list[Guess]:
        """Return the tensors that a parameter may take, those first that the model's first layers read."""
        if name in self.known:
            return [self.known[name]]
        words = str(self.parameters[name].annotation) if name in self.parameters else ""
        whole, real = "Long" in words or "Int" in words, "Float" in words
        guesses = list(self._guesses)
        if name in self.parameters and name != next(iter(self.parameters)):  # beside pictures, not more of these
            guesses.sort(key=lambda guess: len(guess.dims) > _OF_SEQUENCES)
            guesses = guesses[:_MOST_BESIDE]
        if "Bool" in words or _MASK in name.lower():
            dims = dict.fromkeys(((BATCH, "S"), *(guess.dims for guess in guesses), ("S", "S"), (BATCH, "S", "S")))
            masks = [Guess("bool", each) for each in dims]
            guesses = masks if "Bool" in words else [Guess("int64", (BATCH, "S")), *masks, *guesses]
        if _is_target(name):  # one for each sample, before what is of the first layer's form
            guesses = [Guess("float32", (BATCH,)), Guess("int64", (BATCH,)), *guesses]
        fits = [guess for guess in guesses
                if (guess.dtype == "int64" or not whole) and (guess.dtype != "int64" or not real)]  # fmt: skip
        return [self._placed(name, guess) for guess in dict.fromkeys(fits)] or [Guess("float32", (BATCH,))]

    def _targets(self, call: ForwardCall) -> Iterator[Guess]:
        """Yield the targets that a loss may take: a class for each token or sample, or numbers of an output's shape."""
        tokens = Guess("int64", (BATCH, "S")) in call.guesses.values()
        classes = [Guess("int64", (BATCH, "S")), Guess("int64", (BATCH,))]
        yield from classes if tokens else reversed(classes)
        for _, value in tensors_in(call.tried.output):
            if value.is_floating_point() and value.dim():
                yield Guess(real_name(value), named_dims(value.shape, call.sizes))


class _Counter(TorchDispatchMode):
    """A mode that counts operators, with and without views, which differ for one product from form to form, and the
    multiply-adds of products. Questions about a tensor are no operators: fake tensors ask them the less often the more
    calls they remember."""

    count = work = lines = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = function.namespace != "prim"
        self.lines += line
        self.count += line and not (function.is_view or function is torch.ops.aten._unsafe_view.default)
        result = function(*args, **(kwargs or {}))
        if (operations := flop_registry.get(function._overloadpacket)) is not None:
            self.work += operations(*args, **(kwargs or {}), out_val=result) // 2
        return result


def _missing(error: Exception) -> frozenset[str]:
    """Return the words of an error. If it says that something is None, they are joined by the names that are None in
    the functions that it went through."""
    names = set(re.findall(r"\w+", str(error)))
    frame = error.__traceback__ if names & {"None", "NoneType"} else None
    while frame is not None:
        names |= {name for name, value in frame.tb_frame.f_locals.items() if value is None}
        frame = frame.tb_next
    return frozenset(names)


def _clear_frames(error: BaseException | None) -> None:
    """Free the tensors of the functions that an error, and those before it, went through: outcomes are kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _halved(guess: Guess) -> Guess:
    """Return a guess with pictures of half the side, and a video of half the frames."""
    pixels = [dim for dim in guess.dims[-2:] if isinstance(dim, int) and dim % 2 == 0 and dim > _FEWEST_SIDES]
    if len(guess.dims) < 4 or len(pixels) < 2:
        return guess
    frames = [dim // 2 if isinstance(dim, int) and dim % 2 == 0 and dim > 4 else dim for dim in guess.dims[1:-2]]
    return replace(guess, dims=(guess.dims[0], *frames, *(dim // 2 for dim in pixels)))


def read_by(value: torch.Tensor) -> frozenset[int]:
    """Return the identities of the parameters that get gradients from a tensor."""
    pending, seen, read = [value.grad_fn], set[Any](), {id(value)} if value.grad_fn is None else set[int]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            read.add(id(node.variable))
        pending += [after for after, _ in node.next_functions]
    return frozenset(read)


def read_by_all(output: Any) -> frozenset[int]:
    """Return the identities of the parameters that get gradients from the tensors of an output."""
    return frozenset().union(*(read_by(value) for _, value in tensors_in(output) if value.requires_grad))


def real_name(value: torch.Tensor) -> str:
    """Return the type of targets for a tensor of real numbers."""
    return "float64" if value.dtype is torch.float64 else "float32"


def names_in(loss: str) -> tuple[str, ...]:
    """Return the inputs that the text of a loss names.

    >>> names_in('"./m.py:own"(output.logits, labels, weights, scale=2) + 0.1 square(output.aux, labels)')
    ('labels', 'weights')
    """
    words = re.findall(r"(?<![\w.])[A-Za-z_]\w*(?!\w|\s*[(=])", re.sub(r'"[^"]*"', "", loss))
    return tuple(dict.fromkeys(word for word in words if word != "output"))


def _is_target(name: str) -> bool:
    return any(word in name.lower() for word in _TARGETS)
