"""``make predict``: published training runs priced by the clock, beside their measured times.

``python -m benchmarks.predict CSV`` prices the rows of another table with the same columns. Every row becomes the plan
that its columns say, which is compiled (not checked) and priced on the row's cluster. What a measured system did
otherwise is a switch of ``SYSTEMS``, by system, never by row.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parc.compiler.clock.cluster import Cluster, find_cluster
from parc.compiler.clock.lines import Habits
from parc.compiler.program.actions import Action, accumulation
from parc.compiler.program.roles import SINGLE
from parc.compiler.schedules import kinds_of_stages, problem, timelines

if TYPE_CHECKING:
    from parc.compiler.build.build import Build
    from parc.compiler.layout.mesh import Mesh
    from parc.compiler.plan.plan import Plan

ROOT = Path(__file__).resolve().parent
CACHE = ROOT.parent / "build" / "predict"
Row = Mapping[str, str]

# ---- what rows do not say


@dataclass(frozen=True)
class System:
    """The habits of a measured system, which its rows do not say."""

    habits: Habits
    dropout: float = 0.0
    selective: str = "keep products"
    """The operators that ``selective`` recomputation keeps."""


_MEGATRON_2021 = System(
    Habits(
        compiled=True, fused_attention=False, overlap=False, blocking_sends=True, half_gradients=True, own_norms=True
    ),
    0.1,
)
_MEGATRON = System(Habits(compiled=True, own_norms=True))
_COMPOSER = System(Habits())
SYSTEMS: tuple[tuple[str, System], ...] = (
    ("Megatron-LM 2020", _MEGATRON_2021),
    ("Megatron-LM 2021", _MEGATRON_2021),
    ("Megatron-LM Jan-2021", _MEGATRON_2021),
    ("Megatron-LM 2022", _MEGATRON_2021),
    ("Megatron-DeepSpeed", _MEGATRON_2021),
    ("Megatron+DeepSpeed", _MEGATRON_2021),
    ("GPT-NeoX", _MEGATRON_2021),
    ("zero-bubble", System(Habits(compiled=True, overlap=False, blocking_sends=True, half_gradients=True))),
    ("Alpa", System(Habits(compiled=True, fused_attention=False, overlap=False, blocking_sends=True))),
    ("DeepSpeed ZeRO-3", System(Habits(compiled=True, fused_attention=False), 0.1)),
    ("Composer", _COMPOSER),
    ("torchtitan", System(Habits(compiled=True), selective="keep products, attention")),
    ("", _MEGATRON),
)
"""The systems by the beginning of their names: no overlap of data-parallel sums, scores in memory, sends that block,
and gradients in fp16, in Megatron-LM of 2020 to 2022 and what is made of it; lines that are not fused in Composer,
which compiles nothing."""

GPUS = (
    ("A100-SXM-40GB", "a100-40"), ("A100", "a100-80"), ("H200", "h200"), ("H800", "h800"), ("H100", "h100-sxm"),
    ("GB300", "gb300-nvl72"), ("GB200", "gb200-nvl72"), ("B200", "b200"), ("V100", "v100-dgx2"),
)  # fmt: skip
PRECISIONS = {"fp16": "bf16", "bf16": "bf16", "fp16/bf16": "bf16", "amp_bf16/DEFAULT": "bf16", "bf16/PURE": "bf16"}
"""The types of parc that rows' types are priced as: float16 and bfloat16 have one peak and one size."""
FILLED = {"vocab": "51200", "micro_batch": "1", "vpp": "1", "cp": "1", "ep": "1", "seq_parallel": "0", "tp": "1",
          "pp": "1"}  # fmt: skip
"""The value of an empty field."""


@dataclass(frozen=True)
class Published:
    """The sizes of a published model that no column gives: of a head, of latent attention, the number of shared
    experts, and of the first layers, which have no experts."""

    head: int = 0
    """The entries of a head, without those that have positions; 0: those of the stream over the heads."""
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    shared: int = 0
    dense: int = 0
    vocab: int = 0


