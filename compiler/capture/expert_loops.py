"""Loops over a list of experts, followed without numbers: each expert takes the tokens that chose it, and what it makes
of them is added to a result.

Which tokens these are depends on data, so no graph has them. Here an object stands for the rows of one expert, and
functions of single entries make further rows of such rows. Where the result is read, the rows of all experts are
computed as packed rows. A loop that does anything else with them is refused.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..ops.own_ops import OPS
from ..ops.rules import facts
from .expert_lists import stacks_of
from .expert_masks import Masks
from .expert_rows import ExpertRows, RowCount, Tree, alike, unfollowed
from .loop_code import carried
from .one_expert import ThroughPacked, expert_of

_FACTS = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "grad_fn", "is_leaf"))
_SIZES = frozenset(("size", "dim", "numel", "stride", "is_floating_point", "element_size", "__len__"))


def followed(name: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer that loops over the experts in a list, and follow the loop.

    Raises:
        CaptureError: it does something else with the tokens of an expert.
    """
    loop = ExpertLoop(getattr(layer, name), carried(type(layer).forward))
    with ExitStack() as within:
        for number, expert in enumerate(loop.experts):
            within.enter_context(patch.object(expert, "forward", partial(loop.of_expert, number)))
        with loop:
            results = type(layer).forward(layer, *args, **kwargs)
    results = tree_map(loop.current, results)
    loop.finish()
    return results


