"""A plan for a model that has none: from nothing to trained weights that others load, and what is said where that does
not go."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

import parc
from parc.cli import main
from parc.compiler.initial.recipes import record
from parc.proposing.inputs import Caller
from tests.cli.commands import Captured
from tests.cli.commands import parc as command
from tests.pages import ROOT, blocks_of
from tests.proposed_models import KINDS, NANO, OUTPUTS
from tests.runtime.forked import forked_ranks

QWEN = (
    "hf:Qwen2ForCausalLM", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=1", "num_attention_heads=4",
    "num_key_value_heads=2", "vocab_size=64", "max_position_embeddings=64",
)  # fmt: skip


def trained(capsys: Captured, *model: str) -> int:
    """Run the commands from a model to trained weights in a folder, and return how many there were."""
    commands = [
        ("init", *model, "--dp", "1"),
        ("build", "plan.parc", "-o", "build"),
        ("run", "build", "--steps", "1", "--save", "checkpoint"),
        ("export", "build", "checkpoint", "-o", "weights"),
    ]
    with forked_ranks():
        for words in commands:
            code, _, err = command(capsys, *words)
            assert code == 0, err
    return len(commands)


def plain() -> Any:
    """Return the plain module of the build, trained alike on one device."""
    reference = parc.reference("build")
    reference.step()
    return reference


def test_the_next_commands_are_those_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(ROOT / "examples" / "gpt.py") + ":GPT"
    code, _, err = command(capsys, "init", model, "layers=1", "width=16", "-o", "gpt.parc")
    assert code == 0 and "written gpt.parc: it compiles, on 4 ranks\nnext:  parc build " in err, err
    said = [shlex.split(line.removeprefix("next:"), comments=True) for line in err.splitlines()[-3:]]
    shown = next(block.commands() for block in blocks_of("README.md") if "parc init" in block.text)
    assert said == shown[1:] and shown[0][:2] == ["parc", "init"]


def test_a_package_that_is_missing_is_named_with_its_installation_and_no_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    code, _, err = command(capsys, "init", "hf:Qwen2ForCausalLM", "-o", tmp_path / "plan.parc")
    assert code == 1 and err.startswith("error[P0201]: making the model failed: ModuleNotFoundError: ")
    assert "\n --> the draft of plan.parc:5:1\n" in err and not (tmp_path / "plan.parc").exists()
    assert err.rstrip().endswith("help: `pip install transformers` installs it, if its package has that name")
    (tmp_path / "model.py").write_text("import no_such_package.part\n")
    code, _, err = command(capsys, "init", f"{tmp_path}/model.py:M", "-o", tmp_path / "plan.parc")
    assert code == 1 and "--> the draft of plan.parc:" in err
    assert err.rstrip().endswith("help: `pip install no_such_package` installs it, if its package has that name")


def close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def test_from_nothing_to_weights_that_from_pretrained_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from transformers import Qwen2ForCausalLM

    monkeypatch.chdir(tmp_path)
    assert trained(capsys, *QWEN) <= 5
    assert 'include   "parc:llama" (tp=$tp)' in Path("plan.parc").read_text()
    tokens = torch.arange(12).view(1, 12)
    with contextlib.closing(plain()) as reference, torch.no_grad():
        loaded = Qwen2ForCausalLM.from_pretrained("weights").eval()
        assert close(loaded(tokens).logits, reference.module.eval()(tokens).logits)


def test_from_nothing_to_weights_that_a_file_of_ones_own_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(NANO)
    assert trained(capsys, "model.py:gpt", "n_layer=1") <= 5
    text = Path("plan.parc").read_text()
    assert 'include   "parc:gpt2" (tp=$tp)' in text and "sizes     B=8, S=32 " in text
    assert main(["fmt", "--check", "plan.parc"]) == 0
    spec = importlib.util.spec_from_file_location("model", "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokens = torch.arange(12).view(1, 12)
    with contextlib.closing(plain()) as reference, torch.no_grad():
        loaded = module.gpt(n_layer=1)
        load_model(loaded, next(Path("weights").glob("*.safetensors")))
        assert close(loaded(tokens, tokens)[0], reference.module(tokens, tokens)[0])


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with small models of several kinds."""
    file = tmp_path_factory.mktemp("kinds") / "kinds.py"
    file.write_text(KINDS)
    return file


