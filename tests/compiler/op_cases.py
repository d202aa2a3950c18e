"""Strategies that draw valid calls of every operator of the table, family by family."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from parc.compiler.ops.rules import pointwise

from .sharded_ops import Case

Maker = Callable[["Draw"], tuple[Any, ...]]
"""A function that draws the args of a case, with the kwargs as a dict at the end if there are any."""

SIZES = (6, 4, 12, 6, 2, 3, 1)


class Draw:
    """A source of shapes, choices and values, of which a number decides all: 0 makes the first of every choice.

    Hypothesis would take most of the time where hundreds of rows draw a few calls each.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options) if self.seed else options[0]

    def order(self, count: int) -> list[int]:
        """Draw an order of so many dims."""
        return self.random.sample(range(count), count) if self.seed else list(range(count))

    def flag(self) -> bool:
        return bool(self.pick(False, True))

    def size(self) -> int:
        return int(self.pick(*SIZES))

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.pick(*range(low, high + 1))))

    def dim(self, rank: int) -> int:
        return int(self.pick(*range(-rank, rank)))

    def dims(self, rank: int) -> list[int]:
        first = self.dim(rank)
        return [first] if rank == 1 or self.flag() else [first, (first + 1) % rank]

    def f(self, *shape: int) -> torch.Tensor:
        """Return floats in (0.1, 0.9), where nearly every function is defined."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) * 0.8 + 0.1

    def n(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def x(self, low: int = 1) -> torch.Tensor:
        """Return floats of a drawn shape of at least `low` dims."""
        return self.n(*self.shape(low))

    def i(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def b(self, *shape: int) -> torch.Tensor:
        return self.i(2, *shape).bool()

    def narrowed(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Draw a shape that broadcasts to `shape`."""
        kept = tuple(shape[self.pick(*range(len(shape) + 1)) :]) if self.flag() else tuple(shape)
        return tuple(1 if self.pick(False, False, True) else size for size in kept)

    def regrouped(self, total: int) -> list[int]:
        """Draw a shape of so many elements."""
        shape: list[int] = []
        while total > 1 and len(shape) < 3:
            size = self.pick(*(d for d in range(1, total + 1) if total % d == 0))
            shape.append(size)
            total //= size
        return [*shape, total]


# ---- pointwise: arguments follow from the operator's schema

_INTEGERS = ("bitwise", "__")


def _pointwise_argument(g: Draw, op: str, argument: Any, shape: tuple[int, ...], first: bool) -> Any:
    kind, name = str(argument.type).replace("Optional[", "").rstrip("]"), argument.name
    integer = op.startswith(_INTEGERS)
    if kind == "Tensor":
        if name == "other" and op in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor") and g.pick(1, 2, 3) == 1:
            return 0.5 if op == "div.Tensor" else g.pick(0.0, 0.5)
        if op.startswith("masked_fill") and name == "value":
            return g.f()
        exact = "_backward" in op or first or op == "native_dropout.default"
        shape = shape if exact else g.narrowed(shape)
        if name in ("mask", "condition"):
            return g.b(*shape)
        return g.i(5, *shape) if integer else g.f(*shape) + (1 if op.startswith("acosh") else 0)
    if kind == "int":
        return 1
    if kind == "bool":
        return g.flag() if op != "native_dropout.default" else True
    if kind == "str":
        return g.pick("floor", "trunc") if "mode" in name else g.pick("none", "tanh")
    return 2 if integer else 0.0 if name == "p" else g.pick(0.0, 0.5) if op.startswith(("where", "masked")) else 0.5


def pointwise_case(op: str) -> Maker:
    def make(g: Draw) -> tuple[Any, ...]:
        namespace, packet, overload = op.split(".")
        schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
        shape, args, kwargs, seen = g.shape(), [], {}, False
        for argument in schema.arguments:
            optional = argument.has_default_value() and not packet.startswith(("cl", "gelu"))
            if optional:
                continue
            value = _pointwise_argument(g, f"{packet}.{overload}", argument, shape, not seen)
            seen = seen or isinstance(value, torch.Tensor)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return (*args, kwargs)

    return make


def _cast(g: Draw) -> tuple[Any, ...]:
    return g.f(*g.shape()), {"dtype": g.pick(torch.float64, torch.float32, torch.int64, torch.bool)}


