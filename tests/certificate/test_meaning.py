"""The normal form beside numbers: random programs of all ranks, line by line, and random sums of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from certificate.alike import Alike
from certificate.letters import Affine, DivideAxis, Letter, Read, number
from certificate.meaning import Table, Value
from certificate.nodes import Form
from certificate.step import FORMS
from certificate.tensors import Tensors
from certificate.text import Mesh, Refused, read_type
from certificate.views import running

# ---- numbers of meanings

OPS: Mapping[str, Callable[..., Tensor]] = {
    "sin": torch.sin, "cos": torch.cos, "power": lambda x, y: x * x + 2 * y, "inverse": lambda x: 1 / x,
}  # fmt: skip
"""Functions of entries, as the table knows them by their names alone."""


class Numbers:
    """The numbers of a table's nodes, for numbers of its leaves."""

    def __init__(self, table: Table, leaves: Mapping[str, Tensor]) -> None:
        self.table, self.leaves = table, leaves
        self._known: dict[int, Tensor] = {}

    def at(self, read: Read, places: Mapping[Letter, Tensor]) -> Tensor:
        """Return the numbers of a read, for a place of each of its letters."""
        index = [self._index(each, places) for each in read.maps]
        node = self.table.nodes[read.node]
        coefficient = float(read.coefficient)
        if node.op == "one":
            return torch.tensor(coefficient, dtype=torch.float64)
        if read.node == self.table.delta:
            return coefficient * (index[0] == index[1]).double()
        whole = self.of(read.node)
        for place, size in zip(index, whole.shape, strict=True):
            assert bool(((place >= 0) & (place < size)).all()), "is read outside of its loops"
        return coefficient * (whole[tuple(index)] if index else whole)

    def _index(self, index: Affine, places: Mapping[Letter, Tensor]) -> Tensor:
        total = torch.tensor(index[0])
        for letter, stride in index[1]:
            total = total + stride * places[letter]
        return total

    def of(self, at: int) -> Tensor:
        """Return all numbers of a node."""
        known = self._known.get(at)
        if known is None:
            node = self.table.nodes[at]
            if node.op in self.leaves:
                return self.leaves[node.op]
            sizes = (*node.sizes, *node.inner)
            places = dict(enumerate(grid(sizes)))
            each = [self.at(read, places).expand(sizes) for read in node.reads]
            known = self._known[at] = self._computed(node, each)
        return known

    def _computed(self, node: Any, each: Sequence[Tensor]) -> Tensor:
        inner = tuple(range(len(node.sizes), len(node.sizes) + len(node.inner)))
        if node.op in ("product", "squares"):
            result = torch.stack(list(each)).prod(0) if node.op == "product" else each[0] ** 2
            return result.sum(inner) if inner else result
        if node.op == "sum":
            return torch.stack(list(each)).sum(0)
        if node.op == "largest":
            return each[0].amax(inner)
        if node.op == "flat":  # its own loop counts what it looks along, which may be several letters
            return each[0][0].flatten(-len(inner)).movedim(-1, 0)
        return OPS[node.op](*each)

    def of_rank(self, tensors: Tensors, value: Value, ranks: Mapping[str, int]) -> Tensor | None:
        """Return a rank's numbers of a value; None where the value is known in sums over all ranks alone."""
        read, dims, sizes = self.table.letters(value)
        order = [letter for dim in dims for letter in dim]
        places: dict[Letter, Tensor] = dict(zip(order, grid([sizes[letter] for letter in order]), strict=True))
        for letter, part in tensors._parts_of(read, sizes).items():
            if part is None:
                return None
            count = self.table.mesh[letter[1:]]
            turned = places[part] % 2 == 1
            places[letter] = torch.where(turned, count - 1 - ranks[letter[1:]], torch.tensor(ranks[letter[1:]]))
        places |= {name: torch.tensor(at) for name, at in ranks.items()}
        return self.at(read, places).expand([sizes[letter] for letter in order]).reshape(value.shape)


def grid(sizes: Sequence[int]) -> list[Tensor]:
    """Return the numbers of places along each of some dims, which broadcast to all of them."""
    rank = len(sizes)
    return [
        torch.arange(size).reshape([-1 if at == dim else 1 for at in range(rank)]) for dim, size in enumerate(sizes)
    ]


# ---- random programs of all ranks

MESH = Mesh((("tp", 2), ("cp", 3)), ())
RANKS = [{"tp": tp, "cp": cp} for tp in range(2) for cp in range(3)]
Local = list[Tensor]
"""A value's numbers on every rank."""


