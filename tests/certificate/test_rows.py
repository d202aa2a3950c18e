"""Every row beside torch: the meaning of a line on random numbers, for any pieces of ranks, and its gradients."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from certificate import programs, rows
from certificate.letters import Read
from certificate.meaning import Table, Value
from certificate.nodes import Node
from certificate.programs import Reader
from certificate.text import Atom, Line, Mesh, Name, Refused, Type, Word

T = torch.Tensor
MESH = Mesh((("tp", 2), ("dp", 2)), ())
CONSTANTS = {"torch.float64": torch.float64, "torch.int64": torch.int64, "torch.bool": torch.bool}


# ---- numbers of nodes


def _grid(sizes: Sequence[int]) -> list[T]:
    """Return the number of each letter, as arrays that broadcast to all of them."""
    return [
        torch.arange(n).reshape([-1 if at == dim else 1 for dim in range(len(sizes))]) for at, n in enumerate(sizes)
    ]


def _window(k: T, y: T, args: Any) -> T:
    stride, low, dilation = args
    return y * stride - low + k * dilation


def _average(p: T, y: T, sizes: Sequence[int], args: Any) -> T:
    (kernel, stride, padding, _, include), size = args, sizes[0]
    start = y * stride - padding
    end = torch.clamp(start + kernel, max=size + padding)
    inside = (p >= start) & (p < end)
    count = end - start if include else torch.clamp(end, max=size) - torch.clamp(start, min=0)
    return inside.double() / count


def _sampled(name: str, node: Node) -> T:
    """Return how much of each entry is in each of an image of another size, by torch's own operator on unit vectors."""
    size, out = node.sizes
    args: Any = node.args
    *facts, scale = args
    image = torch.eye(size, dtype=torch.float64).reshape(size, 1, size, 1)
    operator = getattr(torch.ops.aten, name.removeprefix("aten.")).default
    scale = None if scale is None else float(scale)
    return operator(image, [out, 1], *facts, scale, None).reshape(size, out)


SLOPE: dict[str, Callable[..., T]] = {"silu": torch.nn.functional.silu, "gelu": lambda x,
     a: torch.nn.functional.gelu(x, approximate=a),
    "softplus": lambda x, b, t: torch.nn.functional.softplus(x, float(b), float(t)),
         "hardsigmoid": torch.nn.functional.hardsigmoid,
    "hardswish": torch.nn.functional.hardswish}  # fmt: skip


def _any(args: Any) -> Any:
    return args


def _slope(name: str, x: Any, *others: Any) -> T:
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(SLOPE[name](x, *others).sum(), x)
    return slope


def _scalar(value: Any) -> float:
    return value.flatten()[0].item() if isinstance(value, T) else value


FUNCTIONS: dict[str, Callable[..., T]] = {
    **{name: getattr(torch, name) for name in ("ne", "eq", "lt", "le", "gt", "ge", "exp", "log", "sqrt", "rsqrt",
         "sin", "cos",
       "acos", "erf", "tanh", "sigmoid", "relu", "abs", "sign", "floor", "maximum", "minimum", "remainder")},
    "silu": torch.nn.functional.silu, "gelu": SLOPE["gelu"], "softplus": SLOPE["softplus"], "inverse": lambda x: 1 / x,
    "hardsigmoid": torch.nn.functional.hardsigmoid, "hardswish": torch.nn.functional.hardswish, "power": torch.pow,
    "above": lambda x, y: x > y, "pow": lambda x, e: x ** float(e),
    "quotient": lambda x, y, mode: torch.div(x, y, rounding_mode=mode),
    "clamp": lambda x, low, high: torch.clamp(x, None if low is None else _scalar(low),
         None if high is None else _scalar(high)),
    "whole": lambda x, dtype: x.to(CONSTANTS[dtype]),
}  # fmt: skip


