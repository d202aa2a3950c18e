"""Draws the pictures of docs/concepts.md and docs/strategy.md: ``python -m website.pictures`` writes docs/pictures."""

from __future__ import annotations

from pathlib import Path

from parc.compiler.schedules import timelines
from parc.compiler.schedules.timeline import simulate, svg
from website.drawing import PARTIAL, RANKS, SOFT, WHOLE, Sheet

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def mesh() -> str:
    """Eight ranks along two axes."""
    sheet = Sheet(480, 190, "A mesh: dp=2, tp=4")
    for dp in range(2):
        sheet.words(8, 88 + 62 * dp, f"dp = {dp}", 14)
        for tp in range(4):
            x = 75 + 100 * tp
            if not dp:
                sheet.words(x + 45, 40, f"tp = {tp}", 14, "middle")
            sheet.box(x, 55 + 62 * dp, 90, 52, RANKS[tp], f"rank {4 * dp + tp}", 14)
    sheet.words(240, 18, "mesh dp=2, tp=4", 15, "middle", bold=True)
    sheet.words(75, 182, "one colour: one part of a weight that is split over tp", 12, color=SOFT)
    return sheet.text()


def placements() -> str:
    """The ways in which two ranks can hold a matrix of four rows and four columns."""
    sheet = Sheet(480, 520, "Placements of a matrix on two ranks")
    rows = (
        ("S(0)", "f32[4/tp, 4]", "dim 0 is split: each rank has some rows", ((2, 4, RANKS[0]), (2, 4, RANKS[1]))),
        ("S(1)", "f32[4, 4/tp]", "dim 1 is split: each rank has some columns", ((4, 2, RANKS[0]), (4, 2, RANKS[1]))),
        ("R, I", "f32[4, 4]", "each rank has all of it", ((4, 4, WHOLE), (4, 4, WHOLE))),
        ("P", "f32[4, 4] +tp", "each rank has a summand of every entry", ((4, 4, PARTIAL), (4, 4, PARTIAL))),
    )
    sheet.words(290, 20, "rank 0", 14, "middle", bold=True)
    sheet.words(410, 20, "rank 1", 14, "middle", bold=True)
    for number, (name, text, said, parts) in enumerate(rows):
        y = 40 + 122 * number
        sheet.words(8, y + 22, name, 18, bold=True)
        sheet.words(8, y + 44, text, 14)
        first, _, second = said.partition(": ")
        sheet.words(8, y + 66, first, 12, color=SOFT)
        sheet.words(8, y + 82, second, 12, color=SOFT)
        for rank, (height, width, fill) in enumerate(parts):
            left, top = 250 + 120 * rank, y
            for row in range(4):
                for column in range(4):
                    mine = (row // height == rank or height == 4) and (column // width == rank or width == 4)
                    sheet.box(left + 22 * column, top + 22 * row, 20, 20, fill if mine else "white")
    return sheet.text()


def column_row() -> str:
    """An MLP on two ranks: its first weight is split by columns of the product, its second by rows."""
    sheet = Sheet(480, 470, "column, then row: one sum over the ranks")
    for rank in range(2):
        x, fill = 130 + 190 * rank, RANKS[rank]
        sheet.words(x + 70, 20, f"rank {rank}", 14, "middle", bold=True)
        sheet.box(x, 35, 140, 40, WHOLE, "x  [8, 64]")
        sheet.arrow(x + 70, 75, x + 70, 98)
        sheet.box(x, 100, 140, 46, fill, "weight of up\n[128, 64]")
        sheet.arrow(x + 70, 146, x + 70, 168)
        sheet.box(x, 170, 140, 46, fill, "h  [8, 128]\nGELU of its own part")
        sheet.arrow(x + 70, 216, x + 70, 238)
        sheet.box(x, 240, 140, 46, fill, "weight of down\n[64, 128]")
        sheet.arrow(x + 70, 286, x + 70, 308)
        sheet.box(x, 310, 140, 46, PARTIAL, "a summand of y\n[8, 64]")
        sheet.arrow(x + 70, 356, 295, 393)
    sheet.box(225, 395, 140, 30, "#ffffff", "all_reduce over tp", 12)
    sheet.words(375, 408, "y  [8, 64],", 12)
    sheet.words(375, 424, "alike on both", 12)
    for y, text in ((60, "f32[8, 64]"), (126, "f32[256/tp, 64]"), (196, "f32[8, 256/tp]"), (266, "f32[64, 256/tp]"),
                    (336, "f32[8, 64] +tp"), (415, "f32[8, 64]")):  # fmt: skip
        sheet.words(8, y, text, 13)
    sheet.words(8, 455, "left: the type in the program's text, which has the whole sizes", 12, color=SOFT)
    return sheet.text()


def zero() -> str:
    """The bytes that one of four ranks stores at each level of ZeRO."""
    sheet = Sheet(480, 240, "zero 0 to 3 over dp=4: what one rank stores")
    kinds = (("parameters", 4, 3, RANKS[0]), ("gradients", 4, 2, RANKS[1]), ("optimizer (Adam)", 8, 1, RANKS[2]))
    for level in range(4):
        y, x = 48 + 44 * level, 80.0
        sheet.words(8, y + 20, f"zero {level}", 14)
        for _, size, splits_at, fill in kinds:
            width = size * 22 / (4 if level >= splits_at else 1)
            sheet.box(x, y, width, 30, fill, f"{size}" if level < splits_at else f"{size // 4}")
            x += width
        total = sum(size / (4 if level >= splits_at else 1) for _, size, splits_at, _ in kinds)
        sheet.words(x + 8, y + 20, f"{total:g}", 13, color=SOFT)
    x = 80.0
    for name, _, _, fill in kinds:
        sheet.box(x, 14, 14, 14, fill)
        sheet.words(x + 19, 26, name, 12)
        x += 120
    sheet.words(8, 232, "bytes for each parameter, float32, four dp ranks", 12, color=SOFT)
    return sheet.text()


def ring() -> str:
    """Keys and values that go around four ranks, and the parts of a sequence that a rank has under zigzag."""
    sheet = Sheet(480, 350, "context … using ring and zigzag")
    sheet.words(8, 18, "ring: keys and values go around; queries stay", 14, bold=True)
    for rank in range(4):
        x = 12 + 118 * rank
        sheet.box(x, 34, 100, 44, RANKS[rank], f"rank {rank}\nq of part {rank}")
        if rank < 3:
            sheet.arrow(x + 101, 56, x + 117, 56)
    sheet.arrow(465, 84, 15, 84)
    for turn in range(4):
        sheet.words(8, 110 + 34 * turn, f"turn {turn}", 11, color=SOFT)
        for rank in range(4):
            part = (rank - turn) % 4
            sheet.box(60 + 106 * rank, 96 + 34 * turn, 96, 22, RANKS[part], f"k, v of part {part}", 12)
    sheet.words(8, 262, "zigzag: 8 parts, and every rank has an early and a late one", 14, bold=True)
    for part in range(8):
        rank = part if part < 4 else 7 - part
        sheet.box(12 + 57 * part, 276, 54, 30, RANKS[rank], f"rank {rank}", 12)
    sheet.words(12, 326, "start of the sequence", 12, color=SOFT)
    sheet.words(465, 326, "end", 12, "end", SOFT)
    sheet.words(12, 343, "so under a causal mask all ranks have equal work", 12, color=SOFT)
    return sheet.text()


def roles() -> str:
    """Eight ranks with two roles."""
    sheet = Sheet(480, 200, "roles: ranks of one stage run one program")
    sheet.words(240, 18, "mesh pp=2, dp=2, tp=2", 15, "middle", bold=True)
    for pp in range(2):
        sheet.words(8, 68 + 80 * pp, f"pp = {pp}", 14)
        sheet.words(8, 86 + 80 * pp, f"role pp{pp}", 12, color=SOFT)
        for place in range(4):
            x = 85 + 98 * place
            words = f"rank {4 * pp + place}\ndp {place // 2}, tp {place % 2}"
            sheet.box(x, 40 + 80 * pp, 90, 52, RANKS[pp], words)
        if not pp:
            sheet.arrow(280, 94, 280, 118)
            sheet.words(290, 111, "activations, and gradients back", 12, color=SOFT)
    sheet.words(85, 192, "stage 1's blocks are in the programs of role pp1 alone", 12, color=SOFT)
    return sheet.text()


def pipeline() -> str:
    """The timeline of 1f1b on four stages, as ``parc show --pipeline --svg`` draws it."""
    return svg(simulate(timelines("1f1b", 4, 8)), "1f1b, 8 microbatches, 4 stages", "slots")


def strategy() -> str:
    """The questions in the order in which models meet the limits, each with the line of a plan that answers it."""
    steps = (
        ("Is the batch too large?", "schedule microbatches 8", "one GPU"),
        ("Is one GPU too slow?", "mesh dp=8, shard … [B/dp, _]", "data parallel"),
        ("Is the state too large?", "zero 1 over dp, then 2, then 3", "ZeRO"),
        ("Is a layer too large or slow?", "column, row, vocab … over tp", "tensor parallel, inside a node"),
        ("Is it too large for a node?", "stage balanced over pp, 1f1b", "pipeline, across nodes"),
        ("Are sequences too long?", "context … over cp", "context parallel"),
        ("Are there experts?", "experts … over ep", "expert parallel"),
        ("Is it still over the budget?", "recompute blocks.*, then offload", "time for memory"),
    )
    sheet = Sheet(480, 62 * len(steps) + 38, "Which line next? From one GPU to many")
    for number, (question, line, name) in enumerate(steps):
        y = 8 + 62 * number
        sheet.box(8, y, 196, 40, "#ffffff", question, 12)
        sheet.box(238, y, 234, 40, RANKS[number % 4], f"{name}\n{line}", 12)
        sheet.arrow(204, y + 20, 236, y + 20)
        sheet.words(221, y + 14, "yes", 11, "middle", SOFT)
        sheet.arrow(106, y + 40, 106, y + 60)
        sheet.words(114, y + 55, "no, or not enough" if number < len(steps) - 1 else "no", 11, color=SOFT)
    sheet.box(8, 8 + 62 * len(steps), 196, 26, WHOLE, "build, and train", 12)
    return sheet.text()


PICTURES = (mesh, placements, column_row, zero, ring, roles, pipeline, strategy)


def pictures() -> dict[str, str]:
    """Return the text of each picture, by the name of its file."""
    return {f"{draw.__name__.replace('_', '-')}.svg": draw() for draw in PICTURES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawn in pictures().items():
        (FOLDER / name).write_text(drawn, encoding="utf-8")
