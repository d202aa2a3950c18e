"""The measurement of this machine for a cluster's file: lines of programs, run as a run runs them, by one rank alone
and by two at once."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parc.compiler.clock.cluster import rate_of_size
from parc.compiler.layout.mesh import Mesh
from parc.compiler.layout.placement import parse_type
from parc.compiler.program.text import parse_program
from parc.grammar.bounded import read_bounded, read_json
from parc.grammar.scratch import scratch
from parc.runtime.backends.distributed import Distributed
from parc.runtime.backends.in_process import InProcess
from parc.runtime.machine.execute import Machine
from parc.runtime.machine.kernels import KERNELS
from parc.runtime.ranks.parents import end_with_parent
from parc.runtime.ranks.processes import KEEP_MEMORY, keep_memory

_REPEATS, _MOST_REPEATS, _BUDGET_S, _MOST_COPIES = 4, 60, 0.08, 64
"""The runs of a probe in each round, of which the fastest counts: the least number (fewer where they take twice the
budget), the most, and the budget, the seconds after which no more are made; and the most copies of a line in a run."""
_MOST_SETS = 32
"""The most sets of operands with which a program of copies runs."""
_PAIRS = 15
"""The runs of products beside a message, and of the products alone, that are measured in turn."""
_ROUNDS = 2
"""The rounds in which one rank alone and two at once are measured in turn."""
_SHAPES = ((256, 256, 256), (512, 512, 512), (1024, 128, 512), (256, 2048, 128), (1024, 512, 64), (512, 512, 2048),
           (1024, 1024, 1024), (64, 1024, 1024), (1024, 1024, 64), (256, 1024, 256))  # fmt: skip
"""The products that are measured: rows, columns, inner dim."""
_SIZES = tuple(1 << power for power in (10, 13, 15, 17, 19, 21, 23))
"""The entries of the sums that are measured, of three tensors each."""
_ENTRIES = 1 << 18
"""The entries of other operators."""
_ON_DEVICE = 16
"""The factor by which a GPU gets more entries, as it has more to keep busy."""
_COLD = 3 << 26
"""The bytes of the operands of a probe's lines together, unless these are small or slow, so that none finds its own in
a cache, which servers' processors have hundreds of megabytes of: between two runs of a line, a step reads all of its
weights and activations."""
_EXPERTS, _ROWS = 8, (32, 256)
"""The experts of the grouped products that are measured, and the rows of each."""
_MESSAGES = (1 << 8, 1 << 18, 1 << 22)
"""The entries of collectives: latency, and two sizes for the bandwidth."""
_MESSAGE_BUDGET_S = 0.3
"""The budget of a message's runs, of which few fit in that of a line."""
_KEYS = (64, 256)
"""The keys of the attentions that are measured, of equally many tokens."""


@dataclass(frozen=True)
class TimedLine:
    """A line of a program that is timed: its operands with their types, its results' types, and its operator."""

    name: str
    operands: Mapping[str, str]
    line: str
    types: str
    results: int = 1

    def copy(self, at: int) -> TimedLine:
        """Return the line with operands of its own: their names end in a number."""
        words = re.compile(rf"\b({'|'.join(self.operands)})\b(?=[,)\]])")
        operands = {f"{name}{at}": type_ for name, type_ in self.operands.items()}
        return replace(self, operands=operands, line=words.sub(rf"\g<1>{at}", self.line))

    def local_bytes(self, mesh: Mesh, *, results: bool = True) -> int:
        """Return the bytes of its operands and ``results`` on one rank."""
        types = [*self.operands.values(), *(self.types.split("; ") if results else ())]
        return sum(parse_type(text, mesh).local_bytes(mesh) for text in types)


def program_text(mesh: str, lines: Sequence[TimedLine]) -> str:
    """Return a program of lines, each with operands of its own. It returns the first result of each."""
    copies = [line.copy(at) for at, line in enumerate(lines)]
    names = [[f"y{at}_{place}" for place in range(line.results)] for at, line in enumerate(copies)]
    return "\n".join([
        '"""parc program: role stage0, action F"""', "", f"mesh({mesh})", "", "", "def forward(",
        *(f'    {name}: "{type_}",  # input {name}' for line in copies for name, type_ in line.operands.items()), "):",
        *(f"    {', '.join(made)} = {line.line}  # {line.types} | - -"
          for made, line in zip(names, copies, strict=True)),
        "    return {", *(f'        "output {made[0]}": {made[0]},' for made in names), "    }", "",
    ])  # fmt: skip


