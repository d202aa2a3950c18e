"""``parc run``: train a build or a plan on as many processes as its mesh has ranks."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parc.cli.plan_arguments import add_defines, chosen_sizes, default_out, is_plan, plan_at, positive, positive_number
from parc.cli.terminal import say

if TYPE_CHECKING:
    import torch

    from parc.compiler.build.build import Build
    from parc.runtime.launch.hosts import Hosts
    from parc.runtime.launch.train import Options


NO_STEPS = "parc run: the plan has no `steps` line: say how many with --steps K"


def run_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a build, or a plan. This imports the plan's model file, once it is found to be the one that was built, "
        "and runs it; a loss or data given as callables are imported too."
    )
    parser.add_argument("target", metavar="DIR|PLAN", type=Path, help="a build, or a plan that is built first")
    add_defines(parser)
    training = parser.add_argument_group("training")
    training.add_argument(
        "--steps", metavar="K", type=positive, help="train until step K (default: the plan's `steps`)"
    )
    training.add_argument(
        "--sizes", metavar="S=N,...", type=chosen_sizes, default={},
        help="train at these sizes, of the ranges that the plan declares (default: the largest)",
    )  # fmt: skip
    training.add_argument("--save", metavar="DIR", type=Path, help="write a checkpoint at the end, and when stopped")
    training.add_argument(
        "--eval-every", metavar="K", type=positive, help="evaluate after every K steps (default: the plan's `eval`)"
    )
    training.add_argument("--save-every", metavar="K", type=positive, help="and after every K steps")
    training.add_argument(
        "--resume", metavar="DIR", type=Path, help="go on from a checkpoint, of any plan of the model, or predict by it"
    )
    predicting = parser.add_argument_group("predicting, in place of training")
    predicting.add_argument(
        "--predict", metavar="WORDS",
        help="write what the model returns in eval() for samples, named by the words of a `data` line:"
        " 'folder questions', 'tokens \"valid.npy\"'; the build has an `eval` line or is for inference",
    )  # fmt: skip
    predicting.add_argument("-o", "--out", metavar="DIR", type=Path, help="the folder of safetensors files to write")
    _observe_options(parser.add_argument_group("watching"))
    place = parser.add_argument_group("processes")
    place.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPUs, where there are any")
    place.add_argument(
        "--compile", action="store_true", help="compile the work between collectives with torch's Inductor"
    )
    place.add_argument(
        "--no-first-check", dest="first_check", action="store_false",
        help="do not first repeat a step of the small programs on which the build was tested",
    )  # fmt: skip
    place.add_argument("--full-step", action="store_true", help=argparse.SUPPRESS)  # `parc verify --run`
    place.add_argument("--nproc", metavar="N", type=positive, help="processes on this host (default: mesh / nodes)")
    place.add_argument(
        "--logs", metavar="DIR", type=Path,
        help="a file for each rank but the first, of what it prints (default: its lines that differ are shown)",
    )  # fmt: skip
    place.add_argument(
        "--timeout",
        metavar="S",
        type=positive,
        default=300,
        help="the most seconds to wait for another rank (default: 300)",
    )
    _host_options(parser.add_argument_group("several hosts"))


def _host_options(hosts: argparse._ArgumentGroup) -> None:
    hosts.add_argument("--nnodes", metavar="N", type=positive, default=1, help="hosts of the run; start parc on each")
    hosts.add_argument("--node-rank", metavar="R", type=int, help="this host's number, from 0 (default: by arrival)")
    hosts.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", default="", help="where the hosts meet: the first of them"
    )
    hosts.add_argument(
        "--secret-file", metavar="FILE", type=Path,
        help="what all hosts of this run know and others do not (default: the variable PARC_RUN_SECRET, or nothing)",
    )  # fmt: skip


def _observe_options(observe: argparse._ArgumentGroup) -> None:
    observe.add_argument("--metrics", metavar="FILE", type=Path, help="a JSON object a line: the run, then each step")
    observe.add_argument("--tensorboard", metavar="DIR", type=Path, help="the same figures as curves of TensorBoard")
    observe.add_argument(
        "--wandb", metavar="PROJECT", default="",
        help="the same figures as a run of Weights & Biases, kept in the folder wandb: nothing is sent",
    )  # fmt: skip
    observe.add_argument(
        "--trace", metavar="FILE", type=Path, help="when every action ran on every rank, for Perfetto (ui.perfetto.dev)"
    )
    observe.add_argument(
        "--profile", metavar="DIR", type=Path,
        help="what a few steps did, by torch's profiler: its ranges are lines of the programs; a file for each rank",
    )  # fmt: skip
    observe.add_argument(
        "--peak-flops", metavar="N", type=positive_number,
        help="operations a second that one device can do, as 989e12, for the MFU (default: known for GPUs in bf16)",
    )  # fmt: skip


def run_command(args: argparse.Namespace) -> int:
    """Launch the processes, or, in a process that parc or torchrun launched, be one of them."""
    from parc.runtime.launch.lifeline import LIFELINE
    from parc.runtime.launch.voices import speaking

    LIFELINE.watch()
    with speaking(), _stops_said():
        return _start(args)


@contextmanager
def _stops_said() -> Iterator[None]:
    """Enter the block before training, which handles signals itself. In it a signal that stops runs ends the process at
    once, with a message if the launcher prints none: a rank of parc's own launcher ends even while it waits in C++, as
    for a rank that died before they met."""
    from parc.runtime.launch.voices import VOICES, says_the_end, stop_signals

    before: dict[signal.Signals, Any] = {}

    def end(number: int, _: object) -> None:
        for other in stop_signals():  # a second one would end the process before it has said why
            signal.signal(other, signal.SIG_IGN)
        if says_the_end():
            say(f"stopped by {signal.Signals(number).name} before the first step; nothing was saved")
            sys.stderr.flush()
        os._exit(128 + number)

    try:
        if threading.current_thread() is threading.main_thread():
            here = signal.SIG_DFL if VOICES in os.environ else end
            before = {number: signal.signal(number, here) for number in stop_signals()}
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(args: argparse.Namespace) -> int:
    wrong = _wrong_usage(args)
    if wrong:
        say(f"parc run: {wrong}")
        return 2
    from parc.runtime.ranks.processes import launched

    if launched():
        return _rank(args)
    from parc.compiler.build.directory import misfit_error
    from parc.compiler.build.plan_facts import plan_faults
    from parc.report import plan_of
    from parc.runtime.state.opening import open_build

    target = args.target
    if is_plan(target):
        from parc.cli.build import build_plan
        from parc.grammar.codes import BAD_DATA
        from parc.runtime.data.sources import NO_DATA, NO_DATA_HELP
        from parc.runtime.ranks.faults import RunError
        from parc.runtime.session.evaluation import trains_nothing

        plan = plan_at(args, target)
        if args.predict is None:
            if not plan.trains:
                raise trains_nothing(target)
            if plan.data is None:
                raise RunError(BAD_DATA, NO_DATA, NO_DATA_HELP)
            if not (args.steps or plan.steps):
                say(NO_STEPS)
                return 2
        target = default_out(target)
        outcome = build_plan(args, args.target, target)
        if isinstance(outcome, int):
            return outcome
        say(f"built {target}")
    build = open_build(target)
    if faults := plan_faults(build.manifest, plan_of(build)):
        raise misfit_error(build.path, faults)
    build = _chosen_build(args, build)
    options = _options(args, build)
    if options is None:
        return 2
    nproc = _before_launch(args, build, options)
    if args.nnodes > 1:
        with _hosts(args, build, nproc) as hosts:
            with _target(args, build) if hosts.number == 0 else nullcontext():
                pass  # rank 0, which writes there, is of the first host
            return _launch(args, target, nproc, hosts)
    with _target(args, build):
        if nproc == 1:  # one rank needs no other process
            return _train(args, build, options, torch_device(args))
    return _launch(args, target, nproc)


def _hosts(args: argparse.Namespace, build: Build, nproc: int) -> Hosts:
    """Return the hosts of the run, which meet when they are entered.

    Raises:
        RunError: the file with the secret cannot be read.
    """
    from parc.grammar.bounded import real_path
    from parc.runtime.launch.endpoint import Endpoint
    from parc.runtime.launch.hosts import Hosts, read_secret
    from parc.runtime.launch.meeting import Join
    from parc.runtime.session.one_build import build_hash

    name, job = socket.gethostname(), next(filter(None, map(os.environ.get, _JOBS)), "")
    mine = Join(build_hash(build), real_path(build.path).name, args.nnodes, nproc, args.node_rank, name, job)
    endpoint = Endpoint.parse(args.rdzv_endpoint)
    return Hosts(mine, endpoint, read_secret(args.secret_file), float(args.timeout), say)


def _target(args: argparse.Namespace, build: Build) -> AbstractContextManager[None]:
    """Lock the folder of `--save` for this process. A launcher does so only to say what is wrong; then rank 0 does.

    Raises:
        RunError: another run saves there, or it cannot be written.
    """
    if args.save is None:
        return nullcontext()
    from parc.runtime.state.checkpoint import target_held
    from parc.runtime.state.opening import checkpoint_bytes

    return target_held(args.save, checkpoint_bytes(build))


def _wrong_usage(args: argparse.Namespace) -> str:
    if args.save_every and args.save is None:
        return "--save-every needs --save DIR"
    if args.nnodes > 1:
        if not args.rdzv_endpoint:
            return "--nnodes needs --rdzv-endpoint HOST:PORT"
        from parc.runtime.launch.endpoint import Endpoint

        try:
            Endpoint.parse(args.rdzv_endpoint)
        except ValueError as error:
            return f"--rdzv-endpoint: {error}"
        if args.node_rank is not None and not 0 <= args.node_rank < args.nnodes:
            return f"--node-rank is {args.node_rank}, and of {args.nnodes} hosts the last is {args.nnodes - 1}"
    if (args.predict is None) != (args.out is None):
        return "--predict WORDS needs -o DIR, and -o DIR needs --predict WORDS"
    if args.predict is not None and (wrong := next((name for name in _OF_TRAINING if getattr(args, name)), "")):
        return f"--predict trains nothing, so there is no --{wrong.replace('_', '-')}"
    if args.defines and not is_plan(args.target):
        return "-D is for plans; a build has its values already"
    return ""


_OF_TRAINING = (
    "steps", "save", "save_every", "eval_every", "metrics", "tensorboard", "wandb", "trace", "profile", "peak_flops",
)  # fmt: skip
"""The options of training, which `--predict` refuses."""


def _chosen_build(args: argparse.Namespace, build: Build) -> Build:
    """Return the build at the sizes of `--sizes`; with `--predict` its evaluation, on the samples of these words. Their
    files are relative to the current folder.

    Raises:
        PlanError: the words name no samples, or samples without an end.
        RunError: there are no such sizes, or the build has no programs that predict.
    """
    from parc.runtime.data.sizes import bound_build

    build = bound_build(build, args.sizes)
    if args.predict is None:
        return build
    from parc.compiler.plan.directives.data import read_words
    from parc.runtime.session.evaluation import evaluation_of, with_samples

    evaluation, here = evaluation_of(build), Path.cwd()
    samples = read_words(args.predict, "--predict").facts()
    samples["names"] = [name if name.startswith("{") else str(here / name) for name in samples["names"]]
    if ".py:" in (samples["callable"] or ""):
        samples["callable"] = str(here / samples["callable"])
    return with_samples(evaluation, samples)


def _options(args: argparse.Namespace, build: Build) -> Options | None:
    from parc.runtime.launch.train import Options
    from parc.runtime.observe.observer import Observe
    from parc.runtime.observe.writers import FigurePlaces
    from parc.runtime.session.evaluation import check_trains, evaluation_of

    if args.predict is not None or args.full_step:
        return Options(0, resume=args.resume, first_check=args.first_check)
    check_trains(build)
    steps = args.steps or build.manifest["steps"]
    if steps is None:
        say(NO_STEPS)
        return None
    places = FigurePlaces(args.metrics, args.tensorboard, args.wandb)
    places.check()
    observe = Observe(places, args.profile, args.peak_flops)
    line = build.manifest.get("evaluation", {})
    every = args.eval_every or line.get("every")
    if every is not None:
        evaluation_of(build)
    first_check = args.first_check and not _is_done(args.resume, steps)
    return Options(steps, observe, every, args.save, args.save_every, args.resume, args.trace, first_check)


def _is_done(resume: Path | None, steps: int) -> bool:
    """Return whether a checkpoint is at the last step of the run, or beyond it, so that nothing is left to train."""
    from parc.runtime.state.checkpoint import read_checkpoint

    return resume is not None and read_checkpoint(resume).step >= steps


def _before_launch(args: argparse.Namespace, build: Build, options: Options) -> int:
    """Check for mistakes that every rank would meet, so that they are reported once. Return the number of processes on
    this host.

    Raises:
        RunError: the number of processes, torch, the checkpoint, the weights or the data do not fit, or there is no
            such device or no compiler.
    """
    import torch

    from parc.runtime.data.sources import OWN_CODE, make_data
    from parc.runtime.launch.predict import check_predictions
    from parc.runtime.machine.compiled import check_compiler
    from parc.runtime.ranks.processes import check_device, default_device
    from parc.runtime.state.initial import weights_of
    from parc.runtime.state.opening import build_mesh, check_fits, open_checkpoint

    mesh = build_mesh(build)
    nproc = int(args.nproc or max(1, mesh.world // args.nnodes))
    check_fits(build, nproc * args.nnodes, args.nnodes)
    if options.resume is not None:
        open_checkpoint(build, options.resume)
    weights_of(build)
    device = torch_device(args) or torch.device(default_device().type)
    check_device(device, nproc)
    if args.compile:
        check_compiler(device)
    if args.predict is not None:
        check_predictions(args.out)
    separate = build.manifest.get("evaluation", {}).get("data") if options.eval_every else None
    reading = () if args.full_step else (build, build.evaluation if separate else None)  # its batch is random
    for reads in filter(None, reading):
        line = reads.manifest["data"]
        if line is None or line["form"] not in OWN_CODE:
            make_data(reads)
    return nproc


def torch_device(args: argparse.Namespace) -> torch.device | None:
    """Return the device that the person chose."""
    import torch

    return torch.device(args.device) if args.device else None


def _train(args: argparse.Namespace, build: Build, options: Options, device: torch.device | None) -> int:
    from parc.compiler.build.first_check import is_of_first_check
    from parc.runtime.compare.first_check import first_check
    from parc.runtime.compare.full_step import full_step
    from parc.runtime.launch.predict import predict
    from parc.runtime.launch.train import train
    from parc.runtime.ranks.processes import keep_memory
    from parc.runtime.session.session import Session

    keep_memory()
    first = int(os.environ.get("RANK", "0")) == 0
    if args.full_step:
        outcome = full_step(build, device, compile=args.compile)
        if first:
            say(f"{args.target}: {outcome.text()}")
        return 0
    if options.first_check and args.compile and first and any(map(is_of_first_check, build.texts)):
        say("compiling the programs of the first check, which can take minutes; `--no-first-check` goes without…")
    checked = first_check(build, device, compile=args.compile) if options.first_check else None
    session = Session(build, device, compile=args.compile, trace=options.trace is not None)
    if args.predict is None:
        return train(session, options, checked)
    if checked is not None and session.rank == 0:
        say(checked.text())
    return predict(session, args.out, args.resume)


_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""The environment variables in which schedulers name their jobs."""


