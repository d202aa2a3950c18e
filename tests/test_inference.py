"""Plans without a loss and an optimizer: builds of the model in ``eval()`` alone, and predictions of data sets."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

import parc
from benchmarks.storages import Storages
from parc.checking.checks import case_of, static_faults
from parc.checking.reports import report_of
from parc.cli import main
from parc.cli.build import report_text
from parc.compiler.build.build import Build
from parc.compiler.build.directory import write_build
from parc.compiler.program.actions import Action
from parc.compiler.program.binding import LOSS, Binding
from parc.compiler.program.program import Function
from parc.compiling.compiled import Compiled
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.syntax import size_text
from parc.runtime.launch import predict
from parc.runtime.launch.train import Stop
from parc.runtime.session.evaluation import with_samples
from parc.runtime.session.session import Session
from parc.runtime.state.opening import open_build
from tests.checked_plans import checked, compiled
from tests.planted_builds import GoodBuild, judge
from tests.predicting_models import Rows, Tagger
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny import EXAMPLES

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent
TAGGER = 'model "tests.predicting_models:Tagger"\ninput tokens int64 [B, S]\nsizes B=8, S=6\n'
TRAINS = "input targets int64 [B, S]\nloss cross_entropy(output.logits, targets)\noptimizer adamw lr 1e-2\n"
VOCAB = "column head over tp pad\nvocab table over tp pad\n"
STAGES = "stage before head over pp\nschedule 1f1b microbatches 4\n"
CONTEXT = 'model "./context_models.py:Net" (groups=2, layers=1)\ninput tokens int64 [B, S]\n'
CONTEXT += "input document int64 [B, S]\nsizes B=2, S=24\nmesh cp=2\n"
MOODY = 'model "tests.evaluated_models:Moody"\ninput x float32 [B, 8]\nsizes B=8\n'
TENSOR = "mesh tp=2\ncolumn first over tp\nrow second over tp\n"
PLANS = {
    "dp, tp": (TAGGER + f"mesh dp=2, tp=2\nshard tokens [B/dp, S]\nschedule microbatches 2\neval\n{VOCAB}", ROOT),
    "pp": (TAGGER + f"mesh pp=2\n{STAGES}", ROOT),
    "narrow": (TAGGER + f"mesh tp=2\nprecision fp16\n{VOCAB}", ROOT),
    "sequence": (TAGGER + "mesh sp=2\nshard tokens [B, S/sp]\n", ROOT),
    "ring": (CONTEXT + "context blocks.* dim S over cp using ring\n", TESTS),
    "ulysses": (CONTEXT + "context blocks.* dim S over cp using ulysses\n", TESTS),
    "experts": (
        'model "./moe_forms.py:Model" (name="listed")\ninput input_ids int64 [B, S]\nsizes B=8, S=4\nmesh dp=1, ep=2\n'
        "shard input_ids [B/dp/ep, _]\nexperts layers.*.experts over ep dropless\n", TESTS,
    ),
    "statistics": (MOODY + TENSOR + "budget memory 1MB\nforbid all_gather in first\n", ROOT),
    "sizes": (MOODY.replace("B=8", "B=4..12 by 4") + TENSOR, ROOT),
}  # fmt: skip


def made(name: str) -> Compiled:
    return compiled(*PLANS[name])


def written(text: str, path: Path, folder: Path = ROOT) -> Path:
    """Write a build and return its path."""
    step = compiled(text, folder)
    write_build(step.to_write(report_of(step)), path)
    return path


@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_return_what_the_plain_module_returns(name: str) -> None:
    """In float64, beside the captured graph in ``eval()``, which is compared with the module."""
    compilation = made(name)
    found = checked(compilation)
    assert found.agreement is not None and found.agreement.output <= 1e-10
    assert found.report["numbers"].get("output", 0) == found.agreement.output
    kinds = {action.kind for role in compilation.build.roles.values() for action in role.actions}
    assert kinds <= {"UNSHARD", "F", "SEND_F", "RECV_F"}
    assert {program.action for program in compilation.build.files()} == kinds - {"SEND_F", "RECV_F"}
    for row in found.report["memory"]:
        assert row["gradients"] == row["optimizer"] == 0 < row["parameters"] < row["peak_bytes"]
    assert {row["phase"] for row in found.report["communication"]} == {"forward"}
    text = report_text(found.report)
    text = "\n".join(row for row in text.splitlines() if "equality: " not in row)  # which names outputs
    assert "gradients" not in text and "step" not in text and text.count("memory   ") == 1 + (name == "pp")


@pytest.mark.parametrize("lines", ["", "schedule microbatches 4\n"], ids=["whole", "microbatches"])
def test_a_prediction_takes_the_memory_that_was_estimated(lines: str, tmp_path: Path) -> None:
    """The outputs of earlier microbatches are held to the end."""
    text = 'model "./gpt.py:GPT" (layers=2, width=64, heads=4, vocab=64, length=32)\ninput tokens int64 [B, S]\n'
    path = written(f"{text}sizes B=16, S=32\nmesh dp=1\n{lines}", tmp_path / "build", EXAMPLES)
    (row,) = json.loads((path / "report.json").read_text())["memory"]
    with Storages() as storages, parc.load(path) as session:
        batch = {"tokens": torch.zeros(16, 32, dtype=torch.int64)}
        session.predict(batch, split=True)
        storages.begin()
        at = session.evaluation._by_sizes()
        work = at.stepper.begin([session.state], [at.feed.cut(batch)], 0, keep=False)
        at.stepper.evaluate(work, 0, returns=True)
    assert abs(row["peak_bytes"] - storages.peak) < 0.05 * storages.peak


def test_wrong_programs_are_refused() -> None:
    compilation = made("dp, tp")
    good = GoodBuild("inference", case_of(compilation), compilation.build)
    programs, main_ = good.case.programs, good.case.programs["F"].main
    assert not judge(good, programs).check

    def judged(change: Callable[[Function], Function]) -> str:
        functions = (*programs["F"].blocks, change(main_))
        return judge(good, {**programs, "F": replace(programs["F"], functions=functions)}).check

    rows = dict(main_.returns)
    logits, hidden = Binding("output", "logits"), Binding("output", "hidden.0")
    assert judged(lambda main: replace(main, returns=tuple(row for row in main.returns if row[0] != logits)))
    assert judged(lambda main: replace(main, returns=tuple({**rows, logits: rows[hidden]}.items())))
    assert judged(lambda main: replace(main, returns=(*main.returns, (LOSS, rows[logits])))) == "types"


def test_a_schedule_with_a_loss_and_a_manifest_of_training_are_refused() -> None:
    build = made("pp").build
    (name, role), *others = build.roles.items()
    longer = {name: replace(role, actions=(*role.actions, Action(0, "LOSS"))), **dict(others)}
    assert any("`0LOSS` is not one" in str(fault) for fault in static_faults(replace(build, roles=longer)))
    loss: list[dict[str, Any]] = [{"kind": "output", "target": "loss", "operands": [], "ignore": None, "factor": 1}]
    with pytest.raises(ValueError, match="are not all there with their F and B"):
        Build.of(build.path, build.texts, {**build.manifest, "loss": loss}, {})


@pytest.mark.parametrize(
    ("forward", "said"),
    [("x.sum()", "P0420"), ("(x * x).sum(0)", "P0420"), ("(x - 1e30).log()", "the model returns NaN"),
     ("x * __import__('random').random()", "the model returns other numbers the next time")],
)  # fmt: skip
def test_models_of_which_nothing_can_be_predicted_are_refused(forward: str, said: str, tmp_path: Path) -> None:
    code = f"import torch\n\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n        return {forward}\n"
    (tmp_path / "net.py").write_text(code)
    text = 'model "./net.py:Net" (in_features=4, out_features=4)\ninput x float32 [B, 4]\nsizes B=4\nmesh dp=1\n'
    with pytest.raises(PlanError) as error:
        checked(compiled(text, tmp_path))
    assert said in "\n".join(map(render, error.value.diagnostics))


# ---- sessions


def tokens(samples: int = 8) -> torch.Tensor:
    return torch.randint(11, (samples, 6), generator=torch.Generator().manual_seed(samples))


def run(path: str) -> list[Any]:
    """Return predictions of whole, smaller and local batches, and the codes of what such a session cannot do."""
    with parc.load(path) as session:
        found = [session.predict({"tokens": tokens()}), session.predict({"tokens": tokens(3)}),
                 session.predict(local={"tokens": tokens()})]  # fmt: skip
        codes = set()
        for refused in (session.step, session.gradients, session.evaluate, lambda: session.save("nothing")):
            with pytest.raises(parc.RunError) as error:
                refused()
            codes.add(error.value.code.name)
        return [*found, codes, session.state_dict()]


@pytest.mark.parametrize("lines", [f"mesh tp=2\n{VOCAB}", f"mesh pp=2\n{STAGES}"], ids=["tp", "pp"])
def test_real_ranks_predict_what_the_plain_module_returns_and_train_nothing(lines: str, tmp_path: Path) -> None:
    path = written(TAGGER + lines, tmp_path / "build")
    plain = parc.reference(path).module.eval()
    for *found, codes, state in run_ranks(run, 2, str(path)):
        for predicted, given in zip(found, (tokens(), tokens(3), tokens()), strict=True):
            with torch.no_grad():
                expected = plain(given)
            assert [*predicted] == ["logits", "hidden.0", "hidden.1", "steps", "aside"]
            torch.testing.assert_close(predicted["logits"], expected["logits"])
            torch.testing.assert_close(predicted["hidden.1"], expected["hidden"][1])
        assert codes == {"P0421"}
        assert all(map(torch.equal, state.values(), plain.state_dict().values()))
    reference = parc.reference(path)
    with pytest.raises(parc.RunError, match="P0421"):
        reference.step()


def test_a_session_for_inference_goes_on_in_the_data_of_its_plan(tmp_path: Path, data: Path) -> None:
    text = TAGGER.replace("Tagger", "Rows") + f'mesh dp=1\ndata tokens "{data}"\n'
    path = written(text, tmp_path / "build")
    with parc.load(path, "cpu") as session:
        found = [session.predict()["logits"] for _ in range(2)]
    assert torch.equal(torch.cat(found), plain_rows(Rows, path, data)["logits"][: 16 * 6])


# ---- whole data sets


def predicted(out: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder of predictions."""
    index = json.loads((out / predict.PREDICTIONS).read_text())
    assert sum(part["samples"] for part in index["parts"]) == index["samples"]
    files = [load_file(out / part["file"]) for part in index["parts"]]
    return {name: files[0][name] if dim is None else torch.cat([file[name] for file in files], dim)
            for name, dim in index["dims"].items()}  # fmt: skip


