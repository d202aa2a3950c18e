"""Complex operators on pairs of real tensors: a captured graph is rewritten without complex values, by a rule for each
operator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from ...ops.own_ops import aten
from ...torch_private import trace
from ..faults import fault_at
from ..node_facts import copy_place, keep_value, noted
from ..parts import inline, parts_of
from . import form as numbers
from .form import ComplexPair, add, is_pair, mul, pair, product, real_form, scaled, whole

Rule = Callable[..., Any]
"""Takes an operator's arguments, complex ones as pairs; gives a pair, or a tensor."""


def as_pairs(graph: fx.Graph) -> None:
    """Rewrite a captured graph in place without complex values: each becomes a pair of real ones, and complex
    parameters, buffers and constants have their ``real_form``.

    Raises:
        CaptureError: an operator on complex numbers has no row in ``RULES``, and torch makes it of none that have.
    """
    if any(_is_complex(value) for node in graph.nodes for value in tree_leaves(noted(node).value)):
        _Rewriter(graph).run()


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _meets_complex(node: fx.Node) -> bool:
    """Return whether an operator takes or gives complex numbers."""
    values = (noted(node).value, *(noted(operand).value for operand in node.all_input_nodes))
    return any(map(_is_complex, tree_leaves(values)))


class _Rewriter:
    """The rewriting of one graph. ``pairs`` has, for each node with complex results, the nodes of their two parts; a
    part that is zero everywhere is None."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.pairs: dict[fx.Node, Any] = {}
        self.replaced: list[fx.Node] = []
        self.traced: dict[str, tuple[fx.Graph, list[bool], TreeSpec]] = {}

    def run(self) -> None:
        node: fx.Node = next(iter(self.graph.nodes))
        while node.op != "output":
            before, after = node.prev, node.next
            if node.op == "call_function" and _meets_complex(node):
                if node.target is aten._assert_tensor_metadata.default:
                    self.replaced.append(node)
                elif node.target is operator.getitem:
                    self._replace(node, self.pairs[node.args[0]][node.args[1]])  # type: ignore[index]
                elif node.target in RULES:
                    self._replace(node, self._apply(RULES[node.target], node, (node.args, dict(node.kwargs))))
                else:
                    self._decompose(node)
                    after = before.next
            node = after
        node.args = fx.node.map_arg(node.args, self._in_real_form)
        for replaced in reversed(self.replaced):
            self.graph.erase_node(replaced)
        for node in self.graph.find_nodes(op="placeholder"):
            noted(node).value = real_form(noted(node).value)

    def _replace(self, node: fx.Node, results: Any) -> None:
        """Replace a node by the node of a real result, or note the pairs of complex ones."""
        self.replaced.append(node)
        if not isinstance(results, fx.Node):
            self.pairs[node] = results
            return
        if node.target is aten.view_as_real.default:
            self._read_parts(node)
        node.replace_all_uses_with(results)

    def _read_parts(self, node: fx.Node) -> None:
        """Replace selections of a part by that part: ``z.real`` is a selection from ``view_as_real``."""
        source: Any = node.args[0]
        pair = self.pairs.get(source, ComplexPair(None, None))
        for user in list(node.users):
            rank = noted(source).value.dim()
            last = user.target is aten.select.int and user.args[1] % noted(node).value.dim() == rank
            part = pair[user.args[2]] if last else None
            if part is not None:
                user.replace_all_uses_with(part)
                self.graph.erase_node(user)

    def _in_real_form(self, node: fx.Node) -> fx.Node:
        """Return a result of the graph, a new value of a buffer, in its ``real_form``."""
        if node not in self.pairs:
            return node
        result = self._apply(RULES[aten.view_as_real.default], node, ((node,), {}), real_form(noted(node).value))
        assert isinstance(result, fx.Node)
        return result

    def _apply(self, rule: Callable[..., Any], near: fx.Node, call: tuple[Any, Any], value: Any = None) -> Any:
        """Insert the nodes of a rule's results for a call before ``near``. Equal calls are traced once. ``value``: the
        result in torch, if it is not that of ``near``."""
        value = noted(near).value if value is None else value
        operands: dict[fx.Node, Any] = {}
        fx.node.map_arg(call, lambda operand: operands.setdefault(operand, self.pairs.get(operand, operand)))
        nodes, structure = tree_flatten(list(operands.values()))
        fakes = [None if node is None else real_form(noted(node).value) for node in nodes]
        key = f"{near.target} {fx.node.map_arg(call, lambda o: _operand_text(list(operands).index(o), o, operands[o]))}"
        if key not in self.traced:
            in_parts = [operand in self.pairs or not _is_complex(noted(operand).value) for operand in operands]

            def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
                remaining = iter(tensors)
                filled = tree_unflatten([None if node is None else next(remaining) for node in nodes], structure)
                pairs = (x if split else _view_as_complex(x) for x, split in zip(filled, in_parts, strict=True))
                by_node = dict(zip(operands, pairs, strict=True))
                args, kwargs = fx.node.map_arg(call, by_node.__getitem__)
                leaves, shape = tree_flatten(_conform(rule(*args, **kwargs), value))
                self.traced[key] = (fx.Graph(), [leaf is not None for leaf in leaves], shape)
                return [leaf for leaf in leaves if leaf is not None]

            mode = next(fake.fake_mode for fake in [*fakes, *tree_leaves(value)] if fake is not None)
            graph = trace(function, [fake for fake in fakes if fake is not None], mode, whole=True)
            self.traced[key] = (graph, *self.traced[key][1:])
        graph, present, shape = self.traced[key]
        mapping: dict[fx.Node, fx.Node] = dict(
            zip(graph.find_nodes(op="placeholder"), (node for node in nodes if node is not None), strict=True)
        )
        with self.graph.inserting_before(near):
            results: Any = iter(self.graph.graph_copy(graph, mapping))  # type: ignore[arg-type]
        for old, new in mapping.items():
            if old.op == "call_function":
                keep_value(new)
                noted(new).value = tree_map_only(torch.Tensor, torch.Tensor.detach, noted(old).value)
                copy_place(near, new)
        return tree_unflatten([next(results) if has else None for has in present], shape)

    def _decompose(self, node: fx.Node) -> None:
        """Replace an operator by its parts, as torch decomposes it."""
        target: Any = node.target
        known = isinstance(target, torch._ops.OpOverload)
        composite = known and target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        table = {target: decomposition_table[target]} if not composite and target in decomposition_table else {}
        failure = fault_at(node, f"{target} of complex numbers cannot be computed with real ones", "complex")
        if not composite and not table:
            raise failure
        try:
            with enable_python_dispatcher():
                parts = parts_of(node, target, table)
        except RuntimeError as error:
            raise failure from error
        if any(part.target is target or part.op == "get_attr" for part in parts.nodes):
            raise failure
        inline(self.graph, node, parts, node.all_input_nodes)


def _operand_text(place: int, node: fx.Node, parts: Any) -> str:
    """Return a text of all facts about an operand that a trace depends on."""
    leaves = tree_flatten(parts)[0]
    values = [None if leaf is None else (noted(leaf).value.dtype, list(noted(leaf).value.shape)) for leaf in leaves]
    return f"{place}: {values} {node in leaves}"


def _conform(results: Any, value: Any) -> Any:
    """Return the results of a rule in the shapes and dtypes of torch's complex results, ``value``."""
    if isinstance(value, (list, tuple)):
        return [_conform(one, other) for one, other in zip(results, value, strict=True)]
    if not value.is_complex():
        assert not isinstance(results, ComplexPair)
        return _as(results, value.shape, value.dtype)
    real, imag = pair(results)
    dtype = value.dtype.to_real()
    if real is None and imag is None:
        real = torch.zeros(value.shape, dtype=dtype)
    return ComplexPair(*(None if part is None else _as(part, value.shape, dtype) for part in (real, imag)))