POINTWISE: dict[str, Maker] = {
    **{op: pointwise_case(op) for op, row in pointwise.POINTWISE_RULES.items() if row.rule is not None},
    "aten._to_copy.default": _cast,
    "aten.to.dtype": lambda g: (g.f(*g.shape()), g.pick(torch.float64, torch.float32, torch.int64)),
    "aten.type_as.default": lambda g: (g.f(*g.shape()), g.f(*g.shape())),
}


# ---- reductions and scans


def along(*between: Any, high: int = 1, values: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> Maker:
    """Return the maker of `(x, *between, dim)`."""

    def make(g: Draw) -> tuple[Any, ...]:
        x = values(g.x())
        return (x, *between, g.dim(x.dim()))

    return make


def reduced(*between: Any, several: bool = True, keeps: bool = True) -> Maker:
    """Return the maker of `(x, *between, dim or dims, keepdim)`."""

    def make(g: Draw) -> tuple[Any, ...]:
        x = g.x()
        dim = g.dims(x.dim()) if several else g.dim(x.dim())
        return (x, *between, dim, *([g.flag()] if keeps else []))

    return make


def _spread(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    return x, g.dims(x.dim()), {"correction": 0, "keepdim": g.flag()}


def _picked_count(g: Draw) -> tuple[Any, ...]:
    x = g.x()
    dim = g.dim(x.dim())
    return x, g.pick(1, x.shape[dim]), dim


def _of_bools(make: Maker) -> Maker:
    def made(g: Draw) -> tuple[Any, ...]:
        x, *rest = make(g)
        return (x > 0, *rest)

    return made


def named(names: str, make: Maker) -> dict[str, Maker]:
    """Return the same maker for each of the names, written as in the operator tables."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": make for name in names.split()}


REDUCTIONS: dict[str, Maker] = {
    **named("count_nonzero", lambda g: (lambda x: (x > 0, g.dim(x.dim())))(g.x())),
    **named("sum mean", lambda g: (g.n(*g.shape()),)),
    **named("sum.dim_IntList mean.dim amax amin nansum logsumexp", reduced()),
    **named("any.dims all.dims", _of_bools(reduced())),
    **named("any.dim all.dim", _of_bools(reduced(several=False))),
    **named("max.dim min.dim median.dim mode argmax argmin prod.dim_int", reduced(several=False)),
    **named("count_nonzero.dim_IntList", _of_bools(reduced(keeps=False))),
    **named("var.correction var_mean.correction std.correction std_mean.correction", _spread),
    **named("var.dim var_mean.dim std.dim", lambda g: (lambda x: (x, g.dims(x.dim()), False, g.flag()))(g.x())),
    **named("linalg_vector_norm norm.ScalarOpt_dim", reduced(2)),
    **named("kthvalue", _picked_count),
    **named("histc", lambda g: (g.n(*g.shape(1)), 5, *g.pick((-1.0, 1.0), (0, 0)))),
    **named("softmax.int log_softmax.int _safe_softmax", along()),
    **named("_softmax _log_softmax", lambda g: (*along()(g), False)),
    **named(
        "_softmax_backward_data _log_softmax_backward_data",
        lambda g: (lambda s: (g.n(*s), g.f(*s), g.dim(len(s)), torch.float64))(g.shape(1)),
    ),
}


def _diff(g: Draw) -> tuple[Any, ...]:
    shape = g.shape(1)
    dim = g.dim(len(shape))
    before = (g.n(*shape),) if g.flag() else ()
    return (g.n(*shape), 1, dim, *before)


SORTING: dict[str, Maker] = {
    **named("cumsum cumprod logcumsumexp cummax cummin sort argsort", along()),
    **named("sort.stable argsort.stable", lambda g: (lambda x: (x, {"stable": True, "dim": g.dim(x.dim())}))(g.x())),
    **named("topk", _picked_count),
    **named("diff", _diff),
}


def case_of(op: str, made: tuple[Any, ...]) -> Case:
    """Return the case of a maker's args."""
    if made and isinstance(made[-1], dict):
        return Case(op, made[:-1], made[-1])
    return Case(op, made, {})
