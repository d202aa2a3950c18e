"""Every message that needs a model, files or a run, produced and compared with a golden file, like those of the
language."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch._inductor import config

import parc
from parc.cli import main
from parc.compiler.build.directory import read_build
from parc.grammar.codes import code_pages
from parc.grammar.diagnostics import render
from parc.runtime.compare import first_check
from parc.runtime.ranks import lockstep
from parc.runtime.ranks.faults import RunError
from parc.runtime.ranks.lockstep import Lockstep
from parc.runtime.ranks.processes import DEVICE
from parc.runtime.ranks.replicas import ReplicaDifference, Replicas
from parc.runtime.session.one_build import difference, rank_facts
from parc.runtime.state.checkpoint import target_held
from parc.runtime.state.opening import build_mesh, open_build
from tests.runtime.tiny import DATA, EVAL, EXAMPLES, FLAT, ONE, PLAN, TENSOR, batch, build

MODELS = (Path(__file__).parent / "message_models.txt").read_text()


@dataclass(frozen=True)
class Case:
    """A command on the tiny plan, which is changed, has lines added, or has one of ``message_models.txt`` instead of
    the GPT."""

    model: str = ""
    change: tuple[str, str] = ("", "")
    lines: str = TENSOR
    words: tuple[str, ...] = ("check", "tiny.parc")
    of: str = "Model"


LOSS = "cross_entropy(output, targets)"
ALONE = """
from torch import nn


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.table(tokens).flatten(0, 1), targets.flatten())
"""
SQUARES = (f"S=8\nloss      {LOSS}", 'S=8..40\nloss      "./models.py:squares"(output, targets)')
GPIPE = ("microbatches", "gpipe microbatches")
VALUES = " | ".join(map(str, range(1, 9)))
AXES = f"mesh {', '.join(f'{axis}=2' for axis in 'abcdefghi')}\n"
COMMANDS = {
    "P0013": Case(words=("check", "missing.parc")),
    "P0021": Case(lines='include "other.parc"\n'),
    "P0023": Case(lines=TENSOR.replace("tp=2", "\u202etp=2")),
    "P0024": Case(lines="# one more line\n" * 10_000),
    "P0025": Case(lines='include "models.py"\n'),
    "P0026": Case(lines="let tp=1 | 2\n" + TENSOR.replace("tp=2", "tp=$tp"), words=("build", "tiny.parc")),
    "P0028": Case(
        lines=f"let {', '.join(f'x{at}={VALUES}' for at in range(7))}\n" + TENSOR,
        words=("plan", "tiny.parc", "--ranks", "2", "--cluster", "h100-sxm"),
    ),
    "P0029": Case(
        lines="let tp=1 | 2\n" + TENSOR.replace("tp=2", "tp=$tp"),
        words=("plan", "tiny.parc", "--ranks", "3", "--cluster", "h100-sxm"),
    ),
    "P0112": Case(lines=TENSOR.replace("tp=2", "tp=4")),
    "P0134": Case(lines="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp unit blocks.*.mlp, head\n"),
    "P0135": Case(
        "plain",
        ("S=8", "S=5"),
        "mesh dp=4, ep=4\nshard tokens, targets [B/dp, _]\nexperts moe.experts over ep dropless\n",
        of="Routed",
    ),
    "P0138": Case(
        "plain",
        lines="mesh dp=4, ep=2\nshard tokens, targets [B/dp, _]\nexperts moe.experts over ep capacity 0.2\n",
        of="Routed",
    ),
    "P0139": Case(
        "plain",
        lines="mesh dp=4, ep=2\nshard tokens, targets [B/dp, _]\n"
        "experts moe.experts over ep dropless balance bias 0.001\n",
        of="Routed",
    ),
    "P0160": Case("plain", lines="mesh tp=2\nshard out(drop) [_, S/tp, _]\n", of="Normed"),
    "P0161": Case("plain", lines="mesh tp=2\ncolumn head over tp\nsequence drop over tp\n", of="Normed"),
    "P0162": Case(
        "plain",
        lines="mesh cp=2, tp=2\nshard place [S/cp, _]\nrow mid over tp\nsequence mid over tp\n",
        of="Positioned",
    ),
    "P0163": Case("plain", lines="mesh tp=2\ncolumn head over tp\nsequence mid over tp\n", of="Normed"),
    "P0144": Case("plain", lines="mesh cp=2\ncontext head dim S over cp using ring\n", of="Attending"),
    "P0145": Case("plain", lines="mesh cp=4\ncontext ** dim S over cp using ulysses\n", of="Attending"),
    "P0146": Case("running", lines="mesh cp=2\ncontext ** dim S over cp using ring\n", of="Attending"),
    "P0147": Case("plain", lines="mesh cp=2\ncontext ** dim S over cp using ring\n", of="Twice"),
    "P0148": Case(
        change=("B=8", "B=64"),
        lines="mesh tp=2\ncolumn blocks.*.attn.out over tp\nshard out(blocks.*.attn.out) [_, _, _]\n",
    ),
    "P0149": Case(
        lines=TENSOR.replace("tp=2", "tp=2, dp=2") + "node 2\nshard tokens, targets [B/dp, _]\n", change=("B=8", "B=64")
    ),
    "P0133": Case(lines="mesh dp=2\nshard tokens, targets [B/dp, _]\nzero 3 over dp\nbucket 4KB\n"),
    "P0201": Case(change=("gpt.py:GPT", "gpt.py:GTP")),
    "P0202": Case("branch", lines=ONE),
    "P0203": Case("cache", lines=ONE),
    "P0204": Case("plain", (LOSS, '"./models.py:each"(output, targets)'), ONE),
    "P0205": Case("numpy", lines=ONE),
    "P0120": Case("plain", ("targets int64", "maks int64 [B, S]\ninput     targets int64"), ONE, of="Open"),
    "P0121": Case(lines=TENSOR.replace("(3 h", "(2 h")),
    "P0206": Case(change=("input     tokens", "input     words")),
    "P0153": Case(lines="recompute blocks.* fit 20KB\n"),
    "P0207": Case("halves", SQUARES, ONE, ("build", "tiny.parc")),
    "P0208": Case("scale", lines="mesh dp=2\nshard tokens, targets [B/dp, _]\n"),
    "P0209": Case(lines="mesh tp=2\nshard tokens [_, S/tp]\ncolumn blocks.*.attn.qkv over tp\n"),
    "P0213": Case(change=("width=16", "width=16384"), words=("build", "tiny.parc")),
    "P0214": Case(lines="freeze **\n"),
    "P0215": Case(lines='init from "weights"\n'),
    "P0216": Case("double", lines="mesh dp=2\nshard tokens, targets [B/dp, _]\n"),
    "P0217": Case("plain", (LOSS, '"./models.py:masked"(output, targets)'), ONE),
    "P0218": Case("again", lines=ONE),
    "P0285": Case("plain", (LOSS, '"./models.py:squared"(output, targets) / 64'), ONE, ("build", "tiny.parc")),
    "P0220": Case("plain", lines="mesh tp=4\ncolumn q, k, v over tp\n", of="Grouped"),
    "P0221": Case("shuffled", lines=ONE),
    "P0223": Case("plain", lines=ONE, of="Narrow"),
    "P0224": Case(change=("(output, targets)", "(output.logits, targets)"), lines=ONE),
    "P0225": Case("pairs", ("S=8", "S=4..8 by 2"), "mesh tp=2\nshard tokens, targets [_, S/tp]\n"),
    "P0226": Case("root", ("S=8", "S=4..8 by 2"), ONE),
    "P0228": Case("plain", lines=ONE, of="Warming", words=("build", "tiny.parc")),
    "P0229": Case("hooked", lines=ONE, words=("build", "tiny.parc")),
    "P0231": Case("plain", lines=ONE, of="Normalizing", words=("build", "tiny.parc")),
    "P0281": Case("plain", lines=ONE, of="Stepped"),
    "P0232": Case("seeded", lines=ONE, words=("build", "tiny.parc")),
    "P0234": Case("traced", lines=ONE, words=("build", "tiny.parc")),
    "P0235": Case("plain", lines=ONE, of="Untied"),
    "P0236": Case("plain", lines=ONE, of="Evaluated"),
    "P0227": Case("counter", lines=ONE, words=("build", "tiny.parc")),
    "P0259": Case("chaos", lines="mesh tp=2\nrow head over tp\n", of="Late", words=("build", "tiny.parc")),
    "P0266": Case("plain", lines="mesh tp=2\nrow head over tp\n", of="Tied", words=("build", "tiny.parc")),
    "P0262": Case("rounded", lines=ONE, words=("build", "tiny.parc")),
    "P0280": Case("typed", lines=ONE, words=("build", "tiny.parc")),
    "P0263": Case("sums", lines=ONE, of="Formed"),
    "P0264": Case("means", lines=ONE, of="Formed"),
    "P0265": Case("twice", lines=ONE, of="Formed", words=("build", "tiny.parc")),
    "P0233": Case("plain", (LOSS, '"./models.py:logged"(output, targets)'), ONE, ("build", "tiny.parc")),
    "P0240": Case(change=GPIPE, lines="mesh pp=2\nstage before embed over pp\n"),
    "P0241": Case(change=GPIPE, lines="mesh pp=16\nstage balanced over pp\n"),
    "P0242": Case("plain", GPIPE, "mesh pp=2\nstage before mid over pp\n", of="Normed"),
    "P0243": Case(change=GPIPE, lines="mesh pp=3\nstage before blocks.1, blocks.0 over pp\n"),
    "P0244": Case("plain", GPIPE, "mesh pp=2\nstage before drop over pp\n", of="Normed"),
    "P0250": Case("plain", lines=AXES, words=("build", "tiny.parc")),
    "P0256": Case("solved", lines=ONE),
    "P0122": Case("plain", ('bytes "*.py"', 'dataset "./models.py:padded"'), ONE, of="Padded"),
    "P0123": Case(
        change=(
            f"input     targets int64 [B, S]\nsizes     B=8, S=8\nloss      {LOSS}",
            "sizes     B=8, S=8\nloss      cross_entropy(output, tokens)",
        ),
        lines=ONE,
    ),
    "P0273": Case("plain", lines=ONE, of="Sided"),
    "P0270": Case("numpy", words=("init", "./models.py:Model", "way=numpy")),
    "P0272": Case("plain", lines="eval\n", of="Sided"),
    "P0271": Case(words=("init", "models.py")),
    "P0401": Case(lines=TENSOR + "budget memory 100KB\n"),
    "P0402": Case(lines=TENSOR + "forbid all_reduce in blocks.*.mlp during forward\n"),
    "P0403": Case(lines=TENSOR + "expect 2 all_reduce in blocks.*\n"),
}
"""The codes that a command on a plan produces."""
TWO_LAYERS = (
    "P0112", "P0121", "P0133", "P0153", "P0201", "P0209", "P0213", "P0215", "P0241", "P0243", "P0401", "P0402", "P0403",
)  # fmt: skip
"""Codes whose messages tell of two layers; for all others one is enough."""


def altered(folder: Path) -> list[str]:
    """Return the messages of ``certify``, ``verify`` and ``run`` for a build with a line of another meaning, and of
    ``run`` under another torch."""
    made = build(folder, TENSOR, PLAN)
    program, manifest = made / "programs" / "stage0.F.py", made / "manifest.json"
    good = program.read_text()
    program.write_text(good.replace("aten.add.Tensor(x, ", "aten.sub.Tensor(x, "))
    said = [command(word, "build") for word in ("certify", "verify", "run")]
    program.write_text(good)
    manifest.write_text(re.sub(r'("torch": ")[^"]*', r"\g<1>2.0.0", manifest.read_text()))
    return [*said, command("run", "build")]


def runs(folder: Path) -> list[str]:
    """Return the messages that stop a run before or in a step."""
    build(folder, TENSOR)
    said = [
        *(command("run", "build", *words) for words in (("--nproc", "3"), ("--resume", "."), ("--sizes", "S=12"))),
        command("show", "build", "--pipeline", "--svg", "build/plan.parc/out.svg"),
    ]
    with patch.object(torch.cuda, "is_available", return_value=False):
        said.append(command("run", "build", "--device", "cuda"))
    with patch.dict(sys.modules, {"tensorboard": None}):
        said.append(command("run", "build", "--tensorboard", "runs"))
    with target_held(folder / "kept", 0), patch("parc.runtime.state.checkpoint.HELD_S", 0.0):
        said.append(command("run", "build", "--save", "kept"))
    kept = build(folder, 'offload optimizer to "gpt.py"\n', name="kept-build")
    with pytest.raises(RunError) as stopped:
        parc.load(kept)
    said.append(render(stopped.value.diagnostic()))
    for name, plan in {
        "hot": PLAN.replace("adamw lr 1e-2 eps 1e-5 weight_decay 0.1 clip 1.0", "sgd lr 1e30"),
        "empty": FLAT.replace('"*.py"', '"nothing/*.txt"'),
    }.items():
        with pytest.raises(RunError) as stopped:
            session = parc.load(build(folder, ONE, plan, name))
            for _ in range(3):
                session.step()
        said.append(render(stopped.value.diagnostic()))
    with pytest.raises(RunError) as stopped:
        session.evaluate({})
    said.append(render(stopped.value.diagnostic()))
    (folder / "alone.py").write_text(ALONE)
    plan = FLAT.replace(FLAT.splitlines()[1], 'model "./alone.py:Alone"').replace(LOSS, "output")
    with pytest.raises(RunError) as stopped:
        parc.load(build(folder, EVAL, plan, "alone")).predict({})
    said.append(render(stopped.value.diagnostic()))
    build(folder, ONE, re.sub(r"(loss|optimizer|steps|input +targets) .*", "", FLAT), "inference")
    said.append(command("run", "inference"))
    said += updates(session)
    with (
        patch.multiple(lockstep, exchange=lambda row, *_: [row, [0]], everywhere=lambda own, _: [own, OTHER]),
        pytest.raises(RunError) as stopped,
    ):
        session.state_dict()
    said.append(render(stopped.value.diagnostic()))
    with pytest.raises(RunError) as stopped:
        session.step({}, local={})
    said.append(render(stopped.value.diagnostic()))
    session._together.world = 2  # as if there were another rank, which no test of messages needs
    with pytest.raises(ZeroDivisionError), session._together.doing("step 1", session.state):
        raise ZeroDivisionError
    with pytest.raises(RunError) as stopped:
        session.exchange([0])
    said.append(render(stopped.value.diagnostic()))
    with pytest.raises(RunError) as stopped:
        session.state_dict(ema=True)
    return [*said, render(stopped.value.diagnostic())]


def updates(session: parc.Session) -> list[str]:
    """Return the messages of an update that uses gradients twice, and of a scheduler over the session's optimizer."""
    result = session.gradients(batch(0))
    session.update(result)
    with pytest.raises(RunError) as twice:
        session.update(result)
    torch.optim.lr_scheduler.ConstantLR(session.optimizer)
    with pytest.raises(RunError) as scheduled:
        session.step(batch(0))
    return [render(stopped.value.diagnostic()) for stopped in (twice, scheduled)]


