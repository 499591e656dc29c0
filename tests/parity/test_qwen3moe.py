"""Logits of Qwen 3 with experts against `transformers`, on tiny random models."""

import pytest
from transformers import Qwen3MoeConfig

from tests.gguf_files import rewrite
from tests.parity.agreement import (
    CHECKS,
    QUANTIZED_TYPES,
    Pair,
    check_quantized,
    check_whole_prompt,
    load_decoder,
    make_pair,
)
from tests.tiny_models import tiny_tokenizer, write_tiny

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(**changes) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**(SIZES | changes))


CONFIGS = {
    "plain": config(),
    "weights_that_do_not_sum_to_one": config(norm_topk_prob=False),
    "all_experts_for_a_row": config(num_experts_per_tok=8),
    "many_experts": config(num_experts=100, num_experts_per_tok=8),
    "tied": config(tie_word_embeddings=True),
    "yarn": config(rope_parameters=YARN),
}
LARGE = config(hidden_size=256, head_dim=64, moe_intermediate_size=256)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


@pytest.mark.parametrize("width", [32, None])
def test_weights_sum_to_one_where_a_file_does_not_say(tmp_path, width) -> None:
    """And the experts' width need not be told."""
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    keys = {
        "general.architecture": "qwen3moe",
        "qwen3moe.norm_top_k_prob": None,
        "qwen3moe.expert_weights_norm": None,
        "qwen3moe.expert_feed_forward_length": width,
    }
    silent = rewrite(path, tmp_path / "silent.gguf", keys=keys)
    check_whole_prompt(Pair(load_decoder(silent), twin, tiny_tokenizer().get_vocab_size()))
