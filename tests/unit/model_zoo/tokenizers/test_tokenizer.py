"""Tokenizers from small metadata: end tokens, special tokens, bytes, damaged files."""

from typing import Any

import numpy as np
import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from model_zoo.tokenizers import sentencepiece_bpe
from model_zoo.tokenizers.pretokenizers import PRE_TOKENIZERS
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from model_zoo.tokenizers.vocabulary import read_vocabulary
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
)

CHATML = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}


def load(metadata: dict[str, Any], architecture: str = "qwen2") -> Tokenizer:
    return load_tokenizer(metadata, architecture=architecture)


def ends(special: dict[str, int], **keys: Any) -> set[str]:
    tokenizer = load(byte_level_metadata(special, **keys))
    return {tokenizer.token_text(token) for token in tokenizer.end_tokens}


def test_every_key_of_an_end_token_is_read() -> None:
    special = dict.fromkeys(("<A>", "<B>", "<C>", "<D>", "<E>", "<F>"), CONTROL)
    first = 258
    named = ends(
        special,
        eos_token_id=first,
        eot_token_id=first + 1,
        eom_token_id=first + 2,
        eos_token_ids=np.array([first, first + 3, first + 4], dtype=np.int32),
    )
    assert named == {"<A>", "<B>", "<C>", "<D>", "<E>"}


def test_known_end_texts_need_no_key() -> None:
    assert ends({**CHATML, "<end_of_turn>": NORMAL, "<think>": CONTROL}) == {
        "<|endoftext|>",
        "<|im_end|>",
        "<end_of_turn>",
    }


BETWEEN_FILES = [
    "<|fim_pad|> <|repo_name|> <|file_sep|>",  # Qwen
    "<fim_pad> <reponame>",
    "<fim-pad> <fim-repo>",
    "[PAD]",
]


@pytest.mark.parametrize("texts", BETWEEN_FILES)
def test_padding_and_the_next_file_end_every_answer(texts: str) -> None:
    """As in llama.cpp: after an answer, models of code continue with other files."""
    found = dict.fromkeys(texts.split(), CONTROL)
    assert ends({**found, "<|fim_prefix|>": CONTROL, "<file>": CONTROL}) == set(found)
    untyped = dict.fromkeys(
        found, NORMAL
    )  # for files without token types, where "[PAD]" may be text
    assert ends(untyped) == set(found) - {"[PAD]"}


def test_padding_that_a_file_states_ends_answers() -> None:
    special = dict.fromkeys(("<A>", "<B>", "<C>", "<D>"), CONTROL)
    keys = {"fim_pad_token_id": 258, "fim_rep_token_id": 259, "fim_sep_token_id": 260}
    assert ends(special, **keys) == {"<A>", "<B>", "<C>"}


def test_dots_ocrs_turns_end_where_its_files_state_another_end() -> None:
    special = {"<|endofassistant|>": CONTROL, "<|endofuser|>": CONTROL}
    assert ends(special) == {"<|endofassistant|>"}


def test_harmony_end_of_message_does_not_end_the_answer() -> None:
    assert ends({"<|end|>": CONTROL}) == {"<|end|>"}
    harmony = {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}
    assert ends(harmony) == {"<|return|>", "<|call|>"}


def test_the_end_of_solars_thinking_does_not_end_the_answer() -> None:
    solar = dict.fromkeys(("<|end|>", "<|flush|>", "<|calls|>", "<|endoftext|>"), USER_DEFINED)
    assert ends(solar) == {"<|flush|>", "<|calls|>", "<|endoftext|>"}


def test_the_end_of_muses_messages_does_not_end_the_answer() -> None:
    assert ends({"<|eom|>": CONTROL}) == {"<|eom|>"}
    muse = dict.fromkeys(("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"), CONTROL)
    assert ends(muse) == {"<|eot|>"}


def test_glms_turns_end_where_the_user_or_a_tool_begins() -> None:
    """llama.cpp's converter states no end after a call, and none of ChatGLM 3 but `<eos>`."""
    roles = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    glm = dict.fromkeys(("<|endoftext|>", "[gMASK]", "<sop>", *roles), CONTROL)
    expected = {"<|endoftext|>", "<|user|>", "<|observation|>"}
    assert ends(glm, eos_token_id=258, eot_token_id=262) == expected
    chatglm = dict.fromkeys(("[gMASK]", "sop", *roles), CONTROL)
    tokenizer = load(sentencepiece_metadata(chatglm), "chatglm")
    assert {"<|user|>", "<|observation|>"} <= set(map(tokenizer.token_text, tokenizer.end_tokens))
    assert ends(dict.fromkeys(roles, CONTROL)) == set()