def unlike(folder: Path) -> list[str]:
    """Return the message of ranks that run other builds with other options."""
    build(folder, ONE)
    build(folder, ONE, FLAT.replace("seed      3", "seed 4"), "other")
    paths = {"build": 3, "other": 5}
    ranks = [rank_facts(open_build(path), torch.device("cpu"), {"--steps": steps}) for path, steps in paths.items()]
    error = difference([([rank], facts) for rank, facts in enumerate(ranks)])
    assert error is not None
    return [render(error.diagnostic())]


def drifts(folder: Path) -> list[str]:
    """Return the messages of ranks that hold different numbers, before a checkpoint and after one."""
    session = parc.load(build(folder, ONE, name="drifting"))
    made = read_build(build(folder, DATA, name="both"))
    roles = [made.role_at({"dp": rank}) for rank in range(2)]
    together = Lockstep(0, 2, session.device)
    replicas = Replicas(made, build_mesh(made), roles, together, session.state, session.optimizer)
    apart = ReplicaDifference(("exp_avg", "embed.weight"), (0, 1), allowed=2.5e-7)
    apart.compare(torch.tensor([0.5, 0.25, 0.0]), torch.tensor([0.5, 0.75, 1.0]))
    said = []
    for checkpoint in ("", "checkpoint"):
        replicas.stepped(7)
        if checkpoint:
            replicas.saved(Path(checkpoint), 6)
        with (
            patch.object(Replicas, "_differences", lambda *_: (1, [apart])),
            pytest.raises(RunError) as stopped,
        ):
            replicas.judge([[1] * 9, [2] * 9])
        said.append(render(stopped.value.diagnostic()))
    return ["\n\n".join(said)]


