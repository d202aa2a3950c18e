"""Codes of messages about pipelines: stages, their cuts and their schedule (P0115 to P0119, P024x)."""

from __future__ import annotations

from .code import Code, shown

STAGE_AXIS = Code(
    name="P0115",
    title="the axis of stages is used for something else",
    why="the ranks along this axis hold the stages of a pipeline, one after the other. No line can split "
    "anything else over it.",
    example="mesh pp=2\nstage before blocks.1 over pp\nschedule gpipe microbatches 2\ncolumn blocks.*.mlp.up over pp",
    instead="mesh pp=2, tp=2\nstage before blocks.1 over pp\nschedule gpipe microbatches 2\ncolumn blocks.*.mlp.up over"
    " tp",
)
NO_SCHEDULE = Code(
    name="P0116",
    title="stages without a schedule, or a schedule without stages",
    why="the name of a schedule says in which order stages run the microbatches: `gpipe`, `1f1b`, `interleaved`, or"
    " `table` with a file. Without stages there is only one order.",
    example="mesh pp=2\nstage before blocks.1 over pp\nschedule microbatches 2",
    instead="mesh pp=2\nstage before blocks.1 over pp\nschedule 1f1b microbatches 2",
)
SCHEDULE_MISFIT = Code(
    name="P0117",
    title="a schedule does not fit",
    why="each schedule is made for certain numbers of stages, microbatches and chunks: `gpipe` and `1f1b` have one"
    " stage a rank, `interleaved` has several, `looped` any number. `1f1b` wants at least as many microbatches as"
    " ranks, `interleaved` a multiple of the ranks; `gpipe` and `looped` take any number.",
    example="mesh pp=2\nstage balanced over pp\nschedule 1f1b microbatches 4 chunks 2",
    instead="mesh pp=2\nstage balanced over pp\nschedule interleaved microbatches 4 chunks 2",
)
STAGE_COUNT = Code(
    name="P0118",
    title="the cuts do not make the right number of stages",
    why="every rank along the axis has one stage, or as many as `chunks` says; n stages need n - 1 cuts.",
    example="mesh pp=2\nstage before blocks.0, blocks.1 over pp\nschedule gpipe microbatches 2",
    instead="mesh pp=2\nstage before blocks.1 over pp\nschedule gpipe microbatches 2",
)
EMPTY_STAGE = shown(
    name="P0240",
    title="a stage with no work",
    why="each stage must compute something with the model's weights, or with values that were computed from "
    "them; the loss alone is enough.",
    example="stage before embed over pp",
    instead="stage after out(embed) over pp",
)
TOO_MANY_STAGES = shown(
    name="P0241",
    title="more stages than the model has places to cut",
    why="`stage balanced` cuts where layers and other modules with weights begin and end, and every stage has work.",
    example="mesh pp=64\nstage balanced over pp   # a model of two layers",
    instead="mesh pp=2\nstage balanced over pp",
)
STATE_CYCLE = shown(
    name="P0242",
    title="a cut inside a cycle of state",
    why="a buffer that the forward updates, such as a running mean, must be read and written by one stage: "
    "each microbatch begins with the buffer that the one before it left, and stages work on several "
    "microbatches at once.",
    example="stage before up over pp   # `norm` runs both before and after it",
    instead="stage before head over pp",
)
BACKWARD_FLOW = shown(
    name="P0243",
    title="a value that flows backwards across a cut",
    why="a stage can read only values of earlier stages, so cuts are written in the order in which the model runs.",
    example="stage before blocks.3, blocks.1 over pp",
    instead="stage before blocks.1, blocks.3 over pp",
)
NO_PLACE = shown(
    name="P0244",
    title="no place to cut at a module",
    why="a cut lies before a module's first operator or after its last one. This module runs no operator.",
    example="stage before blocks.1.drop over pp   # with a dropout of 0",
    instead="stage before blocks.1.mlp over pp",
)
