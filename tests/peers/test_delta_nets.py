"""llama.cpp reads the converted files of Qwen 3 Next and Qwen 3.5 as we do."""

import pytest

from tests.families.agreement import load_decoder, random_tokens
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.peers.llama_cpp_library import their_log_probabilities
from tests.tiny_models import tiny_tokenizer

VOCABULARY = tiny_tokenizer().get_vocab_size()
# Their cache is in half precision.
TOLERANCE = 0.01
# Their states are square.
SQUARE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
FAMILIES = ("qwen3next", "qwen35", "qwen35moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_their_log_probabilities_are_ours(tmp_path, family) -> None:
    path, tokens = tmp_path / "tiny.gguf", random_tokens(70, seed=6)
    TEXT_MODELS[family].write(path, **SQUARE)
    ours = PagedDecoder(load_decoder(path)).feed({0: tokens})[:, :VOCABULARY].log_softmax(-1)
    theirs = their_log_probabilities(path, tokens)
    assert (ours - theirs[:, :VOCABULARY]).abs().max() <= TOLERANCE