@final
class ExpertLoop(TorchFunctionMode):
    """A mode that follows the rows of experts through a forward."""

    def __init__(self, experts: nn.ModuleList, carried: frozenset[str]) -> None:
        super().__init__()
        self.experts, self._carried = experts, carried
        self._asked = False
        """True where the code has asked whether an expert has tokens, and the loop may go on."""
        self._masks = Masks()
        self._added: dict[int, tuple[Tensor, list[ExpertRows]]] = {}
        """Rows that were added to a result, and are not computed yet."""
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """The results with all that was added."""
        self.writes = 0
        """The number of writes to tensors so far: rows are read as they were before."""
        self._written: set[int] = set()
        """The results of which every row was written by the one expert of its token."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        of = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _SIZES or (name == "__get__" and of in _FACTS):
            return func(*args, **(kwargs or {}))
        return self.follow(func, name, *args, **(kwargs or {}))

    def ask(self) -> None:
        """Note that the code asks whether an expert has tokens."""
        if self._carried:
            name = min(self._carried)
            raise unfollowed(f"`{name}` may be another value than before only if an expert has tokens")
        self._asked = True

    def finish(self) -> None:
        """Check that all that was added is read: a view of a result may have been written in place of it."""
        if self._added:
            raise unfollowed("the results of experts are added to a view: add them to the tensor that is returned")

    def of_expert(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Stand for an expert's forward; of tensors, compute it."""
        if not any(isinstance(leaf, ExpertRows) for leaf in tree_leaves((args, kwargs))):
            expert, found = self.experts[number], stacks_of(self.experts)
            assert found is not None
            with ExitStack() as within:
                for module, name, stack in found.places(expert):
                    module._parameters[name] = stack[number]  # type: ignore[assignment]
                    within.callback(module._parameters.pop, name)
                return type(expert).forward(expert, *tree_map(self.current, args), **tree_map(self.current, kwargs))
        rows = args[0]
        if len(args) > 1 or kwargs or not rows.wide or rows.mask.number != number:
            raise unfollowed(f"expert {number} is given something else than the tokens that chose it")
        return rows.by(("expert", rows))

    def current(self, value: Any) -> Any:
        """Return a value with all that was added to it."""
        if isinstance(value, (ExpertRows, RowCount)):
            raise unfollowed("the tokens of one expert are read by other code")
        if id(value) in self._added:
            kept, added = self._added.pop(id(value))
            base = self._made.get(id(value), (kept, kept))[1]
            made = self._computed(added).to(base.dtype)
            self._made[id(value)] = kept, made if id(value) in self._written else base + made
        return self._made.get(id(value), (value, value))[1]

    def follow(self, func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Compute a function of tensors and rows."""
        writes, name = name.endswith("_") and not name.startswith("_"), name.strip("_")
        rows = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (ExpertRows, RowCount))]
        mask = self._masks.of(args[0]) if args else None
        if name == "setitem" and (rows or self._picks(args[1])):
            return self._set(*args)
        if name == "index_add" and rows:
            out = args[0] if writes else self.current(args[0]).clone()
            return self._add(out, *args[1:], **kwargs)
        if name == "getitem" and self._picks(args[1]):
            return self._pick(*args)
        if rows:
            return self._of_rows(func, name, *args, **kwargs)
        if mask is not None and name in ("where", "nonzero") and len(args) == 1:
            places = tuple(ExpertRows(self, mask, (), False, of) for of in mask.dims)
            return places if name == "where" or kwargs.get("as_tuple") else self._one(places)
        if mask is not None and name in ("any", "sum") and len(args) == 1 and not kwargs:
            return RowCount(self)
        if writes or name == "setitem":
            self._settle(args[0])
        return self._masks.noted(func, name, *tree_map(self.current, args), **tree_map(self.current, kwargs))

    def _settle(self, target: Any) -> None:
        """Compute all that was added, before a tensor is written otherwise: rows are read as they were. Of its numbers
        nothing is known any more."""
        if self._asked and not self._added:
            raise unfollowed("something else is written only if an expert has tokens")
        for kept, _ in list(self._added.values()):
            self.current(kept)
        self._asked = False
        self.writes += 1
        self._masks.forget(target)

    @staticmethod
    def _one(places: tuple[ExpertRows, ...]) -> ExpertRows:
        if len(places) != 1:
            raise unfollowed("`nonzero` gives the places of tokens as one tensor: take `as_tuple=True`")
        return places[0]

    # ---- rows

    def _picks(self, key: Any) -> bool:
        keys = key if isinstance(key, tuple) else (key,)
        return any(isinstance(one, ExpertRows) or self._masks.of(one) is not None for one in keys)

    def _pick(self, x: Any, key: Any) -> ExpertRows:
        """Return the rows of a tensor that a mask names, or the places where it marks."""
        if isinstance(x, ExpertRows):
            return self._of_picked(x, key)
        keys = list(key) if isinstance(key, tuple) else [key]
        while keys and keys[0] is None:  # a dim of one before the rows, which a view takes away
            keys.pop(0)
        places = [one for one in keys if isinstance(one, ExpertRows)]
        mask = places[0].mask if places else self._masks.of(keys[0])
        dims = [place.of for place in places] if places else list(mask.dims if mask is not None else ())
        rest = keys[len(places) or 1 :]
        if mask is None or keys[: len(places)] != places or any(place.mask is not mask for place in places):
            raise unfollowed("entries are looked up otherwise than by the tokens of one expert")
        tree: Tree = ()
        if dims == ["token"] and x.dim() == 2 and rest and type(rest[0]) is int:
            tree, rest = ("at", x, rest[0]), rest[1:]
        elif dims == ["token"] and x.dim() in (1, 2):
            tree = ("input" if x.dim() == 2 else "each", x)
        elif dims == ["token", "slot"] and x.shape == mask.index.shape:
            tree = ("score", x)
        found = ExpertRows(self, mask, tree, tree[:1] == ("input",))
        if not tree:
            raise unfollowed("entries are looked up otherwise than by the tokens of one expert")
        return found if not rest else self._of_picked(found, (slice(None), *rest))

    def _of_rows(self, func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make rows of rows, entry by entry, or see one number a row as a row of one."""
        leaves = tree_leaves((args, kwargs))
        rows = [leaf for leaf in leaves if isinstance(leaf, ExpertRows)]
        if not rows or any(isinstance(leaf, RowCount) for leaf in leaves):
            raise unfollowed(f"`{name}` reads the number of an expert's tokens")
        first, sizes = (
            rows[0],
            [size for arg in args[1:] for size in (arg if isinstance(arg, (tuple, list)) else [arg])],
        )
        if first.of:
            if name in ("squeeze", "view", "reshape", "flatten", "getitem", "long"):
                return first
        elif name == "getitem":
            return self._of_picked(first, args[1])
        elif (name in ("view", "reshape") and len(sizes) == 2 and first.wide) or (name == "squeeze" and sizes == [0]):
            return first
        elif (name == "unsqueeze" and sizes in ([-1], [1])) or (name in ("view", "reshape") and sizes == [-1, 1]):
            return first.by(first.tree, wide=True)
        single = any(facts(f"aten.{name}.{form}").elementwise for form in ("Tensor", "default"))
        same = all(one.mask.same(first.mask) and one.wide == first.wide and not one.of for one in rows)
        flat = all(leaf.dim() <= 1 for leaf in leaves if isinstance(leaf, Tensor) and name != "type_as")
        if not same or not flat or not (single or name in ("to", "float", "type_as", "contiguous")):
            raise unfollowed(f"`{name}` reads the tokens of an expert")
        return first.by(("call", func, args, kwargs))

    @staticmethod
    def _of_picked(rows: ExpertRows, key: Any) -> ExpertRows:
        """Follow ``rows[:, None]`` of one number a row, and ``rows[:, 3]``, a column of scores of all experts."""
        keys = [one for one in (key if isinstance(key, tuple) else (key,))
                if not (one is Ellipsis or (isinstance(one, slice) and one == slice(None)))]  # fmt: skip
        if keys == [None] and not rows.wide:
            return rows.by(rows.tree, wide=True)
        if rows.tree[:1] == ("input",) and type(keys[0]) is int and keys[1:] in ([], [None]):
            return rows.by(("at", rows.tree[1], keys[0]), wide=bool(keys[1:]))
        raise unfollowed("a part of an expert's rows is read")

    def _set(self, out: Any, key: Any, rows: Any) -> None:
        """Follow ``out[key] += ...``, which writes a sum with what was there, and ``out[key] = ...`` where each token
        has one expert."""
        old = self._pick(out, key)
        called = isinstance(rows, ExpertRows) and rows.tree[:1] == ("call",)
        func, terms = rows.tree[1:3] if called and not rows.tree[3] else (None, ())
        there = [isinstance(term, ExpertRows) and alike(term, old) and term.mask.same(old.mask) for term in terms]
        if getattr(func, "__name__", "").strip("_") == "add" and sorted(there) == [False, True]:
            rows = terms[there.index(False)]
        elif old.mask.index.dim() == 1 and old.mask.number not in {row.mask.number for row in self._rows_of(out)}:
            self._written.add(id(out))
        else:
            raise unfollowed("what an expert makes is not added to the rows of its tokens")
        self._add(out, 0, old.by((), wide=False), rows)

    def _add(self, out: Any, dim: int, at: Any, rows: Any, **options: Any) -> Any:
        """Note rows that are added to those of a result."""
        if options:
            raise unfollowed(f"rows are added with `{next(iter(options))}=`")
        known = isinstance(at, ExpertRows) and isinstance(rows, ExpertRows) and rows.wide and rows.mask.same(at.mask)
        if not known or dim != 0 or at.of not in ("", "token") or not isinstance(out, Tensor) or out.dim() != 2:
            raise unfollowed("an expert's result is not added to the rows of its tokens, [tokens, width]")
        if any(read is out or id(read) in self._added for read in rows.reads()):
            raise unfollowed("an expert reads the results of other experts")
        if rows.since() < self.writes:
            raise unfollowed(
                "something is written between the look-up of an expert's tokens and the addition of its result"
            )
        self._added.setdefault(id(out), (out, []))[1].append(rows)
        return out

    def _rows_of(self, out: Tensor) -> list[ExpertRows]:
        return self._added[id(out)][1] if id(out) in self._added else []

    # ---- packed rows

    def _computed(self, added: list[ExpertRows]) -> Tensor:
        """Return what all experts add to the rows of tokens. A loop may add something for each expert several times:
        once for each of a token's experts."""
        turns: list[dict[int, ExpertRows]] = []
        often: dict[int, int] = defaultdict(int)
        for rows in added:
            number = rows.mask.number
            if often[number] == len(turns):
                turns.append({})
            turns[often[number]][number] = rows
            often[number] += 1
        total: Any = 0
        for turn in turns:
            first = next(iter(turn.values()))
            index = first.mask.index
            every = list(turn.values())
            own = [way for way in (True, False) if all(alike(rows, first, way) for rows in every)]
            same = all(rows.mask.index is index for rows in every)
            if set(turn) != set(range(len(self.experts))) or not same or not own:
                raise unfollowed("it does not do the same for every expert")
            if index.dim() == 2 and not self._masks.names_each_once(index):
                raise unfollowed("a token's experts are not those of `topk`, so one may be named twice")
            total = total + self._packed(first, index if index.dim() == 2 else index[:, None], own[0])
        return total  # type: ignore[no-any-return]

    def _packed(self, rows: ExpertRows, index: Tensor, own: bool) -> Tensor:
        """Return what rows of all experts, made in one way, add to each token. Where they read a column of scores it is
        their ``own``, or the same."""
        compute, count = expert_of(self.experts, ())
        marked = torch.zeros(len(index), count, dtype=torch.bool, device=index.device).scatter(1, index, True)
        chosen, top = marked.t(), index.shape[1]
        through = ThroughPacked(OPS.route(chosen, chosen), top)

        def value(one: Any) -> Any:
            if not isinstance(one, ExpertRows):
                return one
            word, x, *rest = one.tree
            if word == "call":
                return x(*tree_map(value, rest[0]), **tree_map(value, rest[1]))
            if word == "expert":
                return OPS.route(compute(OPS.route(value(x), chosen), through), chosen)
            if word == "input":
                return OPS.pack(x, chosen, top)
            if word == "score":
                x = x.new_zeros(marked.shape).scatter(1, index, x)
            if word == "each" or (word == "at" and not own):
                x = (x[:, rest[0]] if rest else x)[:, None].expand(-1, count)
            return OPS.pick(x.t(), chosen, top)

        expert = self.experts[0]
        with patch.object(expert, "forward", partial(type(expert).forward, expert)):
            made: Tensor = OPS.unpack(value(rows), chosen, top)
        return made