class Numbers:
    """The numbers of a table's nodes, from those of the tensors that are read from outside."""

    def __init__(self, table: Table, given: dict[str, T]) -> None:
        self.table, self.given = table, given
        self.known: dict[int, T] = {}

    def read(self, read: Read, letters: dict[Any, T]) -> T:
        """Return a read for all numbers of its letters."""
        node = self.table.nodes[read.node]
        index = [
            offset + sum((stride * letters[key] for key, stride in terms), torch.tensor(0))
            for offset, terms in read.maps
        ]
        factor = float(read.coefficient)
        if node.op == "delta":
            return factor * (index[0] == index[1]).double()
        if node.op == "count":
            return factor * index[0].double()
        if node.op == "not after":
            return factor * (index[1] <= index[0]).double()
        if node.op.startswith("window "):
            return factor * (index[0] == _window(index[1], index[2], node.args)).double()
        if node.op == "average":
            return factor * _average(index[0], index[1], node.sizes, node.args)
        value = self.node(read.node)
        return factor * (value[tuple(index)] if index else value)

    def node(self, at: int) -> T:
        if at not in self.known:
            self.known[at] = self.computed(self.table.nodes[at]).double()
        return self.known[at]

    def computed(self, node: Node) -> T:
        if node.op == "one":
            return torch.tensor(1.0)
        if node.op == "infinity":
            return torch.tensor(math.inf)
        if node.op in self.given:
            return self.given[node.op]
        if node.op.startswith("aten.upsample"):
            return _sampled(node.op, node)
        sizes, args = (*node.sizes, *node.inner), _any(node.args)
        letters = dict(enumerate(_grid(sizes)))
        reads = [self.read(r, letters).expand(sizes) for r in node.reads]
        entries, inner = len(node.sizes), list(range(len(node.sizes), len(sizes)))
        if node.op == "sum":
            return sum(reads[1:], reads[0])
        if node.op == "product":
            total = math.prod(reads[1:], start=reads[0])
            return total.sum(inner) if inner else total
        if node.op == "largest":
            return reads[0].amax(inner)
        if node.op == "squares":
            return (reads[0] ** 2).sum(inner)
        if node.op == "mean of norm":
            return reads[0].mean(inner)
        if node.op == "inverse deviation of norm":
            return (reads[0].var(inner, correction=0) + float(args[0])).rsqrt()
        if node.op in ("largest at", "order", "largest of all at", "largest of windows at"):
            return self.found(node, reads[0].flatten(entries))
        if node.op in ("pow", "whole"):
            return FUNCTIONS[node.op](reads[0], node.args)
        words, values = dict(args), list(reads)
        items = [words[at] if at in words else values.pop(0) for at in range(len(words) + len(values))]
        if node.op.startswith("slope_of_"):
            return _slope(
                node.op.removeprefix("slope_of_"), *(_scalar(item) if at else item for at, item in enumerate(items))
            )
        if node.op == "softplus":
            items[1:] = map(_scalar, items[1:])
        return FUNCTIONS[node.op](*items)

    def found(self, node: Node, along: T) -> T:
        """Return which entries an operator finds along the letters that it looks along: its own loops are the first."""
        facts = _any(node.args)[0]
        own = [
            at
            for at in range(len(node.sizes))
            if not any(at == key for r in node.reads for _, terms in r.maps for key, _ in terms)
        ]
        base = along[tuple(0 if at in own else slice(None) for at in range(along.dim()))]
        if node.op == "largest of windows at":
            kernel, stride, padding, dilation, ceil = facts
            image = base.reshape(-1, 1, *node.inner)
            result = torch.ops.aten.max_pool2d_with_indices.default(image, kernel, stride, padding, dilation, ceil)[1]
            result = result.reshape(*base.shape[:-1], *result.shape[-2:])
        elif node.op == "largest at":
            result = base.topk(facts[0], -1, facts[1], facts[2])[1]
        else:
            result = base.argsort(-1, facts) if node.op == "order" else base.argmax(-1, True)
        sizes = [node.sizes[at] for at in own]
        result = result.reshape(*base.shape[:-1], *sizes)
        return result.movedim(list(range(-len(sizes), 0)), own) if own else result.reshape(node.sizes)

    def value(self, value: Value, ranks: dict[str, int]) -> T:
        """Return a value on one rank."""
        sizes = [size for dim in value.dims for size in dim]
        letters: dict[Any, T] = dict(enumerate(_grid(sizes)))
        letters |= {axis: torch.tensor(at) for axis, at in ranks.items()}
        return self.read(Read(value.coefficient, value.node, value.maps), letters).expand(sizes).reshape(value.shape)


# ---- lines


def _operator(op: str) -> Any:
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}


