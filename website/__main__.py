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
    """Build and check. Return the exit code. A folder is only written over if it holds an earlier site, or nothing."""
    source, settings = out / "source", out / "zensical.toml"
    if out.exists() and not (source.is_dir() and settings.is_file()) and not (out.is_dir() and not any(out.iterdir())):
        print(f"`{out}` holds something else than a site, and stays as it is: name another folder", file=sys.stderr)
        return 1
    shutil.rmtree(out, ignore_errors=True)
    source.mkdir(parents=True)
    shutil.copy(ROOT / "website" / "zensical.toml", settings)
    pages = stage(ROOT, source)
    shutil.copytree(ROOT / "website" / "theme", source / "theme")
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
