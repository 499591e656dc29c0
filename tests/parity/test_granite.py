"""Logits of Granite 3, dense and with experts, against `transformers`, on tiny random models."""

import pytest
from transformers import GraniteConfig, GraniteMoeConfig

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "embedding_multiplier": 12.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
ONES = dict.fromkeys(
    ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0
)
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
CONFIGS = {
    "dense": GraniteConfig(**SIZES),
    "tied": GraniteConfig(**SIZES, tie_word_embeddings=True),
    "without_multipliers": GraniteConfig(**(SIZES | ONES)),
    "experts": GraniteMoeConfig(**SIZES, **EXPERTS),
}
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 256}
LARGE = {"dense": GraniteConfig(**WIDE), "experts": GraniteMoeConfig(**WIDE, **EXPERTS)}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type, name) -> None:
    check_quantized(LARGE[name], tmp_path, type)
