"""Logits of Qwen 3 Next against `transformers`, on tiny random models."""

from collections.abc import Iterator

import pytest
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.gguf_files import matrices, rewrite
from tests.parity.agreement import (
    CHECKS,
    QUANTIZED_TYPES,
    Pair,
    check_quantized,
    check_whole_prompt,
    load_decoder,
    make_pair,
)
from tests.parity.delta_rule import EPS, step_by_step
from tests.tiny_models import tiny_tokenizer, write_tiny

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 512,
}


def config(**changes) -> Qwen3NextConfig:
    return Qwen3NextConfig(**(SIZES | changes))


CONFIGS = {
    "plain": config(),
    "a_state_last": config(num_hidden_layers=3, full_attention_interval=2),
    "one_value_head_for_each_key_head": config(linear_num_key_heads=6),
    "weights_that_do_not_sum_to_one": config(norm_topk_prob=False),
    "wide_convolution": config(linear_conv_kernel_dim=7),
    "tied": config(tie_word_embeddings=True),
}
LARGE = config(
    hidden_size=256,
    head_dim=64,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    linear_key_head_dim=64,
    linear_value_head_dim=128,
)


@pytest.fixture(scope="module", autouse=True)
def steps() -> Iterator[None]:
    with step_by_step(modeling_qwen3_next):
        yield


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


def test_the_oldest_files_have_the_inputs_of_each_key_head_together(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    changes = {}
    for number, layer in enumerate(twin.model.layers):
        if layer.block_type == "linear_attention":
            changes[f"blk.{number}.ssm_in.weight"] = layer.linear_attn.in_proj_qkvz.weight.numpy()
            changes |= {f"blk.{number}.attn_{name}.weight": None for name in ("qkv", "gate")}
    old = rewrite(
        path, tmp_path / "old.gguf", keys={"general.architecture": "qwen3next"}, tensors=changes
    )
    check_whole_prompt(Pair(load_decoder(old), twin, tiny_tokenizer().get_vocab_size()))


def test_layers_that_draft_tokens_are_left_alone(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    last = {name: rows for name, rows in matrices(path).items() if name.startswith("blk.3.")}
    drafting = {name.replace("blk.3.", "blk.4."): rows for name, rows in last.items()}
    drafting["blk.4.nextn.eh_proj.weight"] = last["blk.3.attn_q.weight"]
    keys = {
        "general.architecture": "qwen3next",
        "qwen3next.block_count": 5,
        "qwen3next.nextn_predict_layers": 1,
    }
    longer = rewrite(path, tmp_path / "longer.gguf", keys=keys, tensors=drafting)
    decoder = load_decoder(longer)
    assert len(decoder.cache_layers) == 4
    check_whole_prompt(Pair(decoder, twin, tiny_tokenizer().get_vocab_size()))
