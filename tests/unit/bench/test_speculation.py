"""Speeds with and without proposals."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from bench.speculation import GREEDY, AnsweringEngine, Case
from runtime.engine.request import Delta, GenerationRequest


class Engine:
    """The first sequence has all of its tokens before the second one begins."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        for _ in range(20 * int(request.id)):
            await asyncio.sleep(0)
        for token in range(5):
            yield Delta(tokens=(token,))


class Tokenizer:
    def encode_document(self, text: str) -> list[int]:
        return list(text.encode())


def test_tokens_before_all_sequences_decode_make_no_speed() -> None:
    engine: Any = Engine()
    tokenizer: Any = Tokenizer()
    case = Case("text", "prompt", GREEDY, tokens=5)
    decoding, answers = AnsweringEngine(engine, tokenizer).answer(case, 2, 1)
    assert answers == [(0, 1, 2, 3, 4)] * 2
    assert decoding.tokens == 4
