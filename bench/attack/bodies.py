"""Large request bodies that are expensive to parse, from many clients at once."""

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.attack.bystander import PATIENCE_S, watching
from bench.attack.outcome import Outcome
from bench.attack.target import Target, source_address

CLIENTS = 20
SECONDS = 5.0
BODY_BYTES = 31 * 2**20
NOT_CONNECTED = "not connected"
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


async def attack(target: Target) -> Iterable[Outcome]:
    """The outcome without an attack, and then one for each body."""
    outcomes = [await _outcome(target, "no attack", "nothing", None)]
    for bomb in BOMBS:
        tried = f"{CLIENTS} clients send {bomb.size / 1e6:.2f} MB to {bomb.path}"
        outcomes.append(await _outcome(target, f"bodies: {bomb.name}", tried, bomb))
    return outcomes


async def _outcome(target: Target, name: str, tried: str, bomb: Bomb | None) -> Outcome:
    sent = True
    async with watching(target.url, target.bystander_key) as seen:
        if bomb is None:
            await asyncio.sleep(SECONDS)
        else:
            statuses = await asyncio.to_thread(_in_other_process, target, bomb)
            replies = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
            tried = f"{tried}; replies: {replies or 'none'}"
            sent = bool(statuses.keys() - {NOT_CONNECTED})
    return Outcome(name, tried, str(seen), sent and seen.held)


def _in_other_process(target: Target, bomb: Bomb) -> Counter[str]:
    """The attackers run in another process, so that they do not slow the bystander."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attackers, args=(target.host, target.port, bomb, theirs))
    process.start()
    theirs.close()
    try:
        statuses: Counter[str] = ours.recv()
        return statuses
    finally:
        process.kill()
        process.join()


def _attackers(host: str, port: int, bomb: Bomb, results: Connection) -> None:
    # Clients on other machines would not take processor time from the server.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    body = bomb.build()
    head = f"POST {bomb.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    end, statuses = time.monotonic() + SECONDS, Counter[str]()

    if bomb.held_back:
        body = body[:-1]
    patience_s = SECONDS if bomb.held_back else PATIENCE_S

    def send_on() -> None:
        while time.monotonic() < end:
            statuses[_exchange(host, port, head.encode(), body, patience_s)] += 1

    clients = [threading.Thread(target=send_on, daemon=True) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(PATIENCE_S)
    results.send(statuses)


def _exchange(host: str, port: int, head: bytes, body: bytes, patience_s: float) -> str:
    """The status of the reply, or what happened instead."""
    try:
        connection = socket.create_connection((host, port), patience_s, source_address(host))
    except OSError:
        return NOT_CONNECTED
    with connection:
        try:
            # The server may refuse the body before its end, and have replied.
            with suppress(ConnectionError):
                connection.sendall(head)
                connection.sendall(body)
            reply = connection.recv(256).split(b" ", 2)
        except OSError as error:
            return type(error).__name__
    return reply[1].decode() if len(reply) > 1 else "closed"
