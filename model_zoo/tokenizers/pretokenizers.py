"""A table of the regular expressions that split text before byte-level BPE merges it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model_zoo.families import family_or_defaults
from model_zoo.tokenizers.vocabulary import optional_text, required_array
from runtime.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Expressions applied in sequence, each to the pieces of the previous one.

    `on_bytes`: further expressions for the visible characters that represent bytes.
    `whole_pieces`: a piece that is a vocabulary entry becomes that token, regardless of merges.
    `add_bos`, `add_eos`: defaults for files that do not state them.
    `from_right`: an expression for the digits of which runs are grouped from the right; None if no
    digits are. `across_words`: pieces span words.
    `nfc`: text is brought into Unicode's normal form C first, as by the tokenizer class of the
    family in transformers (llama.cpp keeps it as it is).
    """

    expressions: tuple[str, ...]
    on_bytes: tuple[str, ...] = ()
    whole_pieces: bool = False
    add_bos: bool = False
    add_eos: bool = False
    from_right: str | None = None
    across_words: bool = False
    nfc: bool = False


def _ranges(code_points: str) -> str:
    """Hexadecimal ranges such as `41-5A 61` as the inside of a character class."""
    return re.sub("[0-9A-F]+", r"\\x{\g<0>}", code_points).replace(" ", "")


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALISED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PATH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_TAIL}"
# Of Laguna: line breaks begin pieces, which reach to the next ones.
_LINES = r"(?:\r?\n)+(?!\r?\n)"
# Expressions that isolate what published ones find and merge with what follows.
MERGED_WITH_NEXT: Mapping[str, str] = {_LINES: rf"{_LINES}(?>[^\r\n]+|\r(?!\n))*"}
# Runs of spaces are cut into powers of two.
_SPACE_RUNS = "|".join(rf"\s{{{size}}}(?!\S)" for size in ("512 256 128 64 32 16 8 4 1,2".split()))
_JAIS2 = (
    rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    rf"|{_SPACE_RUNS}|\s{{1}}"
)
_MINICPM5 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = rf"{_CAPITALISED}|{_CAPITALS}|\p{{N}}|{_PATH_TAIL}"
_GPT4O = rf"{_CAPITALISED}{_CONTRACTION}?|{_CAPITALS}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PATH_TAIL}"

_YOUTU = rf"{_CAPITALISED}{_CONTRACTION}?|{_CAPITALS}{_CONTRACTION}?|\p{{N}}|{_PATH_TAIL}"

_HAN_FREE_UPPER, _HAN_FREE_LOWER = (
    rf"{letters.removesuffix(']')}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER)
)
_KIMI_K2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}*{_HAN_FREE_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}+{_HAN_FREE_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL}"
)

_PUNCTUATION = r"[\p{P}$+<=>^`|~]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_IDEOGRAPHS = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# Letters that have a case, as DeepSeek lists them: code points in hexadecimal.
_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386"
    " 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA"
    " 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57"
    " 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB"
    " 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D"
    " 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3"
    " A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A"
    " FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"

# Scripts that are written without spaces, and Hangul, each by itself.
_ASIAN = (
    "4E00-9FFF 3040-30FF 3400-4DBF F900-FAFF FF65-FF9F 2F00-2FDF",  # Chinese and Japanese
    "E00-E7F",  # Thai
    "E80-EFF",  # Lao
    "1780-17FF",  # Khmer
    "1000-109F AA60-AA7F A9E0-A9FF",  # Burmese
    "AC00-D7AF 1100-11FF",
)
# Hangul, full-width and typographic punctuation, Bopomofo, Chinese and Japanese.
_YOUTU_RUNS = "|".join(
    f"[{_ranges(points)}]+"
    for points in (
        "AC00-D7A3 3131-318E",
        "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F",
        "3105-312F",
        "4E00-9FA5 3040-309F 30A0-30FF",
    )
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{_SPACES}"
)

