"""Simulated steps: the start and the end of each role's actions, the idle time, and pictures of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import zip_longest
from math import floor, log10
from typing import TYPE_CHECKING, Literal

from ..program.actions import ACTIONS, BACKWARD, FORWARD, Action, phases_of, send_kind, work_kinds


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of every role in the order of its actions, of a simulated step or of a measured one.

    The step starts at 0; the unit of times is that of the simulated or measured durations.
    """

    spans: Mapping[str, Sequence[TimeSpan]]

    @property
    def makespan(self) -> float:
        """The time at which the last role is done."""
        return max((span.end for spans in self.spans.values() for span in spans), default=0)

    def busy(self, role: str) -> float:
        """Return the time that a role works."""
        return sum(span.end - span.start for span in self.spans[role] if span.action.works)

    def idle(self, role: str) -> float:
        """Return the time that a role does not work."""
        return self.makespan - self.busy(role)

    def idle_share(self, role: str) -> float:
        """Return the fraction of the time that a role does not work: 1 - its work / the makespan."""
        return self.idle(role) / self.makespan if self.makespan else 0.0

    @property
    def phases(self) -> Literal["whole", "mixed", "split"]:
        """The form of backwards: all are whole, all are in phases, or some are."""
        kinds = {span.action.kind for spans in self.spans.values() for span in spans}
        if BACKWARD not in kinds:
            return "split"
        return "whole" if kinds.isdisjoint(phases_of(BACKWARD)) else "mixed"

    @property
    def overlaps(self) -> bool:
        """True where a role does work of the next step before it ends this one."""
        return any(span.action.ahead for spans in self.spans.values() for span in spans)

    @property
    def floor(self) -> float:
        """The idle time that no schedule of such backwards avoids where a step ends before the next one starts: until
        the last of p ranks has work, the forwards of p - 1 stages; and after it has none, their backwards if all are
        whole. Where steps overlap there is none."""
        if self.overlaps:
            return 0.0
        kinds = work_kinds() if self.phases == "whole" else (FORWARD,)
        return sum(
            span.end - span.start
            for spans in self.spans.values()
            for span in spans
            if span.action.kind in kinds and span.action.microbatch == 0 and span.action.stage < len(self.spans) - 1
        )


def peak_live(actions: Sequence[Action]) -> int:
    """Return the most microbatches of which a role holds activations for backward at one time: from F to B, or to W
    where a backward has two phases. Each stage of the role counts separately.

    >>> peak_live([Action.parse(word) for word in "0F0 0F1 0B0 0F2 0I1 0I2 0W1 0W2".split()])
    2
    """
    return sum(most_live(actions).values())


def most_live(actions: Sequence[Action]) -> dict[int, int]:
    """Return the microbatches of each stage of a role that are live when most are. Those that are begun ahead of their
    step are live from the step before on."""
    live = {action.stage: 0 for action in actions if action.works}
    for action in (action for action in actions if action.ahead):
        live[action.stage] += (action.kind == FORWARD) - action.accumulates
    most, now = dict(live), sum(live.values())
    total = now
    for action in actions:
        change = (action.kind == FORWARD) - action.accumulates
        if change:
            live[action.stage] += change
            now += change
            if now > total:
                total, most = now, dict(live)
    return most


Times = float | Sequence[float] | Callable[[Action], float]
"""The time of actions of a kind: one for all, one for each stage, or a function of the action."""


def simulate(
    timelines: Mapping[str, Sequence[Action]],
    forward: Times = 1,
    backward: Times = 2,
    *,
    work: Times | None = None,
    latency: float = 0,
    steps: int = 1,
) -> Timeline:
    """Simulate timelines whose ``F`` and ``B`` take these times, and other work its slots; ``work``, if given, is the
    time of every kind of work. Everything else takes no time. The makespan is the longest path through the work and
    messages of all roles.

    A message arrives ``latency`` after it was sent. Senders do not wait, as in a run, which posts receives early.
    ``steps`` follow each other on each role, which meets the others in messages alone.

    Raises:
        ValueError: the timelines deadlock, or a message is never sent.
    """
    times: dict[str, Times] = {row.kind: row.slots for row in ACTIONS.values() if row.works}
    times |= {FORWARD: forward, BACKWARD: backward} if work is None else dict.fromkeys(times, work)
    spans: dict[str, list[TimeSpan]] = {role: [] for role in timelines}
    sent: dict[tuple[int, Action], float] = {}
    moved = True
    while moved:
        moved = False
        for role, actions in timelines.items():
            done = spans[role]
            while len(done) < steps * len(actions):
                at, place = divmod(len(done), len(actions))
                start, action = done[-1].end if done else 0, actions[place]
                row = action.message
                if row is not None and not row.sends:
                    message = at, replace(action, stage=action.stage + row.to, kind=send_kind(row.work))
                    if message not in sent:
                        break
                    start = max(start, sent[message] + latency)
                end = sent[at, action] = start + _time_of(times.get(action.kind, 0), action)
                done.append(TimeSpan(action, start, end))
                moved = True
    stuck = [f"{role} at `{timelines[role][len(done) % len(timelines[role])]}`" for role, done in spans.items()
             if len(done) < steps * len(timelines[role])]  # fmt: skip
    if stuck:
        raise ValueError(f"the order deadlocks: {', '.join(stuck)}")
    return Timeline(spans)


