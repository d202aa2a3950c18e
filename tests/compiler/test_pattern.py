"""Patterns of names: the names that they match, and the suggestions if they match nothing."""

from __future__ import annotations

import pytest

from parc.compiler.resolve.pattern import Pattern

NAMES = [f"blocks.{i}.{name}" for i in range(12) for name in ("attn.q_proj", "attn.k_proj", "mlp.up")] + ["embed"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("embed", 1),
        ("embed?", 1),
        ("em*", 1),
        ("*", 1),
        ("**", 37),
        ("blocks.*", 0),
        ("blocks.**", 36),
        ("**.up", 12),
        ("blocks.**.mlp.**.up", 12),
        ("blocks.*.attn.{q,k}_proj", 24),
        ("blocks.*.attn.{q,v}_proj", 12),
        ("blocks.[0..3].mlp.up", 4),
        ("blocks.[2..11:3].mlp.up", 4),
        ("blocks.[0..999999999999].mlp.up", 12),
        ("blocks.1*.mlp.up", 3),
        ("blocks.*.mlp.gate?", 0),
        ("blocks.0.mlp.up.**", 1),
    ],
)
def test_matches(text: str, count: int) -> None:
    assert len(Pattern(text).of(NAMES)) == count
    assert len([name for name in NAMES if Pattern(text).matches(name)]) == count


def test_many_stars_take_no_time() -> None:
    name = ".".join("a" * 60)
    assert not Pattern(".".join(["**", "a"] * 30) + ".b").matches(name)
    assert not Pattern("*a" * 30 + "b").matches("a" * 60)
    assert not Pattern("{a,aa,*a}" * 30 + "b").matches("a" * 60)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("blocks.*.atn.q_proj", ("blocks.*.attn.q_proj",)),
        ("block.*.mlp.up", ("blocks.*.mlp.up",)),
        ("blocks.0.attn.q_porj", ("blocks.0.attn.q_proj",)),
        ("embd", ("embed",)),
        ("mlp.up", ("blocks.*.mlp.up",)),
        ("q_proj", ("blocks.*.attn.q_proj",)),
        ("{q,k}_proj", ("blocks.*.attn.{q,k}_proj",)),
        ("model.blocks.*.mlp.up", ("blocks.*.mlp.up",)),
        ("module.embed", ("embed",)),
        ("zzz", ()),
        ("**.atn.q_proj", ("**.attn.q_proj",)),
        ("**.attn.qproj", ("**.attn.q_proj",)),
    ],
)
def test_nearest(text: str, nearest: tuple[str, ...]) -> None:
    assert Pattern(text).nearest(NAMES)[:1] == nearest
