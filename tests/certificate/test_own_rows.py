"""The rows of parc's own operators and collectives beside what ranks compute: one text is run by all ranks in one
process, and read by the checker, whose meaning of each result is computed for each rank."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from certificate.meaning import Table
from certificate.programs import Reader
from certificate.rows import ROWS
from certificate.text import Refused, read_program
from parc.compiler.layout.pieces import take
from parc.compiler.layout.placement import TensorType
from parc.compiler.program.text import parse_program
from parc.runtime.backends.in_process import InProcess
from parc.runtime.machine.execute import Machine
from parc.runtime.machine.kernels import KERNELS, REFERENCE_KERNELS

from .node_numbers import Numbers, T

AXES = {"dp": 2, "tp": 2}
_WHOLE_LOSS = "parc.token_loss.default"
_KERNELS = {**KERNELS, _WHOLE_LOSS: REFERENCE_KERNELS[_WHOLE_LOSS]}
"""The kernels of ranks, and the loss of whole logits, which only models have."""
HEAD = '"""parc program: role stage0, action F"""\n\nmesh(dp=2, tp=2)\n\n\n'
CHOSEN = torch.rand(4, 8, generator=torch.Generator().manual_seed(1)) < 0.4
"""The tokens, of eight, that each of four experts has."""
Q, K, MASS = "f64[2/dp, 4/tp, 3, 4]", "f64[2/dp, 2/tp, 3, 4]", "f64[2/dp, 4/tp, 3]"
RING = "gq, gk, gv = parc.ring_attention_backward"
PROGRAMS = {
    "sums": """
        x: f64[4/dp, 8/tp]
        w: f64[8/tp, 6]
        y = aten.mm.default(x, w)  # f64[4/dp, 6] +tp
        whole = parc.all_reduce(y, 'tp')  # f64[4/dp, 6]
        part = parc.reduce_scatter(y, 'tp', 1, 1)  # f64[4/dp, 6/tp]
        again = parc.all_gather(part, 'tp', 1, 1)  # f64[4/dp, 6]
        rows = parc.all_gather(again, 'dp', 0, 1)  # f64[4, 6]
        total = parc.square_sum.default(part)  # f64[] +dp +tp
        both = parc.all_reduce(total, 'dp,tp')  # f64[]
    """,
    "moves": """
        x: f64[8/dp/tp, 8]
        y: f64[(2 4/tp), 8/dp]
        both = parc.all_gather(x, 'dp,tp', 0, 1)  # f64[8, 8]
        inner = parc.all_gather(x, 'tp', 0, 1)  # f64[8/dp, 8]
        turned = parc.all_to_all(inner, 'dp', 0, 1, 1, 1)  # f64[8, 8/dp]
        apart = parc.all_gather(y, 'tp', 0, 2)  # f64[8, 8/dp]
        cut = parc.shard(turned, 'tp', 0, 2)  # f64[(2 4/tp), 8/dp]
        sent = parc.all_to_all(cut, 'tp', 0, 2, 1, 1)  # f64[8, 8/dp/tp]
        among = parc.pad(y, 'tp', 0, 2)  # f64[8, 8/dp] +tp
        back = parc.reduce_scatter(among, 'tp', 0, 2)  # f64[(2 4/tp), 8/dp]
    """,
    "in reverse": """
        x: f64[(2 4/~tp), 6/dp]
        whole = parc.all_gather(x, 'tp', 0, -2)  # f64[8, 6/dp]
        part = parc.shard(whole, 'tp', 0, -2)  # f64[(2 4/~tp), 6/dp]
    """,
    "as they are": """
        x: f64[8/dp, 6]
        stored = parc.store.default(x, 'offload')  # f64[8/dp, 6]
        loaded = parc.load.default(stored, 'offload')  # f64[8/dp, 6]
        sent = parc.all_gather(loaded, 'dp', 0, 1, message=1)  # f64[8, 6]
        y = aten.exp.default(x)  # f64[8/dp, 6]
        come = parc.wait(sent)  # f64[8, 6]
        count = parc.iota.default(8/tp, 3, 2, torch.int64)  # i64[8/tp]
    """,
    "tables": """
        table: f64[8/tp, 4]
        index: i64[6/dp, 2]
        g: f64[6/dp, 2, 4]
        rows = parc.lookup.default(table, index, -1)  # f64[6/dp, 2, 4] +tp
        whole = parc.all_reduce(rows, 'tp')  # f64[6/dp, 2, 4]
        of_table = parc.lookup_backward.default(g, index, 8/tp, 3)  # f64[8/tp, 4] +dp
    """,
    "losses": """
        logits: f64[6/dp, 8/tp]
        index: i64[6/dp]
        g: f64[2, 6/dp]
        peak = parc.row_max(logits, 'tp')  # f64[6/dp, 1]
        parts = parc.loss_parts.default(logits, peak, index)  # f64[2, 6/dp] +tp
        sums = parc.all_reduce(parts, 'tp')  # f64[2, 6/dp]
        back = parc.loss_parts_backward.default(g, logits, peak, index)  # f64[6/dp, 8/tp]
    """,
    "whole losses": """
        logits: f64[6/dp, 8]
        index: i64[6/dp]
        loss = parc.token_loss.default(logits, index, 3)  # f64[6/dp]
        peak = parc.row_max(logits, '')  # f64[6/dp, 1]
    """,
    **{f"attention{name}": f"""
        q: {Q}
        k: {K}
        v: {K}
        {operand}
        g: {Q}
        y, mass = parc.attention.default(q, k, v, {mask}, None, {facts}, 0.0)  # {Q}; {MASS}
        gq, gk, gv = parc.attention_backward.default(g, q, k, v, {mask}, None, y, mass, {facts}, 0.0)  # {Q}; {K}; {K}
    """ for name, operand, mask, facts in (
        ("", "", "None", "False, None"), (", causal", "", "None", "True, 0.3"),
        (", masked", "seen: bool[2/dp, 1, 3, 3]", "seen", "False, None"),
        (", biased", "seen: f64[1, 4/tp, 3, 3]", "seen", "True, None"),
    )},
    **{f"ring{name}": f"""
        q: f64[2/dp, 4, {rows}, 4]
        k: {keys}
        v: {keys}
        g: f64[2/dp, 4, {rows}, 4]
        y, mass = parc.ring_attention(q, 'tp', k, v, {facts})  # f64[2/dp, 4, {rows}, 4]; f64[2/dp, 4, {rows}]
        {RING}(g, 'tp', q, k, v, None, None, y, mass, {facts[12:]})  # f64[2/dp, 4, {rows}, 4]; {keys}; {keys}
    """ for name, rows, facts in (
        ("", "4/tp", "None, None, False, None, 0.0"), (", causal", "4/tp", "None, None, True, None, 0.0"),
        (", in reverse", "(2 4/~tp)", "None, None, True, None, 0.0"),
    ) for keys in (f"f64[2/dp, 2, {rows}, 4]",)},
    "experts": """
        chosen: bool[4, 8/dp/tp]
        x: f64[8/dp/tp, 3]
        w: f64[4/tp, 5, 3]
        scores: f64[4, 8/dp/tp]
        there = parc.all_to_all(chosen, 'tp', 1, 1, 0, 1)  # bool[4/tp, 8/dp]
        rows = parc.pack.default(x, chosen, 2)  # f64[(4 8/dp/tp), 3] 2 of 4
        sent = parc.exchange(rows, 'tp', 0, 4, 0, 1, chosen, there)  # f64[(4/tp 8/dp), 3] 2 of 4
        made = parc.expert_linear.default(sent, there, w, False, 2)  # f64[(4/tp 8/dp), 5] 2 of 4
        of_weight = parc.expert_outer.default(sent, made, there, False, 2)  # f64[4/tp, 5, 3] +dp
        back = parc.exchange(made, 'tp', 0, 1, 0, 4, there, chosen)  # f64[(4 8/dp/tp), 5] 2 of 4
        picked = parc.pick.default(scores, chosen, 2)  # f64[(4 8/dp/tp), 1] 2 of 4
        again = parc.unpick.default(picked, chosen, 2)  # f64[4, 8/dp/tp]
        scaled = aten.mul.Tensor(back, picked)  # f64[(4 8/dp/tp), 5] 2 of 4
        y = parc.unpack.default(scaled, chosen, 2)  # f64[8/dp/tp, 5]
    """,
    "experts' biases": """
        chosen: bool[4, 8/dp]
        b: f64[4, 3]
        x: f64[8/dp, 3]
        rows = parc.spread.default(b, chosen, 2)  # f64[(4 8/dp), 3] 2 of 4
        y = parc.unpack.default(rows, chosen, 2)  # f64[8/dp, 3]
        back = parc.pack.default(x, chosen, 2)  # f64[(4 8/dp), 3] 2 of 4
        of_b = parc.expert_sum.default(back, chosen, 2)  # f64[4, 3] +dp
        same = parc.route.default(x, chosen)  # f64[8/dp, 3]
    """,
    "experts with a capacity": """
        chosen: bool[4, 2/dp, 4]
        x: f64[2/dp, 4, 3]
        scores: f64[4, 2/dp, 4]
        slots = parc.slots.default(chosen, 2, 2)  # i64[4, 2/dp, 2]
        rows = parc.dispatch.default(x, slots)  # f64[4, 2/dp, 2, 3]
        there = parc.all_to_all(rows, 'dp', 1, 1, 0, 1)  # f64[4/dp, 2, 2, 3]
        back = parc.all_to_all(there, 'dp', 0, 1, 1, 1)  # f64[4, 2/dp, 2, 3]
        y = parc.combine.default(back, slots, 4)  # f64[2/dp, 4, 3]
        picked = parc.pick_slots.default(scores, slots)  # f64[4, 2/dp, 2]
        again = parc.unpick_slots.default(picked, slots, 4)  # f64[4, 2/dp, 4]
    """,
    "padding": """
        x: f64[6, 4/dp]
        y: f64[8/tp, 4]
        grown = parc.grow_pad.default(x, 0, 2, 3, 4)  # f64[8, 4/dp]
        cut = parc.cut_pad.default(grown, 0, 2, 3, 4)  # f64[6, 4/dp]
        filled = parc.fill_pad.default(y, 0, 2, 3, 4, 0.5)  # f64[8/tp, 4]
        zeros = parc.fill_pad.default(y, 0, 1, 5, 8, 0.0)  # f64[8/tp, 4]
    """,
}  # fmt: skip
"""Operands with their types, and lines; all results are compared, but packed rows."""


def _text(body: str) -> tuple[str, list[str]]:
    """Return the text of a program, and the names of the results that are compared."""
    lines = [line for line in textwrap.dedent(body).strip().splitlines() if line.strip()]
    operands = [line.split(": ") for line in lines if " = " not in line]
    lines = [line for line in lines if " = " in line]
    begun = {line.split(" = ")[0] for line in lines if "message=" in line}
    names = [
        name for line in lines if " of " not in line.rpartition("#")[2] for name in line.split(" = ")[0].split(", ")
    ]
    names = [name for name in names if name not in begun]
    text = HEAD + "def forward(\n" + "".join(f'    {name}: "{type_}",  # input {name}\n' for name, type_ in operands)
    text += "):\n" + "".join(f"    {line} | - -\n" for line in lines)
    return text + "    return {\n" + "".join(f'        "output {name}": {name},\n' for name in names) + "    }\n", names


def _drawn(name: str, type_: TensorType) -> T:
    if name == "chosen":
        return CHOSEN.view(type_.shape)
    if type_.dtype.is_floating_point:
        return torch.randn(type_.shape, dtype=type_.dtype)
    return torch.rand(type_.shape) < 0.7 if type_.dtype == torch.bool else torch.randint(0, 8, type_.shape)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_row_means_what_all_ranks_compute(name: str) -> None:
    text, names = _text(PROGRAMS[name])
    parsed = parse_program(text)
    torch.manual_seed(1)
    wholes = {value.name: _drawn(value.name, value.type) for value in parsed.main.parameters}
    mesh = parsed.mesh
    places = [mesh.coordinates(rank) for rank in range(mesh.world)]
    given = [
        {value.name: take(wholes[value.name], value.type.placement, mesh, at) for value in parsed.main.parameters}
        for at in places
    ]
    results = Machine(parsed, InProcess(mesh), torch.device("cpu"), kernels=_KERNELS).run(given)
    program = read_program("programs/F.py", text)
    table = Table(AXES)
    reader = Reader(table, program.mesh)
    function = program.functions["forward"]
    operands = [reader.tensors.piece(table.leaf(p.name, p.type.shape), p.type) for p in function.parameters]
    meant = reader.run(program, function, operands).values
    numbers = Numbers(table, {key: whole.double() for key, whole in wholes.items()})
    for at, result in zip(places, results, strict=True):
        found = {str(key): value for key, value in result.items()}
        for key in names:
            have = numbers.value(meant[f"output {key}"], at)
            torch.testing.assert_close(
                have, found[f"output {key}"].double(), rtol=1e-9, atol=1e-9, msg=f"{key}: {{}}".format
            )


def _experts(chosen: T, x: T, w: T, b: T, scores: T) -> T:
    made = torch.einsum("th,enh->etn", x, w) + b[:, None]
    return torch.einsum("etn,et,et->tn", made, scores, chosen.double())


def _capacity(chosen: T, x: T, scores: T) -> T:
    taken = chosen & (chosen.cumsum(-1) <= 2)
    return torch.einsum("bsh,ebs->bsh", x, scores * taken) + scores.mul(taken).sum(0)[..., None]


def _attended(q: T, k: T, v: T, seen: T) -> T:
    return F.scaled_dot_product_attention(q, k, v, seen, scale=0.3, enable_gqa=True)


MODELS: dict[str, tuple[str, Callable[..., T]]] = {
    "attention": ("""
        q: f64[2, 4, 3, 4]
        k: f64[2, 2, 3, 4]
        v: f64[2, 2, 3, 4]
        seen: bool[2, 1, 3, 3]
        y, mass = parc.attention.default(q, k, v, seen, None, False, 0.3, 0.0)  # f64[2, 4, 3, 4]; f64[2, 4, 3]
    """, _attended),
    "loss": ("""
        logits: f64[6, 8]
        index: i64[6]
        y = parc.token_loss.default(logits, index, 3)  # f64[6]
    """, lambda logits, index: F.cross_entropy(logits, index, ignore_index=3, reduction="none")),
    "experts": ("""
        chosen: bool[4, 8]
        x: f64[8, 3]
        w: f64[4, 5, 3]
        b: f64[4, 5]
        scores: f64[4, 8]
        same = parc.route.default(x, chosen)  # f64[8, 3]
        rows = parc.pack.default(same, chosen, 2)  # f64[32, 3] 2 of 4
        made = parc.expert_linear.default(rows, chosen, w, False, 2)  # f64[32, 5] 2 of 4
        more = parc.spread.default(b, chosen, 2)  # f64[32, 5] 2 of 4
        both = aten.add.Tensor(made, more)  # f64[32, 5] 2 of 4
        picked = parc.pick.default(scores, chosen, 2)  # f64[32, 1] 2 of 4
        scaled = aten.mul.Tensor(both, picked)  # f64[32, 5] 2 of 4
        y = parc.unpack.default(scaled, chosen, 2)  # f64[8, 5]
    """, _experts),
    "experts that look the other way": ("""
        chosen: bool[4, 8]
        x: f64[8, 3]
        w: f64[4, 3, 5]
        scores: f64[4, 8]
        rows = parc.pack.default(x, chosen, 2)  # f64[32, 3] 2 of 4
        made = parc.expert_linear.default(rows, chosen, w, True, 2)  # f64[32, 5] 2 of 4
        picked = parc.pick.default(scores, chosen, 2)  # f64[32, 1] 2 of 4
        again = parc.unpick.default(picked, chosen, 2)  # f64[4, 8]
        sums = parc.expert_sum.default(made, chosen, 2)  # f64[4, 5]
        turned = aten.t.default(again)  # f64[8, 4]
        y = aten.mm.default(turned, sums)  # f64[8, 5]
    """, lambda chosen, x, w, scores: (scores * chosen).t() @ torch.einsum("th,ehn,et->en", x, w, chosen.double())),
    "experts with a capacity": ("""
        chosen: bool[4, 2, 4]
        x: f64[2, 4, 3]
        scores: f64[4, 2, 4]
        slots = parc.slots.default(chosen, 2, 2)  # i64[4, 2, 2]
        rows = parc.dispatch.default(x, slots)  # f64[4, 2, 2, 3]
        picked = parc.pick_slots.default(scores, slots)  # f64[4, 2, 2]
        wide = aten.unsqueeze.default(picked, -1)  # f64[4, 2, 2, 1]
        scaled = aten.mul.Tensor(rows, wide)  # f64[4, 2, 2, 3]
        back = parc.combine.default(scaled, slots, 4)  # f64[2, 4, 3]
        again = parc.unpick_slots.default(picked, slots, 4)  # f64[4, 2, 4]
        sums = aten.sum.dim_IntList(again, [0])  # f64[2, 4]
        more = aten.unsqueeze.default(sums, -1)  # f64[2, 4, 1]
        y = aten.add.Tensor(back, more)  # f64[2, 4, 3]
    """, _capacity),
}  # fmt: skip
"""Models of parc's own operators, and the same in torch's: the last line's first result."""


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_of_own_operators_are_autograds(name: str) -> None:
    body, plain = MODELS[name]
    text, _ = _text(body)
    parsed = parse_program(text)
    torch.manual_seed(1)
    wholes = {value.name: _drawn(value.name, value.type) for value in parsed.main.parameters}
    leaves = {key: x.clone().requires_grad_(x.is_floating_point()) for key, x in wholes.items()}
    y = plain(**leaves)
    g = torch.randn_like(y)
    wanted = [key for key, x in leaves.items() if x.requires_grad]
    expected = torch.autograd.grad(y, [leaves[key] for key in wanted], g)
    program = read_program("programs/model.py", text)
    table = Table(AXES)
    reader = Reader(table, program.mesh)
    function = program.functions["forward"]
    values = {p.name: reader.tensors.piece(table.leaf(p.name, p.type.shape), p.type) for p in function.parameters}
    calls = reader.forward(function, values)
    numbers = Numbers(table, {"g": g, **{key: whole.double() for key, whole in wholes.items()}})
    torch.testing.assert_close(numbers.value(values["y"], {}), y.detach(), rtol=1e-9, atol=1e-9)
    gradients = reader.gradients(calls, {"y": reader.tensors.leaf("g", g.shape)}, wanted)
    for key, gradient in zip(wanted, expected, strict=True):
        torch.testing.assert_close(numbers.value(gradients[key], {}), gradient, rtol=1e-9, atol=1e-9)


