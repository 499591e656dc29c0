"""Settings of Cohere's models with experts, whose layers are listed or counted."""

from typing import Any

import pytest

from runtime.errors import UnsupportedModelError
from tests.unit.model_zoo.convert.test_conversion_settings import today, told

COUNTED: dict[str, Any] = {
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "expert_selection_fn": "sigmoid",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 9,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "prefix_dense_intermediate_size": 8192,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "vocab_size": 256000,
}


@pytest.mark.parametrize("changes", [{}, {"num_shared_experts": 0}, {"rms_norm_eps": 1e-6}])
def test_counted_layers_are_those_of_transformers(changes, tmp_path) -> None:
    values = COUNTED | changes
    keys = told(tmp_path / "counted", values)
    expanded = today(values).to_dict() | {"architectures": values["architectures"]}
    assert keys == told(tmp_path / "listed", expanded)
    assert keys["attention.sliding_window_pattern"] == [False, *([True] * 3 + [False]) * 2]
    assert (keys["feed_forward_length"], keys["expert_feed_forward_length"]) == (8192, 768)
    assert ("attention.layer_norm_epsilon" in keys) is ("rms_norm_eps" not in changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_selection_fn": None},
        {"shared_expert_combination_strategy": "sum"},
        {"prefix_dense_sliding_window_pattern": 2},
    ],
)
def test_settings_that_files_cannot_express_are_refused(changes, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"as `{next(iter(changes))}`"):
        told(tmp_path / "folder", COUNTED | changes)