def _time_of(times: Times, action: Action) -> float:
    if callable(times):
        return times(action)
    return times[action.stage] if isinstance(times, Sequence) else times


# ---- pictures


if TYPE_CHECKING:
    from rich.text import Text

Cell = tuple[str, Action | None]


def time_slot(timeline: Timeline) -> float:
    """Return a slot of time for ``draw``: the shortest work, but at least an eighth of the longest."""
    times = [span.end - span.start for spans in timeline.spans.values() for span in spans if span.end > span.start]
    return max(min(times), max(times) / 8) if times else 1


def draw(timeline: Timeline, slot: float = 1, width: int | None = None) -> str:
    """Return the timeline as text: a row per role with a label such as ``F0`` (kind and microbatch) per ``slot`` of
    time, and its idle share. Where roles have several stages the stage comes first, as in ``4F0``. Rows wider than
    ``width`` continue below.

    >>> from parc.compiler.schedules import timelines
    >>> from parc.compiler.schedules.timeline import simulate
    >>> print(draw(simulate(timelines("1f1b", 2, 3))))
    pp0 F0 F1       B0─── F2 B1───    B2───  idle 25 %
    pp1    F0 B0─── F1 B1─── F2 B2───        idle 25 %
    """
    several = _chunks(timeline) > 1
    rows = _text_rows(timeline, slot, width, lambda a: str(a) if several else str(a).removeprefix(str(a.stage)), "─")
    return "\n".join("".join(text for text, _ in row).rstrip() for row in rows)


def paint(timeline: Timeline, slot: float = 1, width: int | None = None) -> Text:
    """Return the picture of ``draw`` for a terminal: labels are microbatches, and a line below names the colors. Later
    chunks have lighter shades."""
    from rich.text import Text

    picture, shades = Text(), _shades(timeline)
    for row in _text_rows(timeline, slot, width, _number, " "):
        for (text, action), (_, then) in zip_longest(row, row[1:], fillvalue=("", None)):
            box = text[: len(text) - (action != then)]  # a gap between two boxes
            picture.append(box, style=f"black on {_color(shades, action)}" if action is not None else "")
            picture.append(text[len(box) :])
        picture.append("\n")
    for kind in _kinds(timeline):
        picture.append(f" {kind} ", style=f"black on {ACTIONS[kind].colors[0]}")
        picture.append(f" {_name(kind)}  ")
    picture.append("\n")
    return picture


def _kinds(timeline: Timeline) -> list[str]:
    """Return the kinds of work of a timeline, in order."""
    used = {span.action.kind for spans in timeline.spans.values() for span in spans}
    return [kind for kind in work_kinds() if kind in used]


def _name(kind: str) -> str:
    return ACTIONS[kind].legend or ACTIONS[kind].phase


def _chunks(timeline: Timeline) -> int:
    """Return the most stages of a role."""
    return max((len(_stages(spans)) for spans in timeline.spans.values()), default=0)


def _stages(spans: Iterable[TimeSpan]) -> list[int]:
    """Return a role's stages, in order."""
    return sorted({span.action.stage for span in spans if span.action.works})


def _shades(timeline: Timeline) -> dict[int, int]:
    """Return the index of each stage among the stages of its role, from 0."""
    return {stage: chunk for spans in timeline.spans.values() for chunk, stage in enumerate(_stages(spans))}


def _number(action: Action) -> str:
    """Return the microbatch of an action, with a ``+`` if it is one of the next step."""
    return f"{action.microbatch}{'+' * action.ahead}"


def _color(shades: Mapping[int, int], action: Action) -> str:
    colors = ACTIONS[action.kind].colors
    return colors[shades[action.stage] % len(colors)]


def _text_rows(
    timeline: Timeline, slot: float, width: int | None, label: Callable[[Action], str], fill: str
) -> Iterator[list[Cell]]:
    """Yield the rows of a picture as cells of text, each with the action that it shows."""
    work = {role: [span for span in spans if span.action.works] for role, spans in timeline.spans.items()}
    cell = 1 + max((len(label(span.action)) for spans in work.values() for span in spans), default=0)
    head = 1 + max(map(len, work), default=0)
    slot /= cell  # times are rounded to characters
    columns = _to_whole(timeline.makespan / slot)
    tails = {role: f" idle {_percent(timeline, role)}" for role in work}
    fits = columns if width is None else (width - head - max(map(len, tails.values()))) // cell * cell
    room = max(fits, cell)
    grid: dict[str, list[Cell]] = {}
    for role, spans in work.items():
        grid[role] = [(" ", None)] * columns
        for span in spans:
            first, end = _to_whole(span.start / slot), _to_whole(span.end / slot)
            text = label(span.action).ljust(end - first - 1, fill) + " "
            grid[role][first:end] = [(char, span.action) for char in text[: end - first]]
    for start in range(0, columns, room):
        if start:
            yield []
        for role, cells in grid.items():
            tail = tails[role] if start + room >= columns else ""
            yield [(role.ljust(head), None), *cells[start : start + room], (tail, None)]


