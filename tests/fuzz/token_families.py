"""Special tokens that make searching slow: hundreds of texts with long common prefixes."""

from random import Random

from tests.fuzz.parsed_file import Key, ParsedFile
from tests.unit.model_zoo.gguf.gguf_bytes import STRING, text
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, USER_DEFINED

FAMILIES: tuple[list[str], ...] = (
    [f"<|reserved_special_token_{n}|>" for n in range(600)],
    ["<" * n for n in range(2, 150)],  # each is a prefix of the next
    ["<" * 450 + chr(0x4E00 + n) for n in range(100)],  # differ in the last character only
    [f"<{chr(0x4E00 + n)}" for n in range(600)],
)
_TOKENS = b"tokenizer.ggml.tokens"
_OF_A_TOKEN = (b"tokenizer.ggml.token_type", b"tokenizer.ggml.scores")
_SHORT, _LONG = 500, 40_000  # characters of a run
_MANY = 50


def add_tokens(file: ParsedFile, random: Random) -> None:
    """Adds one family of tokens, with entries in the arrays that have one per token."""
    by_name = {key.name: key for key in file.keys}
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
    """Runs of equal characters, then repetitions of the longest special token less its last one."""
    nearly = max(special, key=len, default="<|")[:-1] or "<"
    length = _LONG if len(special) > _MANY else _SHORT
    runs = (character * _SHORT for character in "<a \n\u2581\u4e00")
    return "".join(runs) + (nearly * length)[:length]
