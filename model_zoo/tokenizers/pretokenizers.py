"""Which regular expressions split text before byte-level BPE merges it: a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Expressions applied one after the other, each to the pieces of the one before.

    `whole_pieces`: a piece that is a vocabulary entry is taken as it is, whatever the merges say.
    """

    expressions: tuple[str, ...]
    whole_pieces: bool = False
    add_bos: bool = False


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
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = rf"{_CAPITALISED}|{_CAPITALS}|\p{{N}}|{_PATH_TAIL}"
_GPT4O = rf"{_CAPITALISED}{_CONTRACTION}?|{_CAPITALS}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PATH_TAIL}"

_ROWS: Mapping[PreTokenizer, str] = {
    PreTokenizer((_GPT2,)): "gpt-2 default phi-2",
    PreTokenizer((_LLAMA3,), whole_pieces=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 pixtral falcon3 falcon-h1 lfm2 midm-2.0"
    ),
    PreTokenizer((_LLAMA3,)): "smaug-bpe dbrx",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen megrez kormo stablelm2",
    PreTokenizer((_QWEN35,)): "qwen35",
    PreTokenizer((_TEKKEN,), whole_pieces=True, add_bos=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o kanana2 minimax-m2",
    PreTokenizer((_GPT4O,), add_bos=True): "llama4",
    PreTokenizer((r"\p{N}", _GPT2)): "refact starcoder command-r smollm",
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: row for row, names in _ROWS.items() for name in names.split()
}

# Converters that do not know a vocabulary write `default`; the architecture then decides.
_BY_ARCHITECTURE: Mapping[str, str] = {
    "llama": "llama-bpe",
    "mllama": "llama-bpe",
    "llama4": "llama4",
    "mistral3": "tekken",
    "gptoss": "gpt-4o",
    "gpt-oss": "gpt-4o",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen2vl": "qwen2",
    "qwen25vl": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "qwen3vl": "qwen2",
    "qwen3vlmoe": "qwen2",
    "qwen35": "qwen35",
}


def choose_pre_tokenizer(metadata: Mapping[str, Any], architecture: str) -> PreTokenizer:
    """The row for this file; an expression written in the file itself wins."""
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name == "default":
        name = _BY_ARCHITECTURE.get(architecture, "default")
    expression = metadata.get("tokenizer.ggml.pretokenizer")
    if expression:
        known = PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["default"])
        return PreTokenizer((expression,), known.whole_pieces, known.add_bos)
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"The pre-tokenizer `{name}` (`tokenizer.ggml.pre`) is not supported;"
            f" known are {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    return PRE_TOKENIZERS[name]
