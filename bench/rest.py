"""The same engine behind Ray Serve: a real application, measured through HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.contender import TEMPERATURE, TOP_K, TOP_P, Clock, Decoding, Setting
from bench.server import Server

NAME = "measured"


class Served:
    """`caravan serve` with one model; ends when closed."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self._server = Server.of_ray({"models": [_model(path, setting)]})
        self._url = self._server.url

    def prefill(self, prompt: Sequence[int]) -> float:
        return asyncio.run(self._first_token(prompt))

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        return asyncio.run(self._answer_all(prompts, tokens))

    def close(self) -> None:
        self._server.close()

    async def _first_token(self, prompt: Sequence[int]) -> float:
        async with httpx.AsyncClient(timeout=None) as client:
            await client.get(f"{self._url}/healthz")  # connects, so that this time is not measured
            begin = time.perf_counter()
            reply = await client.post(f"{self._url}/v1/completions", json=_body(prompt, 1))
            reply.raise_for_status()
            return time.perf_counter() - begin

    async def _answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        clock = Clock(len(prompts))
        async with httpx.AsyncClient(timeout=None) as client:
            answers = (
                self._answer(client, clock, sequence, prompt, tokens)
                for sequence, prompt in enumerate(prompts)
            )
            await asyncio.gather(*answers)
        return clock.stop()

    async def _answer(
        self,
        client: httpx.AsyncClient,
        clock: Clock,
        sequence: int,
        prompt: Sequence[int],
        tokens: int,
    ) -> None:
        """Streams an answer. A chunk has at least one token; the usage at the end has the total."""
        body = {**_body(prompt, tokens), "stream": True, "stream_options": {"include_usage": True}}
        seen = 0
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
            async for chunk in completion_chunks(reply):
                if any(choice["text"] for choice in chunk["choices"]):
                    clock.saw(sequence, 1)
                    seen += 1
                elif chunk.get("usage"):
                    clock.saw(sequence, chunk["usage"]["completion_tokens"] - seen)


async def completion_chunks(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed completion."""
    reply.raise_for_status()
    async for line in reply.aiter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def _body(prompt: Sequence[int], tokens: int) -> dict[str, object]:
    return {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "seed": 1,
    }


def _model(path: Path, setting: Setting) -> dict[str, Any]:
    return {
        "name": NAME,
        "source": str(path),
        "context_tokens": setting.context_tokens,
        "device": "cpu",
        "max_sequences": setting.sequences,
        "step_tokens": setting.step_tokens,
        "cache_tokens": setting.context_tokens * setting.sequences,
        "threads": setting.threads,
        "speculation": {"ngram": False},  # the bare engine proposes no tokens either
        "defaults": {"top_k": TOP_K},
    }
