"""Programs: typed lines in functions, their one canonical text, the operators and numbers in them, and the faults that
checks find in them."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import quote, unquote

import torch

from ..layout.collectives import COLLECTIVES
from ..layout.mesh import Mesh
from ..layout.placement import TensorType
from ..ops.own_ops import OPS
from ..ops.rules import TABLE, facts, has_rule
from .binding import KINDS, Binding, Kind

REFERENCE_FILE = "programs/model.py"
"""The captured graph's program in a build."""
LAST = "_last"
"""The end of the name of the main function that runs for the last microbatch alone."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The use of a value by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class LocalSize:
    """A size or position in an argument: ``size`` in the whole tensor, which a rank divides by its ``axes``."""

    size: int
    axes: tuple[str, ...]

    def local(self, mesh: Mesh) -> int:
        """Return the size, or the position, on one rank."""
        return self.size // math.prod(mesh.size(axis) for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Value:
    """A named, typed value, with its ``binding`` if it is a program's parameter."""

    name: str
    type: TensorType
    binding: Binding | None = None

    @property
    def kind(self) -> Kind:
        """The kind of the binding; ``value`` for a value inside a function, which has none."""
        return "value" if self.binding is None else self.binding.kind


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a line: module path, ``file:line`` of the model, and the line of the plan that touched it last."""

    module: str = ""
    source: str = ""
    plan: int = 0

    def __str__(self) -> str:
        plan = f"plan:{self.plan}" if self.plan else ""
        return " ".join(word for word in (_quoted(self.module), _quoted(self.source), plan) if word)

    @classmethod
    def parse(cls, text: str) -> Origin:
        """The inverse of ``str``.

        Raises:
            ValueError: not such a text.
        """
        match = re.fullmatch(r"(\S+) (\S+)(?: plan:([1-9][0-9]*))?", text, re.ASCII)
        if match is None:
            raise ValueError(f"`{text}` does not say where a line comes from")
        module, source = ("" if word == "-" else unquote(word) for word in match.groups()[:2])
        return cls(module, source, int(match[3] or 0))


@lru_cache(maxsize=1 << 12)
def _quoted(text: str) -> str:
    """Return a path as one word without blanks; ``-`` stands for an empty one."""
    quoted = re.sub(r"[%\s]", lambda match: quote(match[0], safe=""), text)
    return "%2D" if quoted == "-" else quoted or "-"


_Owner = TypeVar("_Owner", "Line", "Function")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def remembered(
    compute: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """Let a line or a function, the first argument, keep what is computed of it and of further arguments, which are
    hashable."""
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def look_up(owner: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        key = name, args, tuple(kwargs.items())
        if key not in owner.derived:
            owner.derived[key] = compute(owner, *args, **kwargs)
        return cast(_Result, owner.derived[key])

    return look_up


@dataclass(frozen=True)
class Line:
    """``results = op(args, kwargs)``; ``op`` is an operator such as ``aten.mm.default`` or a function's name.

    A result that the operator leaves out is None. Arguments hold global sizes, as ``LocalSize`` where ranks divide
    them."""

    results: tuple[Value | None, ...]
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    origin: Origin = Origin()
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Facts computed from the line, by what is ``remembered``."""

    @cached_property
    def calls_function(self) -> bool:
        """True where the line calls another function of its program."""
        return "." not in self.op

    @cached_property
    def made(self) -> tuple[Value, ...]:
        """The results of the line, without those that the operator leaves out."""
        return tuple(value for value in self.results if value is not None)

    @property
    def names(self) -> str:
        """The names of the results, as messages have them."""
        return ", ".join(value.name for value in self.made)

    def renamed(self, names: Mapping[str, str]) -> Line:
        """Return the line with other values in place of those that it reads, where ``names`` has them."""

        def new(name: str) -> Ref:
            return Ref(names.get(name, name))

        args = tuple(map_references(item, new) for item in self.args)
        return replace(self, args=args, kwargs=tuple((key, map_references(item, new)) for key, item in self.kwargs))

    @cached_property
    def uses(self) -> tuple[str, ...]:
        """Names of the values that the line reads, in order."""
        return tuple(references((self.args, [value for _, value in self.kwargs])))

    @remembered
    def text(self, mesh: Mesh) -> str:
        """The line as it stands in a function."""
        names = ", ".join("_" if value is None else value.name for value in self.results)
        args = self.args
        if self.op in COLLECTIVES and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], ",".join(mesh.joined(args[1].split(","))), *args[2:])
        words = [argument_text(item, mesh) for item in args]
        words += [f"{key}={argument_text(item, mesh)}" for key, item in self.kwargs]
        types = "; ".join("-" if value is None else value.type.text(mesh) for value in self.results)
        return f"    {names} = {self.op}({', '.join(words)})  # {types} | {self.origin}"


