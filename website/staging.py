"""Staging: the pages of a checkout in one folder, as the site generator wants them.

README.md becomes the first page, docs/ the others. Pages outside of docs/ that one of them links to come along, such as
the tables of benchmarks/, and so do other files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
"""A link of a page to a file, in three groups: the text up to the file's name, the name, the fragment behind it."""
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
"""A block of code, in which there are no links."""
DECISIONS = PurePosixPath("decisions")


def staged_name(file: PurePosixPath) -> PurePosixPath:
    """Return the place on the site of a file of the checkout, both relative to their roots."""
    if file == PurePosixPath("README.md"):
        return PurePosixPath("index.md")
    return PurePosixPath(*file.parts[1:]) if file.parts[0] == "docs" else file


def stage(root: Path, target: Path) -> list[PurePosixPath]:
    """Copy all pages, and all that they link to, into an empty folder; links follow. Return the pages.

    Raises:
        ValueError: a link leads out of the checkout, or to nothing.
    """
    waiting = [PurePosixPath("README.md"), *(PurePosixPath(p.relative_to(root)) for p in (root / "docs").rglob("*.md"))]
    seen: set[PurePosixPath] = set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        place = target / staged_name(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".md":
            shutil.copy(root / file, place)
            continue
        text, linked = _with_staged_links(root, file, (root / file).read_text(encoding="utf-8"))
        place.write_text(text, encoding="utf-8")
        waiting += linked
    pages = sorted(staged_name(file) for file in seen if file.suffix == ".md")
    list_of_decisions = _list_of_decisions(target, [page for page in pages if page.parent == DECISIONS])
    return [*pages, list_of_decisions]


def _with_staged_links(root: Path, page: PurePosixPath, text: str) -> tuple[str, list[PurePosixPath]]:
    """Return a page's text with links between staged files, and the files of the checkout that it links to."""
    linked: list[PurePosixPath] = []

    def staged(link: re.Match[str]) -> str:
        linked.append(_linked(root, page, link[2]))
        return link[1] + os.path.relpath(staged_name(linked[-1]), staged_name(page).parent) + link[3]

    parts = FENCED.split(text)
    return "".join(part if number % 2 else LINK.sub(staged, part) for number, part in enumerate(parts)), linked


def _list_of_decisions(target: Path, pages: Sequence[PurePosixPath]) -> PurePosixPath:
    titles = [(target / page).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages]
    lines = [f"- [{title}]({page.name})" for page, title in zip(pages, titles, strict=True)]
    (target / DECISIONS / "index.md").write_text("\n".join(["# Decisions", "", *lines, ""]), encoding="utf-8")
    return DECISIONS / "index.md"


def _linked(root: Path, page: PurePosixPath, name: str) -> PurePosixPath:
    there = Path(os.path.normpath(root / page.parent / name))
    if not there.is_file() or not there.is_relative_to(root):
        raise ValueError(f"{page}: the link `{name}` leads to no file of the project")
    return PurePosixPath(there.relative_to(root))