def trained(folder: Path, optimizer: str) -> Path:
    """Train a classifier with statistics of the batch for some steps, and return its checkpoint."""
    text = MOODY + f"seed 3\ninput targets int64 [B]\nloss cross_entropy(output, targets)\noptimizer {optimizer}\n"
    with parc.load(written(text + "mesh dp=1\ndata synthetic\n", folder / "trains")) as session:
        for _ in range(3):
            session.step()
        session.save(folder / "checkpoint")
        torch.save(session.state_dict(), folder / "weights.pt")
    return folder / "checkpoint"


def predict_ranks(path: str, folder: str) -> int:
    """Do on one rank as ``parc run --predict`` does, in small files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "PART_BYTES", 8 * 8 * 4)
        facts = {"form": "dataset", "names": [], "callable": f"{folder}/rows.py:rows", "arguments": {}}
        build = with_samples(open_build(Path(path)), facts)
        return predict.predict(Session(build), Path(folder, "out"), Path(folder, "checkpoint"))


def test_ranks_write_a_data_set_in_its_order_by_the_weights_of_another_plan_and_optimizer(tmp_path: Path) -> None:
    """Statistics of batches are buffers that a step of training changes; an evaluation only reads them."""
    from tests.evaluated_models import Moody

    trained(tmp_path, "sgd lr 0.1 momentum 0.9")
    x = torch.randn(21, 8, generator=torch.Generator().manual_seed(0))
    (tmp_path / "rows.py").write_text(f"def rows():\n    return [{{'x': row}} for row in {x.tolist()}]\n")
    path = written(MOODY + "seed 4\n" + TENSOR, tmp_path / "build")
    assert run_ranks(predict_ranks, 2, str(path), str(tmp_path)) == [0, 0]
    plain = Moody()
    plain.load_state_dict(torch.load(tmp_path / "weights.pt"))
    index = json.loads((tmp_path / "out" / predict.PREDICTIONS).read_text())
    assert [part["samples"] for part in index["parts"]] == [8, 8, 5]
    assert (index["build"], index["checkpoint"]) == (str(path), str(tmp_path / "checkpoint"))
    with torch.no_grad():
        torch.testing.assert_close(predicted(tmp_path / "out")["output"], plain.eval()(x))
    with parc.load(written(MOODY + "mesh dp=1\n", tmp_path / "alone")) as session:
        session.restore(tmp_path / "checkpoint")
        statistics = session.state_dict()
    assert torch.equal(statistics["norm.running_var"], plain.state_dict()["norm.running_var"])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a file of tokens, 29 windows of 6 and nothing behind them."""
    numpy.save(tmp_path / "tokens.npy", torch.randint(11, (29 * 6,)).numpy())
    return tmp_path / "tokens.npy"


