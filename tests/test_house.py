"""The structure of the project, held by tests: packages, layers' import form, sizes, names, orphans, examples."""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from parc.compiler.program.binding import KINDS
from parc.grammar.codes import code_pages

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("grammar", "compiler", "passes", "runtime")
CODE_FOLDERS = (*LAYERS, "certificate", "parc", "tests", "examples", "benchmarks", "website")
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|manager|misc|common)(_|$)")
# The first alternative is written so that this file does not contain the words it looks for.
LEFTOVER = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
HEADLESS = re.compile(r"\s*(What|Of|Where|How|Whether|Which|Why|Who|Whose|When|Within|Around|By|Those)\b")


def python_files(*folders: str) -> list[Path]:
    """Return every Python file below these folders once, not through the symbolic links of parc/."""
    return [file for folder in folders for file in sorted(_walk(ROOT / folder))]


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)
        elif entry.suffix == ".py":
            yield entry


@cache
def tree(file: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(file)))


def shown(file: Path) -> str:
    """Return a file's name relative to the root, as test id and for messages."""
    return str(file.relative_to(ROOT))


FILES = python_files(*CODE_FOLDERS)
LAYER_FILES = python_files(*LAYERS)


def test_packages_listed_are_packages_on_disk() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent.relative_to(ROOT).parts for file in python_files("parc", "certificate", *LAYERS)}
    on_disk = {".".join(parts if parts[0] in ("parc", "certificate") else ("parc", *parts)) for parts in folders}
    assert sorted(setuptools["packages"]) == sorted(on_disk)
    assert setuptools["package-dir"] == {f"parc.{layer}": layer for layer in LAYERS}


def test_errors_of_a_run_have_a_way_out() -> None:
    places = {"RunError": 2, "DataError": 1}
    calls = [
        (f"{shown(file)}:{node.lineno}", node, places[node.func.id])
        for file in python_files("runtime")
        for node in nodes(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in places
    ]
    lacking = [place for place, node, help_ in calls if len(node.args) <= help_ and not any(
        word.arg == "help" for word in node.keywords)]  # fmt: skip
    assert len(calls) > 40 and not lacking, lacking


@pytest.mark.parametrize("package", sorted({file.parent for file in python_files("parc", *LAYERS)}), ids=shown)
def test_every_package_has_an_init(package: Path) -> None:
    assert (package / "__init__.py").is_file(), "a folder without __init__.py is left out of the wheel"


@pytest.mark.parametrize("layer", LAYERS)
def test_parc_links_to_each_layer(layer: str) -> None:
    assert (ROOT / "parc" / layer / "__init__.py").samefile(ROOT / layer / "__init__.py")


def test_modules_open_with_a_sentence() -> None:
    for file in FILES:
        docstring = ast.get_docstring(tree(file))
        assert docstring, f"{shown(file)}: say in one sentence what this module owns"
        first = docstring.split("\n\n")[0].strip()
        assert re.search(r"[.?!:`)]$", first), f"{shown(file)}: not a sentence: {first!r}"


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """A sentence such as "Whether it is one" has no subject: its reader has to find out first what it is about."""
    for file in FILES:
        for node in nodes(file):
            match node:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    headless = HEADLESS.match(text)
                    place = f"{shown(file)}:{node.lineno}"
                    assert not headless, f"{place}: name the thing, or say what it does: {headless and headless[0]!r}"


def test_files_and_functions_are_short() -> None:
    for file in FILES:
        lines = file.read_text().count("\n")
        assert lines <= MAX_FILE_LINES, f"{shown(file)}: {lines} lines: look for the second concept in it"
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                where = f"`{node.name}` of {shown(file)}"
                assert length <= MAX_FUNCTION_LINES, f"{where} has {length} lines: look for the second concept in it"


def test_nothing_is_left_for_later() -> None:
    for file in FILES:
        found = LEFTOVER.search(file.read_text())
        assert not found, f"{shown(file)}: {found and found.group()}: do it, or open an issue"


def test_files_are_named_after_one_thing() -> None:
    for file in FILES:
        assert not BANNED_NAMES.search(file.stem), f"{shown(file)}: name the one thing in it"


def test_layers_import_each_other_relatively() -> None:
    """An absolute import of parc code would, in a checkout, load a second copy of the module."""
    for file in LAYER_FILES:
        for node in nodes(file):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] not in {"parc", *LAYERS}, f"{shown(file)}: import {name} relatively"


