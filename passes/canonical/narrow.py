"""Mixed precision: casts around the modules that a plan computes in a narrow type.

They are inserted before values are placed, so that collectives move the narrow values.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ...compiler.capture.node_facts import noted
from ...compiler.ops.own_ops import OPS, aten
from ...compiler.ops.precision import PrecisionLine, PrecisionRegions, is_narrow, is_sensitive, line_at
from ...compiler.ops.rules import facts
from ...compiler.program.binding import LOSS
from ...compiler.program.program import Origin
from ..calls import FakeResults, computes, insert_call, operands_of, outputs, substitute_nodes, tensors_of


class _Flow(IntEnum):
    """The demand of a float32 value of the captured graph on its readers. Of several operands the largest demand
    counts."""

    MADE = 0
    """The value depends on constants alone (masks). It stays as it is, and demands nothing."""
    TABLE = 1
    """The value depends on buffers too (angles, rotary tables). It stays in float32 until it meets activations, and
    then takes their type."""
    STORED = 2
    """The value depends on weights too. It takes the type of the activations that it meets, and is rounded where it
    leaves its module."""
    NARROW = 3
    """The value is an activation in the narrow type."""
    WIDE = 4
    """The value comes from a sensitive operator, or from a module that is not narrow."""
    KEPT = 5
    """The value is a loss, a single number, or cast to float32 by the model itself: nothing narrows it."""


_FLOW_OF_KIND = {
    **dict.fromkeys(("buffer", "constant"), _Flow.TABLE), **dict.fromkeys(("parameter", "frozen"), _Flow.STORED),
    "input": _Flow.WIDE,
}  # fmt: skip
"""The demand of placeholders, by the kind of their binding; all other kinds are ``MADE``."""


def narrow(graph: fx.Graph, lines: PrecisionRegions) -> None:
    """The pass of mixed precision. It takes a canonical graph, and changes it in place: operators read casts as the
    plan's ``lines`` ask. The outputs keep their types.

    A trained weight that is narrow in the model itself becomes a master weight in float32, which its readers cast.
    """
    if any(line.dtype != torch.float32 for line in lines):
        _keep_masters(graph, lines)
        _Narrowing(graph, lines).run()


def _keep_masters(graph: fx.Graph, lines: PrecisionRegions) -> None:
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.users]:
        kind, name = noted(node).binding
        value, line = noted(node).value, line_at(lines, name)
        if kind != "parameter" or line is None or not is_narrow(value.dtype):
            continue
        first = next(n for n in graph.nodes if n in node.users)
        read = insert_call(first, aten._to_copy.default, (node,), {"dtype": value.dtype})
        node.replace_all_uses_with(read, lambda user, read=read: user is not read)
        noted(read).value, noted(read).origin = value, Origin(name.rpartition(".")[0], "", line.line)
        with value.fake_mode:
            noted(node).value = value.to(torch.float32)


class _SensitiveParts(TorchDispatchMode):
    """A mode that runs a composite operator, and becomes ``sensitive`` where one of its parts takes no narrow type."""

    def __init__(self) -> None:
        super().__init__()
        self.sensitive = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sensitive |= is_sensitive(str(func))
        return func(*args, **(kwargs or {}))


class _Narrowing:
    def __init__(self, graph: fx.Graph, lines: PrecisionRegions) -> None:
        self.graph, self.lines = graph, lines
        self.captured = {node: tensors_of(node) for node in graph.nodes if node.op != "output"}
        self.flow: dict[fx.Node, _Flow] = {}
        self.cast: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.is_sensitive: dict[Any, bool] = {}
        self.results = FakeResults(graph)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self.flow[node] = _FLOW_OF_KIND.get(noted(node).binding.kind, _Flow.MADE)
            elif computes(node):
                self.operator(node)
            elif node.target is operator.getitem:
                source, index = node.args
                self.flow[node] = self.flow[source]
                noted(node).value = noted(source).value[index]
        results = outputs(self.graph)
        end = self.graph.output_node()
        types = [self.captured[n][0].dtype for n in results]
        if LOSS in noted(end).results:  # at least float32
            types[0] = torch.promote_types(types[0], torch.float32)
        end.args = (tuple(self.form(n, t, end, self.origin(n, n)) for n, t in zip(results, types, strict=True)),)
        self.graph.eliminate_dead_code()
        self.graph.lint()

    def line_of(self, node: fx.Node) -> PrecisionLine | None:
        """Return the line by which a node computes in a narrow type; the loss never does."""
        return None if noted(node).in_loss else line_at(self.lines, noted(node).origin.module)

    def seen(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the form of a value that a reader outside its narrow module sees: the rounded one."""
        maker = _maker(value)
        if maker.op == "placeholder" or self.flow[value] in (_Flow.MADE, _Flow.TABLE, _Flow.KEPT):
            return value
        line, origin = self.line_of(maker), noted(maker).origin
        if line is None or (_inside(noted(reader).origin.module, origin.module) and not noted(reader).in_loss):
            return value
        return self.form(value, line.dtype, value.next, replace(origin, plan=line.line))  # cast inside the module

    def is_float(self, value: fx.Node, narrow: bool) -> bool:
        """Return True for a value that is float32 in the captured graph, or, with ``narrow``, of a narrower type."""
        dtype = self.captured[value][0].dtype
        return dtype == torch.float32 or (narrow and is_narrow(dtype))

    def operator(self, node: fx.Node) -> None:
        """Cast an operator's operands to the types in which it computes, and note the demand of its results."""
        reads = list(dict.fromkeys(operands_of(node)))
        loss = bool(noted(node).in_loss)
        seen = {n: self.seen(n, node) for n in reads if self.is_float(n, narrow=loss)}
        node.args, node.kwargs = substitute_nodes((node.args, node.kwargs), lambda n: seen.get(n, n))
        floats = list(dict.fromkeys(seen.values()))
        line = self.line_of(node)
        asked = loss or (not floats and any(self.captured[n][0].is_floating_point() for n in reads))
        tensors = [n for n in floats if noted(n).value.dim()] or floats  # a scalar beside a tensor decides nothing
        flow = _Flow.KEPT if asked else max((self.flow[n] for n in tensors), default=_Flow.MADE)
        precision = facts(node.target).precision
        if line is None:
            flow = max(flow, _Flow.WIDE) if flow >= _Flow.NARROW else flow
            self.set(node, dict.fromkeys(floats, torch.float32))
        elif flow in (_Flow.MADE, _Flow.TABLE, _Flow.STORED, _Flow.KEPT):
            self.set(node, dict.fromkeys(floats, torch.float32))
        elif precision == "product":
            flow = _Flow.NARROW
            # attention adds its mask to scores, which are float32
            rounded = node.args[:3] if node.target is OPS.attention.default else floats
            self.set(node, {n: line.dtype for n in floats if n in rounded})
        elif self.sensitive(node):
            flow = _Flow.KEPT if precision == "loss" else _Flow.WIDE
            self.set(node, dict.fromkeys(floats, torch.float32))
        elif flow is _Flow.WIDE or self.beyond(node, floats, line.dtype):
            self.set(node, dict.fromkeys(floats, torch.float32))
        else:
            self.set(node, {n: line.dtype for n in tensors if self.flow[n] != _Flow.MADE})
        single = flow in (_Flow.NARROW, _Flow.WIDE) and all(v is None or v.dim() == 0 for v in tensors_of(node))
        self.flow[node] = _Flow.KEPT if single else flow

    def sensitive(self, node: fx.Node) -> bool:
        """Return True for an operator that takes no narrow type, or one of whose parts takes none (``square``:
        ``pow``)."""
        target: Any = node.target
        if target not in self.is_sensitive:
            mode = next(noted(n).value.fake_mode for n in self.graph.nodes if n.op == "placeholder")
            with mode:  # all operands in float32: some operators take only one type
                args, kwargs = substitute_nodes((node.args, node.kwargs), lambda n: _in_float32(noted(n).value))
                with _SensitiveParts() as parts:
                    target(*args, **kwargs)
            self.is_sensitive[target] = is_sensitive(str(target)) or parts.sensitive
        return self.is_sensitive[target]

    def beyond(self, node: fx.Node, floats: list[fx.Node], dtype: torch.dtype) -> bool:
        """Return True for an operator that must compute in float32 though its operands are narrow. It reads a number
        outside the narrow type's range (a mask's fill, or an epsilon below float16's 6e-5), or a constant tensor with
        which it does not promote types."""
        constants = [n for n in floats if self.flow[n] is _Flow.MADE or not noted(n).value.dim()]
        numbers = [n.args[1] for n in constants if n.target is aten.full.default] + [*node.args, *node.kwargs.values()]
        least, most = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        if any(isinstance(n, float) and math.isfinite(n) and n and not least <= abs(n) <= most for n in numbers):
            return True
        target: Any = node.target
        return bool(constants) and (torch.Tag.pointwise not in target.tags or "lerp" in str(target))

    def set(self, node: fx.Node, types: dict[fx.Node, torch.dtype]) -> None:
        """Let an operator read operands in these types, and compute the types of its results."""
        forms = {n: self.form(n, dtype, node, self.origin(node, n)) for n, dtype in types.items()}
        node.args, node.kwargs = substitute_nodes((node.args, node.kwargs), lambda n: forms.get(n, n))
        if all(n in self.captured and noted(n).value.dtype == self.captured[n][0].dtype for n in operands_of(node)):
            return
        noted(node).value = self.results.of(node.target, node.args, node.kwargs)

    def form(self, value: fx.Node, dtype: torch.dtype, near: fx.Node, origin: Origin) -> fx.Node:
        """Return a value in a type. It is cast once for all readers, at ``near``."""
        if noted(value).value.dtype == dtype:
            return value
        if (value, dtype) not in self.cast:
            cast = insert_call(near, aten._to_copy.default, (value,), {"dtype": dtype})
            noted(cast).value = self.results.of(cast.target, cast.args, cast.kwargs)
            noted(cast).origin, noted(cast).kept = origin, near.op == "output"
            self.flow[cast] = _Flow.NARROW
            self.cast[value, dtype] = cast
        return self.cast[value, dtype]

    def origin(self, reader: fx.Node, value: fx.Node) -> Origin:
        """Return the origin of a cast: the reader's place, and the line by which the reader or the value's maker
        computes in a narrow type."""
        nodes = [node for node in (reader, _maker(value)) if node.op == "call_function"]
        origin: Origin = noted(nodes[0]).origin
        return replace(origin, plan=next((line.line for node in nodes if (line := self.line_of(node))), 0))


def _in_float32(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and is_narrow(value.dtype) else value


def _maker(value: fx.Node) -> fx.Node:
    maker: Any = value.args[0] if value.target is operator.getitem else value
    return maker  # type: ignore[no-any-return]


def _inside(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")