_DEEPSEEK = Published(128, q_rank=1536, kv_rank=512, rope=64, shared=1, dense=3)
MODELS: tuple[tuple[str, Published], ...] = (
    ("deepseekv2", replace(_DEEPSEEK, shared=2, dense=1)),
    ("deepseekv3-4layers", replace(_DEEPSEEK, dense=1)),
    ("Moonlight", replace(_DEEPSEEK, q_rank=0, shared=2, dense=1, vocab=163840)),
    ("Qwen3", Published(128)),
    ("GPT OSS", Published(64)),
)
"""The models that have such sizes by the beginning of their names, from their configurations (those of four layers:
SimuMax's). Others have heads of the stream's width, or DeepSeek-V3's latent attention. GPT OSS's windows are not
priced: its attention sees all that is before."""
SCHEDULES = {"ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
"""The names here of schedules that are not 1F1B, with one chunk or several."""
WITHOUT_BARRIER = ("ZB-2p",)
"""The schedules in which a step begins before all ranks have ended the one before."""
RECOMPUTED = {
    "mla_up_proj": "blocks.*.attn.{{q,kv}}",
    "mlp": "blocks.{dense}.mlp",
    "moe": "blocks.*.mlp",
    "moe_act": "blocks.*.mlp.experts keep products, collectives",
    "layernorm": "blocks.*.{{norm1,norm2}}",
}
"""The modules that Megatron-LM's names of recomputed modules stand for."""
ZERO = {"0": 0, "0?": 0, "": 0, "1": 1, "2": 2, "3": 3, "HSDP": 3, "RS": 2, "3 (MiCS, 128-GPU shard groups)": 3}


class Inexpressible(Exception):
    """The reason for which a row has no plan."""


@dataclass(frozen=True)
class Case:
    """A row as a plan: its text, the clusters and the habits, and what is not compiled as it is: the layers of a chunk
    are extrapolated, and the microbatches, their samples and the data ranks are those of a step that rows share."""

    text: str
    dp: int
    micro: int
    """The samples of a data rank in a microbatch."""
    zero: bool
    """True where parameters or their state are stored in parts."""
    schedule: str
    """The name of its schedule, "" without a pipeline."""
    microbatches: int
    ranks: int
    """The ranks of its pipeline."""
    cluster: str
    node: int
    nic: float
    habits: Habits
    layers: int
    """The most layers of a chunk."""
    stages: int
    missing: int
    """The layers by which all stages together have fewer: the last and the first chunks have one less."""
    samples: int
    as_it_is: bool
    """True where it is compiled on all its data ranks, with its samples and with all layers of a pipeline's chunks, as
    tokens go to experts on many of them, and the first chunk has none."""


def number(row: Row, key: str) -> int:
    """Return a whole number of a row, with what fills an empty field."""
    text = row[key] or FILLED.get(key, "")
    try:
        return int(float(text))
    except ValueError:
        raise Inexpressible(f"`{key}` is {text!r}") from None


@dataclass(frozen=True)
class Shape:
    """The sizes of a row: axes, microbatches, chunks, and the model."""

    dp: int
    tp: int
    pp: int
    cp: int
    schedule: str
    """The name of its schedule, "" without a pipeline."""
    count: int
    """Microbatches."""
    chunks: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    ep: int
    """The ranks over which experts are split, 0 without experts."""
    vocab: int
    published: Published

    @classmethod
    def of(cls, row: Row) -> Shape:
        """Read the sizes of a row.

        Raises:
            Inexpressible: they do not divide, or a schedule does not take them.
        """
        world, tp, pp, cp = (number(row, key) for key in ("n_gpus", "tp", "pp", "cp"))
        dp = world // (tp * pp * cp)
        batch = number(row, "global_batch")
        micro = min(number(row, "micro_batch"), max(1, batch // max(1, dp)))
        if dp * tp * pp * cp != world or batch % (dp * micro):
            raise Inexpressible("the axes do not make up the GPUs, or do not divide the batch")
        count, chunks = batch // (dp * micro), 1
        if pp > 1 and ("interleaved" in row["schedule"] or row["schedule"] == "1F1B-I"):
            most = math.ceil(number(row, "layers") / pp)
            chunks = most if row["vpp"].startswith("max") else number(row, "vpp")
        plain = "interleaved" if chunks > 1 else "1f1b" if count > 1 else "gpipe"  # of one microbatch they are equal
        schedule = SCHEDULES.get(row["schedule"], plain) if pp > 1 else ""
        if reason := problem(schedule, pp * chunks, count, chunks) if schedule else None:
            raise Inexpressible(reason)
        heads = number(row, "heads")
        kv_heads = heads if row["kv_heads"] in ("", "MLA") else number(row, "kv_heads")
        model = next((known for name, known in MODELS if row.get("model", "").startswith(name)), None)
        published = model or (_DEEPSEEK if row["kv_heads"] == "MLA" else Published())
        ep = number(row, "ep") if has_experts(row) else 0
        if ep and (world // pp) % ep:
            raise Inexpressible("experts over ranks that do not divide those of a stage")
        divides = published.head or number(row, "hidden") % heads == 0
        if not divides or heads % tp or (kv_heads % tp and tp % kv_heads):
            raise Inexpressible("heads that the ranks do not divide")
        ffn = number(row, "ffn_hidden") if row["ffn_hidden"] else 4 * number(row, "hidden")
        vocab = published.vocab if published.vocab and not row["vocab"] else number(row, "vocab")
        gated = row["gated_mlp"] not in ("", "0", "0.0")
        return cls(dp, tp, pp, cp, schedule, count, chunks, heads, kv_heads, ffn, gated, ep, vocab, published)


def case_of(row: Row) -> Case:
    """Return the plan that a row's columns say.

    Raises:
        Inexpressible: parc has no plan of them.
    """
    system = next(known for name, known in SYSTEMS if row["system"].startswith(name))
    cluster = next((ours for name, ours in GPUS if row["gpu"].startswith(name)), None)
    if cluster is None:
        raise Inexpressible(f"no cluster of {row['gpu']}")
    if row["precision"] not in PRECISIONS:
        raise Inexpressible(f"products in {row['precision']}")
    shape = Shape.of(row)
    text = "\n".join([*_model_lines(row, shape, system), *_placements(row, shape, system)])
    node = number(row, "gpus_per_node") if row["gpus_per_node"] else 8
    nic = float(row["nic_GBps_per_gpu"] or 0) * 1e9
    stages = shape.pp * shape.chunks
    each = math.ceil(number(row, "layers") / stages)
    missing = each * stages - number(row, "layers")
    habits = replace(system.habits, barrier=row["schedule"] not in WITHOUT_BARRIER)
    zero = any(line.startswith("zero") for line in text.splitlines())
    samples = number(row, "global_batch")
    return Case(
        text, shape.dp, samples // (shape.dp * shape.count), zero, shape.schedule, shape.count, shape.pp, cluster,
        node, nic, habits, each, stages, missing, samples, bool(shape.ep),
    )  # fmt: skip


def has_experts(row: Row) -> bool:
    """Return whether a row's model has experts."""
    return row["family"] == "moe" or number(row, "ep") > 1


def _model_lines(row: Row, shape: Shape, system: System) -> Iterator[str]:
    """Yield the lines of the model, its data and its update."""
    of, words, width = shape.published, 128 * shape.tp, number(row, "hidden")
    tied = row["tied_emb"].lower() in ("1", "1.0", "true", "?", "") and not shape.gated
    sizes = f"layers=$layers, width={width}, heads={shape.heads}, kv_heads={shape.kv_heads}, ffn={shape.ffn}"
    sizes += f", vocab={math.ceil(shape.vocab / words) * words}, length={number(row, 'seq_len')}"
    sizes += f", gated={str(shape.gated).lower()}, tied={str(tied).lower()}, dropout={system.dropout:g}"
    if of.head:
        sizes += f", size={of.head}"
    if row["kv_heads"] == "MLA":
        sizes += f", q_rank={of.q_rank}, kv_rank={of.kv_rank}, rope={of.rope}"
    if shape.ep:
        sizes += f", experts={number(row, 'n_experts')}, top={number(row, 'topk')}, expert_ffn={number(row, 'moe_ffn')}"
        sizes += f", shared={of.shared}, dense={of.dense}"
    yield f'model "./predict_models.py:Transformer" ({sizes})'
    yield from ("input tokens int64 [B, S]", "input targets int64 [B, S]")
    yield f"sizes B=$batch, S={number(row, 'seq_len')}"
    yield from ("loss cross_entropy(output, targets)", "data synthetic", "optimizer adamw lr 1e-4 clip 1.0", "seed 1")
    yield f"precision {PRECISIONS[row['precision']]}"


def _placements(row: Row, shape: Shape, system: System) -> Iterator[str]:
    """Yield the lines that place the model and order its work. Megatron's ranks lie as here: tensors innermost."""
    yield f"mesh pp={shape.pp}, dp=$data, cp={shape.cp}, tp={shape.tp}"
    yield "shard tokens, targets [B/dp, _]"
    chunks = f" chunks {shape.chunks}" if shape.chunks > 1 else ""
    yield f"schedule {shape.schedule} microbatches $count{chunks}"
    if shape.pp * shape.chunks > 1:
        yield "$cuts"
    if shape.ep:
        ranks = shape.dp * shape.cp * shape.tp
        yield f"view dp, cp, tp as edp={ranks // shape.ep}, ep={shape.ep} in blocks.*.mlp.experts"
        yield "experts blocks.*.mlp.experts over ep dropless"
    if shape.tp > 1:
        yield from _tensor_parallel(row, shape)
    if shape.cp > 1:
        yield "context blocks.* dim S over cp using zigzag"
    if (zero := ZERO.get(row["zero_stage"], 0)) and shape.dp > 1:
        yield f"zero {zero} over dp"
    if row["recompute"] == "full":
        yield "recompute blocks.*"
    elif row["recompute"].startswith("selective") or row["recompute"] == "core_attn":
        yield f"recompute blocks.* {system.selective}"
    for name in re.split(r"[+,]", row["recompute"]):
        if name in RECOMPUTED and (name != "mlp" or _has_dense(shape)):
            yield f"recompute {RECOMPUTED[name].format(dense=_dense(shape))}"


def _has_dense(shape: Shape) -> bool:
    """Return whether some blocks have no experts."""
    return not shape.ep or shape.published.dense > 0


def _dense(shape: Shape) -> str:
    """Return the pattern of the blocks that have no experts."""
    return f"[0..{shape.published.dense - 1}]" if shape.ep else "*"


def _tensor_parallel(row: Row, shape: Shape) -> Iterator[str]:
    """Yield the lines that split products over ``tp``; experts are not split."""
    mlps = [f"blocks.{_dense(shape)}.mlp"] if _has_dense(shape) else []
    mlps += ["blocks.*.mlp.shared"] if shape.published.shared else []
    products = "{q,kv}" if row["kv_heads"] == "MLA" else "{q,k,v}"
    yield f"column {', '.join([f'blocks.*.attn.{products}', *(f'{mlp}.up' for mlp in mlps)])} over tp"
    yield f"row {', '.join(['blocks.*.attn.out', *(f'{mlp}.down' for mlp in mlps)])} over tp"
    yield "vocab embed, head over tp"
    if shape.gated and mlps:
        yield f"column {', '.join(f'{mlp}.gate' for mlp in mlps)} over tp"
    if number(row, "seq_parallel"):
        yield "sequence blocks.* over tp"


def cluster_of(case: Case) -> Cluster:
    """Return the cluster of a row, with its own NIC and node."""
    cluster = find_cluster(case.cluster)
    network = replace(cluster.network, bandwidth=case.nic) if case.nic else cluster.network
    peak = {"bf16": cluster.peak["fp16"], **cluster.peak}  # `PRECISIONS`
    return replace(cluster, network=network, ranks=case.node, peak=peak)


# ---- compiling and pricing

_EXACT = 3
"""The most layers of a chunk that are compiled as they are; more are extrapolated from plans of two and three, because
all layers of a chunk take equal times."""


def predicted(case: Case) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and the parts of the role that waits least for others."""
    if case.layers <= _EXACT or (case.as_it_is and case.stages > 1):
        seconds, roles = _step(case, case.layers)
        return seconds, roles[_longest(roles)]
    (two, roles2), (three, roles3) = _step(case, _EXACT - 1), _step(case, _EXACT)
    more, role = case.layers - _EXACT, _longest(roles3)
    parts = {part: time + more * (time - roles2[role][part]) for part, time in roles3[role].items()}
    return three + more * (three - two), parts


def _longest(roles: Mapping[str, Mapping[str, float]]) -> str:
    return min(roles, key=lambda role: roles[role]["bubble"])


def _step(case: Case, each: int) -> tuple[float, dict[str, dict[str, float]]]:
    """Return the seconds of a step with so many layers in the longest chunk, and the parts of each role."""
    import numpy as np

    from parc.compiler.clock.links import Links
    from parc.compiler.clock.step import StepClock
    from parc.compiler.clock.sweeps import sweep_over
    from parc.compiler.plan.plan import read_plan
    from parc.grammar.source import Source
    from parc.step_time import update_seconds

    layers, cuts = _cuts(each, case.stages, case.missing)
    few = _few(case)
    data, samples = (case.dp, case.micro) if case.as_it_is else (min(case.dp, 2), _SAMPLES)
    text = f"let layers={layers}, count={few}, data={data}, batch={data * samples * few}\n"
    text += f"{case.text.replace('$cuts', cuts)}\n"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = read_plan(Source("row.parc", text), {})
        build = _build(plan, text)
    place: Mesh = build.mesh
    if not case.as_it_is:
        stored, sizes = ("dp",) if case.zero else (), {"dp": np.array([case.dp])}
        place = sweep_over(build.mesh, sizes, data * samples, np.array([case.dp * case.micro]), False, stored).one(0)
    actions = _actions(case, {key for role in build.roles.values() for key in role.programs})
    roles = {
        name: replace(
            role, actions=actions[name],
            programs={key: replace(program, mesh=place) for key, program in role.programs.items()},
        )
        for name, role in build.roles.items()
    }  # fmt: skip
    cluster = cluster_of(case)
    links = Links(place, cluster, case.node)
    updates = {name: update_seconds(build, plan, role, cluster) for name, role in roles.items()}
    time = StepClock(roles, links, case.habits, updates).run()
    return time.seconds, {role: time.parts(role) for role in time.roles}


_SAMPLES = 10007
"""The samples of a data rank in a microbatch that is compiled, without experts: a prime that divides no other dim of a
model, by which the dims of the batch are found (decision 47)."""


def _actions(case: Case, programs: Collection[str]) -> dict[str, tuple[Action, ...]]:
    """Return the actions of each role in a step of all microbatches, of the kinds that have programs."""
    if not case.schedule:
        return {SINGLE: accumulation(case.microbatches, also=programs)}
    chunks = case.stages // case.ranks
    return timelines(case.schedule, case.stages, case.microbatches, chunks, also=programs, as_run=True)


def _few(case: Case) -> int:
    """Return the microbatches of the step that is compiled: few, with the same kinds of work on each stage."""
    few = min(2 * case.ranks, case.microbatches)
    if not case.schedule:
        return few
    kinds = [kinds_of_stages(case.schedule, case.stages, count, case.stages // case.ranks)
             for count in (few, case.microbatches)]  # fmt: skip
    return few if kinds[0] == kinds[1] else case.microbatches


def _cuts(each: int, chunks: int, missing: int) -> tuple[int, str]:
    """Return the layers of a model, and the lines that cut it into chunks of equally many, up to the missing ones: the
    last and the first chunks have one less, as they have the head and the embedding."""
    sizes = [each] * chunks
    for at in range(missing):
        sizes[-1 - at // 2 if at % 2 == 0 else at // 2] -= 1
    *ends, layers = accumulate(sizes)
    blocks = ",".join(str(end) for end in dict.fromkeys(ends) if end < layers)
    lines = [f"stage before blocks.{{{blocks}}} over pp" if "," in blocks else f"stage before blocks.{blocks} over pp"]
    lines += ["stage before norm over pp"] * (layers in ends)
    return layers, "\n".join(lines)


def _build(plan: Plan, text: str) -> Build:
    """Return the build of a plan, from the cache if the compiler is the same."""
    from parc.compiling.build_cache import BuildCache
    from parc.compiling.driver import compile_plan

    models = (ROOT / "predict_models.py").read_text(encoding="utf-8")
    return BuildCache(CACHE).build((text, models), ROOT, lambda: compile_plan(plan, ROOT))


def price_case(case: Case) -> dict[str, Any]:
    """Return the prediction of a row, or the reason for which parc refuses it."""
    try:
        seconds, parts = predicted(case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    return {"s": seconds, "parts": parts}


def price_cases(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the predictions of rows whose compiled steps are the same, one after the other: the first compiles."""
    return [price_case(case) for case in cases]


# ---- figures


def error_after_scalar(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return, of pairs (measured, predicted), the mean error, the median of measured over predicted, and the mean error
    after that scalar."""
    raw = statistics.mean(abs(p / m - 1) for m, p in pairs)
    scalar = statistics.median(m / p for m, p in pairs)
    return raw, scalar, statistics.mean(abs(scalar * p / m - 1) for m, p in pairs)


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the correlation of ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    a, b = (ranks(column) for column in zip(*pairs, strict=True))
    return statistics.correlation(a, b)


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the measured time of the plan predicted fastest, over the least measured, minus 1."""
    chosen = min(pairs, key=lambda pair: pair[1])
    return chosen[0] / min(m for m, _ in pairs) - 1


def model_flops(row: Row) -> float:
    """Return the model FLOPs of a step, attention in full, and latent attention as if it were not."""
    shape, layers, width = Shape.of(row), number(row, "layers"), number(row, "hidden")
    of, heads = shape.published, shape.heads * (shape.published.head or width // shape.heads)
    ffn = shape.ffn if not shape.ep else number(row, "moe_ffn") * (number(row, "topk") + of.shared)
    length = number(row, "seq_len")
    token = layers * (
        2 * width * heads * (2 + 2 * shape.kv_heads / shape.heads)
        + 4 * length * heads
        + 2 * width * ffn * (3 if shape.gated else 2)
    )
    return 3 * (token + 2 * width * shape.vocab) * length * number(row, "global_batch")


def constant_mfu(row: Row, case: Case) -> float:
    """Return the seconds of a step of which all operations take their share of the peak."""
    full = 4 / 3 if row["recompute"] == "full" else 1
    return full * model_flops(row) / (cluster_of(case).peak["bf16"] * number(row, "n_gpus"))


SUBSETS = (("vTrain", "tp", 8), ("vTrain", "tp", 4))
"""Parts of sources that have a row of their own: those whose column is at most a number."""
SET_ON = """\
Switches of systems, and what norms as kernels of their own read, were chosen while looking at rows of SC21, of
Korthikanti, of vTrain and of zero-bubble: errors there are no test of them. No number was fitted to a step's time:
products follow SimuMax's tables of single products, all-reduces vTrain's table of one node (each cluster's file names
its sources)."""


def tables(rows: Sequence[tuple[Row, Case, float]]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{'source':62} {'rows':>4} {'raw':>7} {'scalar':>7} {'after':>7} {'constant MFU':>13}"
    parts = [(source, "", 0) for source in sorted({row["source"] for row, _, _ in rows})]
    for source, column, most in (*parts, *SUBSETS):
        of = [(row, case, s) for row, case, s in rows
              if (row["source"].startswith(source) and number(row, column) <= most if column
                  else row["source"] == source)]  # fmt: skip
        if not of:
            continue
        source = f"of {source} {column} at most {most}" if column else source
        pairs = [(float(row["iter_time_s"]), s) for row, _, s in of]
        raw, scalar, after = error_after_scalar(pairs)
        _, _, constant = error_after_scalar(
            [(float(row["iter_time_s"]), constant_mfu(row, case)) for row, case, _ in of]
        )
        yield f"{source[:62]:62} {len(of):4} {raw:7.1%} {scalar:7.3f} {after:7.1%} {constant:13.1%}"
    yield ""
    yield f"{'group':44} {'rows':>4} {'Spearman':>9} {'regret':>7}"
    kinds: dict[str, list[tuple[float, float]]] = {}
    for group in sorted({row["rank_group"] for row, _, _ in rows} - {""}):
        pairs = [(float(row["iter_time_s"]) / case.samples, s / case.samples)
                 for row, case, s in rows if row["rank_group"] == group]  # fmt: skip
        if len(pairs) < 2:
            continue
        rho, loss = spearman(pairs) if len({p for _, p in pairs}) > 1 else math.nan, regret(pairs)
        kinds.setdefault(re.split("-", group)[0], []).append((rho, loss))
        yield f"{group:44} {len(pairs):4} {rho:9.2f} {loss:7.1%}"
    for kind, values in kinds.items():
        known = [rho for rho, _ in values if not math.isnan(rho)]
        yield (f"{f'mean of {kind}':44} {len(values):4} {statistics.mean(known):9.2f}"
               f" {statistics.mean(loss for _, loss in values):7.1%}")  # fmt: skip


def orders(rows: Sequence[tuple[Row, Case, float]]) -> Iterator[str]:
    """Yield the schedules of each group that differs in nothing else, by predicted time, with the measured one."""
    for group in sorted({row["rank_group"] for row, _, _ in rows if row["rank_group"].startswith("zb-")}):
        of = sorted((s, row["schedule"], row["iter_time_s"]) for row, _, s in rows if row["rank_group"] == group)
        yield f"{group:16} " + " < ".join(f"{name} {s:.3f} s ({float(measured):.3f})" for s, name, measured in of)


SCALE = ((512, 1152, 24.49), (2048, 1152, 25.26), (2432, 1216, 25.40), (2560, 1120, 25.57), (8192, 1536, 27.64))
"""MLPerf's training of Llama 3.1 405B in FP8 on H100: GPUs, sequences of a batch, and GPU seconds of a sequence."""


def scale() -> Iterator[str]:
    """Yield the GPU seconds of a sequence of Llama 3.1 405B, in TP 8, PP 8, CP 2 and 8 chunks, in bfloat16."""
    row = {"layers": "126", "hidden": "16384", "heads": "128", "kv_heads": "8", "ffn_hidden": "53248", "gated_mlp": "1",
           "vocab": "128256", "tied_emb": "0", "seq_len": "8192", "micro_batch": "1", "gpu": "H100", "family": "llama",
           "gpus_per_node": "8", "nic_GBps_per_gpu": "50", "tp": "8", "pp": "8", "cp": "2", "vpp": "8", "ep": "1",
           "zero_stage": "1", "seq_parallel": "1", "recompute": "none", "precision": "bf16", "system": "",
           "schedule": "interleaved-1F1B"}  # fmt: skip
    first: list[float] = []
    for world, batch, measured in SCALE:
        seconds, parts = predicted(case_of({**row, "n_gpus": str(world), "global_batch": str(batch)}))
        first = first or [seconds * world / batch, measured]
        each = seconds * world / batch
        yield (f"{world:5} GPUs: {each:6.2f} GPU s a sequence ({each / first[0] - 1:+.1%}), measured {measured:6.2f}"
               f" ({measured / first[1] - 1:+.1%}); bubble {parts['bubble'] / seconds:.1%}")  # fmt: skip


def main() -> int:
    """Price all rows of a table and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path("published_runs.csv"))
    parser.add_argument("--source", default="", help="only sources with this in their names")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scale", action="store_true", help="Llama 3.1 405B on 512 to 8,192 H100 instead")
    args = parser.parse_args()
    if args.scale:
        for text in scale():
            print(text, flush=True)
        return 0
    if not args.csv.is_file():
        parser.error(f"there is no table `{args.csv}`: name one of measured runs, as `make predict RUNS=runs.csv`")
    with open(args.csv, newline="", encoding="utf-8") as file:
        rows: list[Row] = [row for row in csv.DictReader(file) if args.source in row["source"]]
    cases: list[tuple[Row, Case]] = []
    left: dict[str, list[str]] = {}
    for row in rows:
        try:
            if not row["iter_time_s"]:
                raise Inexpressible("no time")
            cases.append((row, case_of(row)))
        except Inexpressible as reason:
            left.setdefault(str(reason), []).append(row["id"])
    groups: dict[str, list[tuple[Row, Case]]] = {}
    for row, case in cases:
        groups.setdefault(case.text, []).append((row, case))
    batches = sorted(groups.values(), key=lambda batch: -batch[0][1].stages)
    priced: list[tuple[Row, Case, float]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        every = pool.map(price_cases, [[case for _, case in batch] for batch in batches])
        for (row, case), result in chain.from_iterable(map(zip, batches, every)):
            if "error" in result:
                left.setdefault(result["error"], []).append(row["id"])
                continue
            priced.append((row, case, result["s"]))
            if args.rows:
                shares = " ".join(f"{key} {value / result['s']:.0%}" for key, value in result["parts"].items())
                print(f"{row['id']:40} {float(row['iter_time_s']):9.3f} {result['s']:9.3f}"
                      f" {result['s'] / float(row['iter_time_s']) - 1:+7.1%}  {shares}", flush=True)  # fmt: skip
    print("\n".join(tables(priced)))
    if lines := [*orders(priced)]:
        print("\nschedules by predicted time (measured)", *lines, sep="\n")
    print(f"\n{SET_ON}")
    print(f"\n{len(priced)} of {len(rows)} rows priced{'; the others:' if left else ''}")
    for why, names in sorted(left.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(names):4} {why}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
