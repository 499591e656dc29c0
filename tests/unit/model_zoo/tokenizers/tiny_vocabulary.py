"""Small tokenizer metadata: all bytes, a few merges, and special tokens."""

from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level_metadata(special: dict[str, int], **keys: Any) -> dict[str, Any]:
    """Byte-level BPE in which `he` and `ll` merge; `special`: types by text; `keys`: others."""
    ordinary = [*bytes_to_unicode().values(), "he", "ll"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*ordinary, *special],
        "tokenizer.ggml.token_type": [NORMAL] * len(ordinary) + list(special.values()),
        "tokenizer.ggml.merges": ["h e", "l l"],
    } | _named(keys)


def sentencepiece_metadata(special: dict[str, int], **keys: Any) -> dict[str, Any]:
    """SentencePiece-BPE with byte tokens in which `▁he` and `ll` merge."""
    head = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    byte_tokens = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    letters = {"▁": NORMAL, **dict.fromkeys("abcdefghijklmnopqrstuvwxyz[]/INST", NORMAL)}
    merged = {"he": NORMAL, "▁he": NORMAL, "ll": NORMAL}
    types = {**head, **byte_tokens, **letters, **merged, **special}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": list(types.values()),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(types))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | _named(keys)


def _named(keys: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
