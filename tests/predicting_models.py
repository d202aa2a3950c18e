"""Models that return tensors for each token, for each sample, for all samples alike, and as a mean over the batch."""

import torch
from torch import nn


class Tagger(nn.Module):
    """Scores of 11 tags for each token, with a second head that no loss reads."""

    def __init__(self, vocab: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, 8)
        self.body, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.head, self.aside = nn.Linear(8, vocab, bias=False), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        """Return scores [batch, tokens, vocab], a mean of each sample, and more."""
        steps = torch.arange(tokens.shape[1])
        waves = torch.sin(steps.to(self.table.weight.dtype))[:, None]
        hidden = self.drop(torch.tanh(self.body(self.table(tokens) + waves)))
        return {
            "logits": self.head(hidden),
            "hidden": (hidden.mean(1), hidden.transpose(0, 1)),
            "steps": steps * 2,
            "mean": hidden.mean((0, 1)),
            "aside": self.aside(hidden),
        }


class Mixing(Tagger):
    """Scores that depend on all samples of a batch."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        """Return scores less their mean over the batch."""
        scores = super().forward(tokens)["logits"]
        assert isinstance(scores, torch.Tensor)
        return {"logits": scores - scores.mean(0)}


class Rows(Tagger):
    """Scores of each token, in a row of their own for each, and tensors whose rows are no samples."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
        """Return scores [batch * tokens, vocab], their classes, and more."""
        scores = super().forward(tokens)["logits"]
        assert isinstance(scores, torch.Tensor)
        return {
            "logits": scores.flatten(0, 1),
            "classes": scores.argmax(-1).to(torch.int16),
            "known": tokens.repeat_interleave(2, 0) > 4,
            "weights": self.head.weight.t(),
            "twice": torch.cat([scores, scores]),
            "turned": scores.flip(0),
        }


class Loss(Tagger):
    """The mean of all scores."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return one number."""
        scores = super().forward(tokens)["logits"]
        assert isinstance(scores, torch.Tensor)
        return scores.square().mean()
