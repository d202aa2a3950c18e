"""Codes of messages about a build: the model, its capture, and files (P02xx), a run (P03xx), and promises (P04xx)."""

from __future__ import annotations

from .diagnostics import MODEL, Code, shown

MODEL_FAILED = shown(
    name="P0201",
    title="the model cannot be made",
    why="the callable of the `model` line, or the Python module that holds it, failed. Its own traceback follows.",
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
    why="gradients are gradients of one number. A loss for each token must be summed or averaged first.",
    example='loss "./model.py:token_losses"(output, targets)',
    instead="loss cross_entropy(output, targets)",
)
CAPTURE_FAILED = Code(
    name="P0205",
    title="the model cannot be captured",
    why="tracing the model on tensors without data failed. The cause is in the model's code, at the place that the"
    " message names.",
    example=MODEL.format(body="return torch.from_numpy(x.numpy() * 2)"),
    instead=MODEL.format(body="return x * 2"),
    language="python",
)
WRONG_INPUTS = shown(
    name="P0206",
    title="the model is not called with these inputs",
    why="inputs go to the parameters of the model's forward by name, never by order; only inputs that the "
    "loss names may have no such parameter. `as` gives the parameter's name if the input has another.",
    example="input words int64 [B, S]   # the model's forward(tokens)",
    instead="input words as tokens int64 [B, S]",
)
NO_DIVIDE = shown(
    name="P0207",
    title="a value inside the model does not divide",
    why="a dim somewhere in the model, or a rank's part of it, is not a whole number for some of the declared "
    "sizes. parc does not round, and pads only where a line says so.",
    example="sizes B=8, S=8..40        # the model averages pairs: S/2 of them",
    instead="sizes B=8, S=8..40 by 2",
)
WITHOUT_RULE = Code(
    name="P0208",
    title="an operator without a sharding rule",
    why="parc does not know how this operator treats its dims, so its operands are gathered whole: the result "
    "is right, but it costs messages and memory.",
    example="parc.register_rule is not called for mylib::scale",
    instead='parc.register_rule("mylib.scale.default", "... d, d -> ... d", linear="0")',
    language="python",
)
UNASKED_RESHARD = shown(
    name="P0209",
    title="a gather or exchange that no line asks for",
    why="two lines, or a line and an operator, need this value split in different ways. So ranks exchange parts of it"
    " in every step.",
    example="mesh tp=2\nshard tokens [_, S/tp]\ncolumn blocks.*.attn.qkv over tp",
    instead="mesh tp=2\ncolumn blocks.*.attn.qkv over tp",
)
CHECK_FAILED = shown(
    name="P0210",
    title="a check refused the build",
    why="the programs do not compute what the model computes. If nobody edited the files, this is a fault of parc."
    " Please report the plan and the message.",
    example="parc verify build   # after a line of a program was changed",
    instead="parc build plan.parc -o build",
)
BAD_BUILD = shown(
    name="P0211",
    title="not a build, or one that was altered",
    why="a build's manifest has a hash of every file. With a missing or edited file, something else would run "
    "than what was checked.",
    example="parc run build   # after build/programs was edited",
    instead="parc build plan.parc -o build && parc run build",
)
OTHER_TORCH = shown(
    name="P0212",
    title="another torch than the build's",
    why="operators may differ between versions of torch, and the build was checked with another version than this one.",
    example="parc run build   # built with torch 2.11, run with 2.13",
    instead="parc build plan.parc -o build && parc run build",
)
NO_TWIN = shown(
    name="P0213",
    title="a model too large to test, and no `verify` line",
    why="numbers are tested by running all ranks in one process. A large model is tested on its twin: the "
    "same code with smaller arguments. The twin's programs must be the same except for sizes.",
    example='model "./llama.py:llama" (layers=32, width=4096)',
    instead='model "./llama.py:llama" (layers=32, width=4096)\nverify layers=2, width=64',
)
READ_IN_EVAL = Code(
    name="P0272",
    title="a parameter that only `eval()` reads",
    why="an evaluation computes with the parameters that the ranks of a training run hold: those that a step reads. A"
    " parameter that no step reads is on no rank.",
    example=MODEL.format(body="return self.a(x) if self.training else self.b(x)"),
    instead=MODEL.format(body="return self.a(x)"),
    language="python",
)
MANY_AXES = shown(
    name="P0250",
    title="a mesh of more axes than a twin can have",
    why="a build of many ranks is tested on its twin, which has at least 2 ranks along every axis of the "
    "build; with 1 its programs would differ. All ranks of the twin run in one process, so there are at "
    "most 256.",
    example="mesh a=2, b=2, c=2, d=2, e=2, f=2, g=2, h=2, i=2",
    instead="mesh a=4, b=4, c=4, d=2, e=2, f=2",
)
NOTHING_TRAINED = shown(
    name="P0214",
    title="no parameter is left to train",
    why="a step computes gradients of the parameters that are trained. Here all are frozen, so there is nothing to do.",
    example="freeze **",
    instead="freeze embed",
)
BAD_WEIGHTS = shown(
    name="P0215",
    title="weights that are not the model's",
    why="`init from` takes safetensors files with every tensor of the model's state, by the model's own "
    "names. All tensors that are missing, unknown, of another shape, or that would be rounded are listed; "
    "equal faults of several layers are one line.",
    example='init from "weights-of-another-model"',
    instead='init from "weights"',
)
BAD_RULE = Code(
    name="P0216",
    title="a registered rule that does not fit",
    why="a rule says which dims of an operator's tensors belong together. This rule names another number of dims than"
    " the operator's tensors have, or it would let the operator or its backward read operands that are split"
    " differently.",
    example='parc.register_rule("mylib.scale.default", "a b -> a b")  # the model scales a tensor of rank 3',
    instead='parc.register_rule("mylib.scale.default", "... d, d -> ... d", linear="0")',
    language="python",
)
AVERAGED = shown(
    name="P0217",
    title="a loss that microbatches may not add up to",
    why="a loss, or a term of one, is averaged over microbatches. This is its value for the whole batch if it is a "
    "mean over equally many elements of each. If a mask decides which elements count, microbatches with few elements "
    "weigh too much. parc divides once a step where the denominator is a sum that is made of inputs alone: "
    "`(losses * mask).sum() / mask.sum()`. It does not where the denominator has a floor, as `.clamp(min=1)`, or comes "
    "from the model. In other losses the samples meet: in a contrastive loss the other samples are negatives. A sum is "
    "added up over microbatches if it is the whole loss, and averaged if it is a term beside a mean.",
    example="loss output          # (losses * mask).sum() / mask.sum().clamp(min=1)\nschedule microbatches 4",
    instead="loss output          # (losses * mask).sum() / mask.sum()\nschedule microbatches 4",
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
    title="an operator on complex numbers that cannot be computed with real ones",
    why="programs hold real numbers, and complex numbers are written as pairs of them. This works for "
    "arithmetic, powers, `exp`, `log`, angles, products, sums, FFTs, and operators that move entries, but "
    "not for decompositions and solvers of complex matrices.",
    example=MODEL.format(body="return torch.linalg.inv(torch.fft.fft(x)).real"),
    instead=MODEL.format(body="return torch.fft.fft(torch.linalg.inv(x)).real"),
    language="python",
)
KEPT_TWICE = shown(
    name="P0220",
    title="several ranks hold the same KV head",
    why="there are fewer KV heads than ranks of the axis that splits them, so several ranks hold the same KV "
    "head. It is computed where it is used, without messages; the gradients of its copies are summed once "
    "a step. If q, k and v are one weight, each rank holds a part of a head instead, and gathers the "
    "results of the others.",
    example='include "parc:llama" (tp=4)   # num_key_value_heads=2',
    instead='include "parc:llama" (tp=2)',
)
UNCOUNTED_DRAW = Code(
    name="P0221",
    title="random numbers that would differ from layout to layout",
    why="every random number in a model's forward is computed from a stream's name and the number of an "
    "element, so that it is the same on every layout. This is done for dropout, `torch.rand`, "
    "`torch.randn` and `torch.bernoulli`.",
    example=MODEL.format(body="return x[:, torch.randperm(x.shape[1])]"),
    instead=MODEL.format(body="return x[:, torch.rand(x.shape[1]).argsort()]"),
    language="python",
)
NO_DEVICE = shown(
    name="P0222",
    title="no such device",
    why="each process of a run computes on its own GPU, or all compute on the CPU. If you ask for GPUs, parc "
    "never takes the slower CPU instead.",
    example="parc run build --device cuda   # on a host without a GPU that torch can use",
    instead="parc run build --device cpu",
)
ROUNDED_UPDATES = shown(
    name="P0223",
    title="weights that are updated in a narrow type",
    why="a weight in bfloat16 has 8 significant bits: an update of less than a 256th of the weight is lost, "
    "step after step. With a `precision` line the optimizer has float32 weights, and the model still "
    "computes in bfloat16.",
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
    why="one build serves a range of sizes with one program, which contains the sizes as names. This model does"
    " something else at some sizes (it branches on a size, or a dim becomes 1), so there is no such program.",
    example="sizes B=1..64, S=128      # a dim of 1 is broadcast",
    instead="sizes B=8..64 by 8, S=128",
)
NOT_POLYNOMIAL = Code(
    name="P0226",
    title="a number that does not follow the sizes",
    why="programs for a range of sizes may contain sums and products of sizes with rational factors, and one "
    "divided by such a number. Anything else that a model computes from a size (a root, a size that is "
    "rounded down) is not possible.",
    example=MODEL.format(body="return x / math.sqrt(x.shape[1])"),
    instead=MODEL.format(body="return x / x.shape[1]"),
    language="python",
)
LEFT_STEP = Code(
    name="P0230",
    title="a session that an error left in the middle of a step",
    why="all ranks take part in the same collectives and messages in the same order. A rank that left a step "
    "by an error has missed some, so its next message would meet one that another rank still waits for.",
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
    why="an update with it would destroy the weights, so the run stops before the update. The message names the step"
    " and the first value that is not finite.",
    example="optimizer sgd lr 1e9",
    instead="optimizer adamw lr 3e-4 clip 1.0",
)
BAD_DATA = shown(
    name="P0303",
    title="the data cannot be read",
    why="samples come from the `data` line: files, a dataset, or a callable that returns the plan's inputs by name.",
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
    why="torch's compiler, or the compiler that it calls, refused the work between two collectives; its own "
    "words follow. Without `--compile` the same build runs line by line.",
    example="parc run build --compile   # with a compiler that finds no Python.h",
    instead="parc run build",
)
OUT_OF_RANGE = shown(
    name="P0307",
    title="sizes that the build was not made for",
    why="a build serves only the sizes that its plan declares. For a range these are all sizes from its start to its"
    " end, in its steps.",
    example="parc run build --sizes S=100   # sizes B=8, S=128..4096 by 128",
    instead="parc run build --sizes S=128",
)
OVER_BUDGET = shown(
    name="P0401",
    title="a rank needs more memory than the budget",
    why="parc estimates the memory of a rank from the programs: parameters, gradients, optimizer state, and the"
    " values alive at the peak. The message names the largest of them. Its help names up to three changes of the plan,"
    " or several together, each compiled and within the budget, with the memory that a rank then needs.",
    example="budget memory 80GB    # a rank needs 148.8 GiB",
    instead="zero 1 over dp        # a rank then needs 63.5 GiB; or what else the help names",
)
FORBIDDEN = shown(
    name="P0402",
    title="a forbidden collective",
    why="the line forbids a collective that the programs have. The message names the collective, its cause and its"
    " bytes.",
    example="forbid all_gather in blocks.**",
    instead="column blocks.*.mlp.up over tp   # both sides of the value split alike",
)
NOT_EXPECTED = shown(
    name="P0403",
    title="another number of collectives than expected",
    why="`expect` counts the collectives of one microbatch in each module that it names. The message lists those that"
    " it found.",
    example="expect 2 all_reduce in blocks.*",
    instead="expect 4 all_reduce in blocks.*   # two in forward, two in backward",
)


