"""A build's report in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from parc.compiler.analysis.memory import MEMORY_KINDS
from parc.compiler.program.actions import PHASES
from parc.compiler.sizes.template import sizes_text
from parc.grammar.syntax import size_in_both, size_text

if TYPE_CHECKING:
    from parc.compiler.schedules.timeline import Timeline

DELAYED_WORDS = "gradients of a step are those at the weights before the last update"
"""The words for the algorithm of a schedule whose steps overlap."""


def fact_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a build's report, but for communication and checks, as names and sentences. A row without a
    name continues the one before."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in report["mesh"].items()) or "one rank"
    rows = [("mesh", f"{mesh} ({report['world']} rank{'s' * (report['world'] != 1)})"), *_view_rows(report),
            ("roles", ", ".join(report["roles"])), ("parameters", f"{report['parameters']:,}"),
            *_batch_rows(report)]  # fmt: skip
    if any(".." in size for size in report["sizes"].values()):
        rows.append(("sizes", f"{sizes_text(report['sizes'])}; bytes are those of the largest"))
    rows += _memory_rows(report)
    rows += under("experts", _expert_texts(report))
    rows += under("made again", _recompute_texts(report.get("recompute")))
    rows += under("a parameter", _state_texts(report["memory"]))
    rows += under("padding", _padding_texts(report["padding"]))
    if whole := report["stored_whole"]:
        names = f"{len(whole)} parameter{'s' * (len(whole) != 1)}"
        rows.append(("stored whole", f"{names}, {size_text(sum(whole.values()))}: no dim divides without much padding"))
    rows.append(("schedule", schedule_words(report)))
    for entry in report["numerics"]:
        saved = f", at most {size_text(entry['saved_bytes'])} less a step from a rank" if "saved_bytes" in entry else ""
        if entry["class"] == "delayed":
            rows.append(("algorithm", f"{DELAYED_WORDS} ({entry['directive']}, line {entry['line']})"))
            continue
        rows.append(("rounds", f"{entry['directive']} (line {entry['line']}{saved})"))
    if sent := report["sent_whole"]:
        names = f"{len(sent)} gradient{'s' * (len(sent) != 1)}, {size_text(sum(sent.values()))}"
        rows.append(("not rounded", f"{names}: no dim divides, or of another type or several stages"))
    return rows


def under(name: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return a row for each text, the first with the name."""
    return [(name if at == 0 else "", text) for at, text in enumerate(texts)]


def _view_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row for each view: the axes that a part of the model sees."""
    for view in report.get("views", ()):
        axes = ", ".join(f"{axis}={size}" for axis, size in zip(view["axes"], view["sizes"], strict=True))
        yield "", f"{', '.join(view['over'])} as {axes} in {', '.join(view['in'])}"


def _batch_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the row of a step's batch: samples of a microbatch on a rank x microbatches x data ranks."""
    if (batch := report["batch"]) is not None:
        samples, count, ranks = batch["samples"], batch["microbatches"], batch["data_ranks"]
        text = f"{samples:,} sample{'s' * (samples != 1)}: {samples // (count * ranks):,} a microbatch "
        yield "batch", f"{text}x {count} microbatch{'es' * (count != 1)} x {ranks} data rank{'s' * (ranks != 1)}"


