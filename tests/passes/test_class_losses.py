"""Losses of classes that are more than a mean: weights, smoothing, log probabilities of the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from parc.runtime.data.random_batch import class_bounds
from tests.draws import each_once
from tests.passes.few_lines import DATA, T, X, codes, made

PLACES = ("mesh tp=2\nvocab fc over tp", DATA.format("x, t"))
OPTIONS = (
    "",
    ", reduction='sum'",
    ", ignore_index=2",
    ", label_smoothing=0.1",
    ", label_smoothing=0.1, reduction='sum'",
)
WEIGHTS = ("torch.arange(1.0, 9)", "torch.linspace(1, 2, 8)", "self.weights")


@pytest.mark.parametrize(("weights", "options", "lines"), each_once(WEIGHTS, OPTIONS, PLACES))
def test_classes_have_weights(tmp_path: Path, weights: str, options: str, lines: str) -> None:
    body = f"""
    def more(self):
        self.weights = torch.arange(8.0)

    def forward(self, x, t):
        return F.cross_entropy(self.fc(x).flatten(0, 1), t.flatten() % 8, weight={weights}{options})
    """
    compiled, _ = made(tmp_path, body, f"{X}\n{T}\n{lines}\nschedule microbatches 2")
    averaged = "sum" not in options and "self" in weights  # the count is of inputs alone
    gathered = "smoothing" in options and "vocab" in lines and "self" in weights  # the weights, not the logits
    assert codes(compiled) == ["P0209"] * gathered + ["P0217"] * averaged


@pytest.mark.parametrize(
    ("reduction", "lines"),
    each_once(("mean", "sum", "none"), ("mesh tp=2\ncolumn fc over tp", "mesh dp=2\nshard x, y [B/dp, ...]")),
)
def test_a_smoothed_loss_is_split_as_a_plain_one(tmp_path: Path, reduction: str, lines: str) -> None:
    body = f"""
        class Model(Base):
            def forward(self, x):
                return self.fc(x)


        def smoothed(output, y, *, part=0.1):
            rows, targets = output.flatten(0, -2), y.flatten()
            loss = F.cross_entropy(rows, targets, ignore_index=1, label_smoothing=part, reduction="{reduction}")
            return loss if loss.dim() == 0 else loss.sum()
    """
    inputs = f'{X}\ninput y int64 [B, 4]\nloss "./models.py:smoothed"(output, y)\nschedule microbatches 2'
    compiled, checked = made(tmp_path, body, f"{inputs}\n{lines}")
    assert checked.report["numbers"]["loss"] < 1e-10
    assert codes(compiled) == []


OWN_PLACES = ("mesh dp=2, tp=2\nshard x, t [B/dp, ...]\nvocab fc over tp", DATA.format("x, t"))
OWN_OPTIONS = ("", ", weight=torch.arange(1.0, 9)", ", ignore_index=2, reduction='sum'")
FORMS = (
    "F.log_softmax(self.fc(x), -1).flatten(0, 1), t.flatten()",
    "F.log_softmax(self.fc(x).flatten(0, 1), 1), t.flatten()",
    "F.log_softmax(self.fc(x).mT, 1), t",
    "F.log_softmax(self.fc(x).mT.bfloat16(), 1, dtype=torch.float32), t",
)


@pytest.mark.parametrize(("form", "options", "lines"), each_once(FORMS, OWN_OPTIONS, OWN_PLACES))
def test_log_probabilities_are_a_models_own(tmp_path: Path, form: str, options: str, lines: str) -> None:
    compiled, _ = made(
        tmp_path,
        f"def forward(self, x, t):\n    t = t.clamp(0, 7)\n    return F.nll_loss({form}{options})",
        f"{X}\n{T}\n{lines}\nschedule microbatches 2",
    )
    assert "dp" not in {reshard.axis for reshard in compiled.built.reshards}
    assert codes(compiled).count("P0217") == 0


def test_a_class_that_cannot_be_is_nothing_to_what_is_ignored(tmp_path: Path) -> None:
    body = """
    def forward(self, x, t):
        y = torch.where(t.flatten() == 0, -100, 1)
        hidden = self.fc(x).flatten(0, 1).masked_fill(torch.arange(8) == 0, -torch.inf)
        loss = F.nll_loss(hidden.log_softmax(1) * 1, y) + F.nll_loss(hidden.log_softmax(1), y)
        return loss + F.cross_entropy(hidden, y, weight=torch.arange(1.0, 9))
    """
    made(tmp_path, body, f"{X}\n{T}\n{DATA.format('x, t')}")


def test_a_target_that_is_an_index_too_is_never_one_to_ignore(tmp_path: Path) -> None:
    """Each input is the target of a loss of its own."""
    body = """
    def more(self):
        self.rows = nn.Embedding(8, 4)

    def forward(self, x, t, looked, hot, gathered, scattered):
        x, w = self.fc(x).flatten(0, 1), torch.arange(1.0, 9)
        t, looked, hot, gathered, scattered = (y.flatten() for y in (t, looked, hot, gathered, scattered))
        each = lambda y: F.cross_entropy(x, y, reduction="none")
        return (
            w[t] * each(t)
            + each(looked) * self.rows(looked).sum(-1)
            + each(hot) + F.one_hot(hot, 8).float().square().sum(-1)
            + each(gathered) * x.gather(1, gathered[:, None])[:, 0]
            + each(scattered) + x.scatter(1, scattered[:, None], 0.3).sum(-1)
        ).mean()
    """
    targets = ["t", "looked", "hot", "gathered", "scattered"]
    inputs = "\n".join(T.replace("t int64", f"{name} int64") for name in targets)
    compiled, checked = made(tmp_path, body, f"{X}\n{inputs}\nmesh tp=2\nvocab fc over tp")
    assert checked.report["numbers"]["loss"] < 1e-10
    assert class_bounds(compiled.build.reference) == dict.fromkeys(targets, (8, None))


def test_a_target_that_is_a_number_too_may_be_one_to_ignore(tmp_path: Path) -> None:
    body = """
    def forward(self, x, t):
        x, t = self.fc(x).flatten(0, 1), t.flatten()
        far = F.mse_loss(x[:, 0], t.float() / 8, reduction="none") * (t != -100)
        return F.cross_entropy(x, t) + far.mean() + t.cumsum(0).float().amax() * 0.0
    """
    compiled, _ = made(tmp_path, body, f"{X}\n{T}\nmesh tp=2\nvocab fc over tp")
    assert class_bounds(compiled.build.reference)["t"] == (8, -100)
