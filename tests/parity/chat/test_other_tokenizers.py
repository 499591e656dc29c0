"""WordPiece, Unigram and Gemma's BPE against the family's own tokenizer classes."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.vocab import SpecialVocab
from sentencepiece import SentencePieceNormalizer
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, GemmaTokenizer, T5Tokenizer, XLMRobertaTokenizer

from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from runtime.errors import ModelFileError, RequestError
from tests.parity.chat.random_texts import random_texts

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
CORPUS = [text for seed in (11, 12) for text in random_texts(seed, 150)] + [
    "the quick brown fox jumps over the lazy dog, don't they? naïve Straße 12345"
] * 20


def load(
    kind: str, tokens: list[str], types: list[int], architecture: str = "", **keys: Any
) -> Tokenizer:
    metadata = {"model": kind, "tokens": tokens, "token_type": types, **keys}
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return load_tokenizer(named, architecture=architecture or kind)


def test_wordpiece_agrees_with_the_bert_tokenizer_class() -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained = NativeTokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer()
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    # Where the vocabulary holds a ▁ of its own, the file's marks cannot be told from it.
    trained.train_from_iterator([text.replace("▁", "") for text in CORPUS], trainer)
    ids = trained.get_vocab()
    published = sorted(ids, key=ids.__getitem__)
    stored = [
        text if text in special else text[2:] if text.startswith("##") else f"▁{text}"
        for text in published
    ]
    kinds = [CONTROL if text in special else NORMAL for text in published]
    for lowercase in (True, False):
        subject = load("bert", stored, kinds, **{"normalizer.lowercase": lowercase})
        reference = BertTokenizer(vocab=ids, do_lower_case=lowercase)
        unknown = 0
        for text in random_texts(13, 400):
            expected = reference.encode(text, add_special_tokens=False)
            assert subject.encode(text) == expected, text
            unknown += expected.count(ids["[UNK]"])
        assert unknown > 0  # words with an unknown rest were among them
        assert subject.encode_document("the fox")[0] == ids["[CLS]"]
    assert subject.token_bytes(subject.encode("fox")[0])[:1] == b" "


@pytest.mark.parametrize("strips", [None, False, True])
@pytest.mark.parametrize("lowercase", [False, True])
def test_wordpiece_strips_accents_as_stated_or_with_capitals(lowercase, strips) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "über", "uber", "Über", "Uber"]
    reference = BertTokenizer(
        vocab={text: id for id, text in enumerate(words)},
        do_lower_case=lowercase,
        strip_accents=strips,
    )
    stored = [*words[:5], *(f"▁{word}" for word in words[5:])]
    stated = {} if strips is None else {"normalizer.strip_accents": strips}
    keys = {"normalizer.lowercase": lowercase, **stated}
    subject = load("bert", stored, [CONTROL] * 5 + [NORMAL] * 4, unknown_token_id=1, **keys)
    for word in words[5:]:
        assert subject.encode(word) == reference.encode(word, add_special_tokens=False)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁hello", "▁world", "s"]
WORD_TYPES = [CONTROL, UNKNOWN, *[CONTROL] * 3, *[NORMAL] * 3]


def test_wordpiece_files_of_llama_cpp_frame_texts_and_pairs_as_the_bert_class(tmp_path) -> None:
    """The `gguf` package, with which it converts, writes which tokens a text is framed by."""
    ids = {text: id for id, text in enumerate([*WORDS[:5], "hello", "world", "##s"])}
    reference = BertTokenizer(vocab=ids)
    reference.save_pretrained(tmp_path)
    subject = load("bert", WORDS, WORD_TYPES, **keys_of_gguf(tmp_path, len(WORDS)))
    assert subject.encode_document("hello worlds") == reference.encode("hello worlds")
    pair = [subject.encode_document(text) for text in ("hello", "worlds")]
    assert subject.pair(*pair) == reference.encode("hello", "worlds")


def keys_of_gguf(folder: Path, tokens: int) -> dict[str, Any]:
    written = SpecialVocab(folder, n_vocab=tokens)
    assert written.add_special_token == {"bos": True, "eos": True, "sep": False}
    roles = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
    named = {roles.get(name, name): id for name, id in written.special_token_ids.items()}
    return {
        **{f"{name}_token_id": id for name, id in named.items()},
        **{f"add_{name}_token": added for name, added in written.add_special_token.items()},
    }


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token", "add_sep_token"])
@pytest.mark.parametrize("stated", [False, True])
def test_flags_of_wordpiece_files_change_nothing(flag: str, stated: bool) -> None:
    subject = load("bert", WORDS, WORD_TYPES, **{flag: stated})
    assert subject.encode_document("hello") == [2, 5, 3]
    assert subject.pair([2, 5, 3], [2, 6, 3]) == [2, 5, 3, 6, 3]


def test_the_separator_of_wordpiece_precedes_its_eos_token() -> None:
    keys = {"eos_token_id": 4, "seperator_token_id": 3}
    assert load("bert", WORDS, WORD_TYPES, **keys).encode_document("hello") == [2, 5, 3]
    assert load("bert", WORDS, WORD_TYPES, eos_token_id=4).encode_document("hello") == [2, 5, 4]


@pytest.mark.parametrize("bytes_known", [False, True])
def test_unigram_agrees_with_the_t5_tokenizer_class(bytes_known: bool) -> None:
    head = ["<pad>", "</s>", "<unk>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if bytes_known else []
    trained = NativeTokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=3000, show_progress=False, unk_token="<unk>")
    trained.train_from_iterator(CORPUS, trainer)
    learned = [row for row in _unigram_rows(trained) if row[0] not in head]
    rows = [*((text, 0.0) for text in head), *((text, -20.0) for text in byte_tokens), *learned]
    types = [CONTROL, CONTROL, UNKNOWN, *[BYTE] * len(byte_tokens), *[NORMAL] * len(learned)]
    subject = load("t5", [t for t, _ in rows], types, scores=[s for _, s in rows])
    reference = T5Tokenizer(vocab=rows, extra_ids=0)
    if bytes_known:
        reference.backend_tokenizer.model = models.Unigram(rows, 2, byte_fallback=True)
    for text in random_texts(14, 400):
        assert subject.encode(text) == reference.encode(text, add_special_tokens=False), text
    assert subject.end_tokens == {1} and not subject.add_bos
    assert subject.decode(subject.encode("the fox")) == " the fox"
    assert subject.encode_document("the fox") == reference.encode("the fox")  # ends in </s>


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert-moe", "jina-bert-v3"])
def test_unigram_documents_of_encoders_are_those_of_the_xlm_roberta_tokenizer_class(
    architecture,
) -> None:
    head = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    rows = [*((text, 0.0) for text in head), ("▁the", -1.0), ("▁", -2.0), ("fox", -3.0)]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, *[NORMAL] * 3]
    subject = load("t5", [t for t, _ in rows], types, architecture, scores=[s for _, s in rows])
    reference = XLMRobertaTokenizer(vocab=rows)
    for text in ("the fox", "the <mask> fox", "", "the  the"):
        assert subject.encode_document(text) == reference.encode(text), text


@pytest.mark.parametrize("stored", ["bytes", "signed bytes", "characters of base64"])
def test_the_table_of_characters_is_read_as_stored(stored: str) -> None:
    """As base64 text in files of Snowflake Arctic Embed 2, one character an entry."""
    rules = SentencePieceNormalizer(rule_name="nmt_nfkc")
    table = ModelProto.FromString(rules.serialized_model_proto())
    data = table.normalizer_spec.precompiled_charsmap
    entries = {
        "bytes": list(data),
        "signed bytes": np.frombuffer(data, np.int8),
        "characters of base64": list(base64.b64encode(data).decode()),
    }
    tokens = ["<s>", "</s>", "<unk>", "▁", "f", "i"]
    types = [CONTROL, CONTROL, UNKNOWN, NORMAL, NORMAL, NORMAL]
    keys = {"scores": [0.0] * len(tokens), "precompiled_charsmap": entries[stored]}
    subject = load("t5", tokens, types, "bert", **keys)
    assert subject.encode("ﬁ") == [3, 4, 5]


def _unigram_rows(trained: NativeTokenizer) -> list[tuple[str, float]]:
    return [tuple(row) for row in json.loads(trained.to_str())["model"]["vocab"]]


def test_gemma_bpe_agrees_with_the_gemma_tokenizer_class() -> None:
    head = ["<pad>", "<eos>", "<bos>", "<unk>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = NativeTokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*head, *byte_tokens],
        show_progress=False,
        limit_alphabet=120,
    )
    trained.train_from_iterator(CORPUS, trainer)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    ids = trained.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [BYTE if t in byte_tokens else CONTROL if t in head else NORMAL for t in tokens]
    keys = {"merges": [" ".join(pair) for pair in merges], "bos_token_id": ids["<bos>"]}
    subject = load("gemma4", tokens, kinds, **keys)
    reference = GemmaTokenizer(vocab=ids, merges=merges)
    for text in random_texts(15, 400):
        assert subject.encode(text) == reference.encode(text, add_special_tokens=False), text
        assert (
            b"".join(map(subject.token_bytes, subject.encode(text)))
            == text.replace("▁", " ").encode()
        )
    assert subject.encode_document("the")[0] == ids["<bos>"]
    granite = load("gpt2", tokens, kinds, **keys, pre="granite-embed-multi-311m")
    assert granite.encode(CORPUS[0]) == subject.encode(CORPUS[0])


@pytest.mark.parametrize("lowercase", [None, True, False])
def test_bpe_of_words_agrees_with_the_library(lowercase: bool | None) -> None:
    """Jina's Chinese model: characters that no byte represents, and words without their spaces."""
    head = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    reference = NativeTokenizer(models.BPE(unk_token="<unk>"))
    if lowercase is not False:
        reference.normalizer = normalizers.Lowercase()
    reference.pre_tokenizer = pre_tokenizers.Whitespace()
    reference.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=head, show_progress=False, limit_alphabet=200
    )
    reference.train_from_iterator(CORPUS, trainer)
    merges = [" ".join(pair) for pair in json.loads(reference.to_str())["model"]["merges"]]
    ids = reference.get_vocab()
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, *[NORMAL] * (len(ids) - len(head))]
    keys = {"bos_token_id": 0, "eos_token_id": 2, "unknown_token_id": 3}
    keys |= {} if lowercase is None else {"normalizer.lowercase": lowercase}
    tokens = sorted(ids, key=ids.__getitem__)
    subject = load("gpt2", tokens, kinds, "jina-bert-v2", merges=merges, pre="whitespace", **keys)
    unknown = 0
    for text in ["The FOX 你好world, <mask>  don't", *random_texts(16, 400)]:
        expected = reference.encode(text).ids
        assert subject.encode_document(text) == expected, text
        unknown += expected.count(ids["<unk>"])
    assert unknown > 0
    fox = reference.encode("fox").ids
    assert subject.pair(fox, fox) == reference.encode("fox", "fox").ids
    assert subject.decode(subject.encode("the fox")) == "thefox"


def test_damaged_unigram_and_wordpiece_vocabularies_are_refused() -> None:
    tokens, types = ["<pad>", "</s>", "<unk>", "a"], [CONTROL, CONTROL, UNKNOWN, NORMAL]
    for scores in ([0.0] * 3, [0.0, 0.0, 0.0, float("nan")], None):
        with pytest.raises(ModelFileError, match="scores"):
            load("t5", tokens, types, **({} if scores is None else {"scores": scores}))
    refused = 0
    for charsmap in ([1], [255] * 64, [0] * 7, ["A"], ["AA", 1]):
        try:
            subject = load("t5", tokens, types, scores=[0.0] * 4, precompiled_charsmap=charsmap)
            subject.encode("a naïve ﬁ")
        except (ModelFileError, RequestError):
            refused += 1
    assert refused
    with pytest.raises(ModelFileError, match="unknown_token_id"):
        load("bert", ["▁a"], [NORMAL])