def unread(folder: Path) -> list[str]:
    """Return the message of a plan that reads the configuration of a folder, and not its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=256)
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    text = re.sub("model .*", 'model "parc.hf:folder" (path="gpt2")', FLAT).replace("tokens ", "input_ids ")
    (folder / "saved.parc").write_text(text.replace("output, ", "output.logits, "))
    return [command("check", "saved.parc")]


def compiles(folder: Path) -> list[str]:
    """Return the messages of runs that cannot compile: without a compiler, and with one that fails."""
    broken = folder / "g++"
    broken.write_text(
        '#!/bin/sh\ncase "$1" in -*) exec g++ "$@";; esac\necho "x.cpp:1: error: no Python.h" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    build(folder, ONE)
    said = []
    for compiler in ("no-such-compiler", str(broken)):
        with config.patch({"cpp.cxx": (None, compiler)}):
            said.append(command("run", "build", "--compile", "--device", "cpu", "--steps", "1"))
    return said


def checks_first(folder: Path) -> list[str]:
    """Return the message of a run whose first step starts from other parameters than were simulated."""
    (folder / "checked.parc").write_text(FLAT)
    main(["build", "checked.parc", "-o", "checked"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_check, "varied", lambda name, whole: whole)
        return [command("run", "checked", "--steps", "1", "--device", "cpu")]


def exports(folder: Path) -> list[str]:
    """Return the message of an export from a build that has its model's code in it."""
    made = build(folder, ONE, name="foreign")
    with parc.load(made) as session:
        session.save("foreign-checkpoint")
    shutil.copy(folder / "gpt.py", made)
    facts = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps({**facts, "folder": "."}))
    return [command("export", "foreign", "foreign-checkpoint", "-o", "words", "--merge")]


