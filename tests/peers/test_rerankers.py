"""Rerankers in llama.cpp: it computes the same scores from the same file.

It gives both texts of a pair the first token type, so models with two types are left out.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.gguf_files import rewrite
from tests.peers.llama_cpp_library import their_vectors
from tests.unit.serve_app.replica.test_embedding_models import ask_file
from tests.unit.serve_app.replica.test_rerankers import (
    QUERY,
    TEXTS,
    Original,
    encoded_pairs,
    write_single_matrix,
)

NEAR = 0.01  # of scores: its matrix products round to half precision


def compare(path: Path, theirs: np.ndarray) -> None:
    """`theirs`: between 0 and 1."""
    reply = ask_file(path, "/v1/score", text_1=QUERY, text_2=list(TEXTS)).json()
    scores = [entry["score"] for entry in reply["data"]]
    assert np.abs(np.array(scores) - theirs).max() < NEAR
    assert max(scores) - min(scores) > 10 * NEAR


@pytest.mark.parametrize(
    "name, key",
    [
        ("xlm_roberta", "bert.pooling_type"),
        ("modern_bert", "modern-bert.classifier.pooling_type"),
        ("modern_bert", "modern-bert.pooling_type"),
    ],
)
def test_llama_cpp_ranks_a_file_without_pooling_alike(tmp_path, name, key) -> None:
    path = rewrite(Original(name, tmp_path).path, tmp_path / "silent.gguf", keys={key: None})
    logits = their_vectors(path, encoded_pairs(path), ranks=True)[:, 0]
    compare(path, 1 / (1 + np.exp(-logits)))


def test_llama_cpp_ranks_alike_by_a_single_matrix(tmp_path) -> None:
    """It applies tanh to the result, which keeps the order."""
    path, logit = write_single_matrix(tmp_path)
    pairs = encoded_pairs(path)
    found = their_vectors(path, pairs, ranks=True)[:, 0]
    assert np.abs(found - np.tanh([logit(tokens) for tokens in pairs])).max() < NEAR


@pytest.mark.parametrize("name", ["tiny-Qwen3-Reranker", "tiny-Qwen3-VL-Reranker"])
def test_llama_cpp_gives_the_same_probabilities_of_yes(tmp_path, name) -> None:
    """It gives those of both answers."""
    path = Original(name, tmp_path).path
    answers = their_vectors(path, encoded_pairs(path), ranks=True)
    assert np.abs(answers.sum(1) - 1).max() < NEAR
    compare(path, answers[:, 0])
