"""``parc plan``: the choices of an open plan, priced on a cluster; the fastest, and why it wins."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parc.cli.plan_arguments import add_defines, positive
from parc.cli.terminal import print_json, say, stages, text_table
from parc.grammar.bounded import real_path
from parc.grammar.source import Source
from parc.grammar.syntax import size_text

if TYPE_CHECKING:
    from parc.searching.pricing import ExactPrices, PricedPlan
    from parc.searching.search import Report, SearchResult


_TIE = 0.0005
"""The share of a step by which two plans must differ so that one is called faster."""


def plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path, help="a plan; names such as `let tp = 1 | 2 | 4` are chosen")
    parser.add_argument(
        "--ranks", metavar="N", type=positive, help="the number of ranks; `let dp = ?` is what they leave"
    )
    parser.add_argument("--cluster", metavar="C", help="a cluster by name, or a file's path; default: the plan's")
    parser.add_argument(
        "--batch", metavar="N", type=positive, help="the samples of a step, where `B` depends on choices"
    )
    parser.add_argument("-o", dest="out", metavar="PLAN", type=Path, help="write the winner, without open names")
    parser.add_argument("--force", action="store_true", help="with -o: write over a plan that is there")
    parser.add_argument(
        "--open",
        action="store_true",
        help="open the sizes of the mesh, `zero`, microbatches and `recompute` of a closed plan",
    )
    parser.add_argument("--top", metavar="K", type=positive, default=5, help="the plans to print; default: 5")
    parser.add_argument("--keep-order", action="store_true", help="the axes of the mesh stay in their order")
    parser.add_argument(
        "--placements", metavar="AXIS",
        help="also find which weights of the winner to split over an axis, by integer programming",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the same as JSON on stdout")
    add_defines(parser)


def plan_command(args: argparse.Namespace) -> int:
    """Search, print the best plans, and write the winner."""
    from parc.compiler.plan.include import read_source, reads_as_plan
    from parc.compiler.plan.open_plan import read_open

    if args.out is not None and args.out.exists() and not (args.force and reads_as_plan(args.out)):
        reason = "is no plan, and stays" if args.force else "is there, and stays"
        way = "name another file with -o" + ("" if args.force else ", or write over it with --force")
        say(f"{args.out} {reason} as it is; {way}")
        return 1
    if args.out is not None and not args.out.parent.is_dir():
        say(f"{args.out} cannot be written: there is no folder {args.out.parent}")
        return 1
    if args.out is not None and real_path(args.out).parent != real_path(args.plan).parent:
        say(f"{args.out} is in another folder than {args.plan}, from which the files that it names are counted; "
            f"write `-o {args.plan.parent / args.out.name}`")  # fmt: skip
        return 1
    if (".py" in args.plan.name or ":" in args.plan.name) and not reads_as_plan(args.plan):
        say(f"parc plan: {args.plan} names a model: `parc init {args.plan} --ranks N --cluster C` writes its plan")
        return 2
    folder = real_path(args.plan).parent
    source = read_source(args.plan)
    if args.open:
        source = _opened(args, source, folder)
    opened = read_open(source, dict(args.defines), args.batch)
    with stages() as progress:
        progress("loading torch")
        from parc.searching.pricing import ExactPrices
        from parc.searching.search import search
        from parc.step_time import NO_CLUSTER, cluster_of

    from parc.compiler.clock.cluster import ClusterError

    cluster = cluster_of(opened.example()[1], folder, args.cluster)
    if cluster is None:
        raise ClusterError("what is fastest depends on the cluster", NO_CLUSTER)
    if args.ranks is None and (left := [let.name for let in opened.lets if not let.values]):
        say(f"parc plan: `{left[0]} = ?` is what the ranks leave: add `--ranks N`")
        return 2
    with search_bar() as report:
        outcome = search(opened, prices := ExactPrices(folder, cluster), args.ranks, args.top, args.keep_order, report)
    if args.json:
        print_json(search_json(outcome))
    else:
        print("\n".join([*search_words(outcome), *_batch_advice(source, args)]))
    if args.placements:
        lines = "\n".join(_placement_words(args.placements, outcome, prices))
        print(lines, file=sys.stderr if args.json else sys.stdout)  # what is JSON stays JSON
    if args.out is not None:
        from parc.compiler.build.output_files import write_whole

        write_whole(args.out, winner_text(outcome, cluster.name))
        say(f"wrote {args.out}; `parc build {args.out}` builds it")
    return 0


def _batch_advice(source: Source, args: argparse.Namespace) -> Iterator[str]:
    """Yield what is usual for the learning rate where `--batch` is another batch than that of the plan's text. A search
    never changes what is trained.

    Sources: arXiv:1706.02677 (the linear rule), arXiv:2205.10287 (the square-root rule of Adam).
    """
    from parc.compiler.plan.open_plan import read_open
    from parc.compiler.sizes.size_range import BATCH

    sizes = read_open(source, dict(args.defines)).example()[1].sizes
    if args.batch is None or BATCH not in sizes or args.batch == sizes[BATCH].high:
        return
    times = args.batch / sizes[BATCH].high
    yield (
        f"the batch is {times:.3g} times that of the plan's text ({sizes[BATCH].high:,}); nothing else is changed. "
        f"Usual for the learning rate: {times:.3g} times as much with SGD, {times**0.5:.3g} times with Adam"
    )


def _opened(args: argparse.Namespace, source: Source, folder: Path) -> Source:
    """Return the plan with the names that size its mesh open."""
    with stages() as progress:
        progress("loading torch")
        from parc.compiler.plan.plan import read_plan
        from parc.searching.drafts import with_open_sizes
        from parc.step_time import cluster_of

    cluster = cluster_of(read_plan(source), folder, args.cluster)
    return with_open_sizes(source, folder, args.ranks or 1 << 20, cluster.ranks if cluster is not None else 8)


@contextmanager
def search_bar() -> Iterator[Report]:
    """Return a function that shows how far a search is: a bar on a terminal, silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("pricing")

        def report(done: int, of: int, best: float | None) -> None:
            words = "pricing" if best is None else f"pricing, best {best:.3g} s"
            progress.update(task, completed=done, total=of, description=words)

        yield report


