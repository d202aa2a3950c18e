"""Codes of messages about a plan's text and statements, which need no model (P00xx)."""

from __future__ import annotations

from .diagnostics import Code, shown

MALFORMED = Code(
    name="P0001",
    title="the text of a line is malformed",
    why="a plan has one statement a line: a verb, then phrases separated by spaces; commas join items of one phrase.",
    example="mesh dp=2, tp=",
    instead="mesh dp=2, tp=2",
)
UNKNOWN_VERB = Code(
    name="P0002",
    title="unknown verb",
    why="the first word of a line is its verb, and there is no directive with this name.",
    example="colum blocks.*.mlp.up over tp",
    instead="column blocks.*.mlp.up over tp",
)
MISSING_ARGUMENT = Code(
    name="P0003",
    title="a directive lacks an argument",
    why="the usage line of a directive lists its arguments. Only those in `[]` may be left out.",
    example="column blocks.*.mlp.up",
    instead="column blocks.*.mlp.up over tp",
)
UNEXPECTED_ARGUMENT = Code(
    name="P0004",
    title="a directive has an argument too many",
    why="after its subject, a line has the clauses of its usage line, one phrase each, and nothing else.",
    example="column blocks.*.mlp.up across tp",
    instead="column blocks.*.mlp.up over tp",
)
WRONG_KIND = Code(
    name="P0005",
    title="an argument is of the wrong kind",
    why="each argument takes one kind of item: a word, a number, a string, a layout.",
    example='seed "seven"',
    instead="seed 7",
)
REPEATED = Code(
    name="P0006",
    title="something that can be said once is said twice",
    why="only one of the two can hold, and a reader would have to guess which one.",
    example="seed 1\nseed 2",
    instead="seed 1",
)
UNDEFINED_NAME = Code(
    name="P0007",
    title="`$name` is not defined",
    why="`$name` stands for the value of a `let` in the same plan. Only a `let` defines such a name.",
    example="let width = 64\nseed $widht",
    instead="let width = 64\nseed $width",
)
UNKNOWN_DEFINE = Code(
    name="P0008",
    title="there is no such `let` to override",
    why="`-D name=value` and the arguments of an `include` replace the value of a `let` and nothing else, so that a"
    " misspelt name is never ignored.",
    example="# -D widht=64\nlet width = 32\nseed $width",
    instead="-D width=64",
)
MISSING_STATEMENT = Code(
    name="P0009",
    title="a plan lacks a statement",
    why="a build needs a model and its inputs; training needs a loss and an optimizer, and inference neither; and every"
    " name used in an input needs a size.",
    example="input tokens int64 [B, S]\nsizes B=4",
    instead="input tokens int64 [B, S]\nsizes B=4, S=128",
)
BAD_VALUE = Code(
    name="P0010",
    title="a value is out of range",
    why="the value has no meaning here, whatever the model is.",
    example="mesh dp=0",
    instead="mesh dp=1",
)
NOT_SUPPORTED = Code(
    name="P0011",
    title="not supported yet",
    why="the language has a word for this, but parc does not implement it. parc refuses it instead of ignoring it.",
    example="precision fp8",
    instead="precision bf16",
)
UNKNOWN_INPUT = Code(
    name="P0012",
    title="a name that no `input` declares",
    why="the loss is computed from the model's output and from declared inputs.",
    example="input tokens int64 [B, S]\nsizes B=4, S=8\nloss cross_entropy(output, labels)",
    instead="input labels int64 [B, S]",
)
UNREADABLE = shown(
    name="P0013",
    title="a plan file cannot be read",
    why="a plan is a UTF-8 text file.",
    example="parc check missing.parc",
    instead="parc check gpt.parc",
)
UNEVEN_BATCH = Code(
    name="P0014",
    title="the batch does not divide into microbatches",
    why="`B` is the batch of one optimizer step; every microbatch has the same number of samples.",
    example="sizes B=6\nschedule microbatches 4",
    instead="sizes B=8\nschedule microbatches 4",
)
NO_EFFECT = Code(
    name="P0015",
    title="a line without effect",
    why="a line that changes nothing is usually a mistake: a misspelt name, or a copy of another line.",
    example="let width = 64, depth = 2\nseed $width",
    instead="let width = 64\nseed $width",
)
UNSCALED = Code(
    name="P0016",
    title="float16 without a loss scale",
    why="float16 has no number between 0 and 6e-8, so small gradients become zero. A loss scale multiplies the loss,"
    " and so every gradient, before backward, and divides gradients again before the norm. A dynamic one is as large"
    " as float16 allows; bfloat16 has the range of float32 and needs none.",
    example="precision fp16",
    instead="precision fp16 loss_scale dynamic",
)
FOR_TRAINING = Code(
    name="P0017",
    title="a line for training in a plan for inference",
    why="a plan without `loss` and `optimizer` lines is for inference: its programs make the model's outputs in"
    " `eval()`. Gradients, the optimizer's state and all that training keeps are not there, so no line can place them.",
    example="# for inference\nmesh dp=2\nzero 3 over dp",
    instead="mesh dp=2",
)
INVISIBLE = shown(
    name="P0023",
    title="a character that nobody sees",
    why="a control character, a character that turns the direction of writing, or an unusual space makes a "
    "line read differently from how it looks.",
    example="parc check gpt.parc   # in which U+202E stands before a name",
    instead="parc check gpt.parc   # without it: letters, digits, signs, spaces and tabs",
)
TOO_LONG = shown(
    name="P0024",
    title="a plan is longer than any that makes sense",
    why="a plan is read whole, with all files that it includes. 10,000 lines would name every parameter of a "
    "model of 126 layers six times, and take some seconds; patterns such as `blocks.*` need a few lines.",
    example='parc check a.parc   # include "b.parc" twice, b.parc c.parc twice, and so on',
    instead="parc check a.parc   # patterns of names, `blocks.*.attn.qkv`, in place of a line for each",
)
NO_PLAN = shown(
    name="P0025",
    title="an included file is no plan",
    why="fewer than half of its lines are statements of a plan, so it was probably named by mistake. Its text "
    "is not shown.",
    example='parc check a.parc   # include "../secrets.txt"',
    instead='parc check a.parc   # include "layers.parc"',
)
NO_FILE = Code(
    name="P0020",
    title="an included file cannot be read",
    why="`include` takes a file, relative to the one that includes it, or `parc:` and the name of a family that parc"
    " ships.",
    example='mesh tp=2\ninclude "parc:lama" (tp=2)',
    instead='mesh tp=2\ninclude "parc:llama" (tp=2)',
)
INCLUDE_CYCLE = shown(
    name="P0021",
    title="a file includes itself",
    why="an included file stands for its lines. A file that includes itself, directly or through others, "
    "would have no end.",
    example='parc check a.parc   # include "b.parc"; and b.parc: include "a.parc"',
    instead="parc check a.parc   # what both need in a third file, c.parc",
)
MESH_DIFFERS = Code(
    name="P0022",
    title="two files give an axis different sizes",
    why="an included file names the axes that it needs with their sizes, and may add axes; an axis has one size.",
    example='mesh tp=2\ninclude "parc:llama" (tp=4)',
    instead='mesh tp=2\ninclude "parc:llama" (tp=2)',
)


