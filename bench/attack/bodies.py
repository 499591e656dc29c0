"""Large request bodies that are expensive to parse, from many clients at once."""

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from bench.attack.bystander import PATIENCE_S, watching
from bench.attack.outcome import Outcome

# A client with another address than the bystander; limits are per address.
ATTACKER = "127.0.0.2"
CLIENTS = 20
SECONDS = 5.0
BODY_BYTES = 31 * 2**20
CHAT, NATIVE, TEXT = "/v1/chat/completions", "/api/chat", "/v1/completions"
EMBED = "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Bomb:
    """A body of about `size` bytes: repetitions of `item` between `head` and `tail`.

    `held_back`: its last byte is never sent.
    """

    name: str
    path: str
    head: bytes
    item: bytes
    tail: bytes
    size: int = BODY_BYTES
    numbered: bool = False
    held_back: bool = False

    def build(self) -> bytes:
        count = self.size // (len(self.item) + (4 if self.numbered else 0))
        if self.numbered:
            return self.head + b"".join(self.item % n for n in range(count)) + self.tail
        return self.head + self.item * count + self.tail


_PARTS = b'{"model":"demo","messages":[{"role":"user","content":['
_MESSAGES = b'{"model":"demo","messages":['
_CONTENT = b'{"model":"demo","messages":[{"role":"user","content":"'
_IMAGES = b'{"model":"demo","messages":[{"role":"user","content":"a","images":['
_PROMPT = b'{"model":"demo","prompt":['
_END_PARTS = b'{"type":"text","text":""}]}]}'
_CALLS = b'{"role":"assistant","tool_calls":[{"function":{"name":"f"}},{"function":{"name":"f"}}]}'
# Bodies that the limits just allow, and bodies that exceed them.
BOMBS = (
    Bomb("empty text parts", CHAT, _PARTS, b'{"type":"text","text":""},', _END_PARTS),
    Bomb("invalid messages", CHAT, _MESSAGES, b"{},", b"{}]}"),
    Bomb("nested lists", CHAT, _PARTS, b"[[[[[[]]]]]],", b"[]]}]}"),
    Bomb("unknown fields", CHAT, b"{", b'"%x":0,', b'"model":"demo"}', numbered=True),
    Bomb("empty images", NATIVE, _IMAGES, b'"",', b'""]}]}'),
    Bomb("token ids", TEXT, _PROMPT, b"1,", b"1]}"),
    Bomb("invalid token ids", EMBED, b'{"model":"demo","input":[', b'1,"",', b"1]}"),
    Bomb("escaped text", CHAT, _CONTENT, b"\\n", b'"}]}'),
    Bomb("text of four bytes", CHAT, _CONTENT, "😀".encode(), b'"}]}'),
    Bomb("no image", NATIVE, _IMAGES + b'"', b"AAAA", b'"]}]}'),
    Bomb("a body that is held back", NATIVE, _IMAGES + b'"', b"AAAA", b'"]}]}', held_back=True),
    Bomb("a damaged image", NATIVE, _IMAGES + b'"iVBORw0KGgoA', b"AAAA", b'"]}]}', size=20 * 2**20),
    Bomb("digits", CHAT, b'{"seed":0.', b"1", b"}"),
    Bomb("blanks", CHAT, b"{", b" ", b"}"),
    Bomb("8 MB of text", CHAT, _CONTENT, b"word ", b'"}]}', size=8_000_000),
    Bomb("290,000 token ids", TEXT, _PROMPT, b"1,", b"1]}", size=580_000),
    Bomb("2,000 messages", CHAT, _MESSAGES, b'{"role":"user","content":"a"},',
         b'{"role":"user","content":"a"}]}', size=60_000),
    Bomb("2,000 text parts", CHAT, _PARTS, b'{"type":"text","text":""},', _END_PARTS,
         size=50_000),
    Bomb("4,000 tool calls", CHAT, _MESSAGES, _CALLS + b",", _CALLS + b"]}", size=174_000),
)  # fmt: skip


async def attack(base_url: str) -> Iterable[Outcome]:
    """The outcome without an attack, and then one for each body."""
    outcomes = [await _outcome(base_url, "no attack", "nothing", None)]
    for bomb in BOMBS:
        tried = f"{CLIENTS} clients send {bomb.size / 1e6:.2f} MB to {bomb.path}"
        outcomes.append(await _outcome(base_url, f"bodies: {bomb.name}", tried, bomb))
    return outcomes


async def _outcome(base_url: str, name: str, tried: str, bomb: Bomb | None) -> Outcome:
    async with watching(base_url) as seen:
        if bomb is None:
            await asyncio.sleep(SECONDS)
        else:
            statuses = await asyncio.to_thread(_in_other_process, base_url, bomb)
            replies = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
            tried = f"{tried}; replies: {replies or 'none'}"
    return Outcome(name, tried, str(seen), seen.held)


def _in_other_process(base_url: str, bomb: Bomb) -> Counter[str]:
    """The attackers run in another process, so that they do not slow the bystander."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attackers, args=(base_url, bomb, theirs))
    process.start()
    theirs.close()
    try:
        statuses: Counter[str] = ours.recv()
        return statuses
    finally:
        process.kill()
        process.join()


def _attackers(base_url: str, bomb: Bomb, results: Connection) -> None:
    # Clients on other machines would not take processor time from the server.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    address = urlsplit(base_url)
    assert address.hostname is not None
    body = bomb.build()
    head = f"POST {bomb.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    here = (address.hostname, address.port or 80)
    end, statuses = time.monotonic() + SECONDS, Counter[str]()

    if bomb.held_back:
        body = body[:-1]
    patience_s = SECONDS if bomb.held_back else PATIENCE_S

    def send_on() -> None:
        while time.monotonic() < end:
            statuses[_status(lambda: _exchange(here, head.encode(), body, patience_s))] += 1

    clients = [threading.Thread(target=send_on, daemon=True) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(PATIENCE_S)
    results.send(statuses)


def _status(exchange: Callable[[], bytes]) -> str:
    try:
        reply = exchange().split(b" ", 2)
    except OSError as error:
        return type(error).__name__
    return reply[1].decode() if len(reply) > 1 else "closed"


def _exchange(address: tuple[str, int], head: bytes, body: bytes, patience_s: float) -> bytes:
    with socket.create_connection(address, patience_s, (ATTACKER, 0)) as connection:
        try:
            connection.sendall(head)
            connection.sendall(body)
        except ConnectionError:
            pass  # the server refused the body before its end; it may still have replied
        return connection.recv(256)
