"""Faults that other systems had where parallelisms meet: each replayed as a plan, in one step whose ranks have unequal
counts, beside the plain module; or planted in a good build. docs/faults.md lists them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parc.checking.checks import case_of, static_faults
from parc.compiler.build.build import Build
from parc.compiler.padding.tensors import shrink
from parc.compiling.compiled import files_of, manifest_of
from parc.runtime.compare.simulate import Simulation
from tests import composed_models as models
from tests.checked_plans import compiled
from tests.planted_builds import ROOT

Batch = Mapping[str, Tensor]
TOKENS, LENGTH, SAMPLES = 13, 8, 8


@dataclass(frozen=True)
class Replay:
    """A fault as a plan: its model, the plan's lines on loss and layout, and the loss in plain PyTorch."""

    model: Callable[[], nn.Module]
    arguments: str
    loss: str
    lines: str
    plain: Callable[[Any, Batch], Tensor]
    inputs: str = "tokens, targets"
    rounding: float = 1e-10
    """The relative error that rounding explains: the module may compute in float32 somewhere."""

    @property
    def text(self) -> str:
        """The plan."""
        shapes = {"picture": "float32 [B, 6]", "mask": "float32 [B, S]"}
        inputs = "".join(f"input {name} {shapes.get(name, 'int64 [B, S]')}\n" for name in self.inputs.split(", "))
        return (
            f'model "./composed_models.py:{self.arguments}\n{inputs}sizes B={SAMPLES}, S={LENGTH}\nloss {self.loss}\n'
            f"optimizer adamw lr 1e-2 clip 1.0\nseed 2\n{self.lines}"
        )


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def batch() -> dict[str, Tensor]:
    """Return a whole batch in which every pair of a sample and half a sequence has another number of targets. The last
    samples have no target in the second half of their sequences, and none at all of the second head's."""
    draw = torch.Generator().manual_seed(5)
    tokens, targets, later = torch.randint(TOKENS, (3, SAMPLES, LENGTH), generator=draw)
    for sample in range(SAMPLES):
        targets[sample, : sample // 2] = -100
        later[sample, sample:] = -100
    targets[-4:, LENGTH // 2 :], later[-4:] = -100, -100
    mask = (targets != -100).float()
    picture = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    return {"tokens": tokens, "targets": targets, "later": later, "mask": mask.double(), "picture": picture}


SPLIT = "shard {} [B/dp, _]\n"
DATA = SPLIT.format("tokens, targets")
TENSOR = """\
column blocks.*.qkv over tp rows (3 h/tp d)
shard blocks.*.sinks [_/tp]
row blocks.*.out over tp
column blocks.*.up over tp
row blocks.*.down over tp
"""
CONTEXT = "mesh dp=2, cp=2\nshard {} [B/dp, _]\ncontext ** dim S over cp using {}\n"
REPLAYS = {
    "label smoothing over a split vocabulary": Replay(
        models.Tokenwise, 'Tokenwise"', '"./composed_models.py:smoothed"(output, targets)',
        f"mesh dp=2, tp=2\n{DATA}vocab embed, head over tp pad\nschedule microbatches 2\n",
        lambda output, batch: models.smoothed(output, batch["targets"]),
    ),
    "labels beside a split vocabulary": Replay(
        models.Tokenwise, 'Tokenwise"', "cross_entropy(output, targets)",
        f"mesh dp=2, tp=2\n{DATA}vocab embed, head over tp pad\n",
        lambda output, batch: entropy(output, batch["targets"]),
    ),
    "labels beside gathered logits": Replay(
        models.Tokenwise, 'Tokenwise"', "cross_entropy(output, targets)",
        f"mesh dp=2, tp=2\n{DATA}column mid over tp\nvocab head over tp pad\nshard out(head) [B/dp, _, _]\n",
        lambda output, batch: entropy(output, batch["targets"]),
    ),
    "a second head's unequal targets": Replay(
        models.Attending, 'Attending"',
        "cross_entropy(output.logits, targets) + 0.3 cross_entropy(output.ahead, later)",
        CONTEXT.format("tokens, targets, later", "zigzag") + "schedule microbatches 2\n",
        lambda output, batch: entropy(output["logits"], batch["targets"])
        + 0.3 * entropy(output["ahead"], batch["later"]),
        "tokens, targets, later",
    ),
    "recomputed gathers": Replay(
        models.Decoder, 'Decoder"', "cross_entropy(output.logits, targets)",
        f"mesh dp=2, tp=2\n{DATA}{TENSOR}sequence blocks.* over tp\nrecompute blocks.*\nzero 3 over dp\n",
        lambda output, batch: entropy(output["logits"], batch["targets"]),
    ),
    "sinks of split heads in the norm": Replay(
        models.Decoder, 'Decoder"', "cross_entropy(output.logits, targets)", f"mesh dp=2, tp=2\n{DATA}{TENSOR}",
        lambda output, batch: entropy(output["logits"], batch["targets"]),
    ),
    "replicated norms under sequence parallelism": Replay(
        models.Decoder, 'Decoder"', "cross_entropy(output.logits, targets)",
        f"mesh dp=2, tp=2\n{DATA}{TENSOR}sequence blocks.* over tp\nzero 1 over dp\n",
        lambda output, batch: entropy(output["logits"], batch["targets"]),
    ),
    "experts over two axes in the norm": Replay(
        models.Mixture, 'Mixture"', "cross_entropy(output, targets)",
        "mesh ep=2, tp=2\nshard tokens, targets [B/ep, _]\nexperts model.model.layers.*.mlp.experts over ep dropless\n"
        "shard model.model.layers.*.mlp.experts.gate_up_proj [_/ep, (2 _/tp), _]\n"
        "shard model.model.layers.*.mlp.experts.down_proj [_/ep, _, _/tp]\n",
        lambda output, batch: entropy(output, batch["targets"]), rounding=1e-5,
    ),
    "tied weights of two stages in the norm": Replay(
        lambda: models.Decoder(tied=True), 'Decoder" (tied=true)', "cross_entropy(output.logits, targets)",
        f"mesh pp=2, dp=2\n{DATA}stage before blocks.1 over pp\nschedule 1f1b microbatches 2\nzero 1 over dp\n",
        lambda output, batch: entropy(output["logits"], batch["targets"]),
    ),
    "masked losses under context parallelism": Replay(
        models.Attending, 'Attending"', '"./composed_models.py:masked"(output.logits, targets, mask)',
        CONTEXT.format("tokens, targets, mask", "ring") + "schedule microbatches 2\n",
        lambda output, batch: models.masked(output["logits"], batch["targets"], batch["mask"]),
        "tokens, targets, mask",
    ),
    "a balance of experts without padding": Replay(
        models.Routed, 'Routed"', "cross_entropy(output.logits, targets) + 0.1 output.aux_loss",
        "mesh dp=2, cp=2\nshard tokens, targets, mask [B/dp, S/cp]\n",
        lambda output, batch: entropy(output["logits"], batch["targets"]) + 0.1 * output["aux_loss"],
        "tokens, targets, mask",
    ),
    "an encoder over other ranks than the decoder": Replay(
        models.Captions, 'Captions"', "cross_entropy(output, targets)",
        "mesh dp=2, tp=2, ep=2\nshard tokens, targets [B/dp, _]\nshard picture [B/dp, _]\ncolumn encoder.0 over tp\n"
        "row encoder.2 over tp\ncolumn decoder.0 over ep\nrow decoder.2 over ep\n",
        lambda output, batch: entropy(output, batch["targets"]),
        "tokens, targets, picture",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLAYS)
def test_a_step_whose_ranks_have_unequal_counts_is_that_of_the_plain_module(name: str) -> None:
    replay = REPLAYS[name]
    compilation = compiled(replay.text, ROOT / "tests")
    assert static_faults(compilation.build) == []
    case, whole = case_of(compilation), {key: batch()[key] for key in replay.inputs.split(", ")}
    module = replay.model().double()
    module.load_state_dict({key: value.double() for key, value in case.parameters.items()}, strict=False)
    given = {key: value for key, value in whole.items() if key in ("tokens", "picture")}
    given |= {"mask": whole["mask"]} if replay.model is models.Routed else {}
    loss = replay.plain(module(**given), whole)
    loss.backward()
    gradients = {key: value.grad for key, value in module.named_parameters() if value.grad is not None}
    norm = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
    simulation, rows = Simulation(case), SAMPLES // case.microbatches
    parts = [{key: value[at : at + rows] for key, value in whole.items()} for at in range(0, SAMPLES, rows)]
    losses, simulated = simulation.step(parts, 0)
    close = replay.rounding
    assert [float(value) for value in losses] == pytest.approx([float(loss.detach())] * len(losses), rel=close)
    norms = [float(value) for value in simulation.norms if value is not None]
    assert norms == pytest.approx([norm] * len(losses), rel=close)
    assert simulated.keys() == gradients.keys()
    largest = max(float(value.abs().max()) for value in gradients.values())
    for key, gradient in gradients.items():
        found = shrink(simulated[key], case.pads.get(key, ()))
        torch.testing.assert_close(found, gradient, rtol=close, atol=close * largest, msg=key)
    assert not any(simulation.spread.values())


# ---- the same faults, planted where parc makes the piece itself

Edit = Callable[[str], str]


def instead(old: str, new: str, after: str = "") -> Edit:
    """Return the change of the first ``old`` text behind a place."""

    def edit(text: str) -> str:
        begin = text.index(old, text.index(after))
        return text[:begin] + new + text[begin + len(old) :]

    return edit


def counted(parameter: str, with_those_of: str) -> Edit:
    """Return the change that adds the square of a parameter's gradient to those of another one, in the norm."""

    def edit(text: str) -> str:
        mine, theirs = (re.search(rf"(\w+) = parc.square_sum.*\| {re.escape(name)} ", text)
                        for name in (parameter, with_those_of))  # fmt: skip
        assert mine is not None and theirs is not None
        text = re.sub(rf"(?<=\[){mine[1]}, |, {mine[1]}(?=[,\]])", "", text)
        text = re.sub(rf"(?<=[\[ ]){theirs[1]}(?=[,\]])", f"{theirs[1]}, {mine[1]}", text)
        return re.sub(r"(aten.stack.default\(\[(.*)\]\)  # f32)\[\d+\]",
                      lambda line: f"{line[1]}[{len(line[2].split(', '))}]", text)  # fmt: skip

    return edit


PLANTED: dict[str, tuple[str, str, Edit]] = {
    "the exponentials of a split vocabulary summed twice": (
        "labels beside a split vocabulary", "F",
        instead("convert = parc.all_reduce(loss_parts, 'tp')  # f32[2, 64/dp] | - - plan:10\n",
                "twice = parc.all_reduce(loss_parts, 'tp')  # f32[2, 64/dp] | - - plan:10\n"
                "    convert = parc.all_reduce(twice, 'tp')  # f32[2, 64/dp] | - - plan:10\n"),
    ),
    "a gather that backward does again over another axis": (
        "recomputed gathers", "B",
        instead("parc.all_gather(native_layer_norm, 'tp', 1, 1)", "parc.all_gather(native_layer_norm, 'dp', 1, 1)"),
    ),
    "a split sink that the norm counts on one rank": (
        "sinks of split heads in the norm", "REDUCE", counted("blocks.0.sinks", "blocks.0.norm.weight"),
    ),
    "a replicated weight that the norm counts on every rank": (
        "sinks of split heads in the norm", "REDUCE", counted("blocks.0.norm.weight", "blocks.0.sinks"),
    ),
    "experts that the norm counts as replicated": (
        "experts over two axes in the norm", "REDUCE",
        counted("model.model.layers.0.mlp.experts.down_proj", "model.lm_head.weight"),
    ),
    "a mask counted by one part of the sequence": (
        "masked losses under context parallelism", "SCALE",
        instead("parc.all_reduce(count, 'dp,cp')", "parc.all_reduce(count, 'dp')"),
    ),
    "norms whose gradients are not summed over tp": (
        "replicated norms under sequence parallelism", "B",
        instead("(blocks_0_grad_norm_weight_summed, 'tp'", "(blocks_0_grad_norm_weight_summed, 'dp'"),
    ),
    "an encoder's sum over the decoder's ranks": (
        "an encoder over other ranks than the decoder", "F",
        instead("parc.all_reduce(mm, 'tp')", "parc.all_reduce(mm, 'ep')"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_the_fault_planted_in_a_good_build_is_refused_by_its_texts_alone(name: str) -> None:
    replay, action, edit = PLANTED[name]
    compilation = compiled(REPLAYS[replay].text, ROOT / "tests")
    files, file = files_of(compilation), f"programs/stage0.{action}.py"
    changed = edit(files[file])
    assert changed != files[file]
    faults = static_faults(Build.of(compilation.folder, {**files, file: changed}, manifest_of(compilation), {}))
    assert faults and {fault.check for fault in faults} <= {"types", "shapes", "communication"}, faults


def test_the_page_of_faults_names_every_replay_and_every_planted_fault() -> None:
    lines = (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][2:]
    plans, planted = ({name for row in rows for name in row[at].split("; ") if name} for at in (3, 4))
    assert len(rows) == 12 and plans == {*REPLAYS} and planted == {*PLANTED}
