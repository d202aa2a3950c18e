"""``make bench-pipelines``: a pipeline of two gloo ranks and torch's own, in turn in one run, with the memory that
stages keep.

The model is a Llama of 8 layers and 32 M parameters in two stages, the schedule 1F1B with 8 microbatches, the cut the
same on both sides, the optimizer torch's fused AdamW; both run as they ship, then with the same settings, as in
``make bench``. Beside the ratio to ``torch.distributed.pipelining`` stands the
one to the makespan that the schedule has with the stage times that were measured: what the runtime adds to it. Prints
tables and writes ``bench-pipelines.json``.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.command import Table, command
from benchmarks.peers import ALIKE, BATCH, HEADS, Step, compared, plain_model
from benchmarks.sides import BUILDS, adamw, built, without_onednn
from benchmarks.turns import LAUNCHED, ONE_THREAD, ROOT, WARM_UP, Side, Timed, in_turn
from parc.checking.checks import case_of
from parc.compiler.build.directory import read_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import Action
from parc.compiler.schedules import timelines
from parc.compiler.schedules.timeline import peak_live, simulate
from parc.compiling.driver import compile_plan
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
from parc.runtime.session.session import Session

LAYERS, MICROBATCHES = 8, 8
PLAN = ROOT / "examples" / "llama-pipeline.parc"


class Part(nn.Module):
    """Some layers of a Llama, cut by hand as people do for torch's pipelines: one stage."""

    def __init__(self, model: Any, first: int, end: int) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if first == 0 else None
        self.layers = nn.ModuleList(model.model.layers[first:end])
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if end == LAYERS else None
        self.head = model.lm_head if end == LAYERS else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token numbers or hidden states to hidden states or logits."""
        if self.embed is not None:
            x = self.embed(x)
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=tables)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_step(cut: int) -> Step:
    """Return a step of torch's 1F1B, with the model cut before layer ``cut``."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    model = plain_model(LAYERS)
    part = Part(model, *((0, cut), (cut, LAYERS))[rank])
    optimizer = adamw(part)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(BATCH["input_ids"])
        else:
            schedule.step(target=BATCH["targets"], losses=losses)
        optimizer.step()
        return float(sum(loss.detach() for loss in losses)) / MICROBATCHES

    return step


def cut_of(build: Path) -> int:
    """Return the layer with which the second stage of a build begins."""
    first = read_build(build).roles["pp0"].programs["0F"].main
    return 1 + max(int(n) for v in first.parameters for n in re.findall(r"\.(\d+)\.", str(v.binding)))


def parc_side(timed: Timed, build: Path, case: str) -> dict[str, Any]:
    """Return the seconds of parc's steps, those of its updates, the spans of this rank's actions, and the first
    loss."""
    with without_onednn(case.endswith(ALIKE)):
        session = Session(read_build(build), torch.device("cpu"), trace=True)
    assert session.recorder is not None
    losses: list[float] = []
    updates: list[float] = []

    def step() -> None:
        result = session.gradients(BATCH)
        start = time.perf_counter()
        losses.append(session.update(result).loss)
        updates.append(time.perf_counter() - start)

    seconds = timed(step)
    update = statistics.median(updates[WARM_UP:])
    return {"seconds": seconds, "update": update, "spans": list(session.recorder.spans), "loss": losses[0]}


def torch_side(timed: Timed, build: Path) -> dict[str, Any]:
    """Return the seconds of torch's steps, and the first loss."""
    step, losses = torch_step(cut_of(build)), list[float]()
    return {"seconds": timed(lambda: losses.append(step())), "loss": losses[0]}


def makespan(build: Path, ranks: list[dict[str, Any]]) -> float:
    """Return the seconds of a step if nothing were added to the work: the schedule played with the measured time of
    each action, then the sums and the update. Times are medians over all steps."""
    taken: dict[str, list[float]] = {}
    for rank in ranks:
        seen: set[tuple[str, int]] = set()
        for name, _, step, begin, end in rank["spans"]:
            if step >= WARM_UP:  # of a backward the second part follows its send
                key = name.replace("B", "SEND_B") if (name, step) in seen else name
                if key != name or "SEND" not in name:
                    taken.setdefault(key, []).append((end - begin) / 1e9)
            seen.add((name, step))
    middle = {name: statistics.median(values) for name, values in taken.items()}

    def time(action: Action) -> float:
        return middle.get(str(action), 0.0)

    def slowest(kind: str, choose: Callable[[Iterable[float]], float] = max) -> float:
        """Return the time of work that both ranks do at once: that of the slower rank, or whatever ``choose`` takes."""
        return choose(sum(value for name, value in middle.items() if re.fullmatch(rf"{rank}{kind}\d*", name))
                      for rank in "01")  # fmt: skip

    timelines = {name: role.actions for name, role in read_build(build).roles.items()}
    played = simulate(timelines, time, time, after=time)
    update = max(rank["update"] for rank in ranks)
    # in REDUCE the one waits until the other comes
    return slowest("COUNT") + slowest("SCALE") + played.makespan + slowest("REDUCE", min) + update


