"""Plan files read as text, and the expansion of ``include`` lines into the statements of the files that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from ...grammar.bounded import read_bounded, real_path
from ...grammar.codes import (
    INCLUDE_CYCLE,
    NO_FILE,
    NO_PLAN,
    OPEN_MISPLACED,
    TOO_LONG,
    UNDEFINED_NAME,
    UNREADABLE,
    WRONG_KIND,
)
from ...grammar.diagnostics import Diagnostic, Label, PlanError
from ...grammar.nearest import listed, nearest, path_meant
from ...grammar.parse import parse
from ...grammar.source import Source, Span
from ...grammar.substitute import LET, OpenLet, substitute
from ...grammar.syntax import Setting, Statement
from ...grammar.usage import parse_usage
from ..layout.mesh import Mesh
from .directive import Scope
from .directives import verbs
from .directives.include import Include

INCLUDE = "include"
FAMILY = "parc:"
NAME_A_PLAN = "name a plan file, as `gpt.parc`"
MOST_PLAN_BYTES = 1 << 20
"""The most bytes of a plan's file, or of a schedule's table that a plan names."""
MOST_LINES = 10_000
"""The most lines of a plan with its includes, each counted as often as it is included: these take seconds to read."""
MOST_FILES = 256
"""The most files of a plan with its includes, each counted as often as it is included, since it is read each time."""
DEEPEST = 32
"""The deepest nesting of includes."""


def families() -> tuple[str, ...]:
    """The names of the families that parc ships."""
    folder = files(__name__.partition(".")[0]) / "plans"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".parc")))


def has_plan_name(path: Path) -> bool:
    """Return whether a file's name ends as a plan's does."""
    return path.suffix == ".parc"


def read_source(path: Path) -> Source:
    """The text of a plan file.

    Raises:
        PlanError: it cannot be read.
    """
    text, reason = read_text(path)
    if text is None:
        message = f"`{path}` cannot be read: {reason}"
        help_ = path_meant(path, has_plan_name, NAME_A_PLAN)
        if (path / "manifest.json").is_file():
            message = f"`{path}` is a build, not a plan"
            help_ = f"`parc run`, `parc show` and `parc verify` take it; its plan is `{path / 'plan.parc'}`"
        raise PlanError([Diagnostic(UNREADABLE, message, help=help_)])
    return Source(path.name, text, path=path)


def read_text(path: Path) -> tuple[str | None, str]:
    """Return the text of a file, or None and the reason why there is none."""
    try:
        text = read_bounded(path, MOST_PLAN_BYTES).decode("utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n"), ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        return None, reason[:1].lower() + reason[1:]


def reads_as_plan(path: Path) -> bool:
    """Return whether a file is a plan, maybe with mistakes: at least half of its lines are statements of one."""
    text, _ = read_text(path)
    return text is not None and _is_statements(*parse(Source(path.name, text, path=path)))


def _begins_with_let(malformed: Diagnostic) -> bool:
    """True where a malformed line is a `let`."""
    span = malformed.primary.span if malformed.primary is not None else None
    return span is not None and span.source.line_text(span.line).split(maxsplit=1)[:1] == [LET]


def _is_statements(statements: Sequence[Statement], malformed: Sequence[Diagnostic]) -> bool:
    """Return whether at least half of a file's lines, comments aside, are statements of a plan."""
    known = sum(statement.verb.text in verbs() for statement in statements)
    return 2 * known >= len(statements) + len(malformed)


