"""One step in the programs' own types: what it must give, within how much, on any backend and by any kernels.

The step starts from the model's initial values. A parameter whose entries are all alike, as a bias of zeros, is varied
first, because a product with it hides what it multiplies. Its batch is random. The reference is the captured graph in
float64. Bounds are measured on it, too: by a run in which every weight and input is rounded once more, and by one in
its own types, which has the noise of sums whose terms cancel.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...compiler.build.build import Build
from ...compiler.build.first_check import FirstCheck
from ...compiler.layout.mesh import Mesh
from ...compiler.layout.pieces import dim_index
from ...compiler.layout.placement import TensorType
from ...compiler.ops.precision import base_name, is_narrow, is_sensitive
from ...compiler.padding.tensors import grow
from ...compiler.program.binding import LOSS, Binding
from ...compiler.program.program import Program
from ...compiler.program.step_values import LOSS_SCALE
from ...compiler.sizes.size_range import BATCH
from ..data.random_batch import inputs_of, random_batch
from ..ranks.work import StepResult
from ..session.evaluation import returned_types, without_padding
from ..state.step_state import LEAST
from ..step import Stepper
from .agreement import DRAWS, Margin, joined, stacked
from .model_run import Case, Microbatches, ReferenceRun, Watch
from .roundings import ROUNDINGS_OF_A_NARROW_STEP, ROUNDINGS_OF_A_STEP, perturbed
from .simulate import Simulation

_VARIED = 0.02
"""The size of the random numbers by which a parameter is varied whose entries are all alike."""
_SCALE, _LOWER = LOSS_SCALE.name, 2.0**-4
"""The name of the loss scale in the state of steps, and the factor on one at which a step is not finite."""


# ---- the start of the step


def varied(name: str, whole: Tensor) -> Tensor:
    """Return a parameter's initial value, varied by random numbers if all its entries are alike. These depend on its
    ``name`` and shape alone. Entries move towards zero, or up from it, so that they stay in the domain of a root, of a
    logarithm or of an arc cosine."""
    if not whole.is_floating_point() or not whole.numel():
        return whole
    first = whole.flatten()[0]
    if not first.isfinite() or not torch.equal(whole, first.expand_as(whole)):
        return whole
    moves = _VARIED * torch.randn(whole.shape, generator=_generator(name)).abs()
    return (whole * (1 - moves) if first else moves).to(whole.dtype)


def varied_case(case: Case) -> Case:
    """Return a case from varied parameters and buffers: an evaluation does no step that would tell weights of ones, or
    running means of zeros, from each other."""
    parameters = {name: varied(name, whole) for name, whole in case.parameters.items()}
    buffers = {name: varied(name, whole) for name, whole in case.buffers.items()}
    return replace(case, parameters=parameters, buffers=buffers)


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def step_batches(reference: Program, microbatches: int, unbatched: Collection[str], seed: int) -> Microbatches:
    """Return the whole random inputs of each microbatch, in their own types. Inputs without a batch dim, which are
    ``unbatched``, are the same in all."""
    types = {name: value.type.dtype for name, value in inputs_of(reference).items()}
    batches = random_batch(reference, microbatches, torch.Generator().manual_seed(seed))
    return [{name: (batches[0] if name in unbatched else batch)[name].to(dtype) for name, dtype in types.items()}
            for batch in batches]  # fmt: skip


def whole_batch(build: Build, seed: int) -> dict[str, Tensor]:
    """Return the same inputs as the whole batch of a step of a build."""
    unbatched = {line["name"] for line in build.manifest["inputs"] if line["dims"][:1] != [BATCH]}
    batches = step_batches(build.reference, build.microbatches, unbatched, seed)
    return {name: value if name in unbatched else torch.cat([batch[name] for batch in batches])
            for name, value in batches[0].items()}  # fmt: skip


# ---- two numbers of a tensor


@dataclass(slots=True)
class Signature:
    """Two numbers of a whole tensor, which add up over its pieces: the sum of its squares, and its product with random
    signs."""

    squares: float = 0.0
    product: float = 0.0

    def __add__(self, other: Signature) -> Signature:
        return Signature(self.squares + other.squares, self.product + other.product)

    @property
    def norm(self) -> float:
        """The norm of the tensor."""
        return math.sqrt(self.squares)

    def apart(self, other: Signature) -> float:
        """Return the larger difference of the two numbers; infinite if one of them is no number."""
        apart = max(abs(self.norm - other.norm), abs(self.product - other.product))
        return apart if math.isfinite(apart) else math.inf


def signature(name: str, piece: Tensor, index: Sequence[Tensor], shape: Sequence[int]) -> Signature:
    """Return the signature's part of a piece. ``index`` has the global positions of its entries along each dim of the
    whole tensor's ``shape``. Signs are products of one sign for each position along each dim."""
    wide, generator = piece.detach().to(torch.float64), _generator(name)
    squares = float(wide.square().sum())
    signs = [torch.randint(0, 2, (size,), generator=generator).mul_(2).sub_(1).double() for size in shape]
    for of_dim, positions in zip(reversed(signs), reversed(index), strict=True):
        wide = wide @ of_dim[positions.cpu()].to(wide.device)
    return Signature(squares, float(wide))


