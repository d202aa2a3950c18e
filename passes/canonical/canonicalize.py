"""The canonical form: the captured graph in the few operators that rules and partition know, with the same meaning."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ...compiler.capture.node_facts import copy_facts, noted
from ...compiler.ops.own_ops import NO_CLASS, OPS, aten
from ...compiler.ops.rules import facts
from ..calls import arguments_of
from . import attention, bags, decompose, strided
from .decompose import looked_up, shape_of
from .rewriter import Canonicalizer, rewrites, targets_where

_FAMILIES = attention, bags, decompose, strided
"""The modules whose rewrites are in ``REWRITES``, beside those of this module."""


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, with the facts of its nodes."""
    copy, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    results = copy.graph_copy(graph, nodes)  # fx copies each node's facts, but for those of the output
    copy_facts(graph.output_node(), copy.output(results))
    for node in nodes.values():
        if (mask := noted(node).chosen) is not None:
            noted(node).chosen = nodes.get(mask, mask)
    return copy


@lru_cache(maxsize=4)
def canonical_form(graph: fx.Graph, ranged: bool, /) -> fx.Graph:
    """Return the canonical form of a captured graph. All plans over the graph, and its names, share this one, so nobody
    may change it."""
    return canonicalize(graph, ranged)


def canonicalize(graph: fx.Graph, ranged: bool = False) -> fx.Graph:
    """The pass to the canonical form. It takes a captured graph, and returns the same function in few operators as a
    new graph; with ``ranged`` in operators that fit the other sizes of a range too.

    Dropout and attention dropout draw from counter-based streams, one ``key`` placeholder each; biases leave products;
    means become sums divided by counts; views become ``reshape``; creation operators become ``full`` and ``iota``.
    """
    copy = copied(graph)
    rewriter = Canonicalizer(copy, ranged)
    for node in list(copy.nodes):
        _write_promotion(rewriter, node)
    rewriter.rewrite()
    order = {node: index for index, node in enumerate(copy.nodes)}
    for node in order:
        _join_slices(rewriter, node, order)
    _merge_equal(rewriter)
    copy.eliminate_dead_code()
    copy.lint()
    return copy


def _write_promotion(c: Canonicalizer, node: fx.Node) -> None:
    """Cast whole numbers of which an operator makes floating ones to the type of these: torch's default is float32 also
    in a program that runs in float64."""
    value, tags = noted(node).value, getattr(node.target, "tags", ())
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or torch.Tag.pointwise not in tags:
        return
    operands = [] if facts(node.target).chooses else node.all_input_nodes
    if not any(noted(operand).value.is_floating_point() for operand in operands):
        for operand in operands:
            node.replace_input_with(operand, c.emit(node, aten._to_copy.default, operand, dtype=value.dtype))


def _join_slices(c: Canonicalizer, node: fx.Node, order: Mapping[fx.Node, int]) -> None:
    """Replace slices that make up a dim by one split: only together do they say how the dim may be placed."""
    slices: list[Any] = [user for user in node.users if user.target is aten.slice.Tensor and user.args[4] == 1]
    for dim in sorted({cut.args[1] for cut in slices}):
        cuts = sorted((cut for cut in slices if cut.args[1] == dim), key=lambda cut: cut.args[2])
        ends = [0, *(cut.args[3] for cut in cuts)]
        sizes = [after - before for before, after in pairwise(ends)]
        tiled = [cut.args[2] for cut in cuts] == ends[:-1] and ends[-1] == shape_of(node)[dim]
        if not tiled or len(cuts) < 2:
            continue
        split = c.emit(min(cuts, key=order.__getitem__), aten.split_with_sizes.default, node, sizes, dim)
        for index, cut in enumerate(cuts):
            with c.graph.inserting_after(split):
                part = c.graph.call_function(operator.getitem, (split, index))
            copy_facts(cut, part)
            c.replace(cut, part)


