"""Checks of the rules that users registered: one that does not fit its operator is the user's fault to mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import fx

from ...compiler.capture.node_facts import noted
from ...compiler.layout.collectives import TypeFault
from ...compiler.ops.factors import RuleError
from ...compiler.ops.rules import registered, rule_for
from ...compiler.program.program import Origin, operator
from ...grammar.nearest import did_you_mean
from ..calls import call_of, computes
from ..programs.joint import InternalTypeFault


class RuleMisfit(Exception):
    """The error of a registered rule that does not fit its operator; ``hint`` says what may have been meant."""

    def __init__(self, op: str, why: str, origin: Origin | None = None, hint: str = "") -> None:
        super().__init__(f"the rule `{registered().get(op, '')}` of `{op}` does not fit: {why}")
        self.op, self.hint, self.origin = op, hint, origin or Origin()


def check_registered(graph: fx.Graph) -> None:
    """Check every registered rule against the calls of its operator.

    Raises:
        RuleMisfit: there is no such operator, or the rule does not know the shapes of a call.
    """
    nodes = [node for node in graph.nodes if computes(node)]
    for op in registered():
        try:
            operator(op)
        except (AttributeError, RuntimeError):
            used = {str(node.target) for node in nodes}
            hint = did_you_mean(op, [*(name for name in used if not name.startswith(("aten.", "parc."))), *_custom()])
            raise RuleMisfit(op, "there is no such operator", hint=hint) from None
    for node in nodes:
        if str(node.target) in registered():
            try:
                rule_for(call_of(node))
            except RuleError as error:
                raise RuleMisfit(str(node.target), str(error), noted(node).origin) from None


def _custom() -> Iterator[str]:
    """Return the names of the operators that Python code defined."""
    for name in torch.library._defs:
        space, _, rest = str(name).partition("::")
        op, _, overload = rest.partition(".")
        yield f"{space}.{op}.{overload or 'default'}"


@contextmanager
def explained(graph: fx.Graph) -> Iterator[None]:
    """Enter the passes, and name the operator at which a failure happened. If types contradict each other at an
    operator with a registered rule, or in its backward, the error says that the rule does not fit.

    Raises:
        RuleMisfit: in place of such a contradiction.
    """
    try:
        yield
    except RuleMisfit:
        raise
    except Exception as error:
        node = _failing_node(error.__traceback__)
        if node is None:
            raise
        origin = noted(node).origin or Origin()
        if isinstance(error, (InternalTypeFault, TypeFault)):
            nearby = (str(other.target) for other in (node, *_nodes_at(graph, origin)))
            with_rule = next((op for op in nearby if op in registered()), None)
            if with_rule is not None:
                why = str(error.__cause__ or error)
                missing = str(node.target) not in registered() and not str(node.target).startswith(("aten.", "parc."))
                hint = f"its backward uses `{node.target}`: register a rule for that too" if missing else ""
                raise RuleMisfit(with_rule, why, origin, hint) from error
        error.add_note(f"parc was at {node.format_node()}: {origin}")
        raise


def _nodes_at(graph: fx.Graph, origin: Origin) -> Iterator[fx.Node]:
    """Yield the operators of the captured graph at a place of the model."""
    for node in graph.nodes:
        place = noted(node).origin
        if place is not None and (place.module, place.source) == (origin.module, origin.source):
            yield node


def _failing_node(trace: TracebackType | None) -> fx.Node | None:
    """Return the ``node`` of the innermost frame with a local of this name."""
    failing: fx.Node | None = None
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        if isinstance(node, fx.Node):
            failing = node
        trace = trace.tb_next
    return failing
