"""The table of passes: each reads what is there, every part of a request is read, and graphs of others stay."""

from __future__ import annotations

import ast
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import fx

from parc.compiler.capture.node_facts import noted
from parc.compiler.layout.mesh import Mesh
from parc.compiler.resolve.requests import Computing, Placing, Request
from parc.passes.canonical.canonicalize import canonical_form
from parc.passes.pipeline import ALL_PASSES, PREPARING_PASSES, Pass, run_passes, values_of
from parc.passes.programs import step_programs

from ..checked_plans import compiled
from ..runtime.tiny import EXAMPLES
from ..test_house import tree

PLAN = (EXAMPLES / "gpt.parc").read_text()
REQUEST = Request(Placing(Mesh()), Computing(1, 0, torch.float32))


def test_every_value_that_a_pass_reads_is_there_before_it() -> None:
    captured = compiled(PLAN).captured
    there = {"graph"}
    for each in PREPARING_PASSES:
        assert there.issuperset(each.needs.split()), each.name
    there = set(values_of(captured, REQUEST))
    for each in ALL_PASSES:
        assert there.issuperset(chain(each.needs.split(), each.when.split())), each.name
        assert set(each.needs.split()).issuperset(each.changes.split()), each.name
        there.update(each.gives.split())


def test_every_part_of_a_request_is_read_by_a_pass() -> None:
    """The makers of a step's programs read theirs from the request."""
    read = {name for each in ALL_PASSES for name in each.needs.split()}
    read |= {node.attr for node in ast.walk(tree(Path(step_programs.__file__))) if isinstance(node, ast.Attribute)}
    groups = {"placing", "computing", "storing", "messaging"}
    for group in (*REQUEST.groups, REQUEST):
        assert {each.name for each in fields(group)} - groups <= read


def test_passes_have_names_of_their_own() -> None:
    names = [each.name for each in (*PREPARING_PASSES, *ALL_PASSES)]
    assert len(names) == len(set(names)) > 25


def test_a_build_leaves_the_captured_graph_as_it_was() -> None:
    graph = compiled(PLAN).captured.graph
    before, canonical = str(graph), str(canonical_form(graph, False))
    compiled(PLAN, tp=2)
    assert (str(graph), str(canonical_form(graph, False))) == (before, canonical)
    assert not any(noted(node).types or noted(node).block for node in graph.nodes)


def test_a_graph_from_outside_is_copied_before_a_pass_changes_it() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(abs, (graph.placeholder("x"),)))

    def erase(graph: fx.Graph) -> None:
        graph.output_node().args = (next(iter(graph.nodes)),)
        graph.eliminate_dead_code()

    rows = (Pass("erase", erase, "graph", changes="graph"), Pass("count", lambda g: len(g.nodes), "graph", "number"))
    after = run_passes(rows, {"graph": graph})
    assert (len(graph.nodes), after["number"]) == (3, 2)
    again = run_passes((*rows, rows[0]), {"graph": after["graph"]})
    assert again["graph"] is not after["graph"]


@pytest.mark.parametrize("when", ["", "pads"])
def test_a_pass_runs_only_when_its_condition_holds(when: str) -> None:
    row = Pass("one", lambda: 1, "", "number", when=when)
    assert run_passes((row,), {"pads": (), "number": 0})["number"] == (0 if when else 1)
