"""parc: declarative plans that turn a PyTorch model into checked per-rank programs.

``load`` opens a build for a training loop of one's own, and ``dataloader`` gives it batches of a dataset; ``reference``
trains the plain module with the same numbers; ``register_rule`` tells parc how a custom operator treats its dims;
``register_experts`` how a layer of one's own sends tokens to experts, by ``routed``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parc.compiler.capture.experts.forms import register_experts, routed
    from parc.compiler.ops.rules import register as register_rule
    from parc.runtime.compare.plain import reference
    from parc.runtime.launch.load import dataloader, load
    from parc.runtime.ranks.faults import RunError
    from parc.runtime.ranks.work import StepReport
    from parc.runtime.session.session import Session

__all__ = [
    "RunError",
    "Session",
    "StepReport",
    "__version__",
    "dataloader",
    "load",
    "reference",
    "register_experts",
    "register_rule",
    "routed",
]

__version__ = "0.1.0"

_PLACES = {
    "RunError": ("parc.runtime.ranks.faults", "RunError"),
    "Session": ("parc.runtime.session.session", "Session"),
    "StepReport": ("parc.runtime.ranks.work", "StepReport"),
    "dataloader": ("parc.runtime.launch.load", "dataloader"),
    "load": ("parc.runtime.launch.load", "load"),
    "reference": ("parc.runtime.compare.plain", "reference"),
    "register_experts": ("parc.compiler.capture.experts.forms", "register_experts"),
    "routed": ("parc.compiler.capture.experts.forms", "routed"),
    "register_rule": ("parc.compiler.ops.rules", "register"),
}


def __getattr__(name: str) -> Any:
    """Return a public name, imported at its first use: ``parc --help`` needs no torch."""
    if name not in _PLACES:
        raise AttributeError(f"module `parc` has no `{name}`", name=name, obj=sys.modules[__name__])
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """Return the public names, for those who look for them."""
    return __all__
