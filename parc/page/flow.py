"""The tree of a model's modules, with equal numbered ones folded, and the flow of values among them in a forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from parc.compiler.build.build import Build
from parc.compiler.program.actions import FORWARD
from parc.compiler.program.binding import PARAMETERS, STORED
from parc.compiler.program.blocks import complete
from parc.compiler.program.program import Function, Line, Origin, Program, needed
from parc.report_words import number_ranges
from parc.tables import natural

RowKind = Literal["module", "block", "input", "output", "loss"]
Makers = frozenset[str] | None
"""The modules that a value comes from; None if it is computed from weights alone."""
LOSS_ROW = "/loss"
"""The path of the loss's row. Like those of inputs and outputs it has a slash, which no module's path has."""


@dataclass
class ModuleRow:
    """A row of the tree: a module, or numbered ones that are equal; or an input, a block's output, the loss. ``label``
    is its name inside its parent row."""

    path: str
    label: str
    depth: int
    members: list[str]
    kind: RowKind = "module"
    type: str = ""
    """The type of the last value that the module, or one in it, computes in a forward."""
    line: tuple[str, int] | None = None
    """The module's first line in a forward: its function, and its index there."""


@dataclass
class ModuleTree:
    """Rows in the order of a forward, the folded path of each module, and pairs of rows between which values flow."""

    rows: list[ModuleRow] = field(default_factory=list)
    folded: dict[str, str] = field(default_factory=dict)
    edges: dict[tuple[str, str], None] = field(default_factory=dict)

    def row_of(self, path: str) -> str:
        """Return the path of the row that a module belongs to, or the nearest one around it that has a row."""
        while path not in self.folded:
            path = path.rpartition(".")[0]
        return self.folded[path]


def module_tree(build: Build, placed: Mapping[str, str]) -> ModuleTree:
    """Return the tree of a build's modules. Numbered modules are equal if their parameters have equal types and were
    ``placed`` by the same lines of the plan, and if they contain the same modules; if they have neither parameters nor
    modules, if they have the same operators."""
    walk = ForwardWalk(build.programs[FORWARD])
    parameters = build.manifest["parameters"]
    facts = {name: (text, placed.get(name, "")) for name, text in parameters.items()}
    order = _ordered([*walk.first, *(name.rpartition(".")[0] for name in parameters)])
    tree = _Folding(order, facts, walk.operators).tree
    for row in tree.rows:
        row.line, row.type = walk.first.get(row.path), walk.types.get(row.path, "")
    _Flow(walk.program, tree).follow()
    return tree


Children = Mapping[str, list[str]]
Places = dict[str, tuple[str, int]]


def _ordered(paths: Iterable[str]) -> Children:
    """Return the children of each module, in the order in which they or modules in them come first."""
    children: dict[str, list[str]] = {"": []}
    for path in paths:
        words = path.split(".") if path else []
        for depth in range(1, len(words) + 1):
            parent, child = ".".join(words[: depth - 1]), ".".join(words[:depth])
            if child not in children:
                children[child] = []
                children[parent].append(child)
    return children


