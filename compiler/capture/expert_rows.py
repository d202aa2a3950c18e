"""Objects that stand for the rows of one expert while a loop over experts is followed (`expert_loops.py`)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .expert_masks import Mask
from .faults import CaptureError

Tree = tuple[Any, ...]
"""The way in which rows are made, alike for all experts: a word or a function, and what it takes."""


class RowLoop(Protocol):
    """A loop that computes functions of rows."""

    writes: int
    """The number of writes to tensors so far."""

    def ask(self) -> None:
        """Note that the code asks whether an expert has tokens: what it does then is not always done."""

    def follow(self, func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Compute a function of tensors and rows."""


def unfollowed(what: str) -> CaptureError:
    """Return the error of a loop that does something else with the rows of an expert."""
    help_ = "write the layer's form with `parc.routed`, and name it by `@parc.register_experts`"
    return CaptureError("experts", f"a loop over experts is not followed where {what}", help=help_)


def alike(one: Any, other: Any, own: bool = False) -> bool:
    """Return whether two experts' rows, or what these are made of, are made in one way: of the same tensors, and of one
    column of scores, or (``own``) each of the column that has its expert's number."""
    if isinstance(one, ExpertRows) and isinstance(other, ExpertRows):
        if own and one.tree[:1] == other.tree[:1] == ("at",):
            columns = one.tree[2] == one.mask.number and other.tree[2] == other.mask.number
            return columns and one.tree[1] is other.tree[1] and one.wide == other.wide
        return one.wide == other.wide and alike(one.tree, other.tree, own)
    if type(one) is not type(other) or isinstance(one, Tensor):
        return one is other
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(alike(*pair, own) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key], own) for key in one)
    return bool(one == other)


@final
class RowCount:
    """The number of rows of one expert. It may be asked whether it is 0, and is not: where it is, nothing is added."""

    def __init__(self, loop: RowLoop) -> None:
        self._loop = loop

    def __bool__(self) -> bool:
        self._loop.ask()
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is not int or other != 0:
            raise unfollowed("the number of an expert's tokens is compared with another number than 0")
        return not self

    def __gt__(self, other: int) -> bool:
        return not self == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def item(self) -> RowCount:
        """Return the number."""
        return self

    __hash__ = None  # type: ignore[assignment]


@final
class ExpertRows:
    """The rows of the tokens that a mask marks, or their places in a dim ``of`` it. ``wide`` is False for one number a
    row."""

    def __init__(self, loop: RowLoop, mask: Mask, tree: Tree, wide: bool, of: str = "") -> None:
        self.loop, self.mask, self.tree, self.wide, self.of = loop, mask, tree, wide, of
        self._made_at = loop.writes

    def by(self, tree: Tree, wide: bool | None = None) -> ExpertRows:
        """Return other rows of the same tokens."""
        return ExpertRows(self.loop, self.mask, tree, self.wide if wide is None else wide, self.of)

    def reads(self) -> Iterator[Tensor]:
        """Yield the tensors that the rows are made of."""
        for leaf in tree_leaves(self.tree):
            if isinstance(leaf, ExpertRows):
                yield from leaf.reads()
            elif isinstance(leaf, Tensor):
                yield leaf

    def since(self) -> int:
        """Return how many writes there were when the first of its tensors was looked up."""
        inner = (leaf.since() for leaf in tree_leaves(self.tree) if isinstance(leaf, ExpertRows))
        return min((self._made_at, *inner))

    @property
    def shape(self) -> tuple[RowCount, ...]:
        """The number of rows, which is not known."""
        return (RowCount(self.loop),)

    def numel(self) -> RowCount:
        """Return whether there are rows."""
        return RowCount(self.loop)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if not callable(getattr(Tensor, name)):
            raise unfollowed(f"`.{name}` of its tokens is read")
        return partial(self.loop.follow, getattr(Tensor, name), name, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise unfollowed(f"`{getattr(func, '__name__', func)}` reads the tokens of an expert")


def _operator(name: str, swapped: bool) -> Callable[..., Any]:
    """Return the method of a Python operator."""
    compute = getattr(operator, name)

    def method(self: ExpertRows, *others: Any) -> Any:
        return self.loop.follow(compute, name, *((*others, self) if swapped else (self, *others)))

    return method


for _name in ("add", "sub", "mul", "truediv", "neg", "getitem"):
    setattr(ExpertRows, f"__{_name}__", _operator(_name, swapped=False))
for _name in ("add", "sub", "mul", "truediv"):
    setattr(ExpertRows, f"__r{_name}__", _operator(_name, swapped=True))
