"""The 128k vocabulary of the benchmark model: Llama 3's if available, else a synthetic one."""

import itertools
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter, TokenType

from tools.reference_data import folders

SIZE = 128256
REAL_FILE = "vocab/ggml-vocab-llama-bpe.gguf"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary of byte-level BPE. `is_text` [size] bool: whether a token is plain ASCII
    text."""

    name: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int
    eos: int

    @property
    def is_text(self) -> np.ndarray:
        return np.array(
            [
                kind == TokenType.NORMAL and set(token) <= PLAIN
                for token, kind in zip(self.tokens, self.types, strict=True)
            ]
        )


PLAIN = set(string.ascii_letters + string.digits + "Ġ.,")


def find_vocabulary() -> Vocabulary:
    """Llama 3's vocabulary from the reference data (`make reference-data`), else a synthetic one of
    the same size."""
    for folder in folders():
        if (path := folder / REAL_FILE).exists():
            return read_vocabulary(path)
    return synthetic_vocabulary()


def read_vocabulary(path: Path) -> Vocabulary:
    fields = GGUFReader(path).fields

    def value(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    return Vocabulary(
        "llama-bpe",
        value("tokens"),
        value("token_type"),
        value("merges"),
        value("bos_token_id"),
        value("eos_token_id"),
    )


def synthetic_vocabulary() -> Vocabulary:
    """A vocabulary of 256 bytes, all pairs of lower-case letters, pairs of these pairs, and 256
    control tokens."""
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]
    fours = itertools.product(pairs, repeat=2)
    count = SIZE - 256 - 256 - len(pairs)
    chosen = list(itertools.islice(fours, count))
    tokens = [*_byte_symbols(), *pairs, *("".join(four) for four in chosen)]
    merges = [*(" ".join(pair) for pair in pairs), *(" ".join(four) for four in chosen)]
    control = [f"<|control_{index}|>" for index in range(256)]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(control)
    return Vocabulary(
        "synthetic", tokens + control, [int(t) for t in types], merges, len(tokens), len(tokens) + 1
    )


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = (chr(256 + index) for index in itertools.count())
    return [chr(byte) if byte in kept else next(moved) for byte in range(256)]


def write_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
