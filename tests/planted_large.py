"""Planted bugs of large builds: their texts, their captured graph and their twin must refuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from parc.checking.checks import faults_by_check
from parc.checking.twins import find_twin
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.program import Fault
from parc.compiler.program.text import ProgramError
from parc.compiler.twin.structure import compare_structure
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from tests.planted_builds import ROOT, reread
from tests.planted_repeats import (
    dropped,
    exchanged,
    exchanged_results,
    inputs,
    norm_twice,
    numbers,
    one_apart,
    other_numbers,
    reduced,
    reordered,
    results,
    skipped,
    streams,
    within,
)
from tests.planted_rows import Row
from tests.planted_sites import Mutant, Mutants, Programs

_GPT = """\
model "./gpt.py:GPT" (layers=4, width=32, heads=4, vocab=24, length=8, dropout=0.1)
verify layers=2, width=16, heads=2
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=32, S=8
loss cross_entropy(output, targets)
optimizer sgd lr 0.1 clip 1.0
seed 1
mesh dp=8, tp=2
shard tokens, targets [B/dp, _]
column blocks.*.attn.qkv over tp rows (3 h/tp d)
row blocks.*.attn.out over tp
column blocks.*.mlp.up over tp
row blocks.*.mlp.down over tp
vocab embed, head over tp
schedule microbatches 2
"""

_LLAMA = """\
model "./llama.py:llama" (layers=5, width=64, heads=4, kv_heads=2, ffn=48, vocab=24, length=16)
verify layers=2, width=16, heads=4, kv_heads=2, ffn=16
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=16
loss cross_entropy(output.logits, targets)
optimizer sgd lr 0.1
seed 1
mesh dp=8, tp=2
shard input_ids, targets [B/dp, _]
column model.layers.*.self_attn.{q,k,v}_proj over tp
row model.layers.*.self_attn.o_proj over tp
column model.layers.*.mlp.{gate,up}_proj over tp
row model.layers.*.mlp.down_proj over tp
vocab model.embed_tokens, lm_head over tp
"""

_TOWER = """\
model "./planted_models.py:Tower" (layers=4, width=16)
verify layers=2, width=8, D=8
input x float32 [B, D]
input other float32 [B, D]
sizes B=32, D=16
loss "./planted_models.py:square"(output, other)
optimizer sgd lr 0.1
mesh dp=8, tp=2
shard x, other [B/dp, _]
column layers.*.up over tp
row layers.*.down over tp
freeze layers.*.scale
schedule microbatches 2
"""

_PIPELINE = (
    _GPT.replace("layers=4", "layers=8")
    .replace("verify layers=2", "verify layers=4")
    .replace("dp=8, tp=2", "dp=4, pp=2, tp=2")
    .replace("schedule microbatches 2", "stage balanced over pp\nschedule interleaved chunks 2 microbatches 4")
)

_EXPERTS = """\
model "./moe_families.py:family" (name="Mixtral", num_hidden_layers=4)
verify num_hidden_layers=2, num_local_experts=4, hidden_size=8
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=32, S=8
loss cross_entropy(output.logits, targets)
optimizer sgd lr 0.1 clip 1.0
mesh dp=4, ep=4
shard input_ids, targets [B/dp/ep, _]
experts model.layers.*.mlp.experts over ep dropless
schedule microbatches 2
"""

_LOSSES = """\
model "./moe_families.py:family" (name="Mixtral", num_hidden_layers=5, output_router_logits=true)
verify num_hidden_layers=2, hidden_size=8
input input_ids int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=8
loss cross_entropy(output.logits, targets) + 0.02 output.aux_loss
optimizer sgd lr 0.1
mesh dp=16
shard input_ids, targets [B/dp, _]
"""

_ROUTERS = """\
model "./router_losses.py:Routers" (way="{way}", layers=7)
verify layers=2, width=8
input tokens int64 [B, S]
input targets int64 [B, S]
sizes B=16, S=8
loss cross_entropy(output.logits, targets) + 0.1 output.aux
optimizer sgd lr 0.1
mesh dp=16
shard tokens, targets [B/dp, _]
"""

ROUTERS = {
    f"routers, {way}": ("tests", _ROUTERS.format(way=way)) for way in ("from zero", "zeros", "reversed", "means")
}

PLANS = {
    "gpt dp=8, tp=2": ("examples", _GPT),
    "gpt dp=8, tp=2, bf16": ("examples", _GPT + "precision bf16\n"),
    "gpt dp=4, pp=2, tp=2": ("examples", _PIPELINE),
    "llama dp=8, tp=2": ("examples", _LLAMA),
    "tower dp=8, tp=2": ("tests", _TOWER),
    "experts dp=4, ep=4": ("tests", _EXPERTS),
    "losses of all routers dp=16": ("tests", _LOSSES),
    **ROUTERS,
}


@dataclass(frozen=True)
class LargeBuild:
    """The inputs of a large build's checks: its texts, its captured graph, and its twin."""

    compiled: Compiled
    twin: Compiled
    programs: Programs

    def faults(self, programs: Programs) -> tuple[str, list[Fault]]:
        """Return the name of the check that refuses programs in the place of the build's own, and its faults."""
        try:
            read = reread(programs, self.programs)
        except ProgramError as error:
            return "parse", [Fault("parse", "", str(error))]
        build = self.compiled.build
        # a pipeline's roles are as they were
        if found := next((each for each in faults_by_check(replace(build, programs=read)) if each), []):
            return found[0].check, found
        found = compare_structure(read, build.reference, self.twin.build.programs, self.twin.build.reference)
        return "twin" if found else "", found


