"""Models of a few lines whose meaning a build once lost: each is built with every check."""

from __future__ import annotations

import textwrap
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from parc.cli import main
from parc.compiler.build.directory import read_build, write_build
from parc.grammar.diagnostics import PlanError
from parc.runtime.compare.plain import reference
from tests.draws import all_but, each_once, wide
from tests.passes.few_lines import DATA, T, X, Y, codes, made
from tests.runtime.ranks import run_ranks

OPERATORS = """
@torch.library.custom_op("reviewed::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by

@torch.library.custom_op("reviewed::scale_back", mutates_args=())
def scale_back(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by

@torch.library.custom_op("reviewed::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x

for op in (scale, scale_back, square):
    op.register_fake(lambda x, *_: torch.empty_like(x))

def keep_by(ctx, inputs, output):
    ctx.by = inputs[1]

def keep_x(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])

scale.register_autograd(lambda ctx, g: (scale_back(g, ctx.by), None), setup_context=keep_by)
square.register_autograd(lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup_context=keep_x)

class Model(Base):
    def forward(self, x):
        return square(scale(self.fc(x), 3.0)).mean()
"""


def written(folder: Path, body: str, lines: str) -> Path:
    """Write the build of such a class."""
    compiled, found = made(folder, body, lines)
    write_build(compiled.to_write(found.report), folder / "build")
    return folder / "build"


def test_dropout_of_every_probability(tmp_path: Path) -> None:
    body = """
        def more(self):
            self.drops = nn.ModuleList(map(nn.Dropout, (0.0, 0.5, 1.0)))

        def forward(self, x):
            return sum(drop(self.fc(x)).square().mean() for drop in self.drops)
    """
    made(tmp_path, body, f"{X}\n{DATA.format('x')}")


UNREAD = "def forward(self, x, y):\n    return self.fc(x).square().mean()", f"{X}\n{Y}"
BY_ONE_NUMBER = """
        def more(self):
            self.table = nn.Parameter(torch.randn(4, 3, 5, 8))

        def forward(self, x, t):
            apart = self.table[t % 4, :, t - 5]
            one = self.table[:, :, t.sum() % 5][t[:, 0] % 4]
            return self.fc(x + apart.sum(2) + one.sum(1)[:, None]).square().mean()
"""
"""A parameter's rows by indices apart, and by a tensor of one number."""
BUILT = {
    "a norm's eps is that of the dtype it is written in": (
        """
        def more(self):
            self.norm = nn.RMSNorm(8)

        def forward(self, x):
            return self.norm(self.fc(x) * 1e-3).pow(3).tanh().mean()
        """,
        "x",
    ),
    "losses that broadcast": (
        """
        def forward(self, x, y):
            h = self.fc(x)
            return F.mse_loss(h, y) + F.smooth_l1_loss(h, y) + F.l1_loss(h, y)
        """,
        "x, y",
    ),
    "scalars chosen and values written over": (
        """
        def forward(self, x):
            h = self.fc(x)
            written = h.new_zeros(8).copy_(h.sum((0, 1)))
            filled = torch.zeros_like(h).fill_(h.detach().new_ones(()))
            chosen = torch.where(h > 0, h, 0.0).square() + torch.where(h > 0, 2.0, 1.0) * h
            return (chosen * filled).mean() + written.mean()
        """,
        "x",
    ),
    "entries at constant places of dims that are apart": (
        """
        def forward(self, x):
            places = torch.tensor([2, 0, 3, -3])
            return self.fc(x).view(-1, 4, 4, 2)[:, places, :, places % 2].square().mean()
        """,
        "x",
    ),
    "rows of a parameter": (
        """
        def more(self):
            self.rows = nn.Parameter(torch.randn(6, 8))
            self.cells = nn.Parameter(torch.randn(3, 6, 2, 4))

        def forward(self, t):
            t = t.clamp(0, 5)
            return self.fc(self.rows[t - 6]).square().mean() + self.cells[t % 3, t].square().mean()
        """,
        "t",
    ),
    "a region without gradients": (
        """
        def forward(self, x):
            with torch.no_grad():
                fixed = self.fc(x)
            return (self.fc(x) * fixed).mean()
        """,
        "x",
    ),
    "a distribution of torch's": (
        "def forward(self, x):\n"
        "    return -torch.distributions.Normal(self.fc(x), self.fc(x).exp()).log_prob(x).mean()",
        "x",
    ),
    "queries that see no key": (
        """
        def forward(self, x, t):
            q = self.fc(x)[:, None]
            mask = torch.ones(4, 4).tril().bool() & (t % 2 == 0)[:, None, None]
            return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=0.1).square().mean()
        """,
        "x, t",
    ),
}
"""Bodies of modules, and the inputs of each."""


