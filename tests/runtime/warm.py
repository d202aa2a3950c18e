"""The state from which ranks are forked: modules are there, and all that parc and torch set up at their first use.

Modules that many ranks and tests would import each for itself are imported here. The tests' process then makes, trains,
saves and restores a tiny build: what torch sets up once in a process would be a quarter of the time in which a rank
opens a build.
"""

import tempfile
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401
from tqdm import tqdm  # type: ignore[import-untyped]

import parc
import parc.checking.checks
import parc.cli.run
import parc.passes.pipeline
import parc.runtime.compare.plain
import parc.runtime.launch.failures
import parc.runtime.launch.train
from parc.runtime.ranks.processes import DEVICE
from tests.runtime import tiny


@cache
def warm_up() -> None:
    """Be ready to fork ranks, once."""
    threads, native = threading.active_count(), torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has none of the threads of the pool
    tqdm.get_lock()  # torch's compiler asks for it, and a rank that ends at once would leave a semaphore
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEVICE, "cpu")  # a forked process cannot use a GPU that this one has used
        plan = tiny.FLAT.replace("width=16", "width=4")
        with parc.load(tiny.build(Path(folder), tiny.EVAL, plan)) as session:
            session.step(tiny.batch(0))
            session.evaluate(tiny.batch(0))
            session.save(Path(folder) / "checkpoint")
            session.restore(Path(folder) / "checkpoint")
    torch.set_num_threads(native)
    assert threading.active_count() == threads  # a forked process would lack them too
