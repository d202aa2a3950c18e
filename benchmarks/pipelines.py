"""``make bench-pipelines``: pipelines of two gloo ranks beside torch's own and beside each other, with their memory.

The model is a Llama of 8 layers and 32 M parameters, the schedules 1F1B and ZB-V with 8 microbatches, the cut the same
on both sides, the optimizer torch's fused AdamW; both run as they ship, then with the same settings, as in
``make bench``. Beside the ratio to ``torch.distributed.pipelining`` stands the one to the makespan that the schedule
has with the times of work that were measured: what the runtime adds to it. A second table has schedules with split
backwards beside 1F1B, with ``recompute`` and with ``--compile``, too: their steps in turn, and the most bytes of
tensors on a rank (``storages.py``), which are not seen inside of compiled code. Prints tables and writes
``bench-pipelines.json``. ``python -m benchmarks.pipelines TIMES`` measures so many steps.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parc
from benchmarks.command import Table, command
from benchmarks.peers import ALIKE, BATCH, HEADS, Step, compared, plain_model
from benchmarks.sides import BUILDS, adamw, built, text_of, without_onednn
from benchmarks.storages import Storages
from benchmarks.turns import (
    LAUNCHED,
    ONE_THREAD,
    ROOT,
    WARM_UP,
    Side,
    Timed,
    beside,
    in_turn,
    least_and_median,
    run,
)
from parc.checking.checks import case_of
from parc.compiler.build.directory import read_build
from parc.compiler.plan.plan import read_plan
from parc.compiler.program.actions import Action
from parc.compiler.schedules import V_SHAPES, timelines
from parc.compiler.schedules.timeline import peak_live, simulate
from parc.compiling.driver import compile_plan
from parc.runtime.compare.simulate import Simulation
from parc.runtime.data.random_batch import random_batch
from parc.runtime.session.session import Session

LAYERS, MICROBATCHES = 8, 8
PLAN = ROOT / "examples" / "llama-pipeline.parc"
PEERS = {"1f1b": "torch 1F1B", "zbv": "torch ZBV"}
"""The schedules that are measured beside torch's own, and the names of these."""
VARIANTS = {"": "", "recompute": "recompute model.layers.*\n", "--compile": ""}
"""The ways to run schedules beside each other, and the line that each adds to the plan."""
SCHEDULES = ("1f1b", "zb-h1", "zbv", "v-half", "async")


def build_of(schedule: str, lines: str = "") -> Path:
    """Build the plan with a schedule and further lines."""
    words = f"llama-pipeline-{schedule}{'-lines' * bool(lines)}"
    chunks = 2 if schedule in V_SHAPES else 1
    return built(BUILDS / words, text_of(PLAN) + lines, batch=8, schedule=schedule, chunks=chunks)


class Part(nn.Module):
    """Some layers of a Llama, cut by hand as people do for torch's pipelines: the stage of a number."""

    def __init__(self, model: Any, cuts: Sequence[int], stage: int) -> None:
        super().__init__()
        last = stage == len(cuts)
        self.embed = None if stage else model.model.embed_tokens
        self.layers = nn.ModuleList(model.model.layers[slice(*[0, *cuts, LAYERS][stage : stage + 2])])
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token numbers or hidden states to hidden states or logits."""
        if self.embed is not None:
            x = self.embed(x)
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=tables)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_step(cuts: Sequence[int]) -> Step:
    """Return a step of torch's pipeline with the model cut before some layers: 1F1B of two stages, ZB-V of four."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

    rank, model, count = dist.get_rank(), plain_model(LAYERS), len(cuts) + 1
    numbers = (rank,) if count == 2 else (rank, count - 1 - rank)
    parts = [Part(model, cuts, number) for number in numbers]
    optimizer = adamw(nn.ModuleList(parts))
    stages = [PipelineStage(part, number, count, torch.device("cpu"))
              for part, number in zip(parts, numbers, strict=True)]  # fmt: skip

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = (Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss) if count == 2
                else ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss))  # fmt: skip

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = [BATCH["input_ids"]] * (0 in numbers)
        targets: dict[str, Any] = {"target": BATCH["targets"], "losses": losses} if count - 1 in numbers else {}
        schedule.step(*inputs, **targets)
        optimizer.step()
        return float(sum(loss.detach() for loss in losses)) / MICROBATCHES

    return step


