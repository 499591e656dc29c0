"""Rerankers in llama.cpp: it computes the same scores from the same file.

It gives both texts of a pair the first token type, so models with two types are left out.
"""

from pathlib import Path

import numpy as np
import pytest

from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers.pairs import pair_format
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.gguf_files import rewrite
from tests.parity.test_rerankers import QUERY, TEXTS, Original, ask
from tests.peers.llama_cpp_library import their_vectors

NEAR = 0.01  # of scores: its matrix products round to half precision


def prompts(path: Path) -> list[list[int]]:
    metadata = GGUFFile.open(path).metadata
    tokenizer = load_tokenizer(metadata, architecture=str(metadata["general.architecture"]))
    encode = pair_format(tokenizer, metadata).encoder(QUERY)
    return [encode(text) for text in TEXTS]


def compare(path: Path, theirs: np.ndarray) -> None:
    """`theirs`: between 0 and 1."""
    reply = ask(path, "/v1/score", text_1=QUERY, text_2=list(TEXTS)).json()
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
    logits = their_vectors(path, prompts(path), ranks=True)[:, 0]
    compare(path, 1 / (1 + np.exp(-logits)))


def test_llama_cpp_gives_the_same_probabilities_of_yes(tmp_path) -> None:
    """It gives those of both answers."""
    path = Original("tiny-Qwen3-Reranker", tmp_path).path
    answers = their_vectors(path, prompts(path), ranks=True)
    assert np.abs(answers.sum(1) - 1).max() < NEAR
    compare(path, answers[:, 0])
