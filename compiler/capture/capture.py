"""Capture: a module and its loss on fake tensors become one functional forward graph that knows where it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from ..layout.placement import is_supported
from ..ops.rules import facts
from ..program.binding import Binding, Kind
from ..program.program import Origin
from ..torch_private import (
    one_frame,
    quiet,
    with_unread_draws,
    without_checkpoints,
    without_code_and_layouts,
    without_validation,
)
from .attributes import attribute_tensors, changed_numbers, check_memory, not_kept, plain_numbers
from .buffers import assigned_in_place, beside_makers
from .complex_numbers import real_form
from .complex_pairs import as_pairs
from .composites import functional
from .every_slice import EverySlice
from .expert_lists import as_made
from .experts import Capacity, with_experts
from .faults import MASK, CaptureError, explain_failure
from .lookups import beyond_tables
from .model_output import returned_tensors
from .no_grad import detach_without_gradients
from .node_facts import keep_value, noted
from .reach import reached_by_gradient
from .selections import select_by_tensors


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
    changed: tuple[str, ...] = ()
    """The plain numbers of modules that a forward changes, which no program follows."""
    returned: tuple[str, ...] = ()
    """The names of the tensors that the model returns, where they are asked for."""

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


class _Step(nn.Module):
    """Model and loss as one module, so that one export holds both; the model's names keep one known prefix."""

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
        # how far a call came: a trace puts attributes back
        self.stage = SimpleNamespace(in_loss=False, changed=(), returned=())

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, numbers = dict(zip(self._names, values, strict=True)), plain_numbers(self.model)
        # assigned after all that reads them
        with self._mode, assigned_in_place(self.model), as_made(self.model, parts=False), self.attributes.pointing():
            output = self._call(self.model, inputs)
            if getattr(output, "past_key_values", None) is not None:
                raise CaptureError("cache", "the model returns a key/value cache")
            self.stage.in_loss = True
            losses = () if self._loss is None else (self._loss(output, inputs),)
            self.stage.in_loss = False
            self.stage.changed = changed_numbers(self.model, numbers)
        for loss in losses:
            if isinstance(loss, torch.Tensor) and loss.dim() == 0:
                continue
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError("output", f"the loss is {what}, not a single number")
        returned = returned_tensors(output) if self._returns else {}
        self.stage.returned = tuple(returned)
        return *losses, *returned.values()


def capture(
    model: nn.Module,
    mode: FakeTensorMode,
    inputs: Mapping[str, InputSpec],
    call: CallModel,
    loss: LossFunction | None,
    ranged: bool = False,
    capacities: Mapping[str, Capacity] = MappingProxyType({}),
    returns: bool = False,
) -> Captured:
    """Trace ``loss(call(model, inputs), inputs)`` with ``torch.export``, before autograd.

    ``model`` lives on ``mode``'s fake tensors; nothing is computed. ``ranged``: the graph is to be the same at other
    sizes of the inputs, as far as the model's own code is. Without a ``loss`` the model alone is traced.
    ``capacities`` are those of modules of experts. ``returns``: the graph is to have the tensors that the model
    returns, too.

    Raises:
        CaptureError: control flow that depends on data, a returned cache, a loss that is no number, any other fault
            of the model, chained.
    """
    step = _Step(model, call, loss, tuple(inputs), ranged, returns)
    no_checkpoint = CaptureError("checkpoint", "the model recomputes activations with `torch.utils.checkpoint`")
    with mode:
        values = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in inputs.values())
    try:
        # what a CPU's own kernels would fuse (an LSTM) is captured in operators that every device and dtype has
        with (
            quiet(exporting=True),
            one_frame(_is_own),
            without_code_and_layouts(),
            with_unread_draws(),
            without_checkpoints(no_checkpoint),
            without_validation(),
            with_experts(model, capacities),
            torch.backends.mkldnn.flags(enabled=False),
        ):
            exported = torch.export.export(step, values, strict=False)
            if not detach_without_gradients(exported.graph_module):
                raise CaptureError("other", "`torch.no_grad()` and `torch.enable_grad()` are nested")
            _check_constants(exported)
            exported = functional(exported)
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error, AssertionError):  # what torch says of one memory that is written under two names
            check_memory(model, frozenset(name for name, _ in model.named_buffers()))
        raise explain_failure(error, step.stage.in_loss) from error
    finally:
        step.attributes.point()
    captured = _read(exported, step, tuple(inputs))
    check_memory(model, frozenset(captured.updates))
    for name, node in captured.placeholders("buffer").items():
        if name in step.attributes.assigned and node.users:
            raise not_kept(name)
    select_by_tensors(captured.graph)
    as_pairs(captured.graph)
    check_values(captured.graph)
    return captured


