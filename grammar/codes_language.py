"""Codes of messages about a plan's text and statements, which need no model (P00xx)."""

from __future__ import annotations

from .code import Code, shown

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
