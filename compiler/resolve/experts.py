"""The layers of experts of a plan: how many ranks share each, and the bias that balances it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx, nn

from ...grammar.codes import NO_BIAS, NO_EXPERTS, REPEATED
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ..capture.capture import Captured
from ..capture.experts.forms import Capacity, have_interface, routed_layers
from ..capture.node_facts import noted
from ..ops.rules import facts
from ..plan.directives.experts import Experts
from ..plan.plan import Plan
from ..program.step_values import Bias
from .names import PlanNames, find_each, find_modules, is_within
from .pattern import Pattern


class RoutedLayer(NamedTuple):
    """A layer of ``experts``, which ``ranks`` share, with the ``bias`` that a step moves, if it moves one."""

    experts: int
    top: int
    """The number of experts that each token chooses."""
    ranks: int = 1
    bias: Bias | None = None
    load: float = 1.0
    """The rows of the busiest rank over the mean, as a plan states it."""
    capacity: float | None = None
    """The most tokens of a sequence that an expert takes, over the mean; None where it takes all."""
    replicas: frozenset[str] = frozenset()
    """The axes of a view along which ranks hold the same experts."""


def routing_of(plan: Plan, names: PlanNames, captured: Captured) -> dict[str, RoutedLayer]:
    """Return the layers of experts by their modules.

    Raises:
        PlanError: a layer whose bias is to be balanced has none.
    """
    layers, errors = dict[str, RoutedLayer](), list[Diagnostic]()
    lines = [line for line in plan.placements if isinstance(line, Experts)]
    for module, (routed, *_) in routed_layers(captured.graph).items():
        layer = RoutedLayer(routed.experts, routed.top)
        for line in lines:
            named, _ = find_each(line.where, names, find_modules)  # the placement of its weights has the errors
            if not any(is_within(module, name) or is_within(name, module) for name in named):
                continue
            layer = layer._replace(
                ranks=plan.ranks(line.axis.text), load=max(layer.load, line.load), capacity=line.capacity
            )
            if line.rate is not None:
                buffers = _biases(module, layer.experts, captured)
                layer = layer._replace(bias=Bias(buffers[0], line.rate) if len(buffers) == 1 else None)
                if layer.bias is None or layer.bias.buffer in captured.updates:
                    errors.append(_no_bias(line, module, layer, buffers))
        layers[module] = layer
    if errors:
        raise PlanError(errors[:1])
    return layers


def capacities_of(plan: Plan, model: nn.Module) -> dict[str, Capacity]:
    """Return the capacity of each module of experts whose line has one, by the module's path.

    Raises:
        PlanError: a line names no module of transformers' interface, or two lines differ.
    """
    lines: dict[str, Experts] = {}
    batched = next((line for line in plan.inputs if line.name not in plan.unbatched), None)
    sequences = plan.input_shape(batched)[0] if batched is not None else 1
    modules = dict(model.named_modules())
    for line in (line for line in plan.placements if isinstance(line, Experts)):
        for word in line.where:
            outer = Pattern(word.text).of(modules)
            inside = [path for path, module in modules.items() if have_interface(module)
                      and any(is_within(path, name) for name in outer)]  # fmt: skip
            if outer and not inside and line.capacity is not None:
                message = f"`{outer[0]}` has no experts of transformers' interface, and only these can have a capacity"
                raise PlanError([Diagnostic(NO_EXPERTS, message, Label(word.span), help="write `dropless`")])
            for path in inside:
                if (first := lines.setdefault(path, line)).capacity != line.capacity:
                    related = (Label(first.span, "the first"),)
                    help_ = "name each module of experts in one line"
                    message = f"two lines give `{path}` different capacities"
                    raise PlanError([Diagnostic(REPEATED, message, Label(line.span), related, help=help_)])
    return {path: Capacity(line.capacity, sequences) for path, line in lines.items() if line.capacity is not None}


def routing_facts(routing: Mapping[str, RoutedLayer]) -> dict[str, Any]:
    """Return the facts of a manifest about the layers of experts; nothing where there are none."""
    layers = {
        module: {"experts": layer.experts, "top": layer.top, "ranks": layer.ranks, "load": layer.load,
                 "capacity": layer.capacity,
                 "buffer": layer.bias and layer.bias.buffer, "rate": layer.bias.rate if layer.bias is not None else 0}
        for module, layer in routing.items()
    }  # fmt: skip
    return {"experts": layers} if layers else {}


def _biases(module: str, experts: int, captured: Captured) -> list[str]:
    """Return the buffers beside a module of experts that have one real number for each."""
    buffers = [
        name for name, node in captured.placeholders("buffer").items()
        if noted(node).value.is_floating_point() and noted(node).value.numel() == experts and _is_added(node)
    ]  # fmt: skip
    outer = module.rpartition(".")[0]
    inside = [name for name in buffers if name.startswith(f"{module}.")]
    return inside or [name for name in buffers if name.startswith(f"{outer}." if outer else "")]


def _is_added(node: fx.Node) -> bool:
    """Return whether something is added to a value, seen in another shape or dtype or not."""
    users = [(user, facts(user.target)) for user in node.users if user.op == "call_function"]
    return any(
        row.computes == "total" or ((row.moves in ("copy", "dims", "shape") or row.casts) and _is_added(user))
        for user, row in users
    )


def _no_bias(line: Experts, module: str, layer: RoutedLayer, buffers: list[str]) -> Diagnostic:
    beside = f"`{module.rpartition('.')[0]}`" if "." in module else "the model"
    many = "no buffer" if not buffers else f"{len(buffers)} buffers"
    message = f"{beside} has {many} of {layer.experts} numbers, one for each expert, that a router adds to its scores"
    if layer.bias is not None:
        message = f"the forward changes `{layer.bias.buffer}` itself, so a step cannot move it too"
    help_ = "a router adds such a buffer to its scores before it chooses; without one, balance by a term of the loss: "
    label = Label(line.arguments.span("balance bias"), f"the bias is looked for in `{module}`, then in {beside}")
    return Diagnostic(NO_BIAS, message, label, help=f"{help_}`loss cross_entropy(…) + 0.01 output.aux_loss`")