def test_layers_apart_are_split_as_linear_layers_are(tmp_path: Path) -> None:
    """Layers of one input and one output, and one weight of queries, keys and values apart."""
    body = """
        def more(self):
            self.up, self.down = nn.Linear(1, 16), nn.Linear(16, 1)
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            narrow = self.down(torch.tanh(self.up(x[..., :1]))).square().mean()
            return narrow + self.attn(self.fc(x), x, x)[0].square().mean()
    """
    lines = "column up over tp\nrow down over tp\n"
    lines += "column attn.in_proj_weight over tp rows (3 h/tp d)\nrow attn.out_proj over tp"
    compiled, checked = made(tmp_path, body, f"{X}\nmesh tp=2\n{lines}")
    assert codes(compiled) == []
    found = [row["op"] for row in checked.report["communication"] if row["phase"] == "forward"]
    assert found == ["all_reduce", "all_reduce"]


def test_modules_of_every_kind_are_built_without_a_gather(tmp_path: Path) -> None:
    """All are parts of one model, whose loss is the sum of theirs."""
    parts = [
        f"class Part{number}(Base):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n\n"
        for number, (body, _) in enumerate(BUILT.values())
    ]
    calls = [f"self.parts[{number}]({inputs})" for number, (_, inputs) in enumerate(BUILT.values())]
    model = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([{", ".join(f"Part{number}()" for number in range(len(parts)))}])

    def forward(self, x, y, t):
        return {" + ".join(calls)}
