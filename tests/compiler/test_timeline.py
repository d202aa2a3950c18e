"""A step on a clock: messages that take time, stages that differ, and its pictures."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from parc.compiler.program.actions import Action
from parc.compiler.schedules import timelines
from parc.compiler.schedules.timeline import Timeline, draw, paint, simulate, svg, time_slot


def test_messages_that_take_time_make_ranks_wait() -> None:
    made = timelines("gpipe", 3, 1)
    assert simulate(made, 1, 2).makespan == 9
    assert simulate(made, 1, 2, latency=0.5).makespan == 9 + 4 * 0.5  # two ways of two messages


def test_a_message_is_under_way_while_its_sender_goes_on() -> None:
    made = timelines("gpipe", 2, 1)
    assert simulate(made, 1, [2, 2]).makespan == 1 + 1 + 2 + 2
    split = timelines("gpipe", 2, 1, as_run=True)  # stage 1 sends the result of I, and does W meanwhile
    times = {"F": 1, "B": 2, "I": 1, "W": 1}
    assert simulate(split, work=lambda action: times[action.kind]).makespan == 1 + 1 + 1 + 2


def test_actions_of_a_stage_may_take_different_times() -> None:
    first = {"0F0": 3.0, "1F0": 2.0}
    played = simulate(timelines("1f1b", 2, 3), lambda action: first.get(str(action), 1.0))
    assert [round(span.end - span.start) for span in played.spans["pp0"] if span.action.kind == "F"] == [3, 1, 1]
    assert played.makespan == 3 + 2 + 2 + (1 + 2) * 2 + 2


def test_the_slowest_stage_sets_the_pace() -> None:
    played = simulate(timelines("1f1b", 3, 10), [1, 3, 1], [2, 6, 2])
    assert played.busy("pp1") == 90
    assert played.makespan == 1 + 90 + 2  # before its first forward, and after its last backward
    assert played.idle("pp0") == played.makespan - 30


def test_a_time_of_all_work_stands_for_those_of_forward_and_backward() -> None:
    made = timelines("1f1b", 2, 3)
    taken = {"F": 2.0, "B": 5.0}
    assert simulate(made, work=lambda action: taken[action.kind]) == simulate(made, 2, 5)


def test_an_axis_in_percent_is_of_the_whole_step() -> None:
    played = simulate(timelines("1f1b", 2, 2), 3_000, [6_000, 9_000])
    root = ElementTree.fromstring(svg(played, "", "%"))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0", "100", "%"} <= {*words} and not any("000" in (word or "") for word in words)
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any((title or "").startswith("0B1: ") and (title or "").endswith(" to 100 %") for title in titles)
    assert Timeline({"pp0": ()}).idle_share("pp0") == 0


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "floor", "phases"),
    [
        ("1f1b", 4, 1, 3 * (4 + 8), "whole"),
        ("interleaved", 8, 2, 3 * (4 + 8), "whole"),
        ("zb-h1", 4, 1, 3 * 4, "split"),
        ("zbv", 8, 2, 3 * 4, "split"),
    ],
)
def test_no_schedule_is_idle_for_less_than_its_floor(
    name: str, stages: int, chunks: int, floor: float, phases: str
) -> None:
    costs = {"F": 4, "B": 8, "I": 5, "W": 3}
    played = simulate(timelines(name, stages, 8, chunks), work=lambda action: costs[action.kind])
    assert played.floor == floor <= max(map(played.idle, played.spans)) and played.phases == phases


def test_the_floor_of_a_build_is_of_its_own_order() -> None:
    played = simulate(timelines("1f1b", 2, 2, as_run=True), [1, 2], [2, 4])
    assert played.floor == 1 <= max(map(played.idle, played.spans)) and played.phases == "mixed"
    assert simulate(timelines("gpipe", 1, 2)).floor == 0


def test_an_order_that_never_ends_is_refused() -> None:
    made = {role: [a for a in actions if a.kind != "SEND_F"] for role, actions in timelines("gpipe", 2, 1).items()}
    with pytest.raises(ValueError, match=re.escape("the order deadlocks: pp0 at `0RECV_B0`, pp1 at `1RECV_F0`")):
        simulate(made)


def test_spans_of_a_role_follow_each_other() -> None:
    for spans in simulate(timelines("interleaved", 8, 8, 2), 1.5, 3.25, latency=0.125).spans.values():
        assert all(a.end <= b.start for a, b in pairwise(spans))


def test_a_wide_drawing_goes_on_below() -> None:
    assert draw(simulate(timelines("1f1b", 3, 3)), width=40) == (
        "pp0 F0 F1 F2             B0─\n"
        "pp1    F0 F1       B0─── F2\n"
        "pp2       F0 B0─── F1 B1───\n"
        "\n"
        "pp0 ──    B1───    B2───  idle 40 %\n"
        "pp1 B1───    B2───        idle 40 %\n"
        "pp2 F2 B2───              idle 40 %"
    )


def test_a_terminal_shows_microbatches_in_the_colour_of_their_work() -> None:
    picture = paint(simulate(timelines("looped", 4, 2, 2), 1, 1))
    assert picture.plain.splitlines()[0] == "pp0 0 1 0 1     1 0 1 0  idle 20 %"
    colors = {str(span.style).removeprefix("black on ") for span in picture.spans}
    assert len(colors) == 4, "forward and backward of each of two chunks"


def test_phases_of_backwards_have_names_and_colors_of_their_own() -> None:
    played = simulate(timelines("1f1b", 2, 2, as_run=True))
    names = ["forward", "backward", "gradients of inputs", "gradients of weights"]
    legend = paint(played).plain.splitlines()[-1]
    assert legend == " F  forward   B  backward   I  gradients of inputs   W  gradients of weights  "
    root = ElementTree.fromstring(svg(played))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [word for word in reversed(words) if word in names] == names
    boxes = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if len(rect)]
    assert len({box.attrib["fill"] for box in boxes}) == 4


def test_microbatches_of_the_next_step_have_a_plus_in_both_pictures() -> None:
    played = simulate(timelines("async", 2, 2))
    root = ElementTree.fromstring(svg(played))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "0+" in words and "0+" in paint(played).plain


def test_unequal_times_are_drawn_in_slots() -> None:
    played = simulate(timelines("gpipe", 2, 1), [10.2, 19.7], [20.1, 40.4])
    assert draw(played, slot=10).splitlines() == [
        "pp0 F0                   B0───  idle 66 %",
        "pp1    F0─── B0─────────        idle 34 %",
    ]


def test_stages_of_unequal_work_are_drawn_to_scale_with_room_for_labels() -> None:
    played = simulate(timelines("1f1b", 2, 3), [10, 15], [20, 30])
    assert draw(played, time_slot(played)).splitlines() == [
        "pp0 F0 F1            B0─── F2     B1───         B2───  idle 45 %",
        "pp1    F0── B0────── F1─ B1────── F2── B2──────        idle 18 %",
    ]
    assert time_slot(simulate(timelines("1f1b", 2, 3), [1, 100], [2, 200])) == 25, "no work has more than eight columns"
    assert time_slot(Timeline({"pp0": ()})) == 1


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (0.0013, 0.0031), (700.0, 1500.0)])
def test_an_svg_has_a_box_for_each_forward_and_backward_to_scale(forward: float, backward: float) -> None:
    played = simulate(timelines("interleaved", 8, 8, 2), forward, backward)
    root = ElementTree.fromstring(svg(played, "interleaved <8>", "ms"))
    boxes = {}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        for title in rect:
            boxes[(title.text or "").partition(":")[0]] = rect
    spans = [span for spans in played.spans.values() for span in spans if span.action.works]
    assert set(boxes) == {str(span.action) for span in spans}
    width = float(root.attrib["width"])
    lanes = {boxes[str(span.action)].attrib["y"] for span in spans}
    assert len(lanes) == 4
    first = min(float(box.attrib["x"]) for box in boxes.values())
    scale = (float(boxes["0B7"].attrib["x"]) - first) / next(s.start for s in spans if str(s.action) == "0B7")
    for span in spans:
        box = boxes[str(span.action)]
        assert float(box.attrib["x"]) - first == pytest.approx(span.start * scale, abs=0.2)
        assert float(box.attrib["width"]) == pytest.approx((span.end - span.start) * scale - 1, abs=0.2)
        assert float(box.attrib["x"]) + float(box.attrib["width"]) < width
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("idle 16 %") == 4 and {"pp0", "pp3", "interleaved <8>", "forward", "0", "ms"} <= set(words)
    assert words.count("7") >= 16, "each box has its microbatch"
    assert sum("ms" in (word or "") for word in words) == 1, "ticks are numbers, and the unit is said once"


def test_nothing_is_drawn_of_nothing() -> None:
    empty = Timeline({"pp0": []})
    assert draw(empty) == "" and ElementTree.fromstring(svg(empty)) is not None


def test_an_action_without_a_message_is_played() -> None:
    assert simulate({"stage0": [Action(0, "F"), Action(0, "B")]}).makespan == 3