def _to_whole(number: float) -> int:
    return floor(number + 0.5)


def _percent(timeline: Timeline, role: str) -> str:
    return f"{100 * timeline.idle_share(role):.0f} %"


_ROW, _GAP, _LEFT, _RIGHT, _TOP, _BOTTOM = 30, 8, 64, 92, 44, 40
_GREY = "#5f6b7a"


def svg(timeline: Timeline, title: str = "", unit: str = "") -> str:
    """Return an SVG picture: a lane for each role, a box with the microbatch for each piece of work, and an axis of
    time in ``unit`` (or in ``%`` of the makespan). Boxes have tooltips; pages can change colors by the classes of
    parts."""
    work = [span for spans in timeline.spans.values() for span in spans if span.action.works]
    makespan, shades = timeline.makespan or 1, _shades(timeline)
    shortest = min((span.end - span.start for span in work if span.end > span.start), default=makespan)
    scale = min(max(900 / makespan, 20 / shortest), 6000 / makespan)
    right, bottom = _LEFT + makespan * scale, _TOP + len(timeline.spans) * (_ROW + _GAP)
    by = 100 / makespan if unit == "%" else 1
    parts = [*_legend(timeline, title, right), *_axis(makespan * by, scale / by, bottom, unit)]
    for lane, role in enumerate(timeline.spans):
        y = _TOP + lane * (_ROW + _GAP)
        parts += [
            f'<rect class="lane" x="{_LEFT}" y="{y}" width="{makespan * scale:.1f}" height="{_ROW}" rx="3"'
            ' fill="#eef1f5"/>',
            _words(_LEFT - 10, y + _ROW / 2, role, "end", weight="600"),
            _words(right + 10, y + _ROW / 2, f"idle {_percent(timeline, role)}", "start", _GREY),
        ]
        parts.append('<g class="work" text-anchor="middle" dominant-baseline="central" fill="#1f2933">')
        for span in timeline.spans[role]:
            if span.action.works:
                parts += _box(span, _color(shades, span.action), scale, y, by, unit)
        parts.append("</g>")
    width, height = f"{right + _RIGHT:.0f}", f"{bottom + _BOTTOM:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="13">\n'
        f'<rect class="ground" width="100%" height="100%" fill="white"/>\n{chr(10).join(parts)}\n</svg>\n'
    )


def _words(x: float, y: float, text: str, anchor: str, color: str = "#1f2933", weight: str = "400") -> str:
    kind = ' class="quiet"' if color == _GREY else ""
    return (
        f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central" fill="{color}"'
        f' font-weight="{weight}">{escape(text)}</text>'
    )


def _box(span: TimeSpan, color: str, scale: float, y: float, by: float, unit: str) -> Iterator[str]:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    number = _number(span.action)
    yield (
        f'<rect x="{x + 0.5:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{_ROW}" rx="3"'
        f' fill="{color}">'
        f"<title>{span.action}: {span.start * by:.4g} to {span.end * by:.4g} {escape(unit)}</title></rect>"
    )
    if width >= 9 * len(number):
        yield f'<text x="{x + width / 2:.1f}" y="{y + _ROW / 2:g}">{number}</text>'


def _legend(timeline: Timeline, title: str, right: float) -> Iterator[str]:
    """Yield the title and, at the right end, the meaning of the colors: a shade for each chunk."""
    yield _words(_LEFT, 22, title, "start", weight="600")
    chunks = _chunks(timeline)
    x = right
    for kind in reversed(_kinds(timeline)):
        x -= 7 * len(_name(kind))  # about: text begins right behind its boxes, and the error is after it
        yield _words(x, 22, _name(kind), "start", _GREY)
        x -= 6
        for color in reversed(ACTIONS[kind].colors[:chunks]):
            x -= 14
            yield f'<rect x="{x:.1f}" y="15" width="14" height="14" rx="3" fill="{color}"/>'
        x -= 18


def _axis(makespan: float, scale: float, bottom: float, unit: str) -> Iterator[str]:
    """Yield ticks at round times, at most one every 60 pixels or so, and the unit at the end."""
    power = 10 ** floor(log10(makespan * 60 / (makespan * scale)))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * scale >= 60)
    for tick in range(int(makespan / step + 1e-9) + 1):
        x = _LEFT + tick * step * scale
        yield f'<path d="M{x:.1f} {_TOP} V{bottom}" class="tick" stroke="#d5dbe3"/>'
        yield _words(x, bottom + 14, f"{tick * step:g}", "middle", _GREY)
    yield _words(_LEFT + makespan * scale + 24, bottom + 14, unit, "start", _GREY)
