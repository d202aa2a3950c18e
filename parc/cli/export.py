"""``parc export``: the weights of a checkpoint, for transformers or for the plain module."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from parc.cli.terminal import say
from parc.grammar.syntax import size_text

_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", metavar="BUILD", type=Path)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a folder that `parc run --save` wrote")
    parser.add_argument(
        "-o", dest="out", metavar="OUT", type=Path, required=True,
        help="a folder as `from_pretrained` reads it; one file if it ends in `.safetensors`",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=_TYPES, help="round floating-point weights; default: as they are stored")
    parser.add_argument(
        "--shard-size", metavar="SIZE", type=_size, default=5 * 10**9, help="bytes of a file at most; default: 5GB"
    )
    parser.add_argument("--ema", action="store_true", help="the averages of the plan's `ema` line, not the weights")


def export_command(given: argparse.Namespace) -> int:
    """Write the weights, and say what was written."""
    import torch

    from parc.runtime.export import export_weights
    from parc.runtime.opening import open_build

    dtype = getattr(torch, _TYPES[given.dtype]) if given.dtype is not None else None
    done = export_weights(open_build(given.build), given.checkpoint, given.out, dtype, given.shard_size, given.ema)
    names = ", ".join(file.name for file in done.files[:3]) + (", …" if len(done.files) > 3 else "")
    say(f"written {given.out}: {done.tensors} tensors, {size_text(done.bytes)} ({names})")
    if given.out.suffix == ".safetensors":
        say(f'next:  safetensors.torch.load_model(module, "{given.out}")')
    elif (config := given.out / "config.json").is_file():
        (model,) = json.loads(config.read_text(encoding="utf-8"))["architectures"]
        say(f'next:  {model}.from_pretrained("{given.out}"), or `init from "{given.out}"` in a plan')
    return 0


def _size(text: str) -> int:
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"`{text}` is no size such as 5GB or 500MB") from None
    if size <= 0:
        raise argparse.ArgumentTypeError("a file holds more than nothing")
    return size
