"""Hostile models and uploads by a client that may manage models, and a served file that changes."""

import asyncio
import hashlib
import json
import os
import struct
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path

import httpx

from bench.attack.bystander import LONGEST_GAP_S, watching
from bench.attack.outcome import Outcome
from bench.attack.processes import watching_memory
from bench.attack.target import MAX_UPLOAD_BYTES, REWRITTEN, Target

TEMPLATE_GAP_S = 0.5
WATCHED_S = 1.0  # the bystander measures this long after the chats
# Each template spends seconds in one call into C that holds the GIL, or needs far too much time or
# memory.
TEMPLATES = {
    "strip of wide text": "{% set a = '\U0001f600' * 300000 %}{{ a.strip(a[:-1] ~ 'b') }}",
    "rfind": "{% set a = 'a' * 300000 %}{{ (a ~ a).rfind('b' ~ a) }}",
    "large integers": "{% set n = 9 ** 9 ** 7 %}{{ n // 7 ** 9999 is divisibleby 3 }}",
    "endless loop": "{% for a in range(9999999) %}{% for b in range(9999999) %}{% endfor %}"
    "{% endfor %}",
}
BOMB_KEYS = 1_000_000
BOMB_MEMORY_BYTES = 256 * 2**20
BOMB_S = 5.0
UPLOADS, UPLOAD_BYTES = 8, 8 * 2**20
PIECE = b"\0" * 2**16
ABORTED_S = 30.0
REPLICAS = r"ray::"


async def attack(target: Target) -> Iterable[Outcome]:
    if target.keys is None or target.store is None:
        return []
    return [
        *[await _template(target, name, text) for name, text in TEMPLATES.items()],
        await _header_bomb(target),
        await _upload_without_length(target),
        await _aborted_uploads(target),
        await _rewritten_file(target),
    ]


async def _template(target: Target, name: str, template: str) -> Outcome:
    """Creates a model with the template and sends it chats, while the bystander reads streams of
    the demo model."""
    assert target.keys is not None
    async with target.client(target.keys.manager) as client:
        model = {"model": "hostile", "from": "demo", "template": template, "stream": False}
        created = await client.post("/api/create", json=model)
        async with watching(target.url, target.keys.bob, model="demo") as seen:
            body = {
                "model": "hostile",
                "messages": [{"role": "user", "content": "Hello"}],
                "stream": False,
                "options": {"num_predict": 1},
            }
            asked = await asyncio.gather(*(client.post("/api/chat", json=body) for _ in range(4)))
            await asyncio.sleep(WATCHED_S)
        await client.request("DELETE", "/api/delete", json={"model": "hostile"})
    statuses = sorted({answer.status_code for answer in asked})
    return Outcome(
        f"template: {name}",
        f"create: {created.status_code}, four chats: {statuses}",
        str(seen),
        _succeeded(created) and seen.longest_gap <= TEMPLATE_GAP_S and not seen.failures,
    )


async def _header_bomb(target: Target) -> Outcome:
    """Uploads a file that consists of metadata keys, and creates a model from it."""
    assert target.keys is not None
    data = await asyncio.to_thread(_bomb)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    async with (
        target.client(target.keys.manager) as client,
        watching(target.url, target.keys.bob, model="demo") as seen,
        watching_memory(REPLICAS) as grown,
    ):
        uploaded = await client.post(f"/api/blobs/{digest}", content=data)
        began = time.monotonic()
        model = {"model": "bomb", "files": {"bomb.gguf": digest}, "stream": False}
        answer = await client.post("/api/create", json=model)
        took = time.monotonic() - began
    refused = uploaded.is_success and not _succeeded(answer)
    return Outcome(
        "header bomb",
        f"{BOMB_KEYS:,} keys in {len(data) / 2**20:.0f} MiB: upload {uploaded.status_code}, create "
        f"{answer.status_code} after {took:.1f} s, a process grew by {grown.bytes / 2**20:.0f} MiB",
        str(seen),
        refused and took < BOMB_S and grown.bytes < BOMB_MEMORY_BYTES and seen.held,
    )


