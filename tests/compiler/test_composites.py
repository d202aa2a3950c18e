"""The functional form of an export is torch's own, made without tracing the model again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from parc.compiler.capture import functional as composites
from parc.compiler.capture.functional import functional
from parc.compiler.capture.node_facts import noted
from parc.compiler.capture.parts import composite_parts
from parc.compiler.torch_private import quiet, with_unread_draws, without_code_and_layouts
from tests.draws import wide

X = torch.zeros(4, 6, 8)


def _text(graph: fx.Graph) -> list[str]:
    """Return every operator with its operands, arguments and results as text, without names."""
    places: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        places[node] = f"%{len(places)}"
        given = fx.node.map_arg((node.args, dict(node.kwargs)), places.__getitem__)
        made = [
            (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value
            for value in tree_leaves(noted(node).value)
        ]
        if "_assert_tensor_metadata" in str(node.target):  # its arguments go by place or by name
            given = given[0][0]
        what = node.op if node.op == "placeholder" else node.target
        lines.append(f"{places[node]} = {what} {given} {made if node.op == 'call_function' else ''}")
    return lines


def _modules(graph: fx.Graph) -> list[str]:
    stacks = [noted(node).modules or {"": ("", "")} for node in graph.nodes if node.op == "call_function"]
    return [list(stack.values())[-1][0] for stack in stacks]


class _Body(nn.Module):
    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self.fc = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("mean", torch.zeros(8))
        count = torch.zeros(1)
        self.register_buffer("count", count, persistent=False)
        self.register_buffer("tied", count[:1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def _no_grad(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = model.fc(x).float().flatten(1).mean(-1, keepdim=True)
        shift = scale.reshape(-1).cos()
    return model.fc(x) * scale[..., None] + shift[:, None, None]


def _written_again(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = x.sum(-1, keepdim=True)
    made = x.mul_(y).add_(before)
    y.sub_(made)
    x.div_(2.0)
    return made + x * y.relu_()


def _shares(x: torch.Tensor, grad: bool = True) -> torch.Tensor:
    with torch.set_grad_enabled(grad):
        weights, places = x.topk(2, -1)
        weights /= weights.sum(-1, keepdim=True)
        return weights * places.to(weights.dtype)


def _scattered(x: torch.Tensor) -> torch.Tensor:
    """``[4, 6, 8]``, from entries that are written by their places."""
    mask = torch.zeros_like(x).scatter_(-1, x.topk(2, -1)[1], 1.0)
    summed = torch.zeros(24, 8).index_add_(0, torch.arange(4), x[0, :4]).index_fill_(0, torch.arange(1, 2), 2.0)
    kept = x.masked_fill(mask > 0.0, 0.0).index_put_((torch.arange(1, 3),), x[0] * 2.0).cumsum_(0).tril_()
    squares = torch.zeros(6, 6).addmm_(x[0], x[1].t())
    return kept * mask + summed.sum() + squares.zero_().add_(1.0).sum()


def _in_parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = x[:3]  # a view that is made beside another may stand before or after it
    y[1:] = x[1:]
    y[1:].mul_(first)
    y.add_(1.0)
    y[:, 2] += 1.0
    before = y * 2.0
    columns, rows = before[..., 0], before[:, :2]
    last = y[..., 5].add_(columns)
    y[:, 3:5] = rows * last[:, :2, None]
    return y + before


def _older_part(y: torch.Tensor) -> torch.Tensor:
    first = y[0]
    y[1:] = 3.0
    return y + first


def _part_that_is_read(y: torch.Tensor) -> torch.Tensor:
    row = y[:, 2].add_(1.0)
    y.mul_(2.0)
    return y[:, 1] + row


def _buffer_in_a_part(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mean[:4] = model.fc(x).detach()[0, 0, :4]
    return model.fc(x) * model.mean


def _followed(model: Any, x: torch.Tensor) -> torch.Tensor:
    before = model.mean * 2.0
    made = model.fc(x).detach()
    model.mean.mul_(0.9).add_(made.mean((0, 1)), alpha=0.1)
    return model.fc(x) * model.mean + before


def _assigned(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mean.copy_(model.fc(x).detach().mean((0, 1)))
    return model.fc(x) * model.mean


def _buffer_behind_a_view(model: Any, x: torch.Tensor) -> torch.Tensor:
    view = model.mean[:4]
    model.mean.add_(1.0)
    return model.fc(x)[..., :4] * view


def _without_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.mean.add_(model.fc(x).mean((0, 1)))
    return model.fc(x) * model.mean


def _behind_a_view(x: torch.Tensor) -> torch.Tensor:
    view = x[:2]
    x.mul_(2.0)
    return view + x[2:]


BODIES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "views": lambda m, x: (
        m.fc(x).reshape(4, 48).unflatten(1, (6, 8)).chunk(2, -1)[0].contiguous().flatten(1),
        m.fc(x).transpose(0, 1).reshape(24, 8).view(6, 4, 8).transpose(0, 1).contiguous(),  # copies
        m.fc(x.contiguous().to(torch.float32).reshape(4, 6, 8)),  # nothing to do
        m.fc(x.to(torch.float64).float()).to(torch.bfloat16).type_as(x),
    ),
    "unread": lambda m, x: (F.dropout(x, 0.5), F.dropout(m.fc(x), 0.1))[1],
    "unread beside a write": lambda m, x: (F.dropout(x, 0.5), F.dropout(m.fc(x).add_(1.0), 0.1))[1],
    "dropout": lambda m, x: F.dropout(m.drop(m.fc(x)), 0.5) + F.dropout(x, 0.5, training=False),
    "kept whole": lambda m, x: (
        F.scaled_dot_product_attention(m.fc(x), x, torch.einsum("bij,bkj->bij", x, x)),
        torch.fft.rfft(x).conj().resolve_conj().imag.reshape(4, 30) + m.fc(x).mean(),
    ),
    "turned": lambda m, x: (
        torch.view_as_real(torch.view_as_complex(m.fc(x).unflatten(-1, (4, 2))) * torch.polar(x[..., :4], x[..., 4:])),
        torch.fft.fft2(m.fc(x)).real.reshape(24, 8),
    ),
    "lstm": lambda m, x: m.lstm(x)[0],
    "alike": lambda m, x: m.fc(m.fc(x).reshape(24, 8)).reshape(4, 6, 8).reshape(24, 8),
    "region": _no_grad,
    "of composites": lambda m, x: m.fc(x) * torch.cartesian_prod(x[0, :2, 0], x[0, :3, 0]).flatten()[:6, None],
    "constants": lambda m, x: m.fc(x) * torch.tensor([1.0, 2.0]).repeat(4),
    "no derivative": lambda m, x: m.fc(m.fc(x).view(torch.float32)),
    "written": lambda m, x: m.fc(x).add_(1.0).reshape(24, 8),
    "written again": lambda m, x: _written_again(m.fc(x), m.fc(x * 2.0)),
    "written at places": lambda m, x: _scattered(m.fc(x)),
    "written in parts": lambda m, x: _in_parts(x, m.fc(x)),
    "written before an older part is read": lambda m, x: _older_part(m.fc(x)),
    "written beside a part that is read": lambda m, x: _part_that_is_read(m.fc(x)),
    "written in one of several": lambda m, x: _shares(m.fc(x)),
    "written in a region": lambda m, x: m.fc(x) * _shares(m.fc(x), grad=False).sum(),
    "written behind a view": lambda m, x: _behind_a_view(m.fc(x)),
    "written in a wider sum": lambda m, x: m.fc(x).to(torch.bfloat16).relu().add_(m.fc(x)),
    "written in a view": lambda m, x: m.fc(x).clone().reshape(24, 8).mul_(2.0).reshape(4, 48),
    "buffers": lambda m, x: m.norm(x).flatten(1),
    "buffers twice": lambda m, x: m.norm(m.norm(x) * m.norm.running_mean.sum()),
    "buffers beside": lambda m, x: F.batch_norm(m.norm(x), None, None, training=True),
    "buffers followed": _followed,
    "buffers assigned": _assigned,
    "buffers of a view": lambda m, x: m.mean.copy_(m.fc(x).detach().flatten()[:8].reshape(8)) * x,
    "buffers in a part": _buffer_in_a_part,
    "buffers behind a view": _buffer_behind_a_view,
    "buffers without a gradient": _without_gradient,
    "statistics of each sample": lambda m, x: F.instance_norm(x, m.norm.running_mean, m.norm.running_var),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet(), with_unread_draws():
        yield


LEFT = (
    "of composites",
    "constants",
    "no derivative",
    "written behind a view",
    "written in a wider sum",
    "written in a view",
    "written before an older part is read",
    "written beside a part that is read",
    "buffers behind a view",
    "buffers without a gradient",
)
"""The bodies that torch traces again: most of them write what another value sees."""
OWN = [name for name in BODIES if name not in LEFT]
TOGETHER = [
    name for name in OWN if name.startswith(("views", "dropout", "kept", "turned", "lstm", "alike", "written "))
]
"""The bodies that neither change what another reads nor leave out what it makes."""
BODIES["together"] = lambda m, x: tuple(BODIES[name](m, x) for name in TOGETHER)
CHANGED_BY_EVAL = ("unread", "unread beside a write", "dropout", "lstm", "buffers")


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *(wide(name, True) if name in TOGETHER else (name, True) for name in [*OWN, "together"]),
        *((name, False) if name in CHANGED_BY_EVAL else wide(name, False) for name in [*OWN, "together"]),
    ],
)
def test_the_functional_form_is_torchs_own(name: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composites, "decomposed", None)  # it is made here
    exported = torch.export.export(_Body(BODIES[name]).train(training), (X,), strict=False)
    wanted = exported.run_decompositions({})
    found = functional(exported)
    assert _text(found.graph) == _text(wanted.graph)
    if name != "region":  # of whose operators torch forgets the modules
        assert _modules(found.graph) == _modules(wanted.graph)
    assert [(s.kind, s.target) for s in found.graph_signature.input_specs] == [
        (s.kind, s.target) for s in wanted.graph_signature.input_specs
    ]
    draws = [node for node in found.graph.nodes if "native_dropout" in str(node.target)]
    assert len(draws) == 2 or not name.startswith("unread")
    found.graph.lint()


def test_a_composite_that_computes_is_left_to_torch() -> None:
    with torch.library._scoped_library("parc_test", "FRAGMENT") as library:
        library.define("product(Tensor(a) x, Tensor weight) -> Tensor(a)")
        library.define("nothing(Tensor(a) x) -> ()")
        library.impl("product", lambda x, weight: F.linear(x, weight).reshape(24, 8), "CompositeImplicitAutograd")
        library.impl("nothing", lambda x: None, "CompositeImplicitAutograd")

        def body(model: Any, x: torch.Tensor) -> torch.Tensor:
            torch.ops.parc_test.nothing(x)
            return torch.ops.parc_test.product(x, model.fc.weight)

        exported = torch.export.export(_Body(body), (X,), strict=False)
        wanted = exported.run_decompositions({})
        assert any("linear" in str(node.target) for node in wanted.graph.nodes)
        assert _text(functional(exported).graph) == _text(wanted.graph)


def test_what_is_called_alike_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = torch.export.export(_Body(BODIES["alike"]), (X,), strict=False)
    traced: list[fx.Node] = []

    def counted(node: fx.Node) -> fx.Graph | None:
        traced.append(node)
        return composite_parts(node)

    monkeypatch.setattr(composites, "composite_parts", counted)
    calls = [node for node in exported.graph.nodes if "reshape" in str(node.target)]
    functional(exported)
    assert len(calls) == 3 and len(traced) == 2


def test_a_conjugate_has_parts_of_its_own() -> None:
    def body(model: Any, x: torch.Tensor) -> Any:
        turned = torch.fft.rfft(model.fc(x))
        return turned.imag * 2.0, turned.conj().imag * 3.0

    found = functional(torch.export.export(_Body(body), (X,), strict=False))
    names = [str(node.target) for node in found.graph.nodes]
    assert names.count("aten.view_as_real.default") == 2 and names.count("aten._neg_view.default") == 1


def test_a_graph_that_is_left_to_torch_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composites, "decomposed", lambda exported: None)
    for name in LEFT:
        exported = torch.export.export(_Body(BODIES[name]), (X,), strict=False)
        before = _text(copy.deepcopy(exported.graph))
        assert functional(exported) is None and _text(exported.graph) == before


def test_two_buffers_of_one_memory_are_not_written_as_if_they_were_two() -> None:
    exported = torch.export.export(_Body(lambda m, x: m.fc(x) * m.count.add_(1.0) * m.tied), (X,), strict=False)
    with pytest.raises(AssertionError, match="GraphModule"):  # torch's own, of which capture says what the model does
        functional(exported)


def test_code_that_is_written_late_is_that_of_the_graph() -> None:
    x = torch.ones(2)
    with without_code_and_layouts():
        module = fx.symbolic_trace(nn.ReLU())
        node = module.graph.output_node().all_input_nodes[0]
        node.target, node.kwargs = torch.neg, {}
        module.recompile()
        inside = fx.symbolic_trace(nn.ReLU())
        assert torch.equal(inside(-x), 0 * x) and "relu" in inside.code
        read = fx.symbolic_trace(nn.ReLU())
        assert "relu" in str(read)
    assert torch.equal(module(x), -x) and "neg" in module.code and "neg" in str(module)
    node.target = torch.abs
    module.recompile()
    assert torch.equal(module(-x), x)
