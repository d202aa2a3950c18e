"""The drawing of flows between rows of a list, as lines in lanes at its left."""

from __future__ import annotations

from collections.abc import Sequence

LANE, EDGE, MOST_LANES = 7, 12, 8


def arcs_svg(edges: Sequence[tuple[int, int]], rows: int, height: int) -> tuple[str, int]:
    """Return a drawing of edges between rows, each ``height`` pixels high, and its width. An edge that passes rows has
    a lane of its own, as far as there are lanes; one to the next row is a straight line. An edge to an earlier row is
    marked."""
    lanes = lanes_of(sorted({(min(edge), max(edge)) for edge in edges}))
    ahead = {edge for edge in edges if edge[0] < edge[1]}
    width = EDGE + LANE * (1 + max(lanes.values(), default=0))
    right, parts = width - EDGE / 2, []
    for (source, target), lane in lanes.items():
        top, bottom = (height * (row + 0.5) for row in (source, target))
        x = right - lane * LANE
        r = min(LANE, right - x)
        way = f"H{x + r:g}q{-r:g} 0 {-r:g} {r:g}V{bottom - r:g}q0 {r:g} {r:g} {r:g}H{right:g}"
        path = f"M{right:g} {top:g}{way if lane else f'V{bottom:g}'}"
        back = "" if (source, target) in ahead else ' class="back"'
        parts.append(f'<path{back} d="{path}" data-e="{source} {target}"/>')
    touched = {row for edge in edges for row in edge}
    parts += [f'<circle cx="{right:g}" cy="{height * (row + 0.5):g}" r="3.5"/>' for row in sorted(touched)]
    box = f'width="{width}" height="{rows * height}" viewBox="0 0 {width} {rows * height}"'
    return f'<svg class="arcs" {box} aria-hidden="true">{"".join(parts)}</svg>', width


def lanes_of(edges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the lane of each edge, 0 for one to the next row: short edges are inside, and edges that overlap have
    different lanes while there are any.

    >>> lanes_of([(0, 1), (0, 3), (1, 4), (4, 6)])
    {(0, 1): 0, (4, 6): 1, (0, 3): 1, (1, 4): 2}
    """
    lanes: dict[tuple[int, int], int] = {}
    for edge in sorted(edges, key=lambda edge: (edge[1] - edge[0], edge)):
        taken = {lanes[other] for other in lanes if other[0] < edge[1] and edge[0] < other[1]}
        free = (lane for lane in range(1, MOST_LANES) if lane not in taken)
        lanes[edge] = next(free, MOST_LANES) if edge[1] - edge[0] > 1 else 0
    return lanes
