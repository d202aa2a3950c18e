"""``make bench-sequence``: what sequence parallelism sends and keeps, beside tensor parallelism and the closed form.

The first table has the bytes that a rank sends over tp for a layer in a step, beside tensor parallelism's, and those
that a block of a Llama in bfloat16 keeps for its backward, in units of one split activation, ``2 s b h / t`` bytes. The
form is that for attention which keeps no scores, ``h (12 + 4 k / a) + 6 f`` bytes for each token and ``4 a`` for the
log-sum-exp. The second table lists its terms beside all kept values, with the reason for every difference.
"""

from __future__ import annotations

from benchmarks.command import Table, command
from benchmarks.kept import Kept, kept_by_parc
from benchmarks.turns import ROOT
from parc.checking.reports import report_of
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import Compiled
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source

RANKS, BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, FFN, LAYERS = 4, 2, 128, 256, 8, 4, 704, 3
PLAN = f"""\
model     "./llama.py:llama" (layers={LAYERS}, width={WIDTH}, heads={HEADS}, kv_heads={KV_HEADS}, ffn={FFN}, vocab=512)
input     input_ids int64 [B, S]
input     targets int64 [B, S]
sizes     B={BATCH}, S={LENGTH}
loss      cross_entropy(output.logits, targets)
optimizer adamw lr 1e-3
precision bf16
mesh      tp={RANKS}
include   "parc:llama" (tp={RANKS})
"""
LINE = "sequence model.layers.* over tp"
SPLIT, GATHERED = "tp, sequence", "tp, sequence, keep gathered"
SELECTIVE, FULL = "selective", "full"
WAYS = {
    "tp": "",
    SPLIT: LINE,
    GATHERED: f"{LINE} keep gathered",
    SELECTIVE: f"{LINE}\nrecompute model.layers.* keep products",
    FULL: f"{LINE}\nrecompute model.layers.*",
}
UNIT = 2 * LENGTH * BATCH * WIDTH // RANKS
SHARE = KV_HEADS / HEADS
TERMS = {
    "inputs of norms": (2.0, ("x", "add_1"), ""),
    "outputs of norms": (2.0, ("self_attn_q_proj_convert", "mlp_gate_proj_convert"), "made again from the inputs"),
    "queries": (1.0, ("self_attn_add",), ""),
    "keys": (SHARE, ("self_attn_add_1",), ""),
    "values": (SHARE, ("self_attn_v_proj_mm",), ""),
    "attention's result": (1.0, ("self_attn_attention",), ""),
    "log-sum-exp": (4 * LENGTH * BATCH * HEADS / RANKS / UNIT, ("self_attn_attention_1",), ""),
    "gate": (FFN / WIDTH, ("mlp_gate_proj_mm",), ""),
    "up": (FFN / WIDTH, ("mlp_up_proj_mm",), ""),
    "product of gate and up": (FFN / WIDTH, (), "made again of gate and up"),
    "one over the norms' roots": (0.0, ("input_layernorm_rsqrt", "post_attention_layernorm_rsqrt"), "a number a row"),
    "rotary tables": (0.0, (), "in float32, kept once for all blocks"),
}
"""The terms of the form in units of a split activation; the names of the kept values; and why the two differ."""
WHOLE = {"tp": ("inputs of norms", "outputs of norms"), GATHERED: ("outputs of norms",)}
"""The terms that are as often as large as there are ranks, where they are not split."""
AGAIN = {
    SELECTIVE: ("attention's result", "log-sum-exp"),
    FULL: tuple(term for term in TERMS if term != "inputs of norms"),
}
"""The terms that a line of recomputation takes away. A block that is made again as a whole keeps one norm's input."""


def compiled(line: str) -> Compiled:
    """Compile the plan with a line."""
    return compile_plan(read_plan(Source("sequence.parc", f"{PLAN}{line}\n")), ROOT / "examples")


def sent(case: Compiled) -> int:
    """Return the bytes of activations that a rank sends over tp for a layer in a step."""
    rows = [row for row in report_of(case)["communication"] if ".layers." in row["module"]]
    return sum(row["wire_bytes"] * row["count_per_step"] for row in rows if row["carries"] == "activations") // LAYERS


def term_sizes(way: str) -> dict[str, float]:
    """Return the terms of the closed form for a way."""
    sizes = {term: size * (RANKS if term in WHOLE.get(way, ()) else 1) for term, (size, *_) in TERMS.items()}
    sizes |= dict.fromkeys(AGAIN.get(way, ()), 0.0)
    return sizes | ({"inputs of norms": 1.0} if way == FULL else {})


def kept_sizes(kept: Kept) -> dict[str, float]:
    """Return the kept bytes of each term, in units of a split activation.

    Raises:
        ValueError: a kept value belongs to no term.
    """
    sizes = dict.fromkeys(TERMS, 0.0)
    for name, text, size in kept:
        term = next((term for term, (_, names, _) in TERMS.items() if name in names), None)
        if term is None:
            raise ValueError(f"`{name}`, {text}, belongs to no term")
        sizes[term] += size / UNIT
    return sizes


def main() -> None:
    """Print the tables."""
    base = 0
    sizes: dict[str, dict[str, float]] = {}
    table = Table("a layer", "sent, bytes", "of tp", "kept", "form", "ratio", names=28)
    for way, line in WAYS.items():
        case = compiled(line)
        sizes[way] = kept_sizes(kept_by_parc(case))
        here, form, bytes_sent = sum(sizes[way].values()), sum(term_sizes(way).values()), sent(case)
        base = base or bytes_sent
        kept = f"{here:.3f}", f"{form:.3f}", f"{here / form:.2f}"
        table.row(way, f"{bytes_sent:,}", f"{bytes_sent / base:.2f}", *kept)
    print()
    table = Table("form / kept of a term", *WAYS, "why they differ", names=26, least=13)
    for term, (_, _, reason) in TERMS.items():
        table.row(term, *(f"{term_sizes(way)[term]:.3f} / {sizes[way][term]:.3f}" for way in WAYS), reason)


if __name__ == "__main__":
    command(main)
