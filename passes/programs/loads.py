"""LOADS: once a step, the tokens that each expert got in the whole batch, and the biases that balance them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...compiler.layout.mesh import Mesh
from ...compiler.layout.placement import TensorType
from ...compiler.program.actions import LOADS
from ...compiler.program.binding import Binding
from ...compiler.program.program import Program, Ref, Value
from ...compiler.program.step_values import LOAD, Bias
from .emit import identifier
from .writer import Across, Writer, summed_type, whole_type


def load_programs(
    made: Sequence[Mapping[str, TensorType]], order: Sequence[str], biases: Mapping[str, Bias],
    buffers: Mapping[str, TensorType], mesh: Mesh, roles: Sequence[str], axis: str,
) -> Sequence[Program]:  # fmt: skip
    """Write LOADS of every role; ``made`` are the loads that each role's F makes, by the module of the experts, of
    which ``order`` is that of the model.

    Every role returns the loads of all layers, one behind the other, as a metric. The role of a layer with a bias adds
    its ``rate`` to the biases of experts with fewer tokens than the mean, and takes it from those with more (Wang et
    al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024).
    """
    types = {module: type_ for own in made for module, type_ in own.items()}
    layers = {module: types[module] for module in order}
    if not layers:
        return []
    programs, everyone = [], range(len(roles))
    for role, own in zip(roles, made, strict=True):
        write = Writer(mesh, Across(axis, everyone, {}, ()) if axis else None)
        loads = _summed(write, own)
        pieces = [
            loads[module] if module in loads else write.zeros(summed_type(type_)) for module, type_ in layers.items()
        ]
        returns = [(LOAD, write.among(_joined(write, pieces), everyone).name)]
        for module in own:
            if (bias := biases.get(module)) is not None:
                returns.append(_moved(write, bias, loads[module], buffers[bias.buffer]))
        programs.append(write.program(role, LOADS, returns))
    return programs


def _summed(write: Writer, own: Mapping[str, TensorType]) -> dict[str, Value]:
    """Add the sums over the ranks that route different tokens: one for all layers with the same ones."""
    loads: dict[str, Value] = {}
    for placement in dict.fromkeys(type_.placement for type_ in own.values()):
        given = {
            module: write.take(f"load_{identifier(module)}", type_, Binding("load", module))
            for module, type_ in own.items() if type_.placement == placement
        }  # fmt: skip
        total, start = write.total(_joined(write, list(given.values()))), 0
        for module, value in given.items():
            size = value.type.shape[0]
            args = Ref(total.name), 0, start, start + size, 1
            loads[module] = total if len(given) == 1 else write.emit("aten.slice.Tensor", args, summed_type(value.type))
            start += size
    return loads


def _joined(write: Writer, values: Sequence[Value]) -> Value:
    if len(values) == 1:
        return values[0]
    row = replace(values[0].type, shape=(sum(value.type.shape[0] for value in values),))
    return write.emit("aten.cat.default", ([Ref(value.name) for value in values],), row)


def _moved(write: Writer, bias: Bias, load: Value, stored: TensorType) -> tuple[Binding, str]:
    """Add the new value of a bias. Float64 holds any number of tokens exactly."""
    key, wide = Binding("buffer", bias.buffer), torch.float64
    old, row = write.take(identifier(bias.buffer), stored, key), whole_type(write.mesh, wide, load.type.shape)
    tokens = write.emit("aten._to_copy.default", (Ref(load.name),), row, dtype=wide)
    mean = write.emit("aten.mean.default", (Ref(tokens.name),), whole_type(write.mesh, wide))
    flags, moves = replace(row, dtype=torch.bool), []
    for op in ("lt", "gt"):  # what is compared is rounded to no other type
        flag = write.emit(f"aten.{op}.Tensor", (Ref(tokens.name), Ref(mean.name)), flags)
        moves.append(write.emit("aten._to_copy.default", (Ref(flag.name),), stored, dtype=stored.dtype))
    step = write.emit("aten.sub.Tensor", tuple(Ref(move.name) for move in moves), stored)
    step = write.emit("aten.mul.Tensor", (Ref(step.name), bias.rate), stored)
    return key, write.emit("aten.add.Tensor", (Ref(old.name), Ref(step.name)), stored, name="moved").name
