"""Logits of the Phi 3 family against `transformers`, on tiny random models."""

import pytest
import torch
from transformers import Phi3Config

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.registry import class_for
from tests.parity.agreement import (
    CHECKS,
    PROMPT,
    QUANTIZED_TYPES,
    TOLERANCE,
    Pair,
    check_quantized,
    make_pair,
    random_tokens,
)
from tests.parity.paged_decoder import PagedDecoder

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.02, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.3, 2.0, 4.0, 8.0, 12.0, 24.0, 48.0],
}
PARTIAL = LONGROPE | {
    "partial_rotary_factor": 0.75,
    "short_factor": LONGROPE["short_factor"][:6],
    "long_factor": LONGROPE["long_factor"][:6],
}
CONFIGS = {
    "plain": Phi3Config(**SIZES),
    "window": Phi3Config(**SIZES, sliding_window=9),
    "tied": Phi3Config(**SIZES, tie_word_embeddings=True),
    # Every sequence of these checks is longer than the original context of the one and shorter
    # than that of the other.
    "short_factors": Phi3Config(
        **(SIZES | {"max_position_embeddings": 2048}), rope_parameters=LONGROPE
    ),
    "partial_rotation": Phi3Config(
        **(SIZES | {"max_position_embeddings": 2048}), rope_parameters=PARTIAL
    ),
}
LONG = Phi3Config(**(SIZES | {"original_max_position_embeddings": 16}), rope_parameters=LONGROPE)
LARGE = Phi3Config(**(SIZES | {"hidden_size": 256, "intermediate_size": 256}))


def load_for(path, context_tokens: int):
    """The decoder as it is when contexts of that length are served."""
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=path)
    scope = TensorScope(
        file,
        device=torch.device("cpu"),
        dtype=torch.float32,
        context_tokens=context_tokens,
    )
    return class_for(metadata)(scope, metadata)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    made = make_pair(CONFIGS[request.param], path)
    return Pair(load_for(path, 512), made.twin, made.known)


@pytest.mark.parametrize("check", CHECKS)
def test_logits_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("check", ["whole_prompt", "two_chunks", "long_prompt"])
def test_logits_agree_beyond_the_original_context(tmp_path, check) -> None:
    CHECKS[check](make_pair(LONG, tmp_path / "tiny.gguf"))


def test_the_served_context_chooses_the_factors(tmp_path) -> None:
    pair = make_pair(LONG, tmp_path / "tiny.gguf")
    tokens = random_tokens(PROMPT, seed=1)
    served = PagedDecoder(load_for(tmp_path / "tiny.gguf", 16)).feed({0: tokens[:16]})
    assert pair.worst(served, pair.expected(tokens[:16])) <= TOLERANCE
    unserved = PagedDecoder(pair.decoder).feed({0: tokens[:16]})
    assert pair.worst(unserved, pair.expected(tokens[:16])) > 10 * TOLERANCE


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type)
