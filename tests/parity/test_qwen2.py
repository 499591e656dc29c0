"""Logits of Qwen 2 and 2.5 against `transformers`, on tiny random models."""

import pytest
from transformers import Qwen2Config

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "use_sliding_window": False,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "plain": Qwen2Config(**SIZES, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "yarn": Qwen2Config(**SIZES, rope_parameters={**YARN, "factor": 4.0}),
}
LARGE = Qwen2Config(**(SIZES | {"hidden_size": 256, "intermediate_size": 256}))


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
