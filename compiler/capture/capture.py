"""Capture: a module and its loss on fake tensors become one functional forward graph, each operator with its origin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.overrides import TorchFunctionMode

from ..layout.placement import is_supported
from ..ops.own_ops import aten
from ..ops.precision import base_name
from ..ops.results import changed
from ..ops.rules import facts
from ..program.binding import Binding, Kind
from ..program.program import Origin
from ..torch_private import (
    one_frame,
    quiet,
    with_forwards_of_functions,
    with_unread_draws,
    without_checkpoints,
    without_code_and_layouts,
    without_validation,
)
from .attributes import attribute_tensors, check_memory, not_kept
from .complex.form import real_form
from .complex.rules import as_pairs
from .experts.forms import Capacity, with_experts
from .experts.lists import unstacked
from .faults import MASK, CaptureError, calling_frame, explain_failure, fault_at
from .functional import assigned_in_place, functional, move_updates
from .known import AsksValues, KnownValues
from .model_output import returned_tensors
from .node_facts import copy_facts, keep_value, noted
from .observer import check_module, fault_of
from .reach import GradientFlow, reached_by_gradient
from .writes import HiddenWrites, WeightLimits


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One batch input: dtype and global shape (one microbatch over all data ranks)."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """The forward graph of model and loss.

    Every placeholder has a ``binding``: a parameter, a buffer, a constant or an input. Every other node has an
    ``origin``, and ``in_loss`` where it is outside the model, in the loss (`node_facts`). The graph's outputs are the
    loss, if there is one, then the new value of each buffer in ``updates``, then the tensors ``returned`` by the model.
    """

    graph: fx.Graph
    updates: tuple[str, ...]
    aliases: Mapping[str, str]
    modules: frozenset[str]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    returned: tuple[str, ...] = ()
    """The names of the tensors that the model returns, if the capture has them."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """The buffers by whose initial values the model's code decided, with hashes of these."""
    limits: Mapping[str, WeightLimits] = field(default_factory=dict)
    """The least and the largest number of the parameters that the forward clamps in place. The graph reads them as they
    are, without a clamp: a run clamps what it stores before each step."""

    def placeholders(self, kind: Kind) -> dict[str, fx.Node]:
        """Placeholders of one kind by name."""
        nodes = self.graph.find_nodes(op="placeholder")
        return {noted(node).binding.name: node for node in nodes if noted(node).binding.kind == kind}

    def trainable(self) -> set[str]:
        """Parameters to which a gradient of the loss flows."""
        outputs: Any = self.graph.output_node().args[0]
        reached = reached_by_gradient(outputs[0])
        return {name for name, node in self.placeholders("parameter").items() if node in reached}


LossFunction = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


CallModel = Callable[[nn.Module, Mapping[str, torch.Tensor]], Any]


def capture(
    model: nn.Module,
    mode: FakeTensorMode,
    inputs: Mapping[str, InputSpec],
    call: CallModel,
    loss: LossFunction | None,
    ranged: bool = False,
    capacities: Mapping[str, Capacity] = MappingProxyType({}),
    returns: bool = False,
    buffers: Mapping[str, Callable[[], torch.Tensor]] = MappingProxyType({}),
) -> Captured:
    """Trace ``loss(call(model, inputs), inputs)`` with ``torch.export``, before autograd.

    ``model`` has fake tensors of ``mode``; nothing is computed. ``ranged``: trace in a form that is the same at other
    sizes of the inputs, unless the model's own code differs. Without a ``loss`` the model alone is traced.
    ``capacities``: those of experts, by module. ``returns``: the graph also has the tensors that the model returns.
    ``buffers``: the initial values, by name, of buffers that have the same ones in every run.

    Raises:
        CaptureError: a hook on gradients, control flow that depends on data, a returned cache, a loss that is no
            number, or any other fault of the model, chained.
    """
    check_module(model)
    step = _ModelAndLoss(model, call, loss, tuple(inputs), ranged, returns)
    step.known = known = KnownValues(buffers)
    with mode:
        values = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in inputs.values())
    gradients: list[str] = []
    try:
        with _traced(model, capacities, known, gradients):
            exported = torch.export.export(step, values, strict=False)
            if not detach_without_gradients(exported.graph_module):
                raise CaptureError("other", "`torch.no_grad()` and `torch.enable_grad()` are nested")
            _check_constants(exported, gradients)
            _drop_asked(exported.graph)
            exported = functional(exported)
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, AssertionError):  # torch's error for memory that is written under two names
            check_memory(model, frozenset(name for name, _ in model.named_buffers()))
        explained = explain_failure(error, step.stage.in_loss)
        raise (_takes_gradient(gradients[0]) if gradients and explained.kind == "other" else explained) from error
    finally:
        step.attributes.point()
    captured = _from_export(exported, step, tuple(inputs))
    known.check_unwritten(captured.updates)
    read = {name for name, node in captured.placeholders("buffer").items() if node.users}
    check_memory(model, frozenset(captured.updates), step.attributes.assigned - read)
    for name in sorted(read & step.attributes.assigned):
        raise not_kept(name)
    select_by_tensors(captured.graph)
    as_pairs(captured.graph)
    check_values(captured.graph)
    return replace(captured, asked=known.asked, limits=dict(step.stage.limits))


