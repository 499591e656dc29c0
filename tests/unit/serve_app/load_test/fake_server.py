"""A server of the OpenAI-compatible protocol on the clock of the event loop."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx


class FakeServer(httpx.AsyncBaseTransport):
    """Answers with `parts` words: the first after `first_s`, the others after `gap_s` each."""

    def __init__(self, *, first_s: float = 1.0, gap_s: float = 0.25, parts: int = 3) -> None:
        self.first_s, self.gap_s, self.parts = first_s, gap_s, parts
        self.status = 200
        self.tail = "data: [DONE]\n\n"
        self.bodies: list[dict[str, Any]] = []
        self.starts: list[float] = []
        self.running = self.most_running = self.cancelled = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        self.starts.append(asyncio.get_running_loop().time())
        return httpx.Response(self.status, stream=_Answer(self))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://x", transport=self, timeout=None)


class _Answer(httpx.AsyncByteStream):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def __aiter__(self) -> AsyncIterator[bytes]:
        server = self._server
        server.running += 1
        server.most_running = max(server.most_running, server.running)
        try:
            if server.status != 200:
                yield b'{"error": {"message": "too many", "type": "x"}}'
                return
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            for index in range(server.parts):
                await asyncio.sleep(server.gap_s if index else server.first_s)
                yield _event({"choices": [{"delta": {"content": "word"}}]})
            usage = {"prompt_tokens": 7, "completion_tokens": server.parts * 2}
            yield _event({"choices": [], "usage": usage}) + server.tail.encode()
        except asyncio.CancelledError:
            server.cancelled += 1
            raise
        finally:
            server.running -= 1


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()
