"""``cluster``: the machines that a plan is meant for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....grammar.codes import BAD_CLUSTER
from ....grammar.diagnostics import Diagnostic, Label
from ...clock.cluster import Cluster, ClusterError, find_cluster, is_file, shipped
from ..directive import Directive, Scope, argument


@dataclass(frozen=True)
class ClusterLine(Directive):
    """The machines that the plan is meant for: `h100-sxm` and others that parc knows, or the path of a file, relative
    to the plan's folder. `parc show --time` says what a step takes on them, and where the time goes.

    A file is TOML: peaks of products by type, memory, links inside a node and across nodes, ranks of a node. `parc
    cluster list` names those that parc knows, `parc cluster show h100-sxm` prints one to copy and change, and `parc
    cluster measure -o here.toml` measures this machine. Without a `node` line a node has as many ranks as the cluster
    says; another number in a `node` line is a warning, and wins. Lines that mean nodes (`hierarchical`, `within node`)
    need a `node` line beside a file of one's own: a build holds the plan, but not that file.
    """

    USAGE = "cluster FILE"

    name: str = argument(lambda line: line.text("file"))

    @property
    def known(self) -> Cluster | None:
        """The cluster, if it is one that parc knows."""
        return find_cluster(self.name) if self.name in shipped() else None

    @property
    def folder(self) -> Path | None:
        """The folder of the file that has the line."""
        path = self.span.source.path
        return None if path is None else path.parent

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        if is_file(self.name) and not ((self.folder or Path()) / self.name).exists():
            return  # a build's own plan is in another folder: `--time` reads the file
        try:
            find_cluster(self.name, self.folder)
        except ClusterError as error:
            yield Diagnostic(BAD_CLUSTER, str(error), Label(self.arguments.span("file")), help=error.help)