class Programs:
    """Values of random programs: their meanings, and their numbers on every rank."""

    def __init__(self, seed: int, names: str = "abc", tensors: Tensors | None = None) -> None:
        self.draw = Random(seed)
        self.tensors = tensors or Tensors(Table(dict(MESH.sizes)), MESH)
        self.table = self.tensors.table
        self.table.form = FORMS[seed % len(FORMS)]
        self.leaves: dict[str, Tensor] = {}
        self.numbers = Numbers(self.table, self.leaves)
        self.values: list[tuple[Value, Local]] = []
        self.steps = 0
        generator = torch.Generator().manual_seed(seed)
        for name in names:
            text = self.draw.choice(TYPES)
            type_ = read_type(text, MESH)
            whole = torch.randint(-3, 4, type_.shape, generator=generator).double() / 2
            self.leaves[name] = whole
            value = self.tensors.piece(self.table.leaf(name, type_.shape), type_)
            self.keep(value, [self.cut(whole, type_, ranks) for ranks in RANKS])

    def cut(self, whole: Tensor, type_: Any, ranks: Mapping[str, int]) -> Tensor:
        """Return a rank's piece of a tensor."""
        for dim, stretches in enumerate(type_.dims):
            kept, start = [], 0
            for stretch in stretches:
                numbers, after = torch.zeros(1, dtype=torch.long), 0
                for atom in stretch:
                    if not atom.axis:
                        place = torch.arange(atom.size).expand(len(numbers), -1)
                        after = atom.size
                    else:
                        at = ranks[atom.axis.lstrip("~")]
                        turned = atom.axis[0] == "~" and (numbers % 2 == 1)
                        place = torch.where(torch.as_tensor(turned), atom.size - 1 - at, at).expand(len(numbers))[
                            :, None
                        ]
                    numbers = (numbers[:, None] * atom.size + place).reshape(-1)
                kept.append(numbers + start)
                start += math.prod(atom.size for atom in stretch)
                assert after >= 0
            whole = whole.index_select(dim, torch.cat(kept))
        return whole

    def keep(self, value: Value, local: Local) -> None:
        """Compare a value with its numbers on every rank, and keep it."""
        for ranks, have in zip(RANKS, local, strict=True):
            assert value.shape == tuple(have.shape)
            expected = self.numbers.of_rank(self.tensors, value, ranks)
            assert expected is None or torch.allclose(expected, have), (value, ranks, expected, have)
        if all(float(have.abs().max()) < 1e4 for have in local):
            self.values.append((value, local))
        self.steps += 1

    def step(self) -> None:
        """Do a random line, unless the checker refuses it."""
        name = self.draw.choice(list(LINES))
        picked = [self.draw.choice(self.values) for _ in range(2)]
        before = len(self.table.nodes)
        try:
            found = LINES[name](self, *picked)
        except (Refused, DivideAxis, RecursionError):  # the last is refused in words where a build is read
            return
        assert before <= len(self.table.nodes)
        if found is not None:
            self.keep(*found)

    # each line returns the meaning and the numbers

    def pointwise(self, x: tuple[Value, Local], y: tuple[Value, Local]) -> tuple[Value, Local] | None:
        op = self.draw.choice(["sin", "cos", "power"])
        args = (x, y) if op == "power" else (x,)
        if op == "power" and not fits(x[0], y[0]):
            return None
        value = self.tensors.pointwise(op, [each[0] for each in args])
        return value, [OPS[op](*each) for each in zip(*(each[1] for each in args), strict=True)]

    def arithmetic(self, x: tuple[Value, Local], y: tuple[Value, Local]) -> tuple[Value, Local] | None:
        if not fits(x[0], y[0]):
            return None
        if self.draw.random() < 0.5:
            by = self.draw.choice([1, -1, 2])
            return self.tensors.plus(x[0], y[0], by=(1, by)), [a + by * b for a, b in zip(x[1], y[1], strict=True)]
        return self.tensors.times(x[0], y[0]), [a * b for a, b in zip(x[1], y[1], strict=True)]

    def contract(self, x: tuple[Value, Local], y: tuple[Value, Local]) -> tuple[Value, Local] | None:
        if len(x[0].dims) != 2 or len(y[0].dims) != 2:
            return None
        rows, other = self.draw.choice([("mk", "kn"), ("mk", "nk"), ("km", "kn"), ("mk", "mn"), ("mk", "mk")])
        sizes = [*zip(rows, x[0].shape, strict=True), *zip(other, y[0].shape, strict=True)]
        if len({*sizes}) != len({letter for letter, _ in sizes}):
            return None
        result = "".join(self.draw.sample(sorted({*rows, *other}), self.draw.randrange(0, 3)))
        value = self.tensors.product([x[0], y[0]], [rows, other], result)
        return value, [torch.einsum(f"{rows},{other}->{result}", a, b) for a, b in zip(x[1], y[1], strict=True)]

    def network(self, x: tuple[Value, Local], y: tuple[Value, Local]) -> tuple[Value, Local] | None:
        """Return a sum of products of three or four values, over random letters that their sizes allow."""
        values = [x, y, *(self.draw.choice(self.values) for _ in range(self.draw.randrange(1, 3)))]
        names: dict[str, int] = {}
        rows = []
        for value, _ in values:
            row = ""
            for size in value.shape:
                known = [name for name, other in names.items() if other == size and name not in row]
                if not known or self.draw.random() < 0.2:
                    known = ["abcdefgh"[len(names)]] if len(names) < 8 else []
                if not known:
                    return None
                row += self.draw.choice(known)
                names[row[-1]] = size
            rows.append(row)
        result = "".join(self.draw.sample(sorted(names), min(len(names), self.draw.randrange(0, 3))))
        if math.prod(names.values()) > 20_000:
            return None
        value = self.tensors.product([each for each, _ in values], rows, result)
        locals_ = zip(*(each for _, each in values), strict=True)
        return value, [torch.einsum(f"{','.join(rows)}->{result}", *each) for each in locals_]

    def reduce(self, x: tuple[Value, Local], _: Any) -> tuple[Value, Local] | None:
        if not x[0].dims:
            return None
        dim, keep = self.draw.randrange(len(x[0].dims)), self.draw.random() < 0.5
        if self.draw.random() < 0.6:
            return self.tensors.total(x[0], [dim], keep), [a.sum(dim, keep) for a in x[1]]
        if self.draw.random() < 0.6:
            return self.tensors.largest(x[0], [dim], keep), [a.amax(dim, keep) for a in x[1]]
        return self.tensors.squares(x[0]), [a.square().sum() for a in x[1]]

    def views(self, x: tuple[Value, Local], _: Any) -> tuple[Value, Local] | None:
        value, local = x
        kind, rank = self.draw.choice(["reshape", "transpose", "expand", "unsqueeze"]), len(value.dims)
        if kind == "unsqueeze":
            dim = self.draw.randrange(rank + 1)
            return self.tensors.unsqueeze(value, dim), [a.unsqueeze(dim) for a in local]
        if kind == "expand":
            shape = [2 if size == 1 else size for size in value.shape]
            return self.tensors.expand(value, shape), [a.expand(shape) for a in local]
        if rank < 2:
            return None
        if kind == "transpose":
            return self.tensors.transpose(value, 0, 1), [a.transpose(0, 1) for a in local]
        wanted = self.draw.choice([[-1], [value.shape[0] * value.shape[1], -1], [2, -1], [-1, 2], [-1, 3]])
        shape = [size if size > 0 else math.prod(value.shape) // -math.prod(wanted) for size in wanted]
        if math.prod(shape) != math.prod(value.shape):
            return None
        return self.tensors.reshape(value, shape), [a.reshape(shape) for a in local]

    def cuts(self, x: tuple[Value, Local], y: tuple[Value, Local]) -> tuple[Value, Local] | None:
        value, local = x
        if not value.dims:
            return None
        dim, kind = self.draw.randrange(len(value.dims)), self.draw.choice(["part", "select", "place", "cat"])
        size = value.shape[dim]
        start, step = self.draw.randrange(size), self.draw.choice([1, 1, 2])
        if kind == "part":
            count = self.draw.randrange(1, (size - 1 - start) // step + 2)
            part = slice(start, start + (count - 1) * step + 1, step)
            return self.tensors.part(value, dim, start, count, step), [a[(slice(None),) * dim + (part,)] for a in local]
        if kind == "select":
            return self.tensors.select(value, dim, start), [a.select(dim, start) for a in local]
        if kind == "place":
            whole = start + (size - 1) * step + 1 + self.draw.randrange(2)
            zeros = [a.new_zeros(*a.shape[:dim], whole, *a.shape[dim + 1 :]) for a in local]
            for a, z in zip(local, zeros, strict=True):
                z[(slice(None),) * dim + (slice(start, start + (size - 1) * step + 1, step),)] = a
            return self.tensors.place(value, dim, start, whole, step), zeros
        other = [
            each
            for each in self.values
            if len(each[0].dims) == len(value.dims)
            and all(at == dim or a == b for at, (a, b) in enumerate(zip(each[0].shape, value.shape, strict=True)))
        ]
        y = self.draw.choice(other)
        if size + y[0].shape[dim] > 14:
            return None
        return self.tensors.cat([value, y[0]], dim), [torch.cat([a, b], dim) for a, b in zip(local, y[1], strict=True)]

    def sums(self, x: tuple[Value, Local], _: Any) -> tuple[Value, Local]:
        axes = self.draw.choice([["tp"], ["cp"], ["tp", "cp"]])
        total = [sum(a for a, _ in group(x[1], ranks, axes)) for ranks in RANKS]
        return self.tensors.over(x[0], axes), total  # type: ignore[return-value]

    def moves(self, x: tuple[Value, Local], _: Any) -> tuple[Value, Local] | None:
        value, local = x
        if not value.dims:
            return None
        dim, axes, outer = self.draw.randrange(len(value.dims)), self.draw.choice([["tp"], ["cp"]]), 1
        if self.draw.random() < 0.6:
            outer, axes = self.draw.choice([2, -2, -2, -2]), ["cp"]
        kind, count = self.draw.choice(["gather", "own", "pad"]), dict(MESH.sizes)[axes[0]]
        size = value.shape[dim]
        if (
            size % abs(outer)
            or (kind == "own" and size % (abs(outer) * count))
            or (kind != "own" and size * count > 24)
        ):
            return None
        if kind == "own":
            parts = [[own(a, dim, outer, count, at[axes[0]])] for a, at in zip(local, RANKS, strict=True)]
            return self.tensors.kept(value, axes, dim, outer), [part for (part,) in parts]
        result = []
        for ranks, a in zip(RANKS, local, strict=True):
            wide = a.new_zeros(*a.shape[:dim], size * count, *a.shape[dim + 1 :])
            for piece, at in group(local, ranks, axes) if kind == "gather" else [(a, ranks)]:
                index = torch.arange(size * count).reshape(abs(outer), count, -1)
                rows = [
                    index[o, count - 1 - at[axes[0]] if outer < 0 and o % 2 else at[axes[0]]] for o in range(abs(outer))
                ]
                wide.index_copy_(dim, torch.cat(rows), piece)
            result.append(wide)
        change = self.tensors.gathered if kind == "gather" else self.tensors.padded
        return change(value, axes, dim, outer), result


def group(local: Local, ranks: Mapping[str, int], axes: Sequence[str]) -> list[tuple[Tensor, Mapping[str, int]]]:
    """Return the numbers of all ranks that differ along some axes alone, with these ranks."""
    return [(a, at) for a, at in zip(local, RANKS, strict=True)
            if all(at[axis] == ranks[axis] for axis in at if axis not in axes)]  # fmt: skip


def own(a: Tensor, dim: int, outer: int, count: int, rank: int) -> Tensor:
    """Return a rank's share of each part of a dim."""
    index = torch.arange(a.shape[dim]).reshape(abs(outer), count, -1)
    rows = [index[at, count - 1 - rank if outer < 0 and at % 2 else rank] for at in range(abs(outer))]
    return a.index_select(dim, torch.cat(rows))


def fits(x: Value, y: Value) -> bool:
    """Return whether two values broadcast."""
    return all(a == b or 1 in (a, b) for a, b in zip(x.shape[::-1], y.shape[::-1], strict=False))


LINES = {
    "pointwise": Programs.pointwise, "arithmetic": Programs.arithmetic, "times": Programs.arithmetic,
    "contract": Programs.contract, "network": Programs.network, "reduce": Programs.reduce,
    "views": Programs.views, "cuts": Programs.cuts, "sums": Programs.sums,
    "moves": Programs.moves, "moves again": Programs.moves,
}  # fmt: skip
TYPES = (
    "f32[6/cp, 4]", "f32[4/tp, 6]", "f32[(2 6/~cp), 4]", "f32[(2 6/~cp), 2]", "f32[4, (2 6/~cp)]", "f32[12/tp/cp, 2]",
    "f32[(2 4/tp), 3]", "f32[4, 6]", "f32[(2/tp + 4/tp), 4]", "f32[12/cp]", "f32[(2 6/~cp)]", "f32[(2 2/tp 3/cp), 2]",
)  # fmt: skip


@pytest.mark.parametrize("part", range(6))
def test_every_rank_has_the_numbers_that_a_meaning_has_there(part: int) -> None:
    steps = 0
    for seed in range(part * 60, part * 60 + 60):
        programs = Programs(seed)
        for _ in range(25):
            programs.step()
        steps += programs.steps
    assert steps > 500


def test_what_is_alike_has_the_meaning_that_is_computed_for_it() -> None:
    known = computed = 0
    for seed in range(50):
        first = Programs(seed)
        alike = Alike(first.table)
        for programs in (first, Programs(seed, "xyz", first.tensors)):
            for at in range(20):
                name, picked = programs.draw.choice(list(LINES)), [programs.draw.choice(programs.values) for _ in "xy"]
                state, calls = programs.draw.getstate(), computed

                def meant(
                    programs: Programs = programs, name: str = name, picked: Any = picked, state: Any = state
                ) -> Any:
                    nonlocal computed
                    computed += 1
                    programs.draw.setstate(state)
                    line = LINES[name](programs, *picked)
                    return [None if line is None else line[0]]

                try:
                    values = alike.results((at, name), [value for value, _ in programs.values], meant)
                except (Refused, DivideAxis, RecursionError):
                    continue
                known += computed == calls
                assert list(values) == meant()
                programs.draw.setstate(state)
                if (line := LINES[name](programs, *picked)) is not None:
                    programs.keep(*line)
    assert known > 300


def test_operands_in_another_order_are_not_alike() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    alike, (a, b, c, d) = Alike(t.table), [piece(t, name, "f32[4, 6]") for name in "abcd"]
    for x, y in ((a, b), (d, c), (a, a), (c, d)):
        labels = [[0, 1], [2, 1]]
        value = alike.value("x @ y.t()", [x, y], lambda x, y: t.product([x, y], [[0, 1], [2, 1]], [0, 2]))
        assert value == t.product([x, y], labels, [0, 2])


def test_a_fact_that_a_computation_relies_on_is_asked_of_what_is_alike() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    alike, (a, b, c) = Alike(t.table), [piece(t, name, "f32[4, 6]") for name in "abc"]

    def of_two(x: Value) -> Value:
        if not t.table.agree(x.node, 2):
            raise Refused("another number")
        return x

    assert [alike.value("top", [x], of_two) for x in (a, b)] == [a, b]
    assert not t.table.agree(b.node, 3)  # it was said of b where a was computed
    t.table.agree(c.node, 3)
    with pytest.raises(Refused):
        alike.value("top", [c], of_two)


def piece(t: Tensors, name: str, text: str) -> Value:
    type_ = read_type(text, MESH)
    return t.piece(t.table.leaf(name, type_.shape), type_)


def test_ranks_that_count_in_reverse_are_not_gathered_in_another_order() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    x = piece(t, "x", "f32[(2 6/~cp)]")
    assert t.gathered(x, ["cp"], 0, -2) == piece(t, "x", "f32[12]")
    with pytest.raises(Refused, match="in another order"):
        t.gathered(x, ["cp"], 0, 2)
    with pytest.raises(Refused, match="in reverse"):  # rank 0 has the first part of six, and the last
        t.times(t.part(x, 0, 0, 2), t.part(x, 0, 2, 2))


def test_a_rank_puts_its_own_piece_among_zeros() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    wide = t.padded(piece(t, "x", "f32[6/cp]"), ["cp"], 0, 1)
    assert t.over(wide, ["cp"]) == piece(t, "x", "f32[6]")


def test_entries_in_another_order_are_another_operand() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    x = t.reshape(piece(t, "x", "f32[4]"), (2, 2))
    within = t.reshape(t.expand(t.reshape(x, (2, 1, 2)), (2, 2, 2)), (8,))
    around = t.reshape(t.expand(t.reshape(x, (1, 2, 2)), (2, 2, 2)), (8,))
    assert t.flat(within, 0) != t.flat(around, 0)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_placed_alike_is_one_term(form: Form) -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = form
    x, y, scale = (piece(t, name, text) for name, text in (("x", "f32[6, 2]"), ("y", "f32[6, 2]"), ("s", "f32[2]")))
    there = t.place(t.plus(x, t.times(y, scale)), 0, 1, 8)
    assert t.plus(t.place(x, 0, 1, 8), t.times(t.place(y, 0, 1, 8), scale)) == there
    apart = t.plus(t.place(x, 0, 1, 8), t.times(t.place(y, 0, 2, 8), scale))
    assert apart != there
    random = {name: torch.randn(v.shape, dtype=torch.float64) for name, v in (("x", x), ("y", y), ("s", scale))}
    numbers = Numbers(t.table, random)
    for value, at in ((there, 1), (apart, 2)):
        expected = torch.zeros(8, 2, dtype=torch.float64)
        expected[1:7] += random["x"]
        expected[at : at + 6] += random["y"] * random["s"]
        read, _, sizes = t.table.letters(value)
        places = dict(zip(sizes, grid(list(sizes.values())), strict=True))
        torch.testing.assert_close(numbers.at(read, places).reshape(8, 2), expected)


def test_what_all_terms_have_in_common_stands_apart_where_other_terms_lack_it() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    s, a, b, c = (piece(t, name, text) for name, text in zip("sabc", ("f32[]", *["f32[4]"] * 3), strict=True))
    first = t.plus(t.times(s, t.plus(a, b)), c)
    assert first == t.plus(t.times(s, a), t.plus(t.times(s, b), c))
    assert first == t.plus(t.times(s, b), t.plus(c, t.times(s, a)))
    assert first != t.plus(t.times(s, a), b, c)
    assert first != t.plus(t.times(s, t.plus(a, b)), c, by=(2, 1))


@pytest.mark.parametrize("form", FORMS)
def test_windows_may_be_placed_in_any_order(form: Form) -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = form
    parts = {(i, j): piece(t, f"x{i}{j}", "f32[3]") for i in range(2) for j in range(2)}

    def placed(at: tuple[int, int], there: tuple[int, int]) -> Value:
        row = t.place(t.unsqueeze(parts[at], 0), 0, there[1], 2)
        return t.place(t.unsqueeze(row, 0), 0, there[0], 2)

    every = t.plus(*(placed(at, at) for at in parts))
    in_pairs = t.plus(
        t.plus(placed((1, 0), (1, 0)), placed((1, 1), (1, 1))), t.plus(*(placed(p, p) for p in list(parts)[:2]))
    )
    assert t.canonical(every, in_pairs)
    turned = t.transpose(t.plus(*(placed(at, at[::-1]) for at in parts)), 0, 1)
    assert t.canonical(every, turned)
    assert not t.canonical(every, t.plus(*(placed(at, at[::-1]) for at in parts)))
    assert not t.canonical(every, t.plus(*(placed(at, (1 - at[0], at[1])) for at in parts)))


def test_loops_that_may_be_exchanged_are_read_in_one_order() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    a, b, y = (piece(t, name, text) for name, text in (("a", "f32[6]"), ("b", "f32[6]"), ("y", "f32[6, 6]")))
    same, other = (t.product([a, each], [[0], [1]], [0, 1]) for each in (a, b))
    for value, may in ((same, True), (t.pointwise("sin", [same]), True), (other, False), (t.plus(same, a), False)):
        turned = t.transpose(value, 0, 1)
        assert t.canonical(t.plus(value, turned), t.scaled(value, 2)) == may
        assert t.canonical(t.times(value, y), t.times(turned, y)) == may
        assert t.canonical(t.times(value, y), t.times(value, t.transpose(y, 0, 1))) is False


def test_sums_in_another_order_are_equal_and_no_multiple_of_them_is() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    c, w, x, z = (
        piece(t, name, text)
        for name, text in (("c", "f32[3/cp]"), ("w", "f32[4]"), ("x", "f32[3/cp, 4]"), ("z", "f32[3/cp]"))
    )
    inside = t.reshape(t.product([w, x], ["i", "bi"], "b"), (1,))
    total = t.plus(t.total(t.times(c, inside), [0]), t.total(z, [0]))
    by_rank = t.over(total, ["cp"])
    c, w, x, z = (
        piece(t, name, text) for name, text in (("c", "f32[3]"), ("w", "f32[4]"), ("x", "f32[3, 4]"), ("z", "f32[3]"))
    )
    terms = t.product([c, w, x], ["b", "i", "bi"], ""), t.total(z, [0])
    assert t.canonical(by_rank, t.plus(*terms))
    for wrong in ((1.0005, 1), (1, 1.0005), (1.0005, 1.0005), (1, 0), (1, -1)):
        assert not t.canonical(by_rank, t.plus(*terms, by=[number(each) for each in wrong]))
        assert not t.canonical(t.plus(*terms, by=[number(each) for each in wrong]), by_rank)
    assert not t.canonical(t.scaled(by_rank, number(1.0005)), t.plus(*terms))
    assert not t.canonical(by_rank, t.plus(t.product([w, x, x], ["i", "bi", "bi"], ""), terms[1]))


# ---- orders of what commutes


def of_edges(table: Table, edges: Sequence[tuple[int, int]]) -> int:
    """Return the node of a product with a read of one matrix for each edge of a graph, summed over all its points."""
    matrix = table.leaf("x", (3, 3))
    reads = [Read(1, matrix, tuple((0, ((point, 1),)) for point in edge)) for edge in edges]
    return table.make("product", (), reads, dict.fromkeys(range(20), 3), range(20), commutes=True)[0]


@pytest.mark.parametrize(
    "edges",
    [
        [(at, (at + 1) % 9) for at in range(9)],
        [(at, at + 1) for at in range(0, 20, 2)],
        [(0, 1), (1, 2), (2, 0), (2, 3), (4, 3), (5, 4), (5, 6), (6, 3), (7, 0), (7, 8), (8, 8)],
    ],
    ids=["ring", "apart", "any"],
)
def test_equal_reads_are_one_node_in_whatever_order_and_by_whatever_letters_they_come(
    edges: list[tuple[int, int]],
) -> None:
    table, draw = Table({}), Random(0)
    first = of_edges(table, edges)
    for _ in range(10):
        letters = draw.sample(range(20), 20)
        again = [(letters[one], letters[other]) for one, other in draw.sample(edges, len(edges))]
        assert of_edges(table, again) == first


def test_reads_of_other_points_are_another_node() -> None:
    table = Table({})
    ring = [(at, (at + 1) % 9) for at in range(9)]
    assert of_edges(table, ring) != of_edges(table, [*ring[:-1], (0, 8)])
    assert of_edges(table, ring) != of_edges(
        table, [(0, 1), (1, 2), (2, 0), *((at, at + 1) for at in range(3, 8)), (8, 3)]
    )


@pytest.mark.parametrize("form", FORMS)
def test_what_ranks_sum_of_some_entries_is_some_entries_of_the_sum(form: Form) -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = form
    a, c, k = (
        piece(t, name, text) for name, text in zip("ack", ("f32[2/tp, 6, 3]", "f32[2/tp, 3]", "f32[3]"), strict=True)
    )

    def of_every_second(parts: Value, start: int) -> Value:
        return t.product([t.place(k, 0, start, 6, 2), parts], ["d", "d"], "")

    by_rank = [t.over(of_every_second(t.product([a, c], ["rds", "rs"], "d"), start), ["tp"]) for start in (0, 1)]
    a, c = piece(t, "a", "f32[2, 6, 3]"), piece(t, "c", "f32[2, 3]")
    whole = [of_every_second(t.product([a, c], ["rds", "rs"], "d"), start) for start in (0, 1)]
    assert by_rank == whole
    assert not t.canonical(by_rank[0], whole[1])


def test_a_rank_sums_its_part_of_a_dim_of_three_as_it_takes_its_part_of_the_sum() -> None:
    """Queries, keys and values of one weight, in parts over two ranks: each has one and a half of them."""
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    g, x = piece(t, "g", "f32[4, 3, 2, 5]"), piece(t, "x", "f32[4, 7]")
    type_ = read_type("f32[30/tp, 7]", MESH)

    def rows(gradient: Value) -> Value:
        return t.reshape(gradient, (*gradient.shape[:-4], 30, 7))

    each = t.product([g, x], ["mabc", "mx"], "mabcx")
    whole = t.product([each], ["mabcx"], "abcx")
    of_rank = t.product([t.cut(rows(each), read_type("f32[4, 30/tp, 7]", MESH))], ["mrx"], "rx")
    assert of_rank == t.cut(rows(whole), type_)
    turned = t.permute(whole, [1, 0, 2, 3])
    assert not t.canonical(of_rank, t.cut(rows(turned), type_))


def test_heads_of_which_half_have_no_bias_are_split_over_ranks() -> None:
    """ALiBi for two of four heads: one rank has the two with a bias, and the other one those without."""
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = Form(in_digits=True)

    def exponentials(scores: Value, bias: Value) -> Value:
        return t.pointwise("exp", [t.plus(scores, bias)])

    bias = t.place(piece(t, "slopes", "f32[2, 5]"), 0, 0, 4)
    of_rank = exponentials(piece(t, "scores", "f32[4/tp, 5]"), t.cut(bias, read_type("f32[4/tp, 5]", MESH)))
    weights = piece(t, "w", "f32[4/tp, 5]")
    summed = t.over(t.product([of_rank, weights], ["hk", "hk"], "k"), ["tp"])
    whole = exponentials(piece(t, "scores", "f32[4, 5]"), bias)
    assert t.canonical(summed, t.product([whole, piece(t, "w", "f32[4, 5]")], ["hk", "hk"], "k"))
    behind = exponentials(piece(t, "scores", "f32[4, 5]"), t.place(piece(t, "slopes", "f32[2, 5]"), 0, 2, 4))
    assert not t.canonical(summed, t.product([behind, piece(t, "w", "f32[4, 5]")], ["hk", "hk"], "k"))


def test_the_sum_up_to_each_entry_of_a_single_one_is_the_entry() -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    x = piece(t, "x", "f32[4, 1]")
    assert running(t, x, 1) == x
    assert running(t, piece(t, "x", "f32[4, 2]"), 1) != piece(t, "x", "f32[4, 2]")


def test_ranks_may_centre_a_long_sum_that_none_of_them_has() -> None:
    """A residual stream of which each rank has a summand is centred before it is summed: its name is nowhere."""
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = Form(named=False)

    def centred(split: str, size: int) -> Value:
        pieces = [[piece(t, f"x{at}", f"f32[4, 6{split}]"), piece(t, f"w{at}", f"f32[6{split}, 5]")] for at in range(7)]
        stream = t.plus(*(t.product(each, ["rk", "kc"], "rc") for each in pieces))
        return t.plus(stream, t.unsqueeze(t.total(stream, [1]), 1), by=(1, Fraction(-1, size)))

    t.table.naming = t.table.form.named
    whole = t.pointwise("exp", [centred("", 5)])
    t.table.naming = False
    assert t.canonical(t.pointwise("exp", [t.over(centred("/tp", 5), ["tp"])]), whole)
    assert not t.canonical(t.pointwise("exp", [t.over(centred("/tp", 4), ["tp"])]), whole)


@pytest.mark.parametrize("form", FORMS)
def test_grids_behind_a_token_meet_place_by_place(form: Form) -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = form
    x, y = (t.reshape(piece(t, name, "f32[2, 3]"), (6,)) for name in "xy")
    behind = [t.product([t.place(x, 0, 1, 9), t.place(y, 0, start, 9)], ["s", "s"], "") for start in (1, 2)]
    assert behind[0] == t.product([x, y], ["s", "s"], "")
    assert not t.canonical(behind[1], behind[0])
    numbers = Numbers(t.table, {name: torch.randn(2, 3, dtype=torch.float64) for name in "xy"})
    one, other = (numbers.leaves[name].flatten() for name in "xy")
    for value, expected in zip(behind, (one @ other, one[1:] @ other[:-1]), strict=True):
        torch.testing.assert_close(numbers.at(t.table.letters(value)[0], {}), expected)


@pytest.mark.parametrize("form", FORMS)
def test_dims_that_count_by_parts_without_common_ones_meet_entry_by_entry(form: Form) -> None:
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = form
    texts = {"x": "f32[2/tp, 2, 3]", "y": "f32[3, 2]", "z": "f32[3, 2]"}
    leaves = {
        name: torch.randn(shape, dtype=torch.float64)
        for name, shape in zip(texts, ((2, 2, 3), (3, 2), (3, 2)), strict=True)
    }
    x, y, z = (t.reshape(piece(t, name, text), (1, 6)) for name, text in texts.items())
    numbers = Numbers(t.table, leaves)
    rows = [leaves["x"].reshape(2, 6)[tp] for tp in range(2)]
    other, third = leaves["y"].flatten(), leaves["z"].flatten()
    lines = {
        "dot": (t.product([x, y], ["rs", "rs"], "r"), lambda row: (row @ other)[None]),
        "sum": (t.plus(x, y, z), lambda row: (row + other + third)[None]),
        "power": (t.pointwise("power", [y, x]), lambda row: OPS["power"](other, row)[None]),
    }
    for value, of_row in lines.values():
        for tp, row in enumerate(rows):
            have = numbers.of_rank(t, value, {"tp": tp, "cp": 0})
            assert have is not None
            torch.testing.assert_close(have, of_row(row))
    x_whole = t.reshape(piece(t, "x", "f32[2, 2, 3]"), (2, 6))
    dot = t.over(lines["dot"][0], ["tp"])
    assert t.canonical(dot, t.total(t.product([y, x_whole], ["as", "rs"], "r"), [0], keep=True))
    assert not t.canonical(dot, t.total(t.product([z, x_whole], ["as", "rs"], "r"), [0], keep=True))
    assert t.canonical(t.plus(z, y, x), lines["sum"][0])
    assert not t.canonical(t.plus(y, y, x), lines["sum"][0])
