"""The smaller model of a twin: the ``verify`` line's arguments, with as many blocks and experts as its test needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from parc.compiler.capture.callables import load_callable
from parc.compiler.capture.model_calls import whole_arguments
from parc.compiler.layout.mesh import Mesh
from parc.compiler.plan.directive import Literal
from parc.compiler.plan.directives.experts import Experts
from parc.compiler.plan.directives.stage import Stage
from parc.compiler.program.blocks import block_of, starred
from parc.compiler.resolve.in_graph import RING_METHODS
from parc.compiler.resolve.names import is_within
from parc.compiler.resolve.stage_lines import stage_count
from parc.compiling.compiled import Compiled
from parc.compiling.fit import stages_of
from parc.compiling.plan_capture import make_model
from parc.grammar.codes_build import NO_TWIN
from parc.grammar.diagnostics import Diagnostic, Label, PlanError
from parc.grammar.nearest import listed
from parc.grammar.syntax import Word

SmallArguments = Mapping[str, Literal]
_FEW_BLOCKS = 2
"""The blocks of a stage of which one is the first, and another follows one of the same stage."""


class SmallModels:
    """The arguments of smaller models for meshes. The arguments that set the numbers of blocks and of experts are found
    by making models with other arguments, on fake tensors. ``stated`` are those of the ``verify`` line."""

    def __init__(self, compiled: Compiled, stated: SmallArguments) -> None:
        plan, names = compiled.plan, blocks_in(compiled.recorded.module)
        self._compiled, self._stated, self._of_model = compiled, stated, whole_number_arguments(compiled)
        self._modules = dict[tuple[Any, ...], nn.Module | None]()
        self._blocks = Counter(map(starred, names))
        stages = stages_of(compiled, dict.fromkeys(names, ()))
        last = compiled.request.pipeline.stages - 1 if compiled.request.pipeline is not None else 0
        self._empty_stages = min(stages.values(), default=0), last - max(stages.values(), default=last)
        """The stages without blocks before those that have some, and after them."""
        in_stages = Counter((starred(name), stages[name]) for name in names)
        self._most_in_stage = {kind: max(n for (of, _), n in in_stages.items() if of == kind) for kind in self._blocks}
        """The most blocks of each kind in a stage."""
        axes = {line.axis.text for line in plan.placements if isinstance(line, Experts)}
        layers = [layer for layer in compiled.request.placing.experts.values() if layer.ranks > 1]
        self._experts = (layers[0], axes.pop()) if layers and len(axes) == 1 else None

    def least_ranks(self) -> dict[str, int]:
        """Return the fewest ranks of axes with which two stages have blocks, a token does not choose all experts, and
        the next rank on a ring is not the one before."""
        plan = self._compiled.plan
        least = {line.axis.text: 3 for line in plan.context if line.method in RING_METHODS}
        if plan.stages and plan.schedule is not None:
            least[plan.stages[0].axis.text] = max(2, -(-(2 + sum(self._empty_stages)) // plan.schedule.chunks))
        if self._experts is not None:
            (layer, axis), ranks = self._experts, 2
            while layer.experts // layer.ranks * ranks <= layer.top:
                ranks *= 2
            least[axis] = ranks
        return least

    def arguments(self, mesh: Mesh, times: int = 1) -> SmallArguments:
        """Return the arguments of a model for a mesh: the stated ones, changed so that there are at least two blocks a
        stage and chunk, or ``times`` as many, and as many experts a rank as in the build, if arguments set them."""
        chosen, wanted = self._stated, self._wanted(mesh, times)
        lacks = self._lacks(chosen, wanted) or {}
        smaller = [name for name, value in chosen.items() if type(value) is int and value < self._of_model.get(name, 0)]
        for name in sorted(smaller, key=lambda name: self._of_model[name] not in self._blocks.values()):
            if not lacks:
                break
            factor = max(-(-wanted[kind] // max(wanted[kind] - n, 1)) for kind, n in lacks.items())
            larger = {**chosen, name: min(int(chosen[name]) * factor, self._of_model[name])}  # type: ignore[arg-type]
            left = self._lacks(larger, wanted)
            if left is not None and sum(left.values()) < sum(lacks.values()):
                chosen, lacks = larger, left
        if self._experts is None:
            return chosen
        layer, axis = self._experts
        experts = layer.experts // layer.ranks * mesh.size(axis)
        names = [name for name, value in self._of_model.items() if value == layer.experts]
        fewer = ({**chosen, name: experts} for name in names if chosen.get(name, layer.experts) != experts)
        return next((arguments for arguments in fewer if self._has_experts(arguments, experts)), chosen)

    def stages(self, mesh: Mesh, arguments: SmallArguments) -> tuple[Stage, ...]:
        """Return the plan's stages for a smaller model, whose widths the plan's cuts do not balance: stages have equal
        numbers of blocks; those without blocks, as for a large head, are as in the build."""
        plan, pipeline = self._compiled.plan, self._compiled.request.pipeline
        if not plan.stages or (mesh.declared == plan.mesh and not arguments):
            return plan.stages
        line, module = replace(plan.stages[0], before=(), after=(), balanced=True), self._module(arguments)
        names, (ahead, behind) = blocks_in(module) if module is not None else [], self._empty_stages
        count = self._stage_count(mesh) - ahead - behind
        if pipeline is None or not arguments or not names or count < 1:
            return (line,)
        last = len(pipeline.cuts) - behind
        cuts = [(names[0] if block_of(name) else name, after) for name, after in pipeline.cuts[:ahead]]
        cuts += [(names[len(names) * stage // count], False) for stage in range(1, count)]
        cuts += [(names[-1] if block_of(name) else name, after) for name, after in pipeline.cuts[last:]]
        before, after = (tuple(Word(name, line.span) for name, end in cuts if end == way) for way in (False, True))
        lines = replace(line, before=before, balanced=False), replace(line, after=after, balanced=False)
        return tuple(line for line in lines if line.before or line.after)

    def fault(self, mesh: Mesh) -> Diagnostic | None:
        """Return the error of a ``verify`` line with which the model has too few blocks; None where it has enough."""
        line, wanted = self._compiled.plan.verify, self._wanted(mesh, 1)
        lacks = self._lacks(self.arguments(mesh), wanted)
        if not lacks or line is None:
            return None
        kind, missing = max(lacks.items(), key=lambda item: item[1])
        needed = wanted[kind]
        message = f"the smaller model has {needed - missing} of the blocks `{kind}`, and a test needs {needed}"
        smaller = [name for name, value in self._stated.items() if value != self._of_model.get(name)]
        help_ = f"change {listed(smaller, 'or')} of the `verify` line so that there are as many"
        stages = self._stage_count(mesh)
        notes = (f"a stage of the build has up to {self._most_in_stage[kind]}, and the test has {stages} stages",)
        return Diagnostic(NO_TWIN, message, Label(line.span), help=help_, notes=notes if stages > 1 else ())

    def _stage_count(self, mesh: Mesh) -> int:
        """Return the number of stages on a mesh."""
        return stage_count(replace(self._compiled.plan, mesh=mesh.declared))

    def _wanted(self, mesh: Mesh, times: int) -> dict[str, int]:
        """Return the least number of blocks of each kind."""
        stages = self._stage_count(mesh)
        wanted = {kind: stages * min(most, times * _FEW_BLOCKS) for kind, most in self._most_in_stage.items()}
        if (fitted := self._compiled.fitted) is not None:
            wanted |= {kind: max(least, wanted.get(kind, 0)) for kind, least in fitted.least_blocks(stages).items()}
        return {kind: min(count, self._blocks[kind]) for kind, count in wanted.items()}

    def _lacks(self, arguments: SmallArguments, wanted: Mapping[str, int]) -> dict[str, int] | None:
        """Return how many blocks of each kind a model has too few; None for one that cannot be made."""
        if (module := self._module(arguments)) is None:
            return None
        have = Counter(map(starred, blocks_in(module)))
        return {kind: count - have[kind] for kind, count in wanted.items() if have[kind] < count}

    def _has_experts(self, arguments: SmallArguments, experts: int) -> bool:
        """Return whether a parameter has as many rows as there are ``experts``, where that of the plan's model has as
        many as it has experts."""
        kinds = {starred(path) for path in self._compiled.request.placing.experts}

        def rows(module: nn.Module | None) -> set[tuple[str, int]]:
            named = module.named_parameters() if module is not None else ()
            inside = ((name, value) for name, value in named if any(is_within(starred(name), kind) for kind in kinds))
            return {(starred(name), len(value)) for name, value in inside if value.dim()}

        assert self._experts is not None
        large, total = rows(self._compiled.recorded.module), self._experts[0].experts
        return any((name, total) in large and count == experts for name, count in rows(self._module(arguments)))

    def _module(self, arguments: SmallArguments) -> nn.Module | None:
        """Return a model on fake tensors; None where its code does not take these arguments."""
        key, compiled = tuple(map(repr, arguments.items())), self._compiled
        if key not in self._modules:
            overrides = {**compiled.overrides, **arguments}
            self._modules[key] = None
            with suppress(PlanError):
                self._modules[key] = make_model(compiled.plan, compiled.lines, compiled.folder, overrides).module
        return self._modules[key]


def whole_number_arguments(compiled: Compiled) -> dict[str, int]:
    """Return the whole numbers among the arguments of the plan's model."""
    make = load_callable(compiled.plan.model.callable, compiled.folder)
    return whole_arguments(make, compiled.recorded.module, dict(compiled.plan.model.values))


def blocks_in(module: nn.Module) -> list[str]:
    """Return the names of a model's blocks."""
    return [name for name, _ in module.named_modules() if name and block_of(name) == name]
