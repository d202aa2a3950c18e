"""Parsing and printing: any text gives statements and diagnostics, and printed statements read back the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lark.exceptions import UnexpectedInput

from parc.compiler.plan.directives import verbs
from parc.compiler.plan.plan import read_plan
from parc.grammar import parse as parse_module
from parc.grammar.diagnostics import PlanError, render
from parc.grammar.format import format_source, format_statement, format_statements
from parc.grammar.parse import MISTAKES, diagnose, parse, parse_lines
from parc.grammar.source import Source, Span
from parc.grammar.syntax import (
    Call,
    Dim,
    Ellipsis,
    Group,
    Item,
    Layout,
    Number,
    Phrase,
    Range,
    Setting,
    SplitItem,
    Statement,
    String,
    Var,
    Word,
)

NOWHERE = Span(Source("", ""), 0, 0)
SOUP = r"""
over rows lr by bytes microbatches adamw dp tp B S blocks.*.up ** {q,k} x? 1f1b output int64 fp32 2 0 -100 3e-4 20GB
9e99 9e999 $x $ ... .. / /tp h/tp = B=32 S=8..16 tp=2 x=true , ( ) [ ] f( + # ; ß \ " ' "a.py:f" [B/dp,_] (3 h/tp)
cross_entropy(output,tokens) tokens [B,S] $x.y a.$x.b$x {$x,q}
"""
VERBS = verbs()
TOKENS = (*VERBS, *SOUP.split(), "\n", "\x00", "x\u0301")


COMPLETE = """
model "a:b"
input tokens int64 [B, S]
sizes B=32, S=8..16 by 8
loss cross_entropy(output, tokens)
optimizer adamw lr 1e-3
mesh dp=2, tp=2
"""


def problems(text: str) -> None:
    """Read a text as a plan: all errors are diagnostics, and each can be printed."""
    try:
        plan = read_plan(Source("fuzz.parc", text), {"x": "2"})
    except PlanError as error:
        assert error.diagnostics
        for diagnostic in error.diagnostics:
            assert render(diagnostic).isprintable() or "\n" in render(diagnostic)
    else:
        assert read_plan(Source("again.parc", plan.text())).statements == plan.statements


@given(st.text())
def test_any_text_gives_diagnostics_only(text: str) -> None:
    problems(text)


@given(st.lists(st.sampled_from(TOKENS)), st.sampled_from(["", " "]))
def test_token_soup_gives_diagnostics_only(tokens: list[str], between: str) -> None:
    problems(between.join(tokens))


@given(st.sampled_from(VERBS), st.lists(st.sampled_from(TOKENS), max_size=6))
def test_known_verbs_with_any_tokens_give_diagnostics_only(verb: str, tokens: list[str]) -> None:
    line = " ".join([verb, *(token for token in tokens if token != "\n")])
    problems(COMPLETE + line)
    problems("".join(f"{other}\n" for other in COMPLETE.split("\n") if not other.startswith(verb)) + line)


def frozen(strategy: st.SearchStrategy[list[object]]) -> st.SearchStrategy[tuple[object, ...]]:
    return strategy.map(tuple)


names = st.sampled_from(["a", "tp", "B", "qkv", "_", "x_1"])
words = st.sampled_from(
    ["a", "_", "blocks.*.attn", "**", "a.{q,k}_proj.[0..3].b", "a.[0..31:2]", "zb-h1", "1f1b", "0.weight", "q?"]
).map(lambda text: Word(text, NOWHERE))
plain = names.map(lambda text: Word(text, NOWHERE))
numbers = st.sampled_from(["0", "32", "-100", "3e-4", "1.5", "20GB", "500ms", "1E+3"]).map(lambda t: Number(t, NOWHERE))
seen = st.characters(exclude_characters='"', exclude_categories=["C", "Z"], include_characters=" ")
strings = st.text(seen).map(lambda t: String(t, NOWHERE))
variables = st.sampled_from(["x", "width_2"]).map(lambda name: Var(name, NOWHERE))
ends = numbers | variables
splits = st.builds(
    SplitItem,
    st.none() | plain,
    frozen(st.lists(plain | variables, min_size=1, max_size=3)),
    st.none() | ends,
    st.just(NOWHERE),
)
simple_words = words | numbers | strings | variables | st.just(Ellipsis(NOWHERE)) | splits
ranges = st.builds(Range, ends, ends, st.just(NOWHERE))
simple: st.SearchStrategy[Item] = st.one_of(simple_words, ranges)


def phrases(items: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.builds(Phrase, frozen(st.lists(items, min_size=1, max_size=3)), st.just(NOWHERE))


def deeper(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    items = values | st.builds(Setting, plain, values, st.just(NOWHERE))
    dims = st.builds(Dim, frozen(st.lists(items, min_size=1, max_size=2)), st.just(NOWHERE))
    terms = frozen(st.lists(frozen(st.lists(phrases(items), min_size=1, max_size=2)), min_size=0, max_size=2))
    return (
        st.builds(Call, names, frozen(st.lists(items, max_size=2)), st.just(NOWHERE))
        | st.builds(Layout, frozen(st.lists(dims, min_size=0, max_size=3)), st.just(NOWHERE))
        | st.builds(Group, terms, st.just(NOWHERE))
    )


values = st.recursive(simple, deeper, max_leaves=6)
items = values | st.builds(Setting, plain, values, st.just(NOWHERE))


def begins_with_a_slash(phrase: Phrase) -> bool:
    first = phrase.items[0]
    return isinstance(first, SplitItem) and first.name is None


divided = Phrase((Word("/", NOWHERE),), NOWHERE)  # a slash that begins a phrase of a statement is a word of its own
parts = phrases(items).filter(lambda phrase: not begins_with_a_slash(phrase)) | st.just(divided)  # type: ignore[arg-type]
statements = st.builds(Statement, plain, frozen(st.lists(parts, max_size=4)), st.just(NOWHERE))


@given(st.lists(statements, max_size=3))
def test_printed_statements_read_back_the_same(written: list[Statement]) -> None:
    text = format_statements(written)
    read, diagnostics = parse(Source("printed.parc", text))
    assert not diagnostics, (text, [render(diagnostic) for diagnostic in diagnostics])
    assert read == tuple(written)
    assert format_source(Source("printed.parc", text)) == text


blanks = st.text(st.sampled_from(" \t"), max_size=3)
comments = st.none() | st.text(seen, max_size=8)
rough_lines = st.tuples(blanks, st.none() | statements, blanks, comments)


@given(st.lists(rough_lines, max_size=6))
def test_formatting_any_file_keeps_statements_and_comments(
    lines: list[tuple[str, Statement | None, str, str | None]],
) -> None:
    text = "\n".join(
        before + ("" if line is None else format_statement(line)) + after + ("" if comment is None else f"#{comment}")
        for before, line, after, comment in lines
    )
    source = Source("rough.parc", text)
    made = Source("made.parc", format_source(source))
    assert format_source(made) == made.text
    assert parse(made) == parse(source)
    assert [line.comment for line in parse_lines(made) if line.comment is not None] == [
        comment.strip() for *_, comment in lines if comment is not None
    ]


def test_formatting_keeps_comments_and_is_idempotent() -> None:
    text = '\n\n#  head\nmesh   dp = 2,tp=2 # axes\n\n\n\nmodel  "a # b.py:f"  (x=1 , y= "z")   \n# end\n\n'
    expected = '# head\nmesh      dp=2, tp=2  # axes\n\nmodel     "a # b.py:f" (x=1, y="z")\n# end\n'
    assert format_source(Source("p", text)) == expected
    assert format_source(Source("p", expected)) == expected


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.example)
def test_a_malformed_example_gets_its_message(mistake) -> None:  # type: ignore[no-untyped-def]
    parser = parse_module._parser()
    with pytest.raises(UnexpectedInput) as caught:
        parser(mistake.example)
    assert diagnose(caught.value, parser) == (mistake.message, mistake.help)


def messages(text: str) -> Iterable[str]:
    return [found.message for found in parse(Source("p", text))[1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shard x " + "(" * 100000, "brackets are nested too deeply"),
        ("seed " + "9" * 100000, "the number is too large"),
        ("seed 9e999", "the number is too large"),
        ('model "a', "the string is not closed"),
        ("shard x (a]", "`(` is closed by `]`"),
        ("shard x a)", "`)` closes nothing"),
    ],
)
def test_what_could_hurt_is_a_message(text: str, message: str) -> None:
    assert messages(text) == [message]


def test_spans_point_into_the_source() -> None:
    source = Source("p", "# first\n  mesh dp=2,\ttp=$x\n")
    (statement,), _ = parse(source)
    binding = statement.phrases[0].items[1]
    assert isinstance(binding, Setting)
    assert (binding.span.text, binding.span.line, binding.span.column) == ("tp=$x", 2, 14)
    assert statement.span.text == "mesh dp=2,\ttp=$x"


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [("32", 32, ""), ("3e-4", 3e-4, ""), ("20GB", 20 * 10**9, "B"), ("1.5KiB", 1536, "B"), ("500ms", 0.5, "s")],
)
def test_numbers_have_values_and_units(text: str, value: float, unit: str) -> None:
    number = Number(text, NOWHERE)
    assert (number.value, number.unit) == (value, unit)
    assert type(number.value) is type(value)


def test_a_rendered_message_is_printable_whatever_the_plan_holds() -> None:
    (_, diagnostics) = parse(Source("p\x1b", "seed \x1b[31m\t; " + "漢" * 500))
    lines = render(diagnostics[0]).split("\n")
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 200


def test_an_unreadable_plan_is_a_diagnostic(tmp_path: Path) -> None:
    (tmp_path / "latin.parc").write_bytes(b"mesh \xff")
    for name in ("latin.parc", "missing.parc", "."):
        with pytest.raises(PlanError) as caught:
            read_plan(tmp_path / name)
        assert [diagnostic.code.name for diagnostic in caught.value.diagnostics] == ["P0013"]
