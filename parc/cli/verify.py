"""``parc verify``: the checks of a build once more, from its files and its plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from parc.cli.refusal import show_refusal
from parc.cli.terminal import print_json, say, show, stages


def verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", metavar="DIR", type=Path)
    parser.description = (
        "Prove and test a build again. The plan in the build is compiled anew, which imports the plan's model file "
        "(and that of its loss, where it is a callable): only once the model's file is found to be the one that was "
        "built. With --static nothing is imported; a build with custom operators, which needs its model, is refused."
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--static", action="store_true", help="shapes, types and communication from the files alone; imports nothing"
    )
    how.add_argument(
        "--run", action="store_true",
        help="one step at full sizes, in as many processes as the mesh has ranks: by the machine of a run, and again"
        " line by line with torch's own operators",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="test numbers there (default: cpu; with --run a GPU)")
    parser.add_argument("--compile", action="store_true", help="with --run: by torch's Inductor, as `parc run` does")
    parser.add_argument("--first-difference", action="store_true", help="where numbers differ, name the first line")
    parser.add_argument("--json", action="store_true", help="the outcome as JSON on stdout")


_USELESS = {
    "with `--run`": ("json", "first_difference"), "with `--static`": ("first_difference", "device", "compile"),
    "without `--run`": ("compile",),
}  # fmt: skip
"""The options that change nothing beside others, or without them."""


def verify_command(args: argparse.Namespace) -> int:
    """Print the checks that hold. Return 5 if one refuses, 1 if files were altered though every check holds."""
    beside = "with `--run`" if args.run else "with `--static`" if args.static else "without `--run`"
    if useless := next((name for name in _USELESS[beside] if getattr(args, name)), ""):
        say(f"parc verify: `--{useless.replace('_', '-')}` changes nothing {beside}")
        return 2
    if args.run:
        from parc.cli import parse_words
        from parc.cli.run import run_command

        words = ["--device", args.device] if args.device else []
        return run_command(parse_words(["run", str(args.build), "--full-step", *words, *["--compile"] * args.compile]))
    with stages() as progress:
        progress("loading torch")
        import torch

        from parc.checking.verification import verify_build, verify_static
        from parc.report_words import largest_error

        if args.static:
            verified = verify_static(args.build)
        else:
            device = torch.device(args.device or "cpu")
            verified = verify_build(args.build, progress, locate=args.first_difference, device=device)
    if args.json:
        faults = [{"check": fault.check, "where": fault.where, "message": fault.message} for fault in verified.faults]
        outcome = {
            "checks": verified.checks,
            "numbers": verified.numbers,
            "altered": verified.altered,
            "faults": faults,
        }
        print_json({**outcome, "first_difference": verified.difference or None})
    if verified.faults:
        if verified.difference:
            say(f"first difference: {verified.difference}\n")
        return show_refusal(verified.faults, edited=args.build, altered=verified.altered)
    if verified.altered:
        from parc.compiler.build.directory import again
        from parc.grammar.codes import BAD_BUILD
        from parc.grammar.diagnostics import Diagnostic
        from parc.grammar.nearest import listed

        message = f"{listed(verified.altered)} not as built, though every check holds"
        show([Diagnostic(BAD_BUILD, message, help=again(args.build))])
        return 1
    if moved := verified.build.moved():
        say(f"note: {moved}")
    held = ", ".join(f"{name} {how}" for name, how in verified.checks.items())
    if args.static:
        say(f"{args.build}: {held}; the model was not imported, numbers not tested")
        return 0
    worst = largest_error(verified.numbers)
    where = " on the GPU" * (args.device == "cuda")
    say(f"{args.build}: {held}{where} (largest relative error {worst:.1e}, on {verified.numbers['on']})")
    return 0
