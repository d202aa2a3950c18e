"""``make report-look``: pages of a few builds, looked at in a real browser: pictures at the width of a desktop and of a
phone, light and dark, and a measurement that no page is wider than its window."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

from benchmarks.command import command
from benchmarks.turns import ROOT

OUT = ROOT / "build" / "report-look"
PLANS: dict[str, tuple[str, ...]] = {
    "gpt": ("gpt",),
    "gpt3d": ("gpt3d",),
    "moe": ("moe",),
    "llama-zero": ("llama-zero", "zero=3"),
    "one-rank": ("gpt", "dp=1", "tp=1"),
    "16-stages": ("llama-pipeline", "pp=16", "microbatches=16", "layers=30"),
}
"""The example of each build, and the values that it gets."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "brave-browser")
WIDTHS = {"desktop": 1200, "phone": 390}
TALLEST = 16_000  # the most rows of pixels that a browser draws at once


def browser() -> str:
    """Return the program of a browser that knows Chrome's options: the one that ``BROWSER`` names, or one on the path.

    Raises:
        SystemExit: there is none.
    """
    named = os.environ.get("BROWSER", "")
    browser = next(filter(None, map(shutil.which, (named,) if named else NAMES)), None)
    if browser is None:
        wanted = f"`{named}` is no program" if named else "no browser is found on this machine"
        sys.exit(f"{wanted}: install Chromium (on Debian and Ubuntu: `apt install chromium`), or name a browser that "
                 "knows Chrome's options: `make report-look BROWSER=/path/to/chrome`")  # fmt: skip
    return browser


def open_in(program: str, *words: str) -> str:
    """Run the browser without a window, and return what it prints."""
    usual = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files")
    return subprocess.run([program, *usual, *words], check=True, capture_output=True, text=True, timeout=120).stdout


def measured(program: str, page: Path, width: int) -> tuple[int, int]:
    """Return the width and the height of a page in a window of some width."""
    frame = f"""<!DOCTYPE html>
<iframe src="{page.as_uri()}" width="{width}" height="800" style="border:0"></iframe><p></p>
<script>const frame = document.querySelector("iframe");
frame.onload = () => {{ const root = frame.contentDocument.documentElement;
  document.querySelector("p").textContent = JSON.stringify([root.scrollWidth, root.scrollHeight]); }};</script>"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "frame.html"
        file.write_text(frame, encoding="utf-8")
        text = open_in(program, "--window-size=1600,1000", "--virtual-time-budget=5000", "--dump-dom", file.as_uri())
    match = re.search(r"<p>(\[.*?\])</p>", text)
    if match is None:
        sys.exit(f"{program} did not open {page}")
    needed, height = json.loads(unescape(match[1]))
    return int(needed), int(height)


def main() -> None:
    """Build, write pages, measure them and take their pictures."""
    program, wide = browser(), []
    OUT.mkdir(parents=True, exist_ok=True)
    for name, (example, *values) in PLANS.items():
        build, page = OUT / name, OUT / f"{name}.html"
        plan, defines = ROOT / "examples" / f"{example}.parc", [word for value in values for word in ("-D", value)]
        for words in (["build", plan, "-o", build, *defines], ["show", build, "--html", page]):
            ended = subprocess.run([sys.executable, "-m", "parc", *map(str, words)], capture_output=True, text=True)
            if ended.returncode:
                sys.exit(ended.stderr)
        for window, width in WIDTHS.items():
            needed, height = measured(program, page, width)
            if needed > width:
                wide.append(f"{page} is {needed} pixels wide in a window of {width}")
            for theme, flags in (("light", ()), ("dark", ("--force-dark-mode",))):
                picture = OUT / f"{name}-{window}-{theme}.png"
                size = f"--window-size={width},{min(height, TALLEST)}"
                open_in(program, *flags, size, f"--screenshot={picture}", page.as_uri())
        print(
            f"{page.relative_to(ROOT)}: {page.stat().st_size / 1024:.0f} KiB, in {2 * len(WIDTHS)} pictures beside it"
        )
    if wide:
        sys.exit("\n".join(wide))


if __name__ == "__main__":
    command(main)
