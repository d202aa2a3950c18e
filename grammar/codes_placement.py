"""Codes of messages about placements: axes, names, dims and conflicts (P01xx, P0248)."""

from __future__ import annotations

from .code import Code, shown

UNKNOWN_AXIS = Code(
    name="P0101",
    title="an axis that the mesh does not have",
    why="placements are over the named axes of the `mesh` line; an axis that is not used can have size 1 there.",
    example="mesh dp=2\ncolumn blocks.*.mlp.up over tp",
    instead="mesh dp=2, tp=2\ncolumn blocks.*.mlp.up over tp",
)
AXIS_TWICE = Code(
    name="P0102",
    title="one axis twice on one tensor",
    why="the ranks along an axis hold different parts of one dim, so they cannot hold different parts of "
    "another dim too.",
    example="mesh tp=2\nshard blocks.0.mlp.up.weight [h/tp, d/tp]",
    instead="mesh tp=2\nshard blocks.0.mlp.up.weight [h/tp, _]",
)
WRONG_DIM = Code(
    name="P0103",
    title="a layout does not have the tensor's dims",
    why="a layout has one entry for each dim, in order; `_` is a whole dim and `...` stands for the rest.",
    example="mesh tp=2\nshard blocks.0.mlp.up.weight [_, _, h/tp]",
    instead="mesh tp=2\nshard blocks.0.mlp.up.weight [_, h/tp]",
)
NOTHING_MATCHED = Code(
    name="P0104",
    title="a name or pattern matches nothing in the model",
    why="names are those of the model's parameters and modules, and of the plan's inputs; `?` at the end of a pattern"
    " says that it may match nothing.",
    example="mesh tp=2\ncolumn blocks.*.mpl.up over tp",
    instead="mesh tp=2\ncolumn blocks.*.mlp.up over tp",
)
CONFLICT = Code(
    name="P0105",
    title="two lines conflict",
    why="both lines place the same tensor on the same axis, in different ways. `shard` and `replicate` place "
    "a tensor on every axis, also on axes that they do not name.",
    example="mesh tp=2\ncolumn blocks.*.mlp.up over tp\nrow blocks.0.mlp.up over tp",
    instead="mesh tp=2\ncolumn blocks.*.mlp.up over tp",
)
NO_WEIGHT = Code(
    name="P0106",
    title="not a weight that this directive can split",
    why="`column` and `row` split the weight of a linear layer; `vocab` splits an embedding table or a linear head.",
    example="mesh tp=2\ncolumn embed over tp",
    instead="mesh tp=2\nvocab embed over tp",
)
UNEVEN_SHARD = Code(
    name="P0107",
    title="a sharded dim does not divide evenly",
    why="parc never pads silently: a padded shard takes more memory. `pad` makes a parameter's dim longer by entries"
    " that nothing else sees: gradients, checkpoints and the model have the dim as it is.",
    example="mesh tp=4\nvocab embed over tp",
    instead="mesh tp=4\nvocab embed over tp pad",
)
WRONG_SUB_DIMS = Code(
    name="P0108",
    title="sub-dims do not make up the dim",
    why="the sub-dims in parentheses, multiplied, must give the size of the dim. One size may be left out, "
    "and is computed; sizes before a split must be known.",
    example="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (5 h/tp d)",
    instead="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (3 h/tp d)",
)
REPEATED_PLACEMENT = Code(
    name="P0109",
    title="a placement without effect",
    why="earlier lines already say all that this line says.",
    example="mesh tp=2\ncolumn blocks.*.mlp.up over tp\ncolumn blocks.0.mlp.up over tp",
    instead="mesh tp=2\ncolumn blocks.*.mlp.up over tp",
)
NOT_PADDED = Code(
    name="P0110",
    title="`pad` where nothing can be padded",
    why="only a dim of a parameter that an axis splits can be padded. Inputs have the sizes of the data, and "
    "a whole dim needs no padding.",
    example="mesh tp=4\nshard embed.weight [V/tp, _ pad]",
    instead="mesh tp=4\nshard embed.weight [V/tp pad, _]",
)
PADDED_TWICE = Code(
    name="P0111",
    title="a padded dim is split in two places",
    why="the added entries are at the end of the sub-dim that is split. Another split of the same dim, before "
    "or behind it, would cut through them.",
    example="mesh dp=2, tp=2\nshard head.weight [(c/dp=2 d/tp) pad, _]",
    instead="mesh dp=2, tp=2\nshard head.weight [(c=2 d/dp/tp) pad, _]",
)
UNEVEN_HEADS = shown(
    name="P0112",
    title="attention heads do not divide over the ranks",
    why="a rank computes whole heads, so the number of query heads must be a multiple of the ranks. There may "
    "be fewer KV heads than ranks, if the number of ranks is a multiple of the KV heads: then several "
    "ranks hold the same KV head.",
    example="mesh tp=4\ncolumn blocks.*.attn.qkv over tp rows (3 h/tp d)   # 6 heads",
    instead="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (3 h/tp d)",
)
PARTS_UNKNOWN = Code(
    name="P0113",
    title="parts that follow each other are not known, or not split alike",
    why="`(a + b)` is a dim that holds one part after the other. Each part is split by itself, all parts over "
    "the same axes. Their sizes are those at which the model's code cuts the dim, or you write them.",
    example="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (h/tp d + g/tp d)",
    instead="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (h/tp=4 d=2 + g/tp=8 d)",
)
SPLIT_ALREADY = Code(
    name="P0114",
    title="`zero` over an axis that splits the parameter already",
    why="`zero` stores a parameter in parts if all ranks of the axis compute with the whole of it. Here each "
    "rank computes with its own part already, so nothing is stored twice.",
    example="mesh dp=2, tp=2\ncolumn blocks.*.mlp.up over tp\nzero 3 over tp",
    instead="mesh dp=2, tp=2\ncolumn blocks.*.mlp.up over tp\nzero 3 over dp",
)
UNEVEN_NODES = Code(
    name="P0130",
    title="nodes that do not fit the mesh",
    why="ranks are numbered along the mesh, and the last axis counts fastest; each node has as many ranks as "
    "`node` says, in this order. Every axis must lie inside nodes, lie across them, or be cut by them "
    "into equal parts.",
    example="mesh dp=4, tp=2\nnode 6",
    instead="mesh dp=4, tp=2\nnode 4",
)
NO_LEVELS = Code(
    name="P0131",
    title="a line about nodes without effect",
    why="`within node` means the ranks of an axis that share a node; `hierarchical` works inside nodes first, "
    "then across them. If no two ranks of the axis share a node, or all of them do, the line changes "
    "nothing.",
    example="mesh dp=4, tp=2\nnode 2\ncolumn blocks.*.mlp.up over tp\nzero 3 over dp within node",
    instead="mesh dp=4, tp=2\nnode 4\ncolumn blocks.*.mlp.up over tp\nzero 3 over dp within node",
)
NOT_COMPRESSED = Code(
    name="P0132",
    title="a gradient that cannot be compressed",
    why="`compress` rounds the sum of a gradient over ranks once a step, and keeps the rounding error for the "
    "next step. `zero 2` and `zero 3` sum in every backward instead. Frozen parameters, and parameters of "
    "whole numbers, have no gradient.",
    example="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 2 over dp\ncompress gradients over dp using int8",
    instead="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 1 over dp\ncompress gradients over dp using int8",
)
SMALL_BUCKET = shown(
    name="P0133",
    title="a bucket smaller than a tensor",
    why="parc never cuts a tensor to send it: a tensor larger than the bucket is a message of its own. `bucket`"
    " limits only messages that hold several tensors.",
    example="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp\nbucket 1KB",
    instead="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp\nbucket 1MB",
)
SHARED_OVER_UNITS = shown(
    name="P0134",
    title="a unit that cuts through a shared parameter",
    why="the weights of a unit are gathered before it and freed after it. If operators outside the unit also read one"
    " of these weights, it would be gathered and summed twice. A named unit must avoid that. Blocks that no line names"
    " may share parameters: each block gathers what it reads.",
    example="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp unit head   # head.weight is tokens.weight",
    instead="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp",
)
UNEVEN_TOKENS = shown(
    name="P0135",
    title="ranks that share experts cannot take equal parts of their tokens",
    why="ranks that split experts route different tokens. If all of them have the same tokens, each routes a "
    "part, so the number of tokens of a microbatch on a rank must be a multiple of these ranks.",
    example="sizes B=2, S=3\nmesh ep=4\nexperts model.layers.*.mlp.experts over ep dropless",
    instead="sizes B=4, S=3\nmesh ep=4\nshard input_ids, targets [B/ep, _]\n"
    "experts model.layers.*.mlp.experts over ep dropless",
)
LOW_CAPACITY = shown(
    name="P0138",
    title="experts that take less than one token of a sequence",
    why="`capacity F` is F times the mean number of tokens of a sequence that choose an expert: F k S / E, if "
    "each of S tokens chooses k of E experts.",
    example="sizes B=8, S=4\nexperts model.layers.*.mlp.experts over ep capacity 0.5   # 2 of 8 experts a token",
    instead="sizes B=8, S=4\nexperts model.layers.*.mlp.experts over ep capacity 1.25",
)
NO_BIAS = shown(
    name="P0139",
    title="`balance bias` for a router that has no bias",
    why="`balance bias` changes a buffer that the router adds to the scores of experts before it chooses, "
    "such as DeepSeek-V3's `e_score_correction_bias`. parc looks for it beside the experts: a buffer of "
    "real numbers, one for each expert.",
    example="experts model.layers.*.mlp.experts over ep dropless balance bias 0.001   # Mixtral's router has no bias",
    instead="experts model.layers.*.mlp.experts over ep dropless\n"
    "loss cross_entropy(output.logits, targets) + 0.01 output.aux_loss",
)
NO_OPERATOR = Code(
    name="P0150",
    title="`keep` names an operator that the modules do not use",
    why="`keep` names operators of the model's code as torch calls them, or groups of operators: `products`, "
    "`attention`, `random`, `collectives`. An operator that the module does not use has no results to "
    "keep.",
    example="recompute blocks.*.mlp keep attention",
    instead="recompute blocks.*.mlp keep gelu",
)
NOTHING_REMADE = Code(
    name="P0151",
    title="a line of recomputation that changes nothing",
    why="even without this line, backward recomputes cheap values: views, casts, copies and operators on single"
    " entries. The line has an effect only if a module has other values, and if the line does not keep all of them.",
    example="recompute blocks.*.mlp.up keep products",
    instead="recompute blocks.*.mlp.up",
)
TWO_SIZES = Code(
    name="P0152",
    title="two `recompute … fit` lines",
    why="`recompute … fit` chooses what to recompute, until a rank needs no more memory than this size. A rank has"
    " one memory, so a plan has one such line. Other lines may say what is kept of blocks that it does not name.",
    example="recompute encoder.* fit 10GB\nrecompute decoder.* fit 10GB",
    instead="recompute encoder.*, decoder.* fit 10GB",
)
NO_FIT = shown(
    name="P0153",
    title="a step does not fit into the size of `recompute … fit`",
    why="whatever is recomputed, a rank holds parameters, gradients, the optimizer's state, messages, and what each"
    " block reads. The smallest possible size is that of a step that recomputes all blocks of the line.",
    example="recompute blocks.* fit 1MB",
    instead="recompute blocks.* fit 1GB\nzero 2 over dp",
)
NO_ATTENTION = shown(
    name="P0144",
    title="a context line for modules without attention",
    why="a `context` line says how attention works if ranks have parts of a sequence. parc looks for calls of "
    "torch's `scaled_dot_product_attention` in the modules that the line names.",
    example="context blocks.*.mlp dim S over cp using ring",
    instead="context blocks.*.attn dim S over cp using ring",
)
FEW_HEADS_EACH = shown(
    name="P0145",
    title="heads that do not divide among the ranks of a sequence",
    why="`using ulysses` gives each rank some heads of the whole sequence. Other axes may split heads first; "
    "then the KV heads that a rank has must be a multiple of the ranks of this axis.",
    example="mesh cp=4   # and a model of 2 heads of keys\ncontext ** dim S over cp using ulysses",
    instead="mesh cp=4\ncontext ** dim S over cp using zigzag",
)
WHOLE_SEQUENCE = shown(
    name="P0146",
    title="an operator that needs a whole sequence",
    why="under a `context` line a rank has a part of each sequence. Attention gets the other parts as the "
    "line says. A recurrence, a convolution or a shift along the sequence would gather the whole sequence "
    "on every rank.",
    example="return self.head(x)[:, :-1]   # the model shifts its outputs itself",
    instead="return self.head(x)   # the targets are shifted instead",
)
WHOLE_KEYS = shown(
    name="P0147",
    title="an attention that holds the keys of a whole sequence",
    why="in a ring, keys go around for one attention. If two attentions read the same keys, or another "
    "operator reads them, ranks gather the keys instead, as with `using gather`: the numbers are the "
    "same, but more memory is used.",
    example="one, two = (F.scaled_dot_product_attention(q, k, v, is_causal=True) for q in queries)",
    instead="one, two = F.scaled_dot_product_attention(torch.cat(queries, 1), k, v, is_causal=True).chunk(2, 1)",
)
WHOLE_OUTPUTS = shown(
    name="P0148",
    title="whole outputs that take more bytes to gather than their weights",
    why="a line splits a layer, and another one keeps its outputs whole: each rank multiplies its columns, and ranks "
    "gather the outputs. With many samples the weights are smaller than the outputs. `zero 3` stores them in parts "
    "too, and gathers them before each use; each rank then multiplies all columns.",
    example="mesh tp=4\ncolumn w over tp\nshard out(w) [_, _]",
    instead="mesh tp=4\nzero 3 over tp on w",
)
NODE_ORDER = shown(
    name="P0149",
    title="an order of the mesh that sends more to other nodes",
    why="ranks are numbered along the mesh, and the last axis counts fastest, so the last axes lie inside nodes. The "
    "axis that sends most while nothing is computed, mostly tensor parallelism, belongs there. A model's numbers do "
    "not depend on the order.",
    example="mesh tp=2, dp=4\nnode 2",
    instead="mesh dp=4, tp=2\nnode 2",
)
IDLE_AXIS = Code(
    name="P0248",
    title="an axis that splits nothing",
    why="nothing is split over this axis: no inputs, no weights, no stages. So its ranks all compute the same.",
    example="mesh dp=2, tp=2\nshard tokens, targets [B/dp, _]",
    instead="mesh dp=2, tp=2\nshard tokens, targets [B/dp, _]\ncolumn blocks.*.mlp.up over tp",
)
