"""Memory that a rank needs, estimated from its programs and its order of work."""

from __future__ import annotations

from parc.compiler.program.cost import estimate_memory
from parc.compiler.schedules import timelines
from tests.runtime.staged import program, roles

RELAY = {
    "1F": program("stage1", "F", "pp=3", ("x:received x", "sent x"), {}),
    "1B": program("stage1", "B", "pp=3", ("g:received x", "sent x g"), {}),
}
VALUE = 2 * 4 * 4


def test_what_is_received_and_sent_is_counted() -> None:
    """A stage that only hands on keeps one value that is under way, one that it has and one that comes."""
    actions = timelines("gpipe", 3, 2)["pp1"]
    assert estimate_memory(RELAY, actions, {}, {}).activations == 3 * VALUE


def test_a_rank_keeps_no_more_between_actions_than_is_estimated() -> None:
    """Of these stages the executor keeps as many values as the tests of running measure."""
    for role, kept in zip(roles("pp=4", 4).values(), (1, 6, 3, 4), strict=True):
        assert estimate_memory(role.programs, role.actions, {}, {}).activations >= kept * VALUE
