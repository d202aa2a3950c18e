"""Templates: programs of several sizes become one text, which is a program again at any sizes, or is refused."""

from __future__ import annotations

import pytest

from parc.compiler.layout.mesh import Mesh
from parc.compiler.program.text import parse_program
from parc.compiler.sizes.polynomials import sample_points
from parc.compiler.sizes.size_range import SizeRange
from parc.compiler.sizes.template import Expression, Misfit, Template

RANGES = {"B": SizeRange(4, 16, 4), "S": SizeRange(8, 64, 8)}
POINTS = list(sample_points(RANGES))[:3]
MESH = Mesh((("dp", 2), ("tp", 2)))
HEAD = '"""parc program: role model, action reference"""\n\nmesh(dp=2, tp=2)\n\n\n'
PROGRAM = (
    HEAD
    + """def forward(
    x: "f32[{B/2}/dp, {S}, (3 8/tp)]",  # input x
    w: "f32[24]",  # parameter w
):
    view = aten.reshape.default(x, [{B*S/2}/dp, 24])  # f32[{B*S/2}/dp, 24] | a.0 m.py:3 plan:7
    scaled = aten.mul.Tensor(view, {1.0/(B*S)})  # f32[{B*S/2}/dp, 24] | a.0 m.py:4
    moved = aten.slice.Tensor(scaled, 0, {-S}, 9223372036854775807)  # f32[{S}, 24] | a.0 m.py:5
    wide = aten.add.Tensor(moved, {1.0*(3*S/2)})  # f32[{S}, 24] | - -
    return {
        "loss": wide,
    }
"""
)


def texts(template: str = PROGRAM, **changes: str) -> list[dict[str, str]]:
    """Return the program's text at each point; ``changes`` by the point's number, ``old->new``."""
    made = [Template(RANGES, {"p.py": template}).at(point) for point in POINTS]
    for key, change in changes.items():
        old, _, new = change.partition("->")
        assert old in made[int(key[1:])]["p.py"]
        made[int(key[1:])]["p.py"] = made[int(key[1:])]["p.py"].replace(old, new)
    return made


def test_what_is_bound_to_sizes_gives_the_template_back() -> None:
    assert Template.merge(RANGES, POINTS, texts()).texts == {"p.py": PROGRAM}
    assert Template.read(RANGES, {"p.py": PROGRAM}).texts == {"p.py": PROGRAM}


def test_a_bound_template_is_a_program() -> None:
    bound = Template(RANGES, {"p.py": PROGRAM}).at({"B": 12, "S": 24})["p.py"]
    assert parse_program(bound).text() == bound
    assert "aten.reshape.default(x, [144/dp, 24])" in bound
    assert f"aten.mul.Tensor(view, {1 / 288!r})" in bound
    assert "aten.add.Tensor(moved, 36.0)" in bound


def test_a_template_is_in_pythons_syntax() -> None:
    compile(PROGRAM, "p.py", "exec")


@pytest.mark.parametrize("words", ["S", "B*S/2+1", "1.0/(B*S)", "1.0*(3*S/2)"])
def test_an_expression_is_what_its_text_says(words: str) -> None:
    assert str(Expression.parse(words)) == words


@pytest.mark.parametrize("words", ["T", "8", "S*B", "S.item()", "1.0/(S*B)", "1.0/(4)", "2.0/(S)", "open('x')"])
def test_nothing_else_stands_in_braces(words: str) -> None:
    with pytest.raises(ValueError, match=r"^p\.py: "):
        Template.read(RANGES, {"p.py": PROGRAM.replace("{-S}", f"{{{words}}}")})


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ("aten.mul.Tensor->aten.div.Tensor", "scaled"),
        ("view, ->view_1, ", "scaled"),
        ("plan:7->plan:8", "view"),
        ("m.py:4->m.py:5", "scaled"),
        ("(3 8/tp)->24/tp", "x:"),
        ('"loss": wide->"loss": moved', '"loss"'),
    ],
)
def test_another_program_is_named_by_its_first_line(change: str, row: str) -> None:
    with pytest.raises(Misfit) as found:
        Template.merge(RANGES, POINTS, texts(_2=change))
    assert not found.value.numbers
    assert found.value.points == (POINTS[0], POINTS[2])
    assert all(text.strip().startswith(row) for text in found.value.rows)


def test_a_missing_line_and_a_missing_file_are_named() -> None:
    files = texts()
    files[1]["p.py"] = files[1]["p.py"].removesuffix("    }\n")
    with pytest.raises(Misfit, match="`}` at B=16, S=64, `` at B=4, S=8"):
        Template.merge(RANGES, POINTS, files)
    with pytest.raises(Misfit, match="`nothing` at B=16, S=64, `a program` at B=4, S=8"):
        Template.merge(RANGES, POINTS, [files[0], {**files[0], "q.py": ""}, files[0]])


def test_a_number_that_follows_no_polynomial_is_named() -> None:
    with pytest.raises(Misfit) as found:
        Template.merge(RANGES, POINTS, texts(_1=f"Tensor(view, {1 / 32!r}->Tensor(view, 0.17677669529663687"))
    assert found.value.numbers and found.value.origin.source == "m.py:4"


def test_a_program_that_holds_braces_itself_is_no_template() -> None:
    with pytest.raises(Misfit):
        Template.merge(RANGES, POINTS, [{"p.py": text["p.py"].replace("a.0 ", "a.{S} ")} for text in texts()])


def faults(old: str, new: str) -> list[str]:
    assert old in PROGRAM
    return [fault.message for fault in Template(RANGES, {"p.py": PROGRAM.replace(old, new)}).faults(MESH)]


def test_what_is_whole_at_all_sizes_is_proved() -> None:
    assert Template(RANGES, {"p.py": PROGRAM}).faults(MESH) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[{B*S/2}/dp, 24])", "[{B*S/2+1}/dp, 24])", "B*S/2+1, split over `dp`, does not divide by 2"),
        ("{B/2}/dp", "{B/2}/dp/tp", "B/2, split over `dp`, `tp`, does not divide by 4: B must be a multiple of 8"),
        ("{-S}", "{-S/16}", "-S/16 is not always a whole number: S must be a multiple of 16"),
        ('w: "f32[24]"', 'w: "f32[{S}]"', "the parameter `w` would have other shapes at other sizes"),
    ],
)  # fmt: skip
def test_what_does_not_hold_at_some_size_is_named(old: str, new: str, message: str) -> None:
    assert message in "\n".join(faults(old, new))


def test_a_fault_says_where_it_is() -> None:
    text = PROGRAM.replace("[{B*S/2}/dp, 24])", "[{B*S/2}/dp/tp, {B/8}])")
    (fault,) = Template(RANGES, {"p.py": text}).faults(MESH)
    assert (fault.value, fault.module, fault.line) == ("view", "a.0", 7)
    assert str(fault.fault()) == "shapes: p.py: view: B/8 is not always a whole number: B must be a multiple of 8"
