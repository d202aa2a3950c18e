"""``python -m certificate BUILD``: prove that a build computes what its model says, from its texts alone."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

from .step import certify
from .text import Refused


def main(argv: list[str] | None = None) -> int:
    """Check a build. Return 0 where it is proved, and 1 where it is not."""
    parser = argparse.ArgumentParser(prog="python -m certificate", description=__doc__)
    parser.add_argument("build", type=Path, metavar="BUILD")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        proof = certify(args.build)
    except Refused as error:
        print(f"not certified: {error}", file=sys.stderr)
        return 1
    print("\n".join(proof.lines))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"certified: {proof.nodes} meanings, {time.perf_counter() - start:.2f} s, {peak:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
