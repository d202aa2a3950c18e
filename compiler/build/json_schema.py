"""The forms of a build's JSON files, checked once, when these are read: other code may rely on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...grammar.nearest import listed
from ..program.actions import PHASES


class FormError(Exception):
    """The error of a value in a file that is missing or of another kind; the message names the value."""


@dataclass(frozen=True, slots=True)
class Each:
    """The form of a table with any names, all of whose values have one form."""

    form: Any


@dataclass(frozen=True, slots=True)
class FieldRow:
    """The form of a list with a given number of values of one form."""

    form: Any
    count: int


@dataclass(frozen=True, slots=True)
class Maybe:
    """The form of a value that may be null."""

    form: Any


@dataclass(frozen=True, slots=True)
class Among:
    """The form of a value that is one of some words."""

    words: tuple[str, ...]


Form = Any
"""A type or types; ``[form]`` for a list; ``{key: form}`` for a table with these keys at least, those that end in ``?``
aside; ``Each``, ``FieldRow``, ``Maybe`` or ``Among``."""

_NULL = type(None)
_FLOAT = (int, float)
_LITERALS = Each((str, int, float, bool, list, _NULL))

_VIEWS = [{"over": [str], "axes": [str], "sizes": [int], "in": [str]}]

SAMPLES_FORM: Form = {
    "form": str, "names": [str], "callable": (str, _NULL), "arguments": _LITERALS, "dtype?": str, "shuffle?": bool,
    "split?": _FLOAT, "workers?": int, "pack?": bool, "end?": int,
}  # fmt: skip

_DIVISIONS = [{"by": Among(("count", "sum", "mean")), "least": (int, float, _NULL), "plus": _FLOAT}]
_CONSTANTS = Each({"dtype": str, "values": (int, float, bool, list)})
MANIFEST_FORM: Form = {
    "parc": str,
    "torch": str,
    "folder": str,
    "model": {"callable": str, "arguments": _LITERALS},
    "model_source": Each(str),
    "model_lines": Each(str),
    "inputs": [{"name": str, "as?": str, "dtype": str, "dims": [(str, int)]}],
    "sizes": Each(int),
    "ranges?": Each(FieldRow(int, 3)),
    "budget?": int,
    "offload?": Each((str, _NULL)),
    "loss": [{"kind": str, "target": str, "operands": [str], "ignore": (int, _NULL), "factor": _FLOAT,
              "divisor": (int, float, str, _NULL)}],
    "divisions": _DIVISIONS,
    "mesh": Each(int),
    "views?": _VIEWS,
    "microbatches": int,
    "optimizer": {
        "name": str, "shape": str, "lr": _FLOAT, "warmup": int, "to": (int, float, _NULL), "over": (int, _NULL),
        "groups": [{"parameters": [str], "set": _LITERALS}], "weight_decay": _FLOAT,
        "clip": (int, float, _NULL), "eps": _FLOAT,
        "betas": FieldRow(_FLOAT, 2), "momentum": _FLOAT, "nesterov": bool, "arguments?": _LITERALS, "fall?": int,
        "table?": [FieldRow(_FLOAT, 2)], "ema?": {"decay": _FLOAT, "every": int}, "previous?": bool,
        "limits?": Each(FieldRow((int, float, _NULL), 2)),
    },
    "frozen": [str],
    "accumulate": str,
    "precision": [{"type": str, "modules": [str], "line": int}],
    "compress": [{"axis": str, "format": str, "over?": [str]}],
    "data": Maybe(SAMPLES_FORM),
    "init": Maybe({"folder": str, "rounded": bool, "tensors": [{
        "names": [str], "shape": [int], "dtype": str, "optional?": bool
    }]}),
    "model_files?": str,
    "asked?": Each(str),
    "exported?": {"more?": [str], "without?": [str], "complex?": [str], "configs": Maybe(Each(dict))},
    "seed": int,
    "state": Each(_FLOAT),
    "experts?": Each({
        "experts": int, "top": int, "ranks": int, "load": _FLOAT, "capacity": (int, float, _NULL),
        "buffer": (str, _NULL), "rate": _FLOAT
    }),
    "steps": (int, _NULL),
    "replicas?": int,
    "aliases": Each(str),
    "parameters": Each(str),
    "padding": Each([FieldRow(int, 4)]),
    "updates": [str],
    "operators?": Each({
        "rule": str, "linear": str, "gradient": str, "number": (int, float, _NULL), "arguments": [str],
        "defaults": _LITERALS,
    }),
    "constants": _CONSTANTS,
    "evaluation?": {
        "every": (int, _NULL), "batches": (int, _NULL), "data": Maybe(SAMPLES_FORM), "constants": _CONSTANTS,
        "divisions": _DIVISIONS,
    },
    "role": str,
    "files": Each(str),
}  # fmt: skip

REPORT_FORM: Form = {
    "mesh": Each(int),
    "views?": _VIEWS,
    "world": int,
    "purpose": str,
    "sizes": Each(str),
    "batch": Maybe({"samples": int, "microbatches": int, "data_ranks": int}),
    "roles": [str],
    "stages": [{"stage": int, "role": str, "layers": int, "parameters": int, "flops": int}],
    "idle": Each(_FLOAT),
    "parameters": int,
    "memory": [{
        "role": str, "peak_bytes": _FLOAT, "parameters": _FLOAT, "gradients": _FLOAT, "optimizer": _FLOAT,
        "activations": _FLOAT, "messages": _FLOAT, "residuals": _FLOAT, "offloaded": Each(int), "state": Each(int),
        "of": int, "peak_by_library?": Each(int), "most": Each(_FLOAT), "moment": {"action": str, "module": str},
    }],
    "communication": [{
        "number": int, "op": str, "axis": str, "phase": Among(PHASES), "count_per_step": int, "bytes": int,
        "wire_bytes": int, "message": int, "ranks": int, "carries": str, "hidden": bool, "dtype": str, "module": str,
        "line": (int, _NULL), "role": str,
    }],
    "budget?": int,
    "experts?": [{
        "modules": str, "layers": int, "experts": int, "top": int, "ranks": int, "load": _FLOAT, "rate": _FLOAT,
        "capacity": (int, float, _NULL)
    }],
    "experts_peak_bytes?": _FLOAT,
    "written": [{"line": int, "place": str}],
    "placed?": Each(str),
    "pipeline": {"schedule": str, "stages": int, "chunks?": int, "microbatches": int, "axis?": str},
    "padding": [{"value": str, "dim": int, "from": int, "to": int, "line": int}],
    "stored_whole": Each(int),
    "reshards": [{
        "value": str, "from": str, "to": str, "axis": str, "bytes": int, "module": str, "source": str, "line": int
    }],
    "operators_without_rule": list,
    "numerics": [{"class": str, "directive": str, "line": int, "saved_bytes?": int}],
    "sent_whole": Each(int),
    "recompute?": {"line": int, "fit": int, "roles": [{
        "role": str, "kept": int, "selective": int, "full": int, "again": _FLOAT, "next_peak_bytes": (int, _NULL)
    }]},
    "across_nodes?": {"bytes": int, "in_one_level": int, "node": int, "axes": [{
        "axis": str, "ranks": int, "nodes": int, "bytes": int, "hidden_bytes": int, "algorithms": [str]
    }]},
    "checks": Each(str),
    "certificate?": {"version": str, "proved": [str], "missing": str},
    "numbers?": {
        "on": str, "steps": int, "loss": _FLOAT, "gradient": _FLOAT, "parameter": _FLOAT, "tolerance": _FLOAT,
        "eager_loss": _FLOAT, "eager_gradient": _FLOAT, "eager_buffer": _FLOAT,
        "module?": {"compared": str, "notes": [str]}, "margin?": {"apart": _FLOAT, "at": str},
    },
}  # fmt: skip

FIRST_CHECK_FORM: Form = {
    "on": str, "seed": int, "state": Each(_FLOAT), "facts": dict, "lacking": [str], "own": bool,
    "expected": Each(FieldRow(_FLOAT, 3)),
}  # fmt: skip


def hold_form(value: Any, form: Form, name: str = "") -> None:
    """Check that a value read from JSON has a form.

    Raises:
        FormError: it has not; the first place that differs is named.

    >>> try:
    ...     hold_form({"mesh": {"dp": "2"}}, {"mesh": Each(int)})
    ... except FormError as error:
    ...     print(error)
    `mesh.dp` is str, not int
    """
    if isinstance(form, Maybe):
        if value is not None:
            hold_form(value, form.form, name)
    elif isinstance(form, Among):
        _hold_type(value, str, name)
        if value not in form.words:
            raise FormError(f"`{name}` is none of {listed(form.words)}")
    elif isinstance(form, FieldRow):
        hold_form(value, [form.form], name)
        if len(value) != form.count:
            raise FormError(f"`{name}` is a list of {len(value)}, not of {form.count}")
    elif isinstance(form, Each):
        _hold_type(value, dict, name)
        for key, inner in value.items():
            hold_form(inner, form.form, _key_path(name, key))
    elif isinstance(form, Mapping):
        _hold_type(value, dict, name)
        for key, inner in form.items():
            if (key := key.removesuffix("?")) in value:
                hold_form(value[key], inner, _key_path(name, key))
            elif f"{key}?" not in form:
                raise FormError(f"it has no `{_key_path(name, key)}`")
    elif isinstance(form, list):
        _hold_type(value, list, name)
        for index, inner in enumerate(value):
            hold_form(inner, form[0], f"{name}[{index}]")
    else:
        _hold_type(value, form, name)


def _key_path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _hold_type(value: Any, types: Any, name: str) -> None:
    wanted = types if isinstance(types, tuple) else (types,)
    # A bool is an int to Python, not to a reader of a manifest.
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        words = " or ".join("null" if kind is _NULL else kind.__name__ for kind in wanted)
        have = "null" if value is None else type(value).__name__
        raise FormError(f"{f'`{name}`' if name else 'it'} is {have}, not {words}")