def _merge_equal(c: Canonicalizer) -> None:
    """Make one of equal calls on the same values that follow in one module, as of ``x - mean`` in a norm written by
    hand: ranks would keep both, and perhaps sum both. A call behind another module stays, as it may be another stage's;
    so does one with numbers, which may be equal at these sizes alone, and one that other modules read, by its name."""
    known: dict[tuple[str, ...], fx.Node] = {}
    module = None
    for node in list(c.graph.nodes):
        of = noted(node)
        if node.op != "call_function":
            continue
        if of.origin.module != module:
            known, module = {}, of.origin.module
        if node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            continue
        if any(noted(user).origin.module != module or user.op == "output" for user in node.users):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        call = str(node.target), str(node.args), str((of.in_loss, of.token_losses, of.recompute, of.chosen))
        first = known.setdefault(call, node)
        if first is not node:
            c.replace(node, first)


# ---- rewrites of views, biases, cross entropy and indices


@rewrites(aten._assert_tensor_metadata.default)
def _drop(c: Canonicalizer, node: Any) -> None:
    c.graph.erase_node(node)


@rewrites(*targets_where(lambda row: row.moves == "copy" and not row.stops_gradient))
def _forward(c: Canonicalizer, node: Any) -> None:
    c.replace(node, node.args[0])


@rewrites(*targets_where(lambda row: row.moves == "shape"))
def _view(c: Canonicalizer, node: Any) -> None:
    source = node.args[0]
    if shape_of(source) == shape_of(node):
        c.replace(node, source)
        return
    node.target = aten.reshape.default
    node.args = (source, list(shape_of(node)))


@rewrites(aten.expand.default)
def _expand_sizes(c: Canonicalizer, node: Any) -> None:
    if shape_of(node.args[0]) == shape_of(node):
        c.replace(node, node.args[0])
        return
    node.args, node.kwargs = (node.args[0], list(shape_of(node))), {}


@rewrites(aten._to_copy.default)
def _to_copy(c: Canonicalizer, node: Any) -> None:
    """Keep the dtype alone of a copy's options, and drop a copy of the same dtype."""
    dtype = noted(node).value.dtype
    if noted(node.args[0]).value.dtype == dtype:
        c.replace(node, node.args[0])
    else:
        node.args, node.kwargs = (node.args[0],), {"dtype": dtype}


@rewrites(aten.type_as.default)
def _type_as(c: Canonicalizer, node: Any) -> None:
    node.target = aten._to_copy.default
    _to_copy(c, node)


@rewrites(aten.slice.Tensor)
def _slice(c: Canonicalizer, node: Any) -> None:
    """Count positions from the front, and end a slice at the last element that it takes: a rank can cut such sizes."""
    before, after, arguments = shape_of(node.args[0]), shape_of(node), arguments_of(node)
    dim, step = int(arguments["dim"] or 0) % len(before), int(arguments["step"] or 1)
    # at the largest size of a range a table may be just long enough; at smaller sizes the slice still cuts it
    if before == after and step == 1 and not (c.ranged and 0 < int(arguments["end"] or 0) <= before[dim]):
        c.replace(node, node.args[0])
        return
    start = int(arguments["start"] or 0)
    start = min(max(start + before[dim] if start < 0 else start, 0), before[dim])
    end = start + (after[dim] - 1) * step + 1 if after[dim] else start
    node.args, node.kwargs = (node.args[0], dim, start, end, step), {}


@rewrites(aten.cat.default)
def _cat(c: Canonicalizer, node: Any) -> None:
    """Drop empty operands of a concatenation: a rotary embedding over all of a head leaves an empty rest."""
    pieces, *rest = node.args
    full = [piece for piece in pieces if 0 not in shape_of(piece)]
    if len(full) == 1 and noted(full[0]).value.dtype == noted(node).value.dtype:
        c.replace(node, full[0])
    elif 1 < len(full) < len(pieces):
        node.args = (full, *rest)


@rewrites(aten.linear.default)
def _linear_bias(c: Canonicalizer, node: Any) -> None:
    """Add a bias after its product: inside, every rank of a row-parallel product would add it."""
    if len(node.args) > 2 and node.args[2] is not None:
        x, weight, bias = node.args
        product = c.emit(node, aten.linear.default, x, weight, val=noted(node).value)
        c.replace(node, c.emit(node, aten.add.Tensor, product, bias, val=noted(node).value))


