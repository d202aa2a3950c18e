"""Warnings of a build about its plan and model: unasked communication, dear lines, untrained or rounded weights; and
guesses at the lines that were meant, after which a plan needs no unasked gather.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, permutations
from typing import Any

from parc.compiler.analysis.across_nodes import sent_across
from parc.compiler.analysis.communication import communication_table
from parc.compiler.analysis.liveness import local_bytes
from parc.compiler.capture.model_calls import forward_text, made_in_eval, passed_on
from parc.compiler.initial.files import WeightsError, open_weights, shown_faults, state_tensors
from parc.compiler.layout.collectives import RINGS
from parc.compiler.layout.mesh import Mesh, UnevenNodes, node_levels
from parc.compiler.layout.placement import AxisType, Split
from parc.compiler.ops.precision import is_narrow
from parc.compiler.plan.layouts import SplitWeights
from parc.compiler.plan.plan import Plan, read_plan
from parc.compiler.program.actions import ACTIONS, FORWARD
from parc.compiler.program.binding import PARAMETERS
from parc.compiler.program.blocks import starred
from parc.compiler.resolve.in_graph import RING_METHODS
from parc.compiler.sizes.size_range import BATCH
from parc.compiling.compiled import Compiled
from parc.compiling.microbatches import averaged_term
from parc.compiling.request import ask
from parc.compiling.size_ranges import fixed, line_span
from parc.grammar.codes import (
    MADE_IN_EVAL,
    MEANT_OTHERWISE,
    NODE_ORDER,
    NOT_REACHED,
    PASSED_ON,
    ROUNDED_UPDATES,
    SMALL_BUCKET,
    UNASKED_RESHARD,
    UNREAD_WEIGHTS,
    WHOLE_KEYS,
    WHOLE_OUTPUTS,
    WITHOUT_RULE,
)
from parc.grammar.diagnostics import Diagnostic, Label, PlanError, Severity
from parc.grammar.nearest import did_you_mean, listed
from parc.grammar.source import Source, Span
from parc.grammar.syntax import size_text
from parc.mesh_order import cheaper_orders
from parc.passes.pipeline import Trials, names_of
from parc.passes.placing.partition import Reshard
from parc.report_words import in_words

# ---- warnings


_warning = partial(Diagnostic, severity=Severity.WARNING)
_MOST_AXES = 8
"""The number of a mesh's axes from which their orders are too many to try."""
_GATHERS_SHOWN = 3
"""The number of gathers that are named beside the line that causes them."""
_HF_FOLDER = "parc.hf:folder"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""The files in which models are saved."""
_Order = tuple[tuple[str, int], ...]
"""The axes of a mesh with their sizes."""


def warnings_of(compiled: Compiled) -> tuple[Diagnostic, ...]:
    """Return every warning of a compiled plan: those of its lines and of resolving, then those of each check below."""
    checks = (_passed_on, _unread_weights, _not_reached, _in_eval, _whole_keys, _whole_outputs, _node_order, _reshards,
              _rules, _averaged, _rounded_updates, _large)  # fmt: skip
    warnings = chain.from_iterable(check(compiled) for check in checks)
    return (*compiled.plan.warnings, *compiled.resolved.warnings, *compiled.resolved.axes.notes, *warnings)


def _reshards(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of gathers and exchanges that no line asks for, equal ones of repeated blocks together; or of the lines that
    cause all of them, if these are found."""
    groups: dict[tuple[str, str, str, int], list[Reshard]] = {}
    for reshard in unasked_gathers(compiled.plan, compiled.built.reshards):
        key = (reshard.cause.source, str(reshard.source), str(reshard.result), reshard.cause.plan)
        groups.setdefault(key, []).append(reshard)
    texts = [_gather_text(group) for group in groups.values()]
    meant = find_meant(compiled)
    if meant is not None:
        yield _meant_otherwise(meant, texts)
        return
    for (_, source, result, line), text in zip(groups, texts, strict=True):
        first = groups[_, source, result, line][0]
        span = _claim_span(compiled, first)
        zero = f"`{_zero_line(first.axis, first.value)}` in place of the line gathers the weight before each use; or "
        if first.value not in compiled.build.types or isinstance(first.result, Split):
            zero = ""
        yield _warning(
            UNASKED_RESHARD, text, Label(span) if span else None, notes=tuple(in_words((source, result))),
            help=f"{zero}split the value in the same way where it is made and where it is read; or split neither over"
            " this axis; or keep the plan, if you accept the cost",
        )  # fmt: skip


