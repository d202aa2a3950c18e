"""Faults of a model that cannot be captured, each with the place in the model's code."""

from __future__ import annotations

import traceback
from pathlib import Path

from torch import fx
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from .node_facts import noted

_PACKAGE = str(Path(__file__).parents[2])
MASK = "keep the whole dim, and hide the rest with a mask: multiply by it, or choose with `torch.where`"
"""The advice for a size that depends on data."""
_LOOP = (
    "rows cut by the counts of experts are a loop: `token, choice = torch.where(index == i)` are those of expert `i`"
)
"""The advice beside it for sorted tokens of experts, which parc sends as packed rows where it sees the loop."""
_ALIGNMENTS = "write the sum over alignments with `torch.logsumexp`, step after step, in tensors of the longest target"
"""The advice for torch's CTC loss."""


class CaptureError(Exception):
    """The error of a model that cannot be captured. ``kind`` is ``control``, ``cache``, ``output``, ``field``,
    ``checkpoint``, ``complex``, ``experts``, ``capacity``, one that the observer knows, or ``other``; ``help`` is
    advice beyond that of the kind; ``named`` is the name in the loss that is at fault."""

    def __init__(
        self, kind: str, message: str, source: str = "", in_loss: bool = False, help: str = "", named: str = ""
    ) -> None:
        super().__init__(message)
        self.kind, self.source, self.in_loss, self.help, self.named = kind, source, in_loss, help, named


def fault_at(node: fx.Node, message: str, kind: str = "other", help: str = "") -> CaptureError:
    """Return the error of a node of a captured graph, with its place in the model."""
    origin = noted(node).origin
    where = f"in `{origin.module}`: " if origin.module else ""
    return CaptureError(kind, where + message, origin.source, help=help)


def explain_failure(error: Exception, in_loss: bool) -> CaptureError:
    """Return an error of torch's export in terms of the model."""
    name, text = type(error).__name__, str(error)
    source = user_frame(error)
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, CaptureError):
            return cause
    if isinstance(error, DynamicOutputShapeException):
        message = f"{error.func} gives a tensor whose shape depends on the values of tensors"
        help_ = _ALIGNMENTS if "ctc_loss" in str(error.func) else MASK
        return CaptureError("control", message, source, in_loss, help_)
    if "specialized integer from data-dependent" in text:
        message = "a size, a slice or a count in the model depends on the values of tensors"
        return CaptureError("control", message, source, in_loss, f"{MASK}; {_LOOP}")
    if "DataDependent" in name or "GuardOnDataDependent" in name or "data-dependent" in text.lower():
        return CaptureError("control", "the model's control flow depends on the values of tensors", source, in_loss)
    if ".numpy() is not supported" in text:
        help_ = "compute with torch's own operators: a graph holds no others"
        return CaptureError("other", "a tensor is made a NumPy array", source, in_loss, help_)
    if "not in range for dimension" in text or "index k out of range" in text:
        help_ = "choose at most as many as there are; a router's top-k is at most its number of experts"
        return CaptureError("other", "`topk` is to choose more entries than there are", source, in_loss, help_)
    first = text.strip().split("\n")[0] if text.strip() else name
    return CaptureError("other", f"{name}: {first}", source, in_loss)


def user_frame(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame outside torch and this package."""
    frames = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return next(filter(_is_user_code, reversed(frames)), "")


def calling_frame() -> str:
    """Return ``file:line`` of the innermost frame outside torch and this package that runs now."""
    frames = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_stack(None))
    return next(filter(_is_user_code, frames), "")


def _is_user_code(place: str) -> bool:
    return "/torch/" not in place and not place.startswith(("<", _PACKAGE))
