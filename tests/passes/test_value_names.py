"""Names of values in programs: those of the model's modules and parameters."""

from __future__ import annotations

from tests.checked_plans import compiled
from tests.runtime.tiny import BOTH, PLAN


def test_a_block_calls_parameters_saved_values_and_gradients_by_their_places_in_it() -> None:
    build = compiled(PLAN + BOTH).build
    forward, backward = (
        build.programs[action].function(name) for action, name in (("F", "blocks"), ("B", "blocks_backward"))
    )
    parameters = [value.name for value in forward.parameters]
    assert parameters[:3] == ["x", "norm1_weight", "norm1_bias"]
    assert {"attn_qkv_weight", "mlp_up_weight", "mlp_down_bias", "key_mlp_drop_0"} <= set(parameters)
    saved = {value.name for value in backward.parameters}
    assert {"x", "attn_qkv_weight", "norm1_native_layer_norm", "attn_attention", "mlp_up_addmm"} <= saved
    given_back = [name for _, name in backward.returns]
    assert {"grad_x", "grad_attn_qkv_weight", "grad_mlp_up_weight"} <= set(given_back)
    main = build.programs["F"].main
    assert {line.op for line in main.lines if line.calls_function and "blocks" in line.op} == {"blocks"}
    assert "blocks_1_mlp_up_addmm" in main.values()