def _type(tensor: T, splits: dict[int, str]) -> Type:
    dims = (
        ((Atom(2, splits[at]), Atom(size // 2, "")),) if at in splits else ((Atom(size, ""),),)
        for at, size in enumerate(tensor.shape)
    )
    return Type(DTYPES[tensor.dtype], tuple(dims), ())


def _piece(tensor: T, splits: dict[int, str], ranks: dict[str, int]) -> T:
    for dim, axis in splits.items():
        tensor = tensor.chunk(2, dim)[ranks[axis]]
    return tensor


class Case:
    """A line with tensors for its operands, split in some way."""

    def __init__(self, op: str, args: Sequence[Any], kwargs: dict[str, Any], splits: dict[int, dict[int, str]]) -> None:
        self.op, self.splits = op, splits
        self.tensors: list[T] = []
        self.table = Table(dict(MESH.sizes))
        self.reader = Reader(self.table, MESH)
        self.args, self.kwargs = [self.named(item) for item in args], kwargs
        self.given = {f"leaf {at}": tensor.double() for at, tensor in enumerate(self.tensors)}
        self.types = {f"t{at}": _type(tensor, splits.get(at, {})) for at, tensor in enumerate(self.tensors)}
        self.values = {
            name: self.reader.tensors.piece(self.table.leaf(f"leaf {at}", self.tensors[at].shape), type_)
            for at, (name, type_) in enumerate(self.types.items())
        }

    def named(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self.named(each) for each in item]
        if not isinstance(item, T):
            return item
        self.tensors.append(item)
        return Name(f"t{len(self.tensors) - 1}")

    def torch_args(self, item: Any, ranks: dict[str, int], given: Sequence[T]) -> Any:
        if isinstance(item, list):
            return [self.torch_args(each, ranks, given) for each in item]
        if isinstance(item, Name):
            at = int(item.name[1:])
            return _piece(given[at], self.splits.get(at, {}), ranks)
        return CONSTANTS[item.text] if isinstance(item, Word) else item

    def torch(self, ranks: dict[str, int], given: Sequence[T]) -> tuple[T, ...]:
        kwargs = {key: self.torch_args(item, ranks, given) for key, item in self.kwargs.items()}
        result = _operator(self.op)(*self.torch_args(self.args, ranks, given), **kwargs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def line(self, expected: Sequence[T]) -> Line:
        names = tuple(f"r{at}" for at in range(len(expected)))
        types = tuple(_type(part, {}) if part is not None else Type("", (), ()) for part in expected)
        return Line(names, types, self.op, tuple(self.args), self.kwargs, "-", 1)


def _close(have: T, expected: T) -> None:
    torch.testing.assert_close(have, expected.double(), rtol=1e-9, atol=1e-9)


def _check(
    op: str, args: Sequence[Any], kwargs: dict[str, Any], splits: dict[int, dict[int, str]], backward: bool
) -> bool:
    """Compare a row with torch on every rank; return False where torch takes no such pieces."""
    case = Case(op, args, kwargs, splits)
    axes = sorted({axis for row in splits.values() for axis in row.values()})
    for coordinates in itertools.product(range(2), repeat=len(axes)):
        ranks = {"tp": 0, "dp": 0, **dict(zip(axes, coordinates, strict=True))}
        try:
            expected = case.torch(ranks, case.tensors)
        except (RuntimeError, IndexError):
            return False
        try:
            call, results = case.reader.line(case.line(expected), case.values, case.types)
        except Refused:
            assert splits  # what torch makes of such pieces, the checker need not know
            return False
        numbers = Numbers(case.table, case.given)
        for have, want in zip(results, expected, strict=True):
            if want is not None:
                _close(numbers.value(have, ranks), want)
        if backward:
            _check_gradients(case, call, results, expected, ranks)
    return True


def _check_gradients(
    case: Case, call: Any, results: Sequence[Value], expected: Sequence[T], ranks: dict[str, int]
) -> None:
    """Compare the gradients that a derivative gives on a rank with autograd's."""
    leaves = [tensor.clone().requires_grad_(tensor.dtype == torch.float64) for tensor in case.tensors]
    outputs = [part for part in case.torch(ranks, leaves) if part.requires_grad]
    if not outputs:
        return
    grads = [torch.randn_like(part) for part in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    autograd = iter(torch.autograd.grad(outputs, wanted, grads))
    t, given, left = case.reader.tensors, dict(case.given), iter(grads)
    call.results, call.grads = results, []
    for at, part in enumerate(expected):
        if part.dtype == torch.float64:
            given[f"grad {at}"] = next(left)
            call.grads.append(t.leaf(f"grad {at}", part.shape))
        else:
            call.grads.append(None)
    parts = rows.SLOPES[case.op](call, call.grads[0], results[0])
    numbers = Numbers(case.table, given)
    names = programs.names_in(case.args)
    for name, gradient in zip(names, parts, strict=True):
        at = int(name[1:])
        if leaves[at].requires_grad:
            whole = next(autograd)
            have = (
                torch.zeros_like(_piece(whole, case.splits.get(at, {}), ranks))
                if gradient is None
                else numbers.value(gradient, ranks)
            )
            _close(have, _piece(whole, case.splits.get(at, {}), ranks))


def real(*shape: int) -> T:
    return torch.randn(shape, dtype=torch.float64)


def above(*shape: int) -> T:
    """Return numbers between 0.1 and 0.9."""
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64)


def whole(most: int, *shape: int) -> T:
    return torch.randint(0, most, shape)


def flag(*shape: int) -> T:
    return torch.rand(shape) < 0.5


F64 = Word("torch.float64")
_ONE = ("exp", "neg", "square", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "relu", "erf", "abs", "softplus",
        "hardtanh", "hardsigmoid", "hardswish", "alias", "clone", "floor", "sign", "sgn")  # fmt: skip
_POSITIVE = "log", "sqrt", "rsqrt", "reciprocal", "acos"
_COMPARE = "ne", "eq", "lt", "le", "gt", "ge"

CASES: list[tuple[str, Callable[[], list[Any]], dict[str, Any]]] = [
    *((f"aten.{name}.default", lambda: [real(4, 6)], {}) for name in _ONE),
    *((f"aten.{name}.default", lambda: [above(4, 6)], {}) for name in _POSITIVE),
    *((f"aten.{name}.Scalar", lambda: [whole(3, 4, 6), 1], {}) for name in _COMPARE),
    *((f"aten.{name}.Tensor", lambda: [whole(3, 4, 6), whole(3, 6)], {}) for name in _COMPARE),
    *((f"aten.{name}.Tensor", lambda: [real(4, 6), above(6)], {}) for name in ("add", "sub", "mul", "div", "rsub")),
    *((f"aten.{name}.Tensor", lambda: [real(4, 1, 2), real(6, 1)], {"alpha": 3}) for name in ("add", "sub", "rsub")),
    *((f"aten.{name}.Scalar", lambda: [real(4, 6), 0.3], {}) for name in ("add", "sub", "mul", "div", "rsub")),
    ("aten.add.Tensor", lambda: [flag(4), whole(5, 4)], {}),
    ("aten.mul.Tensor", lambda: [flag(4, 2), flag(2)], {}),
    ("aten.div.Tensor_mode", lambda: [real(4, 6), 2], {"rounding_mode": "floor"}),
    ("aten.remainder.Scalar", lambda: [whole(99, 4, 6), 8], {}),
    ("aten.addcmul.default", lambda: [real(4, 6), real(6), real(4, 1)], {"value": 0.5}),
    *(("aten.pow.Tensor_Scalar", lambda e=e: [above(4, 6), e], {}) for e in (2, 3, -1, 0.5, 1.7, 0)),
    ("aten.pow.Scalar", lambda: [3, real(4, 6)], {}),
    ("aten.pow.Tensor_Tensor", lambda: [above(4, 6), real(6)], {}),
    ("aten.gelu.default", lambda: [real(4, 6)], {"approximate": "tanh"}),
    ("aten.tanh_backward.default", lambda: [real(4, 6), above(4, 6)], {}),
    ("aten.sigmoid_backward.default", lambda: [real(4, 6), above(4, 6)], {}),
    ("aten.silu_backward.default", lambda: [real(4, 6), real(4, 6)], {}),
    ("aten.gelu_backward.default", lambda: [real(4, 6), real(4, 6)], {}),
    ("aten.gelu_backward.default", lambda: [real(4, 6), real(4, 6)], {"approximate": "tanh"}),
    ("aten.softplus_backward.default", lambda: [real(4, 6), real(4, 6), 2, 1], {}),
    ("aten.softplus.default", lambda: [real(4, 6), 2, 1], {}),
    ("aten.hardtanh.default", lambda: [real(4, 6), -0.5, 0.2], {}),
    ("aten.hardtanh_backward.default", lambda: [real(4, 6), real(4, 6), -0.5, 0.2], {}),
    ("aten.hardsigmoid_backward.default", lambda: [real(4, 6), real(4, 6) * 4], {}),
    ("aten.hardswish_backward.default", lambda: [real(4, 6), real(4, 6) * 4], {}),
    ("aten.threshold_backward.default", lambda: [real(4, 6), real(4, 6), 0.1], {}),
    ("aten.clamp.default", lambda: [real(4, 6), -0.3, 0.4], {}),
    ("aten.clamp.default", lambda: [real(4, 6), None, 0.4], {}),
    ("aten.clamp.default", lambda: [real(4, 6), 0.4], {}),
    ("aten.clamp_min.default", lambda: [real(4, 6), 0.1], {}),
    ("aten.clamp_max.default", lambda: [real(4, 6), 0.1], {}),
    *((f"aten.{name}", lambda: [real(4, 6), real(6)], {}) for name in ("maximum.default", "minimum.default",
         "max.other", "min.other")),
    ("aten.maximum.default", lambda: [whole(3, 4).double(), whole(3, 4).double()], {}),
    *((f"aten.{name}", lambda: [flag(4, 6), flag(6)], {}) for name in ("__and__.Tensor", "bitwise_and.Tensor",
         "__or__.Tensor",
       "bitwise_or.Tensor", "logical_and.default", "logical_or.default")),
    ("aten.logical_and.default", lambda: [whole(2, 4, 6), whole(3, 6)], {}),
    ("aten.logical_or.default", lambda: [whole(2, 4, 6), whole(3, 6)], {}),
    ("aten.logical_not.default", lambda: [whole(3, 4, 6)], {}),
    ("aten.bitwise_not.default", lambda: [flag(4, 6)], {}),
    ("aten.where.self", lambda: [flag(4, 6), real(6), real(4, 1)], {}),
    ("aten.where.ScalarOther", lambda: [flag(4, 6), real(6), 2.5], {}),
    ("aten.where.ScalarSelf", lambda: [flag(4, 6), 2.5, real(6)], {}),
    ("aten.where.Scalar", lambda: [flag(4, 6), 2.5, -1.0], {}),
    ("aten.masked_fill.Scalar", lambda: [real(4, 6), flag(6), -7], {}),
    ("aten.sum.default", lambda: [real(4, 6)], {}),
    ("aten.sum.default", lambda: [flag(4, 6)], {}),
    ("aten.mean.default", lambda: [real(4, 6)], {}),
    *((f"aten.{name}", lambda dims=dims, keep=keep: [real(4, 2, 6), dims, keep], {})
      for name in ("sum.dim_IntList", "mean.dim") for dims in ([1], [-1, 0], []) for keep in (False, True)),
    ("aten.linalg_vector_norm.default", lambda: [real(4, 2, 6), 2, [-1, 0], True], {}),
    ("aten.linalg_vector_norm.default", lambda: [real(4, 6)], {}),
    *((f"aten.{name}", lambda: [real(4, 6, 2), 1], {}) for name in ("softmax.int", "log_softmax.int")),
    ("aten.logsumexp.default", lambda: [real(4, 6, 2), [1]], {}),
    ("aten.logsumexp.default", lambda: [real(4, 6, 2), [0, 2], True], {}),
    *((f"aten.{name}.default", lambda: [real(4, 6), -1, False], {}) for name in ("_softmax", "_log_softmax")),
    *((f"aten.{name}.default", lambda: [real(4, 6), above(4, 6), -1, F64], {}) for name in ("_softmax_backward_data",
         "_log_softmax_backward_data")),
    ("aten.mm.default", lambda: [real(4, 6), real(6, 8)], {}),
    ("aten.bmm.default", lambda: [real(2, 4, 6), real(2, 6, 8)], {}),
    ("aten.outer.default", lambda: [real(4), real(6)], {}),
    ("aten.addmm.default", lambda: [real(8), real(4, 6), real(6, 8)], {"beta": 2, "alpha": 0.5}),
    ("aten.baddbmm.default", lambda: [real(2, 1, 8), real(2, 4, 6), real(2, 6, 8)], {"beta": 2, "alpha": 0.5}),
    *(("aten.matmul.default", lambda a=a, b=b: [real(*a), real(*b)], {})
      for a, b in (((4,), (4,)), ((2, 4), (4,)), ((4,), (4, 6)), ((2, 1, 4, 6), (8, 6, 2)), ((2, 4, 6), (6, 8)), ((2,
           4, 6), (6,)))),
    ("aten.linear.default", lambda: [real(2, 4, 6), real(8, 6), real(8)], {}),
    ("aten.linear.default", lambda: [real(4, 6), real(8, 6)], {}),
    *(("aten.einsum.default", lambda equation=equation, shapes=shapes: [equation,
         [real(*shape) for shape in shapes]], {})
      for equation, shapes in (("nhwpqc->nchpwq", [(2, 4, 2, 2, 4, 2)]), ("bhlk,bhtk->bhlt", [(2, 2, 4, 6), (2, 2, 8,
           6)]),
        ("...qhd,...khd->...hqk", [(2, 1, 4, 2, 6), (2, 2, 8, 2, 6)]), ("bi,j->bij", [(2, 4), (6,)]), ("ij,jk,k->i",
             [(2, 4), (4, 6), (6,)]),
        ("ij->j", [(2, 4)]), ("ij,kj->k", [(2, 4), (6, 4)]))),
    ("aten.conv1d.default", lambda: [real(2, 4, 9), real(6, 4, 3), real(6), [2], [1]], {}),
    ("aten.conv1d.default", lambda: [real(2, 4, 8), real(4, 1, 3), None, [1], [2], [2], 4], {}),
    ("aten.conv2d.default", lambda: [real(2, 4, 6, 5), real(4, 2, 3, 2), None, [2, 1], [1, 0], [1, 2], 2], {}),
    ("aten.conv2d.padding", lambda: [real(2, 4, 6, 5), real(4, 4, 3, 2), real(4), [1, 1], "same"], {}),
    ("aten.conv2d.padding", lambda: [real(2, 2, 8, 8), real(4, 2, 4, 4), None, [4, 4]], {}),
    ("aten.convolution.default", lambda: [real(2, 4, 6, 5), real(6, 4, 3, 3), real(6), [1, 1], [1, 1], [1, 1], False,
         [0, 0], 1], {}),
    ("aten.convolution_backward.default", lambda: [real(2, 6, 6, 5), real(2, 4, 6, 5), real(6, 4, 3, 3), [6], [1, 1],
         [1, 1], [1, 1],
                                                   False, [0, 0], 1, [True, True, True]], {}),
    *(("aten.avg_pool2d.default", lambda facts=facts: [real(2, 4, 5, 6), *facts], {})
      for facts in (([2, 2],), ([3, 3], [1, 1], [1, 1], False, False), ([2, 1], [2, 1], [0, 0], True), ([3, 3], [2,
           2], [1, 1], True, True))),
    ("aten.avg_pool2d_backward.default", lambda: [real(2, 4, 5, 6), real(2, 4, 5, 6), [3, 3], [1, 1], [1, 1], False,
         False, None], {}),
    ("aten.upsample_nearest2d.default", lambda: [real(2, 4, 3, 4), [6, 8], 2.0, 2.0], {}),
    ("aten.upsample_nearest2d_backward.default", lambda: [real(2, 4, 6, 8), [6, 8], [2, 4, 3, 4], 2.0, 2.0], {}),
    ("aten.upsample_bilinear2d.default", lambda: [real(2, 4, 3, 4), [5, 8], False], {}),
    ("aten.upsample_bilinear2d.default", lambda: [real(2, 4, 3, 4), [5, 2], True], {}),
    ("aten.upsample_bilinear2d_backward.default", lambda: [real(2, 4, 5, 8), [5, 8], [2, 4, 3, 4], False], {}),
    ("aten.max_pool2d_with_indices.default", lambda: [real(2, 4, 6, 6), [3, 3], [2, 2], [1, 1]], {}),
    ("aten.max_pool2d_with_indices.default", lambda: [real(2, 4, 5, 6), [2, 2]], {}),
    ("aten.embedding.default", lambda: [real(6, 4), whole(6, 2, 4)], {}),
    ("aten.embedding.default", lambda: [real(6, 4), whole(6, 8), 2], {}),
    ("aten.embedding_dense_backward.default", lambda: [real(8, 4), whole(6, 8), 6, 2, False], {}),
    ("aten.index.Tensor", lambda: [real(6, 4), [whole(6, 2, 3) - 3]], {}),
    ("aten.index.Tensor", lambda: [real(2, 6, 4), [None, whole(6, 3), whole(4, 2, 1)]], {}),
    ("aten.layer_norm.default", lambda: [real(4, 2, 6), [6], real(6), real(6)], {}),
    ("aten.layer_norm.default", lambda: [real(4, 2, 6), [2, 6], None, None, 1e-3, False], {}),
    ("aten.native_layer_norm.default", lambda: [real(4, 2, 6), [6], real(6), real(6), 1e-5], {}),
    ("aten.group_norm.default", lambda: [real(2, 8, 3, 3), 4, real(8), real(8), 1e-5, False], {}),
    ("aten.group_norm.default", lambda: [real(2, 8, 5), 2], {}),
    ("aten.native_group_norm.default", lambda: [real(2, 8, 3, 3), real(8), None, 2, 8, 9, 4, 1e-5], {}),
    ("aten.rms_norm.default", lambda: [real(4, 2, 6), [6], real(6), 1e-6], {}),
    ("aten.rms_norm.default", lambda: [real(4, 2, 6), [2, 6], None, 1e-6], {}),
    ("aten._to_copy.default", lambda: [flag(4)], {"dtype": F64}),
    ("aten._to_copy.default", lambda: [whole(3, 4)], {"dtype": Word("torch.bool")}),
    ("aten._to_copy.default", lambda: [3 * real(4)], {"dtype": Word("torch.int64")}),
    ("aten.reshape.default", lambda: [real(4, 6), [2, 2, 6]], {}),
    ("aten.view.default", lambda: [real(4, 6), [24]], {}),
    ("aten.transpose.int", lambda: [real(4, 6, 2), -1, 0], {}),
    ("aten.t.default", lambda: [real(4, 6)], {}),
    ("aten.permute.default", lambda: [real(4, 6, 2), [-1, 0, 1]], {}),
    ("aten.expand.default", lambda: [real(4, 1, 2), [3, -1, 6, -1]], {}),
    ("aten.unsqueeze.default", lambda: [real(4, 6), -1], {}),
    ("aten.squeeze.dim", lambda: [real(4, 1, 6), 1], {}),
    ("aten.squeeze.dims", lambda: [real(4, 1, 6, 1), [1, -1, 0]], {}),
    *(("aten.slice.Tensor", lambda facts=facts: [real(8, 6), *facts], {})
      for facts in ((1, 1, 5), (-1, 2), (0, 0, 9, 3), (0, -3), (1, 0, -1, 2))),
    ("aten.slice_backward.default", lambda: [real(4, 2), [4, 6], 1, 2, 6, 2], {}),
    ("aten.slice_scatter.default", lambda: [real(4, 6), real(4, 2), 1, 1, 5, 2], {}),
    ("aten.select_scatter.default", lambda: [real(4, 6), real(4), 1, -2], {}),
    ("aten.select.int", lambda: [real(4, 6), -1, -2], {}),
    ("aten.select_backward.default", lambda: [real(4), [4, 6], 1, -2], {}),
    ("aten.split.Tensor", lambda: [real(4, 7), 3, 1], {}),
    ("aten.split_with_sizes.default", lambda: [real(4, 6), [1, 3, 2], -1], {}),
    ("aten.unbind.int", lambda: [real(4, 3), -1], {}),
    ("aten.cat.default", lambda: [[real(4, 2), real(4, 3)], -1], {}),
    ("aten.stack.default", lambda: [[real(4, 2), real(4, 2)], -1], {}),
    ("aten.full.default", lambda: [[4, 2], 0.25], {"dtype": F64}),
    ("aten.arange.start_step", lambda: [8, -8, -3], {"dtype": Word("torch.int64")}),
    ("aten.triu.default", lambda: [real(2, 4, 6), 1], {}),
    ("aten.tril.default", lambda: [real(4, 6), -1], {}),
    ("aten.repeat.default", lambda: [real(4, 2), [3, 1, 2]], {}),
    ("aten.flip.default", lambda: [real(4, 6), [-1, 0]], {}),
    ("aten.cumsum.default", lambda: [real(4, 6), -1], {}),
    ("aten.constant_pad_nd.default", lambda: [real(4, 6), [1, -2, 0, 3], 0.5], {}),
    ("aten.unfold.default", lambda: [real(4, 6), -1, 2, 2], {}),
    ("aten.unfold.default", lambda: [real(7, 4), 0, 3, 2], {}),
    ("aten.topk.default", lambda: [real(4, 6), 2], {}),
    ("aten.topk.default", lambda: [real(4, 6), 2, 0, False], {}),
    ("aten.sort.default", lambda: [real(4, 6), 0], {}),
    ("aten.argsort.default", lambda: [real(4, 6), -1, True], {}),
    ("aten.argmax.default", lambda: [real(4, 6), -1], {}),
    ("aten.max.dim", lambda: [real(4, 6), 0, True], {}),
    ("aten.max.dim", lambda: [real(4, 6), -1], {}),
    ("aten.gather.default", lambda: [real(4, 6), 1, whole(6, 4, 2)], {}),
    ("aten.conv3d.default", lambda: [real(2, 2, 4, 4, 4), real(2, 2, 2, 2, 2), real(2), [2, 2, 2]], {}),
    ("aten.detach.default", lambda: [real(4, 6)], {}),
    ("aten.scatter_add.default", lambda: [real(4, 6), -1, whole(6, 4, 3), real(4, 3)], {}),
]  # fmt: skip


def _splits(tensors: Sequence[T], random_: random.Random) -> dict[int, dict[int, str]]:
    """Return a random split of operands: each axis may split a dim of even size of each."""
    splits: dict[int, dict[int, str]] = {}
    for at, tensor in enumerate(tensors):
        dims = [dim for dim, size in enumerate(tensor.shape) if size % 2 == 0]
        random_.shuffle(dims)
        splits[at] = {dim: axis for dim, axis in zip(dims, ("tp", "dp"), strict=False) if random_.random() < 0.6}
    return splits


def _batch(tensors: Sequence[T]) -> dict[int, dict[int, str]]:
    """Return the split of the first dim alone: some backwards read beyond operands of other sizes than they expect."""
    same = [at for at, x in enumerate(tensors) if x.shape[0] == tensors[0].shape[0] and x.shape[0] % 2 == 0]
    return {at: {0: "tp"} for at in same}


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{op}-{at}" for at, (op, _, _) in enumerate(CASES)])
def test_a_row_means_what_torch_computes_on_every_rank(at: int) -> None:
    op, make, kwargs = CASES[at]
    torch.manual_seed(at)
    backward = op in rows.SLOPES and op not in rows.CONSTANT
    args = make()
    assert _check(
        op, args, kwargs, {}, backward and any(x.dtype == torch.float64 for x in Case(op, args, {}, {}).tensors)
    )
    random_ = random.Random(at)
    for _ in range(4):
        tensors = Case(op, args, {}, {}).tensors
        splits = _batch(tensors) if "backward" in op else _splits(tensors, random_)
        _check(op, args, kwargs, splits, False)


R0, R1, R2 = (Name(f"r{at}") for at in range(3))
CHAINS: list[tuple[str, Callable[[], list[Any]], str, Callable[[], list[Any]], tuple[int, ...]]] = [
    ("aten.max_pool2d_with_indices.default", lambda: [real(2, 4, 6, 6), [3, 3], [2, 2], [1, 1]],
     "aten.max_pool2d_with_indices_backward.default",
     lambda: [real(2, 4, 3, 3), Name("t0"), [3, 3], [2, 2], [1, 1], [1, 1], False, R1], (0, 1)),
    ("aten.native_layer_norm.default", lambda: [real(4, 2, 6), [6], real(6), real(6), 1e-5],
     "aten.native_layer_norm_backward.default",
     lambda: [real(4, 2, 6), Name("t0"), [6], R1, R2, Name("t1"), Name("t2"), [True, True, True]], (0, 1)),
    ("aten.native_group_norm.default", lambda: [real(2, 8, 3, 3), real(8), real(8), 2, 8, 9, 4, 1e-5],
     "aten.native_group_norm_backward.default",
     lambda: [real(2, 8, 3, 3), Name("t0"), R1, R2, Name("t1"), 2, 8, 9, 4, [True, True, True]], ()),
    ("aten.topk.default", lambda: [real(4, 6), 2], "aten.scatter.src", lambda: [Name("t0"), 1, R1, real(4, 2)], (0,)),
    ("aten.topk.default", lambda: [real(4, 6), 2], "aten.scatter.value", lambda: [Name("t0"), -1, R1, -3], (0,)),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(CHAINS)), ids=[chain[2] for chain in CHAINS])
def test_a_row_means_what_torch_computes_of_another_rows_results(at: int) -> None:
    first, make, second, then, dims = CHAINS[at]
    torch.manual_seed(at)
    args, more = make(), then()
    for dim in (None, *dims):
        tensors = [item for item in (*args, *more) if isinstance(item, T)]
        whole = next(item for item in args if isinstance(item, T)).shape
        split = {} if dim is None else {dim: "tp"}
        rows_of = {at: split for at, x in enumerate(tensors) if len(x.shape) == len(whole) and split}
        both = Case(first, [*args, *more], {}, rows_of)
        for rank in range(2 if split else 1):
            ranks = {"tp": rank, "dp": 0}
            local = [_piece(x, rows_of.get(at, {}), ranks) for at, x in enumerate(both.tensors)]
            names = {f"t{at}": x for at, x in enumerate(local)}
            one, two = both.args[: len(args)], both.args[len(args) :]

            def given(items: list[Any], names: dict[str, T] = names) -> list[Any]:
                return [names[item.name] if isinstance(item, Name) else item for item in items]

            results = _operator(first)(*given(one))
            names |= {f"r{at}": x for at, x in enumerate(results)}
            expected = _operator(second)(*given(two))
            expected = expected if isinstance(expected, tuple) else (expected,)
            both.op, both.args = first, one
            _, meant = both.reader.line(both.line(results), both.values, both.types)
            values = {**both.values, **{f"r{at}": value for at, value in enumerate(meant)}}
            types = {**both.types, **{f"r{at}": _type(x, {}) for at, x in enumerate(results)}}
            both.op, both.args = second, two
            _, have = both.reader.line(both.line(expected), values, types)
            numbers = Numbers(both.table, both.given)
            for value, want in zip(have, expected, strict=True):
                _close(numbers.value(value, ranks), want)
            both.args = [*one, *two]


def test_every_row_of_torchs_operators_is_compared() -> None:
    left = (
        {op for op in rows.ROWS if op.startswith("aten.")} - {op for op, _, _ in CASES} - {chain[2] for chain in CHAINS}
    )
    assert left == set()
