"""Every row beside torch: the meaning of a line on random numbers, for any pieces of ranks, and its gradients."""

import itertools
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from certificate import programs, rows
from certificate.meaning import Table, Value
from certificate.programs import Reader
from certificate.text import Atom, Line, Mesh, Name, Refused, Type, Word

from .node_numbers import CONSTANTS, Numbers, T
from .row_cases import CASES, CHAINS

MESH = Mesh((("tp", 2), ("dp", 2)), ())


# ---- lines


def _operator(op: str) -> Any:
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


DTYPES = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}


def _type(tensor: T, splits: dict[int, str]) -> Type:
    dims = (
        ((Atom(2, splits[at]), Atom(size // 2, "")),) if at in splits else ((Atom(size, ""),),)
        for at, size in enumerate(tensor.shape)
    )
    return Type(DTYPES[tensor.dtype], tuple(dims), ())


def _piece(tensor: T, splits: dict[int, str], ranks: dict[str, int]) -> T:
    for dim, axis in splits.items():
        tensor = tensor.chunk(2, dim)[ranks[axis]]
    return tensor


class Case:
    """A line with tensors for its operands, split in some way."""

    def __init__(self, op: str, args: Sequence[Any], kwargs: dict[str, Any], splits: dict[int, dict[int, str]]) -> None:
        self.op, self.splits = op, splits
        self.tensors: list[T] = []
        self.table = Table(dict(MESH.sizes))
        self.reader = Reader(self.table, MESH)
        self.args, self.kwargs = [self.named(item) for item in args], kwargs
        self.given = {f"leaf {at}": tensor.double() for at, tensor in enumerate(self.tensors)}
        self.types = {f"t{at}": _type(tensor, splits.get(at, {})) for at, tensor in enumerate(self.tensors)}
        self.values = {
            name: self.reader.tensors.piece(self.table.leaf(f"leaf {at}", self.tensors[at].shape), type_)
            for at, (name, type_) in enumerate(self.types.items())
        }

    def named(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self.named(each) for each in item]
        if not isinstance(item, T):
            return item
        self.tensors.append(item)
        return Name(f"t{len(self.tensors) - 1}")

    def torch_args(self, item: Any, ranks: dict[str, int], given: Sequence[T]) -> Any:
        if isinstance(item, list):
            return [self.torch_args(each, ranks, given) for each in item]
        if isinstance(item, Name):
            at = int(item.name[1:])
            return _piece(given[at], self.splits.get(at, {}), ranks)
        return CONSTANTS[item.text] if isinstance(item, Word) else item

    def torch(self, ranks: dict[str, int], given: Sequence[T]) -> tuple[T, ...]:
        kwargs = {key: self.torch_args(item, ranks, given) for key, item in self.kwargs.items()}
        result = _operator(self.op)(*self.torch_args(self.args, ranks, given), **kwargs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def line(self, expected: Sequence[T]) -> Line:
        names = tuple(f"r{at}" for at in range(len(expected)))
        types = tuple(_type(part, {}) if part is not None else Type("", (), ()) for part in expected)
        return Line(names, types, self.op, tuple(self.args), self.kwargs, "-", 1)


def _close(have: T, expected: T) -> None:
    torch.testing.assert_close(have, expected.double(), rtol=1e-9, atol=1e-9)


def _check(
    op: str, args: Sequence[Any], kwargs: dict[str, Any], splits: dict[int, dict[int, str]], backward: bool
) -> bool:
    """Compare a row with torch on every rank; return False where torch takes no such pieces."""
    case = Case(op, args, kwargs, splits)
    axes = sorted({axis for row in splits.values() for axis in row.values()})
    for coordinates in itertools.product(range(2), repeat=len(axes)):
        ranks = {"tp": 0, "dp": 0, **dict(zip(axes, coordinates, strict=True))}
        try:
            expected = case.torch(ranks, case.tensors)
        except (RuntimeError, IndexError, ValueError):
            return False
        try:
            call, results = case.reader.line(case.line(expected), case.values, case.types)
        except Refused:
            assert splits  # what torch makes of such pieces, the checker need not know
            return False
        numbers = Numbers(case.table, case.given)
        for have, want in zip(results, expected, strict=True):
            if want is not None:
                _close(numbers.value(have, ranks), want)
        if backward:
            _check_gradients(case, call, results, expected, ranks)
    return True


def _check_gradients(
    case: Case, call: Any, results: Sequence[Value], expected: Sequence[T], ranks: dict[str, int]
) -> None:
    """Compare the gradients that a derivative gives on a rank with autograd's."""
    leaves = [tensor.clone().requires_grad_(tensor.dtype == torch.float64) for tensor in case.tensors]
    outputs = [part for part in case.torch(ranks, leaves) if part.requires_grad]
    if not outputs:
        return
    grads = [torch.randn_like(part) for part in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    autograd = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    t, given, left = case.reader.tensors, dict(case.given), iter(grads)
    call.results, call.grads = results, []
    for at, part in enumerate(expected):
        if part.dtype == torch.float64:
            given[f"grad {at}"] = next(left)
            call.grads.append(t.leaf(f"grad {at}", part.shape))
        else:
            call.grads.append(None)
    parts = rows.SLOPES[case.op](call, call.grads[0], results[0])
    numbers = Numbers(case.table, given)
    names = programs.names_in(case.args)
    for name, gradient in zip(names, parts, strict=True):
        at = int(name[1:])
        if leaves[at].requires_grad:
            whole = next(autograd)
            whole = torch.zeros_like(leaves[at]) if whole is None else whole
            have = (
                torch.zeros_like(_piece(whole, case.splits.get(at, {}), ranks))
                if gradient is None
                else numbers.value(gradient, ranks)
            )
            _close(have, _piece(whole, case.splits.get(at, {}), ranks))


def _splits(tensors: Sequence[T], random_: random.Random) -> dict[int, dict[int, str]]:
    """Return a random split of operands: each axis may split a dim of even size of each."""
    splits: dict[int, dict[int, str]] = {}
    for at, tensor in enumerate(tensors):
        dims = [dim for dim, size in enumerate(tensor.shape) if size % 2 == 0]
        random_.shuffle(dims)
        splits[at] = {dim: axis for dim, axis in zip(dims, ("tp", "dp"), strict=False) if random_.random() < 0.6}
    return splits


def _batch(tensors: Sequence[T]) -> dict[int, dict[int, str]]:
    """Return the split of the first dim alone: some backwards read beyond operands of other sizes than they expect."""
    same = [at for at, x in enumerate(tensors) if x.shape[0] == tensors[0].shape[0] and x.shape[0] % 2 == 0]
    return {at: {0: "tp"} for at in same}


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{op}-{at}" for at, (op, _, _) in enumerate(CASES)])
def test_a_row_means_what_torch_computes_on_every_rank(at: int) -> None:
    op, make, kwargs = CASES[at]
    torch.manual_seed(at)
    backward = op in rows.SLOPES and op not in rows.CONSTANT
    args = make()
    assert _check(
        op, args, kwargs, {}, backward and any(x.dtype == torch.float64 for x in Case(op, args, {}, {}).tensors)
    )
    random_ = random.Random(at)
    for _ in range(4):
        tensors = Case(op, args, {}, {}).tensors
        splits = _batch(tensors) if "backward" in op else _splits(tensors, random_)
        _check(op, args, kwargs, splits, False)


@pytest.mark.parametrize("at", range(len(CHAINS)), ids=[chain[2] for chain in CHAINS])
def test_a_row_means_what_torch_computes_of_another_rows_results(at: int) -> None:
    first, make, second, then, dims = CHAINS[at]
    torch.manual_seed(at)
    args, more = make(), then()
    for dim in (None, *dims):
        tensors = [item for item in (*args, *more) if isinstance(item, T)]
        whole = next(item for item in args if isinstance(item, T)).shape
        split = {} if dim is None else {dim: "tp"}
        rows_of = {at: split for at, x in enumerate(tensors) if len(x.shape) == len(whole) and split}
        both = Case(first, [*args, *more], {}, rows_of)
        for rank in range(2 if split else 1):
            ranks = {"tp": rank, "dp": 0}
            local = [_piece(x, rows_of.get(at, {}), ranks) for at, x in enumerate(both.tensors)]
            names = {f"t{at}": x for at, x in enumerate(local)}
            one, two = both.args[: len(args)], both.args[len(args) :]

            def given(items: list[Any], names: dict[str, T] = names) -> list[Any]:
                return [names[item.name] if isinstance(item, Name) else item for item in items]

            results = _operator(first)(*given(one))
            results = results if isinstance(results, tuple) else (results,)
            names |= {f"r{at}": x for at, x in enumerate(results)}
            expected = _operator(second)(*given(two))
            expected = expected if isinstance(expected, tuple) else (expected,)
            both.op, both.args = first, one
            _, meant = both.reader.line(both.line(results), both.values, both.types)
            values = {**both.values, **{f"r{at}": value for at, value in enumerate(meant)}}
            types = {**both.types, **{f"r{at}": _type(x, {}) for at, x in enumerate(results)}}
            both.op, both.args = second, two
            _, have = both.reader.line(both.line(expected), values, types)
            numbers = Numbers(both.table, both.given)
            for value, want in zip(have, expected, strict=True):
                _close(numbers.value(value, ranks), want)
            both.args = [*one, *two]


def _others(have: Any, kind: str) -> list[Any]:
    """Return other values of an argument of torch's: another number, flag, word or list."""
    if any(word in kind for word in ("Tensor", "Device", "Layout", "Generator", "MemoryFormat")):
        return []
    if "ScalarType" in kind:
        return [Word("torch.int64")]
    if isinstance(have, bool) or "bool" in kind:
        return [not have]
    if isinstance(have, str) or "str" in kind:
        return [word for word in ("none", "tanh", "floor", "trunc", "left", "right", "valid", "same") if word != have]
    if isinstance(have, list | tuple):
        have = list(have)
        each = [[*have[:at], o, *have[at + 1 :]] for at, item in enumerate(have) for o in _others(item, "number")]
        return [*each, have[::-1], have[:-1]]
    if have is None:
        return [[1], [2, 1]] if "List" in kind else [0.3, 2.0] if "float" in kind or "number" in kind else [0, 1]
    return [have + 1, have - 1, 0, -have, 2 * have, *([have + 0.37] if kind == "number" else [])]


def _changed(at: int, random_: random.Random) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Yield a case with one argument after the other that is no tensor as it is not, defaults among them."""
    op, make, kwargs = CASES[at]
    args, schema = make(), _operator(op)._schema.arguments
    for place, argument in enumerate(schema):
        default = argument.default_value if argument.has_default_value() else None
        have = args[place] if place < len(args) else kwargs.get(argument.name, default)
        others = [other for other in _others(have, str(argument.type)) if other != have]
        if not others:
            continue
        other = random_.choice(others)
        if place < len(args):
            yield op, [*args[:place], other, *args[place + 1 :]], kwargs
        elif argument.kwarg_only or kwargs:
            yield op, args, {**kwargs, argument.name: other}
        else:
            yield op, [*args, *(each.default_value for each in schema[len(args) : place]), other], kwargs


def test_one_over_a_product_is_the_product_of_inverses() -> None:
    case = Case("aten.mul.Tensor", [torch.randn(4, 6), torch.randn(6)], {}, {0: {0: "tp"}})
    t, (x, y) = case.reader.tensors, case.values.values()
    value = rows.inverse(t, t.times(x, x, y, by=3))
    assert value == t.times(rows.inverse(t, x), rows.inverse(t, x), rows.inverse(t, y), by=Fraction(1, 3))
    for rank in range(2):
        part, other = case.tensors[0].double().chunk(2)[rank], case.tensors[1].double()
        _close(Numbers(case.table, case.given).value(value, {"tp": rank, "dp": 0}), 1 / (3 * part * part * other))


def test_logarithms_in_an_exponential_are_factors() -> None:
    case = Case("aten.exp.default", [torch.randn(4, 6)], {}, {0: {0: "tp"}})
    t, x = case.reader.tensors, case.values["t0"]
    size = t.pointwise("abs", [x])
    log, root = t.pointwise("log", [size]), t.pointwise("log", [t.pointwise("sqrt", [size])])
    value = rows.exp(t, t.plus(x, log, root, by=(1, -2, Fraction(1, 2))))
    assert value == t.times(rows.exp(t, t.plus(x, root, by=(1, Fraction(1, 2)))), rows.power(t, size, -2))
    for rank in range(2):
        part = case.tensors[0].double().chunk(2)[rank]
        expected = part.exp() * part.abs() ** -2 * part.abs() ** 0.25
        _close(Numbers(case.table, case.given).value(value, {"tp": rank, "dp": 0}), expected)


@pytest.mark.parametrize("part", range(8))
def test_no_row_ignores_an_argument(part: int) -> None:
    """A row with another argument means what torch computes then, or is refused."""
    random_, right = random.Random(part), 0
    for at in range(part, len(CASES), 8):
        torch.manual_seed(at)
        for op, args, kwargs in _changed(at, random_):
            case = Case(op, args, kwargs, {})
            try:
                expected = case.torch({}, case.tensors)
                _, results = case.reader.line(case.line(expected), case.values, case.types)
                numbers = Numbers(case.table, case.given)
                have = [numbers.value(value, {"tp": 0, "dp": 0}) for value in results]
            except (Refused, RuntimeError, *programs.UNREADABLE):  # no such line, or not one that torch runs
                continue
            for got, want in zip(have, expected, strict=True):
                if want is not None and got.shape == want.shape:  # others are no results that a line may have
                    torch.testing.assert_close(got, want.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
            right += 1
    assert right > 30


def test_every_row_of_torchs_operators_is_compared() -> None:
    left = (
        {op for op in rows.ROWS if op.startswith("aten.")} - {op for op, _, _ in CASES} - {chain[2] for chain in CHAINS}
    )
    assert left == set()
