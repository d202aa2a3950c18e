"""``make bench``: parc and its peers in turn in one run, on two gloo ranks of one thread each.

The model is a Llama of 20 M parameters, the optimizer torch's fused AdamW everywhere. Both sides run as they ship: parc
as ``parc run`` starts it, which keeps freed memory with the process (``runtime/launch/launch.py``) and chooses its
products (``runtime/machine/products.py``); its peers as Python or torchrun starts them. In further rows both have
torch's products; in the last ones both keep freed memory too, which shows what rewriting alone is worth. Prints a table
and writes ``bench.json``: a list of ``{"case", "parc_s", "peer", "peer_s", "ratio"}`` by minima; medians stand
beside them. ``python -m benchmarks.peers TIMES NAME`` measures so many steps of the cases with a name in theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import parc
from benchmarks.command import Table, command
from benchmarks.sides import BUILDS, adamw, batch, built, share_of, train_step, without_onednn
from benchmarks.turns import LAUNCHED, ONE_THREAD, ROOT, Side, Timed, in_turn, least_and_median

PLAN = ROOT / "benchmarks" / "llama20m.parc"
VOCAB = 8192
BATCH = batch(8, 128, VOCAB)
SAME_PRODUCTS = "same products"
ALIKE = f"{SAME_PRODUCTS} and memory"
Step = Callable[[], float]


def parc_step(build: Path, case: str) -> Step:
    """Return a step of a build on this rank; in a case with the same products, with torch's own."""
    with without_onednn(SAME_PRODUCTS in case):
        session = parc.load(build, compile=case.endswith("--compile"))
    return lambda: session.step(BATCH).loss


def plain_model(layers: int = 4) -> Any:
    """Make the model as its user wrote it."""
    from examples.llama import llama

    torch.manual_seed(0)
    return llama(layers=layers, width=512, heads=8, kv_heads=4, ffn=1408, vocab=VOCAB, length=128)


def plain_step() -> Step:
    """Return a step of the plain module."""
    model = plain_model()
    return train_step(model, BATCH, adamw(model))


def compiled_step() -> Step:
    """Return a step of the plain module under ``torch.compile``."""
    model = plain_model()
    compiled: Any = torch.compile(model)
    return train_step(compiled, BATCH, adamw(model))


def ddp_step() -> Step:
    """Return a step of torch's data parallelism."""
    model = nn.parallel.DistributedDataParallel(plain_model())
    return train_step(model, share_of(BATCH), adamw(model))


def zero_optimizer_step() -> Step:
    """Return a step of torch's data parallelism with its optimizer whose state is divided among the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(plain_model())
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True
    )
    return train_step(model, share_of(BATCH), optimizer)


def fsdp_step() -> Step:
    """Return a step of torch's FSDP2, each layer a unit and the rest one more."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train_step(model, share_of(BATCH), adamw(model))


def dtensor_step() -> Step:
    """Return a step of torch's ``parallelize_module``, with the layers split as in the plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = plain_model()
    layout: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        layout[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layout[f"model.layers.*.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), layout)
    return train_step(model, BATCH, adamw(model))


PEERS: dict[str, tuple[int, dict[str, int], str, Callable[[], Step]]] = {
    "one rank": (1, {"dp": 1, "tp": 1, "zero": 0}, "plain module", plain_step),
    "one rank --compile": (1, {"dp": 1, "tp": 1, "zero": 0}, "torch.compile", compiled_step),
    "dp=2": (2, {"dp": 2, "tp": 1, "zero": 0}, "DDP", ddp_step),
    "dp=2, zero 1": (2, {"dp": 2, "tp": 1, "zero": 1}, "DDP, ZeRO-1", zero_optimizer_step),
    "dp=2, zero 3": (2, {"dp": 2, "tp": 1, "zero": 3}, "FSDP2", fsdp_step),
    "tp=2": (2, {"dp": 1, "tp": 2, "zero": 0}, "DTensor", dtensor_step),
}
"""The ranks of each pair, the values that parc's plan gets, and the peer: its name and what returns its step."""
CASES = {
    f"{name}{settings}": name
    for settings in ("", f", {SAME_PRODUCTS}", f", {ALIKE}")
    for name in PEERS
    if not (settings and "--compile" in name)
}
"""The measured cases and their pairs: as both ship, with the same products, and with memory kept too."""


def parc_side(timed: Timed, build: Path, case: str) -> list[float]:
    """Return the seconds of parc's steps."""
    return timed(parc_step(build, case))


def peer_side(timed: Timed, name: str) -> list[float]:
    """Return the seconds of a peer's steps."""
    return timed(PEERS[name][-1]())


HEADS = ("parc (s)", "median", "peer", "peer (s)", "median", "ratio of minima", "of medians")


def compared(case: str, ours: Sequence[float], peer: str, theirs: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
    """Return the seconds of both sides as a row of JSON, and as the cells of a table under ``HEADS``."""
    (best, middle), (peer_best, peer_middle) = map(least_and_median, (ours, theirs))
    row = {"case": case, "parc_s": best, "peer": peer, "peer_s": peer_best, "ratio": best / peer_best,
           "parc_median_s": middle, "peer_median_s": peer_middle}  # fmt: skip
    times = [f"{seconds:.3f}" for seconds in (best, middle, peer_best, peer_middle)]
    return row, [*times[:2], peer, *times[2:], f"{best / peer_best:.2f}", f"{middle / peer_middle:.2f}"]


def main(times: int = 10, wanted: str = "") -> None:
    """Run every case whose name has ``wanted`` in it, print the table and write ``bench.json``."""
    rows, table = [], Table("case", *HEADS, names=32)
    for case, pair in CASES.items():
        if wanted not in case:
            continue
        ranks, values, peer, _ = PEERS[pair]
        build = built(BUILDS / f"llama20m-{'-'.join(f'{name}{size}' for name, size in values.items())}", PLAN, **values)
        sides = {
            "parc": Side(parc_side, (build, case), ranks),
            "peer": Side(peer_side, (pair,), ranks, LAUNCHED if case.endswith(ALIKE) else ONE_THREAD),
        }
        seconds = in_turn(sides, times)
        row, cells = compared(case, seconds["parc"][0], peer, seconds["peer"][0])
        rows.append(row)
        table.row(case, *cells)
    (ROOT / "bench.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