def meets_nobody(folder: Path) -> list[str]:
    """Return the message of a run whose hosts are to meet where another program listens."""
    build(folder, DATA)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"220 mail\r\n")

        threading.Thread(target=answer).start()
        words = "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--device", "cpu"
        return [command("run", "build", *words).replace(str(port), "25")]


SCENES: dict[str, Callable[[Path], list[str]]] = {
    "P0450 P0210 P0211 P0212": altered,
    "P0301 P0304 P0307 P0412 P0222 P0414 P0411 P0413 P0302 P0303 P0416 P0420 P0421 P0419 P0423 P0418 P0410 P0230"
    " P0415": runs,
    "P0308": exports,
    "P0417": unlike,
    "P0124": unread,
    "P0305 P0306": compiles,
    "P0430": checks_first,
    "P0440": meets_nobody,
    "P0422": drifts,
}  # fmt: skip
OTHER = "`session.step`"
"""The call in which another rank is."""
GOLDEN = Path(__file__).parent / "golden" / "built_messages.txt"


def command(*words: str) -> str:
    """Return the message of a command that fails or warns."""
    capture = command.capture  # type: ignore[attr-defined]
    capture.readouterr()
    main(list(words))
    return str(capture.readouterr().err).rstrip("\n")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(DEVICE, "cpu")  # of GPUs there may be too few
    command.capture = capsys  # type: ignore[attr-defined]
    shutil.copy(EXAMPLES / "gpt.py", tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "other.parc").write_text('include "tiny.parc"\n')
    (tmp_path / "weights").mkdir()
    weights = {"embed.weight": torch.zeros(4, 16), "wte.weight": torch.zeros(1)}
    save_file(weights, tmp_path / "weights" / "a.safetensors")
    return tmp_path