def _as(value: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full(shape, value, dtype=dtype)
    cast: torch.Tensor = value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)
    return cast if cast.shape == shape else cast.expand(shape)


# ---- rules


_COMPLEX_ARGUMENTS = {"self", "other", "tensor", "tensors", "input", "src", "source", "value", "values"}
"""Arguments that hold complex numbers; all others are sizes, indices and masks."""


def _view_as_real(x: Any) -> Tensor:
    return torch.stack(whole(x), -1)


def _view_as_complex(x: Tensor) -> ComplexPair:
    return ComplexPair(x.select(-1, 0), x.select(-1, 1))


def _to_copy(x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Cast to complex numbers, whose parts are cast with the result, or to reals, which drops the imaginary part."""
    return pair(x) if dtype is None or dtype.is_complex else whole(x)[0]


def _copy(x: Any, source: Any, *_: Any) -> Any:
    return pair(source) if isinstance(x, ComplexPair) else whole(source)[0]


def _constant(value: Callable[..., Any]) -> Rule:
    """Return the rule of an operator that fills a tensor with one number; shape and type come from the result."""

    def rule(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
        number = value(*args)  # a tensor without dims, or a number
        number = pair(number if isinstance(number, (ComplexPair, Tensor)) else complex(number))
        return number if dtype is None or dtype.is_complex else number.real or 0.0

    return rule


def _part_or_zeros(x: Any, place: int) -> Any:
    parts = pair(x)
    if parts[place] is None:
        return torch.zeros_like(parts[1 - place]) if isinstance(parts[1 - place], Tensor) else 0.0
    return parts[place]


def _partwise(op: Any, call: Callable[..., Any] | None = None) -> Rule:
    """Return the rule of an operator that moves or adds entries: it is applied to each part, and zero parts stay
    zero."""
    names = [argument.name for argument in op._schema.arguments]

    def rule(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        data = tree_leaves([value for name, value in arguments.items() if name in _COMPLEX_ARGUMENTS], is_pair)

        def part(place: int) -> Any:
            if all(pair(value)[place] is None for value in data):
                return None
            parts = {}
            for name, value in arguments.items():
                if name in _COMPLEX_ARGUMENTS:
                    value = tree_map(lambda one: _part_or_zeros(one, place), value, is_leaf=is_pair)
                parts[name] = value.to_real() if isinstance(value, torch.dtype) else value
            first = [parts.pop(name) for name in names[: len(args)]]
            return (call or op)(*first, **parts)

        real, imag = part(0), part(1)
        if isinstance(some := imag if real is None else real, (list, tuple)):
            none = [None] * len(some)
            return [ComplexPair(*both) for both in zip(real or none, imag or none, strict=True)]
        return ComplexPair(real, imag)

    return rule


def _biased(op: Any) -> Rule:
    """Return the rule of a product whose third operand is added: along a linear layer's last dim, or a convolution's
    second."""

    def rule(x: Any, weight: Any, bias: Any = None, *rest: Any, **kwargs: Any) -> ComplexPair:
        result = product(op)(x, weight, None, *rest, **kwargs)
        if bias is None:
            return result
        dims = 0 if op is aten.linear.default else whole(weight)[0].dim() - 2
        spread = (None if part is None else part.reshape([-1, *[1] * dims]) for part in pair(bias))
        return add(result, ComplexPair(*spread))

    return rule


def _plus_product(op: Any) -> Rule:
    def rule(x: Any, first: Any, second: Any, *, beta: Any = 1, alpha: Any = 1) -> ComplexPair:
        result = product(op)(first, second)
        return add(x if beta == 1 else mul(x, beta), result if alpha == 1 else mul(result, alpha))

    return rule


def _vector_norm(x: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
    norm: Tensor = aten.linalg_vector_norm.default(numbers.abs_(x), *args, **kwargs)
    return norm


def _dropout(x: Any, p: float, train: bool | None) -> tuple[ComplexPair, Tensor]:
    """Drop the same entries of both parts, by one mask."""
    real, imag = whole(x)
    kept, mask = aten.native_dropout.default(torch.ones_like(real), p, train)
    return ComplexPair(real * kept, imag * kept), mask


# ---- Fourier transforms as products with a matrix: a cosine and a sine for every two entries
# A fast transform does less work on long dims; a product has sharding rules, so a plan splits it as a linear layer.


_to_dtype = torch.ops.aten._to_copy.default


_matrix_product = product(torch.ops.aten.linear.default)


_ROOT = 1  # torch's scale by the square root of the size; 0 is none, 2 the size itself


def to_complex(x: Any, dims: Sequence[int], scale: int, forward: bool) -> ComplexPair:
    """``_fft_c2c``: from complex numbers to as many complex numbers."""
    result = pair(x)
    for dim in dims:
        size = whole(x)[0].shape[dim]
        result = _transform_dim(result, dim, _turns(size, size, size, forward, whole(x)[0].dtype))
    return _scaled(result, [whole(x)[0].shape[dim] for dim in dims], scale)


def of_reals(x: Tensor, dims: Sequence[int], scale: int, half: bool) -> ComplexPair:
    """``_fft_r2c``: from reals. With ``half``, the last dim of the result has half of the entries: the others are their
    conjugates."""
    sizes = [x.shape[dim] for dim in dims]
    rows = sizes[-1] // 2 + 1 if half else sizes[-1]
    half_spectrum = _transform_dim(ComplexPair(x, None), dims[-1], _turns(rows, sizes[-1], sizes[-1], True, x.dtype))
    return _scaled(to_complex(half_spectrum, dims[:-1], 0, True), sizes, scale)


def to_reals(x: Any, dims: Sequence[int], scale: int, size: int) -> Tensor:
    """``_fft_c2r``: from one half to ``size`` reals; an entry whose conjugate is in the other half counts twice."""
    result = to_complex(x, dims[:-1], 0, False)
    real, _ = whole(result)
    columns = torch.arange(real.shape[dims[-1]])
    both = _to_dtype((columns > 0) & (columns * 2 < size), dtype=real.dtype)
    turns = _turns(size, len(columns), size, False, real.dtype)
    result = _transform_dim(result, dims[-1], ComplexPair(*(part * (both + 1.0) for part in turns)))
    sizes = [*(real.shape[dim] for dim in dims[:-1]), size]
    return whole(_scaled(result, sizes, scale))[0]


def _turns(rows: int, columns: int, size: int, forward: bool, dtype: torch.dtype) -> ComplexPair:
    """The matrix ``exp(2 pi i row column / size)``, or its conjugate. ``row column % size`` is a whole number and the
    angle is float64: a large angle in float32 does not say where in a turn it ends."""
    places = torch.arange(rows)[:, None] * torch.arange(columns)[None, :] % size
    angle = torch.arange(size, dtype=torch.float64) * (2 * math.pi) / size
    cos, sin = (_to_dtype(table, dtype=dtype)[places] for table in (angle.cos(), angle.sin()))
    return ComplexPair(cos, -sin if forward else sin)


def _transform_dim(x: ComplexPair, dim: int, matrix: ComplexPair) -> ComplexPair:
    """Multiply every line along ``dim`` by a matrix [out, in]."""
    last = whole(x)[0].dim() - 1
    if dim % (last + 1) == last:
        return _matrix_product(x, matrix)
    turned = ComplexPair(*(None if part is None else part.transpose(dim, -1) for part in x))
    return ComplexPair(*(None if part is None else part.transpose(dim, -1) for part in _matrix_product(turned, matrix)))


def _scaled(x: ComplexPair, sizes: Sequence[int], scale: int) -> ComplexPair:
    count = math.prod(sizes)
    if not scale:
        return x
    return scaled(x, torch.full((), count, dtype=whole(x)[0].dtype).sqrt() if scale == _ROOT else count)


# ---- the table


_PARTWISE = """
    alias clone detach contiguous lift_fresh_copy t transpose.int permute expand slice.Tensor select.int
    squeeze squeeze.dim squeeze.dims unsqueeze unbind.int split.Tensor split_with_sizes chunk flip roll repeat cat stack
    index.Tensor index_select gather constant_pad_nd slice_scatter select_scatter index_put index_add index_copy
    scatter.src scatter.value scatter_add masked_fill.Scalar masked_fill.Tensor where.self where.ScalarSelf
    where.ScalarOther where.Scalar tril triu diagonal diag_embed unfold sum sum.dim_IntList mean mean.dim cumsum neg
    positive diagonal_scatter masked_scatter
"""


_ZEROS = "zeros zeros_like new_zeros empty.memory_format empty_like new_empty"


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


RULES: Mapping[Any, Rule] = {
    **{(op := _overload(name)): _partwise(op) for name in _PARTWISE.split()},
    **{op: _partwise(op, aten.reshape.default) for op in map(_overload, ("view", "_unsafe_view", "reshape"))},
    **{op: product(op) for op in map(_overload, ["mm", "bmm", "matmul", "mv", "dot", "einsum"])},
    **{op: _biased(op) for op in map(_overload, ["linear", "convolution", "conv1d", "conv2d", "conv3d"])},
    aten.vdot.default: lambda x, y: product(aten.dot.default)(numbers.conj(x), y),
    aten.addmm.default: _plus_product(aten.mm.default),
    aten.baddbmm.default: _plus_product(aten.bmm.default),
    **dict.fromkeys((aten.resolve_conj.default, aten.resolve_neg.default), pair),
    **dict.fromkeys((aten._conj.default, aten._conj_physical.default), numbers.conj),
    aten._neg_view.default: numbers.neg,
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten.complex.default: ComplexPair,
    aten.polar.default: numbers.polar,
    aten.real.default: lambda x: whole(x)[0],
    aten.imag.default: lambda x: whole(x)[1],
    aten._to_copy.default: _to_copy,
    aten.copy.default: _copy,
    **dict.fromkeys(map(_overload, ("add.Tensor", "add.Scalar")), numbers.add),
    **dict.fromkeys(map(_overload, ("sub.Tensor", "sub.Scalar")), numbers.sub),
    **dict.fromkeys(map(_overload, ("rsub.Tensor", "rsub.Scalar")), lambda x, y, alpha=1: numbers.sub(y, x, alpha)),
    **dict.fromkeys(map(_overload, ("mul.Tensor", "mul.Scalar")), numbers.mul),
    **dict.fromkeys(map(_overload, ("div.Tensor", "div.Scalar")), numbers.div),
    **dict.fromkeys(map(_overload, ("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")), numbers.pow_),
    aten.reciprocal.default: numbers.reciprocal,
    aten.abs.default: numbers.abs_,
    aten.angle.default: numbers.angle,
    aten.sgn.default: numbers.sgn,
    aten.exp.default: numbers.exp,
    aten.log.default: numbers.log,
    aten.log2.default: numbers.log_to(2),
    aten.log10.default: numbers.log_to(10),
    aten.log1p.default: lambda x: numbers.log(add(x, 1.0)),
    aten.expm1.default: lambda x: add(numbers.exp(x), -1.0),
    aten.sqrt.default: numbers.sqrt,
    aten.rsqrt.default: lambda x: numbers.reciprocal(numbers.sqrt(x)),
    aten.sin.default: numbers.sin,
    aten.cos.default: numbers.cos,
    aten.tan.default: lambda x: numbers.div(numbers.sin(x), numbers.cos(x)),
    aten.sinh.default: numbers.sinh,
    aten.cosh.default: numbers.cosh,
    aten.tanh.default: lambda x: numbers.div(numbers.sinh(x), numbers.cosh(x)),
    aten.sigmoid.default: numbers.sigmoid,
    aten.silu.default: lambda x: mul(x, numbers.sigmoid(x)),
    aten.linalg_vector_norm.default: _vector_norm,
    **dict.fromkeys(map(_overload, ("eq.Tensor", "eq.Scalar")), numbers.equal),
    **dict.fromkeys(map(_overload, ("ne.Tensor", "ne.Scalar")), lambda x, y: ~numbers.equal(x, y)),
    aten.isnan.default: numbers.of_any(torch.isnan),
    aten.isinf.default: numbers.of_any(torch.isinf),
    aten.native_dropout.default: _dropout,
    **dict.fromkeys(map(_overload, _ZEROS.split()), _constant(lambda *_: 0)),
    **dict.fromkeys(map(_overload, ["ones", "ones_like", "new_ones"]), _constant(lambda *_: 1)),
    **dict.fromkeys(map(_overload, ["full", "full_like", "fill.Scalar"]), _constant(lambda _, value: value)),
    aten.new_full.default: _constant(lambda _, shape, value: value),
    aten.scalar_tensor.default: _constant(lambda value: value),
    aten._fft_c2c.default: to_complex,
    aten._fft_r2c.default: of_reals,
    aten._fft_c2r.default: to_reals,
}  # fmt: skip
"""The rule of each operator. An operator without one is decomposed as torch does, and refused if a part has no rule
either."""
