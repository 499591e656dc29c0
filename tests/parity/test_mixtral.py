"""Logits of Mixtral, which files call llama, against `transformers`, on tiny random models."""

from pathlib import Path

import pytest
from transformers import MixtralConfig

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
from tests.tiny_models import tiny_tokenizer, write_tiny

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


def config(**changes) -> MixtralConfig:
    return MixtralConfig(**(SIZES | changes))


CONFIGS = {
    "plain": config(),
    "one_expert_for_a_row": config(num_experts_per_tok=1),
    "all_experts_for_a_row": config(num_experts_per_tok=6),
    "tied": config(tie_word_embeddings=True),
}
LARGE = config(hidden_size=256, head_dim=64, intermediate_size=256)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(CONFIGS[request.param], tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)


def one_tensor_for_each_expert(path: Path) -> dict[str, object]:
    """As the first converters wrote them."""
    changed: dict[str, object] = {}
    for name, array in matrices(path).items():
        if "_exps" in name:
            changed[name] = None
            for expert, matrix in enumerate(array):
                changed[name.replace("_exps", f".{expert}")] = matrix
    return changed


def test_files_with_a_tensor_for_each_expert_agree(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    twin = write_tiny(path, config())
    old = rewrite(path, tmp_path / "old.gguf", tensors=one_tensor_for_each_expert(path))
    check_whole_prompt(Pair(load_decoder(old), twin, tiny_tokenizer().get_vocab_size()))
