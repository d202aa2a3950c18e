"""Residuals: the state of steps that compressed gradients have, which is what rounding left of each on a rank."""

from __future__ import annotations

from .binding import Binding

_WORD = "residual."


def residual(parameter: str) -> Binding:
    """Return the binding of what is left of a parameter's gradient.

    >>> str(residual("head.weight"))
    'state residual.head.weight'
    """
    return Binding("state", _WORD + parameter)


def residual_of(binding: Binding | None) -> str:
    """Return the parameter of whose gradient a binding's value is left; "" for any other binding."""
    is_one = binding is not None and binding.kind == "state" and binding.name.startswith(_WORD)
    return binding.name.removeprefix(_WORD) if is_one and binding is not None else ""
