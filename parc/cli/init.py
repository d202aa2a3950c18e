"""``parc init``: a plan for a person's own model, proposed from its code and its graph."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from parc.cli.plan_arguments import chosen_sizes, define, positive
from parc.cli.terminal import say, show, stages
from parc.compiler.build.output_files import write_whole
from parc.compiler.plan.include import reads_as_plan
from parc.compiler.sizes.size_range import BATCH
from parc.grammar.bounded import real_path
from parc.grammar.codes import UNCLEAR_MODEL
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import did_you_mean
from parc.grammar.source import Span

if TYPE_CHECKING:
    from parc.proposing.guesses import Guess
    from parc.proposing.lines import ModelLine
    from parc.proposing.proposal import Proposal

ArgumentValue: TypeAlias = int | float | str | bool | None
"""The value of a model's argument."""
HUGGING_FACE = "hf:"
_FORMS = '"file.py:function", "package:Class", "hf:Qwen2ForCausalLM", or a folder with config.json'
_INPUT = re.compile(r"\s*(\w+)\s+(\w+)\s+\[([^\]]*)\]\s*")
_TYPES = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")


def init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_FORMS)
    parser.add_argument("values", metavar="NAME=VALUE", nargs="*", type=_read_argument, help="arguments of the model")
    parser.add_argument(
        "-o", dest="out", metavar="PLAN", type=Path, default=Path("plan.parc"), help="default: plan.parc"
    )
    parser.add_argument("--force", action="store_true", help="write over a plan that is there")
    parser.add_argument(
        "--input", dest="inputs", metavar="INPUT", type=_read_input, action="append", default=[],
        help='an input of forward that is not found, as "x float32 [B, 3, 32, 32]"; may be given many times',
    )  # fmt: skip
    parser.add_argument(
        "--sizes", metavar="NAME=SIZE,...", type=chosen_sizes, default={}, help="the batch and the length of sequences"
    )
    parser.add_argument("--loss", default="", help='the loss, as "cross_entropy(output, labels)"')
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=positive,
        help="choose the layout for so many ranks, with --cluster, as `parc plan`",
    )
    parser.add_argument("--cluster", metavar="C", help="with --ranks: a cluster by name, or a file's path")
    parser.add_argument("--dp", type=positive, default=2, help="ranks that split the batch; default: 2")
    parser.add_argument("--tp", type=positive, default=2, help="ranks that split layers; default: 2")


def init_command(args: argparse.Namespace) -> int:
    """Write a plan, and say what it does and what comes next."""
    if args.out.exists() and not args.force:
        say(f"{args.out} is there, and stays as it is; name another file with -o, or write over it with --force")
        return 1
    if args.out.exists() and not reads_as_plan(args.out):
        say(f"{args.out} is there, is no plan, and stays as it is; name another file with -o")
        return 1
    sized = {BATCH, "S", *args.sizes}
    unsized = [dim for _, guess in args.inputs for dim in guess.dims if isinstance(dim, str) and dim not in sized]
    if unsized:
        say(f"parc init: `{unsized[0]}` of `--input` has no size; say it, as `--sizes {unsized[0]}=16`")
        return 2
    if (args.ranks is None) != (args.cluster is None):
        say(
            "parc init: `--ranks` and `--cluster` go together: the fastest layout is that of so many ranks on a cluster"
        )
        return 2
    sizes = args.sizes if args.ranks is None else {BATCH: max(8, args.ranks)} | args.sizes
    line = model_line(args.model, dict(args.values), real_path(args.out).parent)
    with stages() as progress:
        progress("loading torch")
        from parc.advice import warnings_of
        from parc.proposing.proposal import Wish, propose

        inputs = dict(args.inputs)
        wish = Wish(line, {"dp": args.dp, "tp": args.tp}, inputs, sizes, args.loss, _head(args))
        try:
            proposal = propose(wish, real_path(args.out).parent, args.out.name, progress)
        except PlanError as error:
            raise PlanError(_of_draft(one, args.out.name) for one in error.diagnostics) from None
    show(warnings_of(proposal.compiled))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text, ranks = (
        (proposal.text, proposal.compiled.mesh.world) if args.ranks is None else (_fastest(args, proposal), args.ranks)
    )
    write_whole(args.out, text)
    for text in _report(proposal, args.out, ranks):
        say(text)
    return 0


def _of_draft(diagnostic: Diagnostic, name: str) -> Diagnostic:
    """Return a message about a plan that was not written: it names the draft in place of the file."""

    def drafted(span: Span) -> Span:
        source = span.source
        if source.included is not None:
            return replace(span, source=replace(source, included=drafted(source.included)))
        return replace(span, source=replace(source, name=f"the draft of {name}")) if source.name == name else span

    def label(one: Label) -> Label:
        return replace(one, span=drafted(one.span))

    primary = label(diagnostic.primary) if diagnostic.primary is not None else None
    return replace(diagnostic, primary=primary, related=tuple(map(label, diagnostic.related)))


def _head(args: argparse.Namespace) -> list[str]:
    return [
        f"{args.out.name} - {args.model}, as `parc init` proposes it. Whatever is changed here, a build trains as",
        "the plain model does: that is proved and tested before anything is written.",
    ]


