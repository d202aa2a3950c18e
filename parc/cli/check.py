"""``parc check``: all errors of a plan; nothing is written."""

from __future__ import annotations

import argparse
from pathlib import Path

from parc.cli.plan_arguments import add_defines, plan_or_example
from parc.cli.refusal import show_refusal
from parc.cli.terminal import say, show, stages
from parc.grammar.bounded import real_path
from parc.grammar.diagnostics import PlanError


def check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path)
    parser.add_argument(
        "--static",
        action="store_true",
        help="what needs no import of torch or the model: statements, sizes, mesh, inputs",
    )
    add_defines(parser)


def check_command(args: argparse.Namespace) -> int:
    """Check a plan. Torch and the model are loaded only if its statements have no fault."""
    plan, folder = plan_or_example(args, args.plan), real_path(args.plan).parent
    if args.static:
        from parc.compiler.resolve.placements import input_faults
        from parc.compiling.callable_faults import callable_faults

        show(plan.warnings)
        if errors := [*callable_faults(plan, folder), *input_faults(plan)]:
            raise PlanError(errors)
        say(f"{args.plan}: no fault found in statements, sizes, mesh and inputs; names were not held against the model")
        return 0
    with stages() as progress:
        progress("loading torch")
        from parc.advice import warnings_of
        from parc.checking.checks import prove
        from parc.checking.limits import hold_promises
        from parc.compiling.compiled import check_weights
        from parc.compiling.driver import compile_plan
        from parc.compiling.plan_data import check_data, check_sample, sample_said
        from parc.sample_advice import sample_warnings

        check_data(plan, folder)
        with sample_said(plan, folder):
            compiled = compile_plan(plan, folder, progress=progress)
        progress("shapes, types, communication")
        faults = prove(compiled)
    show(warnings_of(compiled))
    check_weights(plan, compiled.folder, compiled.recorded, compiled.captured)
    with stages() as progress:
        hold_promises(compiled, progress)
    show(tuple(sample_warnings(compiled, check_sample(plan, compiled.folder, compiled.build))))
    if faults:
        return show_refusal(faults)
    say(f"{args.plan}: no fault found (text, names, shapes, types, communication); `parc build` also tests the numbers")
    return 0