def test_nemotrons_turns_end_where_the_next_one_begins() -> None:
    nemotron = {"</s>": CONTROL, "<extra_id_0>": CONTROL, "<extra_id_1>": CONTROL}
    assert ends(nemotron) == {"</s>", "<extra_id_1>"}
    assert ends({"<extra_id_0>": NORMAL, "<extra_id_1>": NORMAL}) == set()
    hybrid = dict.fromkeys(("</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"), CONTROL)
    assert ends(hybrid, eos_token_id=258) == {"</s>", "<SPECIAL_11>", "<SPECIAL_12>"}


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_function_gemmas_turns_end_where_a_result_begins(kind: int) -> None:
    calling = dict.fromkeys(
        ("<end_of_turn>", "<start_function_call>", "<start_function_response>"), kind
    )
    assert ends(calling) == {"<end_of_turn>", "<start_function_response>"}


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_lagunas_turns_end_as_elements(kind: int) -> None:
    assert ends(dict.fromkeys(("<assistant>", "</assistant>"), kind)) == {"</assistant>"}
    assert ends({"</assistant>": kind}) == set()


def test_minimaxs_end_needs_no_key() -> None:
    assert ends({"[e~[": CONTROL}) == {"[e~["}
    assert ends({"[e~[": NORMAL}) == set()


def test_messages_of_jamba_end() -> None:
    """llama.cpp does not know the token, and its converter states another end."""
    assert ends({"<|bom|>": CONTROL, "<|eom|>": CONTROL}) == {"<|eom|>"}


def test_slash_s_is_ordinary_with_tool_responses_and_as_a_normal_token() -> None:
    assert ends({"</s>": CONTROL}) == {"</s>"}
    assert ends({"</s>": CONTROL, "<|tool_response>": CONTROL}) == {"<|tool_response>"}
    assert ends({"</s>": NORMAL}) == set()


def test_old_llama3_file_without_pre_tokenizer_is_read_as_llama3() -> None:
    special = {"<|begin_of_text|>": CONTROL, "<|end_of_text|>": CONTROL, "<|eot_id|>": CONTROL}
    metadata = byte_level_metadata(special, bos_token_id=258, eos_token_id=259)
    del metadata["tokenizer.ggml.pre"]
    tokenizer = load(metadata, "llama")
    assert tokenizer.end_tokens == {259, 260}
    assert tokenizer.add_bos and tokenizer.encode_document("a") == [258, *tokenizer.encode("a")]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "qwen2"}, False),
        ({"pre": "gpt-2"}, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "qwen2", "add_bos_token": True}, True),
    ],
)
def test_bos_follows_the_file_or_its_pre_tokenizer(keys: dict[str, Any], expected: bool) -> None:
    tokenizer = load(byte_level_metadata({"<bos>": CONTROL}, bos_token_id=258, **keys))
    assert tokenizer.add_bos is expected
    assert tokenizer.encode_document("he") == ([258, 256] if expected else [256])


def test_prompt_with_bos_gets_no_second_one() -> None:
    tokenizer = load(sentencepiece_metadata({}))
    assert tokenizer.encode_document("<s>") == tokenizer.encode_document("") == [1]
    assert tokenizer.encode_document("<s>he") == tokenizer.encode_document("he")
    assert tokenizer.encode_document("<s><s>he").count(1) == 1


@pytest.mark.parametrize(("ends", "count"), [(True, 1), (False, 2)])
def test_documents_with_eos_get_no_second_one_and_others_keep_theirs(
    ends: bool, count: int
) -> None:
    tokenizer = load(sentencepiece_metadata({}, add_eos_token=ends))
    assert tokenizer.encode_document("he</s></s>").count(2) == count


def test_file_without_a_bos_token_gets_none() -> None:
    tokenizer = load(byte_level_metadata(CHATML, pre="llama-bpe"))
    assert tokenizer.bos_id is None and not tokenizer.add_bos
    assert tokenizer.encode_document("he") == [256]


def test_longest_special_token_wins() -> None:
    special = {"<a>": CONTROL, "<a><b>": CONTROL, "<b>": CONTROL, "<a><b><c>": USER_DEFINED}
    tokenizer = load(byte_level_metadata(special))
    texts = [
        tokenizer.token_text(t)
        for t in tokenizer.encode("<b><a><b><a><b><c><a>", parse_special=True)
    ]
    assert texts == ["<b>", "<a><b>", "<a><b><c>", "<a>"]


