"""Logits of Qwen 3, the dense models, against `transformers`, on tiny random models."""

import pytest
from transformers import Qwen3Config

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "heads_wider_than_hidden": Qwen3Config(**SIZES),
    "tied": Qwen3Config(**(SIZES | {"head_dim": 16}), tie_word_embeddings=True),
    "biases": Qwen3Config(**SIZES, attention_bias=True),
    "yarn": Qwen3Config(**(SIZES | {"rope_parameters": {**YARN, "factor": 4.0}})),
}
LARGE = Qwen3Config(**(SIZES | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
