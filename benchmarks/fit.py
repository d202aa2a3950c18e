"""``make bench-fit``: the choices of ``recompute … fit`` for five sizes, beside what a step takes and torch's budget.

The model is a Llama of 12 M parameters on one rank, whose activations are most of its memory. The sizes go in equal
steps from what a step takes with all blocks made again to what it takes without a line. Peaks are followed tensor by
tensor (``storages.py``), and products counted as they run. Torch's peaks are those of the same step under
``torch.compile`` with ``torch._functorch.config.activation_memory_budget`` from 0 to 1, run operator by operator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import parc
from benchmarks.command import Table, command
from benchmarks.sides import built, report_in, without_onednn
from benchmarks.storages import Storages
from benchmarks.turns import ROOT, Side, run

LAYERS, WIDTH, BATCH, LENGTH, VOCAB = 8, 256, 8, 256, 512
PLAN = f"""\
model     "{ROOT}/examples/llama.py:llama" (layers={LAYERS}, width={WIDTH}, heads=8, kv_heads=4, ffn=704, vocab={VOCAB})
verify    layers=6, width=64, heads=8, kv_heads=4, ffn=96, vocab=128
input     input_ids int64 [B, S]
input     targets int64 [B, S]
sizes     B={BATCH}, S={LENGTH}
loss      cross_entropy(output.logits, targets)
optimizer sgd lr 0.1
seed      1
data      synthetic
"""
UNCOUNTED: dict[Any, Any] = {
    torch.ops.aten.addmm_: lambda _, *pair, **more: flop_counter.mm_flop(*pair),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *of, **more: flop_counter.sdpa_flop_count(
        *of[:3]
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *of, **more: (
        flop_counter.sdpa_backward_flop_count(*of[:4])
    ),
}
"""Products that torch's counter leaves out."""
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Torch:
    """The plain model under torch's compiler, which keeps activations within a part of what it would keep. The compiler
    refuses to work under a mode that watches operators, so that one is entered inside what it has compiled."""

    def __init__(self, budget: float) -> None:
        import torch._functorch.config

        from benchmarks.kept import partitioned
        from examples.llama import llama

        torch._functorch.config.activation_memory_budget = budget
        self.model = llama(layers=LAYERS, width=WIDTH, heads=8, kv_heads=4, ffn=704, vocab=VOCAB, length=LENGTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.compiled: Any = torch.compile(self.model, backend=partitioned(self._watched))
        self.data = [torch.randint(VOCAB, (BATCH, LENGTH)) for _ in range(2)]
        self.mode: TorchDispatchMode | None = None

    def _watched(self, graph: fx.GraphModule, _: Any) -> Any:
        from functorch.compile import make_boxed_func

        def run(*arguments: Any) -> Any:
            watched = self.mode is not None and self.mode not in _get_current_dispatch_mode_stack()
            with self.mode if watched and self.mode is not None else nullcontext():
                return graph.forward(*arguments)

        return make_boxed_func(run)

    def step(self, mode: TorchDispatchMode | None = None) -> None:
        """Do one step, under a mode if there is one."""
        self.optimizer.zero_grad()
        self.mode, (ids, targets) = mode, self.data
        logits = self.compiled(ids).logits
        with mode or nullcontext():
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            self.optimizer.step()

    @property
    def bytes(self) -> int:
        """The bytes of the parameters, which were there before any mode."""
        return sum(parameter.nbytes for parameter in self.model.parameters())


def torch_figures(budget: float) -> tuple[int, int]:
    """Return the peak of a step of the plain model under a budget in bytes, and its FLOPs."""
    trained = Torch(budget)
    storages, counter = Storages(), FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    for mode in (None, None, storages, flop_counter._FlopCounterMode(counter)):
        trained.step(mode)
    return storages.peak + trained.bytes, counter.get_total_flops()


def parc_figures(build: Path) -> tuple[int, int]:
    """Return the peak of a step of a build in bytes, and its FLOPs."""
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    with Storages() as storages, without_onednn(True):  # whose products torch's counter does not know
        session = parc.load(build)
        peak = storages.peak_of(session.step)
    with counter:
        session.step()
    return peak, counter.get_total_flops()


def measured(figures: Callable[..., tuple[int, int]], *arguments: object) -> tuple[int, int]:
    """Return the peak and the FLOPs of a step in a process of its own."""
    ((peak, flops),) = run(Side(figures, arguments))
    return peak, flops


def report_of(folder: Path, line: str) -> dict[str, Any]:
    """Build the plan with a line, and return the report."""
    return report_in(built(folder / "build", PLAN + line))


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        most = report_of(folder, "")["memory"][0]["peak_bytes"]
        _, plain = measured(parc_figures, folder / "build")
        least = report_of(folder, "recompute model.layers.*\n")["memory"][0]["peak_bytes"]
        heads = ("in full", "but for products", "estimate, MB", "peak, MB", "off by", "more FLOPs", "counted")
        table = Table("fit, MB", *heads)
        for part in reversed(PARTS):
            size = int(least + part * (most - least))
            (row,) = report_of(folder, f"recompute model.layers.* fit {size}B\n")["recompute"]["roles"]
            peak, flops = measured(parc_figures, folder / "build")
            estimate = row["peak_bytes"]
            memory = f"{estimate / 1e6:.2f}", f"{peak / 1e6:.2f}", f"{estimate / peak - 1:+.1%}"
            more = f"{row['again']:.1%}", f"{flops / plain - 1:.1%}"
            table.row(f"{size / 1e6:.2f}", row["full"], row["selective"], *memory, *more)
    print()
    table, base = Table("torch's budget", "peak, MB", "more FLOPs"), 0
    for part in reversed(PARTS):
        peak, flops = measured(torch_figures, part)
        base = base or flops
        table.row(str(part), f"{peak / 1e6:.2f}", f"{flops / base - 1:.1%}")


if __name__ == "__main__":
    command(main)