def _launch(args: argparse.Namespace, target: Path, nproc: int, hosts: Hosts | None = None) -> int:
    from parc.runtime.launch.launch import Processes, launch
    from parc.runtime.ranks.faults import writing

    words = ["-m", "parc", "run", str(target), "--timeout", str(args.timeout)]
    for name in _PASSED_ON:
        value = getattr(args, name)
        if value not in (None, ""):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if args.sizes:
        words += ["--sizes", ",".join(f"{name}={size}" for name, size in args.sizes.items())]
    words += ["--compile"] * args.compile + ["--no-first-check"] * (not args.first_check)
    words += ["--full-step"] * args.full_step
    if args.logs is not None:
        with writing(args.logs):
            args.logs.mkdir(parents=True, exist_ok=True)
    processes = Processes(nproc, hosts, args.device, args.logs, float(args.timeout))
    outcome = launch(words, processes)
    if outcome.failure is not None:
        say(outcome.failure.text())
        if args.save is not None and not outcome.failure.expected:
            say(_saved(args.save))
    return outcome.exit_code


_PASSED_ON = (*_OF_TRAINING, "resume", "device", "predict", "out")
"""The options that are passed on to every rank."""


def _saved(folder: Path) -> str:
    """Return a sentence on the checkpoint that a failed run has left in the folder of its `--save`."""
    from parc.runtime.state.checkpoint import saved_step

    step = saved_step(folder)
    if step is None:
        return f"nothing was saved to `{folder}`"
    return f"`{folder}` has step {step}: `--resume {folder}` goes on from there"