def search_words(outcome: SearchResult) -> Iterator[str]:
    """Yield the lines of a search's outcome: the best plans, why the first wins, and what was cut."""
    from parc.searching.search import choice_text, why
    from parc.step_time import seconds_text

    rows = []
    for at, one in enumerate(outcome.best, 1):
        parts, exposed = one.figures.parts, [f"{axis} {size_text(size)}" for axis, size in one.exposed.items()]
        mesh = " ".join(f"{axis}={one.plan.mesh.size(axis)}" for axis in one.order if one.plan.mesh.size(axis) > 1)
        chosen = {name: text for name, text in one.choice.items() if name not in one.plan.mesh}
        rows.append(
            (at, seconds_text(one.figures.seconds), f"{one.figures.mfu:.1%}", size_text(one.figures.memory),
             f"{parts.get('bubble', 0.0) / one.figures.seconds:.0%}", ", ".join(exposed) or "none", mesh or "one rank",
             choice_text(chosen))
        )  # fmt: skip
    head = ("", "step", "MFU", "memory", "bubble", "exposed", "mesh, outermost first", "")
    yield text_table(rows, head, right=(0, 1, 2, 3, 4))
    yield ""
    if not outcome.plan.lets:
        yield "nothing is open in this plan: it is priced as it stands"
    elif len(outcome.best) > 1:
        first, second = outcome.best[:2]
        less = [
            f"{seconds_text(-seconds)} less {part}"
            for part, seconds in why(first.figures, second.figures)
            if seconds < 0
        ]
        more = [
            f"{seconds_text(seconds)} more {part}"
            for part, seconds in why(first.figures, second.figures)
            if seconds > 0
        ]
        yield f"no. 1 is {_faster(first, second)} no. 2: {', '.join([*less, *more]) or 'their parts are equal'}"
        if (order := [*first.order]) != [*first.plan.mesh.names]:
            yield f"the order of its mesh is changed: {', '.join(order)}, outermost first"
    counts = [f"plans priced: {outcome.priced:,}"]
    counts += [f"choices that make the plan of another: {outcome.alike:,}"] if outcome.alike else []
    counts += [f"{count:,} cut ({kind})" for kind, count in outcome.cut.most_common()]
    yield "; ".join(counts)
    if outcome.structures:
        estimating, compiling = (seconds_text(outcome.seconds[part]) for part in ("estimates", "compiling"))
        yield f"estimated in {estimating} from {outcome.structures} structures; the best were compiled in {compiling}"
    yield from (
        f"  {kind}: {reason.words}, with {choice_text(choice)}" for kind, (choice, reason) in outcome.nearest.items()
    )
    if outcome.stopped:
        yield "the search was stopped: these are the best until then"


