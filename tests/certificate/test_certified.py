"""Certificates of whole builds, from their texts alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import certificate.step
from certificate import FORMAT
from certificate.build import read_manifest
from certificate.nodes import Form
from certificate.step import FORMS, certify, certify_texts
from certificate.text import Malformed, Refused
from parc.compiler.build import directory
from parc.compiler.plan.plan import read_plan
from parc.compiling.compiled import files_of, manifest_of
from parc.compiling.driver import compile_plan
from parc.grammar.source import Source
from tests.planted_builds import WINDOWS, compiled_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts of a small GPT on dp=2, pp=2, tp=2 under ZeRO 3."""
    text = (EXAMPLES / "gpt3d.parc").read_text(encoding="utf-8") + "\nzero 3 over dp\n"
    compiled = compile_plan(read_plan(Source("gpt3d.parc", text)), EXAMPLES)
    folder = tmp_path_factory.mktemp("build")
    for name, content in files_of(compiled).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps({**manifest_of(compiled), "format": FORMAT}), encoding="utf-8")
    return folder


def edited(build: Path, folder: Path, file: str, old: str, new: str) -> Path:
    """Copy a build with one text edited."""
    edits = 0
    for path in [*build.glob("*.*"), *build.glob("programs/*")]:
        target = folder / path.relative_to(build)
        target.parent.mkdir(exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.name == file:
            assert text.count(old) >= 1
            text, edits = text.replace(old, new, 1), edits + 1
        target.write_text(text, encoding="utf-8")
    assert edits == 1, f"there is no {file}"
    return folder


def test_a_build_is_proved_equal_to_its_model(build: Path) -> None:
    proof = certify(build)
    assert proof.lines == ["pp0: the loss, 26 gradients, the norm", "pp1: the loss, 27 gradients, the norm"]


@pytest.mark.parametrize("again", FORMS)
def test_a_form_that_takes_many_steps_is_tried_again_behind_the_other(
    build: Path, monkeypatch: pytest.MonkeyPatch, again: Form
) -> None:
    few = tuple((form, 5) for form in FORMS)
    monkeypatch.setattr(certificate.step, "ATTEMPTS", few)
    with pytest.raises(Refused, match="more steps than any model has needed"):
        certify(build)
    monkeypatch.setattr(certificate.step, "ATTEMPTS", (*few, (again, 30_000)))
    assert len(certify(build).lines) == 2


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stage0.F.py", "[64], norm1_weight, norm1_bias, 1e-05", "[64], norm1_weight, norm1_bias, 1e-06"),
        ("stage1.I.py", "aten.gelu_backward.default(view_10, view_7)", "aten.silu_backward.default(view_10, view_7)"),
        ("pp1.REDUCE.py", "aten.sqrt.default", "aten.rsqrt.default"),
        ("stage0.SCALE.py", "parc.all_reduce(count, 'dp')", "parc.wait(count)"),
    ],
    ids=["another eps", "another activation", "another norm", "counts of one rank"],
)
def test_a_build_with_an_edited_line_is_refused(build: Path, tmp_path: Path, file: str, old: str, new: str) -> None:
    with pytest.raises(Refused):
        certify(edited(build, tmp_path, file, old, new))


def test_what_a_stage_sends_is_a_value_of_the_model_or_refused_with_its_line(build: Path, tmp_path: Path) -> None:
    """No later stage is read: all that it makes of a wrong value would be new."""
    folder = edited(build, tmp_path, "stage0.F.py", "aten.gelu.default", "aten.relu.default")
    with pytest.raises(Refused, match=r"stage0\.F\.py: the sent `\w+` is not .*\n.*stage0\.F\.py:\d+: .* = aten\.relu"):
        certify(folder)


