"""The first check of a run: one step of the build's small programs over the run's own backend, by its own kernels and
options, beside the result that the build expects.

It comes before any state of the run is made, and leaves none. Gradients, the loss and buffers are compared with what
was simulated when the plan was built; updates and averages with the optimizer's formula on the run's own gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...compiler.build.build import Build, BuildError
from ...compiler.build.first_check import FirstCheck, read_first_check
from ...compiler.layout.placement import TensorType
from ...compiler.program.binding import LOSS, Binding, Kind
from ...compiler.program.optimizers import AVERAGE
from ...grammar.codes import BAD_BUILD, FIRST_CHECK_DIFFERS
from ..ranks.faults import RunError
from ..ranks.gather import everywhere, piece_place
from ..ranks.lockstep import ranks_text
from ..ranks.processes import first_ranks, place
from ..ranks.wire import sendable
from ..session.session import Session
from ..state.opening import check_fits, check_source_of, constants_of
from .formula import FormulaUpdates
from .own_types import (
    Signature,
    bounded,
    distance,
    expected_tensor,
    part_of_bound,
    piece_signature,
    varied,
    whole_batch,
    whole_signature,
)

_UPDATE_TOLERANCE, _ROUNDINGS_OF_AN_UPDATE = 1e-4, 16
"""The largest error of an update beside its formula in float64, relative to its size; and the number of roundings to
the type of a parameter that explain a larger one: a model's own parameters may be bfloat16."""


