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
    why="the ranks along an axis hold different parts of one dim; they cannot also hold different parts of another.",
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
    why="both lines place the same tensor on the same axis, and differently; `shard` and `replicate` place a tensor on"
    " every axis, those that they do not name included.",
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
    why="the product of the sub-dims in parentheses, major first, is the dim; one of them may be inferred, and those"
    " before a split must be known.",
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
    why="what is padded is a dim of a parameter that an axis splits: inputs hold what they are given, and a whole dim"
    " needs no padding.",
    example="mesh tp=4\nshard embed.weight [V/tp, _ pad]",
    instead="mesh tp=4\nshard embed.weight [V/tp pad, _]",
)
PADDED_TWICE = Code(
    name="P0111",
    title="a padded dim is split in two places",
    why="padding is at the end of the sub-dim that is split, so another split of the same dim, major or minor to it,"
    " would cut through it.",
    example="mesh dp=2, tp=2\nshard head.weight [(c/dp=2 d/tp) pad, _]",
    instead="mesh dp=2, tp=2\nshard head.weight [(c=2 d/dp/tp) pad, _]",
)
UNEVEN_HEADS = shown(
    name="P0112",
    title="attention heads do not divide over the ranks",
    why="a rank computes whole heads. Queries' heads divide by the ranks; heads of keys and values may be fewer, where"
    " they divide the ranks: then several ranks keep a copy of each.",
    example="mesh tp=4\ncolumn blocks.*.attn.qkv over tp rows (3 h/tp d)   # 6 heads",
    instead="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (3 h/tp d)",
)
PARTS_UNKNOWN = Code(
    name="P0113",
    title="parts that follow each other are not known, or not split alike",
    why="`(a + b)` is a dim that holds one part after the other, each split for itself, over the same axes. Their sizes"
    " are those that the model takes the dim apart in, or are given.",
    example="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (h/tp d + g/tp d)",
    instead="mesh tp=2\ncolumn blocks.*.attn.qkv over tp rows (h/tp=4 d=2 + g/tp=8 d)",
)
SPLIT_ALREADY = Code(
    name="P0114",
    title="`zero` over an axis that splits the parameter already",
    why="`zero` stores in parts what ranks compute with as a whole. Ranks that each compute with their own part of a"
    " parameter store nothing twice.",
    example="mesh dp=2, tp=2\ncolumn blocks.*.mlp.up over tp\nzero 3 over tp",
    instead="mesh dp=2, tp=2\ncolumn blocks.*.mlp.up over tp\nzero 3 over dp",
)
UNEVEN_NODES = Code(
    name="P0130",
    title="nodes that do not fit the mesh",
    why="ranks are numbered along the mesh, the last axis fastest, and each node has the next so many of them. Every"
    " axis must lie inside nodes, across them, or be cut by them into equal parts.",
    example="mesh dp=4, tp=2\nnode 6",
    instead="mesh dp=4, tp=2\nnode 4",
)
NO_LEVELS = Code(
    name="P0131",
    title="a line about nodes without effect",
    why="`within node` means the ranks of an axis that share a node, and `hierarchical` those and the nodes: where no"
    " two ranks of the axis share one, or all do, there is nothing to do.",
    example="mesh dp=4, tp=2\nnode 2\ncolumn blocks.*.mlp.up over tp\nzero 3 over dp within node",
    instead="mesh dp=4, tp=2\nnode 4\ncolumn blocks.*.mlp.up over tp\nzero 3 over dp within node",
)
NOT_COMPRESSED = Code(
    name="P0132",
    title="a gradient that cannot be compressed",
    why="`compress` rounds the sum of a gradient over ranks once a step, and keeps what rounding leaves for the next"
    " step. From level 2, `zero` sums in every backward instead; and parameters of whole numbers, or frozen ones, have"
    " no gradient.",
    example="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 2 over dp\ncompress gradients over dp using int8",
    instead="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 1 over dp\ncompress gradients over dp using int8",
)
SMALL_BUCKET = shown(
    name="P0133",
    title="a bucket that is smaller than tensors",
    why="a tensor travels whole: one that is larger than the bucket is a message of its own, so `bucket` bounds the"
    " messages of several tensors alone.",
    example="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp\nbucket 1KB",
    instead="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp\nbucket 1MB",
)
SHARED_OVER_UNITS = shown(
    name="P0134",
    title="a unit that cuts through a shared parameter",
    why="a unit's weights are gathered for it, and freed behind it. One that operators outside the unit read too would"
    " be gathered and summed twice, which is what naming a unit is to avoid. Blocks that no line names share"
    " parameters freely: each gathers what it reads.",
    example="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp unit head   # head.weight is tokens.weight",
    instead="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp",
)
UNEVEN_TOKENS = shown(
    name="P0135",
    title="ranks that share experts cannot take equal parts of their tokens",
    why="ranks that split experts route different tokens. Where all of them have the same tokens, each takes a part, so"
    " their number must divide the tokens of a microbatch on a rank.",
    example="sizes B=2, S=3\nmesh ep=4\nexperts model.layers.*.mlp.experts over ep dropless",
    instead="sizes B=4, S=3\nmesh ep=4\nshard input_ids, targets [B/ep, _]\n"
    "experts model.layers.*.mlp.experts over ep dropless",
)
LOW_CAPACITY = shown(
    name="P0138",
    title="experts that take less than one token of a sequence",
    why="`capacity F` is F times the mean of the tokens of a sequence that choose an expert: F k S / E, where each of S"
    " tokens chooses k of E experts.",
    example="sizes B=8, S=4\nexperts model.layers.*.mlp.experts over ep capacity 0.5   # 2 of 8 experts a token",
    instead="sizes B=8, S=4\nexperts model.layers.*.mlp.experts over ep capacity 1.25",
)
NO_BIAS = shown(
    name="P0139",
    title="a bias to balance that the model does not have",
    why="`balance bias` moves a buffer that a router adds to the scores of experts before it chooses, as DeepSeek-V3's"
    " `e_score_correction_bias`. It is looked for beside the experts: a buffer of real numbers, one an expert.",
    example="experts model.layers.*.mlp.experts over ep dropless balance bias 0.001   # Mixtral's router has no bias",
    instead="experts model.layers.*.mlp.experts over ep dropless\n"
    "loss cross_entropy(output.logits, targets) + 0.01 output.aux_loss",
)
NO_OPERATOR = Code(
    name="P0150",
    title="results to keep of an operator that is not there",
    why="`keep` names operators of the model's code as torch calls them, or families of them: `products`, `attention`,"
    " `random`, `collectives`. One that a module does not have has no results to keep.",
    example="recompute blocks.*.mlp keep attention",
    instead="recompute blocks.*.mlp keep gelu",
)
NOTHING_REMADE = Code(
    name="P0151",
    title="a line of recomputation that changes nothing",
    why="backward makes cheap values again without a line: views, casts, copies, operators on single entries. A line"
    " counts where a module has more than these, and does not keep all of it.",
    example="recompute blocks.*.mlp.up keep products",
    instead="recompute blocks.*.mlp.up",
)
TWO_SIZES = Code(
    name="P0152",
    title="two lines that choose what to make again",
    why="`recompute … fit` chooses until a rank needs no more memory than its size. A rank has one memory, so there is"
    " one such line; other lines may say what blocks keep that it does not name.",
    example="recompute encoder.* fit 10GB\nrecompute decoder.* fit 10GB",
    instead="recompute encoder.*, decoder.* fit 10GB",
)
NO_FIT = shown(
    name="P0153",
    title="a size into which a step does not fit",
    why="a rank holds parameters, gradients, the state of the optimizer and messages, whatever backward makes again,"
    " and of every block what it reads. The least size is that of a step that makes all blocks of the line again.",
    example="recompute blocks.* fit 1MB",
    instead="recompute blocks.* fit 1GB\nzero 2 over dp",
)
NO_ATTENTION = shown(
    name="P0144",
    title="a context line for modules without attention",
    why="a `context` line says how attention works where ranks have parts of a sequence. It is looked for as a call of"
    " torch's `scaled_dot_product_attention` in the modules that the line names.",
    example="context blocks.*.mlp dim S over cp using ring",
    instead="context blocks.*.attn dim S over cp using ring",
)
FEW_HEADS_EACH = shown(
    name="P0145",
    title="heads that do not divide among the ranks of a sequence",
    why="`using ulysses` gives every rank the whole sequence of some heads. Heads that other axes split stay so, and a"
    " head of keys goes to one rank.",
    example="mesh cp=4   # and a model of 2 heads of keys\ncontext ** dim S over cp using ulysses",
    instead="mesh cp=4\ncontext ** dim S over cp using zigzag",
)
WHOLE_SEQUENCE = shown(
    name="P0146",
    title="an operator that needs a whole sequence",
    why="under a `context` line a rank has a part of each sequence. Attention gets other parts as the line says; a"
    " recurrence, a convolution or a shift along the sequence would gather all of it on every rank.",
    example="return self.head(x)[:, :-1]   # the model shifts its outputs itself",
    instead="return self.head(x)   # the targets are shifted instead",
)
WHOLE_KEYS = shown(
    name="P0147",
    title="an attention that holds the keys of a whole sequence",
    why="keys go around a ring for one attention. Where two of them read the same keys, or another operator does, ranks"
    " gather these instead, as with `using gather`: the numbers are the same, the memory is not.",
    example="one, two = (F.scaled_dot_product_attention(q, k, v, is_causal=True) for q in queries)",
    instead="one, two = F.scaled_dot_product_attention(torch.cat(queries, 1), k, v, is_causal=True).chunk(2, 1)",
)
IDLE_AXIS = Code(
    name="P0248",
    title="an axis that splits nothing",
    why="ranks differ in what they hold of inputs and weights, or in their stage: those along an axis that no line uses"
    " compute the same, each for itself.",
    example="mesh dp=2, tp=2\nshard tokens, targets [B/dp, _]",
    instead="mesh dp=2, tp=2\nshard tokens, targets [B/dp, _]\ncolumn blocks.*.mlp.up over tp",
)
