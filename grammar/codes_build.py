"""Codes of messages about a build: the model, its capture, and files (P02xx), a run (P03xx), and promises (P04xx)."""

from __future__ import annotations

from .code import MODEL, Code, shown

MODEL_FAILED = shown(
    name="P0201",
    title="the model cannot be made",
    why="the callable of the `model` line, or the module it stands in, failed; the code's own traceback follows.",
    example='model "./model.py:Modle" (width=64)',
    instead='model "./model.py:Model" (width=64)',
)
CONTROL_FLOW = Code(
    name="P0202",
    title="control flow that depends on the values of tensors",
    why="a build holds one graph for all batches, so a branch on what a tensor holds cannot be captured.",
    example=MODEL.format(body="return x * 2 if x.sum() > 0 else x"),
    instead=MODEL.format(body="return torch.where(x.sum() > 0, x * 2, x)"),
    language="python",
)
RETURNED_CACHE = shown(
    name="P0203",
    title="the model returns a key/value cache",
    why="a training step has no use for a cache, and the cache would hold the whole sequence on every rank.",
    example='model "transformers:LlamaForCausalLM" (use_cache=true)',
    instead='model "./llama.py:build"   # with config.use_cache = False',
)
LOSS_NOT_NUMBER = shown(
    name="P0204",
    title="the loss is not a single number",
    why="gradients are those of one number; a loss for each token must be summed or averaged first.",
    example='loss "./model.py:token_losses"(output, targets)',
    instead="loss cross_entropy(output, targets)",
)
CAPTURE_FAILED = Code(
    name="P0205",
    title="the model cannot be captured",
    why="tracing the model on tensors without data failed; the cause is the model's own, and its place is given.",
    example=MODEL.format(body="return torch.from_numpy(x.numpy() * 2)"),
    instead=MODEL.format(body="return x * 2"),
    language="python",
)
WRONG_INPUTS = shown(
    name="P0206",
    title="the model is not called with these inputs",
    why="inputs go to the parameters of the model's forward by name, never by their order; only what the loss names"
    " need not be one. `as` gives a parameter's name where the input has another.",
    example="input words int64 [B, S]   # the model's forward(tokens)",
    instead="input words as tokens int64 [B, S]",
)
NO_DIVIDE = shown(
    name="P0207",
    title="a value inside the model does not divide",
    why="a dim somewhere in the model, whole or a rank's part of it, is no whole number for some of the declared sizes;"
    " parc rounds none, and pads only where a line says so.",
    example="sizes B=8, S=8..40        # the model averages pairs: S/2 of them",
    instead="sizes B=8, S=8..40 by 2",
)
WITHOUT_RULE = Code(
    name="P0208",
    title="an operator without a sharding rule",
    why="parc knows nothing of how the operator treats its dims, so its operands are gathered whole: right, but dear.",
    example="parc.register_rule is not called for mylib::scale",
    instead='parc.register_rule("mylib.scale.default", "... d, d -> ... d", linear="0")',
    language="python",
)
UNASKED_RESHARD = shown(
    name="P0209",
    title="a value is moved that no line asked to move",
    why="two lines, or a line and an operator, want the value split differently, so every step pays for the change.",
    example="mesh tp=2\nshard tokens [_, S/tp]\ncolumn blocks.*.attn.qkv over tp",
    instead="mesh tp=2\ncolumn blocks.*.attn.qkv over tp",
)
CHECK_FAILED = shown(
    name="P0210",
    title="a check refused the build",
    why="the emitted programs do not compute what the model computes. If the files were not edited, this is a fault of"
    " parc's own: please report the plan and the message.",
    example="parc verify build   # after a line of a program was changed",
    instead="parc build plan.parc -o build",
)
BAD_BUILD = shown(
    name="P0211",
    title="not a build, or one that was altered",
    why="every file of a build is hashed in its manifest; a missing or edited file would run something else than was"
    " checked.",
    example="parc run build   # after build/programs was edited",
    instead="parc build plan.parc -o build && parc run build",
)
OTHER_TORCH = shown(
    name="P0212",
    title="another torch than the build's",
    why="operators may differ between versions of torch, and the checks were made with the build's.",
    example="parc run build   # built with torch 2.11, run with 2.13",
    instead="parc build plan.parc -o build && parc run build",
)
NO_TWIN = shown(
    name="P0213",
    title="too large to test, and nothing says how it is made small",
    why="numbers are tested by running all ranks in one process; a large model is tested on its twin, the same code"
    " with smaller arguments, whose programs must be the same up to sizes.",
    example='model "./llama.py:llama" (layers=32, width=4096)',
    instead='model "./llama.py:llama" (layers=32, width=4096)\nverify layers=2, width=64',
)
MANY_AXES = shown(
    name="P0250",
    title="a mesh of more axes than a twin can have",
    why="numbers of a build of many ranks are tested on its twin, which has 2 ranks or more along every axis that the"
    " build has: with 1 its programs would be others. They all run in one process, so they are 256 at most.",
    example="mesh a=2, b=2, c=2, d=2, e=2, f=2, g=2, h=2, i=2",
    instead="mesh a=4, b=4, c=4, d=2, e=2, f=2",
)
NOTHING_TRAINED = shown(
    name="P0214",
    title="no parameter is left to train",
    why="a step has gradients of what is trained; with every parameter frozen there is nothing to do.",
    example="freeze **",
    instead="freeze embed",
)
BAD_WEIGHTS = shown(
    name="P0215",
    title="weights that are not the model's",
    why="`init from` takes safetensors files with every tensor of the model's state, by the model's own names; all"
    " that are missing, extra or misshapen, or would be rounded, are named, equal ones of several layers as one.",
    example='init from "weights-of-another-model"',
    instead='init from "weights"',
)
BAD_RULE = Code(
    name="P0216",
    title="a registered rule that does not fit",
    why="a rule says which dims of an operator's tensors go together; one that names other ranks, or under which the"
    " operator or its backward has operands split differently, is not the operator's.",
    example='parc.register_rule("mylib.scale.default", "a b -> a b")  # the model scales a tensor of rank 3',
    instead='parc.register_rule("mylib.scale.default", "... d, d -> ... d", linear="0")',
    language="python",
)
AVERAGED = shown(
    name="P0217",
    title="a loss that microbatches may not add up to",
    why="the losses of microbatches are averaged. That is the whole batch's loss where it is a mean over equally many"
    " elements; a mean over elements that count only where a mask or a target says so weighs them unequally.",
    example="loss output                 # (losses * mask).sum() / mask.sum()\nschedule microbatches 4",
    instead="loss cross_entropy(output, targets)   # ignored targets do not count\nschedule microbatches 4",
)
NOT_RECOMPUTED = Code(
    name="P0218",
    title="the model recomputes activations",
    why="a build holds one graph with its own choice of what is kept for backward, so `torch.utils.checkpoint` in the"
    " model's code would be dropped.",
    example=MODEL.format(body="return torch.utils.checkpoint.checkpoint(torch.tanh, x)"),
    instead=MODEL.format(body="return torch.tanh(x)"),
    language="python",
)
NOT_IN_REALS = Code(
    name="P0256",
    title="an operator on complex numbers that is not known as one of reals",
    why="programs hold real numbers: complex ones are rewritten as pairs of them, and so are arithmetic, powers, `exp`,"
    " `log`, angles, products, sums, FFTs and all that moves entries. Decompositions and solvers of complex matrices"
    " are not.",
    example=MODEL.format(body="return torch.linalg.inv(torch.fft.fft(x)).real"),
    instead=MODEL.format(body="return torch.fft.fft(torch.linalg.inv(x)).real"),
    language="python",
)
KEPT_TWICE = shown(
    name="P0220",
    title="heads of keys and values are kept by several ranks",
    why="there are fewer of them than ranks of the axis over which they are split. Each is computed where it is used,"
    " without communication; gradients of the copies are summed once a step. Where they are fused with queries in one"
    " weight, each rank keeps a part of a head instead, and gathers the others' results.",
    example='include "parc:llama" (tp=4)   # num_key_value_heads=2',
    instead='include "parc:llama" (tp=2)',
)
UNCOUNTED_DRAW = Code(
    name="P0221",
    title="random numbers that no stream counts",
    why="random numbers in a model's forward are functions of a stream's name and the global element, so that every"
    " plan draws the same; dropout, `torch.rand`, `torch.randn` and `torch.bernoulli` have that form.",
    example=MODEL.format(body="return x[:, torch.randperm(x.shape[1])]"),
    instead=MODEL.format(body="return x[:, torch.rand(x.shape[1]).argsort()]"),
    language="python",
)
NO_DEVICE = shown(
    name="P0222",
    title="no such device",
    why="each process of a run computes on a GPU of its own, or all on the CPU. A GPU that was asked for is never"
    " replaced by the CPU, which would be slower without a word.",
    example="parc run build --device cuda   # on a host without a GPU that torch can use",
    instead="parc run build --device cpu",
)
ROUNDED_UPDATES = shown(
    name="P0223",
    title="weights that are updated in a narrow type",
    why="a weight in bfloat16 has 8 bits: an update of less than a 256th of it is lost, step after step. With a"
    " `precision` line the optimizer has float32 copies of the weights, and the model still computes in bfloat16.",
    example='model "./llama.py:llama" (dtype="bfloat16")\noptimizer adamw lr 3e-4',
    instead='model "./llama.py:llama" (dtype="bfloat16")\noptimizer adamw lr 3e-4\nprecision bf16',
)
NO_FIELD = shown(
    name="P0224",
    title="the model's output has no such field",
    why="`output` in a loss is what the model returns, and `output.name` an attribute or an entry of that, `output.1`"
    " the second entry of a tuple.",
    example="loss cross_entropy(output.logits, targets)   # the model returns a tensor",
    instead="loss cross_entropy(output, targets)",
)
OTHER_PROGRAM = shown(
    name="P0225",
    title="another program at other sizes",
    why="one build serves a range of sizes by one program in which they stand as names; a model that does other things"
    " for some of them (a branch on a size, a dim that becomes 1) has no such program.",
    example="sizes B=1..64, S=128      # a dim of 1 is broadcast",
    instead="sizes B=8..64 by 8, S=128",
)
NOT_POLYNOMIAL = Code(
    name="P0226",
    title="a number that does not follow the sizes",
    why="programs for a range of sizes hold sums and products of sizes with rational factors, and one over those; what"
    " else a model makes of a size (a root, a size rounded down) has no place in them.",
    example=MODEL.format(body="return x / math.sqrt(x.shape[1])"),
    instead=MODEL.format(body="return x / x.shape[1]"),
    language="python",
)
LEFT_STEP = Code(
    name="P0230",
    title="a session that an error left in the middle of a step",
    why="ranks meet in the same collectives and messages in the same order. One that leaves a step by an error has"
    " missed some: what it did next would meet what others still wait for.",
    example="try:\n    session.step()\nexcept RuntimeError:\n    loss = session.evaluate(batch)",
    instead="session.step()  # let the error end the process; then `parc run build --resume checkpoint`",
    language="python",
)
WORLD_SIZE = shown(
    name="P0301",
    title="the number of processes is not the mesh's",
    why="each rank of the mesh is one process.",
    example="parc run build --nproc 3   # mesh dp=2, tp=2",
    instead="parc run build --nproc 4",
)
BAD_NUMBER = shown(
    name="P0302",
    title="the loss or a gradient is not a finite number",
    why="an update with it would destroy the weights, so the run stops before it; the step and the first value that is"
    " not finite are named.",
    example="optimizer sgd lr 1e9",
    instead="optimizer adamw lr 3e-4 clip 1.0",
)
BAD_DATA = shown(
    name="P0303",
    title="the data cannot be read",
    why="samples come from the `data` line: text files, or a callable that returns the plan's inputs by name.",
    example='data bytes "nothing/*.txt"',
    instead='data bytes "{stdlib}/*.py"',
)
BAD_STATE = shown(
    name="P0304",
    title="a checkpoint does not fit",
    why="a checkpoint holds tensors by the model's own names; one of another model has other names or shapes. Its"
    " index says which file holds which part of each tensor; a file that is missing or altered is refused by name.",
    example="parc run build --resume checkpoint-of-another-model",
    instead="parc run build --resume checkpoint",
)
NO_COMPILER = shown(
    name="P0305",
    title="no compiler for --compile",
    why="`--compile` writes code for the work between collectives, in C++ on CPUs and in Triton on GPUs, and has it"
    " compiled here.",
    example="CXX=nothing parc run build --compile",
    instead="parc run build   # or install g++, or set CXX",
)
NOT_COMPILED = shown(
    name="P0306",
    title="lines of a program cannot be compiled",
    why="torch's compiler, or the compiler that it calls, refused the work between two collectives; its own words"
    " follow. Run line by line, the same build needs no compiler.",
    example="parc run build --compile   # with a compiler that finds no Python.h",
    instead="parc run build",
)
OUT_OF_RANGE = shown(
    name="P0307",
    title="sizes that the build was not made for",
    why="a build serves the sizes that its plan declares, those of a range from end to end by its step, and no others.",
    example="parc run build --sizes S=100   # sizes B=8, S=128..4096 by 128",
    instead="parc run build --sizes S=128",
)
OVER_BUDGET = shown(
    name="P0401",
    title="a rank needs more memory than the budget",
    why="the memory of a rank is estimated from the programs: parameters, gradients, optimizer and what is alive at the"
    " peak; the largest of them are named.",
    example="budget memory 16GiB      # a rank needs 24.1 GiB",
    instead="schedule microbatches 4  # fewer samples at once, or split what is largest over another axis",
)
FORBIDDEN = shown(
    name="P0402",
    title="a forbidden collective",
    why="the line forbids what the programs do; the collective, what caused it and its bytes are named.",
    example="forbid all_gather in blocks.**",
    instead="column blocks.*.mlp.up over tp   # both sides of the value split alike",
)
NOT_EXPECTED = shown(
    name="P0403",
    title="another number of collectives than expected",
    why="`expect` counts the collectives of one microbatch in each module that it names; every one that is there is"
    " named.",
    example="expect 2 all_reduce in blocks.*",
    instead="expect 4 all_reduce in blocks.*   # two in forward, two in backward",
)
