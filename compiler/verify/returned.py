"""The tensors that a model returns: the inputs that they need, and the dim of each along which it has a row for each
sample. The captured graph of an evaluation tells it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..analysis.samples import dependences
from ..layout.placement import Split
from ..padding.flow import Extra, PaddingFault
from ..program.plain import making
from ..program.program import Function, Program
from .padding import follow_rows, where_samples_meet


def of_returned(function: Function, names: Collection[str] | None = None) -> Function:
    """Return a function with the lines alone that make what the model returns, or those of these ``names``."""
    returns = tuple((key, name) for key, name in function.returns
                    if key.kind == "output" and (names is None or key.name in names))  # fmt: skip
    return making(function, returns)


def sample_dims(reference: Program, unbatched: Collection[str]) -> dict[str, int | None]:
    """Return, for each returned tensor, the dim along which it has its samples, each in a row or in as many rows as any
    other; None where it is alike for all. Those in which samples have met, as in a mean over them, are left out, and
    those that do not have a sample's rows together, as a batch that is repeated.

    ``unbatched`` are inputs whose first dim is not the batch.
    """
    main = of_returned(reference.main)
    batched = [v.type.shape[0] for name, v in main.bound("input").items() if name not in unbatched and v.type.shape]
    size, values, dims = min(batched, default=0), main.values(), dict[str, int | None]()
    for key, samples in dependences(replace(reference, functions=(main,)), unbatched).items():
        shape = values[main.returned("output")[key.name]].type.shape
        if samples.kind == "I":
            dims[key.name] = None
        elif isinstance(samples.kind, Split) and samples.kind.dim >= 0:
            if samples.kind.outer == 1:
                dims[key.name] = samples.kind.dim
        elif isinstance(samples.kind, Split) and shape[:1] == (size,):
            dims[key.name] = 0  # the rules lost track of samples, or there is one
    return dims


def mixed_samples(reference: Program, dims: Mapping[str, int | None], unbatched: Collection[str]) -> str:
    """Return the reason why further samples behind a batch's own would change what the model returns for these, or ""
    if they do not."""
    main = of_returned(reference.main, dims)
    tails = {value.name: value.type.shape[0] for name, value in main.bound("input").items()
             if name not in unbatched and value.type.shape}  # fmt: skip
    given = [
        (Extra(0, 1, 1, tails[value.name], None),) if tails.get(value.name, 0) > 1 else () for value in main.parameters
    ]
    try:
        results = follow_rows(replace(reference, functions=(main,)), main, given)
    except PaddingFault as fault:
        return where_samples_meet(fault, "the model's own code")
    for (key, _), extras in zip(main.returns, results, strict=True):
        at = [(extra.dim, extra.outer) for extra in extras if extra.real is not None]
        if at not in ([], [(dims[key.name], 1)]):
            return f"`{key.name}` does not have its samples one after the other"
    return ""
