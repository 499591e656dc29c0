"""Logits of OLMo 2 against `transformers`, on tiny random models."""

import pytest
from transformers import Olmo2Config

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}
CONFIGS = {
    "plain": Olmo2Config(**SIZES),
    "no_sharing_of_keys": Olmo2Config(**(SIZES | {"num_key_value_heads": 4})),
    "tied": Olmo2Config(**SIZES, tie_word_embeddings=True),
}
LARGE = Olmo2Config(**(SIZES | {"hidden_size": 256, "intermediate_size": 256}))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
