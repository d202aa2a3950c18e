"""Loops over a list of experts, followed without numbers: each expert takes the tokens that chose it, and its outputs
are added to a result.

Which tokens these are depends on data, so no graph has them. Here an object stands for the rows of one expert, and
pointwise functions make further rows of such rows. Where the result is read, the rows of all experts are computed as
packed rows. A loop that does anything else with them is refused.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeGuard, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ...ops.own_ops import OPS
from ...ops.rules import facts
from ..faults import CaptureError
from .lists import stacks_of
from .one_expert import ThroughPacked, expert_of

# ---- the code of layers that loop over experts


def looped_lists(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes of a layer that are lists of experts over which its forward loops."""
    names = (name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) > 1)
    layer: Any = type(module)
    return tuple(name for name in names if name in _looped(layer))


@cache
def _syntax_trees(layer: Any) -> tuple[ast.Module, ...]:
    """Return the code of a layer's forward, and of the methods that it calls."""
    trees: dict[str, ast.Module] = {}
    pending = ["forward"]
    while pending:
        name = pending.pop()
        method = inspect.getattr_static(layer, name, None)
        if name in trees or not inspect.isfunction(inspect.unwrap(getattr(method, "__func__", method))):
            continue
        try:
            trees[name] = ast.parse(textwrap.dedent(inspect.getsource(getattr(layer, name))))
        except (OSError, TypeError, SyntaxError):
            continue
        calls = (node.func for node in ast.walk(trees[name]) if isinstance(node, ast.Call))
        pending += [called.attr for called in calls if _is_of_self(called) and not hasattr(nn.Module, called.attr)]
    return tuple(trees.values())


def _is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


@cache
def _looped(layer: Any) -> frozenset[str]:
    """Return the attributes of ``self`` over whose modules a layer loops, looking up the tokens of each. No graph could
    hold such results; any other loop is captured as it is."""
    loops = (node for tree in _syntax_trees(layer) for node in ast.walk(tree) if isinstance(node, ast.For))
    return frozenset(name for loop in loops if _looks_for_tokens(loop) for name in _attributes(loop))


@cache
def carried(layer: Any) -> frozenset[str]:
    """Return the variables that a loop of a layer with branches assigns, and that code outside the loop reads."""
    names = set[str]()
    for tree in _syntax_trees(layer):
        for loop in ast.walk(tree):
            if isinstance(loop, ast.For) and any(isinstance(node, ast.If) for node in ast.walk(loop)):
                inside = {id(node) for node in ast.walk(loop)}
                read = {node.id for node in ast.walk(tree) if id(node) not in inside and _is_name(node, ast.Load)}
                names |= read & {node.id for node in ast.walk(loop) if _is_name(node, ast.Store)}
    return frozenset(names)


def _is_name(node: ast.AST, context: type[ast.expr_context]) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, context)


def _attributes(loop: ast.For) -> Iterator[str]:
    """Yield the attributes of ``self`` that a loop goes over, or takes items of."""
    items = (node.value for node in ast.walk(loop) if isinstance(node, ast.Subscript))
    for node in (*ast.walk(loop.iter), *items):
        if _is_of_self(node):
            yield node.attr


def _looks_for_tokens(loop: ast.For) -> bool:
    """Return whether a loop calls ``nonzero`` or ``where``, or indexes by a comparison with the number of its turn."""
    counted = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    masks = {
        name.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign) and any(_compares(part, counted) for part in ast.walk(node.value))
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "nonzero" or (node.func.attr == "where" and len(node.args) == 1 and not node.keywords):
                return True
        elif isinstance(node, ast.Subscript):
            parts = list(ast.walk(node.slice))
            if any((isinstance(part, ast.Name) and part.id in masks) or _compares(part, counted) for part in parts):
                return True
    return False


def _compares(node: ast.AST, counted: set[str]) -> bool:
    """Return whether an expression compares something with one of the loop's counters."""
    sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    return bool(sides) and any(isinstance(side, ast.Name) and side.id in counted for side in sides)


# ---- the loop


_FACTS = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "grad_fn", "is_leaf"))