def _bomb() -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, BOMB_KEYS)
    key = struct.Struct("<Q8sIB")  # a bool under a name of eight characters
    return header + b"".join(key.pack(8, b"k%07d" % n, 7, 1) for n in range(BOMB_KEYS))


def _succeeded(answer: httpx.Response) -> bool:
    """Whether an answer reports success. Ollama's protocol reports late errors in a body with
    status 200."""
    with suppress(ValueError):
        return answer.is_success and "error" not in json.loads(answer.text)
    return False


async def _upload_without_length(target: Target) -> Outcome:
    """Uploads twice the allowed bytes in chunks, without a Content-Length."""
    assert target.keys is not None and target.store is not None
    key, store = target.keys.manager, target.store
    largest = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal largest
        for _ in range(2 * MAX_UPLOAD_BYTES // len(PIECE)):
            yield PIECE
            largest = max(largest, _size(store))

    before = _size(store)
    async with target.client(key) as client:
        try:
            url = f"/api/blobs/sha256:{'1' * 64}"
            status = str((await client.post(url, content=pieces())).status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
    written = largest - before
    return Outcome(
        "upload without a length",
        f"{2 * MAX_UPLOAD_BYTES / 2**20:.0f} MiB in chunks: {status}",
        f"the store grew by {written / 2**20:.0f} MiB; {MAX_UPLOAD_BYTES / 2**20:.0f} are allowed",
        not status.startswith("2") and 0 < written <= MAX_UPLOAD_BYTES + 2**20,
    )


async def _aborted_uploads(target: Target) -> Outcome:
    """Aborts uploads; the bytes of aborted uploads must be removed."""
    assert target.keys is not None and target.store is not None
    key, store = target.keys.manager, target.store
    before = _size(store)
    largest = before

    async def leave(number: int) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            nonlocal largest
            for _ in range(UPLOAD_BYTES // len(PIECE)):
                yield PIECE
                largest = max(largest, _size(store))
            raise ConnectionError

        url = f"/api/blobs/sha256:{number:064x}"
        async with target.client(key) as client:
            with suppress(httpx.HTTPError, ConnectionError):
                await client.post(url, content=pieces())

    await asyncio.gather(*(leave(number + 2) for number in range(UPLOADS)))
    deadline = time.monotonic() + ABORTED_S
    while _size(store) > before + 2**20 and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    written, left = largest - before, _size(store) - before
    return Outcome(
        "aborted uploads",
        f"{UPLOADS} uploads of {UPLOAD_BYTES / 2**20:.0f} MiB end before their end",
        f"the store had {written / 2**20:.0f} MiB more, later {left / 2**20:.0f} MiB",
        written > 2**20 >= left,
    )


async def _rewritten_file(target: Target) -> Outcome:
    """Truncates the file of a served model while it is used."""
    assert target.keys is not None and target.rewritten is not None
    body = {"model": REWRITTEN, "prompt": "Hello", "options": {"num_predict": 2}, "stream": False}
    sound = target.rewritten.read_bytes()
    async with (
        target.client(target.keys.alice) as client,
        watching(target.url, target.keys.bob, model="demo") as seen,
    ):
        first = (await client.post("/api/generate", json=body)).status_code
        os.truncate(target.rewritten, len(sound) // 2)
        during = (await client.post("/api/generate", json=body)).status_code
        await asyncio.sleep(2)
        target.rewritten.write_bytes(sound)
        after = await _answers_again(client, body)
    return Outcome(
        "rewritten file",
        f"a served file is cut in place: {first} before, {during} meanwhile",
        f"{seen}; the model {'answers again' if after else 'does not answer again'}",
        seen.longest_gap <= LONGEST_GAP_S and not seen.failures and after,
    )


async def _answers_again(client: httpx.AsyncClient, body: dict[str, object]) -> bool:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if (await client.post("/api/generate", json=body)).is_success:
                return True
        await asyncio.sleep(1)
    return False


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