def _unary(name: str, line: str, entries: int, kind: str = "f32") -> TimedLine:
    return TimedLine(name, {"x": f"{kind}[{entries // 64}, 64]"}, line, f"{kind}[{entries // 64}, 64]")


def product_probe(shape: Sequence[int], kind: str) -> TimedLine:
    """Return the probe of a product."""
    rows, columns, inner = shape
    operands = {"a": f"{kind}[{rows}, {inner}]", "b": f"{kind}[{inner}, {columns}]"}
    return TimedLine("product", operands, "aten.mm.default(a, b)", f"{kind}[{rows}, {columns}]")


def sum_probe(entries: int) -> TimedLine:
    """Return the probe of a line that reads two tensors and writes one."""
    type_ = f"f32[{entries}]"
    return TimedLine("sum", {"a": type_, "b": type_}, "aten.mul.Tensor(a, b)", type_)


def attention_probes(batch: int, heads: int, length: int, size: int) -> tuple[TimedLine, TimedLine]:
    """Return the probes of causal attention, and of its backward."""
    full, sums = f"f32[{batch}, {heads}, {length}, {size}]", f"f32[{batch}, {heads}, {length}]"
    operands, scale = {"q": full, "k": full, "v": full}, 1 / math.sqrt(size)
    forward = TimedLine("attention", operands, f"parc.attention.default(q, k, v, None, None, True, {scale}, 0.0)",
                    f"{full}; {sums}", 2)  # fmt: skip
    back = TimedLine(
        "attention_backward", {"g": full, **operands, "o": full, "s": sums},
        f"parc.attention_backward.default(g, q, k, v, None, None, o, s, True, {scale}, 0.0)",
        f"{full}; {full}; {full}", 3,
    )  # fmt: skip
    return forward, back