# ---- codes of messages about placements: axes, names, dims and conflicts (P01xx, P0248).


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


# ---- codes of messages about pipelines: stages, their cuts and their schedule (P0115 to P0119, P024x).


STAGE_AXIS = Code(
    name="P0115",
    title="the axis of stages is used for something else",
    why="the ranks along this axis hold the stages of a pipeline, one after the other. No line can split "
    "anything else over it.",
    example="mesh pp=2\nstage before blocks.1 over pp\nschedule gpipe microbatches 2\ncolumn blocks.*.mlp.up over pp",
    instead="mesh pp=2, tp=2\nstage before blocks.1 over pp\nschedule gpipe microbatches 2\ncolumn blocks.*.mlp.up over"
    " tp",
)
NO_SCHEDULE = Code(
    name="P0116",
    title="stages without a schedule, or a schedule without stages",
    why="the name of a schedule says in which order stages run the microbatches: `gpipe`, `1f1b`, `interleaved`, or"
    " `table` with a file. Without stages there is only one order.",
    example="mesh pp=2\nstage before blocks.1 over pp\nschedule microbatches 2",
    instead="mesh pp=2\nstage before blocks.1 over pp\nschedule 1f1b microbatches 2",
)
SCHEDULE_MISFIT = Code(
    name="P0117",
    title="a schedule does not fit",
    why="each schedule is made for certain numbers of stages, microbatches and chunks: `gpipe` and `1f1b` have one"
    " stage a rank, `interleaved` has several, `looped` any number. `1f1b` wants at least as many microbatches as"
    " ranks, `interleaved` a multiple of the ranks; `gpipe` and `looped` take any number.",
    example="mesh pp=2\nstage balanced over pp\nschedule 1f1b microbatches 4 chunks 2",
    instead="mesh pp=2\nstage balanced over pp\nschedule interleaved microbatches 4 chunks 2",
)
STAGE_COUNT = Code(
    name="P0118",
    title="the cuts do not make the right number of stages",
    why="every rank along the axis has one stage, or as many as `chunks` says; n stages need n - 1 cuts.",
    example="mesh pp=2\nstage before blocks.0, blocks.1 over pp\nschedule gpipe microbatches 2",
    instead="mesh pp=2\nstage before blocks.1 over pp\nschedule gpipe microbatches 2",
)
EMPTY_STAGE = shown(
    name="P0240",
    title="a stage with no work",
    why="each stage must compute something with the model's weights, or with values that were computed from "
    "them; the loss alone is enough.",
    example="stage before embed over pp",
    instead="stage after out(embed) over pp",
)
TOO_MANY_STAGES = shown(
    name="P0241",
    title="more stages than the model has places to cut",
    why="`stage balanced` cuts where layers and other modules with weights begin and end, and every stage has work.",
    example="mesh pp=64\nstage balanced over pp   # a model of two layers",
    instead="mesh pp=2\nstage balanced over pp",
)
STATE_CYCLE = shown(
    name="P0242",
    title="a cut inside a cycle of state",
    why="a buffer that the forward updates, such as a running mean, must be read and written by one stage: "
    "each microbatch begins with the buffer that the one before it left, and stages work on several "
    "microbatches at once.",
    example="stage before up over pp   # `norm` runs both before and after it",
    instead="stage before head over pp",
)
BACKWARD_FLOW = shown(
    name="P0243",
    title="a value that flows backwards across a cut",
    why="a stage can read only values of earlier stages, so cuts are written in the order in which the model runs.",
    example="stage before blocks.3, blocks.1 over pp",
    instead="stage before blocks.1, blocks.3 over pp",
)
NO_PLACE = shown(
    name="P0244",
    title="no place to cut at a module",
    why="a cut lies before a module's first operator or after its last one. This module runs no operator.",
    example="stage before blocks.1.drop over pp   # with a dropout of 0",
    instead="stage before blocks.1.mlp over pp",
)


