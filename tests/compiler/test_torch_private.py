"""The parts inside torch that parc relies on, one test for each: a failure with another torch names what changed
there."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parc.compiler.capture.capture import detach_without_gradients
from parc.compiler.capture.node_facts import noted
from parc.compiler.torch_private import (
    SymbolicSizes,
    compile_graph,
    fake_mode,
    is_composite,
    loads_with_numbers,
    one_frame,
    quiet,
    trace,
    with_unread_draws,
    without_checkpoints,
    without_code_and_layouts,
    without_dispatch,
    without_validation,
)

aten = torch.ops.aten


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


def targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_make_fx_traces_fake_tensors_whole_or_taken_apart() -> None:
    mode = FakeTensorMode()
    with mode:
        values = [torch.empty(2, 4), torch.empty(3, 4)]
    linear = nn.functional.linear
    assert targets(trace(linear, values, mode, whole=True)) == ["aten.linear.default"]
    assert targets(trace(linear, values, mode)) == ["aten.t.default", "aten.mm.default"]
    made = {aten.mm.default: lambda x, y: (x.unsqueeze(2) * y).sum(1)}
    assert "aten.mm.default" not in targets(trace(linear, values, mode, made))


def test_torch_says_which_operators_are_made_of_others() -> None:
    assert is_composite(aten.reshape.default) and is_composite(aten.dropout.default)
    assert not is_composite(aten.linear.default) and not is_composite(aten.mm.default)
    assert not is_composite(len)


def test_sizes_may_be_expressions_and_guards_say_what_was_assumed() -> None:
    sizes = SymbolicSizes({"S": (2, 8, 16)})
    symbol = sizes.symbols["S"]
    with sizes.mode():
        x = torch.empty(sizes.size(2 * symbol), 4)
        made = torch.cat([x, x])[:, :3].reshape(-1)
    assert sizes.expression(made.shape[0]) == 12 * symbol
    assert sizes.assumed() == []
    with sizes.mode():
        assert x.shape[0] > 10
    (assumed,) = sizes.assumed()
    assert sympy.simplify(assumed.subs(symbol, 8)) == sympy.true
    assert sympy.simplify(assumed.subs(symbol, 5)) == sympy.false


def test_inductor_finds_nothing_to_fuse_in_one_operator() -> None:
    mode = fake_mode()
    with mode:
        x = torch.empty(4, 4)
    assert compile_graph(lambda x: [x.t().exp()], [x]) is None


def test_tensors_of_our_own_run_as_any_other_without_dispatch() -> None:
    class Own(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise AssertionError(func)

    own = Tensor._make_wrapper_subclass(Own, (2, 3))
    with pytest.raises(AssertionError, match="transpose_"):
        aten.transpose_.default(own, 0, 1)
    with without_dispatch():
        aten.transpose_.default(own, 0, 1)
    assert (own.shape, own.stride()) == ((3, 2), (1, 3))


def test_torch_is_quiet_and_the_model_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("torch.export")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with quiet(exporting=True):
            warnings.warn("no", stacklevel=1)
            assert log.disabled
            torch.export._trace.print("no")  # type: ignore[attr-defined]
            print("yes")
    assert (said, log.disabled, capsys.readouterr().out) == ([], False, "yes\n")
    assert "print" not in vars(torch.export._trace)


def test_graph_modules_write_code_when_they_are_called() -> None:
    written = []
    kept = torch.fx.GraphModule.recompile
    try:
        torch.fx.GraphModule.recompile = lambda module: written.append(module) or kept(module)  # type: ignore
        with without_code_and_layouts():
            module = torch.fx.symbolic_trace(Mlp())
            module.recompile()
            other = copy.deepcopy(module)
            assert not written
            assert other(torch.ones(2, 4)).shape == (2, 4)
            assert len(written) == 1
            assert "relu" in module.code
    finally:
        torch.fx.GraphModule.recompile = kept  # type: ignore[method-assign]


def export(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    with quiet():
        return torch.export.export(module, (x,))


class Wasteful(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return super().forward(x)


def test_draws_that_nobody_reads_are_kept() -> None:
    with with_unread_draws():
        assert "aten.rand.default" in targets(export(Wasteful(), torch.ones(2, 4)).graph)


def test_operators_keep_one_frame_of_the_model() -> None:
    with one_frame(lambda file: file == __file__):
        graph = export(Mlp(), torch.ones(2, 4)).graph
    line = Mlp.forward.__code__.co_firstlineno + 1
    places = {noted(node).trace for node in graph.nodes if node.op == "call_function"}
    assert all(place.count("File ") == 1 and f'{__file__}", line {line}' in place for place in places) and places


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_activations_are_seen(reentrant: bool) -> None:
    def run() -> Any:
        return checkpoint(torch.tanh, torch.ones(2, requires_grad=True), use_reentrant=reentrant)

    with without_checkpoints(ValueError("recomputes")), pytest.raises(ValueError, match="recomputes"):
        run()
    assert run().shape == (2,)


def test_distributions_hold_no_values_against_what_they_may_be() -> None:
    with without_validation():
        torch.distributions.Normal(0.0, -1.0)
    with pytest.raises(ValueError):
        torch.distributions.Normal(0.0, -1.0)


class Stops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        return x + y


def test_what_leaves_a_region_without_gradients_is_detached() -> None:
    module = export(Stops(), torch.ones(2)).graph_module
    assert [name for name in targets(module.graph) if "grad" in name] == ["wrap_with_set_grad_enabled"]
    assert detach_without_gradients(module)
    (inner,) = (child for child in module.children() if isinstance(child, torch.fx.GraphModule))
    assert targets(inner.graph)[-1] == "aten.detach.default"


@pytest.mark.parametrize("zipped", [True, False])
def test_files_are_read_into_real_storages_under_a_mode(tmp_path: Path, zipped: bool) -> None:
    torch.save(torch.arange(3.0), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    seen = []

    class Reader(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is aten.set_:
                seen.append(args[1])
                return args[0]
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Reader(), loads_with_numbers():
        torch.load(tmp_path / "x.pt")
    assert [storage.tolist() for storage in seen] == [torch.arange(3.0).view(torch.uint8).tolist()]
