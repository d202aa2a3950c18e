"""Tables of a build's parameters, modules, optimizer groups and programs; alike numbered modules share a row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from parc.compiler.build.build import Build, program_file
from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.layout.placement import parse_type
from parc.compiler.program.blocks import starred
from parc.grammar.syntax import size_text
from parc.report import plan_of, seen_from
from parc.report_words import role_names


def parameter_table(build: Build) -> list[dict[str, Any]]:
    """Return each parameter with its global shape, its placement, and the bytes that a rank holds of it."""
    plan, rows = plan_of(build), []
    for name, text in build.manifest["parameters"].items():
        type_, mesh = parse_type(text, build.mesh), seen_from(name, plan, build.mesh)
        placement: dict[str, str] = {}
        for axis in mesh.joined(mesh.names):
            sub_axes = mesh.parts(axis)
            if (kind := type_.placement.as_one(sub_axes, mesh)) is not None:
                placement[axis] = str(kind)
            else:
                placement |= {name: str(type_.placement[sub]) for sub in sub_axes for name in mesh.joined((sub,))}
        size = math.prod(type_.local(mesh)) * type_.dtype.itemsize
        rows.append({"name": name, "type": type_.text(mesh), "shape": list(type_.shape), "placement": placement,
                     "local_bytes": size})  # fmt: skip
    return rows


def module_rows(build: Build) -> list[tuple[object, ...]]:
    """Return rows of a table of the model's modules. Alike numbered modules share a row, with their count."""
    weights: dict[str, list[str]] = {}
    for program in build.files():
        for module in (line.origin.module for function in program.functions for line in function.lines):
            if "*" not in module and module not in build.manifest["parameters"]:
                weights.setdefault(module, [])
    for name, text in build.manifest["parameters"].items():
        module, _, parameter = name.rpartition(".")
        weights.setdefault(module, []).append(f"{parameter} {text}")
    for module in list(weights):
        parts = module.split(".")
        for count in range(1, len(parts)):
            weights.setdefault(".".join(parts[:count]), [])
    rows: dict[tuple[str, ...], list[str]] = {}
    modules = sorted(filter(None, weights), key=natural)
    for module in modules:
        rows.setdefault((starred(module), ", ".join(weights[module])), []).append(module)
    return [(pattern_of(names, modules), f"x{len(names)}" if len(names) > 1 else "", text)
            for (_, text), names in rows.items()]  # fmt: skip


def parameter_rows(parameters: list[dict[str, Any]], lines: dict[str, str]) -> list[tuple[object, ...]]:
    """Return rows of a table. Alike parameters of numbered modules share a row, with their count."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in parameters:
        key = starred(row["name"]), row["type"], placement_text(row["placement"]), lines.get(row["name"], "-")
        groups.setdefault(key, []).append(row)
    every = [row["name"] for row in parameters]
    return [(pattern_of([row["name"] for row in rows], every), f"x{len(rows)}" if len(rows) > 1 else "", type_,
             placement, line, size_text(sum(row["local_bytes"] for row in rows)))
            for (_, type_, placement, line), rows in groups.items()]  # fmt: skip


def group_rows(build: Build) -> list[tuple[object, ...]]:
    """Return rows of a table of the optimizer's groups: settings, number of parameters, their patterns."""
    line, frozen = build.manifest["optimizer"], {*build.manifest["frozen"]}
    trained = [name for name in build.manifest["parameters"] if name not in frozen]
    rows: list[tuple[object, ...]] = []
    for group in line["groups"]:
        alike: dict[str, list[str]] = {}
        for name in sorted({*group["parameters"]} - frozen, key=natural):
            alike.setdefault(starred(name), []).append(name)
        settings = ", ".join(f"{name} {value}" for name, value in group["set"].items())
        patterns = ", ".join(pattern_of(names, trained) for names in alike.values())
        rows.append((settings, sum(map(len, alike.values())), patterns))
    others = len(trained) - sum(int(str(row[1])) for row in rows)
    return [(f"lr {line['lr']}, weight_decay {line['weight_decay']}", others, "all others"), *rows] if rows else []


def pattern_of(names: Sequence[str], every: Sequence[str]) -> str:
    """Return the plan pattern of names that differ only in numbers: `blocks.*.up` if it matches none but these of
    ``every``, else `stem.{0,3}`."""
    columns = [sorted(set(words), key=natural) for words in zip(*(name.split(".") for name in names), strict=True)]
    kept = [words[0] if len(words) == 1 else "*" for words in columns]
    matcher = re.compile(r"\.".join(r"\d+" if word == "*" else re.escape(word) for word in kept))
    if len(list(filter(matcher.fullmatch, every))) == len(names):
        return ".".join(kept)
    return ".".join(_any_of(words) for words in columns)


def _any_of(words: Sequence[str]) -> str:
    """Return the segment of a pattern that matches these words: `[0..3]`, `{0,2,5}`."""
    if len(words) > 2 and [int(word) for word in words] == list(range(int(words[0]), int(words[-1]) + 1)):
        return f"[{words[0]}..{words[-1]}]"
    return words[0] if len(words) == 1 else "{" + ",".join(words) + "}"


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers in dotted names by their size."""
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in name.split(".")]


def placement_text(kinds: dict[str, str]) -> str:
    split = [f"{axis}: {kind}" for axis, kind in kinds.items() if kind not in ("I", "R")]
    return ", ".join(split) or "whole"


def folded_programs(programs: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """Return rows of a table of programs. Those of roles that have as many lines and collectives share a row."""
    alike: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for one in programs:
        kind = one["role"].rstrip("0123456789")
        alike.setdefault((kind, one["action"], one["lines"], one["collectives"]), []).append(one)
    return [
        (role_names([one["role"] for one in found]), action,
         found[0]["file"] if len(found) == 1 else f"{len(found)} files", lines, collectives)
        for (_, action, lines, collectives), found in alike.items()
    ]  # fmt: skip


def program_table(build: Build) -> list[dict[str, Any]]:
    rows = []
    for program in build.files():
        lines = [line for function in program.functions for line in function.lines]
        communicating = sum(line.op in COLLECTIVES and COLLECTIVES[line.op].communicates for line in lines)
        rows.append({"role": program.role, "action": program.action, "file": program_file(program), "lines": len(lines),
                     "collectives": communicating})  # fmt: skip
    return rows