# ---- codes of messages about values inside a model and their sequences (P016x).


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


# ---- codes of messages about layers that send tokens to experts (P02xx).


_FORM = """import torch

import parc


def expert(rows, up):
    return {expert}


@parc.register_experts(Layer)
def form(layer, x):
    weights, index = layer.router(x).softmax(-1).topk(2)
    return parc.routed(x, index, {weights}, expert, [layer.up])"""

NO_EXPERTS = Code(
    name="P0263",
    title="experts that packed rows do not follow",
    why="the code of one expert runs on the rows of all experts. If it reads a weight of its own, each row "
    "must meet the weight of its expert. parc can do this for linear layers, matrix products, norms of "
    "rows, and functions of single entries. Experts in a list must have one structure, and each token "
    "must have the same number of them, [tokens, k]. A loop over a list gives each expert the tokens that "
    "chose it, and adds its results to the rows of these tokens.",
    example=_FORM.format(expert="rows * up.cumsum(0)", weights="weights"),
    instead=_FORM.format(expert="rows * up", weights="weights"),
    language="python",
)
MIXED_ROWS = Code(
    name="P0264",
    title="an operator that mixes the rows of an expert",
    why="the rows that a rank has for an expert, and their order, depend on the plan. So an expert must "
    "compute each row by itself: a statistic over its tokens, or a random number for each, would differ "
    "from plan to plan.",
    example=_FORM.format(expert="(rows - rows.mean(0)) * up", weights="weights"),
    instead=_FORM.format(expert="(rows - rows.mean(1, keepdim=True)) * up", weights="weights"),
    language="python",
)
OTHER_FORM = Code(
    name="P0265",
    title="a form of experts that computes something else",
    why="a layer that `parc.register_experts` names is captured by its form, and trained by it. A build runs the"
    " layer's own forward beside it, on random inputs: loss and gradients must be the same.",
    example=_FORM.format(expert="rows * up", weights="2 * weights"),
    instead=_FORM.format(expert="rows * up", weights="weights"),
    language="python",
)


# ---- codes of messages about views of the mesh (P014x).


BAD_VIEW = Code(
    name="P0140",
    title="a view that does not fit the mesh",
    why="the axes of a view are the ranks of axes that stand next to each other in `mesh`, in their order, "
    "each once. If an axis of the view begins or ends inside an axis of `mesh`, it must cut that axis "
    "into equal parts.",
    example="mesh dp=2, tp=4\nview dp, tp as edp=2, ep=2 in blocks.*.mlp",
    instead="mesh dp=2, tp=4\nview dp, tp as edp=2, ep=4 in blocks.*.mlp\ncolumn blocks.*.mlp.up over ep",
)
OUTSIDE_VIEW = Code(
    name="P0141",
    title="an axis that a tensor does not have",
    why="a view replaces axes for the parameters that it names: lines that place these parameters name the "
    "view's axes, and all other lines name those of `mesh`.",
    example="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\ncolumn blocks.*.attn.qkv over b rows (3 h/b d)",
    instead="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\ncolumn blocks.*.mlp.up over b",
)
UNUSED_VIEW = Code(
    name="P0142",
    title="a view that no line uses",
    why="a view places nothing by itself: it gives names to axes, for lines that place parameters.",
    example="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp",
    instead="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\ncolumn blocks.*.mlp.up over b",
)
TWO_VIEWS = Code(
    name="P0143",
    title="a parameter in two views",
    why="a parameter lies along the axes of one mesh: that of the plan, or that of one view.",
    example="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\nview tp as c=2, d=2 in blocks.0",
    instead="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\nview tp as c=2, d=2 in blocks.0.attn\n"
    "column blocks.*.mlp.up over b\ncolumn blocks.0.attn.out over d",
)