@rewrites(
    aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
)  # fmt: skip
def _convolution(c: Canonicalizer, node: Any) -> None:
    """Add a bias after its convolution, as after a linear layer."""
    bias = node.args[2] if len(node.args) > 2 else None
    if bias is None:
        return
    x, weight, _, *rest = node.args
    product = c.emit(node, node.target, x, weight, None, *rest, val=noted(node).value, **node.kwargs)
    for _ in range(len(shape_of(weight)) - 2):
        bias = c.emit(node, aten.unsqueeze.default, bias, -1)
    c.replace(node, c.emit(node, aten.add.Tensor, product, bias, val=noted(node).value))


@rewrites(aten.addmm.default)
def _addmm(c: Canonicalizer, node: Any) -> None:
    if node.kwargs:
        return
    bias, x, weight = node.args
    product = c.emit(node, aten.mm.default, x, weight, val=noted(node).value)
    c.replace(node, c.emit(node, aten.add.Tensor, product, bias, val=noted(node).value))


@rewrites(aten.nll_loss_nd.default, aten.cross_entropy_loss.default)
def _cross_entropy(c: Canonicalizer, node: Any) -> None:
    """Write the mean loss as the sum of token losses, divided by the count of targets that are not ignored, or by the
    sum of their class weights."""
    arguments = arguments_of(node)
    logits, targets = arguments["self"], arguments["target"]
    normalized = node.target is aten.nll_loss_nd.default  # its operand holds log probabilities
    if normalized and logits.target is aten.log_softmax.int and logits.args[1] % len(shape_of(logits)) == 1:
        same = noted(logits.args[0]).value.dtype == noted(logits).value.dtype
        logits, normalized = (logits.args[0], False) if same else (logits, True)
    weight, smoothing = arguments["weight"], float(arguments.get("label_smoothing", 0.0))
    rank = noted(logits).value.dim()
    if noted(targets).value.is_floating_point() or rank < 2:
        return
    if rank > 2:  # classes move from dim 1 to the last; all other dims become rows
        logits = c.emit(node, aten.permute.default, logits, [0, *range(2, rank), 1])
        logits = c.emit(node, aten.reshape.default, logits, [-1, shape_of(logits)[-1]])
        targets = c.emit(node, aten.reshape.default, targets, [-1])
        logits.args, targets.args = (logits.args[0], list(shape_of(logits))), (targets.args[0], list(shape_of(targets)))
    ignore, reduction = int(arguments["ignore_index"]), arguments["reduction"]
    counts = counted = c.emit(node, aten.ne.Scalar, targets, ignore)
    classes = c.emit(node, aten.mul.Tensor, targets, counted)  # an index in range, also where the target is ignored
    if normalized:
        picked = c.emit(node, aten.gather.default, logits, 1, c.emit(node, aten.unsqueeze.default, classes, 1))
        picked = c.emit(node, aten.neg.default, c.emit(node, aten.squeeze.dim, picked, 1))
        losses = c.emit(node, aten.masked_fill.Scalar, picked, c.emit(node, aten.eq.Scalar, targets, ignore), 0.0)
    else:
        losses = c.emit(node, OPS.token_loss.default, logits, targets, ignore)
    if weight is not None:
        weights = c.emit(node, aten.index.Tensor, weight, [classes])
        losses = c.emit(node, aten.mul.Tensor, losses, weights)
        counts = c.emit(node, aten.mul.Tensor, weights, counted)
        looked_up(c, weights)
    if smoothing:  # that fraction of the loss is the mean over all classes
        # the sum of log probabilities, of which no backward needs each
        every = logits if weight is None else c.emit(node, aten.mul.Tensor, logits, weight)
        every = c.emit(node, aten.sum.dim_IntList, every, [-1])
        times = shape_of(logits)[-1] if weight is None else c.emit(node, aten.sum.default, weight)
        log_sum = c.emit(node, aten.logsumexp.default, logits, [-1])
        every = c.emit(node, aten.sub.Tensor, every, c.emit(node, aten.mul.Tensor, log_sum, times))
        every = c.emit(node, aten.mul.Tensor, every, counted)
        losses = c.emit(node, aten.mul.Tensor, losses, 1 - smoothing)
        every = c.emit(node, aten.mul.Tensor, every, -smoothing / shape_of(logits)[-1])
        losses = c.emit(node, aten.add.Tensor, losses, every)
    noted(losses).token_losses = True  # one loss a target, zero where it is ignored
    if reduction == 0:
        c.replace(node, losses if rank == 2 else c.emit(node, aten.reshape.default, losses, list(shape_of(node))))
        return
    total = c.emit(node, aten.sum.default, losses)
    if reduction == 1:
        total = c.emit(node, aten.div.Tensor, total, c.emit(node, aten.sum.default, counts))
    c.replace(node, total)