def _zero_line(axis: str, parameter: str) -> str:
    """Return the `zero 3` line for the weights of a module and of its like in other blocks."""
    return f"zero 3 over {axis} on {starred(parameter.rpartition('.')[0])}"


def _whole_outputs(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of layers whose outputs a line gathers, where gathering their weights would send fewer bytes."""
    mesh, types, names = compiled.mesh, compiled.build.types, names_of(compiled.captured)
    gathers = dict[tuple[int, str], list[Reshard]]()
    for reshard in compiled.built.reshards:
        if reshard.whole and isinstance(reshard.source, Split):
            gathers.setdefault((reshard.cause.plan, reshard.axis), []).append(reshard)
    works = [p.main.bound(*PARAMETERS, "weight") for p in compiled.build.programs.values() if ACTIONS[p.action].works]
    for (line, axis), gathered in gathers.items():
        outputs, weights, times = sum(reshard.bytes for reshard in gathered), 0, compiled.plan.microbatches
        for reshard in gathered:
            named = (name for name in (*types, *names.tied) if name.rpartition(".")[0] == reshard.cause.module)
            for name in {names.canonical(name) for name in named}:
                if {*mesh.parts(axis)} & {*types[name].placement.split_axes()}:
                    entries = math.prod(types[name].shape) // mesh.size(axis) * sum(name in read for read in works)
                    weights += entries * min(types[name].dtype.itemsize, reshard.itemsize)
        if 0 < weights < outputs:
            sent, less = (size_text(size * (mesh.size(axis) - 1) * times) for size in (outputs, weights))
            module, many = gathered[0].cause.module, f" and {len(gathered) - 1} more" if len(gathered) > 1 else ""
            yield _warning(
                WHOLE_OUTPUTS, f"a rank sends {sent} a step to gather the outputs of `{module}`{many}, and would send "
                f"{less} to gather the weights", Label(span) if (span := line_span(compiled.plan, line)) else None,
                help=f"`{_zero_line(axis, f'{module}.')}` in place of the line that splits the weights does that; each "
                "rank then multiplies all columns",
            )  # fmt: skip


def _node_order(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of the order of the mesh's axes if another order at least halves the bytes that a rank sends to other nodes,
    in all or not overlapped with compute, and raises neither."""
    plan, mesh, node = compiled.plan, compiled.mesh, compiled.plan.node
    if plan.cluster is not None:
        yield from cheaper_orders(compiled)
        return
    if node is None or len(plan.mesh.axes) >= _MOST_AXES:
        return
    counts, facts = Counter[tuple[Any, ...]](), ("role", "axis", "hidden", "op", "bytes", "ranks")
    for role in compiled.build.roles.values():
        for row in (row for row in communication_table(role) if row["carries"] != "numbers"):
            counts[tuple(row[key] for key in facts)] += row["count_per_step"]
    rows = [{**dict(zip(facts, values, strict=True)), "count_per_step": count} for values, count in counts.items()]
    costs: dict[_Order, tuple[int, int]] = {}
    for order in permutations(plan.mesh.axes):
        places = [name for name, _ in order]
        with suppress(UnevenNodes):
            node_levels(replace(plan.mesh, axes=order), node.ranks)
            if all([*line.view.over] == sorted(line.view.over, key=places.index) for line in plan.views):
                parts = [part for name in places for part in mesh.parts(name)]
                costs[order] = _most_across(rows, mesh, node.ranks, parts)
    current = costs[plan.mesh.axes]
    best = min((order for order, cost in costs.items() if cost[0] <= current[0] and cost[1] <= current[1]),
               key=lambda order: sum(costs[order]))  # fmt: skip
    if any(2 * less <= many > 0 for less, many in zip(costs[best], current, strict=True)):
        total, waiting_text, less, rest = map(size_text, (*current, *costs[best]))
        yield _warning(
            NODE_ORDER, f"the NIC of a rank sends {total} a step to other nodes, {waiting_text} of them while nothing "
            "is computed", Label(plan.mesh_spans[best[-1][0]]),
            help=f"write `mesh {', '.join(f'{axis}={size}' for axis, size in best)}`: {less}, and {rest} of them while "
            "nothing is computed",
        )  # fmt: skip


def _most_across(rows: Sequence[Mapping[str, Any]], mesh: Mesh, node: int, order: Sequence[str]) -> tuple[int, int]:
    """Return the most bytes that the NIC of a rank sends to other nodes with another order of axes, and the most of
    these that no work hides."""
    every, waiting = Counter[str](), Counter[str]()
    for (role, _, hidden), size in sent_across(rows, mesh, node, order).items():
        every[role] += size
        waiting[role] += 0 if hidden else size
    return max(every.values(), default=0), max(waiting.values(), default=0)


def _gather_text(reshards: Sequence[Reshard]) -> str:
    """Return words on equal reshards: what the first one moves, how often, and where."""
    first = reshards[0]
    op = "all_to_all" if isinstance(first.result, Split) else "all_gather"
    many = f"{len(reshards)} times, first " if len(reshards) > 1 else ""
    inside = f"`{first.cause.module}`" if first.cause.module else "the model itself"
    where = f"in {inside}" + (f" at {first.cause.source}" if first.cause.source else "")
    cost = f"{first.source} to {first.result}, {size_text(first.bytes)} a rank"
    return f"{op} over `{first.axis}` of `{first.value}` ({cost}) {many}{where}"


def _meant_otherwise(meant: Meant, texts: Sequence[str]) -> Diagnostic:
    (span, text), *others = meant.lines
    whose = "these lines cost" if others else "the line costs"
    more = [f"and {len(texts) - _GATHERS_SHOWN} more"] if len(texts) > _GATHERS_SHOWN else []
    return _warning(
        MEANT_OTHERWISE, f"{whose} {size_text(meant.bytes)} a rank in gathers and exchanges of a forward",
        Label(span, f"probably meant: `{_spaced(text)}`"),
        tuple(Label(other, f"and `{_spaced(change)}`") for other, change in others),
        help=f"the proposed line{'s' * bool(others)} need{'s' * (not others)} no gather; keep your"
        f" line{'s' * bool(others)} if you accept the cost",
        notes=(*texts[:_GATHERS_SHOWN], *more),
    )  # fmt: skip


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _claim_span(compiled: Compiled, reshard: Reshard) -> Span | None:
    """Return the line of the plan that causes a reshard. If an include does, and a line of the included file places a
    weight of the module, it is that line."""
    line, module = reshard.cause.plan, reshard.cause.module
    seeds = (seed for seed in compiled.resolved.seeds if seed.span.root.line == line and seed.axis == reshard.axis)
    near = [seed.span for seed in seeds if module and seed.value.startswith(f"{module}.")]
    return near[0] if near and near[0].source.included is not None else line_span(compiled.plan, line)


def _rules(compiled: Compiled) -> Iterator[Diagnostic]:
    for op in compiled.built.without_rule:
        cost = sum(r.bytes for r in compiled.built.reshards if r.reader == op)
        yield _warning(
            WITHOUT_RULE, f"`{op}` has no sharding rule: its operands are gathered whole, {size_text(cost)} a rank",
            help=f'parc.register_rule("{op}", "...") in the module of the model',
        )  # fmt: skip


def _passed_on(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of inputs that go into ``**kwargs``: only the model's code decides whether it reads them."""
    module = compiled.recorded.module
    parameters = inspect.signature(module.forward).parameters
    read = {name for name, node in compiled.captured.placeholders("input").items() if node.users}
    free = parameters.keys() - {line.parameter.partition(".")[0] for line in compiled.plan.inputs}
    for name, place in passed_on(module, compiled.lines).items():
        line = next(line for line in compiled.plan.inputs if line.name == name)
        message = f"`{name}` is passed as `{place}=`, which {forward_text(module)} does not name"
        unread = name not in read
        yield Diagnostic(
            PASSED_ON, f"{message}, and nothing reads it" if unread else message, Label(line.arguments.span("name")),
            help=did_you_mean(place, free, "remove the line, or look up the model's name for it") if unread else "",
            severity=Severity.WARNING if unread else Severity.NOTE,
        )  # fmt: skip


def _unread_weights(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of a folder of weights of which a plan that trains reads the configuration alone. It is a note where the
    weights do not fit the model, as where arguments change its layers."""
    plan, place = compiled.plan, str(dict(compiled.plan.model.values).get("path", ""))
    if plan.model.callable != _HF_FOLDER or plan.init is not None or not plan.trains:
        return
    folder = compiled.folder / place
    files = sorted(path.name for kind in _WEIGHTS for path in folder.glob(kind))
    if not files:
        return
    faults: Sequence[str] = ()
    line = f'init from "{place}"'
    try:
        weights, wanted = open_weights(folder), state_tensors(compiled.recorded.module, compiled.captured.aliases)
        if faults := weights.faults(wanted):
            line, faults = f"{line} rounded", replace(weights, rounded=True).faults(wanted)
        help_ = f"write `{line}`" if not faults else "they are of another model, so `init from` cannot read them"
    except WeightsError:  # of another form
        help_ = f"`save_pretrained` of transformers writes safetensors, and `{line}` reads these"
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    yield Diagnostic(
        UNREAD_WEIGHTS, f"weights are drawn at random: the plan reads the configuration in `{place}`, and not"
        f" `{files[0]}`{more}", Label(plan.model.span), notes=shown_faults(faults)[:_GATHERS_SHOWN],
        help=f"{help_}; if random weights are meant, name a folder with `config.json` alone",
        severity=Severity.NOTE if faults else Severity.WARNING,
    )  # fmt: skip


def _not_reached(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of weights that are not trained because the loss does not depend on them."""
    trained = compiled.captured.trainable()
    names = [name for name in compiled.captured.placeholders("parameter") if name not in trained | compiled.frozen]
    if names:
        which = f"{len(names)} weights, first `{names[0]}`, are" if len(names) > 2 else listed(names)
        which += "" if len(names) > 2 else " are" if len(names) > 1 else " is"
        module = names[0].rpartition(".")[0] or names[0]
        yield _warning(
            NOT_REACHED, f"{which} not trained: the loss does not depend on {'them' if len(names) > 1 else 'it'}",
            Label(compiled.plan.loss.span),
            help=f"add a term to the loss that reads what they compute, or write `freeze {module}` if that is meant",
        )  # fmt: skip


def _in_eval(compiled: Compiled) -> Iterator[Diagnostic]:
    """Note that a model which its callable returned in `eval()` is trained in `train()`."""
    if compiled.plan.trains and made_in_eval(compiled.recorded.module):
        message = "the model is made in `eval()`; it is trained in `train()`, with dropout and statistics of batches"
        help_ = "to train without these, let the callable set the model's parts to `eval()` and the model itself to"
        help_ += " `train()`: `for part in model.children(): part.eval()`"
        label = Label(compiled.plan.model.span)
        yield Diagnostic(MADE_IN_EVAL, message, label, help=help_, severity=Severity.NOTE)


def _averaged(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of terms of the loss whose mean over microbatches may not be their value for the whole batch."""
    for number in compiled.built.averaged:
        yield averaged_term(compiled, number)


def _rounded_updates(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of trained weights without a float32 master weight."""
    values = {name: type_ for name, type_ in compiled.build.types.items() if name not in compiled.frozen}
    in_order = [name for name in compiled.captured.placeholders("parameter") if name in values]
    names = [name for name in in_order if is_narrow(values[name].dtype)]
    if names:
        name, dtype = names[0], str(values[names[0]].dtype).removeprefix("torch.")
        which = f"{len(names)} weights, first `{name}`, are" if len(names) > 1 else f"`{name}` is"
        yield _warning(
            ROUNDED_UPDATES, f"{which} updated in {dtype}",
            Label(compiled.plan.optimizer.span),
            help="`precision bf16` keeps a float32 copy of every weight, and updates that",
        )  # fmt: skip


def _whole_keys(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of attentions that gather keys though a `context` line asks for a ring."""
    roles = [program for role in compiled.build.roles.values() for program in role.programs.values()]
    functions = [(program, each) for program in roles if program.action == FORWARD for each in program.functions]
    for ring in compiled.request.placing.context:
        sizes: dict[str, int] = {}
        axes = ",".join(compiled.mesh.parts(ring.axis))
        for program, function in functions if ring.method in RING_METHODS else ():
            for line in (line for line in function.lines if line.op == RINGS["parc.ring_attention"].attention):
                gathers = [function.makers[item.name] for item in line.args[1:3] if item.name in function.makers]
                if ring.names(line) and any(one.op == "parc.all_gather" and one.args[1] == axes for one in gathers):
                    size = sum(local_bytes(one.made[0].type, program) for one in gathers)
                    sizes[line.origin.module] = size
        if sizes:
            module, size = max(sizes.items(), key=lambda item: item[1])
            span = next(line.span for line in compiled.plan.context if line.span.root.line == ring.line)
            where = f"`{module}`" if module else "the model itself"
            yield _warning(
                WHOLE_KEYS, f"attention in {where} holds the keys of whole sequences, {size_text(size)} a rank",
                Label(span), notes=("another attention or another operator reads them too",),
                help="let one attention alone read the keys, or write `using ulysses`; `using gather` accepts the cost",
            )  # fmt: skip


def _large(compiled: Compiled) -> Iterator[Diagnostic]:
    """Warn of tensors that are larger than the plan's bucket."""
    line = next((line for line in compiled.plan.statements if line.verb.text == "bucket"), None)
    if line is None:
        return
    sizes: dict[str, int] = {}
    for program in compiled.build.programs.values():
        values = program.main.values()
        for sent in (sent for sent in program.main.lines if "message" in dict(sent.kwargs)):
            size = max(local_bytes(values[name].type, program) for name in (*sent.uses, sent.made[0].name))
            if size > compiled.plan.bucket:
                sizes[sent.origin.module] = max(size, sizes.get(sent.origin.module, 0))
    if sizes:
        module, size = max(sizes.items(), key=lambda item: item[1])
        many = f"tensors of {len(sizes)} modules are" if len(sizes) > 1 else "a tensor is"
        yield _warning(
            SMALL_BUCKET, f"{many} larger than the bucket: up to {size_text(size)}, of `{module}`", Label(line.span),
            help="each of them is a message of its own; a larger bucket lets it travel with others",
        )  # fmt: skip


# ---- guesses at lines that were meant otherwise

# A wrong placement causes gathers elsewhere, mostly at lines that are right. So each ``column`` and ``row`` line is
# changed as people mistake them (the other verb, other groups of ``rows``), and placements are propagated again on the
# same graph.


_MOST_OPERATORS = 3000
"""The most operators of a graph for which changes are tried: each try propagates placements through the whole graph."""
_TOGETHER = 2
"""The most lines that are changed together."""
_MOST_LEFT = 0.75
"""The largest share of the traffic that may remain after changing a second line, if the first change removed all
unasked gathers already."""
Edits = tuple[tuple[int, str], ...]
"""The numbers of changed lines, each with its new text."""


@dataclass(frozen=True)
class Meant:
    """Lines of a plan with the lines that were probably meant, and the bytes that a rank gathers for them in a
    forward."""

    lines: tuple[tuple[Span, str], ...]
    bytes: int


def unasked_gathers(plan: Plan, reshards: Sequence[Reshard]) -> list[Reshard]:
    """Return the reshards that gather or exchange a split value though no line of the plan asks for it. A ``context``
    line asks for those of attention's keys."""
    split = {line.axis.text for line in plan.context}
    return [
        reshard
        for reshard in reshards
        if isinstance(reshard.source, Split) and not reshard.asked and not (reshard.attends and reshard.axis in split)
    ]


def find_meant(compiled: Compiled) -> Meant | None:
    """Return the change of one or two lines after which no value is gathered or exchanged unasked; None if no change
    does that, or if the plan needs none."""
    cost = _gathered(compiled.plan, compiled.built.reshards)
    if not cost or len(compiled.captured.graph.nodes) > _MOST_OPERATORS:
        return None
    plan = compiled.plan
    best, lines = _bytes_sent(compiled.built.reshards), dict[int, str]()
    groups = {group for reshard in unasked_gathers(plan, compiled.built.reshards)
              for kind in (reshard.source, reshard.result) for group in _groups(kind)}  # fmt: skip
    left, trials = cost, Trials(compiled.captured)
    while len(lines) < _TOGETHER:
        tries = [(_bytes_sent(reshards), len(edits), edits, changed, reshards)
                 for edits, changed in _changes(plan, groups)
                 if (reshards := _tried(compiled, changed, trials)) is not None]  # fmt: skip
        none: tuple[int, int, Edits, Plan, Sequence[Reshard]] = (best, 0, (), plan, ())
        sent, _, edits, changed, reshards = min(tries, key=lambda tried: tried[:3], default=none)
        if sent >= best * (1 if left else _MOST_LEFT):
            break
        best, plan, left = sent, changed, _gathered(changed, reshards)
        lines.update(edits)
    spans = [(span, text) for line, text in lines.items() if (span := line_span(compiled.plan, line)) is not None]
    return Meant(tuple(spans), cost) if spans and not left else None


def _groups(kind: AxisType) -> set[int]:
    """Return the number of equal groups of a dim that a placement splits, as a set of at most one."""
    return {kind.outer} - {1} if isinstance(kind, Split) and isinstance(kind.outer, int) else set()


def _gathered(plan: Plan, reshards: Sequence[Reshard]) -> int:
    return sum(reshard.bytes for reshard in unasked_gathers(plan, reshards))


def _bytes_sent(reshards: Sequence[Reshard]) -> int:
    """Return the bytes of all reshards of a rank."""
    return sum(reshard.bytes for reshard in reshards)


def _changes(plan: Plan, groups: set[int]) -> Iterator[tuple[Edits, Plan]]:
    """Yield the plan with one of its lines changed, for each way to mistake that line; with the verbs of two lines in
    succession exchanged; and with a `vocab` line in the place of the first line that splits samples over its axis,
    which split the lookups too."""
    written = [
        (span, line) for line in plan.placements if (span := line.arguments.statement.span).source is plan.source
    ]
    weights = [(span, line) for span, line in written if isinstance(line, SplitWeights)]
    lines = [(span, line) for span, line in weights if line.style in ("column", "row") and not line.pad]
    changes: list[dict[Span, str]] = [
        {span: text} for span, line in lines for text in _mistakes(span.text, line, groups)
    ]
    for (span, line), (next_span, next_line) in pairwise(lines):
        if line.style != next_line.style and line.axis.text == next_line.axis.text:
            changes.append({span: _other_word(span.text, line), next_span: _other_word(next_span.text, next_line)})
    for span, line in weights:
        samples = (other for other, _ in written if re.search(rf"\b{BATCH}/{line.axis.text}\b", other.text))
        first = next(samples, span) if line.style == "vocab" else span
        changes += [{first: span.text, span: first.text}] * (first.line < span.line)
    for change in changes:
        whole = plan.source.text
        for span, text in sorted(change.items(), key=lambda edit: -edit[0].start):
            whole = f"{whole[: span.start]}{text}{whole[span.end :]}"
        edits = tuple((span.line, text) for span, text in change.items())
        try:
            yield edits, read_plan(Source(plan.source.name, whole, path=plan.source.path), dict(plan.defines))
        except PlanError:
            continue


def _other_word(text: str, line: SplitWeights) -> str:
    """Return a line with `row` for `column`, or the other way round."""
    other = "row" if line.style == "column" else "column"
    return re.sub(rf"^{line.style}\b\s*", f"{other} ", _without_rows(text))


def _without_rows(text: str) -> str:
    return re.sub(r"\s+rows\s*\([^)]*\)", "", text)


def _mistakes(text: str, line: SplitWeights, groups: set[int]) -> Iterator[str]:
    axis = line.axis.text
    plain = _without_rows(text)
    yield _other_word(text, line)
    if line.style == "column":
        yield from (f"{plain} rows ({count} h/{axis} d)" for count in sorted(groups))
        if plain != text:
            yield plain


def _tried(compiled: Compiled, plan: Plan, trials: Trials) -> Sequence[Reshard] | None:
    """Return the reshards of another plan for the same model; None if that plan does not fit it."""
    sizes = {name: size.high for name, size in plan.sizes.items()}
    try:
        _, request = ask(fixed(plan, sizes), compiled.folder, compiled.recorded, compiled.captured)
    except PlanError:
        return None
    return trials.place(request)[1]
