"""``parc import``: a model's weights, from transformers or a plain module, as a checkpoint of a build."""

from __future__ import annotations

import argparse
from pathlib import Path

from parc.cli.terminal import say
from parc.grammar.syntax import size_text


def import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", metavar="BUILD", type=Path)
    parser.add_argument(
        "weights",
        metavar="WEIGHTS",
        type=Path,
        help="a folder of safetensors files, as `save_pretrained` writes it, or a file",
    )
    parser.add_argument("-o", dest="out", metavar="CHECKPOINT", type=Path, required=True, help="a new folder")
    parser.add_argument("--rounded", action="store_true", help="allow weights to be rounded to the model's types")


def import_command(args: argparse.Namespace) -> int:
    """Write the checkpoint, and say what was written."""
    from parc.runtime.state.exchange import import_weights
    from parc.runtime.state.opening import open_build

    build = open_build(args.build)
    tensors, size = import_weights(build, args.weights, args.out, args.rounded)
    say(f"written {args.out}: {tensors} tensors, {size_text(size)}")
    use = f"--save {args.out}" if build.trains else "--predict WORDS -o DIR"
    say(f"next:  parc run {args.build} --resume {args.out} {use}")
    return 0