_ROWS: Mapping[PreTokenizer, str] = {
    PreTokenizer((_GPT2,)): (
        "gpt-2 default phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum"
        " jina-es jina-de"
    ),
    PreTokenizer((_GPT2,), nfc=True): "mpt olmo modern-bert",
    PreTokenizer((_GPT2,), add_bos=True, add_eos=True): (
        "jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe"
    ),
    PreTokenizer((_LLAMA3,), whole_pieces=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 pixtral falcon3 falcon-h1 lfm2 midm-2.0 jina-v5-nano"
    ),
    PreTokenizer((_LLAMA3,)): "smaug-bpe dbrx",
    PreTokenizer((_LLAMA3,), whole_pieces=True): "glm4 glm5 chatglm-bpe",
    PreTokenizer((_JAIS2,)): "jais-2",
    PreTokenizer((_QWEN2,), nfc=True): "qwen2",
    PreTokenizer((_QWEN2,)): (
        "deepseek-r1-qwen megrez kormo stablelm2 f2llmv2 hunyuan solar-open grok-2 bailingmoe"
        " bailingmoe2 llada-moe"
    ),
    PreTokenizer((MERGED_WITH_NEXT[_LINES], _QWEN2)): "laguna",
    PreTokenizer((_QWEN35,), nfc=True): "qwen35",
    PreTokenizer((_TEKKEN,), whole_pieces=True, add_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o kanana2 minimax-m2 talkie",
    PreTokenizer((_GPT4O,), whole_pieces=True): "granite-embed-multi-97m",
    PreTokenizer((_GPT4O,), add_bos=True): "llama4",
    PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), from_right=r"\d"): ("tiny_aya cohere2moe"),
    PreTokenizer((_KIMI_K2,), whole_pieces=True): "kimi-k2",
    PreTokenizer((_YOUTU_RUNS, _YOUTU), whole_pieces=True): "youtu",
    PreTokenizer((_SEED_CODER,)): "seed-coder",
    PreTokenizer((r"\p{N}{1,3}", _MINICPM5), whole_pieces=True): "minicpm5",
    PreTokenizer((r"\p{N}", _GPT2), nfc=True): "command-r",
    PreTokenizer((r"\p{N}", _GPT2)): (
        "refact starcoder smollm codeshell exaone minerva-7b mellum2"
    ),
    PreTokenizer((_PUNCTUATION, _GPT2), (r"\p{N}+", "[0-9][0-9][0-9]")): "falcon",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")): "deepseek-coder",
    PreTokenizer((r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", _DEEPSEEK3)): (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4"
    ),
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_ranges(_CASED)}]+",
            rf"\s?[!-/:-~{_ranges('FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
            r"\s+$",
            _IDEOGRAPHS,
            r"\p{N}",
        )
    ): "deepseek-llm",
    PreTokenizer(
        (
            r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))",
            "|".join(f"[{_ranges(script)}]+" for script in _ASIAN),
            _DEEPSEEK3,
        ),
        from_right=r"\p{Nd}",
    ): "afmoe",
    PreTokenizer((_EXAONE_MOE,), across_words=True): "exaone-moe",
    PreTokenizer((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    PreTokenizer((_BLOOM, r"\p{N}")): "viking",
    PreTokenizer(
        (r"\p{N}+", r"(?=(\d{3})+(?!\d))"), from_right=r"\d", across_words=True
    ): "superbpe",
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: row for row, names in _ROWS.items() for name in names.split()
}
# Expressions that split alike, in linear instead of quadratic time, by published ones.
LINEAR: Mapping[str, str] = {r"\s+$": r"(?<!\s)\s+$"}
_KNOWN = frozenset(row.expressions for row in _ROWS)

# Architectures with two vocabularies: whether the tokens are those of the first, its row, and that
# of the other. Phi 4 and Phi 4 mini; StableLM 2 and, with the 50,304 tokens of GPT-NeoX and OLMo,
# StableLM 3B.
_BY_TOKENS: Mapping[str, tuple[Callable[[list[Any]], bool], str, str]] = {
    "phi3": (lambda tokens: "<|im_sep|>" in tokens, "dbrx", "gpt-4o"),
    "stablelm": (lambda tokens: len(tokens) > 60_000, "stablelm2", "olmo"),
}


def choose_pre_tokenizer(metadata: Mapping[str, Any], architecture: str) -> PreTokenizer:
    """The row of the table for this file; a known expression in the file has priority.

    Unknown expressions raise UnsupportedModelError: a crafted one can take hours for a line of
    text.
    """
    name = optional_text(metadata, "tokenizer.ggml.pre") or "default"
    if name == "default" and architecture in _BY_TOKENS:
        is_first, first, other = _BY_TOKENS[architecture]
        name = first if is_first(required_array(metadata, "tokenizer.ggml.tokens")) else other
    elif name == "default":
        name = family_or_defaults(architecture).pre_tokenizer
    expression = optional_text(metadata, "tokenizer.ggml.pretokenizer")
    if expression:
        if (expression,) not in _KNOWN:
            raise UnsupportedModelError(
                "The expression in `tokenizer.ggml.pretokenizer` is none of those that model "
                f"families use: {expression[:80]!r}."
            )
        known = PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["default"])
        return PreTokenizer((expression,), (), known.whole_pieces, known.add_bos, nfc=known.nfc)
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"The pre-tokenizer `{name[:80]}` (`tokenizer.ggml.pre`) is not supported;"
            f" known are {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    return PRE_TOKENIZERS[name]
