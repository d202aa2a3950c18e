"""Backends: each gives the plain results of every collective, message and hop. That of the simulator also shows what is
read before it is awaited, and what is written over before it was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product

import pytest
import torch

from parc.compiler.layout.collectives import COLLECTIVES, RINGS, SUMS
from parc.compiler.layout.mesh import Mesh
from parc.runtime.backends.distributed import Distributed
from parc.runtime.backends.in_process import InProcess, Meeting
from parc.runtime.ranks.communication import Message, RingPart
from tests.runtime import conformance
from tests.runtime.conformance import MESHES, WRONG, awaited, wrong_stages
from tests.runtime.ranks import run_ranks

CPU = torch.device("cpu")
STAGES = {Mesh((("pp", 4),)): (0, 1, 2, 3), Mesh((("pp", 2), ("dp", 2))): (0, 1, 1, 0, 1)}
"""Meshes with a pipeline's axis, and the role of each stage: the second one's roles have several."""
FORMS = ("gloo", "NCCL's forms on gloo")


RUNS: dict[str, Callable[..., Iterator[str]]] = {
    **WRONG,
    "calls": partial(conformance.wrong_calls, only="parc.reduce_scatter"),
}
"""The runs of NCCL's forms, where one blocking call differs."""


class AsOnGpus(Distributed):
    """The backend of a run with NCCL's collectives and groups, which gloo has, too."""

    native_reduce_scatter = ordered_messages = True


def wrong_on_gloo() -> dict[tuple[str, str], list[str]]:
    """Return what is wrong on one of 4 ranks of gloo, by the form and the name of what conforms."""
    rank = torch.distributed.get_rank()
    wrong: dict[tuple[str, str], list[str]] = {}
    for form, kind in zip(FORMS, (Distributed, AsOnGpus), strict=True):
        for mesh in MESHES:
            backend = kind(mesh, [conformance.program(mesh)], rank, CPU)
            for name, run in (WRONG if kind is Distributed else RUNS).items():
                wrong.setdefault((form, name), []).extend(filter(None, run(backend, mesh, CPU)))
        for mesh, stages in STAGES.items():
            backend = kind(mesh, [], rank, CPU, "pp", stages)
            at = mesh.coordinates(rank)
            wrong.setdefault((form, "stages"), []).extend(wrong_stages(backend, at["pp"], stages, [at.get("dp", 0)]))
    return wrong


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[tuple[str, str], list[str]]]:
    """Run all that conforms on gloo, once for all tests."""
    return run_ranks(wrong_on_gloo, 4)


@pytest.mark.parametrize("name", [*WRONG, "stages"])
@pytest.mark.parametrize("form", FORMS)
def test_real_ranks_give_the_plain_results(
    of_ranks: list[dict[tuple[str, str], list[str]]], form: str, name: str
) -> None:
    for rank, wrong in enumerate(of_ranks):
        assert not wrong[form, name], (rank, wrong[form, name][:5])


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_simulator_gives_the_plain_results(mesh: Mesh, name: str) -> None:
    assert not (wrong := [*filter(None, WRONG[name](InProcess(mesh), mesh, CPU))]), wrong[:5]


@pytest.mark.parametrize("mesh", STAGES, ids=str)
def test_the_simulator_brings_messages_to_their_stages(mesh: Mesh) -> None:
    meeting, stages = Meeting(), STAGES[mesh]
    roles = [InProcess(mesh, role, "pp", meeting) for role in range(mesh.size("pp"))]
    lanes = range(mesh.world // len(roles))
    jobs = [partial(wrong_stages, backend, role, stages, lanes) for role, backend in enumerate(roles)]
    assert meeting.run(jobs) == [[]] * len(roles)


def test_every_collective_has_its_calls() -> None:
    assert {call.op for call in conformance.calls(MESHES[0])} | {*RINGS} == set(COLLECTIVES)


# ---- values in flight


LATE = [conformance.Call("parc.row_max", ("dp",)), *chain(*conformance.messages(MESHES[0]))]
"""Collectives whose results may arrive late."""


def test_a_result_is_wrong_until_it_is_awaited() -> None:
    backend, mesh = InProcess(MESHES[0]), MESHES[0]
    for call, spare in product(LATE, (False, True)):
        pieces = [call.operand(mesh, rank) for rank in backend.ranks]
        results, arrival = backend.collective(call.op, call.args, pieces, spare)
        early = [result.clone() for result in results]
        awaited(arrival)
        for before, after in zip(early, results, strict=True):
            unread = before.isnan() if before.is_floating_point() else before != after
            assert unread.all() and not after.isnan().any(), call


def test_what_is_written_over_before_it_was_sent_arrives_as_it_was_written() -> None:
    backend, mesh = InProcess(MESHES[0]), MESHES[0]
    for call in (call for call in LATE if call.op not in SUMS):
        pieces = [call.operand(mesh, rank) for rank in backend.ranks]
        (results,), arrival = backend.message(call.op, [call.args], [pieces])
        for piece in pieces:
            (piece[0] if isinstance(piece, tuple) else piece).zero_()
        awaited(arrival)
        assert not any(result.any() for result in results), call


def test_an_awaited_result_may_be_written_over() -> None:
    backend, mesh = InProcess(MESHES[0]), MESHES[0]
    call = conformance.Call("parc.all_gather", ("dp", 0, 1))
    pieces = [call.operand(mesh, rank) for rank in backend.ranks]
    (results,), arrival = backend.message(call.op, [call.args], [pieces])
    arrival()
    results[0].zero_()
    arrival()  # of another value of the message
    assert not results[0].any() and results[1].any()


@pytest.mark.parametrize("awaits", [False, True])
def test_a_sender_may_write_over_a_message_once_it_was_taken(awaits: bool) -> None:
    meeting, message = Meeting(), Message("pp", 0, "F", 0)
    roles = [InProcess(Mesh((("pp", 2),)), role, "pp", meeting) for role in range(2)]

    def send() -> torch.Tensor:
        tensor = torch.ones(3)
        sending = roles[0].send(message, [[tensor]])
        if awaits:
            sending.wait()
            assert sending.done()
        return tensor.zero_()

    def take() -> torch.Tensor:
        ((tensor,),) = roles[1].receive(message, [((3,), torch.float32)])()
        return tensor

    assert meeting.run([send, take])[1].tolist() == [float(awaits)] * 3


@pytest.mark.parametrize("awaits", [False, True])
def test_a_part_of_a_ring_may_write_over_a_hop_once_it_has_waited(awaits: bool) -> None:
    def part(rank: int) -> RingPart:
        own = torch.full((2,), rank + 1.0)
        arrival = yield [own]
        if not awaits:
            own.zero_()
        (other,) = arrival()
        return [other.clone(), own.zero_()]

    mesh = MESHES[0]
    arrived = [result[0][0].item() for result in InProcess(mesh).run_ring("ring", ("dp",), [*map(part, range(4))])]
    assert arrived[1:] == ([1, 2, 3] if awaits else [0, 0, 0])
