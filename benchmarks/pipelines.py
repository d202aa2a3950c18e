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
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.peers import ALIKE, Optimizers, Step, plain_model, without_onednn
from benchmarks.turns import LAUNCHED, ONE_THREAD, ROOT, WARM_UP, in_turn, steps

LAYERS, BATCH, LENGTH, VOCAB, MICROBATCHES = 8, 8, 128, 8192, 8


def batch() -> dict[str, torch.Tensor]:
    """Return the whole batch, the same on every rank."""
    words = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words[0], "targets": words[1]}


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

    rank, data = dist.get_rank(), batch()
    model = plain_model(LAYERS)
    part = Part(model, *((0, cut), (cut, LAYERS))[rank])
    optimizer = Optimizers(part)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(data["input_ids"])
        else:
            schedule.step(target=data["targets"], losses=losses)
        optimizer.step()
        return float(sum(loss.detach() for loss in losses)) / MICROBATCHES

    return step


def cut_of(build: Path) -> int:
    """Return the layer with which the second stage of a build begins."""
    from parc.compiler.build.directory import read_build

    first = read_build(build).roles["pp0"].programs["0F"].main
    return 1 + max(int(n) for v in first.parameters for n in re.findall(r"\.(\d+)\.", str(v.binding)))


def worker(case: str, build: Path, times: int, out: Path, side: str, port: str) -> None:
    """Run one rank of parc or of torch, and record the seconds of steps, the losses, and the spans of parc's ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses: list[float] = []
    updates: list[float] = []
    spans: list[Any] = []
    if side == "parc":
        from parc.compiler.build.directory import read_build
        from parc.runtime.session.session import Session

        with without_onednn(case.endswith(ALIKE)):
            session = Session(read_build(build), torch.device("cpu"), trace=True)
        assert session.recorder is not None
        spans, data = session.recorder.spans, batch()  # type: ignore[assignment]

        def step() -> None:
            result = session.gradients(data)
            start = time.perf_counter()
            losses.append(session.update(result).loss)
            updates.append(time.perf_counter() - start)
    else:
        theirs = torch_step(cut_of(build))

        def step() -> None:
            losses.append(theirs())

    taken = steps(step, side, port, times)
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, {"spans": list(spans), "update": updates[-times:], "loss": losses[0]})
    if dist.get_rank() == 0:
        (out / f"{side}.json").write_text(json.dumps([taken, ranks]), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # peers leave threads behind that abort an interpreter on its way out


def makespan(build: Path, ranks: list[dict[str, Any]]) -> float:
    """Return the seconds of a step if nothing were added to the work: the schedule played with the measured time of
    each action, then the sums and the update. Times are medians over all steps."""
    from parc.compiler.build.directory import read_build
    from parc.compiler.program.actions import Action
    from parc.compiler.schedules.timeline import simulate

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
    update = max(statistics.median(rank["update"]) for rank in ranks)
    # in REDUCE the one waits until the other comes
    return slowest("COUNT") + slowest("SCALE") + played.makespan + slowest("REDUCE", min) + update


def main(times: int) -> None:
    """Print both tables, and write ``bench-pipelines.json``."""
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    build, rows = folder / "llama-pipeline", []
    plan = ROOT / "examples" / "llama-pipeline.parc"
    command = [sys.executable, "-m", "parc", "build", str(plan), "-o", str(build), "-D", f"batch={BATCH}"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    print(f"{'case':<32}{'parc (s)':>20}{'torch 1F1B (s)':>22}{'ratio of minima':>17}{'of medians':>12}"
          f"{'makespan (s)':>14}{'over it':>9}")  # fmt: skip
    for case in ("1f1b", f"1f1b, {ALIKE}"):
        script = ["-m", "benchmarks.pipelines", "--worker", case, str(build), str(times), str(folder)]
        peers = LAUNCHED if case.endswith(ALIKE) else ONE_THREAD
        in_turn({"parc": (script, LAUNCHED), "peer": (script, peers)}, 2, times)
        (ours, ranks), (theirs, others) = (
            json.loads((folder / f"{side}.json").read_text(encoding="utf-8")) for side in ("parc", "peer")
        )
        assert abs(ranks[0]["loss"] / others[1]["loss"] - 1) < 0.02, "the losses of untrained models differ"
        best, middle = (min(ours), min(theirs)), (statistics.median(ours), statistics.median(theirs))
        ideal = makespan(build, ranks)
        columns = [f"{low:.3f} (median {mid:.3f})" for low, mid in zip(best, middle, strict=True)]
        print(f"{case:<32}{columns[0]:>22}{columns[1]:>22}{best[0] / best[1]:>13.2f}{middle[0] / middle[1]:>12.2f}"
              f"{ideal:>14.3f}{middle[0] / ideal:>9.2f}")  # fmt: skip
        rows.append({"case": case, "parc_s": best[0], "peer": "torch 1F1B", "peer_s": best[1],
                      "ratio": best[0] / best[1], "parc_median_s": middle[0], "peer_median_s": middle[1],
                      "makespan_s": ideal})  # fmt: skip
    (ROOT / "bench-pipelines.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    idle()
    kept()


def idle(ranks: int = 4, microbatches: int = 8, forward: float = 1, backward: float = 2) -> None:
    """Print the idle slots and live microbatches of every schedule with equal stages, beside the published ones."""
    from parc.compiler.schedules import timelines
    from parc.compiler.schedules.timeline import peak_live, simulate

    print(f"\n{ranks} ranks, {microbatches} microbatches, a rank's forward {forward:g} slot, its backward {backward:g}")
    print(f"{'schedule':<16}{'idle':>8}{'published':>11}{'live':>8}{'published':>11}")
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
        print(f"{words:<16}{waits:>8.3f}{least / chunks:>11.3f}{live:>8.3f}{min(most, microbatches):>11.3f}")


def kept(microbatches: int = 16) -> None:
    """Print the most bytes that stages keep for backward under GPipe and 1F1B, measured in the executor."""
    from parc.checking.checks import case_of
    from parc.compiler.plan.plan import read_plan
    from parc.compiling.driver import compile_plan
    from parc.runtime.compare.simulate import Simulation
    from parc.runtime.data.random_batch import random_batch

    peaks: dict[str, dict[int, int]] = {}
    for schedule in ("gpipe", "1f1b"):
        defines = {"schedule": schedule, "pp": "4", "microbatches": str(microbatches), "layers": "4"}
        plan = read_plan(ROOT / "examples" / "llama-pipeline.parc", defines)
        small = {"width": 64, "ffn": 128, "vocab": 256, "length": 128}
        compiled = compile_plan(plan, ROOT / "examples", overrides=small)
        case = case_of(compiled)
        simulation = Simulation(case, account=True)
        simulation.step(random_batch(case.reference, microbatches, torch.Generator().manual_seed(0)), 0)
        peaks[schedule] = {
            stage: peak for stepper in simulation.steppers for stage, peak in stepper.peak_saved_bytes.items()
        }
    print(f"\nkept for backward, bytes a rank, {microbatches} microbatches")
    print(f"{'stage':<8}{'gpipe':>14}{'1f1b':>14}{'ratio':>8}{'promised':>10}")
    for stage, most in peaks["gpipe"].items():
        promised = min(microbatches, 4 - stage) / microbatches
        ratio = peaks["1f1b"][stage] / most
        print(f"{stage:<8}{most:>14,}{peaks['1f1b'][stage]:>14,}{ratio:>8.3f}{promised:>10.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6], sys.argv[7])
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