def _placement_words(axis: str, outcome: SearchResult, prices: ExactPrices) -> Iterator[str]:
    """Yield the lines that place the winner's weights over an axis, beside what `parc init` proposes.

    Raises:
        PlanError: the plan is at fault without its own lines, or the solver is not installed.
    """
    from parc.proposing.cheapest import cheapest_placements

    plan = outcome.best[0].plan
    if axis not in plan.mesh:
        yield f"\nthe mesh has no axis `{axis}`: it has {', '.join(plan.mesh.names)}"
        return
    with stages() as progress:
        placed = cheapest_placements(plan, prices.folder, prices.compile(plan), axis, prices.cluster, progress)
    whose = "found by the program" if placed.found else "those of `parc init`: none is cheaper"
    yield f"\nplacements over {axis}, {whose}:"
    yield from placed.lines or ("none: the axis has one rank",)
    before, after = (size_text(price.wire_bytes) for price in (placed.before, placed.after))
    yield f"{after} are sent over {axis} by a rank in a step, {before} with those of `parc init`"
    yield f"the solver took {placed.seconds_of_solver:.1f} s"


def search_json(outcome: SearchResult) -> dict[str, Any]:
    """Return a search's outcome as JSON has it."""
    return {
        "best": [
            {
                "choice": dict(one.choice), "mesh": [[axis, one.plan.mesh.size(axis)] for axis in one.order],
                "step_s": one.figures.seconds, "mfu": one.figures.mfu, "memory": one.figures.memory,
                "parts": dict(one.figures.parts), "exposed_bytes": dict(one.exposed),
                "estimated_s": one.estimate.seconds if one.estimate is not None else one.figures.seconds,
            }
            for one in outcome.best
        ],
        "seconds": dict(outcome.seconds), "structures": outcome.structures,
        "priced": outcome.priced, "alike": outcome.alike, "cut": dict(outcome.cut), "stopped": outcome.stopped,
        "nearest": {
            kind: {"choice": dict(choice), "reason": reason.words, "excess_bytes": reason.excess}
            for kind, (choice, reason) in outcome.nearest.items()
        },
    }  # fmt: skip


def _faster(one: PricedPlan, other: PricedPlan) -> str:
    """Return in words how much faster a plan is than another one: ``3.1% faster than``."""
    ahead = other.figures.seconds / one.figures.seconds - 1
    return f"{ahead:.1%} faster than" if ahead >= _TIE else "as fast as"


def winner_text(outcome: SearchResult, cluster: str) -> str:
    """Return the plan of the winner, with comments that say by what it was chosen and how far it is ahead. It gets the
    line of the cluster that it was chosen for, if it has none and parc knows the cluster."""
    from parc.compiler.clock.cluster import shipped
    from parc.searching.search import choice_text, closed_text
    from parc.step_time import seconds_text

    best, others = outcome.best[0], outcome.best[1:2]
    words = f"{seconds_text(best.figures.seconds)} a step on {cluster}, MFU {best.figures.mfu:.1%}"
    comments = [f"chosen by `parc plan` of {outcome.priced:,} plans: {words}"]
    comments += [f"{_faster(best, other)} {choice_text(other.choice)}" for other in others]
    text = closed_text(outcome.plan, best, comments)
    return text if best.plan.cluster is not None or cluster not in shipped() else f'{text}cluster   "{cluster}"\n'