def cuts_of(build: Path) -> list[int]:
    """Return the layers with which the stages of a build begin, but the first."""
    forwards = [(int(key[:-1]), program.main) for role in read_build(build).roles.values()
                for key, program in role.programs.items() if program.action == "F"]  # fmt: skip
    layers = [{int(n) for v in main.parameters for n in re.findall(r"\.(\d+)\.", str(v.binding))}
              for _, main in sorted(forwards, key=lambda pair: pair[0])]  # fmt: skip
    ends = [0]
    for of_stage in layers:
        ends.append(1 + max(of_stage, default=ends[-1] - 1))
    return ends[1:-1]


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
    step, losses = torch_step(cuts_of(build)), list[float]()
    return {"seconds": timed(lambda: losses.append(step())), "loss": losses and losses[0]}


def side_of_variant(timed: Timed, build: Path, compile_: bool) -> list[float]:
    """Return the seconds of parc's steps."""
    session = parc.load(build, compile=compile_)
    return timed(lambda: session.step(BATCH, coming=BATCH))


def parc_peak(build: Path) -> int:
    """Return the most bytes of tensors on this rank in a step of parc."""
    storages = Storages()
    with storages, parc.load(build) as session:
        return storages.peak_of(lambda: session.step(BATCH, coming=BATCH))


def torch_peak(build: Path) -> int:
    """Return the same of torch."""
    storages, cuts = Storages(), cuts_of(build)
    with storages:
        return storages.peak_of(torch_step(cuts))


def peak(function: Callable[[Path], int], build: Path) -> float:
    """Return the most mebibytes of a step on the rank that has most."""
    return max(run(Side(function, (build,), 2))) / 2**20


def makespan(build: Path, ranks: list[dict[str, Any]]) -> float:
    """Return the seconds of a step if nothing were added to the work: the schedule played with the measured time of
    each action, then the sums and the update. Times are medians over all steps."""
    taken: dict[str, list[float]] = {}
    for rank in ranks:
        for name, _, step, begin, end in rank["spans"]:
            if step >= WARM_UP:
                taken.setdefault(name, []).append((end - begin) / 1e9)
    middle = {name: statistics.median(values) for name, values in taken.items()}

    def time(action: Action) -> float:
        return middle.get(str(action), 0.0)

    def slowest(kind: str, choose: Callable[[Iterable[float]], float] = max) -> float:
        """Return the time of work that both ranks do at once: that of the slower rank, or whatever ``choose`` takes."""
        return choose(sum(value for name, value in middle.items() if re.fullmatch(rf"{rank}{kind}\d*", name))
                      for rank in "01")  # fmt: skip

    timelines = {name: role.actions for name, role in read_build(build).roles.items()}
    played = simulate(timelines, work=time)
    update = max(rank["update"] for rank in ranks)
    # in REDUCE the one waits until the other comes
    return slowest("COUNT") + slowest("SCALE") + played.makespan + slowest("REDUCE", min) + update


