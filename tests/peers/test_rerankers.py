"""Rerankers in llama.cpp: it computes the same scores from the same file.

It gives both texts of a pair the first token type, so models with two types are left out.
"""

import ctypes
from pathlib import Path

import numpy as np

from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.gguf_files import rewrite
from tests.parity.test_rerankers import QUERY, TEXTS, Original, ask
from tests.peers.llama_cpp_library import llama_cpp

NEAR = 0.01  # of scores: its matrix products round to half precision


def test_llama_cpp_ranks_a_file_without_pooling_alike(tmp_path) -> None:
    original = Original("xlm_roberta", tmp_path)
    path = rewrite(original.path, tmp_path / "silent.gguf", keys={"bert.pooling_type": None})
    reply = ask(path, "/v1/score", text_1=QUERY, text_2=list(TEXTS)).json()
    tokenizer = load_tokenizer(GGUFFile.open(path).metadata, architecture="bert")
    query = tokenizer.encode_document(QUERY)
    pairs = [tokenizer.pair(query, tokenizer.encode_document(text)) for text in TEXTS]
    scores = [entry["score"] for entry in reply["data"]]
    assert np.abs(np.array(scores) - their_scores(path, pairs)).max() < NEAR
    assert max(scores) - min(scores) > 10 * NEAR


def their_scores(path: Path, prompts: list[list[int]]) -> np.ndarray:
    """Between 0 and 1."""
    model = llama_cpp.Llama(
        str(path),
        embedding=True,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_RANK,
        n_ctx=128,
        n_threads=1,
        verbose=False,
    )
    logits = []
    for tokens in prompts:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(
            ctypes.cast(array, ctypes.POINTER(llama_cpp.llama_token)), len(tokens)
        )
        assert llama_cpp.llama_encode(model.ctx, batch) == 0
        logits.append(llama_cpp.llama_get_embeddings_seq(model.ctx, 0)[0])
    model.close()
    return 1 / (1 + np.exp(-np.array(logits)))
