"""``make bench-peaks``: the memory of a rank, as reports give it, and as a step takes it, followed tensor by tensor
(``storages.py``). A convolution's own room, which no tensor has, is in the pages of the process.

The first table has ZeRO 3 beside torch's FSDP2 with each layer a unit, on four gloo ranks, for the Llama of 20 M
parameters of ``peers.py``. The second has builds of a Llama of 5 M parameters, and of a GPT whose embedding and head
are one weight, under each library that may multiply, whichever is the faster here. Each is beside its estimate: the
role whose estimate is furthest from what the largest of its ranks takes. Steps before the measured one have made the
optimizer's state.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import parc
from benchmarks.command import Table, command
from benchmarks.peers import PLAN as LLAMA
from benchmarks.peers import fsdp_step
from benchmarks.sides import built, kernel_bytes, text_of
from benchmarks.storages import Storages
from benchmarks.turns import LAUNCHED, ONE_THREAD, ROOT, Side, run
from parc.compiler.analysis.products import BLAS, LIBRARIES, ONEDNN, Products
from parc.compiler.torch_private import onednn_linear
from parc.report import memory_by_library, plan_of
from parc.runtime.machine import products
from parc.runtime.state.offload import MappedFiles
from parc.runtime.state.opening import build_mesh, open_build

MODEL = """\
model     "{examples}/llama.py:llama" (layers=4, width=256, heads=8, kv_heads=4, ffn=704, vocab=4096, length=128)
verify    layers=2, width=64, heads=8, kv_heads=4, ffn=96, vocab=128
input     input_ids int64 [B, S]
input     targets int64 [B, S]
sizes     B=16, S=128
loss      cross_entropy(output.logits, targets)
optimizer adamw lr 3e-4 weight_decay 0.1 clip 1.0
seed      1
data      synthetic
"""
TIED = """\
model     "{examples}/gpt.py:GPT" (layers=2, width=128, heads=4, vocab=16384, length=128)
verify    layers=1, width=32, heads=4, vocab=64
input     tokens  int64 [B, S]
input     targets int64 [B, S]
sizes     B=4, S=128
loss      cross_entropy(output, targets)
optimizer adamw lr 3e-4 weight_decay 0.1 clip 1.0
seed      1
data      synthetic
"""
ATTENTION = """\
model     "{root}/benchmarks/peak_models.py:Attention" (width=64, heads=4, vocab=256)
input     tokens  int64 [B, S]
input     targets int64 [B, S]
sizes     B=8, S=256
loss      cross_entropy(output, targets)
optimizer adamw lr 3e-4
seed      1
data      synthetic
"""
IMAGES = """\
model     "{root}/benchmarks/peak_models.py:Convolutions" (width=64, layers=1)
input     pixels float32 [B, 3, 64, 64]
input     labels int64 [B]
sizes     B=16
loss      cross_entropy(output, labels)
optimizer adamw lr 3e-4
seed      1
data      synthetic
"""
SPLIT = """\
column    model.layers.*.self_attn.{q,k,v}_proj over tp
row       model.layers.*.self_attn.o_proj over tp
column    model.layers.*.mlp.{gate,up}_proj over tp
row       model.layers.*.mlp.down_proj over tp
vocab     model.embed_tokens, lm_head over tp
"""
BATCH = "shard     input_ids, targets [B/dp, _]\n"
PIPELINE = "stage     before model.layers.2 over pp\nschedule  1f1b microbatches 4\n"


@dataclass(frozen=True)
class Case:
    """A configuration: its name, its ranks, its lines beside the model's, and these."""

    name: str
    ranks: int
    lines: str
    model: str = MODEL
    pages: bool = False
    """True where the peak is that of the process's pages, which have what operators take and give back within, too."""


def updated_by(optimizer: str) -> Case:
    """Return the case of another optimizer, with so many microbatches that the update has the peak."""
    model = MODEL.replace("adamw lr 3e-4 weight_decay 0.1 clip 1.0", optimizer)
    return Case(optimizer, 1, "schedule microbatches 16\n", model)