def test_every_own_row_is_compared() -> None:
    texts = " ".join([*PROGRAMS.values(), *(body for body, _ in MODELS.values())])
    left = {op for op in ROWS if op.startswith("parc.") and f" {op}(" not in texts}
    # roundings, which are the identity here, and what draws numbers: builds with these are certified in tests of theirs
    assert left == {
        "parc.all_gather_int8", "parc.reduce_scatter_int8", "parc.round_int8", "parc.next_loss_scale.default",
        "parc.dropout_mask.default", "parc.random.default", "parc.stream_key.default",
    }  # fmt: skip


def test_a_mask_that_is_added_is_not_one_that_hides() -> None:
    body, _ = MODELS["attention"]
    table = Table(AXES)
    reader = Reader(table, read_program("programs/model.py", _text(body)[0]).mesh)
    nodes = set()
    for type_ in ("bool", "f64"):
        program = read_program("programs/model.py", _text(body.replace("seen: bool", f"seen: {type_}"))[0])
        function = program.functions["forward"]
        operands = [reader.tensors.piece(table.leaf(p.name, p.type.shape), p.type) for p in function.parameters]
        nodes.add(reader.run(program, function, operands).values["output y"].node)
    assert len(nodes) == 2


@pytest.mark.parametrize(("dim", "at"), [(2, 0), (-3, 0), (0, 4), (1, -7)])
def test_no_dim_and_no_entry_is_counted_around(dim: int, at: int) -> None:
    tensors = Reader(Table(AXES), read_program("programs/model.py", _text(MODELS["attention"][0])[0]).mesh).tensors
    x = tensors.leaf("x", (4, 6))
    assert tensors.select(x, 0, -1).shape == (6,)
    with pytest.raises(Refused, match="there is no dim or entry"):
        tensors.select(x, dim, at)
