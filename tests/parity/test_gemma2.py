"""Logits of Gemma 2 against `transformers`, on tiny random models."""

import pytest
from transformers import Gemma2Config

from tests.parity.agreement import CHECKS, QUANTIZED_TYPES, Pair, check_quantized, make_pair

# Scores and logits of random models are small; caps this low bend them.
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
CONFIGS = {
    "plain": Gemma2Config(**SIZES),
    "no_caps": Gemma2Config(**(SIZES | NO_CAPS)),
    "window_of_one": Gemma2Config(**(SIZES | {"sliding_window": 1})),
    "as_many_layers_as_27b": Gemma2Config(
        **(SIZES | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16})
    ),
}
LARGE = Gemma2Config(
    **(SIZES | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
       | {"query_pre_attn_scalar": 64})
)  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
