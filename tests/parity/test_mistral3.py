"""Logits of Mistral Small 3.1 and Ministral 3 against `transformers`, on tiny random models."""

import pytest
from transformers import Ministral3Config, Mistral3Config, MistralConfig, PixtralVisionConfig

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
# The original context is short, so that the temperature grows several times within a prompt.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
VISION = PixtralVisionConfig(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
)
WITH_EYES = Mistral3Config(
    text_config=MistralConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e9}),
    vision_config=VISION,
    image_token_id=10,
)
CONFIGS = {
    "temperature": Ministral3Config(
        **SIZES, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "unlike_magnitudes": Ministral3Config(
        **SIZES, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
    ),
    "own_magnitude": Ministral3Config(**SIZES, rope_parameters=YARN | {"attention_factor": 1.2}),
    "text_of_a_model_with_eyes": WITH_EYES,
}
LARGE = Ministral3Config(
    **(SIZES | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}),
    rope_parameters=YARN,
)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("config", ["temperature", "unlike_magnitudes"])
def test_logits_agree_in_ollamas_flavour(tmp_path, config) -> None:
    pair = make_pair(CONFIGS[config], tmp_path / "tiny.gguf", flavour="ollama")
    CHECKS["long_prompt"](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