def test_user_defined_tokens_are_found_in_ordinary_text() -> None:
    tokenizer = load(byte_level_metadata({"<think>": USER_DEFINED, "<|im_end|>": USER_DEFINED}))
    assert tokenizer.encode("he<think>") == [256, 258]
    assert 259 not in tokenizer.encode("<|im_end|>")  # a control token, whatever its type says
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [259]


def test_padding_rows_are_never_encoded() -> None:
    tokenizer = load(byte_level_metadata({"[PAD258]": USER_DEFINED}))
    assert 258 not in tokenizer.encode("[PAD258]", parse_special=True)


def test_token_bytes_may_be_half_a_character() -> None:
    tokenizer = load(byte_level_metadata({}))
    tokens = tokenizer.encode("é👍")
    assert [tokenizer.token_bytes(token) for token in tokens] == [
        bytes([byte]) for byte in "é👍".encode()
    ]
    assert tokenizer.decode(tokens) == "é👍"
    assert tokenizer.token_text(tokens[0]) == "�"


def test_control_and_unused_tokens_have_a_name_but_no_bytes() -> None:
    special = {"<|im_end|>": CONTROL, "<gone>": UNUSED, "<think>": USER_DEFINED}
    tokenizer = load(byte_level_metadata(special))
    assert [tokenizer.token_bytes(token) for token in (258, 259, 260)] == [b"", b"", b"<think>"]
    assert tokenizer.token_text(258) == "<|im_end|>"
    assert tokenizer.id_of("<|im_end|>") == 258 and tokenizer.id_of("<absent>") is None


def test_user_defined_text_keeps_its_own_bytes_in_byte_level_bpe() -> None:
    tokenizer = load(byte_level_metadata({"a▁Ġb": USER_DEFINED}))
    (token,) = tokenizer.encode("a▁Ġb")
    assert tokenizer.token_bytes(token) == "a▁Ġb".encode()


def test_sentencepiece_tokens_decode_to_spaces_and_raw_bytes() -> None:
    tokenizer = load(sentencepiece_metadata({}))
    tokens = tokenizer.encode("hello é")
    assert [tokenizer.token_text(t) for t in tokens[:3]] == [" he", "ll", "o"]
    assert [tokenizer.token_bytes(t) for t in tokens[-2:]] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(tokens) == " hello é"


def test_space_prefix_is_added_once_at_the_start_and_after_special_tokens() -> None:
    tokenizer = load(sentencepiece_metadata({"<tool>": USER_DEFINED}))

    def names(text: str) -> list[str]:
        return [tokenizer.token_text(t) for t in tokenizer.encode(text, parse_special=True)]

    assert names("he") == [" he"]
    assert names(" he") == [" ", " he"]  # as the library does at the start of a text
    assert names("</s>he") == ["</s>", " he"]
    assert names("</s> he") == ["</s>", " he"]
    assert names("</s>\nhe") == ["</s>", " ", "\n", "he"]  # as transformers' LlamaTokenizer
    assert names("<tool>he</s><tool>") == ["<tool>", " he", "</s>", "<tool>"]


def test_space_prefix_is_left_out_if_the_file_states_so() -> None:
    tokenizer = load(sentencepiece_metadata({}, add_space_prefix=False))
    assert [tokenizer.token_text(t) for t in tokenizer.encode("he he")] == ["he", " he"]


def test_user_defined_run_of_spaces_is_one_sentencepiece_token() -> None:
    for text in ("▁▁▁", "   "):  # converters write either form
        tokenizer = load(sentencepiece_metadata({text: USER_DEFINED}, add_space_prefix=False))
        (token,) = tokenizer.encode("   ")
        assert tokenizer.token_bytes(token) == b"   "


def test_lone_surrogates_become_replacement_characters() -> None:
    for metadata in (byte_level_metadata({}), sentencepiece_metadata({}, add_space_prefix=False)):
        tokenizer = load(metadata)
        assert tokenizer.decode(tokenizer.encode("a\ud83d")) == "a�"
        assert tokenizer.decode(tokenizer.encode("\ud83d\udc4d")) == "👍"


def test_tokens_with_score_0_are_ordinary_in_vocabularies_without_byte_tokens() -> None:
    metadata = sentencepiece_metadata({})
    types, count = metadata["tokenizer.ggml.token_type"], len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = [NORMAL if t == BYTE else t for t in types]
    metadata["tokenizer.ggml.scores"] = [0.0] * count
    assert not read_vocabulary(metadata, architecture="gemma").user_defined