def _read_by_modules(node: fx.Node) -> bool:
    """Return whether a value goes into other modules of the model than those around it."""
    module, seen, pending = noted(node).origin.module, set[fx.Node](), [*node.users]
    while pending:
        user = pending.pop()
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        other = noted(user).origin.module
        if not noted(user).in_loss and other and not f"{module}.".startswith(f"{other}."):
            return True
        pending += user.users
    return False


@rewrites(aten.gather.default)
def _log_probabilities(c: Canonicalizer, node: Any) -> None:
    """Write the log probability of one class of each row, ``log_softmax(x, -1).gather(-1, i)``, as a token loss, which
    keeps no log probabilities of other classes."""
    below, dim, index = node.args[:3]
    shape = shape_of(node)
    if below.target is not aten.log_softmax.int or len(below.users) > 1 or shape[-1:] != (1,):
        return
    if _read_by_modules(node):  # it is no loss, and may be rounded
        return
    logits: Any = below.args[0]
    last = [at % len(shape) for at in (dim, below.args[1])] == [len(shape) - 1] * 2
    if not last or shape[:-1] != shape_of(logits)[:-1] or noted(logits).value.dtype != noted(node).value.dtype:
        return
    rows = math.prod(shape)
    logits, index = (c.emit(node, aten.reshape.default, x, [rows, *more])
                     for x, more in ((logits, shape_of(logits)[-1:]), (index, ())))  # fmt: skip
    losses = c.emit(node, OPS.token_loss.default, logits, index, NO_CLASS)
    c.replace(node, c.emit(node, aten.reshape.default, c.emit(node, aten.neg.default, losses), list(shape)))


@rewrites(aten.add.Tensor)
def _add(c: Canonicalizer, node: Any) -> None:
    x, y = node.args[0], node.args[1]
    adds_zero = isinstance(x, fx.Node) and not isinstance(y, fx.Node) and y == 0
    if adds_zero and noted(x).value.dtype == noted(node).value.dtype:
        c.replace(node, x)


@rewrites(aten.unsqueeze.default)
def _unsqueeze(c: Canonicalizer, node: Any) -> None:
    source = node.args[0]
    if source in c.iotas:
        dim, size = c.iotas[source]
        at = node.args[1] % len(shape_of(node))
        c.iotas[node] = (dim + (at <= dim), size)


@rewrites(aten.index.Tensor)
def _index(c: Canonicalizer, node: Any) -> None:
    """Replace an index by counts 0, 1, … over the whole of every dim, on increasing dims, by dims of size 1; any other
    index of a trained tensor becomes a lookup."""
    x, indices = node.args
    result = shape_of(node)
    if len(indices) != len(shape_of(x)) or any(index not in c.iotas for index in indices):
        looked_up(c, node)
        return
    places = []
    for dim, index in enumerate(indices):
        place, size = c.iotas[index]
        if size != shape_of(x)[dim]:
            return
        places.append(place + len(result) - len(shape_of(index)))
    if places != sorted(set(places)):
        return
    for dim in range(len(result)):
        if dim not in places:
            x = c.emit(node, aten.unsqueeze.default, x, dim)
    c.replace(node, x)
