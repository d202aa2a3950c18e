"""Builds the site into a folder, and checks it: ``python -m website build/site``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from website.built import faults
from website.staging import stage

ROOT = Path(__file__).resolve().parent.parent
GENERATE = "import website.highlighting as h; h.register(); from zensical.main import cli; cli()"


def main(out: Path) -> int:
    """Build and check. Return the exit code."""
    shutil.rmtree(out, ignore_errors=True)
    pages = stage(ROOT, out / "source")
    settings = out / "zensical.toml"
    shutil.copy(ROOT / "website" / "zensical.toml", settings)
    shutil.copytree(ROOT / "website" / "theme", out / "source" / "theme")
    command = [sys.executable, "-c", GENERATE, "build", "--strict", "--config-file", str(settings)]
    if ended := subprocess.run(command, cwd=ROOT).returncode:
        return ended
    site = out / "site"
    (site / "404.html").unlink(missing_ok=True)  # for servers: its addresses begin at their root
    wrong = list(faults(site))
    for fault in wrong:
        print(fault, file=sys.stderr)
    if not wrong:
        print(
            f"{len(pages)} pages; nothing is loaded from elsewhere, every link leads somewhere: {site / 'index.html'}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