def piece_signature(
    name: str, piece: Tensor, type_: TensorType, mesh: Mesh, coordinates: Mapping[str, int]
) -> Signature:
    """Return the signature's part of the piece that the rank at ``coordinates`` holds of a tensor of a type."""
    places = [dim_index(size, dim, type_.placement, mesh, coordinates, None) for dim, size in enumerate(type_.shape)]
    return signature(name, piece, places, type_.shape)


def whole_signature(name: str, whole: Tensor) -> Signature:
    """Return the signature of a whole tensor."""
    return signature(name, whole, [torch.arange(size) for size in whole.shape], whole.shape)


def bounded(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with 1 and -1 in the place of infinities, as masks and masked scores have, so that its
    other entries are compared."""
    return tensor.nan_to_num(math.nan, 1.0, -1.0)


# ---- narrow types inside kernels


class NarrowWatch(TorchDispatchMode):
    """A mode that notes the operators that never take a narrow type, and take one: kernels of parc's own compute what a
    program's text does not show. Those in ``known`` take one in the text, where the checks of roundings see it. A sum
    is no fault: torch adds narrow numbers in float32 and rounds once, as where the gradients of repeated heads add."""

    def __init__(self, known: Collection[str], noted: set[str]) -> None:
        super().__init__()
        self._known, self.noted = known, noted
        self._names: dict[Any, str] = {}  # of the operators that were called; "" for one that is no fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = self._name_if_sensitive(func)
        if name:
            narrow = next((x.dtype for x in args if isinstance(x, Tensor) and is_narrow(x.dtype)), None)
            if narrow is not None:
                self.noted.add(f"{name} in {narrow}".replace("torch.", ""))
        return func(*args, **(kwargs or {}))

    def _name_if_sensitive(self, func: Any) -> str:
        name = base_name(str(func)).removesuffix("_")
        sensitive = name != "sum" and name not in self._known and is_sensitive(f"aten.{name}.{func._overloadname}")
        return name if sensitive else ""


def _narrow_in_text(programs: Iterable[Program]) -> set[str]:
    """Return the names of the operators that read a narrow type in some line of the programs."""
    names = set()
    for program in programs:
        for function in program.functions:
            values = function.values()
            names |= {base_name(line.op) for line in function.lines
                      if any(is_narrow(values[use].type.dtype) for use in line.uses)}  # fmt: skip
    return names


# ---- the result of the step


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """The expected signature of a tensor, and the bound on the difference of either number."""

    signature: Signature
    bound: float


def part_of_bound(error: float, bound: float) -> float:
    """Return an error as a part of its bound: above 1 roundings do not explain it, and never one that is no number."""
    part = error / bound if bound else math.inf if error else 0.0
    return part if part == part else math.inf


def expected_tensor(check: FirstCheck, key: Binding) -> ExpectedTensor:
    """Return what a first check expects of a tensor."""
    squares, product, bound = check.expected[key]
    return ExpectedTensor(Signature(squares, product), bound)


@dataclass(slots=True)
class OwnStep:
    """The result of one step in the programs' own types: the expected signatures by binding, and the random data and
    the state that it starts from."""

    seed: int
    state: Mapping[str, float]
    expected: dict[Binding, ExpectedTensor] = field(default_factory=dict)
    worst: tuple[float, str] = 0.0, ""
    """The largest error beside its bound, and where it is."""
    not_finite: str = ""
    """The first tensor that is finite in float64 and not in the programs' own types."""
    narrow: tuple[str, ...] = ()
    """The sensitive operators that kernels computed in a narrow type."""


def largest_rounding(programs: Iterable[Program], formats: Collection[str] = ()) -> float:
    """Return the relative size of one rounding to the narrowest type of programs, or to one of the formats of
    compressed messages."""
    roundings = [torch.finfo(dtype).eps for dtype in _dtypes(programs) if dtype.is_floating_point]
    return max([*roundings, *(1 / 64 for _ in formats)], default=torch.finfo(torch.float32).eps)


def _programs(case: Case) -> list[Program]:
    programs = [case.programs, *(role.programs for role in case.roles.values())]
    return [program for of_role in programs for program in of_role.values()]


def _dtypes(programs: Iterable[Program]) -> set[torch.dtype]:
    return {value.type.dtype for program in programs for function in program.functions
            for value in function.values().values()}  # fmt: skip


def own_step(case: Case, unbatched: Collection[str], formats: Collection[str] = (), trains: bool = True) -> OwnStep:
    """Simulate one step of all ranks in the programs' own types beside the captured graph in float64. Where rounding
    decides a top-k, other random data are drawn; where a step is not finite, the loss scale is lower."""
    case = replace(case, parameters={name: varied(name, whole) for name, whole in case.parameters.items()})
    steps = list[tuple[bool, OwnStep]]()
    for seed in range(DRAWS):
        step, tied = _own_step(case, unbatched, formats, trains, seed)
        steps.append((tied, step))
        if not tied and step.worst[0] <= 1:
            break
    # where a top-k nearly ties, a run's kernels may choose otherwise: other data that agree are better
    return min(steps, key=lambda drawn: (drawn[1].worst[0] > 1, drawn[0], drawn[1].worst))[1]


def _own_step(
    case: Case, unbatched: Collection[str], formats: Collection[str], trains: bool, seed: int
) -> tuple[OwnStep, bool]:
    rounding, margin = largest_rounding(_programs(case)), Margin()
    coarsest = max(rounding, largest_rounding((), formats))
    is_narrow_step = rounding > torch.finfo(torch.float32).eps
    batches = step_batches(case.reference, case.microbatches, unbatched, seed)
    generator = torch.Generator().manual_seed(seed)
    dims = None if trains else _sample_dims(case.reference, unbatched)
    parameters, exact_batches = _wide(case.parameters), [_wide(batch) for batch in batches]
    exact = _exact(replace(case, parameters=parameters), exact_batches, dims, margin.watch)
    moved_batches = [_perturbed(batch, generator, rounding) for batch in exact_batches]
    moved_case = replace(case, parameters=_perturbed(parameters, generator, rounding))
    moved, on_one = _exact(moved_case, moved_batches, dims), _exact(case, batches, dims, float64=False)
    simulated, state, narrow = _simulated(case, batches, dims)
    step, again = OwnStep(seed, state, narrow=tuple(sorted(narrow))), simulated
    if is_narrow_step:  # what narrow roundings do to each tensor shows only in the programs' own types
        again, _, _ = _simulated(
            replace(_like(moved_case, case), state=state), _as(moved_batches, batches), dims, watched=False
        )
    tied = margin.apart < ROUNDINGS_OF_A_STEP * rounding
    factor = ROUNDINGS_OF_A_NARROW_STEP if is_narrow_step and not tied else ROUNDINGS_OF_A_STEP
    for key, floor in floors(exact).items():
        if not exact[key].is_floating_point() and not _is_steady(rounding, exact[key], moved[key], on_one[key]):
            continue
        wanted, change, noise = exact[key], distance(moved[key], exact[key]), distance(on_one[key], exact[key])
        size, least = distance(wanted, torch.zeros_like(wanted)), floor * math.sqrt(wanted.numel())
        spread = distance(again[key], simulated[key]) if is_narrow_step and key in simulated else change + noise
        bound = factor * (change + noise + spread + coarsest * max(size, least))
        error = distance(simulated[key], wanted) if key in simulated else math.inf
        step.worst = max(step.worst, (part_of_bound(error, bound), str(key)))
        is_finite = key in simulated and bool(simulated[key].isfinite().all())
        if key in simulated and not is_finite and bool(wanted.isfinite().all()):
            step.not_finite = step.not_finite or str(key)
        if is_finite:
            bound = factor * (spread + rounding * (least if is_narrow_step else max(size, least)))
            step.expected[key] = ExpectedTensor(whole_signature(str(key), simulated[key]), bound)
    return step, tied


def _like(moved: Case, case: Case) -> Case:
    """Return a case whose parameters are of the types of another's."""
    return replace(
        moved, parameters={name: value.to(case.parameters[name]) for name, value in moved.parameters.items()}
    )


def _as(batches: Microbatches, typed: Microbatches) -> Microbatches:
    """Return batches in the types of others."""
    pairs = zip(batches, typed, strict=True)
    return [{name: value.to(batch[name]) for name, value in moved.items()} for moved, batch in pairs]


def _is_steady(rounding: float, *whole_numbers: Tensor) -> bool:
    """Return whether whole numbers, as the classes of the largest scores, are those of every kernel: they are alike in
    several runs, and computed from no narrow type, whose roundings decide too many of them."""
    first, *others = whole_numbers
    return rounding <= torch.finfo(torch.float32).eps and all(torch.equal(first, other) for other in others)


def distance(first: Tensor, second: Tensor) -> float:
    """Return the norm of a difference; equal infinities do not differ, nor do two entries that are no numbers."""
    first, second = first.double(), second.double().to(first.device)
    same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(same, 0.0, first - second).norm())


