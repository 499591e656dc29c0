"""The tokens of bad words: at least those that vLLM chooses, and only those that spell them."""

import pytest
import torch

from model_zoo.registry import load
from runtime.errors import RequestError
from serve_app.replica.sampling_words import bad_word_tokens
from tests.checkout import DEMO_MODEL
from tests.families.engine_runs import CPU

WORDS = ["sea", " sea", "picture", "one", "Please", "no picture", "<|im_end|>", "Σχήμα", "sea"]


def by_vllm(tokenizer, words: list[str]) -> list[tuple[int, ...]]:
    """`SamplingParams.update_from_tokenizer`."""
    found: list[tuple[int, ...]] = []
    for word in dict.fromkeys(words):
        for prefix in ("", " "):
            ids = tuple(tokenizer.encode(prefix + word.lstrip(), parse_special=True))
            if not prefix or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


def test_words_have_their_tokens_with_and_without_a_space() -> None:
    tokenizer = load(DEMO_MODEL, device=CPU, dtype=torch.float32).tokenizer
    found = bad_word_tokens(tokenizer, WORDS)
    assert set(by_vllm(tokenizer, WORDS)) < set(found)
    spelled = {tokenizer.spell(ids).lstrip() for ids in found}
    assert spelled == {word.lstrip() for word in WORDS}
    assert len(found) == 2 * 7


class Wordless:
    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return []


def test_a_word_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match='"bad_words" has the word "a", which has no tokens'):
        bad_word_tokens(Wordless(), ["a"])  # type: ignore[arg-type]
