"""``make bench-fit``: the choices of ``recompute … fit`` for five sizes, beside what a step takes and torch's budget.

The model is a Llama of 12 M parameters on one rank, whose activations are most of its memory. The sizes go in equal
steps from what a step takes with all blocks made again to what it takes without a line. Peaks are followed tensor by
tensor (``storages.py``), and products counted as they run. Torch's peaks are those of the same step under
``torch.compile`` with ``torch._functorch.config.activation_memory_budget`` from 0 to 1, run operator by operator.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peaks import WARM_UP, built
from benchmarks.peers import without_onednn
from benchmarks.storages import Storages
from benchmarks.turns import LAUNCHED, ROOT

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

        from benchmarks.kept import module_of_examples, partitioned

        torch._functorch.config.activation_memory_budget = budget
        llama = module_of_examples("llama")
        self.model = llama.llama(layers=LAYERS, width=WIDTH, heads=8, kv_heads=4, ffn=704, vocab=VOCAB, length=LENGTH)
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


def worker(side: str, what: str) -> None:
    """Train, and print the peak of a step and its FLOPs."""
    torch.set_num_threads(1)
    storages, counter = Storages(), FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    if side == "torch":
        trained = Torch(float(what))
        for mode in (None, None, storages, flop_counter._FlopCounterMode(counter)):
            trained.step(mode)
        peak = storages.peak + trained.bytes
    else:
        import parc

        with storages, without_onednn(True):  # whose products torch's counter does not know
            session = parc.load(what)
            for _ in range(WARM_UP):
                session.step()
            gc.collect()
            storages.peak = storages.bytes
            session.step()
        peak = storages.peak
        with counter:
            session.step()
    print(json.dumps([peak, counter.get_total_flops()]), flush=True)
    os._exit(0)


def measured(side: str, what: object) -> tuple[int, int]:
    """Return the peak of a step in bytes, and its FLOPs."""
    command = [sys.executable, "-m", "benchmarks.fit", side, str(what)]
    done = subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **LAUNCHED}, stdout=subprocess.PIPE)
    peak, flops = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return peak, flops


def report_of(folder: Path, line: str) -> dict[str, Any]:
    """Build the plan with a line, and return the report."""
    plan = folder / "fit.parc"
    plan.write_text(PLAN + line, encoding="utf-8")
    report: dict[str, Any] = json.loads((built(plan, folder / "build") / "report.json").read_text())
    return report


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        most = report_of(folder, "")["memory"][0]["peak_bytes"]
        _, plain = measured("parc", folder / "build")
        least = report_of(folder, "recompute model.layers.*\n")["memory"][0]["peak_bytes"]
        print("| fit, MB | in full | but for products | estimate, MB | peak, MB | off by | more FLOPs | counted |")
        print("|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
        for part in reversed(PARTS):
            size = int(least + part * (most - least))
            (row,) = report_of(folder, f"recompute model.layers.* fit {size}B\n")["recompute"]["roles"]
            peak, flops = measured("parc", folder / "build")
            estimate = row["peak_bytes"]
            cells = f"{size / 1e6:.2f} | {row['full']} | {row['selective']} | {estimate / 1e6:.2f} | {peak / 1e6:.2f}"
            more = f"{estimate / peak - 1:+.1%} | {row['again']:.1%} | {flops / plain - 1:.1%}"
            print(f"| {cells} | {more} |", flush=True)
    print("\n| torch's budget | peak, MB | more FLOPs |\n|---:|---:|---:|")
    base = 0
    for part in reversed(PARTS):
        peak, flops = measured("torch", part)
        base = base or flops
        print(f"| {part} | {peak / 1e6:.2f} | {flops / base - 1:.1%} |", flush=True)


if __name__ == "__main__":
    worker(*sys.argv[1:]) if sys.argv[1:] else main()