class Expanded:
    """The statements of a plan and of all that it includes, in order, without ``$name`` and ``include``. ``sources``
    are all texts; ``complete`` is False if one of them could not be read. ``open`` are `let`s whose values are chosen
    later, and ``uses`` the statements that depend on them. ``defines`` are the values of ``-D``.

    Raises:
        PlanError: a limit on lines, files or nesting is exceeded.
    """

    def __init__(self, source: Source, defines: Mapping[str, str]) -> None:
        self._lines = self._files = 0
        self.diagnostics: list[Diagnostic] = []
        self.sources: list[Source] = []
        self.complete = True
        self.open: list[OpenLet] = []
        self.uses: list[tuple[Statement, frozenset[str]]] = []
        self.statements = tuple(self._read(source, defines, (), {}))

    def _read(
        self, source: Source, defines: Mapping[str, str], arguments: Sequence[Setting],
        open_arguments: Mapping[str, frozenset[str]],
    ) -> Iterator[Statement]:  # fmt: skip
        """Yield the statements of one file, with those of included files in place of `include` lines."""
        self._count(source)
        statements, malformed = parse(source)
        if source.included is not None and not _is_statements(statements, malformed):
            message = f"`{source.name}` is no plan: most of its lines are no statements of one"
            help_ = "name a file with the lines of a plan; the contents of this file are not shown"
            self._fail(Diagnostic(NO_PLAN, message, Label(source.included), help=help_))
            return
        self.sources.append(source)
        closed = substitute(statements, defines, arguments, open_arguments)
        # the names of a `let` that cannot be read are no mistakes of those who use them
        unread_lets = any(map(_begins_with_let, malformed))
        self.diagnostics += malformed
        self.diagnostics += (one for one in closed.diagnostics if not (unread_lets and one.code == UNDEFINED_NAME))
        self.uses += closed.uses
        self.open += closed.open if source.included is None else ()
        for let in closed.open if source.included is not None else ():
            message = f"`{let.name}` is open in an included file, where nothing can close it"
            help_ = f"write it in the plan itself, and give it to the file: `({let.name}=${let.name})`"
            self._fail(Diagnostic(OPEN_MISPLACED, message, Label(let.span), help=help_))
        for statement in closed.statements:
            if statement.verb.text == INCLUDE:
                yield from self._included(statement, closed.settings)
            else:
                yield statement

    def _count(self, source: Source) -> None:
        self._files += 1
        self._lines += source.text.count("\n") + 1
        depth = sum(1 for _ in Span(source, 0, 0).includes)
        bounds = (
            (self._lines, MOST_LINES, "lines with all that it includes"), (self._files, MOST_FILES, "includes"),
            (depth, DEEPEST, "includes inside each other"),
        )  # fmt: skip
        excess = next((f"more than {most:,} {name}" for count, most, name in bounds if count > most), "")
        if not excess:
            return
        help_ = "name many modules by one pattern, such as `blocks.*`, and include a file once"
        label = Label(source.included.root) if source.included is not None else None
        first = label.span.source if label is not None else source
        raise PlanError([Diagnostic(TOO_LONG, f"`{first.name}` has {excess}", label, help=help_)])

    def _included(
        self, statement: Statement, settings: Sequence[tuple[Setting, frozenset[str]]]
    ) -> Iterator[Statement]:
        arguments, errors = parse_usage(Include.USAGE).match(statement)
        if arguments is None:
            self._fail(*errors)
            return
        line = Include.read(arguments)
        self.diagnostics += line.check(Scope((), Mesh(), frozenset()))
        for item in arguments.flat("args"):
            if not isinstance(item, Setting):
                self._fail(Diagnostic(WRONG_KIND, "arguments are given by name", Label(item.span), help="`name=value`"))
        source = self._open(line, arguments.span("file"))
        if source is not None:
            bindings = arguments.bindings("args")
            names = {setting.name.text: names for setting, names in settings if any(setting is one for one in bindings)}
            yield from self._read(source, {}, bindings, names)

    def _open(self, line: Include, span: Span) -> Source | None:
        """Return the text that a line includes, or None after noting why there is none."""
        if line.file.startswith(FAMILY):
            return self._family(line, span)
        source = line.span.source
        folder = source.path.parent if source.path is not None else Path()
        path = folder / line.file
        chain = [line.span, *line.span.includes]
        names = [included.source.name for included in reversed(chain)]
        for at, above in enumerate(reversed(chain)):
            if above.source.path is not None and real_path(above.source.path) == real_path(path):
                message = f"`{names[at]}` includes itself: {' → '.join([*names[at:], names[at]])}"
                help_ = "put the lines that both need into a third file"
                self._fail(Diagnostic(INCLUDE_CYCLE, message, Label(span), help=help_))
                return None
        text, reason = read_text(path)
        if text is None:
            message = f"`{line.file}` cannot be read: {reason}"
            help_ = f"name a file in `{folder}`, or a family as {listed([f'{FAMILY}{families()[0]}'])}"
            self._fail(Diagnostic(NO_FILE, message, Label(span), help=help_))
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(source.name), line.file))
        return Source(name, text, line.span, path)

    def _family(self, line: Include, span: Span) -> Source | None:
        name, known = line.file.removeprefix(FAMILY), families()
        if name not in known:
            shown = [f"{FAMILY}{family}" for family in known]
            message = f"parc ships no family `{name}`"
            near = [f"{FAMILY}{family}" for family in nearest(name, known)]
            help_ = f"did you mean {listed(near, 'or')}?" if near else f"there are {listed(shown)}"
            self._fail(Diagnostic(NO_FILE, message, Label(span), help=help_))
            return None
        with as_file(files(__name__.partition(".")[0]) / "plans" / f"{name}.parc") as path:
            return Source(line.file, path.read_text(encoding="utf-8"), line.span, path)

    def _fail(self, *errors: Diagnostic) -> None:
        self.diagnostics += errors
        self.complete = False
