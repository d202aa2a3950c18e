"""Root pytest settings: collect each file once, under its import name; one thread a worker; hypothesis profiles."""

import gc
import importlib
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

collect_ignore = [
    "compiler",
    "grammar",
    "passes",
    "runtime",
    "parc/examples",
]  # the four are reached as parc/compiler, …

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import parc: each would compile it anew
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # with `_without_probes`
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or to ask for GPUs keeps forked processes from using one
os.environ["PARC_CACHE"] = ""  # tests compile: what the user has is neither read nor written
os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share few cores: one thread each is faster, and repeatable

gc.set_threshold(5_000_000, 10, 10)  # half a gigabyte: a tenth of the time went into looking at torch's own objects

SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("check", deadline=None, max_examples=25, derandomize=True, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("fuzz", deadline=None, max_examples=1600, print_blob=True, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("soak", settings.get_profile("fuzz"), max_examples=160)  # short runs, seed after seed
settings.load_profile("check")


@pytest.fixture(autouse=True, scope="session")
def one_capture() -> Iterator[None]:
    """Capture a model once for the many plans that are compiled of it."""
    from tests.captured_once import captured_once

    with captured_once():
        yield


def _without_probes() -> None:
    """Let torch's compiler choose among the instruction sets that it does not try with the C++ compiler first: this
    takes seconds in each cache folder."""
    sets: Any = importlib.import_module("torch._inductor.cpu_vec_isa")
    known = getattr(sets, "supported_vec_isa_list", [])
    sets.supported_vec_isa_list = [one for one in known if type(one).__bool__ is sets.VecISA.__bool__]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where files were collected that need ranks, start their server, a fork of this process, while no test has changed
    a thing. Then freeze the objects that exist before the first test, so that garbage collections skip them; and run a
    first example: hypothesis looks for garbage at its first one, and finds few objects now."""
    ranks = None if session.config.option.collectonly else sys.modules.get("tests.runtime.ranks")
    if ranks:
        _without_probes()
        try:
            ranks.start_server()
        except Exception:  # tests that need ranks start it again, and fail; others run
            traceback.print_exc()
    gc.freeze()
    given(strategies.none())(lambda _: None)()


def pytest_sessionfinish() -> None:
    """Look for garbage among what is newest, and freeze all: pytest would look at millions of objects five times."""
    gc.collect(0)
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many random models and plans all workers tried together."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ()
            counts.update({name: number for name, number in properties if name in ("models", "simulated", "refused")})
    if counts:
        tried = counts["simulated"] + counts["refused"]
        terminalreporter.write_line(
            f"{counts['models']:,} random models under {tried:,} random plans: {counts['simulated']:,} simulated and "
            f"equal to the unsharded model, {counts['refused']:,} refused by a message"
        )
