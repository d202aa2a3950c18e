"""Programs of stages joined to one step's: one name is one value, and results of several stages are summed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parc.compiler.program.program import Program, Ref
from parc.compiler.program.roles import JoinFault, _join_of_stages
from tests.runtime.staged import program

TYPES = {"key": "i64[]", "rng": "i64[2]", "scale": "f32[]"}
LAST = ("scale:scale", "w:parameter w", "m = mul.Tensor(w, scale)", "w m", "sent m m")


def joined(action: str, *stages: Sequence[str]) -> Program:
    """Join main functions of stages in this order."""
    return _join_of_stages(
        [program(f"stage{stage}", action, "pp=2", words, TYPES) for stage, words in enumerate(stages)]
    )


def test_a_gradient_of_two_stages_that_one_stage_is_given_is_summed() -> None:
    made = joined("B", LAST, ("m:received m", "kept:saved kept", "w kept")).main
    total = next(line for line in made.lines if line.op == "aten.add.Tensor")
    assert total.args == (Ref("m"), Ref("kept"))
    assert [v.name for v in total.results if v] == [made.returned("gradient")["w"]]
    assert total.results[0] is not None and not total.results[0].binding


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("y:saved y", "m = neg(y)", "sent m m"), "makes `m`, which an earlier stage makes"),
        (("m:received m", "w = neg(m)", "sent w w"), "makes `w`, which an earlier stage makes"),
        (("m:received m", "w:saved w", "sent w w"), "`saved w` of stage1 is another value in an earlier stage"),
        (("w:received w", "y = neg(w)", "sent y y"), "receives `w`, which no stage makes"),
    ],
)
def test_a_name_of_two_values_is_refused(words: Sequence[str], why: str) -> None:
    with pytest.raises(JoinFault, match=why):
        joined("B", LAST, words)


def test_a_key_that_two_stages_make_by_the_same_line_is_one() -> None:
    key = "key = parc.stream_key.default(rng, 'model.0', {seed})"
    first = ("rng:rng", key.format(seed=0), "a = parc.random.default(key, [2, 4], 'uniform', torch.float32)", "sent a")
    last = (*first[:2], "b = parc.random.default(key, [2, 4], 'normal', torch.float32)", "sent b")
    lines = joined("F", first, last).main.lines
    assert [v.name for line in lines for v in line.results if v] == ["key", "a", "b"]
    with pytest.raises(JoinFault, match="makes `key`, which an earlier stage makes"):
        joined("F", first, (last[0], key.format(seed=1), *last[2:]))
