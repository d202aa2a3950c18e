"""Values on the wire: what ranks tell each other comes back as it was, and nothing else is made of what comes."""

from __future__ import annotations

import ast
import math
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parc.compiler.program.binding import Binding
from parc.grammar.codes import BAD_NUMBER
from parc.runtime.compare import first_check
from parc.runtime.compare.own_types import Signature
from parc.runtime.ranks import lockstep
from parc.runtime.ranks.faults import RunError
from parc.runtime.ranks.wire import ForeignMessage, from_bytes, to_bytes
from tests.test_house import nodes, python_files, shown

SENDERS = (first_check, lockstep)
"""Modules that let signatures, bindings and errors be sent."""
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = PLAIN | st.tuples(PLAIN, PLAIN) | st.builds(Binding, st.just("parameter"), st.text())
VALUES = st.recursive(
    KEYS | st.sampled_from([torch.bfloat16, torch.int64]) | st.builds(Signature, st.floats(allow_nan=False)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: object) -> None:
    back = from_bytes(to_bytes(value))
    assert back == value and repr(back) == repr(value)


def test_numbers_of_tensors_and_errors_come_back_bit_by_bit() -> None:
    for tensor in (torch.tensor(math.nan), torch.tensor([[1.5, -0.0]], dtype=torch.bfloat16), torch.empty(0, 3)):
        back = from_bytes(to_bytes({"step": tensor}))["step"]
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        assert to_bytes(back) == to_bytes(tensor)
    error = RunError(BAD_NUMBER, "the loss is nan", "lower `lr`", ("first",))
    assert repr(from_bytes(to_bytes(error))) == repr(error)
    with pytest.raises(TypeError, match="a PosixPath is no value that ranks send each other"):
        to_bytes([Path("x")])


class Canary:
    """An object that makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@given(st.binary() | VALUES.map(to_bytes).flatmap(lambda data: st.integers(0, len(data)).map(lambda end: data[:end])))
def test_other_bytes_are_refused_or_plain(data: bytes) -> None:
    with suppress(ForeignMessage):
        to_bytes(from_bytes(data))


def test_pickles_and_names_of_other_classes_are_not_executed(tmp_path: Path) -> None:
    place = tmp_path / "canary"
    texts = [b'{"Path":["x"]}', b'{"os.system":["touch x"]}', b'{"__import__":["os"]}', b'{"Code":[]}', b"[" * 99_999]
    for data in (pickle.dumps(Canary(place)), *texts):
        with pytest.raises(ForeignMessage):
            from_bytes(data)
    assert not place.exists()


def test_no_code_of_a_run_unpickles() -> None:
    """Object collectives of torch unpickle what other processes send."""
    banned = {"loads", "load", "Unpickler"}
    for file in python_files("parc", "runtime", "compiler", "passes", "grammar"):
        for node in nodes(file):
            if isinstance(node, ast.Attribute):
                assert "_object" not in node.attr or "dist" not in ast.unparse(node.value), shown(file)
                assert not (node.attr in banned and ast.unparse(node.value) == "pickle"), shown(file)
