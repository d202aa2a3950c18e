"""The state from which ranks are forked: modules, the parser and what torch sets up at its first graph are there.

What many ranks would import each for itself stands here too: pytest and hypothesis, for the file of the function that
they run, and the families of models that most files build.
"""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import parc.checking.checks
import parc.cli.run
import parc.passes.pipeline
import parc.runtime.compare.plain
import parc.runtime.launch.hanging
import parc.runtime.launch.train  # noqa: F401
from parc.compiler.torch_private import shape_environment
from parc.grammar.parse import parse
from parc.grammar.source import Source

parse(Source("warm.parc", "mesh dp=2\n"))
shape_environment()
gc.set_threshold(200_000, 20, 100)  # as in the tests themselves
gc.freeze()
