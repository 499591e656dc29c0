"""Foreign web pages that send requests to a server on this machine, also by DNS rebinding."""

from collections.abc import Iterable
from typing import Any

from bench.attack.outcome import Outcome
from bench.attack.target import Target

_MESSAGES = [{"role": "user", "content": "Hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": _MESSAGES, "max_tokens": 1},
    "/v1/completions": {"model": "demo", "prompt": "Hello", "max_tokens": 1},
    "/v1/embeddings": {"model": "demo", "input": "Hello"},
    "/api/chat": {"model": "demo", "messages": _MESSAGES, "options": {"num_predict": 1}},
    "/api/generate": {"model": "demo", "prompt": "Hello", "options": {"num_predict": 1}},
    "/api/embed": {"model": "demo", "input": "Hello"},
    "/api/show": {"model": "demo"},
}
HOSTILE = {
    "foreign origin": {"origin": "https://evil.example"},
    "origin null": {"origin": "null"},
    "foreign host": {"host": "evil.example"},
}


async def attack(target: Target) -> Iterable[Outcome]:
    if target.keys is not None:
        return []  # a page without a key is refused anyway
    return [await _outcome(target, name, headers) for name, headers in HOSTILE.items()]


async def _outcome(target: Target, name: str, headers: dict[str, str]) -> Outcome:
    async with target.client() as client:
        answered = []
        for path, body in REQUESTS.items():
            status = (await client.post(path, json=body, headers=headers)).status_code
            if status != 403:
                answered.append(f"{path} {status}")
    return Outcome(
        name,
        f"a page sends requests to {len(REQUESTS)} endpoints with {headers}",
        f"answered: {', '.join(answered) or 'none'}",
        not answered,
    )