@contextmanager
def _noting_gradients(places: list[str]) -> Iterator[None]:
    """Enter a block in which the places that take a gradient are noted: one of what is traced is lost."""

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(*args: Any, **kwargs: Any) -> Any:
            places.append(calling_frame())
            return call(*args, **kwargs)

        return noted_call

    with ExitStack() as within:
        for name in ("grad", "backward"):
            within.enter_context(mock.patch.object(torch.autograd, name, noting(getattr(torch.autograd, name))))
        yield


def _takes_gradient(place: str) -> CaptureError:
    help_ = "a build differentiates the loss once: compute that gradient by a formula, or leave the term out"
    return CaptureError("other", "the model takes a gradient in its forward", place, help=help_)


@contextmanager
def _traced(
    model: nn.Module, capacities: Mapping[str, Capacity], known: KnownValues, gradients: list[str]
) -> Iterator[None]:
    """Enter an export of a model; ``gradients`` gets the places that take some."""
    no_checkpoint = CaptureError("checkpoint", "the model recomputes activations with `torch.utils.checkpoint`")
    # without the fused kernels of a CPU (an LSTM): every device and dtype has the operators of the graph
    with (
        quiet(exporting=True),
        one_frame(_is_model_code),
        without_code_and_layouts(),
        with_unread_draws(),
        with_forwards_of_functions(),
        without_checkpoints(no_checkpoint),
        _noting_gradients(gradients),
        without_validation(),
        with_experts(model, capacities),
        known.noting(),
        torch.backends.mkldnn.flags(enabled=False),
    ):
        yield


