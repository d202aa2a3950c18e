"""Complex numbers as pairs of reals: a captured graph without complex values, which nothing after it has to know."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..ops.own_ops import aten
from ..torch_private import trace
from .complex_numbers import ComplexPair, pair, real_form
from .complex_rules import RULES
from .faults import CaptureError
from .node_facts import copy_place, keep_value, noted
from .parts import inline, parts_of


def as_pairs(graph: fx.Graph) -> None:
    """Rewrite a captured graph in place: each complex value becomes two real ones, and a complex parameter, buffer or
    constant its ``real_form``.

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
    """The rewriting of one graph. ``made`` maps a node with complex results to the nodes of its two parts; a part that
    is zero everywhere is None."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[fx.Node, Any] = {}
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
                    self._stand(node, self.made[node.args[0]][node.args[1]])  # type: ignore[index]
                elif node.target in RULES:
                    self._stand(node, self._apply(RULES[node.target], node, (node.args, dict(node.kwargs))))
                else:
                    self._take_apart(node)
                    after = before.next
            node = after
        node.args = fx.node.map_arg(node.args, self._stored)
        for replaced in reversed(self.replaced):
            self.graph.erase_node(replaced)
        for node in self.graph.find_nodes(op="placeholder"):
            noted(node).value = real_form(noted(node).value)

    def _stand(self, node: fx.Node, made: Any) -> None:
        """Replace a node by ``made``."""
        self.replaced.append(node)
        if not isinstance(made, fx.Node):
            self.made[node] = made
            return
        if node.target is aten.view_as_real.default:
            self._read_parts(node)
        node.replace_all_uses_with(made)

    def _read_parts(self, node: fx.Node) -> None:
        """Read a part of a pair directly where it is selected again: ``z.real`` is a selection from
        ``view_as_real``."""
        source: Any = node.args[0]
        pair = self.made.get(source, ComplexPair(None, None))
        for user in list(node.users):
            rank = noted(source).value.dim()
            last = user.target is aten.select.int and user.args[1] % noted(node).value.dim() == rank
            part = pair[user.args[2]] if last else None
            if part is not None:
                user.replace_all_uses_with(part)
                self.graph.erase_node(user)

    def _stored(self, node: fx.Node) -> fx.Node:
        """Return the node of a value that the graph returns, in the form that programs hold: a new value of a
        buffer."""
        if node not in self.made:
            return node
        stored = self._apply(RULES[aten.view_as_real.default], node, ((node,), {}), real_form(noted(node).value))
        assert isinstance(stored, fx.Node)
        return stored

    def _apply(self, rule: Callable[..., Any], near: fx.Node, call: tuple[Any, Any], val: Any = None) -> Any:
        """Write the nodes that a rule makes for a call before ``near``. Equal calls are traced once."""
        val = noted(near).value if val is None else val
        operands: dict[fx.Node, Any] = {}
        fx.node.map_arg(call, lambda operand: operands.setdefault(operand, self.made.get(operand, operand)))
        nodes, structure = tree_flatten(list(operands.values()))
        fakes = [None if node is None else real_form(noted(node).value) for node in nodes]
        key = f"{near.target} {fx.node.map_arg(call, lambda o: _described(list(operands).index(o), o, operands[o]))}"
        if key not in self.traced:
            stored = [operand in self.made or not _is_complex(noted(operand).value) for operand in operands]

            def function(*values: torch.Tensor) -> list[torch.Tensor]:
                given = iter(values)
                filled = tree_unflatten([None if node is None else next(given) for node in nodes], structure)
                pairs = (
                    value if real else ComplexPair(value.select(-1, 0), value.select(-1, 1))
                    for value, real in zip(filled, stored, strict=True)
                )
                by_node = dict(zip(operands, pairs, strict=True))
                args, kwargs = fx.node.map_arg(call, by_node.__getitem__)
                leaves, made = tree_flatten(_conform(rule(*args, **kwargs), val))
                self.traced[key] = (fx.Graph(), [leaf is not None for leaf in leaves], made)
                return [leaf for leaf in leaves if leaf is not None]

            mode = next(fake.fake_mode for fake in [*fakes, *tree_leaves(val)] if fake is not None)
            graph = trace(function, [fake for fake in fakes if fake is not None], mode, whole=True)
            self.traced[key] = (graph, *self.traced[key][1:])
        graph, present, made = self.traced[key]
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
        return tree_unflatten([next(results) if has else None for has in present], made)

    def _take_apart(self, node: fx.Node) -> None:
        """Replace an operator by its parts, as torch decomposes it."""
        target: Any = node.target
        known = isinstance(target, torch._ops.OpOverload)
        composite = known and target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        own = {target: decomposition_table[target]} if not composite and target in decomposition_table else {}
        if not composite and not own:
            raise _no_pairs(node)
        try:
            with enable_python_dispatcher():
                parts = parts_of(node, target, own)
        except RuntimeError as error:
            raise _no_pairs(node) from error
        if any(part.target is target or part.op == "get_attr" for part in parts.nodes):
            raise _no_pairs(node)
        inline(self.graph, node, parts, node.all_input_nodes)


def _described(place: int, node: fx.Node, made: Any) -> str:
    """Return a text of all facts about an operand that a trace depends on."""
    values = [None if n is None else (noted(n).value.dtype, list(noted(n).value.shape)) for n in _leaves(made)]
    return f"{place}: {values} {node in _leaves(made)}"


def _leaves(made: Any) -> list[Any]:
    return tree_flatten(made)[0]


def _conform(made: Any, val: Any) -> Any:
    """Return the result of a rule in the shape and type that torch gives to the complex operator's result."""
    if isinstance(val, (list, tuple)):
        return [_conform(one, other) for one, other in zip(made, val, strict=True)]
    if not val.is_complex():
        assert not isinstance(made, ComplexPair)
        return _as(made, val.shape, val.dtype)
    real, imag = pair(made)
    dtype = val.dtype.to_real()
    if real is None and imag is None:
        real = torch.zeros(val.shape, dtype=dtype)
    return ComplexPair(*(None if part is None else _as(part, val.shape, dtype) for part in (real, imag)))


def _as(value: Any, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full(shape, value, dtype=dtype)
    cast: torch.Tensor = value if value.dtype == dtype else aten._to_copy.default(value, dtype=dtype)
    return cast if cast.shape == shape else cast.expand(shape)


def _no_pairs(node: fx.Node) -> CaptureError:
    origin = noted(node).origin
    where = f"in `{origin.module}`: " if origin.module else ""
    return CaptureError(
        "complex", f"{where}{node.target} of complex numbers cannot be computed with real ones", origin.source
    )
