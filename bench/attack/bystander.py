"""A well-behaved client that asks for the server's health and reads streams during an attack."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from bench.percentiles import percentile

HEALTH_PERIOD_S = 0.02
# Later answers count as this time, so that a server that hangs is measured too.
PATIENCE_S = 120.0
HEALTH_P99_S = 0.1
LONGEST_GAP_S = 1.0
ANSWER_TOKENS = 400


@dataclass
class Measurements:
    """Times in seconds. `health`: responses of /healthz; `firsts`: from a request to the first
    piece of its answer; `gaps`: between pieces."""

    health: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add_health(self, took_s: float) -> None:
        """Adds the response time of a request to /healthz, and of the requests that would have been
        sent meanwhile, one per period."""
        while took_s > 0:
            self.health.append(took_s)
            took_s -= HEALTH_PERIOD_S

    @property
    def health_p99(self) -> float:
        return percentile(self.health, 0.99) if self.health else PATIENCE_S

    @property
    def longest_gap(self) -> float:
        return max(self.gaps, default=PATIENCE_S)

    @property
    def held(self) -> bool:
        quick = self.health_p99 <= HEALTH_P99_S and self.longest_gap <= LONGEST_GAP_S
        return quick and not self.failures

    def __str__(self) -> str:
        text = (
            f"/healthz p99 {self.health_p99 * 1e3:.0f} ms of {len(self.health)}, "
            f"longest gap {self.longest_gap:.2f} s of {len(self.gaps)}"
        )
        if self.firsts:
            text += f", first piece after {max(self.firsts):.2f} s at most"
        if self.failures:
            text += f", {len(self.failures)} failed: {self.failures[0]}"
        return text


@asynccontextmanager
async def watching(
    base_url: str, key: str | None = None, *, model: str | None = None
) -> AsyncIterator[Measurements]:
    """Measures from the first output of a stream until the block ends.

    `key`: an API key. `model`: None for the first model that the server lists.
    """
    seen = Measurements()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=PATIENCE_S) as client:
        if model is None:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
        begun = asyncio.Event()
        tasks = [
            asyncio.create_task(_read_streams(client, model, seen, begun)),
            asyncio.create_task(_ask_health(client, seen)),
        ]
        await begun.wait()
        seen.health.clear()
        seen.firsts.clear()
        yield seen
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask_health(client: httpx.AsyncClient, seen: Measurements) -> None:
    while True:
        asked = time.monotonic()
        try:
            (await client.get("/healthz")).raise_for_status()
        except httpx.HTTPError as error:
            seen.failures.append(f"/healthz: {error!r}")
        finally:  # a request that is still unanswered at the end counts too
            seen.add_health(time.monotonic() - asked)
        await asyncio.sleep(HEALTH_PERIOD_S)


async def _read_streams(
    client: httpx.AsyncClient, model: str, seen: Measurements, begun: asyncio.Event
) -> None:
    options = {"num_predict": ANSWER_TOKENS, "temperature": 1e6, "top_k": 0, "top_p": 1.0}
    message = {"role": "user", "content": "Count to a thousand."}
    body = {"model": model, "messages": [message], "options": options}
    while True:
        last, pieces = time.monotonic(), 0
        try:
            async with client.stream("POST", "/api/chat", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    json.loads(line)
                    now = time.monotonic()
                    (seen.gaps if pieces else seen.firsts).append(now - last)
                    last, pieces = now, pieces + 1
                    begun.set()
        except (httpx.HTTPError, ValueError) as error:
            seen.failures.append(f"stream: {error!r}")
            begun.set()
            await asyncio.sleep(HEALTH_PERIOD_S)
        finally:
            (seen.gaps if pieces else seen.firsts).append(time.monotonic() - last)
