"""Logits of GLM-4 against `transformers`, on tiny random models."""

import pytest
from transformers import Glm4Config

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "eos_token_id": 2,
}
CONFIGS = {
    "plain": Glm4Config(**SIZES),
    "without_biases": Glm4Config(**SIZES, attention_bias=False),
    "one_key_head": Glm4Config(**(SIZES | {"num_key_value_heads": 1})),
}
LARGE = Glm4Config(**(SIZES | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
