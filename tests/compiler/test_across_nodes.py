"""Bytes across nodes: the table of algorithms beside what each sends, counted hop by hop."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from parc.compiler.analysis.across_nodes import ALGORITHMS, NodeSpread, across_rows, nic_bytes, offsets_of, place_of
from parc.compiler.layout.collectives import COLLECTIVES
from parc.compiler.layout.mesh import Mesh

SPREADS = [NodeSpread(8, 2, 4), NodeSpread(8, 8, 1), NodeSpread(12, 6, 2), NodeSpread(16, 2, 8)]


def row(op: str, size: int, ranks: int) -> dict[str, object]:
    return {
        "op": op,
        "bytes": size,
        "ranks": ranks,
        "axis": "dp",
        "role": "stage0",
        "hidden": False,
        "count_per_step": 1,
    }


def leaving(hops: list[tuple[int, int, int]], inside: int) -> Counter[int]:
    """Return the bytes that leave each node, for hops of ``(from, to, bytes)``."""
    sums: Counter[int] = Counter()
    for source, target, size in hops:
        if source // inside != target // inside:
            sums[source // inside] += size
    return sums


def test_every_collective_that_communicates_has_an_algorithm() -> None:
    named = {op.removeprefix("parc.") for op, one in COLLECTIVES.items() if one.communicates}
    assert named | {"send"} == ALGORITHMS.keys()


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_rings_enter_each_node_once_and_its_nics_share_them(spread: NodeSpread) -> None:
    n, part = spread.ranks, 240
    ring = [*pairwise([*range(n), 0])]
    hops = [(source, target, part) for source, target in ring for _ in range(n - 1)]  # each part but one, each step
    each = set(leaving(hops, spread.inside).values())
    assert each == {nic_bytes("all_gather", part, spread) * spread.inside}
    assert each == {nic_bytes("reduce_scatter", part * n, spread) * spread.inside}


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_exchanges_send_each_other_node_its_part(spread: NodeSpread) -> None:
    n, whole = spread.ranks, 240 * spread.ranks
    hops = [(source, target, whole // n) for source in range(n) for target in range(n) if source != target]
    assert {nic_bytes("all_to_all", whole, spread) * spread.inside} == set(leaving(hops, spread.inside).values())


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_trees_send_each_byte_up_and_down_once(spread: NodeSpread) -> None:
    """All edges of a tree over nodes carry the value up and down: the mean over nodes is that of a NIC times
    the NICs."""
    size = 48 * spread.ranks
    edges = 2 * (spread.nodes - 1) * size
    assert nic_bytes("all_reduce", size, spread) * spread.ranks == edges


def test_a_group_inside_a_node_sends_nothing_to_others() -> None:
    mesh = Mesh.parse("pp=2, dp=4, tp=2")
    places = {axes: place_of(mesh, axes.split(","), 4) for axes in ("pp", "dp", "tp", "dp,tp")}
    assert {axes: (place.ranks, place.nodes) for axes, place in places.items()} == {
        "pp": (2, 2), "dp": (4, 2), "tp": (2, 1), "dp,tp": (8, 2),
    }  # fmt: skip
    assert all(nic_bytes(op, 960, places["tp"]) == 0 for op in ALGORITHMS if op != "send")
    (only,) = across_rows([row("all_reduce", 960, 4), {**row("all_reduce", 960, 2), "axis": "tp"}], mesh, 4)
    assert (only["axis"], only["bytes"], only["nodes"]) == ("dp", 480, 2)
    assert place_of(mesh, ["tp"], 4, order=("tp", "pp", "dp")).nodes == 2


@given(some.lists(some.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4), some.sampled_from([1, 3, 4, 8, 72]),
       some.randoms(use_true_random=False))  # fmt: skip
def test_a_place_counts_the_nodes_of_all_ranks_of_its_group(sizes: list[int], node: int, random: Random) -> None:
    mesh = Mesh(tuple((f"axis{at}", size) for at, size in enumerate(sizes)))
    order = random.sample(mesh.names, len(sizes))
    axes = random.sample(mesh.names, random.randint(1, len(sizes)))
    offsets = np.array(offsets_of(mesh, axes, order))
    members = np.unique_counts(offsets // node).counts
    assert place_of(mesh, axes, node, order) == NodeSpread(len(offsets), len(members), int(members.max()))