class _Folding:
    """The folding of equal modules into the rows of a tree."""

    def __init__(self, children: Children, facts: Mapping[str, object], operators: Mapping[str, set[str]]) -> None:
        self.children, self.facts, self.operators = children, facts, operators
        self.owners = operators.keys() | {name.rpartition(".")[0] for name in facts}
        self.tree = ModuleTree()
        self._fold([""], "", 0)

    def _fold(self, members: list[str], label: str, depth: int) -> None:
        """Add the row of equal modules and the rows of all modules in them."""
        path = members[0]
        kind: RowKind = "block" if path.rpartition(".")[2].isdigit() and self.children[path] else "module"
        self.tree.rows.append(ModuleRow(path, label, depth, members, kind))
        self.tree.folded[path] = path
        groups: dict[tuple[str, object], list[str]] = {}
        for prefix, child in self._inside(path, path):
            numbered = child.rpartition(".")[2].isdigit()
            groups.setdefault((prefix, self._form(child) if numbered else child), []).append(child)
        for (prefix, _), group in groups.items():
            group.sort(key=natural)
            words = [child.rpartition(".")[2] for child in group]
            self._fold(group, prefix + (number_ranges(words) if words[0].isdigit() else words[0]), depth + 1)
            for other in group[1:]:
                self._map(other, group[0])

    def _inside(self, path: str, row: str) -> Iterator[tuple[str, str]]:
        """Yield the modules inside one, each with the names of the ``ModuleList`` that contain it: a list has no
        row."""
        for child in self.children[path]:
            inner = self.children[child]
            if inner and child not in self.owners and all(name.rpartition(".")[2].isdigit() for name in inner):
                self.tree.folded[child] = row
                name = child.rpartition(".")[2]
                yield from ((f"{name}.{prefix}", one) for prefix, one in self._inside(child, row))
            else:
                yield "", child

    def _map(self, path: str, like: str) -> None:
        """Map a module, and all modules in it, to the rows of the equal module ``like``."""
        self.tree.folded[path] = self.tree.folded[like]
        for child in self.children[path]:
            self._map(child, f"{like}{child.removeprefix(path)}")

    def _form(self, path: str) -> object:
        """Return a key that equal modules share: parameters with their facts, inner modules, or else operators."""
        start = f"{path}."
        held = sorted((name.removeprefix(start), fact) for name, fact in self.facts.items() if name.startswith(start))
        inside = sorted(child.removeprefix(start) for child in self.children if child.startswith(start))
        operators = () if held or inside else sorted(self.operators.get(path, ()))
        return tuple(held), tuple(inside), tuple(operators)