def operator_probes(entries: int) -> Iterator[TimedLine]:
    """Yield the probes of operators that may be slower than their bytes."""
    for name, more in (("gelu", ""), ("silu", ""), ("exp", ""), ("rsqrt", ""), ("cos", ""), ("sin", ""), ("log", ""),
                       ("tanh", ""), ("sigmoid", ""), ("_softmax", ", 1, False"), ("neg", "")):  # fmt: skip
        yield _unary(name, f"aten.{name}.default(x{more})", entries)
    pair = {"g": f"f32[{entries // 64}, 64]", "x": f"f32[{entries // 64}, 64]"}
    for name in ("gelu_backward", "silu_backward"):
        yield TimedLine(name, pair, f"aten.{name}.default(g, x)", f"f32[{entries // 64}, 64]")
    yield _unary("pow", "aten.pow.Tensor_Scalar(x, 2)", entries)
    yield TimedLine(
        "sum", {"x": f"f32[{entries // 64}, 64]"}, "aten.sum.dim_IntList(x, [1], True)", f"f32[{entries // 64}, 1]"
    )
    yield TimedLine("cat", pair, "aten.cat.default([g, x], -1)", f"f32[{entries // 64}, 128]")
    yield TimedLine("square_sum", {"x": f"f32[{entries}]"}, "parc.square_sum.default(x)", "f32[]")
    rows = entries // 64
    mask = f"parc.dropout_mask.default(k, [{rows}, 64], 0.1, torch.float32)"
    yield TimedLine("dropout_mask", {"k": "i64[]"}, mask, f"f32[{rows}, 64]")
    yield TimedLine(
        "lookup", {"t": "f32[512, 64]", "i": f"i64[{rows}]"}, "parc.lookup.default(t, i, -1)", f"f32[{rows}, 64]"
    )
    yield TimedLine("lookup_backward", {"g": f"f32[{rows}, 64]", "i": f"i64[{rows}]"},
                "parc.lookup_backward.default(g, i, 512, -1)", "f32[512, 64]")  # fmt: skip
    yield TimedLine("embedding_dense_backward", {"g": f"f32[{rows}, 64]", "i": f"i64[{rows}]"},
                "aten.embedding_dense_backward.default(g, i, 512, -1, False)", "f32[512, 64]")  # fmt: skip
    yield TimedLine("embedding", {"t": "f32[512, 64]", "i": f"i64[{rows}]"}, "aten.embedding.default(t, i)",
                f"f32[{rows}, 64]")  # fmt: skip
    yield from norm_probes(rows)
    yield from loss_probes(entries // 1024)


def loss_probes(rows: int) -> Iterator[TimedLine]:
    """Yield the probes of the parts of a cross-entropy of 1,024 logits a row."""
    logits = {"x": f"f32[{rows}, 1024]", "m": f"f32[{rows}, 1]", "i": f"i64[{rows}]"}
    yield TimedLine("row_max", {"x": logits["x"]}, "parc.row_max(x, '')", logits["m"])
    yield TimedLine("loss_parts", logits, "parc.loss_parts.default(x, m, i)", f"f32[2, {rows}]")
    yield TimedLine(
        "loss_parts_backward", {"g": f"f32[2, {rows}]", **logits}, "parc.loss_parts_backward.default(g, x, m, i)",
        logits["x"],
    )  # fmt: skip


def norm_probes(rows: int) -> Iterator[TimedLine]:
    """Yield the probes of a layer norm of rows of 64 entries, and of its backward."""
    norm = {"x": f"f32[{rows}, 64]", "w": "f32[64]", "b": "f32[64]"}
    yield TimedLine("native_layer_norm", norm, "aten.native_layer_norm.default(x, [64], w, b, 1e-05)",
                f"f32[{rows}, 64]; f32[{rows}, 1]; f32[{rows}, 1]", 3)  # fmt: skip
    yield TimedLine(
        "native_layer_norm_backward", {"g": f"f32[{rows}, 64]", **norm, "m": f"f32[{rows}, 1]", "r": f"f32[{rows}, 1]"},
        "aten.native_layer_norm_backward.default(g, x, [64], m, r, w, b, [True, True, True])",
        f"f32[{rows}, 64]; f32[64]; f32[64]", 3,
    )  # fmt: skip


def mixed_probes() -> Iterator[TimedLine]:
    """Yield lines of 64 entries as a block of a transformer has them, forward and backward: half of them are views."""
    square, row = "f32[8, 8]", "f32[64]"
    views = (("reshape.default(x, [64])", row), ("reshape.default(x, [1, 8, 8])", "f32[1, 8, 8]"),
             ("transpose.int(x, 0, 1)", square), ("t.default(x)", square))  # fmt: skip
    for line, type_ in views * 2:
        yield TimedLine("view", {"x": square}, f"aten.{line}", type_)
    yield from (product_probe((8, 8, 8), "f32"), product_probe((8, 8, 8), "f32"), sum_probe(64))
    yield TimedLine("sum", {"x": square}, "aten.sum.dim_IntList(x, [0], True)", "f32[1, 8]")
    yield TimedLine("cat", {"x": square, "z": square}, "aten.cat.default([x, z], -1)", "f32[8, 16]")
    yield _unary("gelu", "aten.gelu.default(x)", 64)
    yield TimedLine("gelu_backward", {"g": square, "x": square}, "aten.gelu_backward.default(g, x)", square)
    yield from norm_probes(1)
    yield from attention_probes(1, 1, 8, 8)


def message_probes(entries: int) -> Iterator[TimedLine]:
    """Yield the probes of collectives over two ranks, whose whole tensor has so many entries."""
    rows = entries // 64
    yield TimedLine("all_reduce", {"x": f"f32[{rows}, 64] +dp"}, "parc.all_reduce(x, 'dp')", f"f32[{rows}, 64]")
    yield TimedLine("all_gather", {"x": f"f32[{rows}/dp, 64]"}, "parc.all_gather(x, 'dp', 0, 1)", f"f32[{rows}, 64]")
    yield TimedLine(
        "reduce_scatter", {"x": f"f32[{rows}, 64] +dp"}, "parc.reduce_scatter(x, 'dp', 0, 1)", f"f32[{rows}/dp, 64]"
    )
    yield TimedLine(
        "all_to_all", {"x": f"f32[{rows}/dp, 64]"}, "parc.all_to_all(x, 'dp', 0, 1, 1, 1)", f"f32[{rows}, 64/dp]"
    )


class _Pool:
    """Random numbers of which operands are slices, one behind the other, from the first again after the last. Memory
    of its own for each operand would take most of a measurement: a kernel clears what a process has not had."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        drawn = torch.randn(min(count, 1 << 20), device=device).to(dtype)  # to draw takes longer than to repeat
        self._numbers = drawn.repeat(math.ceil(count / len(drawn)))
        self.count, self._at = len(self._numbers), 0

    def take(self, count: int) -> torch.Tensor:
        """Return the next numbers, at most ``count`` of the pool."""
        begin = self._at if self._at + count <= self.count else 0
        self._at = begin + math.ceil(count / 64) * 64  # each begins at a line of the cache
        return self._numbers[begin : begin + count]


class Bench:
    """The bench of one rank among those that measure at once."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.mesh = Mesh.parse(f"dp={world}") if world > 1 else Mesh()
        self._pools: dict[torch.dtype, _Pool] = {}

    def seconds(self, *lines: TimedLine, budget: float = _BUDGET_S) -> float:
        """Return the least time of lines, each with other operands whenever it runs. Lines that are slow beside their
        bytes, as bfloat16 products of a processor without them, get no more copies than they run in the budget."""
        read = sum(line.local_bytes(self.mesh, results=False) for line in lines)
        alone = self.fastest(self._run_of(lines), 2)
        if alone > budget:
            return alone
        count = max(1, min(_MOST_COPIES, math.ceil(_COLD / read), int(_BUDGET_S / alone)))
        sets = min(_MOST_SETS, math.ceil(_COLD / (read * count)))
        run = self._run_of(lines * count, sets)
        run()  # the first one gets the memory of its results from the kernel, and may take the budget for that
        return self.fastest(run, budget=budget) / count

    def _run_of(self, lines: tuple[TimedLine, ...], sets: int = 1) -> Callable[[], float]:
        """Return a function that runs a program of these lines, with each of so many sets of operands in turn, and
        returns the seconds that it took."""
        program = parse_program(program_text(str(self.mesh), lines))
        backend: Any = InProcess(self.mesh)
        if self.world > 1:
            backend = Distributed(self.mesh, [program], self.rank, self.device)
        machine = Machine(program, backend, self.device, reuse=True)
        types = {value.name: (value.type.local(self.mesh), value.type.dtype) for value in program.main.parameters}
        values = [{name: self.tensor(*type_) for name, type_ in types.items()} for _ in range(sets)]
        turn = itertools.cycle(values)
        return lambda: self._once(machine, next(turn))

    def fastest(self, once: Callable[[], float], most: int = _MOST_REPEATS, budget: float = _BUDGET_S) -> float:
        """Return the least time of several runs, of the slower rank: all ranks make equally many."""
        best, spent, count = math.inf, 0.0, 0
        while count < most and (spent < budget or (count < _REPEATS and spent < 2 * budget)):
            seconds = torch.tensor([once()], dtype=torch.float64, device=self.device)
            if self.world > 1:
                torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
            best, spent, count = min(best, float(seconds)), spent + float(seconds), count + 1
        return best

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random numbers that nothing has read for as many bytes as a pool has."""
        if not dtype.is_floating_point:  # indices, which are few
            return torch.randint(0, 512, shape, device=self.device, dtype=dtype)
        count = math.prod(shape)
        if dtype not in self._pools or count > self._pools[dtype].count:
            self._pools[dtype] = _Pool(max(count, _COLD // dtype.itemsize), dtype, self.device)
        return self._pools[dtype].take(count).view(shape)

    def _once(self, machine: Any, values: Mapping[str, torch.Tensor]) -> float:
        if self.world > 1:
            torch.distributed.barrier()
        self._wait()
        begin = time.perf_counter()
        machine.run([dict(values)])
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def figures(bench: Bench) -> dict[str, Any]:
    """Return the times of all probes on this rank."""
    more = 1 if bench.device.type == "cpu" else _ON_DEVICE
    kinds = ("f32", "bf16")
    # a GPU's process runs ahead of it, so that only the launch of its kernels counts
    few = tuple(mixed_probes()) if bench.device.type == "cpu" else (sum_probe(64),)
    call = bench.seconds(*few) / len(few)
    result: dict[str, Any] = {
        "call": call,
        "products": {kind: [(*shape, bench.seconds(product_probe(shape, kind)))
                            for shape in ([s * math.isqrt(more) for s in shape] for shape in _SHAPES)]
                     for kind in kinds},
        "sums": [(12 * size_, bench.seconds(sum_probe(size_))) for size_ in (s * more for s in _SIZES)],
        "attention": [(keys, *_attention(bench, 1024 * more // keys, keys)) for keys in _KEYS],
        "operators": {probe.name: (probe.local_bytes(bench.mesh), bench.seconds(probe))
                      for probe in operator_probes(_ENTRIES * more)},
        "entries": _ENTRIES * more, "update": _update(bench, more),
        "grouped": [(rows * more, *_grouped(bench, rows * more)) for rows in _ROWS],
    }  # fmt: skip
    if bench.world > 1:
        result["messages"] = {
            entries: {probe.name: bench.seconds(probe, budget=_MESSAGE_BUDGET_S) for probe in message_probes(entries)}
            for entries in _MESSAGES
        }
        result["sends"] = {entries: _send(bench, entries) for entries in _MESSAGES}
        result["taken"] = _taken(bench)
    return result


def _attention(bench: Bench, batch: int, keys: int) -> tuple[int, list[tuple[int, float]]]:
    """Return the multiply-adds of a causal attention with 8 heads of 64 entries, counted without the hidden half, and
    the bytes and the least time of its forward and of its backward."""
    probes = attention_probes(batch, 8, keys, 64)
    return batch * 8 * keys * keys * 64, [(probe.local_bytes(bench.mesh), bench.seconds(probe)) for probe in probes]


def _grouped(bench: Bench, rows: int) -> tuple[int, int, float]:
    """Return the multiply-adds of a product over the packed rows of experts, so many of each, its bytes, and its least
    time."""
    tokens, size = rows * _EXPERTS, 512
    chosen = torch.zeros(_EXPERTS, tokens, dtype=torch.bool, device=bench.device)
    for at in range(_EXPERTS):
        chosen[at, at::_EXPERTS] = True
    moved = 4 * (2 * tokens * size + _EXPERTS * size * size)
    operands = [
        (bench.tensor((tokens, size)), bench.tensor((_EXPERTS, size, size))) for _ in range(math.ceil(_COLD / moved))
    ]
    product = KERNELS["parc.expert_linear.default"]

    def once() -> float:
        bench._wait()
        begin = time.perf_counter()
        for rows_, weights_ in operands:
            product(None, rows_, chosen, weights_, False, 1)
        bench._wait()
        return (time.perf_counter() - begin) / len(operands)

    return tokens * size * size, moved, bench.fastest(once)


def _update(bench: Bench, more: int) -> tuple[int, float]:
    """Return the bytes of an update of AdamW, and its least time."""
    count = (1 << 21) * more
    parameter = torch.zeros(count, device=bench.device)
    parameter.grad = torch.zeros(count, device=bench.device)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()

    def once() -> float:
        bench._wait()
        begin = time.perf_counter()
        optimizer.step()
        bench._wait()
        return time.perf_counter() - begin

    return 28 * count, bench.fastest(once)


def _send(bench: Bench, entries: int) -> float:
    """Return the least time of a message to the other rank and back, halved."""
    tensor = torch.zeros(entries, device=bench.device)

    def once() -> float:
        torch.distributed.barrier()
        begin = time.perf_counter()
        if bench.rank == 0:
            torch.distributed.send(tensor, 1)
            torch.distributed.recv(tensor, 1)
        else:
            torch.distributed.recv(tensor, 0)
            torch.distributed.send(tensor, 0)
        bench._wait()
        return (time.perf_counter() - begin) / 2

    return bench.fastest(once, budget=_MESSAGE_BUDGET_S)


def _taken(bench: Bench) -> float:
    """Return the part of a message's time during which the ranks' products stand still."""
    a = torch.randn(512, 512, device=bench.device)
    tensor = torch.zeros(_MESSAGES[-1], device=bench.device)

    def once(talk: bool, count: int) -> float:
        torch.distributed.barrier()
        bench._wait()
        begin = time.perf_counter()
        work = torch.distributed.all_reduce(tensor, async_op=True) if talk else None
        for _ in range(count):
            a @ a
        bench._wait()
        if work is not None:
            work.wait()
        bench._wait()
        return time.perf_counter() - begin

    alone = bench.fastest(lambda: once(True, 0))
    count = max(1, round(2 * alone / max(1e-6, bench.fastest(lambda: once(False, 8)) / 8)))
    # in turn, and the middle one of the differences: each is small beside what it is the difference of
    more = [once(True, count) - once(False, count) for _ in range(_PAIRS)]
    return min(1.0, max(0.0, statistics.median(more) / alone))


# ---- processes


def measured(ranks: Sequence[int], device: str) -> list[Any]:
    """Return the figures of this machine for each number of processes at once.

    They are measured in turn, twice, and of each the least counts: a machine that others use too is slow for minutes.
    """
    rounds = [[_figures_of(count, device) for count in ranks] for _ in range(_ROUNDS)]
    return [functools.reduce(_least, in_turn) for in_turn in zip(*rounds, strict=True)]


def _least(one: Any, other: Any) -> Any:
    """Return the figures of which each number is the lesser of two."""
    if isinstance(one, dict):
        return {key: _least(one[key], other[key]) for key in one}
    if isinstance(one, list):
        return [_least(*pair) for pair in zip(one, other, strict=True)]
    return min(one, other)


def _figures_of(ranks: int, device: str) -> dict[str, Any]:
    """Measure with so many processes at once; the figures of the first one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with scratch("measure") as folder:
        out = folder / "figures.json"
        # a run of one rank has no process of its own, whose environment could be set
        variables = {**os.environ, **(KEEP_MEMORY if ranks > 1 else {}), "OMP_NUM_THREADS": str(max(1, cores // ranks)),
                     "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}  # fmt: skip
        words = [sys.executable, "-m", "parc.measuring", str(ranks), device, str(folder / "store"), str(out)]
        words.append(str(os.getpid()))
        workers = [subprocess.Popen([*words, str(rank)], env=variables) for rank in range(ranks)]
        try:
            _wait_for_all(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return dict(read_json(out))


def _wait_for_all(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for the end of all processes, or the first that fails: the others would wait for it.

    Raises:
        RuntimeError: one failed.
    """
    codes: list[int | None] = [None]
    while None in codes:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            raise RuntimeError("a process that measures failed; its message is above")
        time.sleep(0.02)


def work(ranks: int, device: str, store: str, out: str, parent: int, rank: int) -> None:
    """Measure as one of several processes, which ``parent`` has started."""
    end_with_parent(parent)
    keep_memory()
    kind = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if ranks > 1:
        backend = "nccl" if device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    with torch.no_grad():
        result = figures(Bench(rank, ranks, kind))
    if rank == 0:
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


# ---- the file


def measured_text(name: str, alone: Mapping[str, Any], several: Mapping[str, Any] | None = None, *, device: str) -> str:
    """Return the text of a cluster's file, from the measurements of one rank and, if there are any, of two at once."""
    shared = several if device == "cpu" else None
    links = several["messages"] if several is not None else None
    memory = _memory(device)
    rows = [
        f"# {_machine(device)}, measured by `parc cluster measure` with torch {torch.__version__}: the fastest of"
        f" at least {_ROUNDS * _REPEATS} runs of each.",
        f'name = "{name}"',
        f'about = "{_machine(device)}"',
        f'kind = "{device}"',
        f'names = ["{_machine(device)}"]',
        *_device_rows(alone, "", several["taken"] if several is not None else 0.0, memory, device),
    ]
    rows += ["", "[links.node] # collectives of two ranks, by their latency and their largest size"]
    rows += _link_rows(several, links)
    rows += ["", "[links.network] # not measured: as inside the node", *_link_rows(several, links)]
    count = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    rows += ["", "[library]", 'algorithms = ["ring"]', "", "[node]", f"ranks = {max(1, count)}", "count = 1", ""]
    rows += ["[storage] # not measured: memory's own bandwidth, and a disk of 1 GB/s", f"host = {_rate(alone):.4g}"]
    rows += ["disk = 1e9", "", "[framework]", "context = 4e8 # torch in one process, resident", "communicator = 1e7"]
    if shared is not None:
        rows += [
            "",
            "# two ranks at once, which share the cores",
            *_device_rows(shared, "sharing.2.", shared["taken"], memory, device),
        ]
    return "\n".join(rows) + "\n"


def _device_rows(found: Mapping[str, Any], prefix: str, taken: float, memory: int, device: str) -> list[str]:
    """Return the sections of a device: peaks, products, memory, and operators."""
    call, rate = found["call"], _rate(found)
    table = [(size, size / (seconds - call)) for size, seconds in found["sums"] if seconds > 2 * call]
    words = {"f32": "fp32", "bf16": "bf16"}
    fits = {
        kind: fitted_products(found["products"][kind], size, call, table, device == "cpu")
        for kind, size in (("f32", 4), ("bf16", 2))
    }
    fit, peak = fits["f32"], fits["f32"].peak

    def computing(moved: float, seconds: float) -> float:
        """Return the seconds that are left beside what the clock adds for the call and the bytes."""
        return float(max(seconds - call - fit.reading * moved / rate_of_size(table, moved), 1e-9))

    attention = fitted_ramp(
        [(keys, 2 * work / peak, *(computing(*each) for each in both)) for keys, work, both in found["attention"]],
        (1.0, 2.5),
    )
    grouped = fitted_ramp([(rows, 2 * work / peak, computing(*each)) for rows, work, *each in found["grouped"]])
    slow = {}
    for name, (size, seconds) in found["operators"].items():
        extra = (seconds - call) / found["entries"]
        if extra > 1.3 * size / rate / found["entries"]:
            slow[name] = extra
    moved, seconds = found["update"]
    names = "attention", "attention_backward", "grouped"
    shares = dict(zip(names, (*attention.shares, *grouped.shares), strict=True))
    rows = ["", f"[{prefix}peak] # as fitted on {len(_SHAPES)} products"]
    rows += [f"{words[kind]} = {one.peak:.4g}" for kind, one in fits.items()]
    rows += [f"fp16 = {fits['bf16'].peak:.4g} # not measured: as bf16", f"fp64 = {peak / 2:.4g} # half of fp32"]
    rows += [
        "",
        f"[{prefix}device]",
        f"memory = {memory:.4g}",
        f"bandwidth = {rate:.4g} # the largest sum of two tensors",
    ]
    rows += [
        "streaming = 1.0",
        "launch = 0.0",
        f"call = {call:.3g} # a line of 64 entries",
    ]
    rows += [f"taken_by_messages = {taken:.3g} # of products beside an all-reduce"]
    rows += [f"update = {moved / seconds / rate:.3g} # AdamW over 2 M entries"]
    rows += ["", f"[{prefix}products] # as fitted on the products in float32, mean error {fit.error:.0%}"]
    rows += ["top = 1.0", f"ramp = {fit.ramp:.4g}", f"reading = {fit.reading:.4g}"]
    rows += [f"{name} = {min(1.0, value):.3g}" for name, value in shares.items()]
    rows += [f"attention_ramp = {attention.ramp} # as fitted on {_listed(_KEYS)} keys"]
    rows += [f"grouped_ramp = {grouped.ramp} # as fitted on {_listed(_ROWS)} rows of an expert"]
    rows += ["", f"[{prefix}operators] # seconds of an entry, where that is more than its bytes take"]
    rows += [f"{name} = {seconds:.3g}" for name, seconds in slow.items()]
    pairs = ", ".join(f"[{size}, {rate_:.3g}]" for size, rate_ in table)
    if prefix:
        return [*rows[:1], f"[{prefix.rstrip('.')}]", f"table = [{pairs}]", *rows[1:]]
    return [f"table = [{pairs}] # bytes of a line, bytes a second", *rows]


@dataclass(frozen=True, slots=True, order=True)
class FittedProducts:
    """The constants of `2 m n k * (1 + ramp / k) / peak + reading * bytes / bandwidth` that fit products best, and the
    mean error."""

    error: float
    ramp: float
    reading: float
    peak: float


def fitted_products(
    shapes: Sequence[Sequence[float]], size: int, call: float, table: Sequence[Sequence[float]], reads_first: bool
) -> FittedProducts:
    """Return the constants that fit products of entries of ``size`` bytes: rows, columns, inner dim and seconds of
    each, where a line takes the process ``call`` and ``table`` has memory's bytes a second by sizes. A device that
    ``reads_first`` adds the time of the bytes; another one reads while it computes."""

    def fit(ramp: float, reading: float) -> FittedProducts:
        rates = []
        for rows, columns, inner, seconds in shapes:
            moved = size * (rows * inner + inner * columns + rows * columns)
            read = reading * moved / rate_of_size(table, moved)
            rates.append(2 * rows * columns * (inner + ramp) / max(seconds - call - read, 1e-9))
        peak = statistics.median(rates)
        return FittedProducts(sum(abs(one / peak - 1) for one in rates) / len(rates), ramp, reading, peak)

    return min(fit(ramp, part / 4) for ramp in range(0, 400, 4) for part in range(13 if reads_first else 1))


@dataclass(frozen=True, slots=True, order=True)
class FittedRamp:
    """The ramp and the shares of the peak of ``operations * (1 + ramp / size) / share`` that fit measurements best, and
    the mean error."""

    error: float
    ramp: int
    shares: tuple[float, ...]


def fitted_ramp(measured: Sequence[Sequence[float]], more: Sequence[float] = (1.0,)) -> FittedRamp:
    """Return the constants that fit what was measured at several sizes: of each the size, the seconds of its operations
    at the peak, and what each kind of it took, which has so many times ``more`` operations."""

    def fit(ramp: int) -> FittedRamp:
        shares, errors = [], list[float]()
        for at, times in enumerate(more, 2):
            each = [times * row[1] * (1 + ramp / row[0]) / row[at] for row in measured]
            shares.append(statistics.median(each))
            errors += [abs(one / shares[-1] - 1) for one in each]
        return FittedRamp(sum(errors) / len(errors), ramp, tuple(shares))

    return min(map(fit, range(0, 1024, 8)))


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _rate(found: Mapping[str, Any]) -> float:
    size, seconds = found["sums"][-1]
    return float(size / seconds)


def _link_rows(several: Mapping[str, Any] | None, links: Mapping[str, Any] | None) -> list[str]:
    """Return the numbers of a link, from two sizes of each collective: among two ranks each sends the tensor's own
    bytes in an all-reduce, and half of them in the others."""
    if several is None or links is None:
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
        first = ["bandwidth = 1e9 # not measured: one device", "start = 1e-4", "hop = 0.0"]
        return [*first, *(f"{name} = 1.0" for name in kinds)]
    small, _, large = sorted(links, key=int)
    bytes_of = {"all_reduce": 4.0, "all_gather": 2.0, "reduce_scatter": 2.0, "all_to_all": 2.0}
    rates = {name: int(large) * each / max(1e-9, links[large][name] - links[small][name])
             for name, each in bytes_of.items()}  # fmt: skip
    sends = several["sends"]
    rates["send"] = int(large) * 4.0 / max(1e-9, sends[large] - sends[small])
    most = max(rates.values())
    start = sum(links[small].values()) / len(links[small])
    return [f"bandwidth = {most:.4g}", f"start = {start:.3g}", "hop = 0.0",
            *(f"{name} = {max(0.01, rate / most):.3g}" for name, rate in rates.items())]  # fmt: skip


def _memory(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    try:
        lines = read_bounded(Path("/proc/cpuinfo"), 1 << 20).decode().splitlines()
    except OSError:
        lines = []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{os.cpu_count()} cores of {model}"


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
