"""The page of typical mistakes: it is current, and each message on it has a place, a cause and a way out."""

from __future__ import annotations

import re
from pathlib import Path

from tests.mistakes import MISTAKES, page

PAGE = Path(__file__).parent.parent / "docs" / "mistakes.md"


def test_the_page_of_mistakes_is_current_and_every_message_has_a_place_a_cause_and_a_way_out() -> None:
    """Messages about the words of a command need no other place; an error in a loop has the line in its traceback."""
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "run `python -m tests.mistakes > docs/mistakes.md`"
    kinds: dict[str, str] = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert kinds.keys() == MISTAKES.keys()
    messages = {title: re.findall(r"```text\n(.*?)\n```", part, re.DOTALL) for title, part in kinds.items()}
    assert {title: len(found) for title, found in messages.items()} == {
        title: len(mistakes) for title, mistakes in MISTAKES.items()
    }
    for title, found in messages.items():
        in_a_loop, in_words = title == "A training loop of one's own", title == "The command line"
        for message in found:
            assert re.search(r"; [a-z]|; `" if in_a_loop else r"^help: ", message, re.MULTILINE), message
            assert re.search(r"\[P\d{4}\]", message) or message.startswith("parc"), message
            whole_plan = "has no `loss` line" in message or "has no `data` line" in message
            assert in_a_loop or in_words or whole_plan or " --> gpt.parc:" in message, message
            assert "Traceback (most recent" not in message