def references(item: Any) -> Iterator[str]:
    """Names of the values in an argument."""
    if isinstance(item, Ref):
        yield item.name
    elif isinstance(item, (list, tuple)):
        for inner in item:
            yield from references(inner)


def operands(lines: Sequence[Line]) -> list[str]:
    """Return the names of the values that lines read and do not make, each once, in order."""
    results = {value.name for line in lines for value in line.made}
    return [name for name in dict.fromkeys(name for line in lines for name in line.uses) if name not in results]


def needed(lines: Sequence[Line], names: Iterable[str]) -> tuple[tuple[Line, ...], set[str]]:
    """Return the lines that some values need, in order, and all values that these lines read or make. The other lines
    are dead code if nothing else is read."""
    wanted, live = set(names), list[Line]()
    for line in reversed(lines):
        if any(value.name in wanted for value in line.made):
            wanted.update(line.uses)
            live.append(line)
    return tuple(reversed(live)), wanted


def map_references(item: Any, change: Callable[[str], Any]) -> Any:
    """Return an argument with every use of a value replaced by ``change(name)``."""
    if isinstance(item, Ref):
        return change(item.name)
    if isinstance(item, (list, tuple)):
        return type(item)(map_references(inner, change) for inner in item)
    return item


@dataclass(frozen=True)
class Function:
    """A function: parameters, lines, and returns, which are pairs of a binding and a value's name."""

    name: str
    parameters: tuple[Value, ...]
    lines: tuple[Line, ...]
    returns: tuple[tuple[Binding, str], ...]
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Facts computed from the function, by what is ``remembered``."""

    def values(self) -> Mapping[str, Value]:
        """Every value of the function by its name."""
        return self._values

    @cached_property
    def _values(self) -> Mapping[str, Value]:
        results = (value for line in self.lines for value in line.made)
        return MappingProxyType({value.name: value for value in (*self.parameters, *results)})

    def at(self, line: Line) -> int:
        """The index of one of the function's lines."""
        return self._order[id(line)]

    @cached_property
    def _order(self) -> Mapping[int, int]:
        return {id(line): at for at, line in enumerate(self.lines)}

    @cached_property
    def makers(self) -> Mapping[str, Line]:
        """The line that makes each value; a parameter has none."""
        return MappingProxyType({value.name: line for line in self.lines for value in line.made})

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Line]]:
        """The lines that read each value, in order; a value that is only returned has none."""
        readers: dict[str, list[Line]] = {name: [] for name in self.values()}
        for line in self.lines:
            for name in dict.fromkeys(line.uses):
                readers.setdefault(name, []).append(line)
        return MappingProxyType(readers)

    @cached_property
    def uses(self) -> Counter[str]:
        """The number of times that each value is read or returned, in the order of the first time. Nobody changes the
        counter, which is kept."""
        read = (name for line in self.lines for name in line.uses)
        return Counter([*read, *(name for _, name in self.returns)])

    @property
    def bindings(self) -> list[Binding]:
        """The bindings of the function's parameters, in order."""
        return [value.binding for value in self.parameters if value.binding is not None]

    def bound(self, *kinds: Kind) -> dict[str, Value]:
        """Return the parameters bound to one of these kinds, by their binding's name."""
        return {v.binding.name: v for v in self.parameters if v.binding is not None and v.binding.kind in kinds}

    def returned(self, *kinds: Kind) -> dict[str, str]:
        """Return the names of the values that are returned as one of these kinds, by their binding's name."""
        return {key.name: name for key, name in self.returns if key.kind in kinds}

    def returning(self, returns: Mapping[Binding, str]) -> Function:
        """Return the function with other returns, and without the lines and parameters that these do not need."""
        lines, read = needed(self.lines, returns.values())
        parameters = tuple(value for value in self.parameters if value.name in read)
        return Function(self.name, parameters, lines, tuple(returns.items()))

    @remembered
    def text(self, mesh: Mesh, action: str) -> str:
        """Return the function as it stands in the program of an action."""
        rows = [f"def {self.name}("]
        for value in self.parameters:
            behind = f"  # {value.binding}" if value.binding is not None else ""
            rows.append(f'    {value.name}: "{value.type.text(mesh)}",{behind}')
        rows.append("):")
        rows += [line.text(mesh) for line in self.lines]
        rows.append("    return {")
        ends = [(key.key_in(action), name) for key, name in self.returns]
        rows += [f"        {json.dumps(key, ensure_ascii=not key.isprintable())}: {name}," for key, name in ends]
        return "\n".join([*rows, "    }", ""])


