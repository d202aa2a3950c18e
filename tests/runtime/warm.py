"""The state from which ranks are forked: modules, the parser and what torch sets up at its first graph are there."""

import gc

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
gc.freeze()