def test_every_error_code_has_its_example() -> None:
    without = [name for name, page in code_pages().items() if not page.example.strip()]
    assert not without, "an error code without an example cannot be explained"


def test_the_commands_of_a_newcomer_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "check", "fuzz", "soak"} <= targets
    assert "make check" in (ROOT / ".ci" / "run").read_text()


def test_what_nodes_know_is_read_and_written_in_one_module() -> None:
    """A node's ``meta`` is a table without names or types: ``NodeFacts`` has both."""
    home = ROOT / "compiler" / "capture" / "node_facts.py"
    uses = [
        f"{shown(file)}:{node.lineno}"
        for file in python_files("compiler", "passes", "runtime", "parc", "tests")
        for node in nodes(file)
        if isinstance(node, ast.Attribute) and node.attr == "meta" and file != home
    ]
    assert not uses, uses


def test_no_other_module_writes_or_splits_the_text_of_a_binding() -> None:
    """Such texts are ``f"gradient {name}"`` and ``"saved "``. The language's own lines have more words: ``input tokens
    int64 [B]``."""
    home = ROOT / "compiler" / "program" / "binding.py"
    kinds = [kind for kind, row in KINDS.items() if row.text == "kind name"]
    pattern = re.compile(rf"({'|'.join(kinds)}) \S*")
    texts = [(f"{shown(file)}:{line}", text) for file in python_files(*LAYERS, "parc")
             if file != home for line, text in _texts(nodes(file))]  # fmt: skip
    assert len(texts) > 5000
    assert not [(place, text) for place, text in texts if pattern.fullmatch(text)]


def _texts(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Return the strings of a module's nodes. An f-string's inserted values count as one word."""
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    inside = {value for node in joined for value in node.values}
    for text in joined:
        yield text.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in text.values)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.lineno, node.value


READERS = {
    **dict.fromkeys(("grammar/codes.py", "grammar/parse.py", "compiler/plan/include.py",
                     "compiler/schedules/__init__.py",
                     "parc/cli/example.py", "parc/compiling/callable_faults.py", "parc/page/page.py",
                     "parc/proposing/proposal.py", "parc/compiling/build_cache.py",
                     "runtime/session/one_build.py"),
                  "parc's own files"),
    "grammar/scratch.py": "the kernel's name for itself",
    "runtime/ranks/wire.py": "messages, whose length is bounded",
    **dict.fromkeys(("runtime/launch/failures.py", "runtime/launch/voices.py", "compiler/build/folders.py",
                     "compiler/initial/exported.py", "runtime/observe/observer.py", "parc/cli/export.py",
                     "parc/cli/fmt.py", "parc/report.py", "parc/checking/verification.py"),
                    "what this run has written, or has just read"),
    **dict.fromkeys(("compiler/initial/files.py", "runtime/data/saved_rows.py", "runtime/data/token_files.py"),
                    "files that were found to be regular when they were opened"),
}  # fmt: skip
"""The modules that open a file for reading without ``grammar/bounded.py``, and which files these are."""


def test_files_of_other_people_are_read_in_one_module() -> None:
    found = {
        shown(file)
        for file in python_files(*LAYERS, "parc")
        for node in nodes(file)
        if isinstance(node, ast.Call) and _reads(node)
    }
    assert found - {"grammar/bounded.py"} == READERS.keys()


def _reads(call: ast.Call) -> bool:
    """Return whether a call opens a file for reading, or follows links and may raise ``RuntimeError``."""
    name, text = ast.unparse(call.func), ast.unparse(call)
    written = any(
        isinstance(value, ast.Constant) and re.search(r"^[wax]", str(value.value)) for value in ast.walk(call)
    )
    opens = name in (
        "open",
        "safe_open",
        "json.load",
        "json.loads",
        "torch.load",
        "np.load",
        "np.memmap",
        "np.fromfile",
    )
    reads = isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "read_bytes", "resolve")
    return ((opens and not written) or reads) and "check_regular(" not in text
