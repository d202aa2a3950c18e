"""``parc cluster``: the clusters that parc knows, one of them as a file, or a file that describes this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from parc.cli.terminal import say


def cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("list", "show", "measure"), help="what to do")
    parser.add_argument("name", metavar="NAME", nargs="?", help="with show: the cluster, whose file is printed")
    parser.add_argument("-o", dest="out", metavar="FILE", type=Path, help="with measure: the file; default: here.toml")
    parser.add_argument(
        "--device", metavar="cpu|cuda", choices=("cpu", "cuda"), help="with measure; default: a GPU if there is one"
    )


def cluster_command(args: argparse.Namespace) -> int:
    """List, print or measure."""
    from parc.compiler.clock.cluster import cluster_file, cluster_text, find_cluster, shipped

    if args.what == "list":
        print("\n".join(f"{name:14}{find_cluster(name).about}" for name in shipped()))
        return 0
    if args.what == "measure":
        return _measure(args)
    print(cluster_text(cluster_file(args.name or "")), end="")
    return 0


def _measure(args: argparse.Namespace) -> int:
    """Measure this machine into a file."""
    import re
    import time

    import torch

    from parc.compiler.build.output_files import FileKind, check_file, write_whole
    from parc.compiler.clock.cluster import read_cluster
    from parc.measuring import measured, measured_text
    from parc.runtime.ranks.faults import writing

    out = args.out or Path("here.toml")
    with writing(out):
        check_file(out, FileKind("a cluster's file", re.compile(rb"(?s)#.*parc cluster measure")))
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    ranks = (1, 2) if device == "cpu" or torch.cuda.device_count() > 1 else (1,)
    text = measured_text(out.stem, *measured(ranks, device), device=device)
    read_cluster(text, str(out))
    with writing(out):
        write_whole(out, text)
    say(f"wrote {out}, measured in {time.perf_counter() - begin:.0f} s")
    return 0