class ForwardWalk:
    """The modules of a forward, or of a stage's: the first line of each, its operators, and the type of its last value
    that the loss depends on. They are in the order in which they compute with activations; lines that compute with
    weights alone come ``early``, and do not count if there are others."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.first: dict[str, tuple[str, int]] = {}
        self.types: dict[str, str] = {}
        self.operators: dict[str, set[str]] = {}
        early: dict[str, tuple[str, int]] = {}
        weights = {value.name for value in program.main.parameters if value.kind in STORED or value.kind == "weight"}
        self._lines(program.main, Origin(), weights, early, {*program.main.returned("loss", "sent").values()})
        self.first |= {module: place for module, place in early.items() if module not in self.first}

    def _lines(self, function: Function, caller: Origin, weights: set[str], early: Places, wanted: set[str]) -> None:
        """Note the lines of a function of which the caller uses the results ``wanted``."""
        _, wanted = needed(function.lines, wanted)
        for index, line in enumerate(function.lines):
            module = complete(line.origin.module, caller.module)
            used = line.uses
            if line.calls_function:
                callee = self.program.function(line.op)
                inner_weights = {v.name for v, name in zip(callee.parameters, used, strict=True) if name in weights}
                returned = zip(line.results, callee.returns, strict=True)
                inner_wanted = {name for value, (_, name) in returned if value is not None and value.name in wanted}
                self._lines(callee, line.origin, inner_weights, early, inner_wanted)
                continue
            alone = (used and weights.issuperset(used)) or line.op == "parc.stream_key.default"
            if alone:
                weights.update(value.name for value in line.made)
            if module:
                (early if alone else self.first).setdefault(module, (function.name, index))
                self.operators.setdefault(module, set()).add(line.op)
                for value in line.made[:1]:
                    if value.type.dtype.is_floating_point and value.name in wanted and not alone:
                        text, names = value.type.text(self.program.mesh), module.split(".")
                        self.types.update((".".join(names[: end + 1]), text) for end in range(len(names)))


class _Flow:
    """The flow of values among the rows of a tree."""

    def __init__(self, program: Program, tree: ModuleTree) -> None:
        self.program, self.tree = program, tree
        above = {tree.row_of(row.path.rpartition(".")[0]) for row in tree.rows if row.path}
        with_weights = {name.rpartition(".")[0] for name in program.main.bound(*PARAMETERS, "weight")}
        modules = {row.path for row in tree.rows if row.kind == "module" and row.path}
        self.makers = modules & ({*tree.folded} - above | {tree.folded.get(path, "") for path in with_weights})
        self.blocks = {row.path: row for row in tree.rows if row.kind == "block"}
        self.entered: set[str] = set()
        self.reached: set[str] = set()
        """The rows that values of the model's inputs reach."""

    def follow(self) -> None:
        """Follow the main function, from the inputs of the model to the loss, or else to what it returns."""
        main, makers = self.program.main, dict[str, Makers]()
        for value in main.parameters:
            is_weight = value.kind in STORED or value.kind == "weight"
            makers[value.name] = None if is_weight else frozenset()
        for name, value in main.bound("input").items():
            makers[value.name] = frozenset({f"/{name}"})
        inputs = [ModuleRow(f"/{name}", name, 0, [name], "input", value.type.text(self.program.mesh))
                  for name, value in main.bound("input").items()]  # fmt: skip
        self.tree.rows[:0] = inputs
        self.reached.update(row.path for row in inputs)
        self._function(main, makers, "")
        for label, name in (main.returned("loss") or main.returned("output")).items():
            row = f"/returned {label}" if label else LOSS_ROW
            self._edges(makers[name], row)
            self.tree.rows.append(ModuleRow(row, label or "loss", 0, [row], "loss"))
        here = {row.path: at for at, row in enumerate(self.tree.rows)}
        self.tree.edges = {edge: None for edge in self.tree.edges if here[edge[0]] != here[edge[1]]}

    def _edges(self, makers: Makers, to: str) -> None:
        if not self.reached.isdisjoint(makers or ()):
            self.reached.add(to)
        self.tree.edges.update(dict.fromkeys((one, to) for one in makers or ()))

    def _function(self, function: Function, makers: dict[str, Makers], caller: str) -> None:
        """Add the makers of a function's values to ``makers``, which has those of its parameters."""
        for line in function.lines:
            used = [makers[name] for name in line.uses]
            flows = frozenset[str]().union(*(modules for modules in used if modules is not None))
            module = self.tree.row_of(complete(line.origin.module, caller))
            if line.calls_function:
                makers |= self._call(line, used, flows, module)
            elif used and all(modules is None for modules in used):
                makers.update((value.name, None) for value in line.made)
            else:
                if module in self.makers:
                    self._edges(flows - {module}, module)
                    flows = frozenset({module})
                makers.update((value.name, flows) for value in line.made)

    def _call(self, line: Line, used: list[Makers], flows: frozenset[str], module: str) -> dict[str, Makers]:
        """Return the makers of the results of a function that a line calls. A block is entered once, and is itself the
        maker of its results."""
        callee, block = self.program.function(line.op), self.blocks.get(module)
        results = [(value.name, name) for value, (_, name) in zip(line.results, callee.returns, strict=True) if value]
        if block is None:
            inner: dict[str, Makers] = dict(zip((value.name for value in callee.parameters), used, strict=True))
            self._function(callee, inner, line.origin.module)
            return {name: inner[returned] for name, returned in results}
        self._edges(flows - {module}, module)
        if module not in self.entered:
            self.entered.add(module)
            inner = {}
            for value, modules in zip(callee.parameters, used, strict=True):
                comes = modules is not None and not modules.isdisjoint(self.reached)
                inner[value.name] = frozenset({module} if comes else ()) if modules is not None else None
            self._function(callee, inner, line.origin.module)
            names = {name for _, name in callee.returns}
            last = next((v.name for inside in reversed(callee.lines) for v in inside.made if v.name in names), "")
            block.type = callee.values()[last].type.text(self.program.mesh) if last else block.type
            self._output(block, inner.get(last))
        return {name: frozenset({module}) for name, _ in results}

    def _output(self, block: ModuleRow, makers: Makers) -> None:
        """Add a row for a block's output behind its other rows."""
        rows, name = self.tree.rows, f"{block.path}/output"
        at = rows.index(block) + 1
        while at < len(rows) and rows[at].depth > block.depth:
            at += 1
        rows.insert(at, ModuleRow(name, "output", block.depth + 1, [name], "output", block.type))
        self._edges(makers, name)
