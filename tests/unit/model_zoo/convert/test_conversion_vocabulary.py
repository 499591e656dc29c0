"""Tokenizers of checkpoints: the converted file's tokenizer gives the same tokens."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from model_zoo.convert.configuration import Configuration
from model_zoo.convert.vocabularies.choice import tokenizer_keys
from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.tokenizers.pretokenizers import PRE_TOKENIZERS
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from model_zoo.tokenizers.vocabulary import TokenType
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.reference_data import vocabulary_metadata

SENTENCES = (
    "The quick brown fox says hello to the lazy dog and the user",
    "Straße, naïve, Ångström: 12345 items cost 3.14 £, don't they? We'll see!",
    "def add(a, b):\n    return a + b  # двадцать один\n\n\t東京 и Москва\r\n",
)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LINES = pre_tokenizers.Split(Regex(r"(?:\r?\n)+(?!\r?\n)"), "merged_with_next")
TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(" ".join(SENTENCES).split(" ")), max_size=9
).map(" ".join)


def metadata_of(
    folder: Path, *, config: Any = None, architecture: str = "llama", kind: str | None = None
) -> dict[str, Any]:
    """The keys, with one embedding row per token."""
    files = TokenizerFiles(folder, Configuration(config or {}, path=folder / "config.json"))
    rows = 1 + max(
        [*files.added_tokens(), *(files.model.get("vocab") or {}).values(), 0]
        if files.json
        else [0]
    )
    if not files.json:
        rows = sentencepiece.SentencePieceProcessor(str(files.sentencepiece)).vocab_size()
    return tokenizer_keys(files, architecture=architecture, rows=rows, kind=kind)


def saved(folder: Path, native: NativeTokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=native, **settings)
    tokenizer.save_pretrained(folder)
    return tokenizer


def assert_alike(ours: Tokenizer, theirs: Any, *, first: str = "") -> None:
    @settings(max_examples=100)
    @given(TEXTS)
    def check(text: str) -> None:
        # Ours never encodes text to control tokens. Hypothesis tries constants of the code, too.
        assume(not any(token in text for token in ours.vocabulary.control))
        expected = theirs.encode(first + text, add_special_tokens=False)
        assert ours.encode(first + text) == getattr(expected, "ids", expected), text

    check()


def split(step: Any) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step


def byte_level(
    expressions: tuple[str, ...], *, whole_pieces: bool = False, nfc: bool = False
) -> NativeTokenizer:
    native = NativeTokenizer(BPE(ignore_merges=whole_pieces))
    if nfc:
        native.normalizer = normalizers.NFC()
    native.pre_tokenizer = pre_tokenizers.Sequence([*map(split, expressions), BYTES])
    native.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    native.train_from_iterator(SENTENCES * 3, trainer)
    native.add_special_tokens([AddedToken("<|first|>", special=True)])
    native.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return native


@pytest.mark.parametrize(
    "name",
    "llama-bpe qwen2 deepseek-r1-qwen command-r tekken gpt-4o gpt-2 deepseek-llm tiny_aya"
    " superbpe youtu".split(),
)
def test_byte_level_tokens_match_the_checkpoint(name: str, tmp_path) -> None:
    row = PRE_TOKENIZERS[name]
    native = byte_level(row.expressions, whole_pieces=row.whole_pieces, nfc=row.nfc)
    theirs = saved(tmp_path, native)
    keys = metadata_of(tmp_path, architecture="qwen3")
    assert PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]] == row
    ours = load_tokenizer(keys, architecture="qwen3")
    assert_alike(ours, theirs)
    assert ours.encode("a <tool> e\u0301") == theirs.encode("a <tool> e\u0301")
    assert ours.vocabulary.types[ours.id_of("<|first|>")] == TokenType.CONTROL
    assert ours.vocabulary.types[ours.id_of("<tool>")] == TokenType.USER_DEFINED


@pytest.mark.parametrize(
    "name, steps",
    [
        ("smollm", [DIGITS, GPT2]),
        # As published; the table has the same characters as code points and ranges.
        (
            "falcon",
            [
                pre_tokenizers.Punctuation("contiguous"),
                GPT2,
                pre_tokenizers.Digits(individual_digits=False),
                "[0-9][0-9][0-9]",
            ],
        ),
        (
            "deepseek-coder",
            [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", DIGITS, BYTES],
        ),
        (
            "deepseek-v3",
            [
                r"\p{N}{1,3}",
                "[一-龥\u3040-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
                r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+",
                BYTES,
            ],
        ),
        ("laguna", [LINES, *PRE_TOKENIZERS["qwen2"].expressions, BYTES]),
    ],
)
def test_steps_are_recognised_in_any_spelling(name, steps, tmp_path) -> None:
    native = byte_level(())
    native.pre_tokenizer = pre_tokenizers.Sequence([split(step) for step in steps])
    theirs = saved(tmp_path, native)
    keys = metadata_of(tmp_path)
    assert PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]] == PRE_TOKENIZERS[name]
    assert_alike(load_tokenizer(keys, architecture="llama"), theirs)


def test_the_architecture_selects_among_rows_with_the_same_expression(tmp_path) -> None:
    saved(tmp_path, byte_level(PRE_TOKENIZERS["llama4"].expressions))
    named = {
        architecture: metadata_of(tmp_path, architecture=architecture)["tokenizer.ggml.pre"]
        for architecture in ("llama4", "gpt-oss", "qwen3")
    }
    assert named == {"llama4": "llama4", "gpt-oss": "gpt-4o", "qwen3": "gpt-4o"}


def test_an_unknown_pre_tokenizer_is_refused(tmp_path) -> None:
    saved(tmp_path, byte_level((r"\p{L}{1,3}",)))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer.json: splits text by '\\\\p\{L\}"):
        metadata_of(tmp_path)
    native = byte_level(())
    native.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
    )
    saved(tmp_path, native)
    with pytest.raises(UnsupportedModelError, match="a step Whitespace that is not supported"):
        metadata_of(tmp_path)


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        control_symbols=["<turn>"],
        minloglevel=2,
    )
    return model.getvalue()


def test_a_sentencepiece_model_keeps_its_pieces_scores_and_types(
    sentencepiece_model, tmp_path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    keys = metadata_of(tmp_path)
    assert keys["tokenizer.ggml.tokens"] == [theirs.id_to_piece(i) for i in range(len(theirs))]
    assert keys["tokenizer.ggml.scores"] == [theirs.get_score(i) for i in range(len(theirs))]
    ours = load_tokenizer(keys, architecture="llama")
    kinds = {text: ours.vocabulary.types[ours.id_of(text)] for text in ("<unk>", "<s>", "<turn>")}
    assert list(kinds.values()) == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    assert ours.vocabulary.types[ours.id_of("<0x0A>")] == TokenType.BYTE

    @settings(max_examples=100)
    @given(TEXTS)
    def check(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text)

    check()


@pytest.mark.parametrize("stated", [True, False])
def test_the_settings_decide_on_the_prefix_space_of_a_model_file(
    stated, sentencepiece_model, tmp_path
) -> None:
    model = ModelProto.FromString(sentencepiece_model)
    model.normalizer_spec.add_dummy_prefix = not stated
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    key = "tokenizer.ggml.add_space_prefix"
    assert metadata_of(tmp_path)[key] is not stated
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": stated}))
    assert metadata_of(tmp_path)[key] is stated
    vocabulary = {piece.piece: id for id, piece in enumerate(model.pieces)}
    scheme = {"type": "Metaspace", "prepend_scheme": "never" if stated else "first"}
    whole = {"model": {"type": "BPE", "vocab": vocabulary}, "pre_tokenizer": scheme}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert metadata_of(tmp_path)[key] is not stated


@pytest.mark.parametrize("family", [LlamaTokenizer, GemmaTokenizer], ids=lambda c: c.__name__)
def test_a_sentencepiece_model_converted_by_transformers_gives_the_same_tokens(
    family, sentencepiece_model, tmp_path
) -> None:
    """Only Llama adds a prefix space, unless the text begins with one."""
    source = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    pieces = {source.id_to_piece(i): i for i in range(len(source))}
    scores = {text: source.get_score(i) for text, i in pieces.items()}
    theirs = family(vocab=pieces, merges=generate_merges(pieces, scores))
    theirs.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.model").exists()
    keys = metadata_of(tmp_path)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is (family is LlamaTokenizer)
    assert keys["tokenizer.ggml.add_bos_token"] is (theirs.encode("a")[0] == theirs.bos_token_id)
    assert_alike(load_tokenizer(keys, architecture="llama"), theirs, first="x")


def test_merges_that_scores_cannot_represent_are_refused(tmp_path) -> None:
    vocabulary = {text: i for i, text in enumerate(["<unk>", "a", "b", "c", "ab", "bc", "abc"])}
    merges = [("a", "b"), ("b", "c"), ("ab", "c")]  # not a with bc
    native = NativeTokenizer(BPE(vocabulary, merges, unk_token="<unk>"))
    native.normalizer = normalizers.Replace(" ", "▁")
    saved(tmp_path, native)
    with pytest.raises(UnsupportedModelError, match="they lack 'a' with 'bc'"):
        metadata_of(tmp_path)
    ranked = metadata_of(tmp_path, kind="gemma4")
    assert ranked["tokenizer.ggml.model"] == "gemma4"
    assert ranked["tokenizer.ggml.merges"] == ["a b", "b c", "ab c"]


def test_wordpieces_match_the_checkpoint(tmp_path) -> None:
    native = NativeTokenizer(WordPiece(unk_token="[UNK]"))
    native.normalizer = normalizers.BertNormalizer(lowercase=True)
    native.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    native.train_from_iterator(SENTENCES * 3, trainer)
    native.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    theirs = saved(
        tmp_path,
        native,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    keys = metadata_of(tmp_path, architecture="bert")
    roles = {key: keys[f"tokenizer.ggml.{key}_token_id"] for key in ("cls", "seperator", "mask")}
    assert roles == {"cls": 2, "seperator": 3, "mask": 4}
    assert keys["tokenizer.ggml.add_bos_token"] and keys["tokenizer.ggml.add_eos_token"]
    assert_alike(load_tokenizer(keys, architecture="bert"), theirs)


def test_published_vocabularies_match_other_converters(tmp_path) -> None:
    published = vocabulary_metadata("qwen2")
    ids = {text: i for i, text in enumerate(published["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in published["tokenizer.ggml.merges"]]
    Qwen2Tokenizer(vocab=ids, merges=merges).save_pretrained(tmp_path)
    keys = metadata_of(tmp_path, architecture="qwen2")
    assert keys["tokenizer.ggml.pre"] == published["tokenizer.ggml.pre"] == "qwen2"
    for name in ("tokens", "merges"):
        key = f"tokenizer.ggml.{name}"
        assert list(keys[key]) == list(published[key])


def test_a_published_sentencepiece_vocabulary_survives_conversion_by_merges(tmp_path) -> None:
    published = vocabulary_metadata("llama-spm")
    tokens, types = published["tokenizer.ggml.tokens"], published["tokenizer.ggml.token_type"]
    ids = {text: i for i, text in enumerate(tokens)}
    scores = dict(zip(tokens, published["tokenizer.ggml.scores"], strict=True))
    skipped = [text for text, kind in zip(tokens, types, strict=True) if kind != 1]
    theirs = LlamaTokenizer(vocab=ids, merges=generate_merges(ids, scores, skipped), legacy=False)
    theirs.save_pretrained(tmp_path)
    keys = metadata_of(tmp_path)
    assert list(keys["tokenizer.ggml.tokens"]) == list(tokens)
    assert list(keys["tokenizer.ggml.token_type"]) == list(types)
    assert_alike(load_tokenizer(keys, architecture="llama"), theirs, first="x")


def test_the_vocabulary_is_cut_and_padded_to_the_rows_of_the_embedding(tmp_path) -> None:
    saved(tmp_path, byte_level(PRE_TOKENIZERS["qwen2"].expressions))
    files = TokenizerFiles(tmp_path, Configuration({}, path=tmp_path / "config.json"))
    known = 1 + max(files.added_tokens())
    more = tokenizer_keys(files, architecture="qwen2", rows=known + 2, kind=None)
    assert more["tokenizer.ggml.tokens"][known:] == [f"[PAD{known}]", f"[PAD{known + 1}]"]
    assert more["tokenizer.ggml.token_type"][known:] == [TokenType.UNUSED] * 2
    less = tokenizer_keys(files, architecture="qwen2", rows=known - 1, kind=None)
    assert "<tool>" not in less["tokenizer.ggml.tokens"]
    assert len(less["tokenizer.ggml.token_type"]) == known - 1


def test_roles_come_from_the_settings_and_end_tokens_from_the_generation_settings(tmp_path) -> None:
    native = byte_level(PRE_TOKENIZERS["llama-bpe"].expressions, whole_pieces=True)
    names = ["<|begin|>", "<|eot_id|>", "<|eom_id|>", "<|pad|>"]
    native.add_special_tokens([AddedToken(name, special=True) for name in names])
    ids = {name: native.token_to_id(name) for name in names}
    native.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A", special_tokens=[("<|begin|>", ids["<|begin|>"])]
            ),
        ]
    )
    saved(tmp_path, native, bos_token="<|begin|>", eos_token="<|eot_id|>")
    ends = [ids["<|eom_id|>"], ids["<|eot_id|>"], 10**6]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    keys = metadata_of(tmp_path, config={"pad_token_id": ids["<|pad|>"], "eos_token_id": 5})
    found = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()}
    assert found["bos_token_id"] == ids["<|begin|>"]
    assert found["eos_token_id"] == found["eot_token_id"] == ids["<|eot_id|>"]
    assert found["eom_token_id"] == ids["<|eom_id|>"]
    assert found["padding_token_id"] == ids["<|pad|>"]
    assert found["eos_token_ids"] == ends[:2]
    assert found["add_bos_token"] is True and found["add_eos_token"] is False
    ours = load_tokenizer(keys, architecture="llama")
    assert set(ends[:2]) <= ours.end_tokens


@pytest.mark.parametrize(
    "generation, config, eot, eom",
    [
        (["<|endoftext|>", "<|user|>", "<|observation|>"], {}, "<|user|>", "<|observation|>"),
        (["<|user|>", "<|im_end|>"], {}, "<|im_end|>", "<|user|>"),
        (["<|endoftext|>"], {"eod_token_id": "<|user|>"}, "<|user|>", None),
        (["<|endoftext|>"], {}, None, None),
    ],
)
def test_further_end_tokens_get_the_keys_that_every_reader_knows(
    generation, config, eot, eom, tmp_path
) -> None:
    names = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    names += sorted({*generation} - {*names})
    native = byte_level(PRE_TOKENIZERS["qwen2"].expressions)
    native.add_special_tokens([AddedToken(name, special=True) for name in names])
    ids = {name: native.token_to_id(name) for name in names}
    saved(tmp_path, native, eos_token="<|endoftext|>")
    stated = {"eos_token_id": [ids[name] for name in generation]}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    keys = metadata_of(tmp_path, config={key: ids[name] for key, name in config.items()})
    assert keys["tokenizer.ggml.eos_token_id"] == ids["<|endoftext|>"]
    assert keys.get("tokenizer.ggml.eot_token_id") == ids.get(eot)
    assert keys.get("tokenizer.ggml.eom_token_id") == ids.get(eom)


def test_the_end_of_a_channel_is_not_converted_to_the_end_of_a_turn(tmp_path) -> None:
    names = ["<|end|>", "<|return|>", "<|call|>"]
    native = byte_level(PRE_TOKENIZERS["gpt-4o"].expressions)
    native.add_special_tokens([AddedToken(name, special=True) for name in names])
    saved(tmp_path, native, eos_token="<|return|>")
    ours = load_tokenizer(metadata_of(tmp_path), architecture="gpt-oss")
    assert ours.end_tokens == {native.token_to_id(name) for name in names[1:]}


def test_infill_tokens_get_their_keys(tmp_path) -> None:
    names = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    native = byte_level(PRE_TOKENIZERS["qwen2"].expressions)
    native.add_special_tokens([AddedToken(name, special=True) for name in names])
    saved(tmp_path, native)
    first = native.token_to_id(names[0])
    keys = metadata_of(tmp_path)
    found = {key: value for key, value in keys.items() if "fim" in key}
    expected = {"pre": first, "mid": first + 1, "suf": first + 2}
    assert found == {f"tokenizer.ggml.fim_{key}_token_id": id for key, id in expected.items()}


def test_suppressed_tokens_are_those_of_the_generation_settings(tmp_path) -> None:
    native = byte_level(PRE_TOKENIZERS["qwen2"].expressions)
    saved(tmp_path, native)
    assert "tokenizer.ggml.suppress_tokens" not in metadata_of(tmp_path)
    first, known = native.token_to_id("<|first|>"), native.get_vocab_size()
    settings_file = tmp_path / "generation_config.json"
    for stated, expected in (([known, first, -1, 7], [first, 7]), (None, None), ([], None)):
        settings_file.write_text(json.dumps({"suppress_tokens": stated}))
        assert metadata_of(tmp_path).get("tokenizer.ggml.suppress_tokens") == expected


def test_settings_have_priority_over_the_post_processor(tmp_path) -> None:
    saved(tmp_path, byte_level(PRE_TOKENIZERS["qwen2"].expressions), bos_token="<|first|>")
    settings_file = tmp_path / "tokenizer_config.json"
    stated = json.loads(settings_file.read_text()) | {"add_bos_token": True}
    settings_file.write_text(json.dumps(stated))
    assert metadata_of(tmp_path)["tokenizer.ggml.add_bos_token"] is True


@pytest.mark.parametrize("id", [{}, [], 1 << 20, -1, "1"])
def test_impossible_ids_in_the_post_processor_are_ignored(id, tmp_path) -> None:
    saved(tmp_path, byte_level(PRE_TOKENIZERS["qwen2"].expressions))
    expected = metadata_of(tmp_path)
    path = tmp_path / "tokenizer.json"
    pairs = {"cls": ["<s>", id], "sep": ["</s>", id]}
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"post_processor": {"type": "BertProcessing", **pairs}}
        )
    )
    assert metadata_of(tmp_path) == expected


def test_older_settings_state_roles_as_objects_and_list_added_tokens(tmp_path) -> None:
    native = byte_level(PRE_TOKENIZERS["qwen2"].expressions)
    known = native.get_vocab_size()
    saved(tmp_path, native)
    listed = {str(known): {"content": "<|late|>", "special": True}}
    old = {"eos_token": {"__type": "AddedToken", "content": "<|late|>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(old | {"added_tokens_decoder": listed})
    )
    keys = metadata_of(tmp_path)
    assert keys["tokenizer.ggml.tokens"][known] == "<|late|>"
    assert keys["tokenizer.ggml.eos_token_id"] == known
    assert "tokenizer.ggml.bos_token_id" not in keys


def test_templates_are_found_in_all_files(tmp_path) -> None:
    tokenizer = saved(tmp_path, byte_level(PRE_TOKENIZERS["qwen2"].expressions))
    assert "tokenizer.chat_template" not in metadata_of(tmp_path)
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.save_pretrained(tmp_path)
    expected = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "b",
    }
    keys = metadata_of(tmp_path)
    assert {key: keys[key] for key in keys if "chat" in key} == expected
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    keys = metadata_of(tmp_path)
    assert {key: keys[key] for key in keys if "chat" in key} == expected
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "c"}))
    assert metadata_of(tmp_path)["tokenizer.chat_template"] == "c"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "of the kind Unigram cannot be converted"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "has no vocabulary"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": ["a b"]}}, "'-1' as the id"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}, "as the id of a token"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [[1, 2]]}}, "no pair of texts"),
        ({"added_tokens": [{"content": "x"}]}, "as the id of a token"),
        ({"added_tokens": [{"id": 3}]}, "has an added token without a text"),
    ],
)
def test_damaged_tokenizer_files_are_refused(change, said, tmp_path) -> None:
    saved(tmp_path, byte_level(PRE_TOKENIZERS["qwen2"].expressions))
    whole = json.loads((tmp_path / "tokenizer.json").read_text()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    files = TokenizerFiles(tmp_path, Configuration({}, path=tmp_path / "config.json"))
    with pytest.raises(ModelFileError, match=said):
        tokenizer_keys(files, architecture="llama", rows=400, kind=None)


def test_a_missing_or_invalid_tokenizer_is_refused(tmp_path) -> None:
    files = TokenizerFiles(tmp_path, Configuration({}, path=tmp_path / "config.json"))
    with pytest.raises(ModelFileError, match=r"tokenizer.json: is missing, as is tokenizer.mod"):
        tokenizer_keys(files, architecture="llama", rows=9, kind=None)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff not a model")
    with pytest.raises(ModelFileError, match="is not a SentencePiece model"):
        tokenizer_keys(files, architecture="llama", rows=9, kind=None)
