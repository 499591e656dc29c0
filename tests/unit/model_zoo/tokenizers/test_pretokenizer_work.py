"""Pre-tokenizers split any text in time in proportion to its length."""

import time

import pytest

from model_zoo.tokenizers.pretokenizers import PRE_TOKENIZERS
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import byte_level_metadata

# One name for each row of the table with other expressions.
NAMES = {(row.expressions, row.on_bytes): name for name, row in PRE_TOKENIZERS.items()}.values()
# A character of each class that the expressions distinguish.
CHARACTERS = " \t\n\xa0aA1²ʰ中\u0301.'/_é😀\u200b"
TAILS = "\na1中.\u200b"
SHORT = 500
# Of quadratic work, four times the text takes up to 16 times the time.
RATIO, ATTEMPTS = 8, 5


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_a_character_takes_linear_time(name: str) -> None:
    tokenizer = load_tokenizer(byte_level_metadata({}, pre=name), architecture="llama")
    for character in CHARACTERS:
        assert any(ratio(tokenizer, character) < RATIO for _ in range(ATTEMPTS)), repr(character)


def ratio(tokenizer: Tokenizer, character: str) -> float:
    """How many times as long runs that are four times as long take, before every tail."""
    short, long = ([f"x{character * size}{tail}" for tail in TAILS] for size in (SHORT, 4 * SHORT))
    return seconds(tokenizer, long) / seconds(tokenizer, short)


def seconds(tokenizer: Tokenizer, texts: list[str]) -> float:
    began = time.process_time()
    for text in texts:
        tokenizer.encode(text)
    return time.process_time() - began
