"""Small valid model files to mutate: each kind of tokenizer, many special tokens, and experts."""

from pathlib import Path
from typing import Any

from transformers import MixtralConfig

from tests.fuzz.token_families import FAMILIES
from tests.gguf_files import rewrite
from tests.tiny_models import TinyLlama, write_tiny, write_tiny_llama
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import (
    CONTROL,
    USER_DEFINED,
    byte_level_metadata,
    sentencepiece_metadata,
)

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SIZES = TinyLlama(hidden=32, layers=1, heads=2, kv_heads=1, feed_forward=32, context=64)
_EXPERTS = MixtralConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=32,
    num_local_experts=3,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)
_ROLES = "bos_token_id eos_token_id eos_token_ids eot_token_id padding_token_id".split()
_NO_ROLES = {f"tokenizer.ggml.{role}": None for role in _ROLES}
_SPECIAL = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}
_SCORES = sentencepiece_metadata(_SPECIAL)["tokenizer.ggml.scores"]
_CHARSMAP = [*(0, 4, 0, 0), *[0] * 1024, 0]  # a trie of 256 nodes without replacements
_WORDPIECES = "[PAD] [UNK] [CLS] [SEP] ▁he ▁hello ll o ▁naive ▁do n ' ▁t".split()


def seed_files(folder: Path) -> list[bytes]:
    """The bytes of each file; all of them load."""
    trained = folder / "trained.gguf"
    write_tiny_llama(trained, config=_SIZES, type="Q4_0")
    vocabularies = {
        "byte-level": byte_level_metadata(
            _SPECIAL, bos_token_id=None, eos_token_id=None, pretokenizer=QWEN2
        ),
        "sentencepiece": sentencepiece_metadata(_SPECIAL) | {"tokenizer.ggml.merges": None},
        "gemma": _with_bytes("gemma4", merges=["h e", "▁ he", "l l"]),
        "unigram": _with_bytes("t5", scores=_SCORES, precompiled_charsmap=_CHARSMAP, merges=None),
        "words": _with_bytes("gpt2", pre="whitespace", merges=["h e", "l l"]),
        "many tokens": _with_many_tokens([*FAMILIES[0], *FAMILIES[1]], CONTROL),
        "long common prefixes": _with_many_tokens(FAMILIES[2], USER_DEFINED),
        "wordpiece": _vocabulary("bert", _WORDPIECES, [3, 2, 3, 3, *[1] * 9], merges=None),
    }
    experts = folder / "experts.gguf"
    write_tiny(experts, _EXPERTS, type="q8_0")
    paths = [trained, experts]
    for name, keys in vocabularies.items():
        paths.append(rewrite(trained, folder / f"{name}.gguf", keys=_NO_ROLES | keys))
    return [path.read_bytes() for path in paths]


def _with_many_tokens(texts: list[str], kind: int) -> dict[str, Any]:
    special = _SPECIAL | dict.fromkeys(texts, kind)
    return byte_level_metadata(special, bos_token_id=None, eos_token_id=None)


def _with_bytes(model: str, **keys: Any) -> dict[str, Any]:
    base = sentencepiece_metadata(_SPECIAL)
    tokens, types = base["tokenizer.ggml.tokens"], base["tokenizer.ggml.token_type"]
    return _vocabulary(model, tokens, types, **keys)


def _vocabulary(model: str, tokens: list[str], types: list[int], **keys: Any) -> dict[str, Any]:
    metadata = {"model": model, "tokens": tokens, "token_type": types} | keys
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
