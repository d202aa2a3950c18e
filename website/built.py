"""The checks of the built site: no page loads anything from another server, and every link leads to something that is
there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import final
from urllib.parse import unquote, urlsplit

LOADS = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "embed": "src",
    "object": "data", "image": "href", "use": "href",
}  # fmt: skip
"""Tags whose attribute a browser loads by itself; `link` does too, unless it only says where something is."""
SAYS_ONLY = {"canonical", "alternate", "next", "prev", "license", "author"}
REACHES = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])((?:https?:)?//[^)'"]+)""")
"""An address on another server that a style sheet loads."""


@final
class _Page(HTMLParser):
    """The addresses that a page loads, those that it links to, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.places |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "link" and not SAYS_ONLY & set(attributes.get("rel", "").split()):
            self.loads.append(attributes.get("href", ""))
        if tag in LOADS and attributes.get(LOADS[tag]):
            self.loads.append(attributes[LOADS[tag]])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if "style" in attributes:
            self.loads += REACHES.findall(attributes["style"])


@cache
def _page(file: Path) -> _Page:
    return _Page(file.read_text(encoding="utf-8"))


def faults(site: Path) -> Iterator[str]:
    """Yield what is wrong with a built site, with the page: a load from elsewhere, a link that leads nowhere."""
    for style in sorted(site.rglob("*.css")):
        for address in REACHES.findall(style.read_text(encoding="utf-8")):
            yield f"{style.relative_to(site)}: loads {address}"
    for file in sorted(site.rglob("*.html")):
        page, shown = _page(file), file.relative_to(site)
        for address in page.loads:
            if urlsplit(address).scheme not in ("", "data") or address.startswith("//"):
                yield f"{shown}: loads {address}"
        for address in (*page.links, *page.loads):
            if not urlsplit(address).scheme and not address.startswith("//") and not _there(site, file, address):
                yield f"{shown}: `{address}` leads nowhere"


def _there(site: Path, file: Path, address: str) -> bool:
    parts = urlsplit(address)
    if not parts.path:
        target = file
    elif parts.path.startswith("/"):
        target = site / unquote(parts.path).lstrip("/")
    else:
        target = Path(os.path.normpath(file.parent / unquote(parts.path)))
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    return target.suffix != ".html" or unquote(parts.fragment) in _page(target).places
