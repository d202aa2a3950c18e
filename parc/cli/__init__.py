"""The command line: one file a command, words on stderr, data on stdout, and an exit code that says whose fault it is.

Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from parc.cli.terminal import show_error, show_fault
from parc.cli.usage import Parser

COMMANDS = {
    "example": "copy a plan and its model to begin with",
    "init": "write a plan for a model of your own",
    "check": "read a plan and say everything that is wrong with it; writes nothing",
    "build": "turn a plan into per-rank programs, checked",
    "run": "train a build, or a plan",
    "export": "write the weights of a checkpoint for transformers, or for the plain module",
    "import": "read a model's weights into a checkpoint of a build",
    "verify": "prove and test a build again, from its files and its plan",
    "certify": "prove a build equal to its unsharded model, by a checker that shares no code with parc",
    "plan": "choose the fastest of the plans that open `let`s leave, on a cluster",
    "show": "what a build holds: placements, programs, communication, memory",
    "cluster": "the clusters that `show --time` knows, and a file of this machine",
    "fmt": "rewrite plan files in their one canonical text",
    "explain": "what an error code means; or why a line, a message or a module of a build is there, and what it costs",
    "diff": "what moved between two builds or plans: placements, messages, memory",
}
"""The commands, each with its line of help; a module of each has ``<name>_options`` and ``<name>_command``."""

EXIT_CODES = """exit codes:
  0  done
  1  the plan, the model or files are at fault; messages say where
  2  wrong usage
  3  a fault of parc's own
  4  a run that failed on a rank
  5  a check refused the build
  143  stopped by SIGTERM, after saving where --save was given"""


def parser_of(words: Sequence[str]) -> tuple[Parser, Parser]:
    """Return the parser of the command line, and that of the command that these words name, which has its options;
    if they name none, the parser of the command line twice."""
    parser = Parser(
        prog="parc", description="Declarative plans that turn a PyTorch model into checked per-rank programs.",
        epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), "")
    parsers = {
        name: commands.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
        for name, text in COMMANDS.items()
    }
    if chosen in COMMANDS:
        getattr(importlib.import_module(f"parc.cli.{chosen}"), f"{chosen}_options")(parsers[chosen])
    return parser, parsers.get(chosen, parser)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Read the words of a command line.

    Raises:
        SystemExit: they are wrong, and what is wrong was printed; or they ask for help, which was printed.
    """
    parser, of_command = parser_of(words)
    if of_command is parser and words and not words[0].startswith("-"):
        parser.refuse_command(words[0], COMMANDS)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        of_command.refuse(unknown)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        args = parse_words(words)
    except SystemExit as stop:  # argparse has said what is wrong, or printed its help
        return int(stop.code or 0)
    if args.version:
        from parc import __version__

        print(f"parc {__version__}")
        return 0
    if not args.command:
        parser_of(words)[0].print_help(sys.stderr)
        return 2
    return _run_command(args)


def _open_streams() -> None:
    """Open the streams that this process was started without. Else the next file that it opens has the number of one,
    and what C prints is written there."""
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it is the lowest free number: this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _run_command(args: argparse.Namespace) -> int:
    command = importlib.import_module(f"parc.cli.{args.command}")
    try:
        return int(getattr(command, f"{args.command}_command")(args))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of stdout has seen enough
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    except Exception as error:
        code = show_error(error)
        return show_fault(error) if code is None else code