@cache
def large_build(name: str) -> LargeBuild:
    """Return one of ``PLANS``."""
    folder, text = PLANS[name]
    compiled = compile_plan(read_plan(Source("large.parc", text)), ROOT / folder)
    twin, differences = find_twin(compiled, compiled.build.programs)
    assert not differences, differences
    return LargeBuild(compiled, twin, compiled.build.programs)


Maker = Callable[[LargeBuild], Mutants]


def _of_programs(make: Callable[[Programs], Mutants]) -> Maker:
    return lambda build: make(build.programs)


CLASSES: Mapping[str, Sequence[Maker]] = {
    "exchange all weights of two blocks": [_of_programs(partial(exchanged, "F", "parameter", True))],
    "exchange one weight of two blocks": [_of_programs(partial(exchanged, "F", "parameter", False))],
    "exchange two weights of a block": [_of_programs(partial(within, "F", "parameter"))],
    "exchange what is frozen or a buffer": [
        _of_programs(partial(exchanged, "F", kind, False)) for kind in ("frozen", "buffer")
    ] + [_of_programs(partial(within, "F", kind)) for kind in ("frozen", "buffer")],
    "exchange inputs": [_of_programs(partial(within, "F", "input")), _of_programs(inputs)],
    "read another block's output": [_of_programs(skipped)],
    "exchange values of one call": [_of_programs(partial(within, "F", ""))],
    "exchange what two calls give": [_of_programs(partial(exchanged_results, "F"))],
    "run blocks in another order": [_of_programs(reordered)],
    "leave a block out": [_of_programs(dropped)],
    "exchange random streams": [_of_programs(streams), _of_programs(partial(exchanged, "F", "stream", False))],
    "exchange buffers' new values": [_of_programs(partial(results, "F", "buffer"))],
    "exchange saved values of two blocks": [_of_programs(partial(exchanged, "B", "saved", False))],
    "exchange all saved values of two blocks": [_of_programs(partial(exchanged, "B", "saved", True))],
    "exchange saved values of a block": [_of_programs(partial(within, "B", "saved"))],
    "exchange weights in B": [
        _of_programs(partial(exchanged, "B", "parameter", False)), _of_programs(partial(within, "B", "parameter"))
    ],
    "exchange gradients in B": [_of_programs(partial(results, "B", "gradient"))],
    "exchange what two calls of B give": [_of_programs(partial(exchanged_results, "B"))],
    "add another call's gradient": [_of_programs(partial(within, "B", ""))],
    "exchange gradients in REDUCE": [_of_programs(partial(results, "REDUCE", "gradient")), _of_programs(reduced)],
    "count a gradient twice in the norm": [_of_programs(norm_twice)],
    "change a number in F": [_of_programs(partial(numbers, "F", factor)) for factor in (2, 0.5)],
    "change a number in B": [_of_programs(partial(numbers, "B", factor)) for factor in (2, 0.5)],
    "change a number in COUNT or SCALE": [_of_programs(partial(numbers, action, 2)) for action in ("COUNT", "SCALE")],
    "take a number of the twin": [
        lambda build: other_numbers("F", build.twin.build.programs, build.programs),
        lambda build: other_numbers("B", build.twin.build.programs, build.programs),
    ],
    "run another function in one block": [_of_programs(partial(one_apart, action)) for action in ("F", "B")],
}  # fmt: skip


def plant_large(build: LargeBuild, most: int) -> Iterator[Mutant]:
    """Yield mutants of a large build: at most ``most`` of each way to make some, spread over all places."""
    for kind, makers in CLASSES.items():
        for make in makers:
            found = list(make(build))
            yield from (Mutant(kind, what, programs) for what, programs in found[:: -(-len(found) // most) or 1])


def refusals(most: int, names: Sequence[str] = tuple(PLANS)) -> dict[str, Row]:
    """Return by class what refuses mutants of large builds first: ``parse``, a check of types, or the ``twin``."""
    rows: dict[str, Row] = {}
    for name in names:
        build = large_build(name)
        for mutant in plant_large(build, most):
            rows.setdefault(mutant.kind, Row()).note(f"{name}: {mutant.what}", build.faults(mutant.programs)[0])
    return rows
