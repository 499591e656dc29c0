"""Measures Ray's cost per stream: `serve run` against plain uvicorn, with few and many streams."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.report import Row
from bench.server import Server

STREAMS = (1, 8, 64, 256)
ANSWER_TOKENS = 64
PROMPT_TOKENS = 16
CONTEXT_TOKENS = 128
NAME = "measured"
DEMO = Path(__file__).parents[1] / "models" / "demo.gguf"


@dataclass(frozen=True, slots=True)
class Load:
    """The median time to the first token of concurrent streams, and their tokens per second in
    total."""

    first_token_ms: float
    tokens_per_second: float


def stream_rows(threads: int, rounds: int) -> list[Row]:
    """Rows of the small demo model, whose steps are short, so that other costs are visible."""
    print("streams: through Ray and through plain uvicorn", flush=True)
    source = random.Random(1)
    found: dict[int, list[tuple[Load, Load]]] = {count: [] for count in STREAMS}
    model = _model(threads)
    with (
        closing(Server.of_ray(model)) as through_ray,
        closing(Server.of_uvicorn(model)) as plain,
    ):
        for count in STREAMS:
            for server in (through_ray, plain):
                asyncio.run(_load(server.url, _prompts(source, count)))
            for _ in range(rounds):
                prompts = _prompts(source, count)
                pair = [asyncio.run(_load(server.url, prompts)) for server in (through_ray, plain)]
                found[count].append((pair[0], pair[1]))
    return [row for count, pairs in found.items() for row in _rows(count, pairs)]


def _rows(count: int, pairs: Sequence[tuple[Load, Load]]) -> list[Row]:
    streams = f"{count} stream{'s' if count > 1 else ''}"
    first = [tuple(load.first_token_ms for load in side) for side in zip(*pairs, strict=True)]
    speed = [tuple(load.tokens_per_second for load in side) for side in zip(*pairs, strict=True)]
    return [
        Row("demo", f"first token, {streams}", "ms", first[0], first[1]),
        Row("demo", f"all tokens, {streams}", "tokens/s", speed[0], speed[1]),
    ]


def _model(threads: int) -> dict[str, Any]:
    return {
        "name": NAME,
        "source": str(DEMO),
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


async def _load(url: str, prompts: Sequence[Sequence[int]]) -> Load:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(_answer(client, url, prompt) for prompt in prompts))
        seconds = time.perf_counter() - begin
    tokens = sum(tokens for _, tokens in answers)
    first_token_s = median(first - begin for first, _ in answers)
    return Load(1000 * first_token_s, tokens / seconds)


async def _answer(client: httpx.AsyncClient, url: str, prompt: Sequence[int]) -> tuple[float, int]:
    """The time at which the first token arrived, and the number of tokens."""
    body = {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, tokens = 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            first = first or time.perf_counter()
            usage = json.loads(data).get("usage")
            if usage:
                tokens = usage["completion_tokens"]
    return first, tokens