class _ModelAndLoss(nn.Module):
    """Model and loss as one module, for one export. The model's names begin with ``model.``."""

    def __init__(
        self, model: nn.Module, call: CallModel, loss: LossFunction | None, names: tuple[str, ...], ranged: bool,
        returns: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self._mode = EverySlice() if ranged else nullcontext()
        self.model = model
        self._call, self._loss = call, loss
        self._names, self._returns = names, returns
        self.attributes = attribute_tensors(model)
        self.known = KnownValues({})
        # facts of a call, in an object of their own: a trace restores attributes
        self.stage = SimpleNamespace(in_loss=False, returned=(), limits={})

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = dict(zip(self._names, values, strict=True))
        self.known.read(self.model)
        # buffers are assigned last, after all that reads them
        with (
            self._mode,
            AsksValues(self.known),
            HiddenWrites(self.model, self.stage.limits),
            assigned_in_place(self.model),
            unstacked(self.model, parts=False),
            self.attributes.pointing(),
        ):
            output = self._call(self.model, inputs)
            if getattr(output, "past_key_values", None) is not None:
                raise CaptureError("cache", "the model returns a key/value cache")
            self.stage.in_loss = True
            losses = () if self._loss is None else (self._loss(output, inputs),)
            self.stage.in_loss = False
        for loss in losses:
            if isinstance(loss, torch.Tensor) and loss.dim() == 0:
                continue
            if isinstance(loss, int | float | torch.SymInt | torch.SymFloat):
                message = "the loss is a number of Python, which has no gradient"
                raise CaptureError("output", message, help="return the tensor: leave out `.item()` or `float()`")
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError("output", f"the loss is {what}, not a single number")
        returned = returned_tensors(output) if self._returns else {}
        self.stage.returned = tuple(returned)
        return *losses, *returned.values()


def _drop_asked(graph: fx.Graph) -> None:
    """Remove the operators whose numbers the model's code got in a trace."""
    for node in reversed(graph.nodes):
        asks = torch.Tag.data_dependent_output in getattr(node.target, "tags", ()) or node.target is aten.item.default
        if asks and not node.users:
            graph.erase_node(node)


def _check_constants(exported: torch.export.ExportedProgram, gradients: Sequence[str]) -> None:
    """Check that a forward reads no fake tensors other than those of modules: torch lifts them as constants. Where it
    takes ``gradients``, these are such tensors.

    Raises:
        CaptureError: it does.
    """
    names = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in exported.graph.find_nodes(op="placeholder"):
        if isinstance(exported.constants.get(names.get(node.name, "")), FakeTensor) and node.users:
            if gradients:
                raise _takes_gradient(gradients[0])
            reader = next(iter(node.users))
            what = "the model reads a tensor that no module holds"
            help_ = "keep tensors of the model in an attribute of a module, and modules in an `nn.ModuleList`"
            place = f"in `{path}`: " if (path := _module_path(reader)) else ""
            raise CaptureError("other", place + what, _source_line(reader), help=help_)


def _from_export(exported: torch.export.ExportedProgram, step: _ModelAndLoss, names: tuple[str, ...]) -> Captured:
    """Copy the graph of an export, with bindings and origins. Tied parameters become one placeholder."""
    signature = exported.graph_signature
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in step.model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = canonical
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(exported.graph, mapping)
    canonical_nodes: dict[Binding, fx.Node] = {}
    bindings = _bindings(signature, aliases, names)
    for old, new in mapping.items():
        keep_value(new)
        if old.op == "placeholder":
            noted(new).binding = bindings[old.name]
            canonical_node = canonical_nodes.setdefault(bindings[old.name], new)
            if canonical_node is not new:
                new.replace_all_uses_with(canonical_node)
                graph.erase_node(new)
        else:
            noted(new).origin = Origin(_module_path(old), _source_line(old))
            noted(new).in_loss = _is_loss(old)
    assert isinstance(outputs, (tuple, list))
    values: dict[str, Any] = {}
    results: list[Any] = []
    for spec, value in zip(signature.output_specs, outputs, strict=True):
        target = spec.target.removeprefix("model.") if spec.target else ""
        if spec.kind is OutputKind.BUFFER_MUTATION:
            values[target] = value
        elif spec.kind is OutputKind.USER_OUTPUT:
            results.append(value)
    updates, losses = tuple(values), len(results) - len(step.stage.returned)
    returned = zip(step.stage.returned, results[losses:], strict=True)
    # an input or the model's state may be returned as it is
    computed = {name: node for name, node in returned if isinstance(node, fx.Node) and node.op == "call_function"}
    buffers = {binding.name: node for binding, node in canonical_nodes.items() if binding.kind == "buffer"}
    move_updates({name: values[name] for name in updates}, buffers, graph)
    graph.output((*results[:losses], *(values[name] for name in updates), *computed.values()))
    modules = frozenset(name for name, _ in step.model.named_modules() if name)
    written = {name: exported.constants[name] for name in signature.inputs_to_lifted_tensor_constants.values()}
    constants = {
        n.removeprefix("model."): real_form(value) for n, value in written.items() if not isinstance(value, FakeTensor)
    }
    return Captured(graph, updates, aliases, modules, constants, tuple(computed))


def _bindings(signature: ExportGraphSignature, aliases: Mapping[str, str], inputs: Sequence[str]) -> dict[str, Binding]:
    """Return the binding of each placeholder, by the placeholder's name."""
    kinds: dict[InputKind, Kind] = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
    kinds[InputKind.CONSTANT_TENSOR] = "constant"
    remaining = iter(inputs)
    bindings = {}
    for spec in signature.input_specs:
        if spec.kind is InputKind.CUSTOM_OBJ:
            raise fault_of("seed", "the forward draws from a generator of its own")
        kind: Kind = kinds.get(spec.kind, "input")
        name = next(remaining) if kind == "input" else str(spec.target).removeprefix("model.")
        bindings[spec.arg.name] = Binding(kind, aliases.get(name, name) if kind == "parameter" else name)
    return bindings


def _module_path(node: fx.Node) -> str:
    stack = noted(node).modules or {}
    path = list(stack.values())[-1][0] if stack else ""
    path = path.removeprefix("L['self'].").removeprefix("model")
    return re.sub(r"@\d+", "", path).removeprefix(".")


def _is_loss(node: fx.Node) -> bool:
    """Return whether an operator stands outside the model's own forward, and so in the loss."""
    stack = noted(node).modules or {}
    return not any(path.removeprefix("L['self'].").startswith("model") for path, _ in stack.values())


_HERE = str(Path(__file__).parents[1])


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _is_model_code(path: str) -> bool:
    """Return whether a file is neither torch's nor of this package."""
    return not path.startswith(("<", _HERE)) and "/torch/" not in path


def _source_line(node: fx.Node) -> str:
    """Return the ``file:line`` of the innermost frame in the model's own code. The file has no folder, so that builds
    do not depend on folders."""
    for path, line in reversed(_FRAME.findall(noted(node).trace or "")):
        if _is_model_code(path):
            return f"{path.rsplit('/', 1)[-1].replace(' ', '_')}:{line}"
    return ""


# ---- faults of a captured graph


_DEPENDS = {
    True: (
        "a tensor whose shape",
        "keep all entries: multiply by a mask, or choose with `torch.where`; a layer that sends tokens to experts"
        " needs a form: see `parc.register_experts`",
    ),
    False: (
        "a number that",
        f"as a factor or a term leave it a tensor, which operators take too; as a size or the end of a slice: {MASK}",
    ),
}
"""The words of a message about data-dependent code and its remedy, for a tensor (True) and for a number (False)."""


def check_values(graph: fx.Graph) -> None:
    """Refuse operators on fake tensors that would fail on real ones, or that a program cannot have.

    Raises:
        CaptureError: a number or a shape that depends on data; a product of tensors of two dtypes; a dtype that
            programs do not know; a position beyond the last row of its table.
    """
    for node, position, rows in beyond_tables(graph):
        message = f"position {position} is looked up in a table of {rows} rows, which are 0 to {rows - 1}"
        raise fault_at(node, message, help="make the table longer, or the sequences shorter, by `sizes`")
    for node in graph.nodes:
        values = noted(node).value
        for value in values if isinstance(values, (tuple, list)) else [values]:
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                what, help_ = _DEPENDS[isinstance(value, torch.Tensor)]
                raise fault_at(node, f"{node.target} gives {what} depends on the values of tensors", "control", help_)
            if isinstance(value, torch.Tensor) and not is_supported(value.dtype):
                binding: Binding | None = noted(node).binding
                words = "" if binding is None else binding.words.strip()
                subject = f"the {words} is" if words else f"{node.target} gives"
                raise fault_at(node, f"{subject} {_dtype_text(value.dtype)}, a dtype that programs do not hold")
        if base_name(str(node.target)).strip("_").endswith("index_put") and _puts_by_mask(node):
            message = "trained values are put at the places of a mask, and only its values tell how many these are"
            help_ = (
                "choose with `torch.where`, or put them at positions that `__init__` makes: `mask.nonzero().squeeze(1)`"
            )
            raise fault_at(node, message, "control", help_)
        if node.target is aten.view.dtype and noted(node.args[0]).value.dtype.is_floating_point:
            message = f"the bits of {_dtype_text(noted(node.args[0]).value.dtype)} numbers are read as another type"
            raise fault_at(node, message, help="compute with the numbers: `torch.frexp`, `floor`, comparisons")
        if facts(node.target).flops is not None:
            operands = node.args[:3] if "attention" in str(node.target) else node.args
            dtypes = [noted(n).value.dtype for n in operands if isinstance(n, fx.Node)]
            if len({*dtypes} - {torch.bool}) > 1:  # a mask is no factor
                names = " and ".join(dict.fromkeys(map(_dtype_text, dtypes)))
                raise fault_at(node, f"{node.target} takes tensors of one dtype, not {names}")


def _puts_by_mask(node: fx.Node) -> bool:
    """Return whether a mask says where entries go that have a gradient and are more than one number."""
    _, where, entries = node.args[:3]
    indices = [noted(index).value for index in where if isinstance(index, fx.Node)]  # type: ignore[union-attr]
    masked = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if not isinstance(entries, fx.Node):
        return False
    return masked and noted(entries).value.numel() > 1 and entries in GradientFlow()


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def beyond_tables(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, int]]:
    """Yield each look-up of a position beyond the last row of its table: the operator, the largest position, and the
    number of rows.

    Positions are counted over all entries, or over those of an input that are not padding, as in ``(ids !=
    pad).cumsum(1)``: the largest is then that of a sequence without padding. Other positions that depend on inputs are
    not known before a run: ``(ids == end).cumsum(1)`` numbers the parts of a sequence, which may be few.
    """
    for node in graph.nodes:
        counted = facts(node.target).counted if node.op == "call_function" else None
        if counted is None or not facts(node.target).looks_up:
            continue
        at, dim = counted
        table, index = node.args[at], node.args[facts(node.target).named_at]
        most = _largest_position(index) if isinstance(index, fx.Node) else None
        if most is not None and isinstance(table, fx.Node) and most >= noted(table).value.shape[dim]:
            yield node, most, int(noted(table).value.shape[dim])


