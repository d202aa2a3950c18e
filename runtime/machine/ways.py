"""Code for operators: the one table of what the machine runs in place of torch's own, and for which purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

Kernel = Callable[..., Any]
Way = Literal["kernel", "reference", "over", "adding", "onednn"]
"""A *kernel* takes the site of its line first, then the operator's arguments; one of the *reference* stands in its
place in the captured graph, and one of *onednn* where that library is the faster. What writes *over* its first operand,
or is *adding* to a total that comes first, takes no site."""

_CODE: dict[Way, dict[str, Kernel]] = {"kernel": {}, "reference": {}, "over": {}, "adding": {}, "onednn": {}}
_Code = TypeVar("_Code", bound=Kernel)


def runs(op: str, way: Way = "kernel") -> Callable[[_Code], _Code]:
    """Notes the code of an operator for a purpose."""

    def note(code: _Code) -> _Code:
        _CODE[way][op] = code
        return code

    return note


def code_for(way: Way) -> Mapping[str, Kernel]:
    """Operator → its code for a purpose, of the modules that are imported."""
    return _CODE[way]