def _memory_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of peak memory, of the most of each kind, of what is offloaded, and of the budget; roles that are
    alike share them."""
    shown = MEMORY_KINDS[:4] if report["purpose"] == "training" else ()
    alike: dict[tuple[str, ...], list[str]] = {}
    for entry in report["memory"]:
        held = ", ".join(f"{kind} {size_text(entry[kind])}" for kind in MEMORY_KINDS if entry[kind] or kind in shown)
        library, least = min(entry.get("peak_by_library", {"": 0}).items(), key=lambda pair: pair[1])
        less = f", {size_text(least)} where {library} multiplies float32" if library else ""
        away = ", ".join(f"{word} {size_text(size)}" for word, size in entry["offloaded"].items())
        kind = entry["moment"]["action"].strip("0123456789+")
        peak = f"peak {size_text(entry['peak_bytes'])} a rank (at that moment, in {kind}: {held}){less}"
        alike.setdefault((peak, most_text(entry), away and f"beside it {away}"), []).append(entry["role"])
    for (text, *others), roles in alike.items():
        yield "memory", f"{role_names(roles)}: {text}"
        yield from (("", other) for other in others if other)
    if (budget := report.get("budget")) is not None:
        left = budget - max(entry["peak_bytes"] for entry in report["memory"])
        yield "", f"budget {size_in_both(budget)}, of which {size_text(left)} are left"


def most_text(entry: Mapping[str, Any]) -> str:
    """Return words on the kinds of memory of which a rank holds more at another moment than at its peak, "" for
    none."""
    more = [kind for kind in MEMORY_KINDS if entry["most"][kind] > _MUCH_MORE * entry[kind] + 1024]
    words = ", ".join(f"{kind} {size_text(entry['most'][kind])}" for kind in more)
    return f"most at other moments: {words}" if words else ""


_MUCH_MORE = 1.01
"""The ratio of the most of a kind to that at the peak above which words name both."""


def _expert_texts(report: Mapping[str, Any]) -> Iterable[str]:
    """Yield lines about layers of experts: experts of a rank, and memory at the planned and at the worst load."""
    for row in report.get("experts", ()):
        each = f", {row['experts'] // row['ranks']} a rank" if row["ranks"] > 1 else ""
        moved = f"; {row['rate']:g} a step moves the router's bias, beyond the model's own code" if row["rate"] else ""
        if row["capacity"] is not None:
            moved += f"; capacity {row['capacity']:g} leaves out tokens that come late, beyond the model's own code"
        layers = f"{row['layers']} layer{'s' * (row['layers'] != 1)}"
        yield f"{row['modules']}: {layers} of {row['experts']}{each}, {row['top']} a token{moved}"
    split = [row for row in report.get("experts", ()) if row["ranks"] > 1 and row["capacity"] is None]
    if split:
        load = max(row["load"] for row in split)
        most = size_text(report["experts_peak_bytes"])
        yield f"memory is that of a rank with {load:g} times the mean of their rows, and {most} with all that can come"


def _recompute_texts(chosen: Mapping[str, Any] | None) -> Iterable[str]:
    """Yield lines about the blocks that a `recompute` line with `fit` has chosen, and their cost; roles that are alike
    share a line."""
    texts = []
    for row in chosen["roles"] if chosen is not None else ():
        blocks = row["kept"] + row["selective"] + row["full"]
        words = [f"{row[key]} {what}" for key, what in (("full", "in full"), ("selective", "but for products"))
                 if row[key]]  # fmt: skip
        cost = f", {row['again']:+.1%} of a step's multiply-adds" if words else ""
        text = f"{' and '.join(words) or 'none'} of {blocks} block{'s' * (blocks != 1)}{cost}"
        if (more := row["next_peak_bytes"]) is not None:
            text += f"; with less, a rank would need {size_text(more)}"
        texts.append((row["role"], text))
    yield from (f"{roles}{text}" for text, roles in _of_roles(texts).items())
    if chosen is not None:
        yield f"so that a rank needs at most {size_text(chosen['fit'])} (line {chosen['line']})"


def _state_texts(entries: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Return lines about the bytes of training state that a rank has for each parameter; roles that are alike share a
    line.

    >>> state = {"parameters": 400, "weights": 200, "gradients": 0, "optimizer": 800}
    >>> _state_texts([{"role": "stage0", "of": 100, "state": state}])
    ['14 bytes of state a rank (parameters 4, copies to compute with 2, optimizer 8), 1,400 in all']
    """
    texts = []
    for entry in (entry for entry in entries if entry["of"]):
        parts = {word: size / entry["of"] for word, size in entry["state"].items() if size}
        words = ", ".join(f"{_STATE_WORDS.get(word, word)} {share:.4g}" for word, share in parts.items())
        text = f"{sum(parts.values()):.4g} bytes of state a rank ({words}), {sum(entry['state'].values()):,} in all"
        texts.append((entry["role"], text))
    return [f"{roles}{text}" for text, roles in _of_roles(texts).items()]