def _largest_position(value: object) -> int | None:
    """Return the largest number in counted positions, which may be moved, cast and added to; None for other values."""
    if isinstance(value, int):
        return value
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    target: Any = value.target
    if facts(target).counts:
        by_name = dict(zip((argument.name for argument in target._schema.arguments), value.args, strict=False))
        start, step, count = by_name.get("start", 0), by_name.get("step", 1), noted(value).value.numel()
        whole = count and isinstance(start, int) and isinstance(step, int)
        return max(start, start + (count - 1) * step) if whole else None
    row, terms = facts(target), value.args[:2]
    if target is aten.cumsum.default and _is_mask(value.args[0]):
        return int(noted(value).value.shape[value.args[1]])
    if row.computes == "total" and not value.kwargs:
        summands = [_largest_position(term) for term in terms]
        return sum(term for term in summands if term is not None) if None not in summands else None
    if row.computes == "multiple" and any(map(_is_mask, terms)):
        return next((most for most in map(_largest_position, terms) if most is not None), None)
    if row.casts or row.moves in ("copy", "shape", "dims"):
        return _largest_position(value.args[0])
    return None


def _is_mask(value: object) -> bool:
    """Return whether a value is the mask ``input != number``, such as that of padding, moved or cast."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    of: Any = value.args[0] if value.args else None
    if value.target is aten.ne.Scalar:
        return isinstance(of, fx.Node) and of.op == "placeholder" and noted(of).binding.kind == "input"
    return (facts(value.target).casts or facts(value.target).moves in ("copy", "shape", "dims")) and _is_mask(of)


# ---- selections by a tensor of one number


def select_by_tensors(graph: fx.Graph) -> None:
    """Replace ``x[:, i]``, for a tensor ``i`` of one number, by a look-up with that tensor: torch would read the number
    out of it."""
    for node in list(graph.nodes):
        number = node.args[2] if node.target is aten.select.int else None
        if not isinstance(number, fx.Node) or number.target is not aten.item.default:
            continue
        (index,) = number.all_input_nodes
        if noted(index).value.dtype in (torch.int64, torch.int32):
            x, dim = node.args[:2]
            with graph.inserting_before(node):
                lookup = graph.call_function(aten.index.Tensor, (x, [None] * (dim % noted(x).value.dim()) + [index]))
            copy_facts(node, lookup)
            node.replace_all_uses_with(lookup)
            graph.erase_node(node)
            if not number.users:
                graph.erase_node(number)
    for node in graph.nodes:  # selections, and views of them, have an unknown offset in their storage
        noted(node).value = changed(noted(node).value, _without_offset)


def _without_offset(value: FakeTensor) -> torch.Tensor:
    if not isinstance(value.storage_offset(), torch.SymInt):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


# ---- regions under ``torch.no_grad()``


def detach_without_gradients(module: fx.GraphModule) -> bool:
    """Detach the results of regions under ``torch.no_grad()``, which inlining would lose. Return False where regions
    are nested."""
    regions = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and str(node.target) == "wrap_with_set_grad_enabled"
    ]
    for region in regions:
        enabled, body = region.args[:2]
        inner: Any = getattr(module, str(body.target))
        if any(str(node.target) == "wrap_with_set_grad_enabled" for node in inner.graph.nodes):
            return False
        if enabled:
            continue
        output = inner.graph.output_node()
        with inner.graph.inserting_before(output):
            output.args = fx.node.map_arg(output.args, partial(_detached, inner.graph))
        inner.recompile()
    return True


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = noted(node).value
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return node
    detach = graph.call_function(torch.ops.aten.detach.default, (node,))
    copy_facts(node, detach)
    return detach


# ---- slices of whole dims, in captures that hold for several sizes


class EverySlice(TorchFunctionMode):
    """A mode in which ``x[:n]`` is a slice even where ``x`` has ``n`` entries, for which torch returns ``x`` itself. A
    trace at one size then has the same operators as at others."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "__getitem__" and isinstance(args[0], torch.Tensor):
            args = _sliced(*args)
        return function(*args, **(kwargs or {}))


def _sliced(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """Apply the slices of whole dims in an index. Return the tensor, and the index with ``:`` in their places."""
    items = list(index) if isinstance(index, tuple) else [index]
    dims = [_indexed_dims(item) for item in items]
    dim = 0
    for at, item in enumerate(items):
        first = isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1)
        if first and isinstance(item.stop, int) and item.stop == x.shape[dim]:
            x, items[at] = torch.ops.aten.slice.Tensor(x, dim, 0, item.stop, 1), slice(None)
        dim += x.dim() - sum(dims) if item is Ellipsis else dims[at]
    return x, tuple(items)


def _indexed_dims(item: Any) -> int:
    """Return the number of dims that an item of an index stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype is torch.bool else 1
