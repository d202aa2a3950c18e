"""Expert forms: layers that send each token to some of many experts, captured as packed rows.

Models sort or loop over tokens in ways that no sharding rule could follow. A capture runs a *form* in place of such a
layer's forward, which computes the same with parc's own operators. transformers' one interface, ``experts(hidden,
index, weights)``, and Llama 4's layer have their forms here; ``register_experts`` adds others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import fx, nn

from ...ops.own_ops import OPS
from ..faults import CaptureError, user_frame
from ..node_facts import noted
from .lists import stack_experts, stacks_of
from .loops import followed, looped_lists
from .one_expert import Compute, Through, ThroughPacked, ThroughSlots, expert_of


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity: an expert takes ``factor`` times its mean share of the tokens of each of ``sequences``."""

    factor: float
    sequences: int

    def of(self, tokens: int, experts: int, top: int) -> tuple[int, int]:
        """Return the number of sequences, and of tokens that an expert takes of each.

        Raises:
            CaptureError: that is less than one.
        """
        mean = Fraction(tokens * top, self.sequences * experts)
        exact = Fraction(str(self.factor)) * mean
        if tokens % self.sequences:
            what = f"a layer of experts gets {tokens} tokens of {self.sequences} sequences: not the same number of each"
            help_ = "`capacity` needs the tokens of whole sequences; write `dropless`"
            raise CaptureError("capacity", what, help=help_)
        if exact < 1:
            share = f"each of {experts} experts {float(exact):.3g} tokens of a sequence"
            help_ = f"write `capacity {float(1 / mean):.3g}` or more, or make the sequences longer"
            raise CaptureError("capacity", f"a capacity of {self.factor:g} gives {share}", help=help_)
        return self.sequences, min(ceil(exact), tokens // self.sequences)


_CAPACITY: ContextVar[Capacity | None] = ContextVar("capacity", default=None)
"""The capacity of the experts whose form runs now."""
_ROUTES_ONLY: ContextVar[bool] = ContextVar("routes_only", default=False)
"""True while a form runs only to learn to which experts it sends tokens."""
ExpertForm = Callable[..., Any]
"""A function with the parameters and the results of a layer's forward."""
_FORMS: dict[Callable[..., Any], ExpertForm] = {}
"""The registered forms, by the forward that each stands for."""
_LISTS: dict[Callable[..., Any], tuple[str, ...]] = {}
"""The attributes that are lists of experts in modules with a registered form, by their forward."""


def register_experts(module: type[nn.Module], *lists: str) -> Callable[[ExpertForm], ExpertForm]:
    """Tell parc how a class of layers sends tokens to experts: ``@parc.register_experts(Layer, "experts")`` above a
    function ``form(layer, ...)`` with the parameters of the class's ``forward``.

    parc captures the form instead of the forward. ``parc.routed`` in the form sends tokens to experts. The form must
    compute the same as the forward, and a build compares the two. Classes that inherit the forward have the form too.
    ``lists`` names the attributes that are an ``nn.ModuleList`` of experts: their weights are stacked, so that ranks
    can split them.
    """

    def register(form: ExpertForm) -> ExpertForm:
        _FORMS[module.forward], _LISTS[module.forward] = form, lists
        return form

    return register


def routed(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: nn.ModuleList | Callable[..., torch.Tensor],
    stacks: Sequence[torch.Tensor] = (),
    *,
    on_input: bool = False,
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' outputs, in a form that ``register_experts`` registers.

    ``hidden`` is [tokens, width]. ``index`` and ``weights`` are [tokens, k]: the experts of each token. ``experts`` is
    a list of modules of one structure, or a function ``expert(rows, *own)`` of one expert, which gets its own part of
    each of ``stacks``, [experts, ...]. ``on_input`` multiplies the expert's input by the weight, not its output.
    """
    compute, count = expert_of(experts, stacks)
    return _by_index(hidden, index, weights, count, compute, on_input)


def _check_routing(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int) -> None:
    """Check the results of a router.

    Raises:
        CaptureError: they are not the int64 numbers and the weights of k of ``count`` experts for each token.
    """
    shapes = f"tokens {list(hidden.shape)}, index {list(index.shape)}, weights {list(weights.shape)}"
    help_ = (
        "give `parc.routed` tokens [tokens, width], and index and weights [tokens, k]; `flatten` tensors of more dims"
    )
    if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or len(index) != len(hidden):
        raise CaptureError("experts", f"a router does not give each token its experts: {shapes}", help=help_)
    if index.dtype != torch.int64:
        what = f"the numbers of experts are {str(index.dtype).removeprefix('torch.')}, not int64"
        raise CaptureError("experts", what, help="give the second result of `topk`")
    if index.shape[1] > count:
        what = f"each token is to go to {index.shape[1]} of {count} experts"
        raise CaptureError("experts", what, help="let a router choose at most as many experts as there are")


def _by_index(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int, compute: Compute,
    on_input: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sum of the outputs of each token's experts, from the experts' numbers."""
    _check_routing(hidden, index, weights, count)
    tokens, top = index.shape
    chosen = torch.zeros(tokens, count, dtype=torch.bool, device=index.device).scatter(1, index, True).t()
    scores = weights.new_zeros(tokens, count).scatter(1, index, weights).t()
    return _weighted_sum(hidden, chosen, scores, top, compute, on_input).to(hidden.dtype)


def _weighted_sum(
    hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor, top: int, compute: Compute,
    on_input: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sum of the outputs of each token's experts, from masks and scores [experts, tokens].
    ``compute`` gets packed rows, or, under a capacity, those that have a slot."""
    if _ROUTES_ONLY.get():
        raise _Routing(chosen)
    if (capacity := _CAPACITY.get()) is not None:
        sizes = (*capacity.of(hidden.shape[0], chosen.shape[0], top), top)
        return _sum_of_slots(hidden, chosen, scores, sizes, compute, on_input)
    inside = OPS.route(chosen, chosen)
    rows = OPS.pack(hidden, chosen, top)
    if on_input:
        rows = rows * OPS.pick(scores, chosen, top)
    rows = OPS.route(compute(OPS.route(rows, chosen), ThroughPacked(inside, top)), chosen)
    if not on_input:
        rows = rows * OPS.pick(scores, chosen, top)
    weighted_sum: torch.Tensor = OPS.unpack(rows, chosen, top)
    return weighted_sum


def _sum_of_slots(
    hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor, sizes: tuple[int, int, int], compute: Compute,
    on_input: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sum over the experts in which a token has a slot. ``sizes``: the sequences, the slots of an
    expert for each of them, and the experts that a token chooses."""
    (sequences, capacity, top), (experts, count) = sizes, chosen.shape
    tokens, width = count // sequences, hidden.shape[1]
    slots = OPS.slots(chosen.reshape(experts, sequences, tokens), capacity, top)
    weights = OPS.pick_slots(scores.reshape(experts, sequences, tokens), slots)[..., None]
    rows = OPS.dispatch(hidden.view(sequences, tokens, width), slots)
    rows = OPS.route(rows * weights if on_input else rows, slots)
    outputs = compute(rows.reshape(experts, sequences * capacity, width), ThroughSlots(experts))
    outputs = OPS.route(outputs.reshape(experts, sequences, capacity, -1), slots)
    weighted_sum: torch.Tensor = OPS.combine(outputs if on_input else outputs * weights, slots, tokens)
    return weighted_sum.reshape(count, -1)


def _of_transformers(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the forward of transformers' interface, by its flags (``is_transposed``, ``has_gate``, ...)."""

    def compute(rows: torch.Tensor, through: Through) -> torch.Tensor:
        def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
            product = through.linear(rows, getattr(experts, name), experts.is_transposed)
            return product + through.rows(getattr(experts, f"{name}_bias")) if experts.has_bias else product

        rows = linear(rows, "gate_up_proj" if experts.has_gate else "up_proj")
        rows = linear(experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows), "down_proj")
        normed = getattr(experts, "has_post_expert_norm", False)  # transformers 5.17 has no such fact
        return experts.post_expert_norm(rows) if normed else rows

    return _by_index(hidden, index, weights, experts.num_experts, compute)


def _llama4(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the forward of Llama 4's layer. It multiplies each token by a score for every expert, which is zero for
    those that its router did not choose. Experts have no bias, so zeros stay zeros."""

    def compute(rows: torch.Tensor, through: Through) -> torch.Tensor:
        gate, up = through.linear(rows, layer.experts.gate_up_proj, True).chunk(2, dim=-1)
        return through.linear(up * layer.experts.act_fn(gate), layer.experts.down_proj, True)

    tokens = hidden.reshape(-1, layer.hidden_dim)
    scores, logits = layer.router(tokens)
    weighted_sum = _weighted_sum(tokens, (scores != 0).t(), scores.t(), layer.top_k, compute, on_input=True)
    return layer.shared_expert(tokens) + weighted_sum, logits


def _all_forms() -> dict[Callable[..., Any], ExpertForm]:
    """Return the registered forms, and those of parc for models that are imported."""
    llama4: Any = sys.modules.get("transformers.models.llama4.modeling_llama4")
    return {llama4.Llama4TextMoe.forward: _llama4, **_FORMS} if llama4 is not None else _FORMS


class _Routing(Exception):
    """The end of a form that runs only for its routing: which experts each token goes to, [experts, tokens]."""

    def __init__(self, chosen: torch.Tensor) -> None:
        super().__init__()
        self.chosen = chosen


def has_form(layer: nn.Module) -> bool:
    """Return whether a layer of experts has a form."""
    return type(layer).forward in _all_forms()


def chosen_by(layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return which experts the form of a layer sends each token to, [experts, tokens], called as the layer is."""
    before = _ROUTES_ONLY.set(True)
    try:
        with torch.no_grad():
            _all_forms()[type(layer).forward](layer, *args, **kwargs)
    except _Routing as routing:
        return routing.chosen
    finally:
        _ROUTES_ONLY.reset(before)
    raise ValueError(f"the form of {type(layer).__name__} sends no tokens to experts")


def have_interface(module: nn.Module) -> bool:
    """Return whether a module holds experts by transformers' interface."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "num_experts"))


def stack_lists(model: nn.Module) -> None:
    """Stack the weights of the lists of experts in a model that was just made.

    Raises:
        CaptureError: the experts of one list are not alike, or an attribute is no list.
    """
    lists, looped = [], []
    for path, module in model.named_modules():
        looped += [getattr(module, name) for name in _loops_of(module)]
        for name in _LISTS.get(type(module).forward, ()):
            experts = getattr(module, name, None)
            if not isinstance(experts, nn.ModuleList) or not len(experts):
                what = f"`{name}` of `{path or type(module).__name__}` is no `nn.ModuleList` of experts"
                raise CaptureError("experts", what, help="name the attribute that is, in `register_experts`")
            lists.append(experts)
    stack_experts(model, lists, looped)


def _loops_of(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes over whose experts a layer without a form loops."""
    return () if has_form(module) else looped_lists(module)


def own_forms(model: nn.Module) -> list[str]:
    """Return the classes of a model's layers that have a registered form."""
    classes = dict.fromkeys(type(module) for module in model.modules() if type(module).forward in _FORMS)
    return [layer.__name__ for layer in classes]


def _call_form(form: ExpertForm, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a form. Its errors say where in the model's code they are."""
    try:
        return form(layer, *args, **kwargs)
    except CaptureError as error:
        error.source = error.source or user_frame(error)
        raise


@contextmanager
def with_experts(model: nn.Module, capacities: Mapping[str, Capacity] = MappingProxyType({})) -> Iterator[None]:
    """Enter a block in which layers of experts compute by their forms; those of transformers' interface too, whatever
    implementation they are set to. ``capacities`` are those of such modules, by their paths."""
    by_module = {id(model.get_submodule(path)): capacity for path, capacity in capacities.items()}

    def of_transformers(experts: nn.Module, *args: Any) -> torch.Tensor:
        before = _CAPACITY.set(by_module.get(id(experts)))
        try:
            return _of_transformers(experts, *args)
        finally:
            _CAPACITY.reset(before)

    forms = _all_forms()
    interface = getattr(sys.modules.get("transformers.integrations.moe"), "ExpertsInterface", None)
    with ExitStack() as stack:
        if interface is not None:
            stack.enter_context(patch.object(interface, "get_interface", lambda self, name, default: of_transformers))
        for module in model.modules():
            form = forms.get(type(module).forward)
            for name in _loops_of(module):
                form = partial(followed, name) if stacks_of(getattr(module, name)) is not None else form
            if form is not None:
                stack.enter_context(patch.object(module, "forward", partial(_call_form, form, module)))
        yield


# ---- the routing of a captured graph


class Routed(NamedTuple):
    """The routing of a layer: the mask of the experts that are ``chosen``, [experts, tokens] or [experts, sequences,
    tokens], ``top`` for each token; and the ``slots`` that these get under a capacity."""

    chosen: fx.Node
    top: int
    slots: fx.Node | None = None

    @property
    def experts(self) -> int:
        """The number of experts."""
        count: int = noted(self.chosen).value.shape[0]
        return count


def routed_layers(graph: fx.Graph) -> dict[str, list[Routed]]:
    """Return the layers of a graph that route tokens, by the module of their experts, with each routing of one."""
    layers: dict[str, list[Routed]] = {}
    for node in graph.nodes:
        if node.target == OPS.pack.default:
            _, chosen, top = cast(tuple[fx.Node, fx.Node, int], node.args)
            layers.setdefault(noted(node).origin.module, []).append(Routed(chosen, top))
        elif node.target == OPS.slots.default:
            chosen, _, top = cast(tuple[fx.Node, int, int], node.args)
            layers.setdefault(noted(node).origin.module, []).append(Routed(chosen, top, node))
    return layers
