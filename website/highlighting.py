"""Colours for plans: a lexer of the plan language, known to Pygments as ``parc``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pygments import lexers
from pygments.lexer import RegexLexer, words
from pygments.token import Comment, Keyword, Name, Number, Operator, String, Text

DIRECTIVES = Path(__file__).resolve().parent.parent / "compiler" / "plan" / "directives"
"""The folder in which each verb is a file."""
VERBS = sorted(file.stem.rstrip("_") for file in DIRECTIVES.glob("[!_]*.py"))
CLAUSES = (
    "over", "rows", "pad", "within", "unit", "on", "in", "as", "dim", "using", "keep", "from", "before", "after",
    "balanced", "microbatches", "during", "fit", "none", "true", "false", "lr", "clip", "to", "warmup",
)  # fmt: skip


class PlanLexer(RegexLexer):
    """A plan: the verb that begins a line, the words of its clauses, strings, numbers, `$name` and comments."""

    name = "parc plan"
    aliases: ClassVar[list[str]] = ["parc"]
    filenames: ClassVar[list[str]] = ["*.parc"]
    tokens: ClassVar[dict[str, Any]] = {
        "root": [
            (r"#[^\n]*", Comment.Single),
            (r'"[^"\n]*"', String.Double),
            (r"\$\w+", Name.Variable),
            (rf"(?m)^(\s*)({'|'.join(VERBS)})\b", Keyword),
            (words(CLAUSES, prefix=r"(?<=\s)", suffix=r"(?=[\s,]|$)"), Operator.Word),
            (r"\d[\d.e+-]*(?:[KMGT]i?B|ms|s)?\b", Number),
            (r"[A-Za-z_][\w.*{}?-]*", Name),
            (r"\s+", Text),
            (r".", Text),
        ]
    }


def register() -> None:
    """Let Pygments find the lexer by its name."""
    lexers._lexer_cache[PlanLexer.name] = PlanLexer
    lexers.LEXERS["PlanLexer"] = (__name__, PlanLexer.name, tuple(PlanLexer.aliases), tuple(PlanLexer.filenames), ())