_STATE_WORDS = {"weights": "copies to compute with"}
"""The words for parts of the training state whose names say too little."""


def _padding_texts(entries: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Return lines about padded values. Alike values of numbered modules share a line."""
    alike: dict[str, int] = {}
    for entry in entries:
        name = ".".join("*" if word.isdigit() else word for word in entry["value"].split("."))
        line = f", line {entry['line']}" if entry["line"] else ""
        text = f"{name}: dim {entry['dim']} of {entry['from']:,} entries to {entry['to']:,}{line}"
        alike[text] = alike.get(text, 0) + 1
    return [text + (f" (x{count})" if count > 1 else "") for text, count in alike.items()]


def schedule_words(report: Mapping[str, Any]) -> str:
    """Return the schedule in words."""
    pipeline = report["pipeline"]
    count, stages = pipeline["microbatches"], len(report["stages"])
    words = f"{pipeline['schedule']}, {count} microbatch{'es' * (count != 1)}"
    return words if stages == 1 else f"{words}, {stages} stages, {idle_words(report)}"


def idle_words(report: Mapping[str, Any]) -> str:
    """Return the idle share of ranks in a step; the least and the largest if they differ."""
    least, most = (f"{100 * choose(report['idle'].values()):.0f}" for choose in (min, max))
    return f"{least}% idle" if least == most else f"{least} to {most}% idle"


def floor_words(timeline: Timeline, *, in_percent: bool) -> str:
    """Return the most idle time of a rank beside the floor of schedules, in the unit of the timeline or in percent."""
    idle, floor = max(map(timeline.idle, timeline.spans)), timeline.floor
    most, least = f"{idle:g} of {timeline.makespan:g}", f"{floor:g}"
    if in_percent:
        most, least = (f"{100 * time / timeline.makespan:.0f}%" for time in (idle, floor))
    if timeline.overlaps:
        return f"ranks are idle for up to {most}; each begins the next step before it ends one, so there is no floor"
    formula = {"split": "(p - 1)F, as no backward is whole", "whole": "(p - 1)(F + B), as backwards are whole",
               "mixed": "(p - 1)F, as backwards may be split: some are"}[timeline.phases]  # fmt: skip
    return f"ranks are idle for up to {most}; the floor of a synchronous step is {least}, {formula}"


def unit_of(report: Mapping[str, Any]) -> str:
    """Return the unit of a build's work: a step of training, or a batch of predictions."""
    return "step" if report["purpose"] == "training" else "batch"


def _of_roles(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return each text with the names of its roles; without them if all roles share one text.

    >>> _of_roles([("pp0", "all"), ("pp1", "all")]), _of_roles([("pp0", "all"), ("pp1", "none"), ("pp2", "none")])
    ({'all': ''}, {'all': 'pp0: ', 'none': 'pp1..2: '})
    """
    alike: dict[str, list[str]] = {}
    for role, text in texts:
        alike.setdefault(text, []).append(role)
    return {text: f"{role_names(roles)}: " if len(alike) > 1 else "" for text, roles in alike.items()}


def role_names(roles: Sequence[str]) -> str:
    """Return the names of roles of one axis, such as `pp0..3`."""
    name = roles[0].rstrip("0123456789")
    return name + number_ranges(role.removeprefix(name) for role in roles)


def number_ranges(words: Iterable[str | int]) -> str:
    """Return numbers in order as a label.

    >>> number_ranges(["0", "1", "2", "3", "5", "7", "8"])
    '0..3,5,7..8'
    """
    runs: list[list[int]] = []
    for number in map(int, words):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def across_text(report: Mapping[str, Any]) -> str:
    """Return words on the bytes that go to other nodes; "" without a `node` line."""
    if (across := report.get("across_nodes")) is None:
        return ""
    saved = across["in_one_level"] - across["bytes"]
    less = f", {size_text(saved)} less than in one level" if saved > 0 else ""
    return f"{size_text(across['bytes'])} a {unit_of(report)} from the NIC of a rank{less}"


def across_table(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of what goes to other nodes, with its head: each axis that crosses nodes, where its groups lie,
    what a NIC sends, how much of it work hides, and by which algorithms."""
    head = ("axis", "ranks", "a NIC sends", "beside work", "as")
    rows = [
        (row["axis"], f"{row['ranks']:,} on {row['nodes']:,} nodes", size_text(row["bytes"]),
         size_text(row["hidden_bytes"]), ", ".join(row["algorithms"]))
        for row in report.get("across_nodes", {}).get("axes", ())
    ]  # fmt: skip
    return [head, *rows] if rows else []


def check_texts(report: Mapping[str, Any]) -> list[str]:
    """Return sentences about the checks of a build: outcomes, and the errors of its numbers."""
    texts = [", ".join(f"{name} {how}" for name, how in report["checks"].items())]
    if certificate := report.get("certificate"):
        words, by = certificate["missing"] or "; ".join(certificate["proved"]), f"version {certificate['version']}"
        texts.append(f"equality: {f'not certified: {words}' if certificate['missing'] else f'{words} ({by})'}")
    if "numbers" in report:
        numbers = report["numbers"]
        units = "steps" if unit_of(report) == "step" else "batches"
        where, error = f"{numbers['steps']} {units} of all ranks on {numbers['on']}", largest_error(numbers)
        texts.append(f"numbers: {where}, largest relative error {error:.1e} (at most {numbers['tolerance']:.0e})")
        if module := numbers.get("module"):
            error = max(numbers[f"eager_{kind}"] for kind in ("loss", "gradient", "buffer"))
            texts.append(f"module: {module['compared']}, largest relative error {error:.1e} beside the captured graph")
            texts += [f"        {note}" for note in module["notes"]]
        if margin := numbers.get("margin"):
            texts.append(f"top-k: the closest scores that it tells apart differ by {margin['apart']:.1e} of the "
                         f"largest, in {margin['at']}")  # fmt: skip
    return texts


def largest_error(numbers: Mapping[str, Any]) -> float:
    """Return the largest relative error of losses, gradients, parameters and outputs beside the captured graph's."""
    return max(float(numbers.get(kind, 0)) for kind in ("loss", "gradient", "parameter", "output"))


def stage_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table of a pipeline's stages, with its head: stage numbers, coordinates of ranks, layers, parameters,
    FLOPs of a step on a rank, and its idle share. Alike stages that follow each other share a row; empty without
    stages."""

    def facts(row: Mapping[str, Any]) -> tuple[str, ...]:
        idle = f"{report['idle'][row['role']]:.0%}"
        return str(row["layers"]), f"{row['parameters']:,}", flops_text(row["flops"]), idle

    if not (axis := report["pipeline"].get("axis", "")):
        return []
    rows: list[tuple[str, ...]] = [("stage", axis, "layers", "parameters", f"a rank's {unit_of(report)}", "idle")]
    for words, alike in groupby(report["stages"], facts):
        places = [(row["stage"], int(row["role"].removeprefix(axis))) for row in alike]
        rows.append((*(number_ranges(sorted({*numbers})) for numbers in zip(*places, strict=True)), *words))
    return rows


def modules_text(modules: Iterable[str], most: int = 3) -> str:
    """Return names of modules, at most so many, with numbered ones that differ in numbers alone as one.

    >>> modules_text(["layers.1.up", "layers.2.up", "layers.5.up"]), modules_text(["head"]), modules_text([""])
    ('layers.1..2,5.up', 'head', '')
    >>> modules_text(["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"])
    'norm1.weight, norm1.bias, norm2.weight and 1 more'
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for module in dict.fromkeys(modules):
        words = module.split(".")
        alike.setdefault(tuple("*" if word.isdigit() else word for word in words), []).append(words)
    names = [
        ".".join(number_ranges(sorted({*map(int, column)})) if word == "*" else word
                 for word, column in zip(words, zip(*group, strict=True), strict=True))
        for words, group in alike.items()
    ]  # fmt: skip
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def flops_text(count: float) -> str:
    """Return a number of floating-point operations with a prefix of 1000s.

    >>> flops_text(1_270_000_000_000), flops_text(640)
    ('1.27 TFLOP', '640 FLOP')
    """
    power = min((len(str(int(count))) - 1) // 3, 6)
    return f"{count / 1000**power:.4g} {'kMGTPE'[power - 1] if power else ''}FLOP"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one rank in one step: the number of their tensors, the bytes that it sends for them, how many
    of these bytes are overlapped with compute, and the number of messages in which the tensors travel."""

    count: int = 0
    bytes: int = 0
    hidden: int = 0
    messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.count + other.count, self.bytes + other.bytes, self.hidden + other.hidden,
            self.messages + other.messages,
        )  # fmt: skip


def traffic_by(entries: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], Traffic]:
    """Return the traffic of a rank in a step, grouped by ``keys`` of its collectives such as ``axis``; of several roles
    that of the role that sends most."""
    sums: dict[tuple[Any, ...], dict[str, Traffic]] = {}
    begun = set[tuple[Any, ...]]()
    for entry in entries:
        key = tuple(entry[key] for key in keys)
        roles, message = sums.setdefault(key, {}), (key, entry["role"], entry["message"])
        count, size = entry["count_per_step"], entry["count_per_step"] * entry["wire_bytes"]
        traffic = Traffic(count, size, size * entry["hidden"], count * (message not in begun))
        roles[entry["role"]] = roles.get(entry["role"], Traffic()) + traffic
        begun.add(message)
    return {key: max(roles.values(), key=_sent) for key, roles in sums.items()}


def _sent(traffic: Traffic) -> tuple[int, int, int]:
    """Return what orders roles by the traffic of their ranks."""
    return traffic.bytes, traffic.hidden, traffic.count


def traffic_rows(entries: Collection[Mapping[str, Any]]) -> list[tuple[str, str, str, str, str, Traffic]]:
    """Return rows of a rank's traffic in one step: axis, phase, operator, use, the role that sends most of it, its
    traffic; sorted by phase and axis."""
    axes = list(dict.fromkeys(entry["axis"] for entry in entries))
    sent: dict[tuple[str, str, str, str], dict[str, Traffic]] = {}
    for (axis, phase, op, carries, role), traffic in traffic_by(
        entries, "axis", "phase", "op", "carries", "role"
    ).items():
        sent.setdefault((axis, phase, op, carries), {})[role] = traffic
    order = sorted(sent, key=lambda key: (PHASES.index(key[1]), axes.index(key[0])))
    return [(*key, *max(sent[key].items(), key=lambda of_role: _sent(of_role[1]))) for key in order]


def in_words(kinds: Iterable[str]) -> list[str]:
    """Return one sentence for each different placement on an axis, given in its short form.

    >>> in_words(["S(2)", "S(0,3)", "S(2)"])
    ['S(2): dim 2 is split', 'S(0,3): dim 0 is 3 equal groups one after the other, each of which is split']
    """
    return [_kind_words(kind) for kind in dict.fromkeys(kinds)]


def _kind_words(kind: str) -> str:
    match = _SPLIT.fullmatch(kind)
    if match is None:
        return _KIND_WORDS.get(kind, kind)
    dim, groups = match.groups()
    if groups is None:
        return f"{kind}: dim {dim} is split"
    how = f"groups of {groups.replace('+', ' and ')} parts" if "+" in groups else f"{groups} equal groups"
    return f"{kind}: dim {dim} is {how} one after the other, each of which is split"


_SPLIT = re.compile(r"S\((\d+)(?:,([\d+]+))?\)")
_KIND_WORDS = {
    "P": "P: every rank has a part of a sum, which is added up over the ranks",
    "R": "R: every rank has the same value, and uses it with different data",
    "I": "I: every rank has the same value, and all do the same with it",
}
