"""Vocabularies that make searching slow: thousands of special tokens, alike for long."""

from random import Random

from tests.fuzz.pieces import Key, Pieces
from tests.unit.model_zoo.gguf_bytes import STRING, text
from tests.unit.model_zoo.tiny_vocabulary import CONTROL, USER_DEFINED

FAMILIES: tuple[list[str], ...] = (
    [f"<|reserved_special_token_{n}|>" for n in range(600)],
    ["<" * n for n in range(2, 150)],  # each the beginning of the next
    ["<" * 450 + chr(0x4E00 + n) for n in range(100)],  # alike until the last character
    [f"<{chr(0x4E00 + n)}" for n in range(600)],
)
_TOKENS = b"tokenizer.ggml.tokens"
_OF_A_TOKEN = (b"tokenizer.ggml.token_type", b"tokenizer.ggml.scores")
_SHORT, _LONG = 500, 40_000  # characters
_MANY = 50


def crowd(pieces: Pieces, random: Random) -> None:
    """Add a family of tokens; the arrays that have an entry for each token grow with them."""
    by_name = {key.name: key for key in pieces.keys}
    tokens = by_name.get(_TOKENS)
    if tokens is None or tokens.items is None or tokens.item_kind != STRING:
        return
    texts = random.choice(FAMILIES)
    tokens.items += map(text, texts)
    kind = random.choice((CONTROL, USER_DEFINED))
    for name in _OF_A_TOKEN:
        _extend(by_name.get(name), len(texts), kind.to_bytes(4, "little"))


def _extend(key: Key | None, count: int, value: bytes) -> None:
    if key is not None and key.items and len(key.items[0]) == len(value):
        key.items += [value] * count


def long_text(special: list[str]) -> str:
    """Runs of equal characters, the longest of what nearly is the longest special token."""
    nearly = max(special, key=len, default="<|")[:-1] or "<"
    length = _LONG if len(special) > _MANY else _SHORT
    runs = (character * _SHORT for character in "<a \n\u2581\u4e00")
    return "".join(runs) + (nearly * length)[:length]
