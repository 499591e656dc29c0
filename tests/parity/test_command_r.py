"""Logits of Command-R against `transformers`, on tiny random models."""

import pytest
from transformers import CohereConfig

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "plain": CohereConfig(**SIZES),
    "biases": CohereConfig(**SIZES, attention_bias=True),
    "large_logits": CohereConfig(**SIZES, logit_scale=3.0),
}
LARGE = CohereConfig(**(SIZES | {"hidden_size": 256, "intermediate_size": 256}))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
