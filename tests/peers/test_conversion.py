"""Converted files in llama.cpp: it loads every architecture and computes as the checkpoint does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoModel,
    BertConfig,
    Cohere2Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Mistral3Config,
    MixtralConfig,
    NemotronHConfig,
    NomicBertConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.peers.llama_cpp_library import llama_cpp, their_log_probabilities
from tests.tiny_models import tiny_tokenizer, write_tiny

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 300, 40)]
# llama.cpp keeps keys, values and its table of GELU in half precision.
NEAR_NATS = 0.1
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEADS = {**SIZES, "head_dim": 16}
GEMMA = {**HEADS, "query_pre_attn_scalar": 16, "sliding_window": 8}
GEMMA_4 = {**HEADS, "num_hidden_layers": 6, "sliding_window": 8, "global_head_dim": 32}
CAPPED = {**GEMMA_4, "final_logit_softcapping": 30.0}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
STRETCHED_BASE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
MINISTRAL = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 256,
}
STRETCHED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OF_FULL = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SLIDING, FULL = "sliding_attention", "full_attention"
RECURRENT, CONVOLUTION = "linear_attention", "conv"
CONVOLVING = {**SIZES, "layer_types": [CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION]}
GRANITE = {
    "layer_types": [RECURRENT, FULL, RECURRENT, RECURRENT],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 4,
    "mamba_d_state": 32,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "time_step_min": 1e-9,
}
FALCON = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_state": 32,
    "key_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.1, 0.8, 1.3, 0.9],
    "mlp_multipliers": [0.8, 1.7],
}
DECODERS = {
    "llama": LlamaConfig(**HEADS, rope_parameters=LLAMA_3),
    "mixtral": MixtralConfig(**HEADS, num_local_experts=4),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, stretched": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": Qwen3Config(**HEADS, tie_word_embeddings=True),
    "qwen3moe": Qwen3MoeConfig(
        **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gemma": GemmaConfig(**HEADS),
    "gemma2": Gemma2Config(**GEMMA),
    "gemma3": Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 7}, rope_parameters=STRETCHED),
    "gemma4": Gemma4TextConfig(**CAPPED, hidden_size_per_layer_input=0),
    "gemma4 with keys as values": Gemma4TextConfig(
        **CAPPED,
        hidden_size_per_layer_input=0,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    ),
    "gemma4 with experts": Gemma4TextConfig(
        **CAPPED,
        hidden_size_per_layer_input=0,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "gemma4 with shared layers": Gemma4TextConfig(
        **CAPPED,
        num_kv_shared_layers=2,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL],
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=tiny_tokenizer().get_vocab_size(),
    ),
    # With YaRN it rounds the ends of the range to whole frequencies, which this family does not.
    "gpt-oss": GptOssConfig(
        **HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
    # It knows one size of chunks only, the published models'.
    "llama4": Llama4TextConfig(
        **HEADS, num_local_experts=4, intermediate_size_mlp=80, interleave_moe_layer_step=2
    ),
    "phi3": Phi3Config(**SIZES, original_max_position_embeddings=256, rope_parameters=LONG),
    "mistral3": Mistral3Config(
        text_config={**HEADS, "model_type": "ministral3", "rope_parameters": MINISTRAL},
        vision_config=PIXTRAL,
    ),
    "smollm3": SmolLM3Config(**SIZES),
    "seed_oss": SeedOssConfig(**HEADS),
    "exaone4": Exaone4Config(
        **SIZES, sliding_window=None, layer_types=[FULL] * 4, rope_parameters=LLAMA_3
    ),
    # It knows windows in models of this depth only.
    "exaone4 with windows": Exaone4Config(**{**SIZES, "num_hidden_layers": 64}, sliding_window=8),
    "granitehybrid": GraniteMoeHybridConfig(
        **SIZES, **GRANITE, num_local_experts=4, num_experts_per_tok=2
    ),
    "granitehybrid, dense": GraniteMoeHybridConfig(**SIZES, **GRANITE, num_local_experts=0),
    "nemotron_h": NemotronHConfig(
        **HEADS, **NEMOTRON, layers_block_type=[RECURRENT, "mlp", FULL, RECURRENT]
    ),
    "nemotron_h_moe": NemotronHConfig(
        **HEADS,
        **NEMOTRON,
        layers_block_type=[RECURRENT, "moe", FULL, "moe"],
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=2.5,
    ),
    "falcon-h1": FalconH1Config(**HEADS, **FALCON),
    "cohere2": Cohere2Config(**SIZES, sliding_window=8),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(**SIZES, sliding_window=8, rope_parameters=OF_FULL),
    # It knows models only whose heads all have keys.
    "olmoe": OlmoeConfig(
        **{**SIZES, "num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=2
    ),
    "apertus": ApertusConfig(**SIZES, pad_token_id=None, rope_parameters=LLAMA_3),
    "arcee": ArceeConfig(**SIZES),
    "hunyuan-dense": HunYuanDenseV1Config(**HEADS, rope_parameters=STRETCHED_BASE),
    "hunyuan-moe": HunYuanMoEV1Config(**HEADS, num_experts=4, moe_topk=2),
    "minimax-m2": MiniMaxM2Config(
        **HEADS, num_local_experts=4, num_experts_per_tok=2, rope_parameters=HALF_ROTATED
    ),
    "deepseek2": Glm4MoeLiteConfig(
        **(SIZES | {"num_key_value_heads": 4}),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
    ),
    # It knows as many key heads as heads only.
    "dots1": Dots1Config(
        **{**HEADS, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        sliding_window=None,
    ),
    "glm4moe": Glm4MoeConfig(
        **HEADS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        use_qk_norm=True,
        routed_scaling_factor=2.5,
    ),
    "ernie4_5": Ernie4_5Config(**HEADS),
    "ernie4_5-moe": Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1
    ),
    "lfm2": Lfm2Config(**CONVOLVING, block_multiple_of=32),
    "lfm2moe": Lfm2MoeConfig(
        **CONVOLVING,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
}
ENCODERS = {
    "bert": BertConfig(**SIZES),
    "gemma-embedding": Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 7}, use_bidirectional_attention=True
    ),
    "nomic-bert": NomicBertConfig(**SIZES),
}
TEXT = "the quick brown fox says: don't! 12 straße\n\n  東京 <|im_end|>"


@pytest.mark.parametrize("name", DECODERS)
def test_llama_cpp_computes_what_the_checkpoint_does(name, tmp_path) -> None:
    twin = write_tiny(tmp_path / "out.gguf", DECODERS[name])
    with torch.inference_mode():
        expected = twin(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    found = their_log_probabilities(tmp_path / "out.gguf", TOKENS)
    assert (found - expected).abs().max() < NEAR_NATS


@pytest.mark.parametrize("name", ENCODERS)
def test_llama_cpp_embeds_as_the_checkpoint_does(name, tmp_path) -> None:
    path, text = tmp_path / "out.gguf", "the quick brown fox jumps over the lazy dog. " * 4
    twin = write_tiny(path, ENCODERS[name], maker=AutoModel)
    with torch.inference_mode():
        states = twin(torch.tensor([tiny_tokenizer().encode(text).ids])).last_hidden_state[0]
    model = llama_cpp.Llama(
        str(path), embedding=True, pooling_type=1, n_ctx=64, n_threads=1, verbose=False
    )
    found = torch.tensor(model.embed(text))
    model.close()
    assert torch.allclose(found, states.mean(0), atol=0.02)


def test_llama_cpp_cuts_text_as_the_checkpoint_does(tmp_path) -> None:
    path: Path = tmp_path / "out.gguf"
    write_tiny(path, DECODERS["qwen3"])
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    found = model.tokenize(TEXT.encode(), add_bos=False, special=True)
    assert found == tiny_tokenizer().encode(TEXT).ids
    assert model.token_eos() == tiny_tokenizer().token_to_id("<|im_end|>")
    model.close()
