"""``node``: the ranks that share a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....grammar.codes import MISSING_STATEMENT, NO_LEVELS, OTHER_NODE, UNEVEN_NODES
from ....grammar.diagnostics import Diagnostic, Label, Severity
from ....grammar.syntax import Word
from ...layout.mesh import UnevenNodes, node_levels
from ..directive import ONE_OR_MORE, Directive, Scope, argument
from .cluster import ClusterLine


@dataclass(frozen=True)
class Node(Directive):
    """The number of ranks on one node. Links inside a node are faster than links to other nodes.

    Ranks are numbered along the mesh, and the last axis counts fastest: so inner axes lie inside nodes, and outer ones
    across them. An axis may lie partly inside: with `mesh dp=4, tp=2` and `node 4`, two of the four `dp` ranks share a
    node. Lines with `within node` mean the ranks that share a node. A mesh with fewer ranks than `node` says lies on
    one node.
    """

    USAGE = "node N"
    LAYOUT = True
    LIMITS = (("n", ONE_OR_MORE),)

    ranks: int = argument(lambda line: int(line.number("n", 1)))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        yield from super().check(scope)
        if self.ranks < 1 or "mesh" in scope.broken:
            return
        try:
            node_levels(scope.mesh, self.ranks)
        except UnevenNodes as error:
            help_ = "choose sizes such that inner axes fill a node, or divide it"
            yield Diagnostic(UNEVEN_NODES, str(error), Label(self.span), help=help_)
        line = scope.one(ClusterLine)
        cluster = line.known if line is not None else None
        if line is not None and cluster is not None and cluster.ranks != self.ranks:
            message = (
                f"a node of `{line.name}` has {cluster.ranks} ranks, but this line says {self.ranks}, which counts"
            )
            related = (Label(line.span, "the cluster"),)
            help_ = "leave this line out, or name a file of a cluster with such nodes"
            yield Diagnostic(OTHER_NODE, message, Label(self.span), related, help=help_, severity=Severity.WARNING)


def nodes_of(scope: Scope) -> Node | None:
    """Return the `node` line of a plan; without one, the nodes of a cluster that parc knows; None without both."""
    line = scope.one(ClusterLine)
    node, cluster = scope.one(Node), line.known if line is not None else None
    if node is not None or line is None or cluster is None:
        return node
    return Node(line.arguments, cluster.ranks)


def check_levels(scope: Scope, axis: Word, label: Label, both: bool = False) -> Iterator[Diagnostic]:
    """Yield an error for a line about ranks that share a node if there is no `node` line, and a warning if no ranks of
    the axis share one, or, if the line needs ``both`` levels, if all do."""
    node = nodes_of(scope)
    if node is None:
        if "node" not in scope.broken:
            message = f"no line says which ranks of `{axis.text}` share a node"
            yield Diagnostic(MISSING_STATEMENT, message, label, help="add a line `node 8`, the ranks of one node")
        return
    if axis.text not in scope.mesh or node.ranks < 1:
        return
    try:
        across, within = node_levels(scope.mesh, node.ranks)[axis.text]
    except UnevenNodes:
        return  # an error of the `node` line
    if across * within > 1 and (within == 1 or (both and across == 1)):
        message = f"no two ranks of `{axis.text}` share a node of {node.ranks}"
        if within > 1:
            message = f"all ranks of `{axis.text}` share a node of {node.ranks}"
        related = (Label(node.span, "the nodes"),)
        help_ = f"put `{axis.text}` {'behind' if within == 1 else 'before'} other axes in `mesh`, or leave the line out"
        yield Diagnostic(NO_LEVELS, message, label, related, help=help_, severity=Severity.WARNING)
