"""Codes of messages about what ranks give to a step and hold after it, and the files that a run writes (P041x)."""

from __future__ import annotations

from .diagnostics import Code, shown

FOLDER_HELD = shown(
    name="P0411",
    title="another run saves there",
    why="a run keeps the folder of its `--save` for itself until it ends. Two runs that save to one folder would"
    " overwrite each other's checkpoints.",
    example="parc run build --save checkpoint & parc run build --save checkpoint",
    instead="parc run build --save checkpoint & parc run build --save other-checkpoint",
)
UNWRITTEN = shown(
    name="P0412",
    title="a file that cannot be written",
    why="the metrics, the trace or the picture cannot be written there: the folder cannot be written to, or "
    "the disk is full. A run finds this out at its start. If a disk fills up later, the metrics end with "
    "a warning, and the training goes on.",
    example="parc run build --metrics /full/metrics.jsonl",
    instead="parc run build --metrics metrics.jsonl",
)
OFFLOAD_FOLDER = shown(
    name="P0413",
    title="the folder of an `offload` line cannot be used",
    why="a run keeps the state of each rank there, in files of its own, and reserves their space before the "
    "first step. So the folder must be writable, have that much space, and belong to no other run.",
    example='parc run build & parc run build   # its plan has a line: offload optimizer to "state"',
    instead="parc run build && parc run build",
)
NO_PACKAGE = shown(
    name="P0414",
    title="a package that is not installed",
    why="TensorBoard and Weights & Biases are separate packages. parc uses them if they are installed. The metrics"
    " file of `--metrics` needs neither, and holds the same numbers.",
    example="parc run build --tensorboard runs   # without the package `tensorboard`",
    instead="pip install tensorboard && parc run build --tensorboard runs",
)
BATCHES_DIFFER = Code(
    name="P0410",
    title="the ranks did not give one batch",
    why="`session.step(batch)` takes the whole batch of a step, the same on every rank, and each rank computes with"
    " its part. If each rank has its own samples, as with torch's DistributedSampler, it gives them as `local`. Ranks"
    " with the same coordinates on the axes that split the batch must give the same samples.",
    example="session.step(next(own_samples))",
    instead='session.step(local=next(own_samples))  # chosen by session.coordinates["dp"]',
    language="python",
)
CALLS_DIFFER = Code(
    name="P0418",
    title="ranks that call different methods",
    why="every rank calls every method of a session, in the same order, also `save` and `evaluate`: each rank has its"
    " part of the work in it. DDP needs an `if rank == 0:` around saving; with parc it keeps the others' parts out of"
    " the checkpoint. Nothing is done by such calls, and the session goes on where the error is caught. Ranks that did"
    " other updates before, or updates at another learning rate, have other weights: any call tells them so, until"
    " `session.restore` makes them equal.",
    example='if session.rank == 0:\n    session.save("checkpoint")\nsession.step(batch)',
    instead='session.save("checkpoint")\nsession.step(batch)',
    language="python",
)
RESULT_TAKEN = Code(
    name="P0419",
    title="gradients that an update has used before, or that are none",
    why="an update moves the weights, and gradients are those of the weights before it. To add up the gradients of"
    " several batches, let the plan cut a larger one: `schedule microbatches 4`.",
    example="result = session.gradients(batch)\nsession.update(result)\nsession.update(result)",
    instead="session.update(session.gradients(batch))\nsession.update(session.gradients(batch))",
    language="python",
)
NOTHING_RETURNED = Code(
    name="P0420",
    title="a model that returns nothing to predict",
    why="`session.predict` returns the tensors of the model's output that have a row for each sample. A model that"
    " returns its loss alone has none.",
    example="def forward(self, tokens, labels):\n    return self.loss(tokens, labels)\n\n\nsession.predict(batch)",
    instead="def forward(self, tokens, labels):\n    logits = self.logits(tokens)\n"
    '    return {"loss": cross_entropy(logits, labels), "logits": logits}',
    language="python",
)
TRAINS_NOTHING = Code(
    name="P0421",
    title="a build for inference, of which training or a loss is asked",
    why="a plan without `loss` and `optimizer` lines makes the programs that compute the model's outputs, and no"
    " others. A session of it has weights, from the initial values or a checkpoint, and predicts.",
    example="session.step(batch)  # its plan has no `loss` and no `optimizer` line",
    instead="session.predict(batch)",
    language="python",
)
REPLICAS_DIFFER = Code(
    name="P0422",
    title="ranks that hold different numbers of one tensor",
    why="some tensors are on several ranks, bit by bit the same: weights along `dp`, norms along `tp`, counts of steps."
    " Ranks compare them now and then. If they differ by more than rounding, the ranks no longer train one model."
    " Causes are memory or a device that fails, another library on one host, a kernel that reads what another still"
    " writes, or code that changes weights on one rank. Nothing is saved of such a step. If it happens again, and"
    " always on the same rank, look at that rank's device. If it happens on changing ranks, run the steps since the"
    " last checkpoint twice under `torch.use_deterministic_algorithms(True)`.",
    example='if session.rank == 0:\n    session.state.parameters[name].mul_(0.5)\nsession.save("checkpoint")',
    instead='session.state.parameters[name].mul_(0.5)  # on every rank\nsession.save("checkpoint")',
    language="python",
)
NO_EVALUATION = Code(
    name="P0416",
    title="a build without programs for evaluation",
    why="an evaluation runs the model in `eval()`: without dropout, and with the running statistics of BatchNorm."
    " parc makes these programs only if the plan has an `eval` line, because they make a build larger and take time.",
    example="session.evaluate(batch)  # its plan has no `eval` line",
    instead="session.step(batch).loss  # the loss of the model as it trains; or build the plan with a line: eval",
    language="python",
)
NO_AVERAGES = Code(
    name="P0415",
    title="averaged weights that are not there, or a step with averaged weights",
    why="a session keeps averages of the weights if the plan has an `ema` line, and checkpoints hold them. Averages"
    " are not trained: inside `session.averaged()` a session can evaluate, but not do a step.",
    example="session.state_dict(ema=True)  # its plan has no `ema` line",
    instead="session.state_dict()",
    language="python",
)
