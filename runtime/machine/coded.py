"""Lines as code: a stretch of a function's lines becomes one Python function, whose variables are the values.

    mm = aten.mm.default(x, w)                def stretch(__lane, __values):
    relu = aten.relu.default(mm)                  x = _values['x']
    mul = aten.mul.Tensor(relu, 2.0)              w = _values.pop('w')
                                                  mm = _0(x, w)
                                                  del w
                                                  relu = _1(mm) if mm.is_contiguous() else _2(mm)
                                                  ...
                                                  _values['mul'] = mul

The overhead of a line is mostly cache misses: two large products leave little of the interpreter's memory in the cache.
Generated code touches only a few bytes per line. A value is freed with its variable, after its last use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from keyword import iskeyword
from types import CodeType, TracebackType
from typing import Any

import torch

from ...compiler.program.program import Line, Ref, operands, operator, references
from ...compiler.torch_private import direct
from ..ranks.communication import Environment
from .registry import KernelContext
from .reuse import made_by

_INDENT = "\n    "
_KEPT_CODES = 4096
_FILE = "<lines of a program>"


@dataclass(frozen=True, slots=True)
class Added:
    """The accumulation of a line's result: where the environment has a total for the value of this ``name``,
    ``add(total, otherwise, *args)`` is called in place of the operator, which is ``otherwise(*args)``."""

    name: str
    add: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class CodedLine:
    """A line with its code: ``function`` takes the lane's context, if there are ``contexts``, and the line's arguments
    with local sizes and dtypes. ``over`` is an in-place form with its own arguments, of which it writes over the first.
    ``totalled`` are the results that are afterwards added to totals that the environment has. ``dead`` are the names
    that nobody reads after the line."""

    line: Line
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    contexts: Sequence[KernelContext] = ()
    over: tuple[Callable[..., Any], Sequence[Any]] | None = None
    added: Added | None = None
    totalled: Sequence[str] = ()
    dead: tuple[str, ...] = ()


def coded(lines: Sequence[CodedLine]) -> Callable[[Sequence[Environment]], None]:
    """Return a function that runs lines in the environment of each lane, and removes dead values from it. An error gets
    a note with its line."""
    writer = _Writer()
    source = writer.source(lines)
    names = dict(writer.bound)
    exec(_compiled(source), names)
    stretch = names.pop("stretch")  # no reference cycle with its own globals

    def run(environments: Sequence[Environment]) -> None:
        try:
            for lane, environment in enumerate(environments):
                stretch(lane, environment)
        except Exception as error:
            if (line := writer.line_at(error.__traceback__)) is not None:
                error.add_note(f"in `{line.op}`, which makes `{line.made[0].name}` | {line.origin}")
            raise

    return run


@lru_cache(maxsize=_KEPT_CODES)
def _compiled(source: str) -> CodeType:
    """Return the code of a stretch; equal blocks share it."""
    return compile(source, _FILE, "exec")


@dataclass(slots=True)
class _Writer:
    """The writer of one stretch. ``bound`` has its functions and constants, by the names that its text has for them."""

    bound: dict[str, Any] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _row_ends: list[tuple[int, Line]] = field(default_factory=list)
    """For each line the number of its last row in the text."""

    def line_at(self, where: TracebackType | None) -> Line | None:
        """Return the line that ran when an error left the text."""
        while where is not None and where.tb_frame.f_code.co_filename != _FILE:
            where = where.tb_next
        return next((line for end, line in self._row_ends if where is not None and where.tb_lineno <= end), None)

    def source(self, lines: Sequence[CodedLine]) -> str:
        """Return the text of a stretch."""
        dying, inputs = {name for each in lines for name in each.dead}, operands([each.line for each in lines])
        rows = [f"{_local(name)} = __values{f'.pop({name!r})' if name in dying else f'[{name!r}]'}" for name in inputs]
        for each in lines:
            rows += self._rows(each)
            self._row_ends.append((len(rows) + 1, each.line))
        rows += [f"__values[{name!r}] = {_local(name)}" for name in dict.fromkeys(made_by(each.line for each in lines))
                 if name not in dying]  # fmt: skip
        return f"def stretch(__lane, __values):{_INDENT}{_INDENT.join(rows)}\n"

    def _rows(self, each: CodedLine) -> Iterator[str]:
        line = each.line
        names = ["__" if value is None else _local(value.name) for value in line.results]
        one_of_list = len(names) == 1 and not each.contexts and _returns_list(line.op)
        yield from self._call(each, f"({names[0]},)" if one_of_list else ", ".join(names))
        gone = [_local(name) for name in each.dead] + ["__"] * ("__" in names)
        if gone:
            yield f"del {', '.join(gone)}"

    def _call(self, each: CodedLine, result: str) -> Iterator[str]:
        function, arguments = self._name(direct(each.function)), [*map(self._text, each.args)]
        named = self._named(each.kwargs)
        context = [f"{self._name(each.contexts)}[__lane]"] if each.contexts else []
        call = f"{function}({', '.join([*context, *arguments, *named])})"
        if each.over is not None:
            over, args = each.over
            call = (
                f"{self._name(direct(over))}({', '.join([*map(self._text, args), *named])})"
                f" if {self._text(args[0])}.is_contiguous() else {call}"
            )
        if each.added is None:
            yield f"{result} = {call}"
            for name in each.totalled:
                local, total = _local(name), f"__values.pop({f'total of {name}'!r})"
                yield f"{local} = {total}.add_({local}) if {f'total of {name}'!r} in __values else {local}"
            return
        otherwise = f"{self._name(partial)}({function}, {context[0]})" if context else function
        add = f"{self._name(each.added.add)}({', '.join(['__total', otherwise, *arguments, *named])})"
        yield f"__total = __values.pop({f'total of {each.added.name}'!r}, None)"
        yield f"{result} = {call} if __total is None else {add}"
        yield "del __total"

    def _named(self, kwargs: Mapping[str, Any]) -> list[str]:
        return [
            f"**{{{key!r}: {self._text(item)}}}" if iskeyword(key) else f"{key}={self._text(item)}"
            for key, item in kwargs.items()
        ]

    def _text(self, item: Any) -> str:
        """Return the text of an argument."""
        if isinstance(item, Ref):
            return _local(item.name)
        if item is None or isinstance(item, (bool, int, str)) or (isinstance(item, float) and math.isfinite(item)):
            return repr(item)
        if isinstance(item, (list, tuple)) and any(references(item)):
            inner = "".join(f"{self._text(one)}, " for one in item)
            return f"[{inner}]" if isinstance(item, list) else f"({inner})"
        return self._name(item)

    def _name(self, item: Any) -> str:
        """Return the name by which the text knows an object."""
        if id(item) not in self._names:
            self._names[id(item)] = f"__{len(self._names)}"
            self.bound[self._names[id(item)]] = item  # which keeps it, and so its number
        return self._names[id(item)]


def _local(name: str) -> str:
    """Return the variable of a value. Names that begin with ``__`` are the text's own; ``v__x`` may be a value, too."""
    return f"v{name}" if name.lstrip("v").startswith("__") else name


@cache
def _returns_list(op: str) -> bool:
    """Return whether an operator of torch returns a list, also where it has one entry."""
    return isinstance(operator(op)._schema.returns[0].type, torch.ListType)
