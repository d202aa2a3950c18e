"""Bindings: a text that is written for one is read as the same."""

from __future__ import annotations

import pytest

from parc.compiler.program.binding import KINDS, Binding, Kind
from parc.compiler.program.text import ProgramError, parse_program

from .test_program import GOOD


@pytest.mark.parametrize("kind", KINDS)
def test_a_binding_is_its_text(kind: Kind) -> None:
    row = KINDS[kind]
    binding = Binding(kind, "" if row.text == "kind" else "blocks.0.w")
    assert str(binding) == {"kind": kind, "name": "blocks.0.w"}.get(row.text, f"{kind} blocks.0.w")
    if row.text != "name":
        assert Binding.parse(str(binding)) == Binding.parse_key(binding.key_in("F"), "F") == binding


def test_gradients_that_a_backward_returns_stand_there_by_their_names() -> None:
    gradient, sent = Binding("gradient", "blocks.0.w"), Binding("sent", "x")
    assert [key.key_in("B") for key in (gradient, sent)] == ["blocks.0.w", "sent x"]
    assert [Binding.parse_key(text, "B") for text in ("blocks.0.w", "sent x")] == [gradient, sent]
    assert gradient.key_in("REDUCE") == "gradient blocks.0.w"


@pytest.mark.parametrize("text", ["", "weights w", "loss w", "loss ", "value w", "w", " parameter w", "Parameter w"])
def test_a_text_that_is_no_binding_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is nothing that a value can be bound to"):
        Binding.parse(text)


@pytest.mark.parametrize(("old", "new"), [("# input x", "# inputs x"), ('"saved w"', '"kept w"')])
def test_a_program_with_a_text_that_is_no_binding_is_refused(old: str, new: str) -> None:
    with pytest.raises(ProgramError, match=r"program:\d+: `.*` is nothing that a value can be bound to"):
        parse_program(GOOD.replace(old, new))
