"""Stored parameters: storage types that differ from compute types.

A parameter of the typed graph has the type that its readers want. Its storage type may differ for two reasons. All its
readers may cast it: then UNSHARD casts it once a step, and no block does. And a ``zero`` line may shard it, its
gradient or its optimizer state over an axis whose ranks all compute with the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from ...compiler.capture.node_facts import StoredAs, copy_facts, noted
from ...compiler.layout.collectives import global_outer
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import Split, TensorType
from ...compiler.ops.own_ops import aten
from ...compiler.padding.pads import Pad, padded_shape
from ...compiler.program.binding import PARAMETERS
from ...compiler.program.program import Origin
from ...compiler.resolve.requests import ShardDims, Sharding
from ..programs.segments import data_type, node_type

GRADIENTS, WEIGHTS = 2, 3
"""The levels of ZeRO from which gradients, and the parameters themselves, are sharded too."""
_MOST_PADDING = 8
"""A parameter stays whole where its padding would exceed this fraction of it: one eighth."""


class AlreadySplit(ValueError):
    """The error of a ``zero`` line over an axis that already splits the parameter for the computation."""

    def __init__(self, name: str, sharding: Sharding) -> None:
        super().__init__(
            f"`{name}` is split over `{sharding.axis}` already: each of its ranks computes with a part of it"
        )
        self.name, self.sharding = name, sharding


@dataclass(frozen=True, slots=True)
class Stored:
    """The choices for sharded parameters."""

    dims: dict[tuple[str, str], tuple[int, bool] | None] = field(default_factory=dict)
    """The ``ShardDims`` of these."""
    pads: dict[str, tuple[Pad, ...]] = field(default_factory=dict)
    """The padding of those that do not divide, by name."""
    whole: dict[str, int] = field(default_factory=dict)
    """The bytes of those that stay whole, by name."""


def store_parameters(
    graph: fx.Graph, mesh: Mesh, shardings: Mapping[str, Sequence[Sharding]], dims: ShardDims | None = None
) -> Stored:
    """The pass of storage. It takes the typed graph and the demands of ``zero`` lines, notes on placeholders of
    parameters how they are stored where that differs from their type, and returns its choices. It changes the graph in
    place: a cast that all readers share becomes the placeholder's type. ``dims`` are the choices for a larger model,
    whose twin this is.

    Raises:
        AlreadySplit: an axis that shards a parameter splits it already.
    """
    stored = Stored()
    for node in graph.find_nodes(op="placeholder"):
        kind, name = noted(node).binding
        if kind not in PARAMETERS or not node.users:
            continue
        wanted = []
        for sharding in shardings.get(name, ()):
            split = isinstance(node_type(node).placement[sharding.axis], Split)
            if (kind != "parameter" and sharding.level < WEIGHTS) or (split and sharding.spare):
                continue
            if split:
                raise AlreadySplit(name, sharding)
            wanted.append(sharding)
        rest = _shard(name, data_type(node), wanted, mesh, stored, dims)
        for at, form in enumerate(_forms(graph, node)):
            computed = data_type(form)
            label = name if at == 0 else f"{name}:{at}"
            origin = noted(form).origin if computed.dtype != rest.dtype else Origin(name.rpartition(".")[0])
            origin = replace(origin, plan=wanted[0].line if wanted else origin.plan)
            if rest != computed:
                noted(form).storage = _storage(label, rest, computed, wanted, origin)
    return stored


def _storage(
    label: str, rest: TensorType, computed: TensorType, wanted: Sequence[Sharding], origin: Origin
) -> StoredAs:  # fmt: skip
    """Return the types of a parameter between steps (``rest``), and during a step for readers of type ``computed``."""
    levels = {one.axis: one.level for one in wanted if isinstance(rest.placement[one.axis], Split)}
    gathered = {axis: computed.placement[axis] for axis, level in levels.items() if level < WEIGHTS}
    shape = computed.shape if len(gathered) == len(levels) else rest.shape
    step = TensorType(computed.dtype, shape, rest.placement.replace(gathered))
    return StoredAs(label, rest, step, tuple(axis for axis, level in levels.items() if level >= GRADIENTS), origin)


def _shard(
    name: str, type_: TensorType, wanted: Sequence[Sharding], mesh: Mesh, stored: Stored, dims: ShardDims | None
) -> TensorType:
    """Return a type with a dim split over each axis: the first that divides, else the one that needs the least padding.
    Where that is too much, the parameter stays whole."""
    for one in wanted:
        key, cuts = (name, one.axis), {cut.dim: cut for cut in _cuts(type_, one.axis, mesh)}
        chosen: _Cut | None = min(cuts.values(), key=lambda cut: (cut.padding, cut.dim), default=None)
        if dims is not None:
            dim, longer = dims.get(key) or (-1, False)
            chosen = cuts.get(dim)
            if chosen is not None and longer and chosen.real == chosen.padded:
                chosen = replace(chosen, padded=chosen.padded + mesh.size(one.axis))
        elif chosen is not None and chosen.padding * _MOST_PADDING > chosen.real:
            chosen = None
        if chosen is None:
            stored.dims[key] = None
            stored.whole[name] = type_.local_bytes(mesh)
            continue
        pads = (Pad(chosen.dim, 1, chosen.real, chosen.padded),) if chosen.padding else ()
        stored.dims[key] = chosen.dim, bool(pads)
        stored.pads.update({name: (*stored.pads.get(name, ()), *pads)} if pads else {})
        placement = type_.placement.replace({one.axis: chosen.split})
        type_ = replace(type_, shape=padded_shape(type_.shape, pads), placement=placement)
    return type_


@dataclass(frozen=True, slots=True)
class _Cut:
    """A way to split a type over one more axis: its dim, with ``real`` entries made ``padded``."""

    dim: int
    split: Split
    real: int
    padded: int

    @property
    def padding(self) -> int:
        return self.padded - self.real


def _cuts(type_: TensorType, axis: str, mesh: Mesh) -> Iterator[_Cut]:
    """Yield the ways to split a type over one more axis, a dim each. Padding is for dims that nothing else splits."""
    for dim, local in enumerate(type_.local(mesh)):
        size, ranks = type_.shape[dim], mesh.size(axis)
        try:
            split = Split(dim, global_outer(type_.placement, mesh, dim, 1))
        except ValueError:  # it would cut across the parts of another split
            continue
        padded = size if local % ranks == 0 else -(-size // ranks) * ranks
        longer = (*type_.shape[:dim], padded, *type_.shape[dim + 1 :])
        free = padded == size or not type_.placement.splits(dim)
        if size and free and type_.placement.replace({axis: split}).nests(longer, mesh):
            yield _Cut(dim, split, size, padded)


def _forms(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Return a placeholder for every type in which a parameter's readers read it. Casts become placeholders; the first
    is the parameter's own."""
    casts: dict[TensorType, list[fx.Node]] = {}
    others = []
    for user in node.users:
        if user.target is aten._to_copy.default and set(user.kwargs) <= {"dtype"}:
            casts.setdefault(node_type(user), []).append(user)
        else:
            others.append(user)
    forms = [node] if others or not casts else []
    for same in casts.values():
        form = node
        if forms:
            with graph.inserting_after(node):
                form = graph.placeholder(node.name)
            copy_facts(node, form)
        forms.append(form)
        noted(form).types, noted(form).value = noted(same[0]).types, noted(same[0]).value
        noted(form).origin = noted(same[0]).origin
        for cast in same:
            cast.replace_all_uses_with(form)
            graph.erase_node(cast)
    return forms
