"""llama.cpp reads the converted files of Qwen 3 Next and Qwen 3.5 as we do."""

import pytest

from tests.parity import test_qwen3next, test_qwen35
from tests.parity.agreement import load_decoder, random_tokens
from tests.parity.paged_decoder import PagedDecoder
from tests.peers.llama_cpp_library import their_log_probabilities
from tests.tiny_models import tiny_tokenizer, write_tiny

VOCABULARY = tiny_tokenizer().get_vocab_size()
# Their cache is in half precision.
TOLERANCE = 0.01
# Their states are square.
SQUARE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
CONFIGS = {
    "qwen3next": test_qwen3next.config(**SQUARE),
    "qwen35": test_qwen35.dense(**SQUARE),
    "qwen35moe": test_qwen35.experts(**SQUARE),
}


@pytest.mark.parametrize("model", CONFIGS)
def test_their_log_probabilities_are_ours(tmp_path, model) -> None:
    path, tokens = tmp_path / "tiny.gguf", random_tokens(70, seed=6)
    write_tiny(path, CONFIGS[model])
    ours = PagedDecoder(load_decoder(path)).feed({0: tokens})[:, :VOCABULARY].log_softmax(-1)
    theirs = their_log_probabilities(path, tokens)
    assert (ours - theirs[:, :VOCABULARY]).abs().max() <= TOLERANCE