def main(times: int = 10) -> None:
    """Print the tables, and write ``bench-pipelines.json``."""
    build, rows = built(BUILDS / "llama-pipeline", PLAN, batch=8), []
    table = Table("case", *HEADS, "makespan (s)", "over it", names=28)
    for case in ("1f1b", f"1f1b, {ALIKE}"):
        sides = {
            "parc": Side(parc_side, (build, case), 2),
            "peer": Side(torch_side, (build,), 2, LAUNCHED if case.endswith(ALIKE) else ONE_THREAD),
        }
        ranks, others = in_turn(sides, times).values()
        assert abs(ranks[0]["loss"] / others[1]["loss"] - 1) < 0.02, "the losses of untrained models differ"
        row, cells = compared(case, ranks[0]["seconds"], "torch 1F1B", others[0]["seconds"])
        row["makespan_s"] = ideal = makespan(build, ranks)
        table.row(case, *cells, f"{ideal:.3f}", f"{row['parc_median_s'] / ideal:.2f}")
        rows.append(row)
    (ROOT / "bench-pipelines.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    idle()
    kept()


def idle(ranks: int = 4, microbatches: int = 8, forward: float = 1, backward: float = 2) -> None:
    """Print the idle slots and live microbatches of every schedule with equal stages, beside the published ones."""
    print(f"\n{ranks} ranks, {microbatches} microbatches, a rank's forward {forward:g} slot, its backward {backward:g}")
    table = Table("schedule", "idle", "published", "live", "published", names=16)
    least = (ranks - 1) * (forward + backward)
    for name, chunks, most in (
        ("gpipe", 1, microbatches), ("1f1b", 1, ranks), ("interleaved", 2, ranks * (1 + (ranks - 1) / (2 * ranks))),
        ("interleaved", 4, ranks * (1 + (ranks - 1) / (4 * ranks))),
    ):  # fmt: skip
        roles = timelines(name, ranks * chunks, microbatches, chunks)
        played = simulate(roles, forward / chunks, backward / chunks)
        waits = max(played.idle(role) for role in roles)
        live = max(peak_live(actions) for actions in roles.values()) / chunks
        words = f"{name} x {chunks}" if chunks > 1 else name
        table.row(words, *(f"{x:.3f}" for x in (waits, least / chunks, live, min(most, microbatches))))


def kept(microbatches: int = 16) -> None:
    """Print the most bytes that stages keep for backward under GPipe and 1F1B, measured in the executor."""
    peaks: dict[str, dict[int, int]] = {}
    for schedule in ("gpipe", "1f1b"):
        defines = {"schedule": schedule, "pp": "4", "microbatches": str(microbatches), "layers": "4"}
        small = {"width": 64, "ffn": 128, "vocab": 256, "length": 128}
        compiled = compile_plan(read_plan(PLAN, defines), PLAN.parent, overrides=small)
        case = case_of(compiled)
        simulation = Simulation(case, account=True)
        simulation.step(random_batch(case.reference, microbatches, torch.Generator().manual_seed(0)), 0)
        peaks[schedule] = {
            stage: peak for stepper in simulation.steppers for stage, peak in stepper.peak_saved_bytes.items()
        }
    print(f"\nkept for backward, bytes a rank, {microbatches} microbatches")
    table = Table("stage", "gpipe", "1f1b", "ratio", "promised")
    for stage, most in peaks["gpipe"].items():
        promised = min(microbatches, 4 - stage) / microbatches
        ratio = peaks["1f1b"][stage] / most
        table.row(str(stage), f"{most:,}", f"{peaks['1f1b'][stage]:,}", f"{ratio:.3f}", f"{promised:.3f}")


if __name__ == "__main__":
    command(main)
