"""Where text is cut before merging, against each family's published definition."""

import re
import unicodedata

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from model_zoo.tokenizers.byte_level import splitter
from model_zoo.tokenizers.pretokenizers import PRE_TOKENIZERS
from model_zoo.tokenizers.tokenizer import load_tokenizer
from tests.parity.chat.random_texts import random_texts

GPT2 = ByteLevel(add_prefix_space=False)
BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]
GPT4O = GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤ"
    "Ⳬ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def split(*expressions: str) -> PreTokenizer:
    """As tokenizer.json files say it: expressions in turn, each isolating what it finds."""
    return Sequence([*(Split(Regex(e), "isolated") for e in expressions), BYTES])


# The `pre_tokenizer` of each family's tokenizer.json, where it is not one expression that
# transformers lists by the same name.
DIGITS_THEN_GPT2 = Sequence([Digits(individual_digits=True), GPT2])
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
SHARED = {
    "gpt-2 default phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
    "modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe": GPT2,
    "refact starcoder command-r smollm codeshell exaone minerva-7b mellum2": DIGITS_THEN_GPT2,
    "chatglm-bpe glm4 glm5": split(LLAMA3),
    "stablelm2 hunyuan solar-open grok-2": Qwen2Tokenizer().backend_tokenizer.pre_tokenizer,
    "bloom poro-chat gpt3-finnish": split(BLOOM),
    "viking": Sequence([Split(Regex(BLOOM), "isolated"), Digits(individual_digits=True), BYTES]),
    "falcon": Sequence(
        [
            Punctuation("contiguous"),
            GPT2,
            Digits(individual_digits=False),
            Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "deepseek-coder": Sequence(
        [
            Split(Regex("[\r\n]"), "isolated"),
            Split(Regex("\\s?\\p{L}+"), "isolated"),
            Split(Regex("\\s?\\p{P}+"), "isolated"),
            Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"),
            Digits(individual_digits=True),
            BYTES,
        ]
    ),
    "deepseek-llm": Sequence(
        [
            Split(Regex("[\r\n]"), "isolated"),
            Split(Regex(f"\\s?[{CASED}]+"), "isolated"),
            Split(Regex("\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"), "isolated"),
            Split(Regex("\\s+$"), "isolated"),
            Split(Regex("[一-龥ࠀ-一가-\ud7ff]+"), "isolated"),
            Digits(individual_digits=True),
            BYTES,
        ]
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": split(
        "\\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    # llama.cpp isolates line breaks, which separates them from a carriage return behind them.
    "laguna": Sequence(
        [
            Split(Regex("(?:\r?\n)+(?!\r?\n)"), "merged_with_next"),
            split(
                "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
                "| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            ),
        ]
    ),
    "bailingmoe bailingmoe2 llada-moe": split(
        "'(?i:[sdmt]|ll|ve|re)|[^\r\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\r\n]*"
        "|\\s*[\r\n]|\\s+(?!\\S)|\\s+"
    ),
    "exaone-moe": split(
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+"
        "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\r\n/]?|\\s*[\r\n]|\\s+(?!\\S)|\\s+"
    ),
    "kimi-k2": split(
        "[\\p{Han}]+"
        "|[^\r\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*"
        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        "|[^\r\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+"
        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
    # As in llama.cpp.
    "jais-2": split(
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
        "| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s{512}(?!\\S)|\\s{256}(?!\\S)"
        "|\\s{128}(?!\\S)|\\s{64}(?!\\S)|\\s{32}(?!\\S)|\\s{16}(?!\\S)|\\s{8}(?!\\S)"
        "|\\s{4}(?!\\S)|\\s{1,2}(?!\\S)|\\s{1}"
    ),
    "youtu": split(
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
        "[^\r\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+"
        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\r\n/]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "minicpm5": split(
        "\\p{N}{1,3}",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}+"
        "| ?[^\\s\\p{L}\\p{N}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    # As in llama.cpp.
    "granite-embed-multi-97m": split(GPT4O),
    # Of Trinity: decimal digits in threes from the right, then each script by itself. llama.cpp
    # counts all numbers, joins neighbouring scripts, and does not cut before a number.
    "afmoe": split(
        "\\p{Nd}{1,510}(?=(?>\\p{Nd}{510})*(?:\\P{Nd}|$))|\\G\\p{Nd}{510}",
        "\\A\\p{Nd}{1,2}(?=\\p{Nd}{3}+\\z)",
        "\\A\\p{Nd}{3}|\\G\\p{Nd}{3}",
        "(?:[\\u4E00-\\u9FFF\\u3040-\\u309F\\u30A0-\\u30FF\\u3400-\\u4DBF\\uf900-\\uFAFF\\uFF65-\\uFF9F"
        "\\u2F00-\\u2FDF]+|[\\u0E00-\\u0E7F]+|[\\u0E80-\\u0EFF]+|[\\u1780-\\u17FF]+"
        "|[\\u1000-\\u109F\\uAA60-\\uAA7F\\uA9E0-\\uA9FF]+|[\\uAC00-\\uD7AF\\u1100-\\u11FF]+)",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "tiny_aya cohere2moe": split("\\d{1,3}(?=(?:\\d{3})*\\b)", GPT4O),
    "superbpe": split("\\p{N}+", "(?=(\\d{3})+(?!\\d))"),
    "seed-coder": split(
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}"
        "| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
}
REFERENCES = {name: rule for names, rule in SHARED.items() for name in names.split()} | {
    name: split(expression) for name, expression in GGUF_PRE_TOKENIZER_SPLITS.items()
}


def test_every_row_of_the_table_has_a_reference() -> None:
    assert set(PRE_TOKENIZERS) <= set(REFERENCES)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_text_is_split_as_in_the_library_of_the_family(name: str) -> None:
    subject, reference = splitter(PRE_TOKENIZERS[name]), REFERENCES[name]
    for text in (*random_texts(6, 200), "a\n\r\n \rb\r c\n  d\n\r\r\n"):
        if name == "falcon":
            text = "".join(filter(known_to_falcon, text))
        assert subject.pre_tokenize_str(text) == reference.pre_tokenize_str(text), text


def known_to_falcon(character: str) -> bool:
    """Whether the library's older table of punctuation, which falcon uses, has the character."""
    punctuation = unicodedata.category(character).startswith("P")
    return not punctuation or len(Punctuation().pre_tokenize_str(f"a{character}")) == 2


def test_letters_that_deepseek_lists_are_those_of_its_file() -> None:
    expression = PRE_TOKENIZERS["deepseek-llm"].expressions[1]
    subject, listed = Split(Regex(expression), "isolated"), re.compile(f"[{CASED}]")
    for code in (*range(0x21, 0x3000), *range(0xA000, 0xAC00), *range(0xF900, 0x1F000)):
        character = chr(code)
        joined = len(subject.pre_tokenize_str(f"é{character}")) == 1
        assert joined == (listed.match(character) is not None), hex(code)


@pytest.mark.parametrize("name", "chatglm-bpe glm4 glm5 kimi-k2".split())
def test_pieces_that_are_tokens_are_not_merged(name: str) -> None:
    """Merges do not reach "xyz", as some tokens of GLM, whose tokenizer.json ignores merges of such
    pieces. So does tiktoken, with which the others are published."""
    merges = [("x", "y"), ("y", "z"), ("x", "yz")]
    tokens = [*bytes_to_unicode().values(), *map("".join, merges)]
    model = BPE({text: id for id, text in enumerate(tokens)}, merges, ignore_merges=True)
    reference = NativeTokenizer(model)
    reference.pre_tokenizer = REFERENCES[name]
    merged = [" ".join(pair) for pair in merges]
    metadata = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": merged}
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    subject = load_tokenizer(named, architecture="glm4")
    for text, whole in (("xyz", True), ("yz xyzz", False), (" xyz\nxyz.", True)):
        found = subject.encode(text)
        assert found == reference.encode(text).ids and (tokens.index("xyz") in found) == whole
