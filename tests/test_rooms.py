"""The rooms of the house: the imports of modules, and the map of rooms in the architecture's document."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.test_house import LAYERS, ROOT, nodes, python_files, shown, tree

Graph = Mapping[str, set[str]]
"""The imports of each module or room."""


def module_name(file: Path) -> str:
    """Return a file's module name: ``parc.passes.pipeline`` for ``passes/pipeline.py``; a package's ``__init__`` has
    the package's name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    inside = parts if parts[0] == "parc" else ("parc", *parts)
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


@cache
def imports() -> Graph:
    """Return the modules that each module imports, also for types alone or within a function."""
    files = {module_name(file): file for file in python_files("parc", *LAYERS)}
    return {name: _imported(name, file, files) - {name} for name, file in files.items()}


def _imported(name: str, file: Path, files: Mapping[str, Path]) -> set[str]:
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {full if (full := f"{source}.{alias.name}") in files else source for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & files.keys()


def room_of(module: str) -> str:
    """Return a module's room: ``parc.compiler.verify`` for ``parc.compiler.verify.lines``. A module in no room is one
    by itself."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in [[layer] for layer in LAYERS] else 2])


def circle(graph: Graph) -> Sequence[str]:
    """Return some modules that import one another in a circle, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert len(imports()) > 200
    assert not circle(imports())


def test_no_rooms_import_one_another_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for module, others in imports().items():
        rooms.setdefault(room_of(module), set()).update(room_of(other) for other in others)
    assert not circle({room: others - {room} for room, others in rooms.items()})


def test_no_public_name_is_defined_in_two_modules() -> None:
    """A directive's class is named after its verb, whatever else has that name."""
    homes: dict[str, set[str]] = {}
    for file in python_files("parc", *LAYERS):
        for name in _defined(tree(file).body):
            if not name.startswith("_") and "compiler/plan/directives/" not in shown(file):
                homes.setdefault(name, set()).add(shown(file))
    assert len(homes) > 1000
    assert not {name: sorted(files) for name, files in homes.items() if len(files) > 1}


def _defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def test_every_pass_is_in_the_pipeline() -> None:
    reached, todo = set[str](), ["parc.passes.pipeline"]
    while todo:
        if (module := todo.pop()) not in reached:
            reached.add(module)
            todo += imports()[module]
    passes = {module for module in imports() if module.startswith("parc.passes.")}
    packages = {module.rpartition(".")[0] for module in passes}
    assert not passes - packages - reached, "passes that no way from passes/pipeline.py leads to"


def test_the_map_of_the_rooms_is_the_disk() -> None:
    """Each room stands in the document with the sentence that its ``__init__`` has."""
    rooms = {
        "/".join(file.parent.relative_to(ROOT).parts): ast.get_docstring(tree(file)) or ""
        for file in python_files("parc", *LAYERS)
        if file.name == "__init__.py" and len(file.relative_to(ROOT).parts) == 3
    }
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `([a-z_/]+)/` \| (.+) \|$", document, re.MULTILINE))
    assert shown == {room: " ".join(sentence.split("\n\n")[0].split()) for room, sentence in rooms.items()}
