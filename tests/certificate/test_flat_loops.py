"""Products of dims whose loops are one, beside torch: sums over all of such a dim, and beside it."""

from random import Random

import pytest
import torch

from certificate.meaning import Table
from certificate.nodes import Form
from certificate.step import FORMS
from certificate.tensors import Tensors
from tests.certificate.test_meaning import MESH, RANKS, Numbers, piece


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("form", FORMS)
def test_products_with_loops_that_are_one_have_the_same_numbers(form: Form, seed: int) -> None:
    """Dims of 6 are made one of two or three loops in some order; sums go over some dims, also over one that is read
    twice."""
    draw, generator = Random(seed), torch.Generator().manual_seed(seed)
    t = Tensors(Table(dict(MESH.sizes)), MESH)
    t.table.form = form
    sizes = {"a": draw.choice([4, 6, 12]), "b": draw.choice([4, 6, 12]), "c": 3}
    operands, labels, leaves = [], [], {}
    for name in "xyz"[: draw.choice([2, 3, 3])]:
        row = draw.choices("abc", k=draw.choice([1, 2, 2, 3]))
        inner = [draw.choice([[s], [2, s // 2], [s // 2, 2]] if s > 3 else [[s]]) for s in (sizes[r] for r in row)]
        grid = [size for part in inner for size in part]
        order = draw.sample(range(len(grid)), len(grid))
        stored = [grid[at] for at in order]
        leaves[name] = torch.randn(stored, dtype=torch.float64, generator=generator)
        value = t.permute(piece(t, name, f"f32{stored}"), [order.index(at) for at in range(len(grid))])
        value = t.reshape(value, [sizes[r] for r in row])
        for dim in range(len(row)):
            value = t.flat(value, dim) if draw.random() < 0.6 else value
        operands.append(value)
        labels.append(row)
    known = {label for row in labels for label in row}
    result = draw.sample(sorted(known), draw.choice(range(len(known))))
    have = t.product(operands, labels, result)
    numbers = Numbers(t.table, leaves)
    parts = [numbers.of_rank(t, operand, RANKS[0]) for operand in operands]
    text = f"{','.join(map(''.join, labels))}->{''.join(result)}"
    torch.testing.assert_close(numbers.of_rank(t, have, RANKS[0]), torch.einsum(text, *parts))