sendable(Binding)
sendable(Signature)


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a first check on all ranks: how many tensors were compared, on which programs, by how many ranks,
    and the largest error as a part of its bound."""

    on: str
    tensors: int
    ranks: int
    largest: float
    at: str
    """The tensor with the largest error beside its bound."""
    seconds: float

    def text(self) -> str:
        """Return the line about it that a run shows."""
        ranks = f" by {ranks_text(range(self.ranks))}" if self.ranks > 1 else ""
        tensors = f"{self.tensors} tensor{'s' * (self.tensors != 1)} of a step as simulated"
        return f"first check: {tensors}, on {self.on}{ranks} ({self.seconds:.1f} s)"

    def facts(self) -> dict[str, Any]:
        """Return it for the first line of a metrics file."""
        return {**asdict(self), "largest": round(self.largest, 4), "seconds": round(self.seconds, 3)}


@dataclass(slots=True)
class _Difference:
    """The tensor that differs most from what was expected: its error as a multiple of its bound, and where it is."""

    times: float = 0.0
    what: str = ""

    def note(self, times: float, what: str) -> None:
        times = times if times == times else math.inf
        if times > self.times:
            self.times, self.what = times, what


def first_check(
    build: Build, device: torch.device | str | None = None, *, compile: bool = False
) -> CheckOutcome | None:
    """Run a build's first check, on as many ranks as its small programs have. Return None for a build without one.
    Collective: every rank calls it.

    Raises:
        RunError: on every rank: the build does not fit the ranks, or a tensor differs by more than roundings explain.
    """
    check_fits(build, place()[1])  # or the small programs would not, whose mesh nobody knows
    try:
        check = read_first_check(build)
    except BuildError as error:
        raise RunError(BAD_BUILD, str(error), error.help) from None
    if check is None:
        return None
    check_source_of(build)  # nothing else is imported
    start, ranks = time.perf_counter(), check.build.roles[next(iter(check.build.roles))].programs
    count = next(iter(ranks.values())).mesh.world
    with first_ranks(count) as taking_part:
        worst = _compared(check, device, compile) if taking_part else _Difference()
        again = _compared(check, device, compile) if taking_part and worst.times > 1 else worst
    outcomes = everywhere((worst.times, worst.what, again.times, again.what), place()[1])
    times, what, times_again, what_again = max(outcomes)
    if times > 1:
        raise _differs(build, times, what, times_again, what_again)
    return CheckOutcome(check.on, len(check.expected), count, times, what, time.perf_counter() - start)


def _differs(build: Build, times: float, what: str, again: float, what_again: str) -> RunError:
    by = (
        "is not the one that was simulated"
        if math.isinf(times)
        else f"differs by {times:.3g} times what roundings explain"
    )
    message = f"the first check of `{build.path}` failed: the {what} {by}"
    notes = ["a second try differed in the same way"] if (again, what_again) == (times, what) else []
    if not notes:
        second = f"the {what_again} differed by {again:.3g} times it" if again > 1 else "nothing differed"
        notes = [f"in a second try {second}: a kernel of this device may not give the same result twice"]
    way = "`--no-first-check`, or `check=False`, runs all the same"
    help_ = f"`parc verify --run {build.path}` looks for the line that differs; {way}"
    return RunError(FIRST_CHECK_DIFFERS, message, help_, notes)


def _compared(check: FirstCheck, device: torch.device | str | None, compile: bool) -> _Difference:
    """Run the step, and return its largest difference, the same on all ranks that take part."""
    build, worst = check.build, _Difference()
    batch = whole_batch(build, check.seed)
    with Session(build, device, check_source=False, compile=compile) as session:
        if wrong := session.start_from(varied):
            worst.note(math.inf, f"initial value of {wrong} on rank {session.rank}")
        if not build.trains:
            outputs = {Binding("output", name): value for name, value in session.predict(batch).items()}
            for key in check.expected:
                _note(worst, check, key, whole_signature(str(key), bounded(outputs[key])))
        else:
            session.state.steps.update({name: torch.full_like(session.state.steps[name], number)
                                        for name, number in check.state.items()})  # fmt: skip
            _compare_step(check, session, batch, worst)
    differences = everywhere((worst.times, worst.what), session.world)
    return _Difference(*max(differences))


def _note(worst: _Difference, check: FirstCheck, key: Binding, signature: Signature) -> None:
    expected = expected_tensor(check, key)
    worst.note(part_of_bound(expected.signature.apart(signature), expected.bound), str(key))


def _compare_step(check: FirstCheck, session: Session, batch: Mapping[str, Tensor], worst: _Difference) -> None:
    build = check.build
    result = session.gradients(batch)
    gradients = {name: value.clone() for name, value in result.gradients.items()}
    _note(worst, check, LOSS, whole_signature(str(LOSS), result.loss))
    whole = _signatures(check, session, "gradient", gradients, session.types, worst)
    if result.grad_norm is not None and gradients:
        norm = math.sqrt(sum(of.squares for of in whole.values()))
        bound = sum(expected_tensor(check, key).bound for key in whole) or 1e-30
        worst.note(abs(float(result.grad_norm) - norm) / (bound + 1e-5 * norm), "norm of the gradients")
    formula, line = FormulaUpdates(build.manifest["optimizer"]), build.manifest["optimizer"]
    every = line.get(AVERAGE, {}).get("every", 2)
    for step in (1, max(every, 2)):
        session.step_number = step - 1
        held = {name: value.clone() for name, value in session.state.parameters.items()}
        again = {name: value.clone() for name, value in gradients.items()}
        session.update(replace(result, gradients=again, taken=False, weights=session.weights_mark))
        _compare_updates(session, formula, held, gradients, float(result.grad_norm or 0.0), step, worst)
    _signatures(check, session, "buffer", session.state.buffers, constants_of(build), worst)


def _signatures(
    check: FirstCheck, session: Session, kind: Kind, pieces: Mapping[str, Tensor], types: Mapping[str, TensorType],
    worst: _Difference,
) -> dict[Binding, Signature]:  # fmt: skip
    """Compare tensors of a kind by the pieces of all ranks with what is expected, and replicas with each other. Return
    the signatures of the whole tensors."""
    wanted, parts = [key for key in check.expected if key.kind == kind], {}
    for key in wanted:
        if key.name in pieces:
            type_, piece = types[key.name], pieces[key.name]
            signature = piece_signature(str(key), piece, type_, session.mesh, session.coordinates)
            parts[key] = piece_place(session.rank, type_.placement, session.mesh), signature
    ranks = everywhere(parts, session.world)
    whole = {}
    for key in wanted:
        places: dict[Any, tuple[int, Signature]] = {}
        bound = expected_tensor(check, key).bound
        for rank, of_rank in enumerate(ranks):
            if key in of_rank:
                at, signature = of_rank[key]
                first, known = places.setdefault(at, (rank, signature))
                where = f"{key} on {ranks_text([first, rank])}, which hold the same piece,"
                worst.note(part_of_bound(known.apart(signature), bound), where)
        whole[key] = sum((signature for _, signature in places.values()), Signature())
        _note(worst, check, key, whole[key])
    return whole


def _compare_updates(
    session: Session, formula: FormulaUpdates, before: Mapping[str, Tensor], gradients: Mapping[str, Tensor],
    norm: float, step: int, worst: _Difference,
) -> None:  # fmt: skip
    """Compare this rank's updated pieces and their optimizer's state with the formula's."""
    for name, old in before.items():
        value = session.state.parameters[name]
        if name not in gradients:
            worst.note(0.0 if torch.equal(value, old) else math.inf, f"parameter {name}, which is not trained,")
            continue
        wide, gradient = old.double(), gradients[name].to(old.device).double()
        expected, slots = formula.after(name, name, wide, gradient, norm, step)
        sizes = max(float(wide.norm()), float(expected.norm()))
        bound = _update_bound(old, expected - wide) + 8 * torch.finfo(old.dtype).eps * sizes
        apart = distance(value, expected)
        worst.note(apart / bound if apart else 0.0, f"update {step} of {name} on rank {session.rank}")
        kept = {slot: session.optimizer.state[value].get(slot) for slot in slots}
        for slot, wanted in slots.items():
            have = kept[slot]
            apart = math.inf if have is None else distance(have, wanted)
            times = apart / _update_bound(wanted if have is None else have, wanted) if apart else 0.0
            worst.note(times, f"{slot} of {name} after update {step} on rank {session.rank}")
        formula.go_on_from(name, {slot: have.clone() for slot, have in kept.items() if have is not None})


def _update_bound(kept: Tensor, wanted: Tensor) -> float:
    """Return the largest error of what an update makes, in the type of the tensor ``kept``: relative to the size of
    what is ``wanted``, and the least numbers of the type."""
    form = torch.finfo(kept.dtype)
    relative = max(_UPDATE_TOLERANCE, _ROUNDINGS_OF_AN_UPDATE * form.eps)
    return relative * float(wanted.norm()) + max(form.smallest_normal * form.eps * math.sqrt(wanted.numel()), 1e-30)