@dataclass(frozen=True, slots=True)
class Program:
    """The work of one role in one action. The last function is the one that runs; it may call the others. Where the
    last microbatch does more, such as reductions of gradients over ranks, a second main function, ``backward_last``,
    runs for that one instead."""

    role: str
    action: str
    mesh: Mesh
    functions: tuple[Function, ...] = field(default=())

    @property
    def main(self) -> Function:
        return self.functions[-1]

    @property
    def last(self) -> Function | None:
        """The main function that runs for the last microbatch alone, if there is one."""
        before = self.functions[-2] if len(self.functions) > 1 else None
        return before if before is not None and before.name == f"{self.main.name}{LAST}" else None

    @property
    def mains(self) -> tuple[Function, ...]:
        """The main functions: ``last``, if there is one, and ``main``."""
        return self.functions[-1:] if self.last is None else self.functions[-2:]

    def bound(self, *kinds: Kind) -> dict[str, Value]:
        """Return the parameters of main functions bound to one of these kinds, by their binding's name."""
        return {name: value for main in self.mains for name, value in main.bound(*kinds).items()}

    @property
    def blocks(self) -> tuple[Function, ...]:
        """The functions that main functions call."""
        return self.functions[: -len(self.mains)]

    def with_mains(self, *mains: Function) -> Program:
        """Return the program with other main functions."""
        return replace(self, functions=(*self.blocks, *mains))

    def function(self, name: str) -> Function:
        return next(function for function in self.functions if function.name == name)

    @property
    def operators(self) -> tuple[str, ...]:
        """The custom operators that the program uses and so names in its head."""
        used = {line.op for function in self.functions for line in function.lines if not line.calls_function}
        return tuple(sorted(op for op in used if op.partition(".")[0] not in ("aten", "parc")))

    def text(self) -> str:
        """Return the program's one canonical text."""
        head = f'"""parc program: role {self.role}, action {self.action}"""\n\nmesh({self.mesh})\n'
        if operators := self.operators:
            head += f"operators({', '.join(map(json.dumps, operators))})\n"
        return head + "".join(f"\n\n{function.text(self.mesh, self.action)}" for function in self.functions)


def argument_text(item: Any, mesh: Mesh) -> str:
    """One argument as it stands in a program."""
    if isinstance(item, Ref):
        return item.name
    if isinstance(item, LocalSize):
        return "/".join([str(item.size), *mesh.joined(item.axes)])
    if isinstance(item, torch.dtype):
        return str(item)
    if isinstance(item, list):
        return f"[{', '.join(argument_text(inner, mesh) for inner in item)}]"
    if isinstance(item, tuple):
        return f"({', '.join(argument_text(inner, mesh) for inner in item)}{',' if len(item) == 1 else ''})"
    if isinstance(item, str):
        return ast.unparse(ast.Constant(item))
    if item is None or isinstance(item, (bool, int, float)):
        return repr(item)
    raise TypeError(f"a program cannot hold {item!r}")


