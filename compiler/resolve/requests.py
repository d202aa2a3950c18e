"""Requests: the types in which a plan says to the passes what it wants of them, for one captured model.

Lines of a plan name its own axes; requests name the axes of the mesh that passes see, into which ``PlanAxes`` factor
those. Where passes read what a line says as it is, one type serves both. Nothing here imports torch, since ``parc check
--static`` reads lines without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Generic, TypeVar

from ...grammar.diagnostics import Diagnostic
from ..layout.mesh import Mesh, finer, viewed
from ..ops.recompute import RecomputeLine
from ..padding.pads import Pad
from ..plan.plan import Plan
from ..program.actions import Purpose, StageRanks
from ..program.binding import Binding
from ..program.step_values import LossScale
from .seeds import PlacementSeed

if TYPE_CHECKING:
    import torch

    from ..layout.placement import Split
    from ..ops.precision import PrecisionRegions
    from .experts import RoutedLayer
    from .in_graph import ContextLine

# ---- placements

_Key = TypeVar("_Key")
_OtherKey = TypeVar("_OtherKey")


@dataclass(frozen=True, slots=True)
class Claim(Generic[_Key]):
    """The claim of a line on one value and axis; ``split`` None says that the value is whole there. A request names the
    value by its binding (``value NAME`` for one inside the model), passes by the node that makes it."""

    value: _Key
    axis: str
    split: Split | None
    line: int
    site: str = ""
    """The name of a value inside the model: claims on these come after all others."""
    few: bool = False
    """True where ranks keep the same heads of a weight that a line splits, because there are fewer heads."""
    gathered: bool = False
    """True where the line keeps a value inside the model gathered for backward, where a product gathers it."""

    def at(self, value: _OtherKey) -> Claim[_OtherKey]:
        """Return the same claim on a value that is named otherwise."""
        return Claim(value, self.axis, self.split, self.line, self.site, self.few, self.gathered)


@dataclass(frozen=True, slots=True)
class PlanAxes:
    """The axes of a plan, as far as they are factored, and the values of which several ranks of an axis keep the same
    heads. ``sizes`` are the sub-axes of an axis: for heads, for views, at nodes. ``kept`` says by value and axis how
    many of the sub-axes, major first, split the value; it is whole on the others. ``fused`` says the same for values in
    which these heads are fused with more; on the other sub-axes they are gathered."""

    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kept: Mapping[tuple[str, str], int] = field(default_factory=dict)
    fused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    notes: tuple[Diagnostic, ...] = ()
    across: Mapping[str, int] = field(default_factory=dict)
    """The number of parts, major first, along which the ranks of an axis are on different nodes, for axes of the mesh
    or of views of which lines mean the nodes."""

    def cut(self, axis: str, ranks: int, cuts: Iterable[int]) -> PlanAxes:
        """Return these with an axis of so many ranks factored at other places too: after so many parts of it.

        Raises:
            NoCommonParts: one cuts through what the axis is factored into already.
        """
        before = [*accumulate(self.sizes.get(axis, (ranks,)), mul)]
        factors = finer(self.sizes.get(axis, (ranks,)), cuts)
        ends = [*accumulate(factors, mul)]

        def moved(counts: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
            return {
                key: ends.index(before[number - 1]) + 1 if key[1] == axis and number else number
                for key, number in counts.items()
            }

        sizes = {axis: factors} if len(ends) > 1 else {}
        return replace(self, sizes={**self.sizes, **sizes}, kept=moved(self.kept), fused=moved(self.fused))

    def mesh(self, plan: Plan) -> Mesh:
        """Return the mesh of a plan with its axes factored into these."""
        return viewed(plan.mesh, (line.view for line in plan.views), self.sizes)

    def parts(self, mesh: Mesh) -> dict[tuple[str, str], int]:
        """Return the number of parts into which a value is split, by value and axis."""
        axes = {key: mesh.parts(key[1])[:number] for key, number in self.kept.items()}
        return {key: math.prod(map(mesh.size, sub_axes)) for key, sub_axes in axes.items()}


@dataclass(frozen=True, slots=True)
class Placing:
    """The mesh, and what lines say of the places of values on it."""

    mesh: Mesh
    claims: tuple[Claim[Binding], ...] = ()
    """The claims, in the order of the plan's lines."""
    fused: Sequence[tuple[PlacementSeed, Sequence[str]]] = ()
    """Splits of parameters that hold few heads beside more, with the axes over which the few heads are gathered."""
    context: tuple[ContextLine, ...] = ()
    """The axes that split sequences, and how attention works across them."""
    experts: Mapping[str, RoutedLayer] = field(default_factory=dict)
    """The layers of experts, by their modules."""


# ---- numbers


