"""Measures Ray's cost per stream: `caravan serve` against plain uvicorn, with few and many
streams."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import httpx

from bench.contender import in_turns
from bench.report import Row
from bench.rest import completion_chunks
from bench.server import Server
from tests.checkout import DEMO_MODEL

STREAMS = (1, 8, 64, 256)
ANSWER_TOKENS = 64
WARM_UP_TOKENS = 8
PROMPT_TOKENS = 16
CONTEXT_TOKENS = 128
NAME = "measured"


@dataclass(frozen=True, slots=True)
class Load:
    """The median time to the first token of concurrent streams, and their tokens per second in
    total."""

    first_token_ms: float
    tokens_per_second: float


def stream_rows(threads: int, rounds: int) -> list[Row]:
    """Rows of the small demo model, whose steps are short, so that other costs are visible. In each
    round both servers start anew, one after the other has ended."""
    print("streams: through Ray and through plain uvicorn", flush=True)
    arguments = {"models": [_model(threads)]}
    through_ray = partial(Server.of_ray, arguments)
    plain = partial(Server.of_uvicorn, arguments)
    first, second = (
        zip(*each, strict=True) for each in in_turns(_loads, through_ray, plain, rounds)
    )
    pairs = zip(STREAMS, first, second, strict=True)
    return [row for count, *sides in pairs for row in _rows(count, *sides)]


def _loads(start: Callable[[], Server]) -> list[Load]:
    """That of each number of streams, with the same prompts for each server."""
    loads = []
    with closing(start()) as server:
        for count in STREAMS:
            source = random.Random(count)
            asyncio.run(_load(server.url, _prompts(source, count), WARM_UP_TOKENS))
            loads.append(asyncio.run(_load(server.url, _prompts(source, count), ANSWER_TOKENS)))
    return loads


def _rows(count: int, first: Sequence[Load], second: Sequence[Load]) -> list[Row]:
    streams = f"{count} stream{'s' if count > 1 else ''}"
    waits = [tuple(load.first_token_ms for load in side) for side in (first, second)]
    speeds = [tuple(load.tokens_per_second for load in side) for side in (first, second)]
    return [
        Row("demo", f"first token, {streams}", "ms", *waits),
        Row("demo", f"all tokens, {streams}", "tokens/s", *speeds),
    ]


def _model(threads: int) -> dict[str, Any]:
    return {
        "name": NAME,
        "source": str(DEMO_MODEL),
        "device": "cpu",
        "threads": threads,
        "context_tokens": CONTEXT_TOKENS,
        "max_sequences": max(STREAMS),
        "cache_tokens": CONTEXT_TOKENS * max(STREAMS),
        "prefix_cache": False,
    }


def _prompts(source: random.Random, count: int) -> list[list[int]]:
    """`count` random prompts of tokens of plain text."""
    return [[source.randrange(300, 700) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def _load(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> Load:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(_answer(client, url, each, tokens) for each in prompts))
        seconds = time.perf_counter() - begin
    first_token_s = median(first - begin for first, _ in answers)
    return Load(1000 * first_token_s, sum(received for _, received in answers) / seconds)


async def _answer(
    client: httpx.AsyncClient, url: str, prompt: Sequence[int], tokens: int
) -> tuple[float, int]:
    """The time at which the first token arrived, and the number of tokens."""
    body = {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, received = 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        async for chunk in completion_chunks(reply):
            first = first or time.perf_counter()
            usage = chunk.get("usage")
            if usage:
                received = usage["completion_tokens"]
    return first, received