def _check_constants(exported: torch.export.ExportedProgram) -> None:
    """Check that a forward reads no fake tensor of an object that is no module: torch would compute with it as if it
    had numbers.

    Raises:
        CaptureError: it does.
    """
    names = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in exported.graph.find_nodes(op="placeholder"):
        if isinstance(exported.constants.get(names.get(node.name, "")), FakeTensor) and node.users:
            reader = next(iter(node.users))
            what = "the model reads a tensor that no module holds, and that is not computed from inputs"
            help_ = "keep tensors of the model in an attribute of a module, and modules in an `nn.ModuleList`; a"
            help_ += " gradient taken inside a forward is not captured"
            place = f"in `{path}`: " if (path := _module_path(reader)) else ""
            raise CaptureError("other", place + what, _source(reader), help=help_)


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
        raise _at(node, message, help="make the table longer, or the sequences shorter, by `sizes`")
    for node in graph.nodes:
        values = noted(node).value
        for value in values if isinstance(values, (tuple, list)) else [values]:
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
                what, help_ = _DEPENDS[isinstance(value, torch.Tensor)]
                raise _at(node, f"{node.target} gives {what} depends on the values of tensors", "control", help_)
            if isinstance(value, torch.Tensor) and not is_supported(value.dtype):
                binding: Binding | None = noted(node).binding
                subject = f"the {binding.words} is" if binding is not None else f"{node.target} gives"
                raise _at(node, f"{subject} {_name(value.dtype)}, a dtype that programs do not hold")
        if facts(node.target).flops is not None:
            operands = node.args[:3] if "attention" in str(node.target) else node.args
            dtypes = [noted(n).value.dtype for n in operands if isinstance(n, fx.Node)]
            if len({*dtypes} - {torch.bool}) > 1:  # a mask is no factor
                names = " and ".join(dict.fromkeys(map(_name, dtypes)))
                raise _at(node, f"{node.target} takes tensors of one dtype, not {names}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _at(node: fx.Node, message: str, kind: str = "other", help: str = "") -> CaptureError:
    origin = noted(node).origin
    return CaptureError(
        kind, f"in `{origin.module}`: {message}" if origin.module else message, origin.source, help=help
    )


def _read(exported: torch.export.ExportedProgram, step: _Step, names: tuple[str, ...]) -> Captured:
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
            kept = canonical_nodes.setdefault(bindings[old.name], new)
            if kept is not new:
                new.replace_all_uses_with(kept)
                graph.erase_node(new)
        else:
            noted(new).origin = Origin(_module_path(old), _source(old))
            noted(new).in_loss = _is_loss(old)
    assert isinstance(outputs, (tuple, list))
    values: dict[str, Any] = {}
    own: list[Any] = []
    for spec, value in zip(signature.output_specs, outputs, strict=True):
        target = spec.target.removeprefix("model.") if spec.target else ""
        if spec.kind is OutputKind.BUFFER_MUTATION:
            values[target] = value
        elif spec.kind is OutputKind.USER_OUTPUT:
            own.append(value)
    updates, losses = tuple(values), len(own) - len(step.stage.returned)
    computed = {name: node for name, node in zip(step.stage.returned, own[losses:], strict=True) if _is_computed(node)}
    buffers = {binding.name: node for binding, node in canonical_nodes.items() if binding.kind == "buffer"}
    beside_makers({name: values[name] for name in updates}, buffers, graph)
    graph.output((*own[:losses], *(values[name] for name in updates), *computed.values()))
    modules = frozenset(name for name, _ in step.model.named_modules() if name)
    written = {name: exported.constants[name] for name in signature.inputs_to_lifted_tensor_constants.values()}
    constants = {
        n.removeprefix("model."): real_form(value) for n, value in written.items() if not isinstance(value, FakeTensor)
    }
    return Captured(graph, updates, aliases, modules, constants, step.stage.changed, tuple(computed))


def _is_computed(node: Any) -> bool:
    """Return whether a value that the model returns is an operator's, and not an input or the model's state."""
    return isinstance(node, fx.Node) and node.op == "call_function"


def _bindings(signature: ExportGraphSignature, aliases: Mapping[str, str], inputs: Sequence[str]) -> dict[str, Binding]:
    """Return the binding of each placeholder, by the placeholder's name."""
    kinds: dict[InputKind, Kind] = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
    kinds[InputKind.CONSTANT_TENSOR] = "constant"
    remaining = iter(inputs)
    bindings = {}
    for spec in signature.input_specs:
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


def _is_own(path: str) -> bool:
    """Return whether a file is the model's, and not torch's or of this package."""
    return not path.startswith(("<", _HERE)) and "/torch/" not in path


def _source(node: fx.Node) -> str:
    """Return the ``file:line`` of the innermost frame in the model's own code. It has the file's name alone, so that
    builds do not depend on folders."""
    for path, line in reversed(_FRAME.findall(noted(node).trace or "")):
        if _is_own(path):
            return f"{path.rsplit('/', 1)[-1].replace(' ', '_')}:{line}"
    return ""