def said(place: Path, case: Case, two_layers: bool) -> str:
    """Return the message of a case's command."""
    plan = PLAN if two_layers else FLAT
    if case.model:
        plan = re.sub("model .*", f'model "./models.py:{case.of}" (way="{case.model}")', plan)
    assert case.change[0] in plan
    Path("tiny.parc").write_text(plan.replace(*case.change, 1) + case.lines)
    return command(*case.words)


def test_every_code_is_produced_and_looks_as_it_did(place: Path) -> None:
    """To accept a change of messages, delete the golden file and run this once."""
    found = {code: said(place, case, code in TWO_LAYERS).partition("\n\nmesh ")[0] for code, case in COMMANDS.items()}
    for codes, scene in SCENES.items():
        found.update(zip(codes.split(), scene(place), strict=True))
    assert found.keys() == {name for name, page in code_pages().items() if page.language != "parc"}
    for code, text in found.items():
        assert re.search(rf"(error|warning|note)\[{code}\]", text), f"{code}: {text}"
        assert "Traceback" not in text or "code's own traceback" in text
    text = "\n\n".join(f"# {code}\n{text}" for code, text in sorted(found.items())) + "\n"
    text = text.replace(str(place), "FOLDER").replace(torch.__version__.partition("+")[0], "TORCH")
    text = re.sub(r"by \d\.\de[+-]\d+$", "by ERROR", text, flags=re.MULTILINE)
    text = re.sub(r"by \S+ of its size", "by ERROR of its size", text)
    text = re.sub(r"rounding explains [^;]+; so does .*", "rounding explains LESS; so do OTHERS", text)
    text = re.sub(r"(?<=the )[\w. ]+ (differs|differed) by \S+ times", r"TENSOR \1 by SO MANY times", text)
    text = re.sub(r"process \d+ on \S+ since [-:\d ]+", "process NUMBER on HOST since TIME", text)
    text = re.sub(r"the loss is [\d.]+( in \w+)?, but [\d.]+ (on )?the", r"the loss is ONE\1, but ANOTHER \2the", text)
    text = re.sub(r"the loss is [\d.]+ then, and [\d.]+ oth", "the loss is ONE then, and ANOTHER oth", text)
    text = re.sub(r"\b(unsafe_)?view_\d+", "VIEW", text)  # values' names are torch's
    text = re.sub(r"^ +[~^]+\n", "", text, flags=re.MULTILINE)  # a traceback's marks are Python's own
    if not GOLDEN.exists():
        GOLDEN.write_text(text, encoding="utf-8")
        pytest.fail(f"{GOLDEN.name} was missing and is written anew: look at it and run again")
    assert GOLDEN.read_text(encoding="utf-8") == text