"""
    compiled, _ = made(tmp_path, "".join([*parts, model]), f"{X}\n{Y}\n{T}\n{DATA.format('x, y, t')}")
    assert codes(compiled) == []


ATTENTION = """
        def more(self):
            self.shared = nn.Parameter(torch.randn(1, 4, 8))
            self.bias = nn.Parameter(torch.randn(4, 4))

        def forward(self, x, t):
            q, attend = self.fc(x), F.scaled_dot_product_attention
            keep = (t[:, None] % 3 > 0) | torch.eye(4, dtype=torch.bool)
            added = torch.zeros(keep.shape, dtype=x.dtype).masked_fill(~keep, float("-inf"))
            heads = q.unflatten(-1, (4, 2)).transpose(1, 2)
            return sum(y.square().mean() for y in (
                *(attend(q[:, None], x[:, None], q[:, None], mask) for mask in (keep, added)),
                attend(q, x, q, keep[:, None]),
                attend(q, x, q, added + self.bias),
                attend(self.shared, x, q, keep), attend(self.shared, x, q, is_causal=True),
                attend(self.shared[:, None, :, :2], heads, heads, keep[:, None]),
                attend(heads, heads[:, :1], heads, added[:, None]),
                attend(heads, heads[:, 1:3], heads[:, :2], keep[:, None], enable_gqa=True),
                attend(self.shared[0], self.bias.repeat(1, 2), self.bias),
                attend(q[:, None, None], heads.repeat(1, 1, 1, 4)[:, None], q[:, None, None], keep[:, None, None]),
            ))
        """
"""Attention of two to five dims whose queries, keys or mask broadcast. A mask may mix samples."""


def test_attention_of_any_dims_is_parcs_own(tmp_path: Path) -> None:
    compiled, _ = made(tmp_path, ATTENTION, f"{X}\n{T}\n{DATA.format('x, t')}")
    forward = compiled.build.programs["F"].text()
    assert forward.count("parc.attention.default") == 10 and "aten.scaled_dot_product" not in forward


def test_an_input_that_nothing_reads_is_nothing_to_the_others(tmp_path: Path) -> None:
    body, inputs = UNREAD
    compiled, _ = made(tmp_path, body, f"{inputs}\n{DATA.format('x, y')}")
    assert codes(compiled) == []


def test_rows_by_a_tensor_of_one_number_are_built_without_a_gather(tmp_path: Path) -> None:
    lines = f"{X}\n{T}\n{DATA.format('x, t')}"
    if torch.__version__.startswith("2.11."):  # which reads the number when it indexes
        with pytest.raises(PlanError, match="P0202"):
            made(tmp_path, BY_ONE_NUMBER, lines)
        return
    compiled, _ = made(tmp_path, BY_ONE_NUMBER, lines)
    assert codes(compiled) == []


def test_products_with_what_is_not_trained_are_split_as_the_other_side(tmp_path: Path) -> None:
    body = """
        def more(self):
            self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)

        def forward(self, x):
            h = self.fc(x)
            products = [
                F.linear(h.transpose(1, 2), self.frozen),
                h.transpose(1, 2) @ self.frozen[0],
                self.frozen @ h,
                self.frozen[0] @ h,
                self.frozen @ h.view(-1, 4, 2, 4).transpose(1, 2),
            ]
            return sum(product.square().mean() for product in products)
    """
    made(tmp_path, body, f"{X}\nmesh dp=2, tp=2\nshard x [B/dp, ...]\ncolumn fc over tp")


def test_the_plain_module_is_given_an_input_that_nothing_reads(tmp_path: Path) -> None:
    plain = reference(written(tmp_path, *UNREAD))
    report = plain.step({"x": torch.randn(4, 4, 8), "y": torch.randn(4, 4, 8)})
    plain.close()
    assert report.step == 1


def test_multiples_of_a_mean_cross_entropy_count_targets_once(tmp_path: Path) -> None:
    body = """
        def forward(self, x, t):
            loss = F.cross_entropy(self.fc(x).flatten(0, -2), t.flatten())
            return -(2 * loss).double() / 2
    """
    compiled, _ = made(tmp_path, body, f"{X}\n{T}\n{DATA.format('x, t')}\nschedule microbatches 2")
    assert "COUNT" in compiled.build.programs and codes(compiled) == []


LOSSES = {
    "a sum": ("self.fc(x).square().sum()", 1.0, False),
    "a multiple of a sum": ("0.5 * self.fc(x).square().sum() + self.fc(x).sum()", 1.0, False),
    "a sum of means over features": ("self.fc(x).mean(-1).square().sum()", 1.0, False),
    "a sum of a mean over samples": ("self.fc(x).mean(0).square().sum()", 0.5, True),
    "a plain mean": ("3 * self.fc(x).square().mean()", 0.5, False),
}


@pytest.mark.parametrize("name", all_but(["a sum"], LOSSES))
def test_microbatches_add_up_or_are_averaged_with_a_word(tmp_path: Path, name: str) -> None:
    loss, scale, warned = LOSSES[name]
    compiled, _ = made(tmp_path, f"def forward(self, x):\n    return {loss}", f"{X}\nschedule microbatches 2")
    (line,) = compiled.build.programs["SCALE"].main.lines
    assert line.args == ([], scale)
    assert codes(compiled) == ["P0217"] * warned


def test_parameters_of_a_narrow_dtype(tmp_path: Path) -> None:
    body = """
        def more(self):
            self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
            self.to(torch.bfloat16)

        def forward(self, x):
            h = self.fc(x.bfloat16())
            for layer in self.layers:
                h = h + layer(h).tanh()
            return h.float().square().mean()
    """
    made(tmp_path, body, f"{X}\n{DATA.format('x')}")


@pytest.mark.parametrize(
    ("dtypes", "lines"),
    each_once(
        [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float64")],
        ["mesh pp=2\nstage before last over pp\nschedule gpipe microbatches 2", DATA.format("x")],
    ),
)
def test_parameters_of_several_dtypes_have_one_norm(tmp_path: Path, dtypes: tuple[str, str], lines: str) -> None:
    first, last = dtypes
    body = f"""
        def more(self):
            self.fc.to(torch.{first})
            self.last = nn.Linear(8, 8).to(torch.{last})

        def forward(self, x):
            h = self.fc(x.to(torch.{first})).tanh()
            return self.last(h.to(torch.{last})).float().square().mean()
    """
    compiled, _ = made(tmp_path, body, f"{X}\n{lines}")
    for role in compiled.build.roles.values():
        values = role.programs["REDUCE"].main.values()
        norm = values[role.programs["REDUCE"].main.returned("grad_norm")[""]]
        assert norm.type.dtype == (torch.float64 if last == "float64" else torch.float32)


@pytest.mark.parametrize("lines", [wide(""), DATA.format("x"), "mesh tp=2\ncolumn fc over tp"])
def test_custom_operators_without_a_rule_are_computed_whole(tmp_path: Path, lines: str) -> None:
    compiled, _ = made(tmp_path, OPERATORS, f"{X}\n{lines}")
    assert codes(compiled).count("P0208") == 2
    text = compiled.build.programs["F"].text()
    assert '\noperators("reviewed.scale.default", "reviewed.square.default")\n' in text
    assert '\noperators("reviewed.scale_back.default")\n' in compiled.build.programs["B"].text()


def test_a_build_with_custom_operators_opens_in_another_process(tmp_path: Path) -> None:
    folder = written(tmp_path, OPERATORS, X)
    assert run_ranks(opens, 1, folder) == [True]
    (tmp_path / "models.py").write_text("raise SystemExit('imported')")
    with pytest.raises(AssertionError, match="changed since the build") as caught:
        run_ranks(opens, 1, folder)
    assert "imported" not in str(caught.value)


def test_a_build_with_custom_operators_is_shown_without_an_import(tmp_path: Path) -> None:
    folder = written(tmp_path, OPERATORS, f"{X}\n{DATA.format('x')}")
    code = tmp_path / "models.py"
    code.write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n{code.read_text()}")
    texts = run_ranks(shows, 1, folder)[0]
    assert all("reviewed.scale.default" in text for text in texts), [len(text) for text in texts]
    assert not (tmp_path / "canary").exists()


def shows(folder: Path) -> list[str]:
    """Show a build in a process that knows no model, in every way; return what names operators."""
    page = folder.parent / "page.html"
    outputs = {}
    for words in ("", "--json", "--list", "--pipeline", "--action F", f"--html {page}", f"--svg {page}.svg"):
        with redirect_stdout(StringIO()) as out:
            assert main(["show", str(folder), *words.split()]) == 0, words
        outputs[words] = out.getvalue()
    assert main(["show", str(folder), "--expand"]) == 2
    return [outputs["--action F"], page.read_text()]


def opens(folder: Path) -> bool:
    """Open a build in a process that knows no model."""
    return bool(read_build(folder))