def _wide(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def _perturbed(tensors: Mapping[str, Tensor], generator: torch.Generator, rounding: float) -> dict[str, Tensor]:
    return {name: perturbed(value, generator, rounding) for name, value in tensors.items()}


def floors(exact: Mapping[Binding, Tensor]) -> dict[Binding, float]:
    """Return for each tensor the least size of its entries beside which it may be rounded: a thousandth of the entries
    of the largest tensor of its kind, because a sum whose terms cancel is nothing but roundings."""
    sizes = {key: float(value.double().nan_to_num(0.0, 0.0, 0.0).norm()) / math.sqrt(max(value.numel(), 1))
             for key, value in exact.items()}  # fmt: skip
    largest = dict[str, float]()
    for key, size in sizes.items():
        largest[key.kind] = max(largest.get(key.kind, 0.0), size)
    return {key: 1e-3 * largest[key.kind] for key in exact}


SampleDims = Mapping[str, int] | None
"""The dim of samples of each tensor that a model for inference returns; None for a build that trains."""


def _sample_dims(reference: Program, unbatched: Collection[str]) -> dict[str, int]:
    from ...compiler.verify.padding import sample_dims  # proves in sympy, which a run need not import

    return {name: dim for name, dim in sample_dims(reference, unbatched).items() if dim is not None}


def _results(
    loss: Tensor | None, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor],
    returned: Mapping[str, Sequence[Tensor]], dims: SampleDims,
) -> dict[Binding, Tensor]:  # fmt: skip
    """Return the compared tensors of a step."""
    if dims is not None:
        return {Binding("output", name): bounded(torch.cat([*returned[name]], dim)) for name, dim in dims.items()}
    results = {LOSS: loss} if loss is not None else {}
    results |= {Binding("gradient", name): value for name, value in gradients.items()}
    return results | {Binding("buffer", name): value for name, value in buffers.items() if value.is_floating_point()}


