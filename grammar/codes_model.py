"""Codes of messages about a plan beside its model: inputs and weights' files by name, sources that moved (P012x)."""

from __future__ import annotations

from .code import MODEL, Code, shown

NUMBER_CHANGED = Code(
    name="P0228",
    title="a forward changes a number of its module",
    why="one graph is built, in which a number of Python's is a constant: programs compute every step with that of the"
    " first call. A buffer is followed. If nothing that the forward computes depends on the number, all is well.",
    example=MODEL.format(body="self.calls += 1\n        return x if self.calls < 1000 else x / 2"),
    instead=MODEL.format(
        body="self.calls += 1  # a buffer: torch.zeros(())\n        return torch.where(self.calls < 1000, x, x / 2)"
    ),
    language="python",
)
PASSED_ON = shown(
    name="P0120",
    title="an input goes into the forward's `**kwargs`",
    why="the forward's signature does not name it, so only the model itself says whether the name is right: a forward"
    " that ignores what it does not know ignores a misspelt input too.",
    example="input attention_msk int64 [B, S]   # forward(tokens, attention_mask=None, **kwargs)",
    instead="input attention_mask int64 [B, S]",
)
MEANT_OTHERWISE = shown(
    name="P0121",
    title="a line costs gathers that another would not",
    why="where a line splits a weight otherwise than the values that meet it, parts are gathered or exchanged, often at"
    " other lines, which are right. With the line that is proposed none is.",
    example="column blocks.*.attn.qkv over tp rows (2 h/tp d)   # the model takes three parts: q, k and v",
    instead="column blocks.*.attn.qkv over tp rows (3 h/tp d)",
)
