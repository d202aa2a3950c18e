"""A sheet to draw on: boxes, grids, lines and words, as SVG."""

from __future__ import annotations

from html import escape

RANKS = ("#cfe3f7", "#fde3c0", "#d5ecd4", "#e8dcf4")
"""The colour of each rank's part."""
WHOLE, PARTIAL = "#eeeeee", "#f9d0cc"
INK, SOFT = "#222222", "#666666"


class Sheet:
    """A picture of a width and a height, in points of a phone's screen: words stay readable there."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._parts = (width, height), title, list[str]()

    def box(self, x: float, y: float, width: float, height: float, fill: str, words: str = "", size: int = 13) -> None:
        """Draw a box, with words in its middle; a line of words each."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="#888"/>'
        )
        lines = words.split("\n") if words else []
        top = y + height / 2 - (len(lines) - 1) * (size + 3) / 2
        for number, line in enumerate(lines):
            self.words(x + width / 2, top + number * (size + 3) + size * 0.35, line, size, "middle")

    def words(
        self, x: float, y: float, text: str, size: int = 13, anchor: str = "start", color: str = INK, bold: bool = False
    ) -> None:
        """Write a line of words."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = "#555555") -> None:
        """Draw an arrow."""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="1.6" '
            'marker-end="url(#tip)"/>'
        )

    def text(self) -> str:
        """Return the picture as SVG."""
        width, height = self._size
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(self._title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L10 5L0 10z" fill="#555"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *self._parts,
            "</svg>",
            "",
        ])  # fmt: skip