_SIZES = frozenset(("size", "dim", "numel", "stride", "is_floating_point", "element_size", "__len__"))


def followed(name: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a layer that loops over the experts in a list, and follow the loop.

    Raises:
        CaptureError: it does something else with the tokens of an expert.
    """
    made_by: Any = type(layer)
    loop = ExpertLoop(getattr(layer, name), carried(made_by))
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
    """A mode that follows the rows of experts through a forward.

    Additions of rows to a result are collected, and computed when the result is read: then the rows of all experts are
    one expression of packed rows.
    """

    def __init__(self, experts: nn.ModuleList, carried: frozenset[str]) -> None:
        super().__init__()
        self.experts, self._carried = experts, carried
        self._asked = False
        """True after the code asked whether an expert has tokens, until rows are added."""
        self._masks = Masks()
        self._added: dict[int, tuple[Tensor, list[ExpertRows]]] = {}
        """Rows that were added to a result, and are not computed yet."""
        self._computed: dict[int, tuple[Tensor, Tensor]] = {}
        """The results, each with its value after all additions."""
        self.writes = 0
        """The number of writes to tensors so far; rows are of the values at their look-up."""
        self._assigned: set[int] = set()
        """The results whose rows are assigned, each by the one expert of its token."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        of = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _SIZES or (name == "__get__" and of in _FACTS):
            return func(*args, **(kwargs or {}))
        return self.follow(func, name, *args, **(kwargs or {}))

    def ask(self) -> None:
        """Note that the code asks whether an expert has tokens: what follows is not always done."""
        if self._carried:
            name = min(self._carried)
            raise unfollowed(f"`{name}` may be another value than before only if an expert has tokens")
        self._asked = True

    def finish(self) -> None:
        """Check that all additions were read: if not, they went to a view of the result."""
        if self._added:
            raise unfollowed("the results of experts are added to a view: add them to the tensor that is returned")

    def of_expert(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Return the rows that an expert's forward gives; for tensors, compute it."""
        if not any(isinstance(leaf, ExpertRows) for leaf in tree_leaves((args, kwargs))):
            expert, stacked = self.experts[number], stacks_of(self.experts)
            assert stacked is not None
            with stacked.filled(expert, operator.itemgetter(number)):
                return type(expert).forward(expert, *tree_map(self.current, args), **tree_map(self.current, kwargs))
        rows = args[0]
        if len(args) > 1 or kwargs or not rows.wide or rows.mask.number != number:
            raise unfollowed(f"expert {number} is given something else than the tokens that chose it")
        return rows.with_tree(("expert", rows))

    def current(self, value: Any) -> Any:
        """Return a value after all additions to it."""
        if isinstance(value, (ExpertRows, RowCount)):
            raise unfollowed("the tokens of one expert are read by other code")
        if id(value) in self._added:
            result, added = self._added.pop(id(value))
            base = self._computed.get(id(value), (result, result))[1]
            total = self._sum_of_turns(added).to(base.dtype)
            self._computed[id(value)] = result, total if id(value) in self._assigned else base + total
        return self._computed.get(id(value), (value, value))[1]

    def follow(self, func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Compute a function of tensors and rows."""
        writes, name = name.endswith("_") and not name.startswith("_"), name.strip("_")
        rows = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (ExpertRows, RowCount))]
        mask = self._masks.of(args[0]) if args else None
        if name == "setitem" and (rows or self._is_look_up(args[1])):
            return self._assign_rows(*args)
        if name == "index_add" and rows:
            out = args[0] if writes else self.current(args[0]).clone()
            return self._add_rows(out, *args[1:], **kwargs)
        if name == "getitem" and self._is_look_up(args[1]):
            return self._look_up(*args)
        if rows:
            return self._compute_rows(func, name, *args, **kwargs)
        if mask is not None and name in ("where", "nonzero") and len(args) == 1:
            places = tuple(ExpertRows(self, mask, (), False, of) for of in mask.dims)
            if name == "where" or kwargs.get("as_tuple"):
                return places
            if len(places) != 1:
                raise unfollowed("`nonzero` gives the places of tokens as one tensor: take `as_tuple=True`")
            return places[0]
        if name == "bincount" and self._masks.is_flat(args[0]):
            return RowCounts(self, len(self.experts))
        if mask is not None and name in ("any", "sum") and len(args) == 1 and not kwargs:
            return RowCount(self)
        if writes or name == "setitem":
            self._note_write(args[0])
        return self._masks.call(func, name, *tree_map(self.current, args), **tree_map(self.current, kwargs))

    def _note_write(self, target: Any) -> None:
        """Compute all additions before a tensor is written otherwise: they are of the values before that. Forget what
        the tensor marked."""
        if self._asked and not self._added:
            raise unfollowed("something else is written only if an expert has tokens")
        for result, _ in list(self._added.values()):
            self.current(result)
        self._asked = False
        self.writes += 1
        self._masks.forget(target)

    # ---- rows

    def _is_look_up(self, key: Any) -> bool:
        keys = key if isinstance(key, tuple) else (key,)
        return any(isinstance(one, ExpertRows) or self._masks.of(one) is not None for one in keys)

    def _look_up(self, x: Any, key: Any) -> ExpertRows:
        """Return the rows of a tensor at a mask, or at the places that it marks."""
        if isinstance(x, ExpertRows):
            return self._index_rows(x, key)
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
        if not tree:
            raise unfollowed("entries are looked up otherwise than by the tokens of one expert")
        rows = ExpertRows(self, mask, tree, tree[:1] == ("input",))
        return rows if not rest else self._index_rows(rows, (slice(None), *rest))

    def _compute_rows(self, func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply a pointwise function to rows, or a view that makes one number a row a row of one."""
        leaves = tree_leaves((args, kwargs))
        rows = [leaf for leaf in leaves if isinstance(leaf, ExpertRows)]
        if not rows or any(isinstance(leaf, RowCount) for leaf in leaves):
            raise unfollowed(f"`{name}` reads the number of an expert's tokens")
        first = rows[0]
        sizes = [size for arg in args[1:] for size in (arg if isinstance(arg, (tuple, list)) else [arg])]
        if first.of:
            if name in ("squeeze", "view", "reshape", "flatten", "getitem", "long"):
                return first
        elif name == "getitem":
            return self._index_rows(first, args[1])
        elif (name in ("view", "reshape") and len(sizes) == 2 and first.wide) or (name == "squeeze" and sizes == [0]):
            return first
        elif (name == "unsqueeze" and sizes in ([-1], [1])) or (name in ("view", "reshape") and sizes == [-1, 1]):
            return first.with_tree(first.tree, wide=True)
        pointwise = any(facts(f"aten.{name}.{form}").elementwise for form in ("Tensor", "default"))
        same = all(one.mask.same(first.mask) and one.wide == first.wide and not one.of for one in rows)
        flat = all(leaf.dim() <= 1 for leaf in leaves if isinstance(leaf, Tensor) and name != "type_as")
        if not same or not flat or not (pointwise or name in ("to", "float", "type_as", "contiguous")):
            raise unfollowed(f"`{name}` reads the tokens of an expert")
        return first.with_tree(("call", func, args, kwargs))

    @staticmethod
    def _index_rows(rows: ExpertRows, key: Any) -> ExpertRows:
        """Return ``rows[:, None]`` of one number a row, or ``rows[:, 3]``, a column of scores of all experts."""
        keys = [one for one in (key if isinstance(key, tuple) else (key,))
                if not (one is Ellipsis or (isinstance(one, slice) and one == slice(None)))]  # fmt: skip
        if keys == [None] and not rows.wide:
            return rows.with_tree(rows.tree, wide=True)
        if rows.tree[:1] == ("input",) and type(keys[0]) is int and keys[1:] in ([], [None]):
            return rows.with_tree(("at", rows.tree[1], keys[0]), wide=bool(keys[1:]))
        raise unfollowed("a part of an expert's rows is read")

    def _assign_rows(self, out: Any, key: Any, rows: Any) -> None:
        """Follow ``out[key] += ...``, which assigns a sum with the old rows, and ``out[key] = ...`` where each token
        has one expert."""
        old = self._look_up(out, key)
        called = isinstance(rows, ExpertRows) and rows.tree[:1] == ("call",)
        func, terms = rows.tree[1:3] if called and not rows.tree[3] else (None, ())
        are_old = [isinstance(term, ExpertRows) and alike(term, old) and term.mask.same(old.mask) for term in terms]
        added = self._added.get(id(out), (out, []))[1]
        if getattr(func, "__name__", "").strip("_") == "add" and sorted(are_old) == [False, True]:
            rows = terms[are_old.index(False)]
        elif old.mask.index.dim() == 1 and old.mask.number not in {row.mask.number for row in added}:
            self._assigned.add(id(out))
        else:
            raise unfollowed("what an expert makes is not added to the rows of its tokens")
        self._add_rows(out, 0, old.with_tree((), wide=False), rows)

    def _add_rows(self, out: Any, dim: int, at: Any, rows: Any, **options: Any) -> Any:
        """Collect rows that are added to those of a result."""
        if options:
            raise unfollowed(f"rows are added with `{next(iter(options))}=`")
        known = isinstance(at, ExpertRows) and isinstance(rows, ExpertRows) and rows.wide and rows.mask.same(at.mask)
        if not known or dim != 0 or at.of not in ("", "token") or not isinstance(out, Tensor) or out.dim() != 2:
            raise unfollowed("an expert's result is not added to the rows of its tokens, [tokens, width]")
        if any(read is out or id(read) in self._added for read in rows.reads()):
            raise unfollowed("an expert reads the results of other experts")
        if rows.since() < self.writes:
            between = "the look-up of an expert's tokens and the addition of its result"
            raise unfollowed(f"something is written between {between}")
        self._added.setdefault(id(out), (out, []))[1].append(rows)
        return out

    # ---- packed rows

    def _sum_of_turns(self, added: list[ExpertRows]) -> Tensor:
        """Return the sum of all rows that were added for each token. A loop may have several turns for each expert: one
        for each of a token's experts."""
        turns: list[dict[int, ExpertRows]] = []
        for rows in added:
            turn = next((turn for turn in turns if rows.mask.number not in turn), None)
            if turn is None:
                turns.append(turn := {})
            turn[rows.mask.number] = rows
        total: Any = 0
        for turn in turns:
            first, *others = turn.values()
            index = first.mask.index
            columns = [per for per in (True, False) if all(alike(rows, first, per) for rows in (first, *others))]
            same = all(rows.mask.index is index for rows in others)
            if set(turn) != set(range(len(self.experts))) or not same or not columns:
                raise unfollowed("it does not do the same for every expert")
            if index.dim() == 2 and not self._masks.names_each_once(index):
                raise unfollowed("a token's experts are not those of `topk`, so one may be named twice")
            total = total + self._sum_of_experts(first, index if index.dim() == 2 else index[:, None], columns[0])
        return total  # type: ignore[no-any-return]

    def _sum_of_experts(self, rows: ExpertRows, index: Tensor, per_expert: bool) -> Tensor:
        """Return the sum over each token's experts of rows that all experts compute alike. ``per_expert``: each expert
        reads the column of scores with its number."""
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
            if word == "each" or (word == "at" and not per_expert):
                x = (x[:, rest[0]] if rest else x)[:, None].expand(-1, count)
            return OPS.pick(x.t(), chosen, top)

        expert = self.experts[0]
        with patch.object(expert, "forward", partial(type(expert).forward, expert)):
            total: Tensor = OPS.unpack(value(rows), chosen, top)
        return total


def unfollowed(what: str) -> CaptureError:
    """Return the error of a loop that uses the rows of an expert in an unknown way."""
    help_ = "write the layer's form with `parc.routed`, and name it by `@parc.register_experts`"
    return CaptureError("experts", f"a loop over experts is not followed where {what}", help=help_)


# ---- the rows of one expert


Tree = tuple[Any, ...]
"""The expression of rows, alike for all experts: an operation, and what it takes."""


def alike(one: Any, other: Any, per_expert: bool = False) -> bool:
    """Return whether the rows of two experts, or parts of their expressions, are equal expressions of the same tensors
    and of the same column of scores; ``per_expert``: each of the column with its expert's number."""
    if isinstance(one, ExpertRows) and isinstance(other, ExpertRows):
        if per_expert and one.tree[:1] == other.tree[:1] == ("at",):
            columns = one.tree[2] == one.mask.number and other.tree[2] == other.mask.number
            return columns and one.tree[1] is other.tree[1] and one.wide == other.wide
        return one.wide == other.wide and alike(one.tree, other.tree, per_expert)
    if type(one) is not type(other) or isinstance(one, Tensor):
        return one is other
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(alike(*pair, per_expert) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key], per_expert) for key in one)
    return bool(one == other)


@final
class RowCount:
    """The number of rows of one expert, which counts as not 0: without rows, nothing would be added."""

    def __init__(self, loop: ExpertLoop) -> None:
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
class RowCounts:
    """The numbers of rows of all experts."""

    def __init__(self, loop: ExpertLoop, count: int) -> None:
        self._counts = [RowCount(loop) for _ in range(count)]

    def __getitem__(self, number: int) -> RowCount:
        return self._counts[number]

    def tolist(self) -> list[RowCount]:
        """Return them in a list."""
        return list(self._counts)

    def cpu(self) -> RowCounts:
        """Return them as they are."""
        return self


@final
class ExpertRows:
    """Rows of the tokens that a mask marks, as the expression ``tree``, or the places of these tokens in the mask's dim
    ``of``. ``wide`` is False for one number a row."""

    def __init__(self, loop: ExpertLoop, mask: Mask, tree: Tree, wide: bool, of: str = "") -> None:
        self.loop, self.mask, self.tree, self.wide, self.of = loop, mask, tree, wide, of
        self._looked_up_at = loop.writes

    def with_tree(self, tree: Tree, wide: bool | None = None) -> ExpertRows:
        """Return other rows of the same tokens."""
        return ExpertRows(self.loop, self.mask, tree, self.wide if wide is None else wide, self.of)

    def reads(self) -> Iterator[Tensor]:
        """Yield the tensors in the expression."""
        for leaf in tree_leaves(self.tree):
            if isinstance(leaf, ExpertRows):
                yield from leaf.reads()
            elif isinstance(leaf, Tensor):
                yield leaf

    def since(self) -> int:
        """Return how many writes there were when the first of its tensors was looked up."""
        inner = (leaf.since() for leaf in tree_leaves(self.tree) if isinstance(leaf, ExpertRows))
        return min((self._looked_up_at, *inner))

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


# ---- masks of the tokens that chose an expert


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A mask of the tokens that chose expert ``number``, by an ``index`` [tokens] or [tokens, k]. ``dims`` names the
    mask's dims."""

    index: Tensor
    number: int
    dims: tuple[str, ...]

    def same(self, other: Mask) -> bool:
        """Return whether two masks mark the same tokens."""
        return self.index is other.index and self.number == other.number


@final
class Masks:
    """The tensors, by ``id``, of which a loop knows which tokens they mark. All are kept alive, so that no other tensor
    gets their ``id``."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._distinct: dict[int, Tensor] = {}
        """The indices from ``topk``, which name no expert twice for one token."""
        self._parts: dict[int, dict[str, Tensor]] = defaultdict(dict)
        """The parts of these, each taken once: ``index[:, 0]`` is one tensor in every turn of a loop."""
        self._masks: dict[int, tuple[Tensor, Mask]] = {}
        self._hot: dict[int, tuple[Tensor, Tensor, tuple[str, ...]]] = {}
        """The results of ``one_hot``, with the index that each comes from, and the names of its dims."""
        self._forms: dict[int, tuple[Tensor, str, Tensor]] = {}
        """Other forms of an index, each with its name: ``flat`` in one dim, ``apart`` with a dim of one behind it; and
        the ``numbers`` 0, 1, … of experts."""

    def of(self, value: Any) -> Mask | None:
        """Return the mask that a value is, or None if it is no such mask."""
        return self._masks[id(value)][1] if id(value) in self._masks else None

    def is_flat(self, value: Any) -> bool:
        """Return whether a value has all entries of an index in one dim."""
        return self._forms.get(id(value), (None, ""))[1] == "flat"

    def names_each_once(self, index: Tensor) -> bool:
        """Return whether no token has an expert twice in an index."""
        return id(index) in self._distinct

    def forget(self, tensor: Any) -> None:
        """Forget all masks when a mask, an index or a part of one is written."""
        known = [part for parts in self._parts.values() for part in parts.values()] + [*self._distinct.values()]
        known += [tensor for value, mask in self._masks.values() for tensor in (value, mask.index)]
        known += [value for value, _, _ in (*self._hot.values(), *self._forms.values())]
        if any(one is tensor for one in known):
            self._kept += known
            for table in (self._distinct, self._parts, self._masks, self._hot, self._forms):
                table.clear()

    def call(self, func: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of tensors, and note whether its result is an index, a mask, or ``one_hot`` of one."""
        first: Any = args[0] if args else None
        distinct = id(first) in self._distinct
        if name == "getitem" and distinct and isinstance(args[1], tuple) and {*map(type, args[1])} == {slice, int}:
            parts, key = self._parts[id(first)], str(args[1])
            parts[key] = parts[key] if key in parts else func(*args)
            return parts[key]
        value: Any = func(*args, **kwargs)
        mask, hot = self.of(first), self._hot.get(id(first))
        if name == "topk" and (kwargs.get("dim", -1) if len(args) < 3 else args[2]) in (-1, first.dim() - 1):
            self._distinct[id(value[1])] = value[1]
        elif distinct and value.shape == (*first.shape, 1):  # a view or an index
            self._forms[id(value)] = value, "apart", first
        elif distinct and facts(f"aten.{name}.default").moves in ("copy", "shape"):
            if value.shape[-1] == first.shape[-1]:
                self._distinct[id(value)] = value
            elif value.shape == (first.numel(),):
                self._forms[id(value)] = value, "flat", first
        elif name == "arange" and len(args) == 1:
            self._forms[id(value)] = value, "numbers", value
        elif name == "eq" and isinstance(args[1], Tensor) and self._compares_numbers(first, args[1], value):
            self._hot[id(value)] = value, self._forms[id(first)][2], ("token", "slot", "expert")
        elif name in ("iter", "unbind") and args[1:] in ((), (0,)) and hot is not None and hot[2][0] == "expert":
            value = list(value)
            for number, part in enumerate(value):
                self._masks[id(part)] = part, Mask(hot[1], number, hot[2][1:])
            return iter(value) if name == "iter" else value
        elif name == "eq" and type(args[1]) is int and first.dtype == torch.int64 and first.dim() in (1, 2):
            self._masks[id(value)] = value, Mask(first, args[1], ("token", "slot")[: first.dim()])
        elif name == "any" and mask is not None and mask.dims == ("token", "slot"):
            if [*args[1:], *kwargs.values()] in ([-1], [1]):
                self._masks[id(value)] = value, Mask(mask.index, mask.number, ("token",))
        elif name == "one_hot" and first.dim() == 2:
            self._hot[id(value)] = value, first, ("token", "slot", "expert")
        elif name == "permute" and hot is not None:
            order = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            self._hot[id(value)] = value, hot[1], tuple(hot[2][dim] for dim in order)
        elif name in ("to", "bool", "int", "long") and hot is not None:
            self._hot[id(value)] = value, *hot[1:]
        elif name == "getitem" and hot is not None and type(args[1]) is int and hot[2][0] == "expert":
            self._masks[id(value)] = value, Mask(hot[1], args[1], hot[2][1:])
        return value

    def _compares_numbers(self, first: Any, other: Tensor, value: Tensor) -> bool:
        """Return whether an index apart is compared with the numbers of experts."""
        forms = [self._forms.get(id(one), (None, ""))[1] for one in (first, other)]
        return forms == ["apart", "numbers"] and value.dim() == 3
