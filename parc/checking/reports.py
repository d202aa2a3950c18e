"""The content of a build's report: facts that follow from the compiled plan alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parc.compiler.analysis.across_nodes import across_rows, sent_across
from parc.compiler.analysis.communication import bytes_compressed_away, communication_table
from parc.compiler.plan.directives.precision import WHOLE
from parc.compiling.compiled import Compiled
from parc.compiling.fitted import report_rows
from parc.grammar.format import format_statements
from parc.grammar.source import Span
from parc.grammar.syntax import Statement
from parc.report import program_rows


def report_of(compiled: Compiled) -> dict[str, Any]:
    """Return the content of ``report.json``, the same for two builds of one plan."""
    plan = compiled.plan
    return {
        **program_rows(compiled.build, plan),
        "pipeline": _pipeline_row(compiled),
        "written": [{"line": s.span.root.line, "place": place_text(s.span)} for s in plan.statements],
        "placed": {seed.value: place_text(seed.span) for seed in compiled.resolved.seeds},
        "padding": [
            {"value": name, "dim": pad.dim, "from": pad.outer * pad.real, "to": pad.outer * pad.padded,
             "line": compiled.resolved.line_of(name, pad.dim)}
            for name, rows in sorted(compiled.pads.items()) for pad in rows
        ],
        "stored_whole": compiled.built.stored.whole,
        "reshards": [
            {"value": r.value, "from": str(r.source), "to": str(r.result), "axis": r.axis, "bytes": r.bytes,
             "module": r.cause.module, "source": r.cause.source, "line": r.cause.plan}
            for r in compiled.built.reshards
        ],
        "operators_without_rule": list(compiled.built.without_rule),
        "numerics": _numerics(compiled),
        "sent_whole": compiled.built.compressor.whole,
        **_across_nodes(compiled),
        **report_rows(compiled.fitted),
        "checks": {},
    }  # fmt: skip


def _across_nodes(compiled: Compiled) -> dict[str, Any]:
    """Return the bytes that the NIC of a rank sends to other nodes in a step, in all and by axis, and what it would
    send without two levels."""
    levels, node, mesh = compiled.built.levels, compiled.plan.node, compiled.mesh
    if node is None or levels is None:
        return {}
    roles = compiled.build.roles
    flat = {name: replace(role, programs=levels.before.get(name, role.programs)) for name, role in roles.items()}
    rows, before = ([row for role in of.values() for row in communication_table(role)] for of in (roles, flat))
    sent, in_one_level = (
        max((sum(size for (other, *_), size in table.items() if other == role) for role in roles), default=0)
        for table in (sent_across(of, mesh, node.ranks) for of in (rows, before))
    )
    axes = across_rows(rows, mesh, node.ranks)
    return {"across_nodes": {"bytes": sent, "in_one_level": in_one_level, "node": node.ranks, "axes": axes}}


def place_text(span: Span) -> str:
    """Return the number of a plan's line, with the file of a line that is included."""
    return str(span.line) if span.source.included is None else f"{span.source.name}:{span.line}"


def _pipeline_row(compiled: Compiled) -> dict[str, Any]:
    """Return the schedule, with its number of stages."""
    pipeline, microbatches = compiled.request.pipeline, compiled.plan.microbatches
    if pipeline is None or compiled.plan.schedule is None:
        return {"schedule": "accumulation", "stages": 1, "microbatches": microbatches}
    return {
        "schedule": compiled.plan.schedule.name, "stages": pipeline.stages, "chunks": pipeline.chunks,
        "microbatches": microbatches, "axis": pipeline.axis,
    }  # fmt: skip


def _numerics(compiled: Compiled) -> list[dict[str, Any]]:
    """Return the lines by which a step rounds more than the model's own code, with the bytes that compressed gradients
    save. Other lines only change the order of sums."""
    plan = compiled.plan
    wanted = [line.arguments.statement for line in plan.precision if line.type != WHOLE]
    if plan.microbatches > 1 and plan.accumulate != WHOLE:
        wanted += [statement for statement in plan.statements if statement.verb.text == "schedule"]
    rows: list[dict[str, Any]] = [_lossy(statement) for statement in wanted]
    if plan.is_delayed and plan.schedule is not None:
        rows.append({**_lossy(plan.schedule.arguments.statement), "class": "delayed"})
    for line in plan.compress:
        roles, axis = compiled.build.roles.values(), line.axis.text
        saved = max(bytes_compressed_away(role, compiled.mesh, axis) for role in roles)
        rows.append({**_lossy(line.arguments.statement), "saved_bytes": saved})
    return rows


def _lossy(statement: Statement) -> dict[str, Any]:
    text = " ".join(format_statements((statement,)).split())
    return {"class": "lossy", "directive": text, "line": statement.span.root.line}