def lines(plan: Path, *verbs: str) -> list[str]:
    """Return the lines of a plan with these verbs, without their comments, in single spaces."""
    texts = (" ".join(line.partition("#")[0].split()) for line in plan.read_text().splitlines())
    return [text for text in texts if text.partition(" ")[0] in verbs]


@pytest.mark.parametrize(
    ("name", "inputs", "loss", "placements"),
    [
        (
            "Pictures",
            ["input pictures float32 [B, 3, 32, 32]", "input targets int64 [B]"],
            "loss cross_entropy(output.scores, targets)",
            ["column blocks.*.0 over tp", "row blocks.*.3 over tp"],
        ),
        (
            "Pair",
            ["input source int64 [B, S]", "input target_tokens int64 [B, S]", "input targets int64 [B, S]"],
            "loss cross_entropy(output, targets)",
            [
                "column attend.in_proj_weight over tp rows (3 h/tp d)",
                "row attend.out_proj over tp",
                "column net.0 over tp",
                "row net.2 over tp",
                "vocab words over tp",
            ],
        ),
        (
            "Gated",
            ["input x float32 [B, 12]", "input targets int64 [B]"],
            "loss cross_entropy(output, targets)",
            ["column up over tp rows (2 f/tp)", "row down over tp"],
        ),
    ],
)
def test_a_proposal_splits_what_a_person_would(
    kinds: Path, tmp_path: Path, capsys: Captured, name: str, inputs: list[str], loss: str, placements: list[str]
) -> None:
    plan = tmp_path / "plan.parc"
    code, _, err = command(capsys, "init", f"{kinds}:{name}", "-o", plan)
    assert code == 0 and "warning" not in err, err
    assert lines(plan, "input") == inputs and lines(plan, "loss") == [loss]
    assert lines(plan, "column", "row", "vocab") == placements


@pytest.mark.parametrize(
    ("words", "loss", "targets"),
    [
        (["Named"], "cross_entropy(output.logits, targets)  # 50 classes for each token", "targets int64 [B, S]"),
        (["Later"], "cross_entropy(output.1, targets)  # 50 classes for each token", "targets int64 [B, S]"),
        (["Kinds"], "cross_entropy(output, targets)  # 128 classes for each sample", "targets int64 [B]"),
        (["Each"], '"torch.nn.functional:mse_loss" (output, target)  # a guess', "target float32 [B, S]"),
        (
            ["Pair", "--input", "source int64 [B, S]", "--input", "words int64 [B, T]", "--sizes", "S=16,T=12"],
            "cross_entropy(output, targets)  # 50 classes for each token",
            "targets int64 [B, T]",
        ),
        (
            ["Pair", "--input", "source int64 [B, 16]", "--input", "words int64 [B, 12]"],
            "cross_entropy(output, targets)  # 50 classes for each token",
            "targets int64 [B, 12]",
        ),
    ],
)
def test_a_loss_is_of_the_scores_among_the_results_whatever_their_place_and_length(
    tmp_path: Path, capsys: Captured, words: list[str], loss: str, targets: str
) -> None:
    """``Kinds`` has as many classes as a sequence has tokens."""
    (tmp_path / "outputs.py").write_text(OUTPUTS)
    model, *more = words
    plan = tmp_path / "plan.parc"
    code, _, err = command(capsys, "init", f"{tmp_path}/outputs.py:{model}", "-o", plan, *more)
    assert code == 0, err
    assert f"loss      {loss}" in plan.read_text()
    assert lines(plan, "input")[-1] == f"input {targets}"