# ---- codes of messages about a plan beside its model: inputs and weights' files by name, sources that


NUMBER_CHANGED = Code(
    name="P0228",
    title="a forward changes a number of its module",
    why="a build holds one graph, and a Python number is a constant in it: every step computes with the number of the"
    " first call. A buffer is followed from step to step. If nothing that the forward computes depends on the number,"
    " you can ignore this warning.",
    example=MODEL.format(body="self.calls += 1\n        return x if self.calls < 1000 else x / 2"),
    instead=MODEL.format(
        body="self.calls += 1  # a buffer: torch.zeros(())\n        return torch.where(self.calls < 1000, x, x / 2)"
    ),
    language="python",
)
PASSED_ON = shown(
    name="P0120",
    title="an input goes into the forward's `**kwargs`",
    why="the forward's signature does not name this input, so only the model knows whether the name is right. "
    "A forward that ignores unknown names ignores a misspelt input too.",
    example="input attention_msk int64 [B, S]   # forward(tokens, attention_mask=None, **kwargs)",
    instead="input attention_mask int64 [B, S]",
)
MEANT_OTHERWISE = shown(
    name="P0121",
    title="a line causes gathers that another line would not",
    why="a line splits a weight differently from the values that multiply it, so ranks gather or exchange parts."
    " Often this happens at another line, which is itself right. With the proposed line nothing is gathered.",
    example="column blocks.*.attn.qkv over tp rows (2 h/tp d)   # the model takes three parts: q, k and v",
    instead="column blocks.*.attn.qkv over tp rows (3 h/tp d)",
)
NO_INPUTS = shown(
    name="P0270",
    title="no inputs were found for a model",
    why="`parc init` calls the model's forward on tensors that hold nothing, of the types and shapes that its layers"
    " may read, and none of these calls ended without an error. The message shows the call that ran furthest, and"
    " where it failed.",
    example='parc init "./model.py:Model"',
    instead='parc init "./model.py:Model" --input "pictures float32 [B, 3, 48, 64]"',
)
NOT_REACHED = shown(
    name="P0273",
    title="weights that the loss does not depend on",
    why="a model may compute more than its loss reads, such as the scores of a second head. No gradient comes to the"
    " weights of what is left out, so they stay as they are initialized, and a build has no state for them. If that is"
    " meant, a `freeze` line says so.",
    example="loss cross_entropy(output.0, labels)   # forward returns (self.head(x), self.other(x))",
    instead="loss cross_entropy(output.0, labels) + 0.5 cross_entropy(output.1, kinds)",
)
UNCLEAR_MODEL = shown(
    name="P0271",
    title="a model that `parc init` cannot find",
    why="`parc init` takes a function or a class that makes the model: in a file, in an installed package, or in"
    " transformers, by its name or by a folder with `config.json`.",
    example="parc init model.py",
    instead='parc init "model.py:Model" width=64',
)