CASES = (
    Case("plain", 1, ""),
    Case("4 microbatches", 1, "schedule microbatches 4\n"),
    Case("tp=2", 2, "mesh tp=2\n" + SPLIT),
    Case("dp=2", 2, "mesh dp=2\n" + BATCH),
    Case("dp=2, zero 1", 2, "mesh dp=2\n" + BATCH + "zero 1 over dp\n"),
    Case("dp=2, zero 2, 2 microbatches", 2, "mesh dp=2\n" + BATCH + "zero 2 over dp\nschedule microbatches 2\n"),
    Case("dp=4, zero 3", 4, "mesh dp=4\n" + BATCH + "zero 3 over dp\n"),
    Case("dp=2, zero 3, bf16", 2, "mesh dp=2\n" + BATCH + "zero 3 over dp\nprecision bf16\n"),
    Case("dp=2, tp=2, zero 3", 4, "mesh dp=2, tp=2\n" + BATCH + SPLIT + "zero 3 over dp\n"),
    Case("pp=2, dp=2, zero 1, 4 microbatches", 4, "mesh pp=2, dp=2\n" + BATCH + PIPELINE + "zero 1 over dp\n"),
    Case("offload of all three", 1, 'offload optimizer, parameters, activations to "{folder}/state"\n'),
    Case("dp=2, zero 1, fp16", 2, "mesh dp=2\n" + BATCH + "zero 1 over dp\nprecision fp16 loss_scale dynamic\n"),
    Case("bf16", 1, "precision bf16\n"),
    Case("bf16, 4 microbatches", 1, "precision bf16\nschedule microbatches 4\n"),
    Case("bf16, 4 microbatches, accumulate bf16", 1, "precision bf16\nschedule microbatches 4 accumulate bf16\n"),
    Case("4 microbatches, accumulate bf16", 1, "schedule microbatches 4 accumulate bf16\n"),
    Case("dp=2, zero 1, bf16, 4 microbatches", 2,
         "mesh dp=2\n" + BATCH + "zero 1 over dp\nprecision bf16\nschedule microbatches 4\n"),
    Case("tied", 1, "", TIED),
    Case("tied, 4 microbatches", 1, "schedule microbatches 4\n", TIED),
    Case("tied, 4 microbatches, bf16", 1, "precision bf16\nschedule microbatches 4\n", TIED),
    updated_by("adagrad lr 1e-2 weight_decay 0.1"),
    updated_by("adadelta lr 1.0 weight_decay 0.1"),
    updated_by("sgd lr 1e-2 momentum 0.9 weight_decay 0.1"),
    updated_by("nadam lr 1e-3 weight_decay 0.1"),
    updated_by("radam lr 1e-3 weight_decay 0.1"),
    updated_by("adamax lr 1e-3 weight_decay 0.1"),
    updated_by("rmsprop lr 1e-3 weight_decay 0.1"),
    Case("attention with dropout", 1, "", ATTENTION),
    Case("attention with dropout, bf16", 1, "precision bf16\n", ATTENTION),
    Case("attention, values of another width", 1, "", ATTENTION.replace("=256)", "=256, value=32, dropout=0.0)")),
    Case("convolution with BatchNorm", 1, "", IMAGES, pages=True),
    Case("convolution with BatchNorm, 4 microbatches", 1, "schedule microbatches 4\n", IMAGES, pages=True),
)  # fmt: skip


def fsdp_peak() -> int:
    """Return the peak of this rank under FSDP2, in bytes."""
    storages = Storages()
    with storages:
        return storages.peak_of(fsdp_step())


PAGES = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings of the allocator of glibc under which memory that is freed leaves the process."""


def parc_peak(build: Path, library: str, pages: bool) -> int:
    """Return the peak of this rank of a build on its own data, in bytes, with a library that multiplies. What is loaded
    from files takes memory, as on an accelerator: a CPU reads it where it lies. With ``pages`` it is the rank's tensors
    before a step, and how far the process's pages grow in it."""
    products._is_faster = lambda threads: library == ONEDNN.name  # type: ignore[assignment]
    MappedFiles.load = lambda place, value, device: value.clone()  # type: ignore[method-assign, assignment]
    storages = Storages()
    with storages:
        step = parc.load(build).step
        peak = storages.peak_of(step)
        if not pages:
            return peak
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # pages that an earlier step left free are no room of this one
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the most pages count from those now
        before = storages.bytes - kernel_bytes("/proc/self/status", "VmRSS")
        step()
        return before + kernel_bytes("/proc/self/status", "VmHWM")


def by_role(build: Path, peaks: list[int], library: Products) -> Iterator[tuple[int, int]]:
    """Yield, for each role, its estimate and the peak of the largest of its ranks, in bytes."""
    opened = open_build(build)
    mesh, plan = build_mesh(opened), plan_of(opened)
    for role in opened.roles.values():
        of_role = [peak for rank, peak in enumerate(peaks) if opened.role_at(mesh.coordinates(rank)).name == role.name]
        yield memory_by_library(opened, plan, role)[library.name].peak_bytes, max(of_role)


def beside_fsdp(folder: Path) -> None:
    """Print the table of ZeRO 3 and FSDP2."""
    build = built(folder / "llama20m", text_of(LLAMA) + "data      synthetic\n", dp=4, zero=3)
    ours, theirs = (
        max(run(side)) for side in (Side(parc_peak, (build, BLAS.name, False), 4), Side(fsdp_peak, ranks=4))
    )
    table = Table("dp=4", "peak, MB")
    table.row("parc, zero 3", f"{ours / 1e6:.1f}")
    table.row("FSDP2", f"{theirs / 1e6:.1f}")
    table.row("ratio", f"{ours / theirs:.2f}")
    print()


def beside_estimates(folder: Path, wanted: str) -> None:
    """Print the table of builds."""
    libraries = LIBRARIES if onednn_linear() is not None else (BLAS,)
    heads = [head for library in libraries for head in (f"{library.name}: estimate, MB", "peak, MB", "off by")]
    table = Table("", "ranks", *heads, names=38)
    for number, case in enumerate(case for case in CASES if wanted in case.name):
        text = (case.model + case.lines).replace("{examples}", str(ROOT / "examples"))
        text = text.replace("{root}", str(ROOT)).replace("{folder}", str(folder))
        build = built(folder / f"case{number}", text)
        cells = []
        for library in libraries:
            settings = ONE_THREAD | PAGES if case.pages else LAUNCHED
            peaks = run(Side(parc_peak, (build, library.name, case.pages), case.ranks, settings))
            estimate, peak = max(by_role(build, peaks, library), key=lambda row: abs(row[0] / row[1] - 1))
            cells += [f"{estimate / 1e6:.2f}", f"{peak / 1e6:.2f}", f"{estimate / peak - 1:+.1%}"]
        table.row(case.name, case.ranks, *cells)


def main(wanted: str = "") -> None:
    """Print both tables; with ``wanted`` only the builds whose name has this in it."""
    with tempfile.TemporaryDirectory() as folder:
        if not wanted:
            beside_fsdp(Path(folder))
        beside_estimates(Path(folder), wanted)


if __name__ == "__main__":
    command(main)
