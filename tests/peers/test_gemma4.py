"""llama.cpp reads the converted files of Gemma 4 as we do."""

import pytest
from transformers import Gemma4TextConfig

from tests.families.agreement import load_decoder, random_tokens
from tests.families.paged_decoder import PagedDecoder
from tests.peers.llama_cpp_library import their_log_probabilities
from tests.tiny_models import tiny_tokenizer, write_tiny

VOCABULARY = tiny_tokenizer().get_vocab_size()
# Their cache and their table of GELU are in half precision.
TOLERANCE = 0.1
LOCAL, GLOBAL = "sliding_attention", "full_attention"
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": [LOCAL, GLOBAL] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
VARIANTS = {
    "dense": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "layer_inputs": {
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "experts": {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_their_log_probabilities_are_ours(tmp_path, variant) -> None:
    path, tokens = tmp_path / "tiny.gguf", random_tokens(41, seed=6)
    write_tiny(path, Gemma4TextConfig(**(SIZES | VARIANTS[variant])))
    ours = PagedDecoder(load_decoder(path)).feed({0: tokens})[:, :VOCABULARY].log_softmax(-1)
    theirs = their_log_probabilities(path, tokens)
    assert (ours - theirs[:, :VOCABULARY]).abs().max() <= TOLERANCE
