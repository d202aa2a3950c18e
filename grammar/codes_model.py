"""Codes of messages about a plan beside its model: inputs and weights' files by name, sources that moved (P012x)."""

from __future__ import annotations

from .code import MODEL, Code, shown

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