def test_sentencepiece_vocabulary_may_have_duplicate_and_empty_tokens() -> None:
    metadata = sentencepiece_metadata({})
    for text in ("he", "", ""):
        metadata["tokenizer.ggml.tokens"].append(text)
        metadata["tokenizer.ggml.token_type"].append(NORMAL)
        metadata["tokenizer.ggml.scores"].append(0.0)
    tokenizer = load(metadata)
    assert tokenizer.decode(tokenizer.encode("hello")) == " hello"


def test_numeric_arrays_may_be_numpy_arrays() -> None:
    metadata = sentencepiece_metadata({})
    plain = load(metadata).encode("hello é</s>")
    for key, kind in (("scores", np.float32), ("token_type", np.int32)):
        name = f"tokenizer.ggml.{key}"
        metadata[name] = np.array(metadata[name], dtype=kind)
    assert load(metadata).encode("hello é</s>") == plain


def test_known_expression_in_the_file_has_priority_over_the_table() -> None:
    metadata = byte_level_metadata({}, pre="qwen2")
    metadata["tokenizer.ggml.tokens"] += ["12"]
    metadata["tokenizer.ggml.token_type"] += [NORMAL]
    metadata["tokenizer.ggml.merges"] += ["1 2"]
    assert len(load(metadata).encode("12")) == 2
    metadata["tokenizer.ggml.pretokenizer"] = PRE_TOKENIZERS["gpt-2"].expressions[0]
    assert len(load(metadata).encode("12")) == 1


@pytest.mark.parametrize("missing", ["l missing", "missing l", "l o"])
def test_merges_of_tokens_that_the_vocabulary_lacks_have_no_effect(missing: str) -> None:
    metadata = byte_level_metadata({})
    plain = load(metadata).encode("hello")
    metadata["tokenizer.ggml.merges"] = [missing, *metadata["tokenizer.ggml.merges"]]
    assert load(metadata).encode("hello") == plain and len(plain) == 3


def test_pieces_of_any_length_are_valid_protocol_buffers() -> None:
    """Lengths take one, two and three bytes."""
    texts = ["a" * n for n in (2, 98, 99, 100, 117, 118, 119, 127, 128, 16_383, 16_384, 70_000)]
    metadata = sentencepiece_metadata({})
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] += [NORMAL] * len(texts)
    metadata["tokenizer.ggml.scores"] += [-1.5] * len(texts)
    vocabulary = read_vocabulary(metadata)
    scores = metadata["tokenizer.ggml.scores"]
    found = ModelProto.FromString(sentencepiece_bpe._pieces(vocabulary, scores)).pieces
    assert [piece.piece for piece in found[-len(texts) :]] == texts
    assert [piece.score for piece in found] == pytest.approx(scores)
    assert found[vocabulary.ids["a" * 70_000]].type == ModelProto.SentencePiece.NORMAL