def operator(op: str) -> Any:
    """Return the torch operator of a name such as ``aten.mm.default``.

    Raises:
        AttributeError: there is none.
    """
    # a custom operator may go, with the library that registered it
    return _builtin_operator(op) if op.startswith(("aten.", "parc.")) else _registered_operator(op)


def _registered_operator(op: str) -> Any:
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    return getattr(getattr(OPS if namespace == "parc" else getattr(torch.ops, namespace), name), overload)


_builtin_operator = lru_cache(maxsize=None)(_registered_operator)


# Namespaces of torch's own whose operators no program may use: messages, allocations, profiling.
_FOREIGN = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "_test", "c10d", "cuda",
    "debug_mode_ops", "debugprims", "export", "fsdp", "inductor", "inductor_prims", "mkl", "mkldnn",
    "mkldnn_prepacked", "onednn", "parc", "prim", "prims", "profiler", "quantization", "quantized", "rngprims",
    "sparse", "static_runtime", "symm_mem",
})  # fmt: skip


def allowed(op: str, custom: Collection[str] = ()) -> bool:
    """Return whether a program may use an operator: a collective, one with a rule, or a functional one of aten or that
    the program declares as ``custom``; but never one that reaches outside its operands. A custom operator that nobody
    has registered is read by its name: ``is_registered`` asks for it before anything is computed."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.rpartition(".")
    if facts(op).reaches_outside:
        return False
    if op in COLLECTIVES or (has_rule(op) and namespace in ("aten", "parc")):
        return True
    eligible = namespace == "aten" or (op in custom and namespace not in _FOREIGN)
    if not eligible or not all(map(str.isidentifier, (namespace, name, overload))):
        return False
    try:
        target = operator(op)
    except AttributeError:
        return op in custom
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable


def is_registered(op: str) -> bool:
    """Return whether torch has an operator of this name."""
    try:
        return isinstance(operator(op), torch._ops.OpOverload)
    except AttributeError:
        return False


# ---- faults


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason for which a check refuses a build. ``check`` is ``shapes``, ``types``, ``communication``, ``numbers`` or
    ``facts``; ``where`` is a program, function and value."""

    check: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.message}"


# ---- numbers among the arguments of lines


@lru_cache(maxsize=1024)
def default_numbers(op: str) -> dict[str, float]:
    """Return the default values of an operator's arguments that are numbers, by argument."""
    if op in COLLECTIVES or "." not in op:
        return {}
    named = ((argument.name, argument.default_value) for argument in operator(op)._schema.arguments)
    return {name: value for name, value in named if isinstance(value, (int, float)) and not isinstance(value, bool)}


def numbers_in(item: Any) -> Iterator[float]:
    """Yield the numbers in an argument; of a size that ranks divide, the global one."""
    if isinstance(item, LocalSize):
        yield item.size
    elif isinstance(item, (dict, list, tuple)):
        for inner in item.values() if isinstance(item, dict) else item:
            yield from numbers_in(inner)
    elif isinstance(item, (int, float)) and not isinstance(item, bool):
        yield item


# ---- offload: the memory where values wait until a program reads them


CARRIERS: Mapping[str, str] = {row.carries: op for op, row in TABLE.items() if row.carries}
"""The operators that carry a value ``away`` and ``back``."""


def kept_away(binding: Binding | None, value: Value, offload: Collection[str]) -> str:
    """Return the word of the ``offload`` line that keeps a bound value away from the memory that computes, or "";
    single numbers always stay."""
    word = KINDS[binding.kind].offloaded if binding is not None and value.type.shape else ""
    return word if word in offload else ""