def main(times: int = 10) -> None:
    """Print the tables, and write ``bench-pipelines.json``."""
    rows = [*beside_torch(times), *beside_each_other(times)]
    (ROOT / "bench-pipelines.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    idle()
    kept()


def beside_torch(times: int) -> Iterator[Mapping[str, Any]]:
    """Print the table of schedules beside torch's own, and yield its rows."""
    table = Table("case", *HEADS, "makespan (s)", "over it", "parc (MiB)", "peer (MiB)", names=28)
    for schedule, peer in PEERS.items():
        build = build_of(schedule)
        peaks = peak(parc_peak, build), peak(torch_peak, build)
        for case in (schedule, f"{schedule}, {ALIKE}"):
            sides = {
                "parc": Side(parc_side, (build, case), 2),
                "peer": Side(torch_side, (build,), 2, LAUNCHED if case.endswith(ALIKE) else ONE_THREAD),
            }
            ranks, others = in_turn(sides, times).values()
            theirs = next(other["loss"] for other in others if other["loss"])
            assert abs(ranks[0]["loss"] / theirs - 1) < 0.02, "the losses of untrained models differ"
            row, cells = compared(case, ranks[0]["seconds"], peer, others[0]["seconds"])
            ideal = makespan(build, ranks)
            table.row(case, *cells, f"{ideal:.3f}", f"{row['parc_median_s'] / ideal:.2f}", *map("{:.0f}".format, peaks))
            yield {**row, "makespan_s": ideal, "parc_mib": peaks[0], "peer_mib": peaks[1]}


def beside_each_other(times: int) -> Iterator[Mapping[str, Any]]:
    """Print the table of schedules beside each other, and yield its rows."""
    print()
    table = Table("case", "least (s)", "median (s)", "of 1f1b", "peak (MiB)", names=28)
    for variant, line in VARIANTS.items():
        builds = {schedule: build_of(schedule, line) for schedule in SCHEDULES}
        compile_ = variant == "--compile"
        sides = {name: Side(side_of_variant, (build, compile_), 2) for name, build in builds.items()}
        seconds = {name: ranks[0] for name, ranks in in_turn(sides, times).items()}
        for name, build in builds.items():
            most = None if compile_ else peak(parc_peak, build)
            case, least = f"{name} {variant}".strip(), least_and_median(seconds[name])
            table.row(case, *beside(seconds[name], seconds["1f1b"]), "-" if most is None else f"{most:.0f}")
            yield {"case": case, "parc_s": least[0], "parc_median_s": least[1], "parc_mib": most}


COSTS = ((1, 1, 1), (4, 5, 3), (4, 6, 2), (2, 2, 1))
"""The times of F, I and W of one stage, of which B is the sum of the last two."""
PUBLISHED: Mapping[str, tuple[int, tuple[int, ...], int]] = {
    "gpipe": (1, (9, 36, 36, 15), 16), "1f1b": (1, (9, 36, 36, 15), 4), "zb-h1": (1, (3, 18, 24, 9), 4),
    "zb-h2": (1, (3, 12, 18, 6), 7), "interleaved": (2, (9, 36, 36, 15), 11), "interleaved-zb": (2, (3, 18, 24, 9), 8),
    "zbv": (2, (3, 15, 24, 6), 8), "dualpipev": (2, (3, 18, 26, 9), 9), "v-half": (2, (5, 34, 72, 15), 6),
    "v-min": (2, (11, 141, 238, 53), 4), "async": (1, (0, 0, 0, 0), 7),
}  # fmt: skip
"""The stages of a rank, and what is published for 4 ranks and 16 microbatches: the idle time of the slowest rank at
each of the costs, and the most microbatches of one stage that a rank holds. Those of V shapes are simulated from the
orders of their authors."""


def idle(ranks: int = 4, microbatches: int = 16) -> None:
    """Print the idle slots and live microbatches of every schedule with equal stages, beside the published ones."""
    ratios = ", ".join(":".join(map(str, costs)) for costs in COSTS)
    print(f"\n{ranks} ranks, {microbatches} microbatches, idle at F:I:W = {ratios}, in slots of one stage")
    table = Table("schedule", "idle", "published", "live", "published", names=16, least=18)
    for name, (chunks, published, most) in PUBLISHED.items():
        roles = timelines(name, ranks * chunks, microbatches, chunks)
        waits = []
        for forward, inputs, weights in COSTS:
            times = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
            played = simulate(roles, work=partial(_time_in, times))
            waits.append(max(played.idle(role) for role in roles))
        live = max(map(peak_live, roles.values()))
        table.row(name, ", ".join(f"{wait:g}" for wait in waits), ", ".join(map(str, published)), live, most)


def _time_in(times: Mapping[str, int], action: Action) -> int:
    return times[action.kind]


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