_FUSED = """\
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 64, bias=False)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))
        return self.head(x)


def smooth(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
"""
_FUSED_PLAN = """
model "./fused.py:Net"
input x float32 [B, 16, 32]
input y int64 [B, 16]
sizes B=8
loss "./fused.py:smooth"(output, y)
optimizer sgd lr 0.1
mesh dp=2, tp=2
shard x, y [B/dp, ...]
column qkv over tp
row out over tp
vocab head over tp
schedule microbatches 2
"""


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The texts of an attention whose q, k and v are split where they do not meet, under a loss with smoothing."""
    folder = tmp_path_factory.mktemp("fused")
    (folder / "fused.py").write_text(_FUSED, encoding="utf-8")
    compiled = compile_plan(read_plan(Source("fused.parc", _FUSED_PLAN)), folder)
    return {**files_of(compiled), "manifest.json": json.dumps({**manifest_of(compiled), "format": FORMAT})}


def test_products_of_joined_parts_are_proved_where_ranks_split_them_elsewhere(fused: dict[str, str]) -> None:
    """48 of 96 entries, which are 3 parts of 32: a sum over all of them is one over part and entry."""
    assert certify_texts(fused, read_manifest(fused)).lines == ["stage0: the loss, 7 gradients, the norm"]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stage0.F.py", "1e-05", "1e-06"),
        ("stage0.F.py", "True, None, 0.0)", "False, None, 0.0)"),
        ("stage0.B.py", "[attention_backward, attention_backward_1", "[attention_backward_1, attention_backward"),
    ],
    ids=["another eps", "another mask", "gradients exchanged"],
)
def test_a_refusal_names_the_wrong_line_and_none_of_a_loss_that_is_written_otherwise(
    file: str, old: str, new: str, fused: dict[str, str]
) -> None:
    text = fused[place := f"programs/{file}"]
    edited_text = {**fused, place: text.replace(old, new, 1)}
    row = text[: text.index(old)].count("\n") + 1
    with pytest.raises(Refused) as error:
        certify_texts(edited_text, read_manifest(edited_text))
    told = [line.split(": ")[1] for line in str(error.value).splitlines() if line.startswith("makes of known")]
    assert told == [f"{file}:{row}"]


_STAGES = """
model "./deep.py:Net"
input input float32 [B, 8]
input y float32 [B, 8]
sizes B=10
loss "./deep.py:squared"(output, y)
optimizer sgd lr 0.1
"""


def proved_of_layers(folder: Path, layers: str, lines: str) -> list[str]:
    """Return what is proved of layers in a row, under the lines of a plan that place them."""
    model = f"from torch import nn\n\n\ndef Net():\n    return nn.Sequential({layers})\n"
    model += "\n\ndef squared(o, y):\n    return (o - y).square().mean()\n"
    (folder / "deep.py").write_text(model, encoding="utf-8")
    compiled = compile_plan(read_plan(Source("deep.parc", _STAGES + lines)), folder)
    return certify_texts(files_of(compiled), manifest_of(compiled)).lines


def test_what_a_stage_sends_with_padding_is_proved(tmp_path: Path) -> None:
    """The model has no such value: its own is shorter."""
    lines = "mesh pp=2, tp=2\nstage before 2 over pp\nschedule 1f1b microbatches 2\n"
    lines += "column 0 over tp pad\nrow 2 over tp pad\n"
    proved = proved_of_layers(tmp_path, "nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8)", lines)
    assert proved == ["pp0 and pp1: the loss, 2 gradients, the norm"]


def test_a_form_whose_values_are_too_deep_leaves_the_others(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_model(step: certificate.step.Step) -> None:
        if step.table.form == FORMS[1]:
            raise RecursionError
        read(step)

    read = certificate.step.Step.read_model
    monkeypatch.setattr(certificate.step.Step, "read_model", read_model)
    attempts = (FORMS[0], 5), (FORMS[1], 30_000), (FORMS[0], 30_000)
    monkeypatch.setattr(certificate.step, "ATTEMPTS", attempts)
    assert len(certify(build).lines) == 2
    monkeypatch.setattr(certificate.step, "ATTEMPTS", attempts[1:2] * 2)
    monkeypatch.setattr(certificate.step, "FORMS", FORMS[1:])
    with pytest.raises(Refused, match="too deeply"):
        certify(build)


def test_a_text_that_no_normal_form_makes_right_is_refused_in_the_first_one(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate.step, "ATTEMPTS", [(FORMS[0], 10_000), (None, 0)])  # the second one would fail
    other = edited(build, tmp_path, "stage0.F.py", "parc.wait(", "aten.clone.default(")
    with pytest.raises(Malformed, match=r"stage0\.F\.py:\d+: .* is read while it is on its way"):
        certify(other)


def test_roles_of_which_the_same_is_proved_are_told_once(tmp_path: Path) -> None:
    layers = ", ".join(["nn.Linear(8, 8, False)"] * 4)
    lines = "mesh pp=5\nstage balanced over pp\nschedule 1f1b microbatches 5\n"
    assert proved_of_layers(tmp_path, f"{layers}, nn.Linear(8, 8)", lines) == [
        "pp0 to pp2: the loss, 1 gradient, the norm",
        "pp3: the loss, 3 gradients, the norm",
        "pp4: the loss, 0 gradients, the norm",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(slice_11, [2/dp, 2, 4, 4], 2, 1, 4, 2)", "(slice_11, [2/dp, 2, 4, 4], 2, 0, 4, 2)"),
        ("(slice_10, [2/dp, 2, 4, 4]", "(slice_9, [2/dp, 2, 4, 4]"),
        ("(slice_backward_1, slice_backward_3)", "(slice_backward_1, slice_backward_1)"),
    ],
    ids=["another place", "another window", "a window twice"],
)
def test_windows_and_two_means_of_one_sample_a_rank_are_proved(old: str, new: str) -> None:
    compiled = compiled_plan(WINDOWS)
    texts, manifest = files_of(compiled), manifest_of(compiled)
    assert certify_texts(texts, manifest).lines == ["stage0: the loss, 10 gradients, the norm"]
    text = texts["programs/stage0.B.py"]
    assert old in text
    with pytest.raises(Refused, match=r"is not proved to be what model\.py says"):
        certify_texts({**texts, "programs/stage0.B.py": text.replace(old, new)}, manifest)


def test_a_build_of_another_format_is_refused(build: Path, tmp_path: Path) -> None:
    before = edited(build, tmp_path, "manifest.json", f'"format": {FORMAT}', f'"format": {FORMAT - 1}')
    with pytest.raises(Refused, match=f"of format {FORMAT - 1}, and this checker reads format {FORMAT}"):
        certify(before)


def test_the_checker_reads_the_format_that_parc_writes() -> None:
    assert FORMAT == directory.FORMAT


def test_a_parameter_split_over_an_axis_that_no_rank_has_is_refused(build: Path, tmp_path: Path) -> None:
    split = edited(build, tmp_path, "manifest.json", '"f32[64/dp]"', '"f32[64/pp]"')
    with pytest.raises(Refused, match="`pp` is no axis of the mesh"):
        certify(split)


_LOSSES = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(27, 8), nn.Linear(8, 27)

    def forward(self, x):
        return self.head(self.embed(x).tanh())


def smooth(o, y):
    return F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=0, label_smoothing=0.1)


def with_z(o, y):
    losses = F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=0, reduction="none")
    return (losses + 1e-2 * o.flatten(0, 1).logsumexp(-1).square() * (y.flatten() != 0)).sum() / (y != 0).sum()
"""
_PLAN = """
model "./losses.py:Net"
input x int64 [B, 4]
input y int64 [B, 4]
sizes B=4
loss "./losses.py:{}" (output, y)
optimizer sgd lr 0.1
mesh tp=2
vocab embed, head over tp pad
schedule microbatches 2
"""


@pytest.mark.parametrize(("loss", "factor"), [("smooth", "0.9"), ("with_z", "0.01")])
def test_losses_of_rows_that_padding_makes_longer_are_proved(tmp_path: Path, loss: str, factor: str) -> None:
    (tmp_path / "losses.py").write_text(_LOSSES, encoding="utf-8")
    compiled = compile_plan(read_plan(Source("losses.parc", _PLAN.format(loss))), tmp_path)
    texts, manifest = files_of(compiled), manifest_of(compiled)
    assert certify_texts(texts, manifest).lines == ["stage0: the loss, 3 gradients, the norm"]
    file = "programs/stage0.B.py"
    assert texts[file].count(f", {factor})") == 1
    with pytest.raises(Refused, match="is not proved to be what"):
        certify_texts({**texts, file: texts[file].replace(f", {factor})", ", 0.3)")}, manifest)


def test_the_checker_imports_nothing_of_what_it_checks() -> None:
    script = "import sys, certificate.__main__; print(sorted({'parc', 'torch', 'sympy'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
