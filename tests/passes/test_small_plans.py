"""Small models and plans that once went wrong, each with its error."""

from __future__ import annotations

import pytest

from ..plan_strategies import plan_text
from ..random_layers import Sizes
from ..strategies import Layer, ModelSpec
from ..trials import TOLERANCE, check, eager_error, subject

SIZES = Sizes(batch=4, length=4, heads=2, head=4, vocab=8)
MLP = Layer("mlp", ("silu", True, "none"))


def attention(
    qkv: str = "apart", shared: int = 1, repeat: str = "enable", mask: str = "causal", p: float = 0.0
) -> Layer:
    """Return an attention layer with a residual."""
    return Layer("attention", (qkv, shared, repeat, mask, p), 0, 0)


CASES: dict[str, tuple[ModelSpec, dict[str, int], list[str]]] = {
    "a table's rows in parts of a sub-dim are no run of rows": (
        ModelSpec(SIZES, "tied", (MLP,), "cross_entropy"),
        {"dp": 2, "tp": 2},
        ["shard x, y [B/dp, _]", "shard embed.weight [(2 _/tp), _]"],
    ),
    "a table over two axes": (
        ModelSpec(SIZES, "tokens", (MLP,), "cross_entropy"),
        {"dp": 2, "tp": 2},
        ["shard embed.weight [_/tp/dp, _]", "shard head.weight [_/dp/tp, _]"],
    ),
    "the count reads targets as the forward places them": (
        ModelSpec(SIZES, "tokens", (MLP,), "cross_entropy"),
        {"tp": 4},
        ["shard x [_/tp, _]"],
    ),
    "the reference stops gradients where the module does": (
        ModelSpec(SIZES, "tokens", (Layer("running", ("mean",), 0, 0), Layer("plain", ("detach",))), "mse"),
        {"dp": 2},
        ["shard x, y [B/dp, ...]"],
    ),
    "a buffer is updated where it is placed": (
        ModelSpec(SIZES, "tied", (Layer("running", ("mean",)), Layer("linear", (False,), 0, 0)), "mse", 2),
        {"dp": 2, "tp": 2},
        ["shard layers.1.weight [_, _/dp]", "vocab embed over tp"],
    ),
    "batch statistics are those of the whole batch": (
        ModelSpec(SIZES, "tokens", (Layer("running", ("batch_norm",), 0, 0), MLP), "cross_entropy", 2),
        {"dp": 4},
        ["shard x, y [B/dp, _]"],
    ),
    "attention's dropout keeps float64, also with shared heads, and whole channels are dropped alike": (
        ModelSpec(SIZES, "tokens", (attention(p=0.3), attention(shared=2, p=0.3, mask="triu"),
                                    Layer("linear", (True,)), Layer("plain", ("drop",))), "cross_entropy"),
        {"dp": 2, "tp": 2},
        ["shard x, y [B/dp, _]", "column layers.0.q, layers.0.k, layers.0.v, layers.1.q, layers.2 over tp",
         "row layers.0.out, layers.1.out over tp"],
    ),
    "the gradient of a maximum makes zeros where they are read": (
        ModelSpec(SIZES, "floats", (Layer("linear", (True,)), Layer("plain", ("largest_rows",))), "mean"),
        {"dp": 2, "tp": 2},
        ["shard x [B/dp, _, _]", "column layers.0 over tp"],
    ),
    "autograd's operators in place": (
        ModelSpec(SIZES, "floats", (Layer("linear", (True,)), Layer("plain", ("clamp",))), "mean"),
        {"dp": 2},
        ["shard x [_, _/dp, _]"],
    ),
    "a slice of every second": (
        ModelSpec(SIZES, "tokens", (Layer("plain", ("gate",)),), "cross_entropy"),
        {"tp": 2},
        ["shard embed.weight [_, _/tp]"],
    ),
    "a norm of groups reads its storage in order": (
        ModelSpec(SIZES, "floats", (Layer("conv", (False, True)), Layer("group_norm")), "mean"),
        {"dp": 2},
        ["shard x [_/dp, _, _]"],
    ),
    "the padding row of a split table gets no gradient": (
        ModelSpec(SIZES, "padded", (MLP,), "cross_entropy"),
        {"dp": 2, "tp": 2},
        ["shard x, y [B/dp, _]", "vocab embed over tp"],
    ),
    "classes that come second, beside a mask of bool": (
        ModelSpec(SIZES, "tokens", (MLP,), "cross_entropy_classes_second", 2, "mask"),
        {"dp": 2, "tp": 2},
        ["shard x, y, z [B/dp, _]", "vocab head over tp"],
    ),
    "nothing joined to something, one operand of an einsum summed first, attention without heads": (
        ModelSpec(SIZES, "tokens", tuple(layer for kind in ("nothing", "outer", "scores")
                                         for layer in (Layer("linear", (True,)), Layer("plain", (kind,)))),
                  "cross_entropy"),
        {"dp": 2, "tp": 2},
        ["shard x, y [B/dp, _]", "column layers.0, layers.2, layers.4 over tp"],
    ),
    "two axes in each other's way": (
        ModelSpec(Sizes(4, 6, 4, 6, 24), "tied", (Layer("conv", (True, False), 0, 1), MLP), "mse", 2),
        {"tp": 4, "ax": 2},
        ["vocab embed over ax", "shard layers.1.down.weight [(4 _/ax=2 3), (4 _/tp=4 3)]",
         "shard layers.1.down.bias [(3 _/tp=4 2)]"],
    ),
    "a sum does not go where its operator splits the same entries over another axis": (
        ModelSpec(SIZES, "tokens", (Layer("linear", (False,), 0, 0),), "mse"),
        {"dp": 2, "tp": 2},
        ["row layers.0 over tp", "column layers.0 over dp"],
    ),
    "rows without a gradient of a table whose columns are padded": (
        ModelSpec(SIZES, "padded", (Layer("layer_norm", (False,)),), "mse"),
        {"tp": 3},
        ["shard embed.weight [_, _/tp pad]"],
    ),
    "what a buffer alone reads of several blocks gets no gradient": (
        ModelSpec(SIZES, "tokens", (Layer("glu"), Layer("running", ("mean",)), Layer("glu", (), 2)), "mse"),
        {"dp": 2, "tp": 2},
        ["shard x, y [B/dp, ...]", "column layers.0.up over tp"],
    ),
    "keys repeated in place follow heads, a trained mask has its gradient, entries at constants go with their reader": (
        ModelSpec(SIZES, "tokens", (attention(shared=2, repeat="interleave"), attention(mask="learned", shared=2),
                                    Layer("plain", ("index",))), "cross_entropy"),
        {"dp": 2, "tp": 2},
        ["shard x, y [B/dp, _]", "column layers.0.q over tp", "row layers.0.out, layers.1.out, head over tp"],
    ),
    "a stage with nothing to train sends no gradient back": (
        ModelSpec(SIZES, "tokens", (MLP,), "cross_entropy", 2),
        {"dp": 2, "pp": 2},
        ["shard x, y [B/dp, _]", "freeze embed.weight", "stage before layers.0 over pp",
         "schedule 1f1b microbatches 2"],
    ),
    "two embeddings, one of which is in each of two stages": (
        ModelSpec(
            Sizes(batch=4, length=4, heads=2, head=2, vocab=8), "tokens", (Layer("linear", (False,)),),
            "cross_entropy", 3, "places",
        ),
        {"dp": 2, "pp": 3},
        ["shard x, y, z [B/dp, _]", "stage balanced over pp", "schedule interleaved microbatches 3 chunks 2",
         "precision fp16 loss_scale dynamic"],
    ),
    "a norm of what is as small as its eps adds the eps that torch adds": (
        ModelSpec(
            Sizes(batch=4, length=4, heads=2, head=2, vocab=8), "tokens",
            (Layer("experts", (2, True), 0, 0, "times"), Layer("torch_rms_norm", (False,))), "cross_entropy",
        ),
        {"dp": 2, "tp": 2},
        [],
    ),
    "statistics that are padded are updated in the stage that makes them": (
        ModelSpec(
            Sizes(batch=4, length=6, heads=1, head=4, vocab=8), "tokens",
            (Layer("linear", (False,), 0, 0, "einsum"), Layer("running", ("batch_norm",), 0, 0, "einsum")),
            "cross_entropy", 2,
        ),
        {"pp": 2, "tp": 4},
        ["column layers.0 over tp rows (2 n/tp) pad", "stage before head over pp", "schedule 1f1b microbatches 2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_plan_builds_and_has_the_numbers_of_its_model(name: str) -> None:
    spec, mesh, lines = CASES[name]
    model_subject = subject(spec)
    case, _ = check(model_subject, plan_text(spec, mesh, lines))
    if not spec.drops:
        assert eager_error(model_subject, case) <= TOLERANCE


def test_ranks_that_share_a_process_clip_once() -> None:
    spec = ModelSpec(SIZES, "tokens", (MLP,), "cross_entropy")
    lines = ["shard x, y [B/dp, _]", "column layers.0.up over tp", "row layers.0.down over tp"]
    check(subject(spec), plan_text(spec, {"dp": 2, "tp": 2}, lines, "sgd lr 0.1 clip 0.01"))


def test_ranks_that_train_nothing_have_nothing_to_clip() -> None:
    spec = ModelSpec(SIZES, "tokens", (MLP, MLP), "mse", 2, frozen=True)
    lines = ["shard x, y [B/dp, ...]", "freeze embed.weight", "stage before layers.1 over pp"]
    lines.append("schedule 1f1b microbatches 2")
    check(subject(spec), plan_text(spec, {"dp": 2, "pp": 2}, lines, "sgd lr 0.1 clip 0.01"))