def _exact(
    case: Case, batches: Microbatches, dims: SampleDims, watch: Watch | None = None, float64: bool = True
) -> dict[Binding, Tensor]:
    """Return the step's results by the captured graph, in float64 or in its own types, and in their padded shapes."""
    run = ReferenceRun(case, float64, watch)
    loss, gradients = run.step(batches, 0)
    grown = {name: grow(value, case.pads.get(name, ())) for name, value in gradients.items()}
    changed = {name: run.buffers[name].detach() for name in case.reference.main.returned("buffer")}
    return _results(loss, grown, changed, run.returned, dims)


def _simulated(
    case: Case, batches: Microbatches, dims: SampleDims, watched: bool = True
) -> tuple[dict[Binding, Tensor], dict[str, float], set[str]]:
    """Return the step's results by all ranks in their own types, the first state of steps at which they are finite, or
    the last that a run tries, and the sensitive operators that kernels computed in a narrow type, if they are
    ``watched``."""
    noted, known = set[str](), _narrow_in_text(_programs(case))
    # where the model itself is narrow, its kernels compute as it does
    watched &= any(map(is_narrow, _dtypes(_programs(case)))) and not any(map(is_narrow, _dtypes([case.reference])))

    def gradients(stepper: Stepper, *args: Any) -> list[StepResult]:
        with NarrowWatch(known, noted) if watched else nullcontext():  # a mode is of one thread, as a role
            return stepper.gradients(*args)

    while True:
        simulation = Simulation(case, float64=False)
        steps = simulation.run(gradients, batches, 0)
        pieces = [step.gradients for step in steps]
        if _SCALE not in case.state or all(x.isfinite().all() for of_rank in pieces for x in of_rank.values()):
            break
        if (lower := case.state[_SCALE] * _LOWER) < LEAST:  # no scale helps
            break
        case = replace(case, state={**case.state, _SCALE: lower})
    whole = {
        name: simulation.whole(pieces, name) for name in dict.fromkeys(name for of_rank in pieces for name in of_rank)
    }
    buffers = {name: simulation.whole_buffer(parts, type_) for name, parts, type_ in simulation.buffers()}
    types = {name: type_ for name, (type_, _) in returned_types(simulation.roles).items()} if dims is not None else {}
    shapes = {name: case.reference.main.values()[value].type.shape
              for name, value in case.reference.main.returned("output").items()}  # fmt: skip
    outputs = joined([stacked(step.returned) for step in steps], types, case.mesh)
    returned = {name: [without_padding(one, shapes[name]) for one in value.unbind()] for name, value in outputs.items()}
    return _results(steps[0].loss, whole, buffers, returned, dims), dict(case.state), noted