def test_a_large_model_gets_a_twin_of_its_structure(kinds: Path, tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.parc"
    code, _, err = command(capsys, "init", f"{kinds}:Deep", "layers=5", "-o", plan)
    assert code == 0, err
    assert lines(plan, "verify") == ["verify layers=2, width=256, vocab=1025"]
    assert lines(plan, "column", "row", "vocab") == [
        "column layers.*.0 over tp", "row layers.*.2 over tp", "vocab words, head over tp pad",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{kinds}:Branches"], ["error[P0202]: the model's control flow depends on the values of tensors", "kinds.py"]),
        (
            ["{kinds}:Odd"],
            ["error[P0270]: no inputs were found with which forward(x) runs", "AssertionError: pictures of 17 by 5",
             "kinds.py", "help: correct the types or dims in these options, and give them: `--input \"x "],
        ),
        (["{kinds}:Mute"], ["error[P0204]: forward returns NoneType, in which no tensor is found"]),
        (["{kinds}:Configured"], ["error[P0201]", "needs `config`", "write a function that makes it and returns"]),
        (["{kinds}:Pictuers"], ["error[P0201]", "has no `Pictuers`", "did you mean `Pictures`?"]),
        (["{kinds}"], ["error[P0271]", "is a file: name what makes the model in it"]),
        (["{folder}/kindz.py:Pictures"], ["error[P0271]: there is no file", "did you mean `kinds.py`?"]),
        (["{folder}"], ["error[P0271]: there is no config.json in"]),
        (['{folder}/a"b.py:Model'], ["error[P0271]", 'has a " or the end of a line in it', "by another path"]),
        (["torch.nn"], ["error[P0271]: `torch.nn` names no model", 'as "torch.nn:Model"']),
        (["{kinds}:Gated", "--input", "y float32 [B, 4]"], ["error[P0270]: forward(x) has no parameter `y`, and no"]),
        (
            ["{kinds}:Gated", "--loss", "own(output, x, targets, weights)"],
            ["error[P0270]: the loss reads `weights`, of which neither", 'as `--input "weights float32 [B]"`'],
        ),
        (["hf:Qwen2ForCasualLM"], ["transformers has no model class", "did you mean Qwen2ForCausalLM"]),
        (["hf:Qwen2ForCausalLM", "hiden_size=4"], ["Qwen2Config has no `hiden_size`", "did you mean hidden_size"]),
    ],
)  # fmt: skip
def test_what_no_plan_is_made_of_is_told(
    kinds: Path, tmp_path: Path, capsys: Captured, words: list[str], said: list[str]
) -> None:
    given = [word.format(kinds=kinds, folder=kinds.parent) for word in words]
    code, _, err = command(capsys, "init", *given, "-o", tmp_path / "plan.parc")
    assert code == 1 and "Traceback" not in err.replace("the code's own traceback", ""), err
    for part in said:
        assert part in err, err
    assert not (tmp_path / "plan.parc").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ('name=a"b', '`name` has a text with " or the end of a line in it, which no plan can hold'),
        ("name=a\nb", "`name` has a text"),
        ("width=nan", "`width` is nan, and a plan has finite numbers only"),
        ("width=-1e999", "`width` is -inf"),
        ("width", "`width` is not name=value"),
    ],
)
def test_an_argument_that_no_plan_can_hold_is_named(capsys: Captured, word: str, said: str) -> None:
    code, _, err = command(capsys, "init", "m.py:M", word)
    assert code == 2 and said in err