def _rank(args: argparse.Namespace) -> int:
    """Run one rank. Its failure is left in a file for parc's launcher; torchrun would not print it, so under torchrun
    it is printed here."""
    from parc.runtime.launch.failures import answer, failure_of, leave_failure
    from parc.runtime.launch.lifeline import LIFELINE
    from parc.runtime.launch.voices import VOICES, says_the_end, stop_signals

    if VOICES in os.environ:
        answer()
    try:
        code = _train_rank(args)
    except Exception as error:
        failure = failure_of(int(os.environ["RANK"]), error)
        # torchrun stops this rank where another has ended: not before it has said why
        if VOICES not in os.environ and threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                signal.signal(number, signal.SIG_IGN)
        try:
            leave_failure(failure)
        except OSError:  # the disk is full, say: this may be why it failed
            say(failure.text())
        else:
            # a rank that only lost another says so, and leaves it to that one, or to the next, to say why
            if VOICES not in os.environ and (failure.follows or says_the_end() or not failure.expected):
                say(failure.text())
        code = failure.exit_code
    LIFELINE.remove_traces()
    # A normal exit of the interpreter destroys torch's groups under their own threads, which sometimes aborts it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _alike(args: argparse.Namespace, options: Options) -> dict[str, object]:
    """Return the options that all ranks must have alike. Of a place that each host may name otherwise it is whether
    there is one."""
    placed = {name: getattr(args, name) is not None for name in ("save", "resume", "trace", "out")}
    values = {name: getattr(args, name) for name in ("compile", "save_every", "predict", "first_check", "full_step")}
    alike = {"steps": options.steps, "eval_every": options.eval_every, **values, **placed}
    return {f"--{name.replace('_', '-')}": value for name, value in alike.items()}


def _train_rank(args: argparse.Namespace) -> int:
    from parc.runtime.ranks.lockstep import Lockstep
    from parc.runtime.ranks.processes import join_processes, leave
    from parc.runtime.session.one_build import hold_one_build
    from parc.runtime.state.opening import open_build

    device = join_processes(torch_device(args), float(args.timeout))
    together = Lockstep.joined(device)
    build = together.agreed("parc run", lambda: _chosen_build(args, open_build(args.target)))
    options = _options(args, build)
    if options is None:
        return 2
    hold_one_build(together, build, device, _alike(args, options))
    with ExitStack() as stack:
        hold = partial(stack.enter_context, _target(args, build))
        together.agreed("parc run", lambda: None if together.rank else hold())
        code = _train(args, build, options, device)
    leave()
    return code