@dataclass(frozen=True, slots=True)
class Computing:
    """The numbers that a step computes, and the types in which it does."""

    microbatches: int
    seed: int
    accumulate: torch.dtype
    """The type in which gradients of microbatches are added."""
    frozen: frozenset[str] = frozenset()
    """The parameters that are not trained."""
    pads: Mapping[Binding, Sequence[Pad]] = field(default_factory=dict)
    """Dims of parameters that are longer in programs than in the model."""
    precision: PrecisionRegions = ()
    loss_scale: LossScale = None
    terms: int = 1
    """The number of the loss's terms."""
    unbatched: frozenset[str] = frozenset()
    """The inputs whose first dim is not the batch."""
    summed: frozenset[int] = frozenset()
    """The numbers of the terms of which the plan says that they are sums over the batch."""


# ---- memory and messages


@dataclass(frozen=True, slots=True)
class Sharding:
    """The demand of a ``zero`` line on one parameter: its level over an axis, and the line's number. ``spare``: over
    the axis only where it does not split the parameter for the computation. ``within``: over those ranks alone that
    share a node."""

    axis: str
    level: int
    line: int
    spare: bool = False
    within: bool = False


@dataclass(frozen=True, slots=True)
class Compression:
    """The demand of a ``compress`` line on one gradient: the axes, its format, and the line's number."""

    axes: tuple[str, ...]
    format: str
    line: int


Levels = Mapping[str, int]
"""The number of sub-axes, major first, of each axis in two levels that lie across nodes; the others lie inside."""


@dataclass(frozen=True, slots=True)
class Storing:
    """The state that ranks keep from one step to the next, and the values that forward keeps for backward."""

    shardings: Mapping[str, Sequence[Sharding]] = field(default_factory=dict)
    """The axes over which parameters are stored in parts, by the parameters' names."""
    offload: Mapping[str, int] = field(default_factory=dict)
    """The number of the plan's line for each part of the state of training that is kept away from memory."""
    units: frozenset[str] = frozenset()
    """The modules that are called as one, beside numbered modules outside them."""
    recompute: Sequence[RecomputeLine] = ()
    """The modules whose values backward makes again."""


@dataclass(frozen=True, slots=True)
class Messaging:
    """The messages between ranks: their sizes and steps, and how early they start."""

    bucket: int = 25_000_000
    """The bytes of a message in which tensors travel together."""
    ahead: int = 1
    """The number of units ahead for which weights are gathered."""
    levels: Levels = field(default_factory=dict)
    """The axes whose collectives are in two levels."""
    compress: Mapping[str, Compression] = field(default_factory=dict)
    """The gradients that are summed in fewer bytes, by the parameters' names."""


# ---- stages


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The cut of a step into stages: the mesh axis over which they lie, the number of stages on each of its ranks, and
    the cuts of the graph. A cut is before the first or after the last operator of a module, in the graph's order."""

    axis: str
    chunks: int
    cuts: tuple[tuple[str, bool], ...]
    """The cuts as pairs ``(module, after)``."""
    ranks: StageRanks
    """The rank along the axis on which each stage lies."""
    modules: tuple[str, ...] = ()
    """The modules in the order in which the model first comes to each."""
    kinds: tuple[tuple[str, ...], ...] = ()
    """The kinds of work of each stage, the one that the step does last of it last."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1


# ---- choices by a cost or by values. All sizes of a range must make the same ones, so that one program serves them.

Choice = TypeVar("Choice")
ShardDims = Mapping[tuple[str, str], tuple[int, bool] | None]
"""The dim along which a parameter is stored in parts, or a sum is cut, by the name of the parameter or the place of the
sum and by the axes, and whether that takes padding; None where it stays whole. A twin has those of the larger build."""


class Choices:
    """The choices of the first compilation, at the largest sizes, imposed on those at other sizes."""

    def __init__(self) -> None:
        self._first: dict[object, object] = {}

    def make(self, what: object, choice: Choice) -> Choice:
        """Return the first compilation's choice in place of this one; ``what`` names the choice alike at all sizes."""
        return self._first.setdefault(what, choice)  # type: ignore[return-value]


def agreed(choices: Choices | None, what: object, choice: Choice) -> Choice:
    """Return a choice, if sizes are fixed or the largest sizes made it too; else an empty one, which is always safe."""
    return choice if choices is None or choices.make(what, choice) == choice else type(choice)()


# ---- the request


@dataclass(frozen=True, slots=True)
class Request:
    """The demands of a plan on the passes. These read the fields of the groups, and the others here, by name."""

    placing: Placing
    computing: Computing
    storing: Storing = field(default_factory=Storing)
    messaging: Messaging = field(default_factory=Messaging)
    pipeline: Pipeline | None = None
    choices: Choices | None = None
    """The choices made at the largest sizes, where the plan has ranges of sizes."""
    shard_dims: ShardDims | None = None
    """The dims along which the parameters and the sums of a larger model are cut, whose twin this is."""
    purpose: Purpose = "training"
    """The purpose of the programs: only those of training have a backward."""

    @property
    def groups(self) -> tuple[Placing, Computing, Storing, Messaging]:
        """The groups of demands."""
        return self.placing, self.computing, self.storing, self.messaging

    @property
    def trains(self) -> bool:
        """True for the programs of training."""
        return self.purpose == "training"
