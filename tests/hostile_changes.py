"""Random changes of texts, JSON values and bytes, to values that a reader may not expect."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

HARD: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**62, 2**63, 2**64, 10**12, 10**30, 1e308, -0.0, 0.5, True, None, "", "x", "..", "/", "f32[8]",
    "\u202e", "a" * 5000, [], {}, [[[[]]]], [None] * 100, {"": None}, float("inf"), float("nan"),
)  # fmt: skip
"""Values that a reader may not expect."""
WORDS = (
    "0", "-1", "1", "9" * 30, "4611686018427387904", "1000000000000", "1e999", "0.5", "1..1000000000000", "(", ")", "[",
    "]", "{", "}", ",", "=", "/", "/tp", "..", "...", "$x", '"', '""', '"/dev/zero"', "*", "**", "a.*.{b,c}", "tp=0",
    "tp=2", "pad", "over", "by", "rows", "\u202e", "\u200b", "\0", "é", "#", "\t", "nan", "inf", "None", "torch.int64",
    "(" * 40, "[" * 40, "a" * 5000,
)  # fmt: skip


def mutate_text(draw: random.Random, text: str) -> str:
    """Return a text with a few of its characters, words or lines changed."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        lines = text.split("\n")
        at, kind = draw.randrange(len(lines)), draw.randrange(9)
        words = re.split(r"(\W)", lines[at])
        place = draw.randrange(len(words))
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines[at:at] = [lines[draw.randrange(len(lines))]] * draw.choice((1, 1, 2, 3000))
        elif kind == 2:
            lines[at : at + 2] = lines[at : at + 2][::-1]
        elif kind == 3:
            del words[place]
            lines[at] = "".join(words)
        elif kind == 4:
            words[place] = draw.choice(re.split(r"(\W)", text))
            lines[at] = "".join(words)
        elif kind == 5:
            numbers = list(re.finditer(r"[0-9]+", lines[at]))
            if numbers:
                found = draw.choice(numbers)
                number = draw.choice((0, 1, int(found[0][:18]) + 1, 2**31, 2**62, 10**18, 10**25))
                lines[at] = f"{lines[at][: found.start()]}{number}{lines[at][found.end() :]}"
        else:
            words[place] = draw.choice(WORDS)
            lines[at] = "".join(words)
        text = "\n".join(lines)
    return text


def mutate_json(draw: random.Random, value: Any) -> Any:
    """Return a JSON value with one or a few of its parts replaced, removed, or moved."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:  # all was removed
            break
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(("", "x", "mesh", "norm.weight", "a.b"))] = deepcopy(draw.choice(HARD))
        elif kind == 2:
            other, place = draw.choice(places)
            holder[key] = json.loads(json.dumps(other[place])) if place in _keys(other) else None
        else:
            holder[key] = deepcopy(draw.choice(HARD))  # it may be changed in its turn
    return value


def _keys(holder: Any) -> Sequence[Any]:
    return list(holder) if isinstance(holder, dict) else range(len(holder))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in _keys(value):
            yield value, key
            yield from _places(value[key])


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return bytes of which some are changed, removed, or doubled."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 2, 8))):
        at = draw.randrange(max(len(changed), 1))
        kind = draw.randrange(4)
        if kind == 0:
            del changed[at : at + draw.choice((1, 16, 10**6))]
        elif kind == 1:
            changed[at:at] = changed[: draw.choice((1, 64, 4096))]
        else:
            changed[at : at + 1] = bytes([draw.choice((0, 255, 32, draw.randrange(256)))])
    return bytes(changed)


def rehash(folder: Path) -> None:
    """Set the manifest's hashes to those of the files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