@pytest.mark.parametrize("expression", ["(a+)+$", "((((", "."])
def test_unknown_expression_is_refused(expression: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pretokenizer"):
        load(byte_level_metadata({}, pretokenizer=expression))


@pytest.mark.parametrize("key", ["model", "pre", "pretokenizer"])
def test_a_name_that_is_no_text_is_refused(key: str) -> None:
    for value in (7, ["gpt2"], np.array([1, 2])):
        with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{key}` is not a text"):
            load(byte_level_metadata({}, **{key: value}))


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_missing_key_is_reported(key: str) -> None:
    metadata = byte_level_metadata({})
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{key}"):
        load(metadata)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"token_type": [1, 1]}, "token_type.*2 entries for 258 tokens"),
        ({"tokens": []}, "tokens.*empty"),
        ({"tokens": [7]}, "tokens.*not text"),
        ({"merges": ["h e", "nonsense"]}, "merges.*entry 1.*nonsense"),
        ({"merges": "h e"}, "merges.*not an array"),
        ({"eos_token_ids": 5}, "eos_token_ids.*not an array"),
        ({"eos_token_id": "x"}, "eos_token_id.*not a token id"),
        ({"add_bos_token": [True]}, "add_bos_token.*not true or false"),
        ({"eos_token_id": float("inf")}, "eos_token_id.*not a token id"),
        ({"bos_token_id": 1.5}, r"bos_token_id.*1\.5.*not a token id"),
        ({"bos_token_id": True}, "bos_token_id.*True.*not a token id"),
        ({"eos_token_ids": [0.5]}, r"eos_token_ids.*0\.5.*not a token id"),
    ],
)
def test_damaged_value_is_reported(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        load(byte_level_metadata({}, **keys))


def test_ids_beyond_the_vocabulary_are_ignored_with_a_warning(caplog) -> None:
    """Some converters write -1, which is 4294967295 in files, for a token that is missing."""
    nothing = 2**32 - 1
    keys = {"bos_token_id": nothing, "eot_token_id": -1, "eos_token_ids": [256, 258, 259]}
    tokenizer = load(byte_level_metadata({}, **keys, add_bos_token=True))
    assert tokenizer.bos_id is None and not tokenizer.add_bos
    assert tokenizer.end_tokens == {256}
    assert [record.getMessage() for record in caplog.records] == [
        "Ignored `tokenizer.ggml.bos_token_id` 4294967295: the vocabulary has 258 tokens.",
        "Ignored `tokenizer.ggml.eot_token_id` -1: the vocabulary has 258 tokens.",
        "Ignored `tokenizer.ggml.eos_token_ids` 258: the vocabulary has 258 tokens.",
    ]


def test_a_role_whose_id_is_beyond_the_vocabulary_is_found_by_its_text() -> None:
    tokenizer = load(sentencepiece_metadata({}, eos_token_id=9999), "llama")
    assert tokenizer.eos_id == 2


def test_without_types_only_roles_and_control_texts_are_special() -> None:
    special = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "[END]": CONTROL, "[x]": CONTROL}
    metadata = byte_level_metadata(special)
    end = metadata["tokenizer.ggml.tokens"].index("[END]")
    metadata["tokenizer.ggml.eos_token_id"] = end
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = load(metadata)
    assert set(tokenizer.vocabulary.control) == {"<|im_start|>", "<|im_end|>", "[END]"}
    assert tokenizer.end_tokens == {end, tokenizer.id_of("<|im_end|>")}
    assert tokenizer.decode(tokenizer.encode("hello [x]<|im_end|>")) == "hello [x]<|im_end|>"


def test_sentencepiece_requires_types() -> None:
    metadata = sentencepiece_metadata({})
    del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.token_type"):
        load(metadata)


def test_sentencepiece_needs_one_score_for_each_token() -> None:
    metadata = sentencepiece_metadata({})
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores"):
        load(metadata)
    with pytest.raises(ModelFileError, match=r"scores.*1 entries"):
        load(sentencepiece_metadata({}, scores=[0.0]))
    for wrong in ("much", float("nan")):
        scores = [wrong] * len(metadata["tokenizer.ggml.tokens"])
        with pytest.raises(ModelFileError, match=r"scores.*not a number"):
            load(sentencepiece_metadata({}, scores=scores))


def test_tokens_of_xverse_without_scores_are_in_the_order_of_merges() -> None:
    metadata = sentencepiece_metadata({"el": NORMAL})
    del metadata["tokenizer.ggml.scores"]
    tokenizer = load(metadata, architecture="xverse")
    pieces = ("▁he", "ll", "o", "▁", "e", "ll")  # `ll` merges before `el`
    assert tokenizer.encode("hello ell") == [tokenizer.id_of(piece) for piece in pieces]


def test_a_byte_token_of_another_text_is_none() -> None:
    """As llama.cpp's converter writes the zero byte of XVERSE."""
    metadata = sentencepiece_metadata({"<b'\\x00'>": BYTE})
    tokenizer = load(metadata)
    of_bytes = [tokenizer.id_of(f"<0x{value:02X}>") for value in "é".encode()]
    assert tokenizer.encode("hé") == [*tokenizer.encode("h"), *of_bytes]
    kinds = metadata["tokenizer.ggml.token_type"]
    without = [UNUSED if kind == BYTE and id < 259 else kind for id, kind in enumerate(kinds)]
    tokenizer = load(metadata | {"tokenizer.ggml.token_type": without})
    assert tokenizer.encode("hé") == [*tokenizer.encode("h"), tokenizer.id_of("<unk>")]


@pytest.mark.parametrize(("key", "value"), [("model", "unheard"), ("pre", "unheard")])
def test_unsupported_kinds_are_refused(key: str, value: str) -> None:
    with pytest.raises(UnsupportedModelError, match=value):
        load(byte_level_metadata({}, **{key: value}))
