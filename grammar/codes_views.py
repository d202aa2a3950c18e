"""Codes of messages about views of the mesh (P014x)."""

from __future__ import annotations

from .code import Code

BAD_VIEW = Code(
    name="P0140",
    title="a view that does not fit the mesh",
    why="the axes of a view are the ranks of axes that stand next to each other in `mesh`, in their order, "
    "each once. If an axis of the view begins or ends inside an axis of `mesh`, it must cut that axis "
    "into equal parts.",
    example="mesh dp=2, tp=4\nview dp, tp as edp=2, ep=2 in blocks.*.mlp",
    instead="mesh dp=2, tp=4\nview dp, tp as edp=2, ep=4 in blocks.*.mlp\ncolumn blocks.*.mlp.up over ep",
)
OUTSIDE_VIEW = Code(
    name="P0141",
    title="an axis that a tensor does not have",
    why="a view replaces axes for the parameters that it names: lines that place these parameters name the "
    "view's axes, and all other lines name those of `mesh`.",
    example="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\ncolumn blocks.*.attn.qkv over b rows (3 h/b d)",
    instead="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\ncolumn blocks.*.mlp.up over b",
)
UNUSED_VIEW = Code(
    name="P0142",
    title="a view that no line uses",
    why="a view places nothing by itself: it gives names to axes, for lines that place parameters.",
    example="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp",
    instead="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\ncolumn blocks.*.mlp.up over b",
)
TWO_VIEWS = Code(
    name="P0143",
    title="a parameter in two views",
    why="a parameter lies along the axes of one mesh: that of the plan, or that of one view.",
    example="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\nview tp as c=2, d=2 in blocks.0",
    instead="mesh tp=4\nview tp as a=2, b=2 in blocks.*.mlp\nview tp as c=2, d=2 in blocks.0.attn\n"
    "column blocks.*.mlp.up over b\ncolumn blocks.0.attn.out over d",
)