def test_a_loss_of_ones_own_has_inputs_of_its_own_and_what_it_leaves_out_is_told(
    kinds: Path, tmp_path: Path, capsys: Captured
) -> None:
    plan, loss = tmp_path / "plan.parc", f'"{kinds}:weighted" (output.0, scores, weights)'
    code, _, err = command(
        capsys, "init", f"{kinds}:Counted", "-o", plan, "--loss", loss, "--input", "weights float32 [B]",
        "--input", "scores float32 [B]",
    )  # fmt: skip
    assert code == 0 and "warning[P0273]: `length.weight` and `length.bias` are not trained" in err, err
    assert lines(plan, "input") == [
        "input tokens int64 [B, S]",
        "input weights float32 [B]",
        "input scores float32 [B]",
    ]
    text = plan.read_text()
    assert f"{loss}  # as asked for; it does not read output.1\n" in text
    assert "vocab     words over tp  # rows of the vocabulary: each rank has a part of the table" in text
    code, _, err = command(
        capsys, "init", f"{kinds}:Gated", "--force", "-o", plan, "--loss", "cross_entropy(output, kind)"
    )
    assert code == 0 and "input kind int64 [B]" in lines(plan, "input"), err
    assert "# as asked for; `kind` is a guess" in plan.read_text()
    code, _, err = command(capsys, "init", f"{kinds}:Gated", "--force", "-o", plan, "--input", "x float32 [B, K]")
    assert code == 2 and err == "parc init: `K` of `--input` has no size; say it, as `--sizes K=16`\n"


@pytest.mark.parametrize("loss", ["cross_entropy(output, labels)", '"{kinds}:tagged" (output, labels)'])
def test_targets_of_a_loss_that_was_asked_for_are_classes_where_it_takes_these(
    kinds: Path, tmp_path: Path, capsys: Captured, loss: str
) -> None:
    plan = tmp_path / "plan.parc"
    code, _, err = command(capsys, "init", f"{kinds}:Tagger", "-o", plan, "--loss", loss.format(kinds=kinds))
    assert code == 0 and lines(plan, "input") == ["input tokens int64 [B, S]", "input labels int64 [B, S]"], err


def test_an_input_that_is_not_found_may_be_given_and_no_file_is_written_over(
    kinds: Path, tmp_path: Path, capsys: Captured
) -> None:
    plan = tmp_path / "plan.parc"
    words = ("init", f"{kinds}:Odd", "-o", plan, "--input", "x float32 [B, 3, 17, 5]", "--sizes", "B=4")
    assert command(capsys, *words)[0] == 0
    before = plan.read_text()
    assert "sizes     B=4 " in before
    code, _, err = command(capsys, *words)
    assert code == 1 and "--force" in err and plan.read_text() == before
    assert command(capsys, *words, "--force")[0] == 0


class Masked(nn.Module):
    """A model of tokens that reads its ``mask`` in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.words, self.head = way, nn.Embedding(24, 16), nn.Linear(16, 24)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
        x = self.words(tokens)
        if self.way == "filled":
            x = (x @ x.mT).masked_fill(~mask[:, None], -1e9).softmax(-1) @ x
        elif self.way == "compared":
            x = x * (mask == 1)[..., None]
        else:
            mask = mask[:, None, None] if self.way == "keys" else mask
            x = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)[:, 0]
        return self.head(x)


@pytest.mark.parametrize(
    ("way", "mask"),
    [("filled", "bool [B, S]"), ("keys", "bool [B, S]"), ("scores", "bool [S, S]"), ("compared", "int64 [B, S]")],
)
def test_a_mask_is_of_booleans_where_the_model_takes_no_whole_numbers(way: str, mask: str) -> None:
    call = Caller(record(lambda: Masked(way), 0), {}, {}).find()
    assert call.tried.error is None and call.guesses["mask"].text() == mask


def test_a_guess_that_fails_is_tried_once_and_counts_alike_whenever_it_is_tried() -> None:
    failed = list[tuple[Any, ...]]()

    class Told(Masked):
        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
            failed.append((tokens.dtype, tokens.shape, mask.dtype, mask.shape))
            output = super().forward(tokens, mask)
            failed.pop()
            return output

    caller = Caller(record(lambda: Told("scores"), 0), {}, {})
    call = caller.find()
    assert call.tried.error is None and len(set(failed)) == len(failed) > 4
    assert len({caller.call(call.guesses, call.sizes).operators for _ in range(3)} | {call.tried.operators}) == 1