def model_line(word: str, values: Mapping[str, ArgumentValue], home: Path) -> ModelLine:
    """Return the model's line in a plan that lies in ``home``.

    Raises:
        PlanError: the word names no model.
    """
    from parc.proposing.lines import ModelLine

    folder = Path(word)
    if not _fits_in_quotes(word):
        message = f'`{word}` has a " or the end of a line in it, which no plan can hold'
        raise PlanError([Diagnostic(UNCLEAR_MODEL, message, help="name the model by another path")])
    if word.startswith(HUGGING_FACE):
        return ModelLine("parc.hf:model", {"name": word.removeprefix(HUGGING_FACE), **values})
    if (folder / "config.json").is_file():
        path = _relative(folder, home)
        weights = path if any(folder.glob("*.safetensors")) and not values else ""
        return ModelLine("parc.hf:folder", {"path": path, **values}, weights=weights)
    place, colon, name = word.rpartition(":")
    if not colon or not place or not name:
        raise PlanError([_unclear(word, folder)])
    if not place.endswith(".py"):
        return ModelLine(word, values)
    if not Path(place).is_file():
        meant = did_you_mean(Path(place).name, (file.name for file in Path(place).parent.glob("*.py")))
        raise PlanError([Diagnostic(UNCLEAR_MODEL, f"there is no file `{place}`", help=meant)])
    path = _relative(Path(place), home)
    return ModelLine(f"{path if path.startswith('.') else f'./{path}'}:{name}", values)


def _unclear(word: str, path: Path) -> Diagnostic:
    """Return the error of a word that names no model."""
    message, help_ = f"`{word}` names no model", f"write {_FORMS}"
    if path.suffix == ".py" and path.is_file():
        message = f"`{word}` is a file: name what makes the model in it"
        help_ = f'as "{word}:Model", a class or a function that returns an nn.Module'
    elif path.is_dir():
        message = f"there is no config.json in `{word}`"
    elif word.replace(".", "").isidentifier() and find_spec(word.partition(".")[0]) is not None:
        help_ = f'a package: name the class or function in it, as "{word}:Model"'
    return Diagnostic(UNCLEAR_MODEL, message, help=help_)


def _relative(path: Path, home: Path) -> str:
    return Path(os.path.relpath(real_path(path), home)).as_posix()


def _read_argument(text: str) -> tuple[str, ArgumentValue]:
    """Read ``name=value`` of one argument of the model.

    Raises:
        argparse.ArgumentTypeError: it is not that, or a plan has no such value.
    """
    name, word = define(text)
    value = literal(word)
    if isinstance(value, float) and not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"`{name}` is {value}, and a plan has finite numbers only")
    if isinstance(value, str) and not _fits_in_quotes(value):
        raise argparse.ArgumentTypeError(
            f'`{name}` has a text with " or the end of a line in it, which no plan can hold'
        )
    return name, value


def _fits_in_quotes(text: str) -> bool:
    return '"' not in text and len(f"{text}.".splitlines()) == 1


def literal(text: str) -> ArgumentValue:
    """Return the value of an argument's text, as the language reads it."""
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _read_input(text: str) -> tuple[str, Guess]:
    match = _INPUT.fullmatch(text)
    if match is None or match[2] not in _TYPES:
        raise argparse.ArgumentTypeError(f'`{text}` is no input such as "x float32 [B, 3, 32, 32]"')
    from parc.proposing.guesses import Guess

    dims = [dim.strip() for dim in match[3].split(",") if dim.strip()]
    return match[1], Guess(match[2], tuple(int(dim) if dim.isdecimal() else dim for dim in dims))


def _fastest(args: argparse.Namespace, proposal: Proposal) -> str:
    """Search the fastest layout of a proposed plan, print the best, and return the text of the winner."""
    from parc.cli.plan import search_bar, search_words, winner_text
    from parc.compiler.clock.cluster import find_cluster
    from parc.compiler.plan.open_plan import read_open
    from parc.grammar.source import Source
    from parc.searching.drafts import with_open_sizes
    from parc.searching.pricing import ExactPrices
    from parc.searching.search import search

    cluster, folder = find_cluster(args.cluster), real_path(args.out).parent
    draft = Source(args.out.name, proposal.text, path=args.out)
    opened = read_open(with_open_sizes(draft, folder, args.ranks, cluster.ranks), {})
    with search_bar() as report:
        outcome = search(opened, ExactPrices(folder, cluster), args.ranks, report=report)
    print("\n".join(search_words(outcome)))
    return winner_text(outcome, cluster.name)


def _report(proposal: Proposal, out: Path, ranks: int) -> Iterator[str]:
    """Yield what was written, and the next commands: those of the README."""
    build = Path("build") / out.stem
    of_transformers = proposal.compiled.plan.model.callable.partition(":")[0] == "parc.hf"
    weights = "weights" if of_transformers else f"{out.stem}.safetensors"
    commands = {
        f"parc build {out} -o {build}": "tests its numbers beside the plain model's",
        f"parc run {build} --steps 5 --save checkpoint": f"{ranks} process{'es' * (ranks != 1)} on this machine",
        f"parc export checkpoint -o {weights}": "for `from_pretrained`" if of_transformers else "for the plain module",
    }
    yield f"written {out}: it compiles, on {ranks} rank{'s' * (ranks != 1)}"
    width = max(map(len, commands))
    for at, (command, why) in enumerate(commands.items()):
        yield f"{'' if at else 'next:':7}{command:{width}}  # {why}"
