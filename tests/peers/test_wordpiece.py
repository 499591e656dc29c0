"""WordPiece files in llama.cpp: it cuts and frames texts as we do, whatever flags they state."""

from typing import Any

import pytest

from model_zoo.gguf.reader import GGUFFile
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.gguf_files import rewrite
from tests.peers.llama_cpp_library import llama_cpp
from tests.unit.serve_app.replica.test_embedding_models import TEXTS, made

FLAGS = {f"tokenizer.ggml.add_{name}_token": True for name in ("bos", "eos", "sep")}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return made("bert_mean", tmp_path_factory.mktemp("models")).path


@pytest.mark.parametrize(
    "keys",
    [
        {},
        dict.fromkeys(FLAGS),
        dict.fromkeys(FLAGS, False),
        FLAGS | {"tokenizer.ggml.add_sep_token": False},
        {"tokenizer.ggml.eos_token_id": 1},
    ],
    ids=["as_converted", "no_flags", "all_false", "as_converted_by_llama_cpp", "another_eos"],
)
def test_llama_cpp_has_the_same_tokens(converted, tmp_path, keys) -> None:
    path = rewrite(converted, tmp_path / "changed.gguf", keys=keys)
    ours = load_tokenizer(GGUFFile.open(path).metadata, architecture="bert")
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    found = [theirs.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]
    theirs.close()
    assert found == [ours.encode_document(text) for text in TEXTS]


@pytest.mark.parametrize("strips", [None, False, True])
@pytest.mark.parametrize("lowercase", [False, True])
def test_llama_cpp_strips_the_same_accents(converted, tmp_path, lowercase, strips) -> None:
    keys: dict[str, Any] = {
        "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.normalizer.strip_accents": strips,
    }
    path = rewrite(converted, tmp_path / "changed.gguf", keys=keys)
    ours = load_tokenizer(GGUFFile.open(path).metadata, architecture="bert")
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in ("café", "Café", "cafe\u0301"):
        assert theirs.tokenize(text.encode(), add_bos=False, special=True) == ours.encode(text)
    theirs.close()


def test_llama_cpp_puts_one_separator_between_a_query_and_a_document(converted) -> None:
    """Its server adds the end token to the query, and then a separator if the flag is true."""
    model = llama_cpp.Llama(str(converted), vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    assert llama_cpp.llama_vocab_get_add_eos(vocabulary)
    assert not llama_cpp.llama_vocab_get_add_sep(vocabulary)
    model.close()
