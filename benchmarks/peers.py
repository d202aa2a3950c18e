"""``make bench``: parc and its peers in turn in one run, on two gloo ranks of one thread each.

The model is a Llama of 20 M parameters, the optimizer torch's fused AdamW everywhere. Both sides run as they ship: parc
as ``parc run`` starts it, which keeps freed memory with the process (``runtime/launch/launch.py``) and chooses its
products (``runtime/machine/products.py``); its peers as Python or torchrun starts them. In further rows both have
torch's products; in the last ones both keep freed memory too, which shows what rewriting alone is worth. Prints a table
and writes ``bench.json``: a list of ``{"case", "parc_s", "peer", "peer_s", "ratio"}`` by minima; medians stand
beside them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.turns import LAUNCHED, ONE_THREAD, ROOT, in_turn, steps

PLAN = ROOT / "benchmarks" / "llama20m.parc"
BATCH, LENGTH, VOCAB = 8, 128, 8192
SAME_PRODUCTS = "same products"
ALIKE = f"{SAME_PRODUCTS} and memory"
Step = Callable[[], float]


def batch() -> dict[str, torch.Tensor]:
    """Return the whole batch, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=generator)
    return {"input_ids": words[0], "targets": words[1]}


@contextmanager
def without_onednn(off: bool) -> Iterator[None]:
    """Enter a block in which torch uses no products but its own, if ``off``. The warning about another library's TF32
    is silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=not off):
            yield


def parc_step(build: Path, case: str) -> Step:
    """Return a step of a build on this rank; in a case with the same products, with torch's own."""
    import parc

    with without_onednn(SAME_PRODUCTS in case):
        session = parc.load(build, compile=case.endswith("--compile"))
    data = batch()
    return lambda: session.step(data).loss


def plain_model(layers: int = 4) -> nn.Module:
    """Make the model as its user wrote it."""
    sys.path.insert(0, str(ROOT / "examples"))
    from llama import llama

    torch.manual_seed(0)
    return llama(layers=layers, width=512, heads=8, kv_heads=4, ffn=1408, vocab=VOCAB, length=LENGTH)


def train_step(model: nn.Module, rows: slice, optimizer: Optimizers) -> Step:
    """Return a step of an eager model on some rows of the batch."""
    data = batch()

    def step() -> float:
        optimizer.zero_grad()
        logits = model(data["input_ids"][rows]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), data["targets"][rows].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


class Optimizers:
    """torch's fused AdamW, as parc runs it: one for split tensors and one for plain ones, because torch does not mix
    them."""

    def __init__(self, model: nn.Module) -> None:
        groups: dict[type, list[Any]] = {}
        for parameter in model.parameters():
            groups.setdefault(type(parameter.data), []).append(parameter)
        self.all = [torch.optim.AdamW(g, lr=3e-4, weight_decay=0.1, fused=True) for g in groups.values()]

    def step(self) -> None:
        """Update all parameters once."""
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)


def ddp_step() -> Step:
    """Return a step of torch's data parallelism."""
    model = nn.parallel.DistributedDataParallel(plain_model())
    share = BATCH // dist.get_world_size()
    first = dist.get_rank() * share
    return train_step(model, slice(first, first + share), Optimizers(model))


def fsdp_step() -> Step:
    """Return a step of torch's FSDP2, each layer a unit and the rest one more."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = plain_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    share = BATCH // dist.get_world_size()
    first = dist.get_rank() * share
    return train_step(model, slice(first, first + share), Optimizers(model))


def zero_optimizer_step() -> Step:
    """Return a step of torch's data parallelism with its optimizer whose state is divided among the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model: Any = nn.parallel.DistributedDataParallel(plain_model())
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True
    )
    share = BATCH // dist.get_world_size()
    first = dist.get_rank() * share
    return train_step(model, slice(first, first + share), optimizer)


