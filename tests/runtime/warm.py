"""The state from which ranks are forked: modules are there, and all that parc and torch set up at their first use.

What many ranks would import each for itself stands here too: pytest and hypothesis, for the file of the function that
they run, and the families of models that most files build. A tiny build is made, trained, saved and restored: what
torch sets up once in a process would be a quarter of the time in which a rank opens a build.
"""

import gc
import tempfile
import threading
from pathlib import Path

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import parc
import parc.checking.checks
import parc.cli.run
import parc.passes.pipeline
import parc.runtime.compare.plain
import parc.runtime.launch.hanging
import parc.runtime.launch.train
from tests.runtime import tiny

torch.set_num_threads(1)  # a forked process has none of the threads of the pool
with tempfile.TemporaryDirectory() as folder:
    plan = tiny.FLAT.replace("width=16", "width=4")
    with parc.load(tiny.build(Path(folder), tiny.EVAL, plan)) as session:
        session.step(tiny.batch(0))
        session.evaluate(tiny.batch(0))
        session.save(Path(folder) / "checkpoint")
        session.restore(Path(folder) / "checkpoint")
assert threading.active_count() == 1  # and none of any others
gc.collect()
gc.set_threshold(200_000, 20, 100)  # as in the tests themselves
gc.freeze()