def plain_rows(model: type[Tagger], path: Path, data: Path) -> dict[str, torch.Tensor]:
    plain = model()
    plain.load_state_dict(parc.reference(path).module.state_dict())
    with torch.no_grad():
        output: dict[str, torch.Tensor] = plain.eval()(torch.from_numpy(numpy.load(data)).reshape(29, 6))
    return output


@pytest.mark.parametrize("lines", ["", TRAINS + "eval\n"], ids=["inference", "training"])
def test_a_command_predicts_with_a_build_for_inference_and_one_of_training(
    lines: str, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples may have several rows; the loss's targets are not asked for."""
    path = written(TAGGER.replace("Tagger", "Rows") + lines + "mesh dp=1\n", tmp_path / "build")
    out = tmp_path / "out"
    words = ["run", str(path), "--predict", f"tokens {data}", "-o", str(out), "--device", "cpu"]
    assert main(words) == 0
    assert "29 of 29 samples" in capsys.readouterr().err
    expected, found = plain_rows(Rows, path, data), predicted(out)
    for name in ("logits", "classes", "known"):
        torch.testing.assert_close(found[name], expected[name])
    (out / "part-00000.safetensors").write_text("old")
    assert main(words) == 0
    assert capsys.readouterr().err.endswith(", in place of older ones\n")
    torch.testing.assert_close(predicted(out)["logits"], expected["logits"])


def test_predictions_by_first_weights_are_warned_of_and_what_is_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["--resume", str(trained(tmp_path, "sgd lr 0.1"))]
    save_file(torch.load(tmp_path / "weights.pt"), tmp_path / "model.safetensors")
    (tmp_path / "rows.py").write_text("def rows():\n    return [{'x': [float(row)] * 8} for row in range(9)]\n")
    first = written(MOODY + "mesh dp=1\n", tmp_path / "first")
    other = written(f'{MOODY}mesh dp=1\ninit from "{tmp_path / "model.safetensors"}"\n', tmp_path / "other")
    for build, more, times in ((first, [], 1), (first, resume, 0), (other, [], 0)):
        out = tmp_path / f"out{len(more)}{build.name}"
        words = ["run", str(build), "--predict", f"dataset {tmp_path}/rows.py:rows", "-o", str(out), "--device", "cpu"]
        assert main([*words, *more]) == 0
        *before, last = capsys.readouterr().err.splitlines()
        assert before.count(predict.FIRST_WEIGHTS) == times == len(before) - 1
        size = size_text(sum(file.stat().st_size for file in out.iterdir()))
        assert last == f"written {out}: 1 file of tensors and predictions.json, {size}"


def test_a_run_that_is_stopped_leaves_what_was_there(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(TAGGER + "mesh dp=1\n", tmp_path / "build"), tmp_path / "out"
    monkeypatch.setattr(Stop, "signal", int(signal.SIGTERM))
    monkeypatch.setattr(predict, "PART_BYTES", 1)
    before = sorted(tmp_path.iterdir())
    assert main(["run", str(path), "--predict", f"tokens {data}", "-o", str(out), "--device", "cpu"]) == 143
    assert "stopped by SIGTERM; nothing was written" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_rank_leaves_a_folder_of_other_things_and_says_what_cannot_be_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that torchrun starts have no command before them that looks."""
    path, mine = written(TAGGER + "mesh dp=1\n", tmp_path / "build"), tmp_path / "mine" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    facts: dict[str, Any] = {"form": "tokens", "names": [str(data)], "callable": None, "arguments": {}}
    build, before = with_samples(open_build(path), facts), sorted(tmp_path.rglob("*"))
    with pytest.raises(parc.RunError, match="is not a folder of predictions; it is left"):
        predict.predict(Session(build), mine.parent)
    monkeypatch.setattr(predict, "write_shard", lambda path, _: (path / "nothing").touch())
    with pytest.raises(parc.RunError, match=r"`part-00000\.safetensors` of `.*out` cannot be written"):
        predict.predict(Session(build), tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


FORMS = (
    "help: begin with a form: `bytes GLOBS`, `tokens GLOBS`, `dataset CALLABLE` or `folder FILE`; `dataset` takes a"
    " function, which may read any file\n"
)
REFUSED = {
    "synthetic": "`--predict` takes samples with an end, and `synthetic` is none of their forms\n --> --predict:1:1\n"
    f"1 | synthetic\n  | ^^^^^^^^^\n{FORMS}",
    '"./mine.py:sample"': FORMS,
    "folder x.json shuffle": "`predict` takes no `shuffle` here\n",
    "folder x.json split 0.1": "help: usage: predict folder FILE [pack] [workers N]\n",
    "foldr x.json": "help: did you mean `folder`?\n",
    "datset ./mine.py:rows": "help: did you mean `dataset`?\n",
    "x.pt": FORMS,
    '"texts/*.txt"': FORMS,
    "data tokens nothing.npy": 'no file matches "HERE/nothing.npy"',
    "tokens nothing.npy": 'P0303]: no file matches "HERE/nothing.npy"\nhelp: name files that are there: "texts/*.txt";',
    "tokens token.npy": 'matches "HERE/token.npy"\nhelp: did you mean `tokens.npy`?',
    "bytes {stdlib}/none.py": 'no file matches "{stdlib}/none.py"\nhelp: name files that are there: ',
    "folder questions.json": "P0303]: there is no folder or file HERE/questions.json\nhelp: name a folder that"
    " `dataset.save_to_disk` wrote, or a file of JSON with an object a line\n",
    "dataset ./mine.py:rows": "P0303]: the data's callable: there is no file `HERE/mine.py`\n",
    "": "`predict` needs `bytes GLOBS` or `tokens GLOBS` or `dataset CALLABLE` or `folder FILE`\n",
}


def test_what_cannot_be_predicted_is_said_before_anything_runs(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(TAGGER + "mesh dp=1\n", tmp_path / "build")
    written(TAGGER + TRAINS + "mesh dp=1\n", tmp_path / "trains")
    written(TAGGER.replace("Tagger", "Mixing") + "mesh dp=1\n", tmp_path / "mixes")

    def said(*words: str, code: int = 1) -> str:
        assert main(["run", *words, "--device", "cpu"]) == code
        return capsys.readouterr().err.replace(str(tmp_path), "HERE")

    for words, text in REFUSED.items():
        assert text in said("build", "--predict", words, "-o", "out"), words
    assert "has no programs that evaluate the model" in said("trains", "--predict", "tokens tokens.npy", "-o", "out")
    assert "the last batch has 5 samples of the 8" in said("mixes", "--predict", "tokens tokens.npy", "-o", "out")
    assert "is not a folder of predictions" in said("build", "--predict", "tokens tokens.npy", "-o", "trains")
    assert "P0421" in said("build")
    Path("alone.parc").write_text(TAGGER + "mesh dp=1\n")
    assert "P0421" in said("alone.parc") and not Path("alone.parc.build").exists()
    trained(tmp_path, "sgd lr 0.1")
    error = said("build", "--predict", "tokens tokens.npy", "-o", "out", "--resume", "checkpoint")
    assert error.count(" is missing\n") == 5 and "\n = note: and 1 more\nhelp: " in error
    (tmp_path / "model.safetensors").touch()
    for place, text in (("model.safetensors", "is a file, and a checkpoint is a folder"), (".", "is not a checkpoint")):
        error = said("build", "--predict", "tokens tokens.npy", "-o", "out", "--resume", place)
        assert error.startswith(f"error[P0304]: `{place}` {text}")
        assert f"help: `parc import BUILD {place} -o DIR` makes a checkpoint of a model's weights\n" in error
    assert "there is no --steps" in said("build", "--predict", "a", "-o", "out", "--steps", "3", code=2)
    assert "needs -o DIR" in said("build", "--predict", "a", code=2)
    assert not (tmp_path / "out").exists()