# ---- codes of messages about a model whose numbers cannot be compared with anything (P02xx).


NO_FUNCTION = Code(
    name="P0227",
    title="a result that is no function of the inputs",
    why="a build holds one graph. Other inputs of the model's code (Python's `random`, NumPy's, a counter that calls"
    " change, the clock) would be constants in it. parc ran the module twice with the same inputs, weights and torch"
    " seeds, and the results differ.",
    example=MODEL.format(body="import random\n\n        return x * random.random()"),
    instead=MODEL.format(body="return x * torch.rand(())"),
    language="python",
)
NOT_FINITE = Code(
    name="P0233",
    title="a model whose numbers are not finite",
    why="every build is tested on random inputs: normal random numbers, and any classes. If the model or the "
    "loss gives NaN or infinity for them, there is nothing to compare.",
    example=MODEL.format(body="return x.log()"),
    instead=MODEL.format(body="return x.clamp(min=1e-6).log()"),
    language="python",
)
AMPLIFIED = Code(
    name="P0259",
    title="a model that amplifies rounding",
    why="ranks add up numbers in another order than one device, so they round differently. Every build is "
    "tested to 1e-10 in float64, or to the change that one rounding of weights and inputs makes in the "
    "captured graph, up to 1e-6. If a model's results change more than that, no two runs of it agree.",
    example=MODEL.format(body="for _ in range(50):\n            x = 3.9 * x * (1 - x)\n        return x"),
    instead=MODEL.format(body="for _ in range(50):\n            x = 0.9 * x * (1 - x)\n        return x"),
    language="python",
)
NEAR_TIE = Code(
    name="P0266",
    title="a choice that rounding decides",
    why="a top-k is not a continuous function of its scores. If the last entry taken and the first one left "
    "differ only by rounding, ranks that add up in another order may take the other one. parc measures "
    "this distance in the captured graph and reports it. If it is too small and numbers differ, other "
    "random data are drawn; a model for which that does not help is refused.",
    example=MODEL.format(body="return torch.stack([x.sum(-1), x.flip(-1).sum(-1)], -1).topk(1).indices * x"),
    instead=MODEL.format(body="return torch.stack([x.sum(-1), x.square().sum(-1)], -1).topk(1).indices * x"),
    language="python",
)
OWN_GRADIENT = Code(
    name="P0262",
    title="gradients that are not those of the forward",
    why="a build derives gradients from the captured forward. The `backward` of an `autograd.Function` is "
    "lost there, so if it is not the derivative of its forward (a straight-through estimate, a gradient "
    "that is reversed or scaled), gradients differ from those of your module. A function that only saves "
    "memory or time is captured like any other code.",
    example=MODEL.format(body="return Round.apply(x)  # its backward returns the gradient as it is"),
    instead=MODEL.format(body="return x + (x.round() - x).detach()"),
    language="python",
)
