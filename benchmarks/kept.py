"""``make bench-kept``: the bytes that a block keeps for its backward, beside what torch's AOTAutograd keeps of it.

The blocks are a GPT's with dropout and a Llama's of transformers, in float32 and in bfloat16 (on torch's side by
autocast). AOTAutograd splits them by its default for ``torch.compile``, the minimum cut with Inductor's decompositions.
A second table lists every kept value. Bytes are divided by those of one activation in float32; parameters, and tables
that all blocks share, are counted on neither side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import fx, nn

from benchmarks.command import Table, command
from benchmarks.turns import ROOT
from parc.compiler.analysis.liveness import Liveness
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import BACKWARD
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source

BATCH, LENGTH, WIDTH = 2, 96, 128
ACTIVATION = 4 * BATCH * LENGTH * WIDTH
GPT = f"""\
model     "./gpt.py:GPT" (layers=3, width={WIDTH}, heads=4, vocab=256, length={LENGTH}, dropout=0.1)
input     tokens int64 [B, S]
input     targets int64 [B, S]
loss      cross_entropy(output, targets)
"""
LLAMA = f"""\
model     "./llama.py:llama" (layers=3, width={WIDTH}, heads=4, kv_heads=2, ffn=352, vocab=512, length={LENGTH})
input     input_ids int64 [B, S]
input     targets int64 [B, S]
loss      cross_entropy(output.logits, targets)
"""
COMMON = f"sizes     B={BATCH}, S={LENGTH}\noptimizer adamw lr 1e-3\n"
Kept = list[tuple[str, str, int]]
"""Kept values: name, type, and the bytes of its storage, 0 where an earlier value has the same."""


def plan_of(model: str, lines: str = "") -> Compiled:
    """Compile a model with the lines of a plan."""
    return compile_plan(read_plan(Source("kept.parc", model + COMMON + lines)), ROOT / "examples")


def kept_by_parc(compiled: Compiled, block: str = "1") -> Kept:
    """Return what a block of that number keeps, and no other block with it."""
    program = compiled.built.programs[BACKWARD]
    main, live = program.main, Liveness(program)
    calls = [line for line in main.lines if line.calls_function]
    readers = Counter(name for line in calls for name in set(line.uses))
    (call,) = (line for line in calls if block in line.origin.module.split("."))
    values, kept = main.values(), list[tuple[str, str, int]]()
    for value, name in zip(program.function(call.op).parameters, call.uses, strict=True):
        if values[name].kind == "saved" and readers[name] == 1:
            kept.append((value.name, value.type.text(program.mesh), live.bytes_of(main, name)))
    return kept


def partitioned(compiler: Any) -> Any:
    """Return a backend of torch's compiler that cuts a step into forward and backward as torch does for inductor, and
    gives both graphs to a compiler."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )  # fmt: skip


def kept_by_torch(block: nn.Module, call: tuple[Any, dict[str, Any]], narrow: bool) -> Kept:
    """Return what AOTAutograd keeps of a block."""
    graphs: list[fx.GraphModule] = []

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    backend = partitioned(compiler)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        result: Any = torch.compile(block, backend=backend)(call[0], **call[1])
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    return list(_saved(graphs[1], block))


def _saved(backward: fx.GraphModule, block: nn.Module) -> Iterator[tuple[str, str, int]]:
    shapes = {tuple(shape) for value in block.parameters() for shape in (value.shape, value.shape[::-1])}
    seen: set[int] = set()
    for node in backward.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        shared = isinstance(value, torch.Tensor) and (value.shape[:1] == (1,) or tuple(value.shape) in shapes)
        if isinstance(value, torch.Tensor) and not shared and "tangent" not in node.name:
            storage = value.untyped_storage()
            yield node.name, f"{str(value.dtype)[6:]}{[*value.shape]}", storage.nbytes() * (storage._cdata not in seen)
            seen.add(storage._cdata)


def blocks(narrow: bool) -> Iterator[tuple[str, str, nn.Module, tuple[Any, dict[str, Any]]]]:
    """Yield each block by name, with its plan's model and with torch's module and the arguments of a call."""
    gpt, llama = (import_module(f"examples.{name}") for name in ("gpt", "llama"))
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16 if narrow else torch.float32, requires_grad=True)
    yield "GPT", GPT, gpt.Block(WIDTH, 4, 0.1), (x, {})
    model: Any = llama.llama(layers=1, width=WIDTH, heads=4, kv_heads=2, ffn=352).model
    places = torch.arange(LENGTH)[None]
    more = {"position_embeddings": model.rotary_emb(x, places), "attention_mask": None, "position_ids": places}
    yield "Llama", LLAMA, model.layers[0], (x, more)


def main() -> None:
    """Print both tables."""
    values: dict[str, Kept] = {}
    table = Table("block", "parc", "torch", "ratio")
    for narrow in (False, True):
        for name, model, block, call in blocks(narrow):
            ours = kept_by_parc(plan_of(model, "precision bf16\n" * narrow))
            theirs = kept_by_torch(block, call, narrow)
            here, there = (sum(size for *_, size in kept) / ACTIVATION for kept in (ours, theirs))
            case = f"{name} {'bf16' if narrow else 'fp32'}"
            table.row(case, *(f"{number:.2f}" for number in (here, there, here / there)))
            values |= {f"{case}, parc": ours, f"{case}, torch": theirs}
    for title, kept in values.items():
        print(f"\n{title}")
        for name, text, size in kept:
            print(f"  {name:<42}{text:<26}{size / ACTIVATION:>7.3f}")


if __name__ == "__main__":
    command(main)
