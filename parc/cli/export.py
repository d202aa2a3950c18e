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
    parser.usage = (
        "parc export [BUILD] CHECKPOINT -o OUT [--dtype TYPE] [--shard-size SIZE] [--ema] [--merge] [--import-model]"
    )
    parser.add_argument(
        "places", metavar="CHECKPOINT", nargs="+", type=Path,
        help="a folder that `parc run --save` wrote; before it the build, if it is no longer where it was",
    )  # fmt: skip
    parser.add_argument(
        "-o", dest="out", metavar="OUT", type=Path, required=True,
        help="a folder as `from_pretrained` reads it; one file if it ends in `.safetensors`",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=_TYPES, help="round floating-point weights; default: as they are stored")
    parser.add_argument(
        "--shard-size", metavar="SIZE", type=_size, default=5 * 10**9, help="bytes of a file at most; default: 5GB"
    )
    parser.add_argument(
        "--import-model", action="store_true",
        help="import the model's code also where it lies in the folder of the build or of the checkpoint",
    )  # fmt: skip
    parser.add_argument("--merge", action="store_true", help="the model without adapters, which are merged into it")
    parser.add_argument("--ema", action="store_true", help="the averages of the plan's `ema` line, not the weights")


def export_command(args: argparse.Namespace) -> int:
    """Write the weights, and say what was written."""
    import torch

    from parc.runtime.state.checkpoint import is_checkpoint
    from parc.runtime.state.exchange import ExportForm, export_weights
    from parc.runtime.state.opening import build_of, open_build

    *builds, checkpoint = args.places
    if len(builds) > 1:
        say("parc export: one checkpoint, and before it at most its build")
        return 2
    if builds and is_checkpoint(builds[0]) and not is_checkpoint(checkpoint):
        say(f"parc export: `{builds[0]}` is a checkpoint, and the build stands before it")
        say(f"help: parc export {checkpoint} {builds[0]} -o {args.out}")
        return 2
    dtype = getattr(torch, _TYPES[args.dtype]) if args.dtype is not None else None
    form = ExportForm(dtype=dtype, shard_bytes=args.shard_size, ema=args.ema, merge=args.merge)
    build = open_build(builds[0], "named") if builds else build_of(checkpoint, "named")
    done = export_weights(build, checkpoint, args.out, form, import_model=args.import_model, note=say)
    names = ", ".join(file.name for file in done.files[:3]) + (", …" if len(done.files) > 3 else "")
    say(f"written {args.out}: {done.tensors} tensors, {size_text(done.bytes)} ({names})")
    if args.out.suffix == ".safetensors":
        say(f'next:  safetensors.torch.load_model(module, "{args.out}")')
    elif (args.out / "adapter_config.json").is_file():
        say(f'next:  PeftModel.from_pretrained(base, "{args.out}"); `--merge` writes the model with what they add')
    elif (config := args.out / "config.json").is_file():
        (model,) = json.loads(config.read_text(encoding="utf-8"))["architectures"]
        say(f'next:  {model}.from_pretrained("{args.out}"), or `init from "{args.out}"` in a plan')
    return 0


def _size(text: str) -> int:
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"`{text}` is no size such as 5GB or 500MB") from None
    if size <= 0:
        raise argparse.ArgumentTypeError("a file holds more than nothing")
    return size
