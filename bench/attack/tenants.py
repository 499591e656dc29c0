"""Attacks by one API key on another: reading its prompts from the cache, taking its share of the
server, and exceeding its own rights."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable

import httpx

from bench.attack.outcome import Outcome
from bench.attack.target import Target

FLOOD, FLOOD_TOKENS = 200, 200
FLOOD_S, PAUSE_S = 2.0, 0.5  # before the requests of the well-behaved client, and after each
# The longest wait of a well-behaved client while another one floods the server.
FIRST_TOKEN_S = 5.0
SECRET = "The quarterly figures of the merger are thirty-one million in the north. " * 6


async def attack(target: Target) -> Iterable[Outcome]:
    if target.keys is None:
        return []
    return [
        await _without_key(target),
        await _management(target),
        await _cache_probe(target),
        await _flood(target),
    ]


async def _without_key(target: Target) -> Outcome:
    tried = {"no key": None, "a wrong key": "sk-wrong"}
    answers = []
    for name, key in tried.items():
        async with target.client(key) as client:
            for path in ("/v1/models", "/api/tags", "/api/ps"):
                status = (await client.get(path)).status_code
                if status != 401:
                    answers.append(f"{name} {path} {status}")
    found = f"answered: {', '.join(answers) or 'none'}"
    return Outcome("without a key", f"lists with {', '.join(tried)}", found, not answers)


async def _management(target: Target) -> Outcome:
    """Sends management requests with a key that may only use models."""
    assert target.keys is not None
    blob = f"/api/blobs/sha256:{'0' * 64}"
    requests: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("POST", "/api/pull", {"model": "registry.example/none"}),
        ("POST", "/api/create", {"model": "mine", "from": "demo"}),
        ("POST", "/api/copy", {"source": "demo", "destination": "mine"}),
        ("DELETE", "/api/delete", {"model": "demo"}),
        ("POST", blob, {}),
    )
    done = []
    async with target.client(target.keys.alice) as client:
        for method, path, body in requests:
            status = (await client.request(method, path, json=body)).status_code
            if status not in (401, 403):
                done.append(f"{path[:16]} {status}")
    found = f"not refused: {', '.join(done) or 'none'}"
    tried = "pull, create, copy, delete and upload with a key for inference"
    return Outcome("management", tried, found, not done)


async def _cache_probe(target: Target) -> Outcome:
    """Sends the prompt of one key with another key; cached tokens would reveal the first key's
    prompt."""
    assert target.keys is not None
    own = [await _cached_tokens(target, target.keys.alice, SECRET) for _ in range(2)]
    guess = await _cached_tokens(target, target.keys.bob, SECRET)
    wrong = await _cached_tokens(target, target.keys.bob, SECRET[::-1])
    return Outcome(
        "cache probe",
        "one key sends the prompt of another",
        f"cached tokens: {own[1]} for the same key again, {guess} for the right guess of another, "
        f"{wrong} for a wrong one",
        own[1] > 0 and guess <= wrong,
    )


async def _cached_tokens(target: Target, key: str, prompt: str) -> int:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1,
    }
    async with target.client(key) as client:
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


async def _flood(target: Target) -> Outcome:
    """Sends many requests of one key at once, while another key repeatedly asks for two tokens."""
    assert target.keys is not None
    statuses: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=FLOOD)
    headers = {"authorization": f"Bearer {target.keys.alice}"}
    async with httpx.AsyncClient(
        base_url=target.url, headers=headers, limits=limits, timeout=120
    ) as client:
        flooding = [asyncio.create_task(_long_answer(client, n, statuses)) for n in range(FLOOD)]
        await asyncio.sleep(FLOOD_S)
        waits = []
        for _ in range(4):
            waits.append(await _first_token_s(target))
            await asyncio.sleep(PAUSE_S)
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    replies = ", ".join(f"{count} × {status}" for status, count in statuses.most_common())
    admitted = statuses["200"] > 0 or statuses.total() < FLOOD
    return Outcome(
        "flood",
        f"{FLOOD} requests of one key at once ({replies or 'none had ended'})",
        f"another key waits {max(waits):.2f} s for its first token at most",
        admitted and max(waits) <= FIRST_TOKEN_S,
    )


async def _long_answer(client: httpx.AsyncClient, number: int, statuses: Counter[str]) -> None:
    prompt = f"{number} " + "Tell me all that you know about it. " * 12
    options = {"num_predict": FLOOD_TOKENS, "temperature": 1e6, "top_k": 0, "top_p": 1.0}
    body = {"model": "demo", "prompt": prompt, "options": options, "stream": False}
    try:
        answer = await client.post("/api/generate", json=body)
        statuses[str(answer.status_code)] += 1
    except httpx.HTTPError as error:
        statuses[type(error).__name__] += 1


async def _first_token_s(target: Target) -> float:
    assert target.keys is not None
    body = {"model": "demo", "prompt": "What is 2 + 3?", "options": {"num_predict": 2}}
    began = time.monotonic()
    async with (
        target.client(target.keys.bob) as client,
        client.stream("POST", "/api/generate", json=body) as answer,
    ):
        answer.raise_for_status()
        async for _ in answer.aiter_lines():
            break
    return time.monotonic() - began
