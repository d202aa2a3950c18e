"""``mesh``: the ranks along named axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....grammar.codes import BAD_VALUE, MESH_DIFFERS, REPEATED, WRONG_KIND
from ....grammar.diagnostics import Diagnostic, Label
from ....grammar.syntax import Number, Setting
from ...layout.mesh import Mesh
from ..directive import Directive, Scope, argument, check_unique

MOST_RANKS = 1 << 20
"""The most ranks of a mesh: sixty times the GPUs that the largest models are trained on."""
MOST_AXES = 32


@dataclass(frozen=True)
class MeshLine(Directive):
    """The ranks, arranged along named axes. The first axis is the outermost: its ranks are furthest apart, so give it
    the slowest links.

    The number of ranks is the product of the sizes. Without this line there is one rank. An included file may have a
    `mesh` line too: axes that both have must have the same sizes, and the other axes follow those of the plan.
    """

    USAGE = "mesh NAME=VALUE, ..."
    LAYOUT = True
    ONCE = False

    mesh: Mesh = argument(lambda line: declared_mesh(line.bindings("name")))

    def check(self, scope: Scope) -> Iterator[Diagnostic]:
        bindings = self.arguments.bindings("name")
        first = next(line for line in scope.all(MeshLine) if line.span.source == self.span.source)
        if first is not self:
            related = (Label(first.span, "given here first"),)
            message, label = "a plan has one `mesh` line", Label(self.arguments.statement.verb.span)
            yield Diagnostic(REPEATED, message, label, related, help="remove one of them")
            return
        yield from self._check_others(scope)
        yield from check_unique(tuple(binding.name for binding in bindings), "axis")
        yield from check_sizes(bindings)
        if scope.mesh.world > MOST_RANKS or len(bindings) > MOST_AXES:
            message = f"a mesh of {scope.mesh.world:,} ranks along {len(bindings)} axes"
            help_ = f"at most {MOST_RANKS:,} ranks along {MOST_AXES} axes are read"
            yield Diagnostic(BAD_VALUE, message, Label(self.span), help=help_)
            return
        yield from self._check_parts(scope)

    def _check_parts(self, scope: Scope) -> Iterator[Diagnostic]:
        """Find axes with the name of a sub-axis of another axis, as programs name those of a factored axis."""
        others = {binding.name.text: binding for binding in merged(scope.all(MeshLine))}
        for binding in self.arguments.bindings("name"):
            whole, _, number = binding.name.text.rpartition("_")
            if whole in others and number.isdecimal():
                related = (Label(others[whole].name.span, "declared here"),)
                message = f"`{binding.name.text}` is the name that programs use for a part of the axis `{whole}`"
                help_ = f"choose another name, such as `{whole}{number}`"
                yield Diagnostic(BAD_VALUE, message, Label(binding.name.span), related, help=help_)

    def _check_others(self, scope: Scope) -> Iterator[Diagnostic]:
        """An error for each axis that another file gives another size."""
        earlier = outer_first(scope.all(MeshLine))
        earlier = earlier[: next(at for at, line in enumerate(earlier) if line is self)]
        before = {binding.name.text: binding for binding in merged(earlier)}
        sizes = dict(declared_mesh(tuple(before.values())).axes)
        for name, size in self.mesh.axes:
            other = sizes.get(name, size)
            if other != size:
                related = (Label(before[name].span, f"{other} here"),)
                message = f"the axis `{name}` has size {size} in one file and {other} in another"
                help_ = f"give the size as the include's argument: `({name}={other})`"
                yield Diagnostic(MESH_DIFFERS, message, Label(self.span.root), related, help=help_)


def check_sizes(bindings: Sequence[Setting]) -> Iterator[Diagnostic]:
    """Yield errors for sizes of axes that are no whole numbers of 1 or more."""
    for binding in bindings:
        value, label = binding.value, Label(binding.value.span)
        if not isinstance(value, Number) or not value.is_integer:
            message = f"the size of `{binding.name.text}` is not a whole number"
            yield Diagnostic(WRONG_KIND, message, label, help=f"write `{binding.name.text}=2`")
        elif value.value < 1:
            message = f"the axis `{binding.name.text}` has size {value.text}"
            yield Diagnostic(BAD_VALUE, message, label, help="sizes are 1 or more; 1 turns an axis off")


def declared_mesh(bindings: Sequence[Setting]) -> Mesh:
    """Return the mesh of these axes, with size 1 in place of a size that makes no sense."""
    axes: dict[str, int] = {}
    for binding in bindings:
        value = binding.value
        size = int(value.value) if isinstance(value, Number) and value.is_integer else 1
        axes.setdefault(binding.name.text, max(size, 1))
    return Mesh(tuple(axes.items()))


def outer_first(lines: Sequence[MeshLine]) -> list[MeshLine]:
    """Return lines in the order in which their axes count: the plan's own lines before those of included files."""
    return sorted(lines, key=lambda line: sum(1 for _ in line.span.includes))


def merged(lines: Sequence[MeshLine]) -> tuple[Setting, ...]:
    """Return every axis once, with the size in the first line that names it."""
    settings: dict[str, Setting] = {}
    for line in outer_first(lines):
        for binding in line.arguments.bindings("name"):
            settings.setdefault(binding.name.text, binding)
    return tuple(settings.values())