def dtensor_step() -> Step:
    """Return a step of torch's ``parallelize_module``, with the layers split as in the plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = plain_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(4):
        at = f"model.layers.{index}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            layout[f"{at}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layout[f"{at}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, layout)
    return train_step(model, slice(0, BATCH), Optimizers(model))


def compiled_step() -> Step:
    """Return a step of the plain module under ``torch.compile``."""
    model = plain_model()
    compiled: Any = torch.compile(model)
    return train_step(compiled, slice(0, BATCH), Optimizers(model))


def plain_step() -> Step:
    """Return a step of the plain module."""
    model = plain_model()
    return train_step(model, slice(0, BATCH), Optimizers(model))


CASES: dict[str, tuple[int, dict[str, int], str, Callable[[], Step]]] = {
    f"{case}{settings}": (ranks, {"dp": dp, "tp": tp, "zero": zero}, peer, step)
    for settings in ("", f", {SAME_PRODUCTS}", f", {ALIKE}")
    for case, ranks, dp, tp, zero, peer, step in (
        ("one rank", 1, 1, 1, 0, "plain module", plain_step),
        ("one rank --compile", 1, 1, 1, 0, "torch.compile", compiled_step),
        ("dp=2", 2, 2, 1, 0, "DDP", ddp_step),
        ("dp=2, zero 1", 2, 2, 1, 1, "DDP, ZeRO-1", zero_optimizer_step),
        ("dp=2, zero 3", 2, 2, 1, 3, "FSDP2", fsdp_step),
        ("tp=2", 2, 1, 2, 0, "DTensor", dtensor_step),
    )
    if not (settings and "--compile" in case)
}
"""The measured pairs, parc and a peer, by name: as both ship, with the same products, and with memory kept too."""


def worker(case: str, build: Path, times: int, out: Path, side: str, port: str) -> None:
    """Run one rank of one side of a case."""
    torch.set_num_threads(1)
    ranks, _, _, peer = CASES[case]
    if ranks > 1:
        dist.init_process_group("gloo")
    seconds = steps(parc_step(build, case) if side == "parc" else peer(), side, port, times)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (out / f"{side}.json").write_text(json.dumps(seconds), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind that abort an interpreter on its way out


def launch(case: str, folder: Path, times: int) -> tuple[list[float], list[float]]:
    """Build the case's plan and measure it against its peer."""
    ranks, axes, _, _ = CASES[case]
    build = folder / f"llama20m-dp{axes['dp']}-tp{axes['tp']}-zero{axes['zero']}"
    words = [word for axis, size in axes.items() for word in ("-D", f"{axis}={size}")]
    subprocess.run(
        [sys.executable, "-m", "parc", "build", str(PLAN), "-o", str(build), *words],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    script = ["-m", "benchmarks.peers", "--worker", case, str(build), str(times), str(folder)]
    peers = LAUNCHED if case.endswith(ALIKE) else ONE_THREAD
    in_turn({"parc": (script, LAUNCHED), "peer": (script, peers)}, ranks, times)
    ours, theirs = (json.loads((folder / f"{side}.json").read_text(encoding="utf-8")) for side in ("parc", "peer"))
    return ours, theirs


def main(times: int, wanted: str = "") -> None:
    """Run every case whose name has ``wanted`` in it, print the table and write ``bench.json``."""
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"{'case':<36}{'parc (s)':>20}{'peer':>15}{'peer (s)':>20}{'ratio of minima':>17}{'of medians':>12}")
    for case, (_, _, peer, _) in CASES.items():
        if wanted not in case:
            continue
        ours, theirs = launch(case, folder, times)
        best = min(ours), min(theirs)
        middle = statistics.median(ours), statistics.median(theirs)
        rows.append({"case": case, "parc_s": best[0], "peer": peer, "peer_s": best[1], "ratio": best[0] / best[1],
                      "parc_median_s": middle[0], "peer_median_s": middle[1]})  # fmt: skip
        columns = [f"{low:.3f} (median {mid:.3f})" for low, mid in zip(best, middle, strict=True)]
        ratios = f"{best[0] / best[1]:>13.2f}{middle[0] / middle[1]:>12.2f}"
        print(f"{case:<36}{columns[0]:>22}{peer:>15}{columns[1]:>22}{ratios}")
    (ROOT / "bench.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6], sys.argv[7])
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, *sys.argv[2:3])
