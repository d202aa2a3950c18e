"""Codes of messages about values inside a model and their sequences (P016x)."""

from __future__ import annotations

from .code import shown

NO_SITE = shown(
    name="P0160",
    title="`in(M)` or `out(M)` names no value, or several",
    why="`out(M)` is the value that operators of module `M` make and others read; `in(M)` is the value that "
    "they read of others. It must have floating-point entries and depend on weights. If there are "
    "several, a number chooses, counted from 0.",
    example="shard out(blocks.0.drop) [B/dp, S/tp, _]   # a dropout of 0 computes nothing",
    instead="shard out(blocks.0) [B/dp, S/tp, _]",
)
NO_SEQUENCE = shown(
    name="P0161",
    title="modules without a sequence",
    why="a `sequence` line splits what modules read and return along the sequence: the dim that comes from a "
    "dim of the inputs other than `B`. parc follows this dim through the model by the rules of its "
    "operators.",
    example="input picture float32 [B, 3, 32, 32]\nsequence layers.* over tp",
    instead="input tokens int64 [B, S]\nsequence layers.* over tp",
)
NOT_PLACED = shown(
    name="P0162",
    title="a value that another line splits otherwise",
    why="lines about weights and inputs have priority. If they already split this value inside the model, the new"
    " split must fit into it: one axis can split the parts of another, along one dim.",
    example="shard positions [S/cp, _]   # a parameter that is added to each sequence\nsequence blocks.* over tp",
    instead="replicate positions\nsequence blocks.* over tp",
)
NOT_TENSOR_PARALLEL = shown(
    name="P0163",
    title="a sequence line over an axis that splits no weights of its modules",
    why="a `sequence` line splits the values between layers whose weights are split over the same axis. Without such"
    " layers every product would work on a part of each sequence, and only attention would gather it: that is context"
    " parallelism.",
    example="mesh dp=2, tp=2\nsequence blocks.* over dp",
    instead="mesh dp=2, tp=2\ncolumn blocks.*.mlp.up over tp\nrow blocks.*.mlp.down over tp\nsequence blocks.* over tp",
)
