"""Slow, unfinished and huge requests, and ports that are not meant for clients."""

import asyncio
import multiprocessing
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from bench.attack.bystander import watching
from bench.attack.outcome import Outcome
from bench.attack.processes import Listener, tcp_listeners, watching_memory
from bench.attack.target import Target, source_address

SLOW_BODIES, SLOW_BYTES = 40, 2**20
HALF_OPEN = 4200
# The server ends connections with an unfinished header or body well before this.
DEADLINE_S = 90.0
HUGE_HEADER_BYTES = 64 * 2**20
HEADER_BYTES = 2**20  # more than any server accepts
MEMORY_BYTES = 256 * 2**20
REPLY_S = 20.0
WATCHED_S = 3.0  # the bystander measures this long after an attack that takes no time
INGRESS, REPLICA = r"ray::ServeReplica:\w+:Ingress", r"ray::ServeReplica:\w+:demo"


@dataclass
class Held:
    """Connections that were opened, and how many of them the server has closed."""

    opened: int = 0
    refused: int = 0
    closed: int = 0
    replies: Counter[str] = field(default_factory=Counter)

    @property
    def all_closed(self) -> bool:
        return self.opened > 0 and self.closed == self.opened

    def __str__(self) -> str:
        replies = ", ".join(f"{count} × {status}" for status, count in self.replies.most_common())
        return f"{self.opened} opened, {self.refused} refused, {self.closed} closed ({replies})"


async def attack(target: Target) -> Iterable[Outcome]:
    outcomes = [await _slow_bodies(target), await _half_open_headers(target)]
    if target.session is not None:
        outcomes += [
            await _behind_haproxy(target),
            await _huge_header(target),
            await _stream_without_proof(target),
        ]
    return outcomes


async def _slow_bodies(target: Target) -> Outcome:
    """Sends all but the last byte of bodies; the server must close each connection."""
    head = f"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SLOW_BYTES}\r\n\r\n"
    data = head.encode() + b" " * (SLOW_BYTES - 1)
    async with (
        watching(target.url, target.bystander_key) as seen,
        watching_memory(INGRESS) as grown,
    ):
        held = await _held_back(target, SLOW_BODIES, data)
    return Outcome(
        "slow bodies",
        f"{SLOW_BODIES} bodies of {SLOW_BYTES / 2**20:.0f} MiB without their last byte: {held}; "
        f"an ingress grew by {grown.bytes / 2**20:.0f} MiB",
        str(seen),
        held.all_closed and seen.held and grown.bytes < MEMORY_BYTES,
    )


async def _half_open_headers(target: Target) -> Outcome:
    """Opens more connections than HAProxy allows, from an address other than the bystander's, and
    never finishes their headers."""
    async with watching(target.url, target.bystander_key) as seen:
        held = await _held_back(target, HALF_OPEN, b"GET / HTTP/1.1\r\nHost: loc")
    return Outcome(
        "half-open headers",
        f"{HALF_OPEN} connections from another address without the end of their headers: {held}",
        str(seen),
        held.all_closed and seen.held,
    )


async def _held_back(target: Target, count: int, data: bytes) -> Held:
    """Runs `_hold_back` in another process, so that it does not slow the bystander."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attacker:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            attacker, _run_held_back, target.host, target.port, count, data
        )


def _run_held_back(host: str, port: int, count: int, data: bytes) -> Held:
    _allow_files(count + 512)
    return asyncio.run(_hold_back(host, port, count, data))


async def _hold_back(host: str, port: int, count: int, data: bytes) -> Held:
    """Opens `count` connections, sends `data` on each, and waits until the server closes them."""
    held, deadline = Held(), time.monotonic() + DEADLINE_S
    source = source_address(host)
    opening = asyncio.Semaphore(64)

    async def hold() -> None:
        async with opening:
            try:
                reader, writer = await asyncio.open_connection(host, port, local_addr=source)
            except (ConnectionError, TimeoutError):
                held.refused += 1
                return
            held.opened += 1
        with suppress(TimeoutError):
            try:
                writer.write(data)
                async with asyncio.timeout(deadline - time.monotonic()):
                    status = _status(await reader.read(64))
            except ConnectionError:
                status = "reset"
            held.closed += 1
            held.replies[status] += 1
        writer.close()

    await asyncio.gather(*(hold() for _ in range(count)))
    return held


def _allow_files(count: int) -> None:
    """Raises this process's limit of open files if it is lower; OSError if the hard limit is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise OSError(f"the attack needs {count:,} open files; the limit is {hard:,} (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


async def _behind_haproxy(target: Target) -> Outcome:
    """Sends requests to the ports of the ingress's replicas."""
    answers = []
    for listener in tcp_listeners(INGRESS):
        status = await _reply(listener, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers.append(f"{listener.address}:{listener.port} {status}")
    return Outcome(
        "past HAProxy",
        "GET /v1/models at each port of the ingress",
        ", ".join(answers) or "the ingress listens nowhere",
        bool(answers) and not any(answer.endswith(" 200") for answer in answers),
    )


async def _huge_header(target: Target) -> Outcome:
    """Sends a huge header to HAProxy and to the ports behind it."""
    ends = [Listener("haproxy", target.host, target.port), *tcp_listeners(INGRESS)]
    answers = []
    async with watching(target.url, target.bystander_key) as seen:
        for end in ends:
            began = time.monotonic()
            sent, status = await asyncio.to_thread(_send_header, end)
            took = time.monotonic() - began
            answers.append((sent, f"{status} after {sent / 2**20:.1f} MiB and {took:.1f} s"))
        await asyncio.sleep(WATCHED_S)
    return Outcome(
        "huge header",
        f"a header of {HUGE_HEADER_BYTES / 2**20:.0f} MiB at {len(ends)} ports: "
        + ", ".join(reply for _, reply in answers),
        str(seen),
        seen.held and all(sent < HUGE_HEADER_BYTES for sent, _ in answers),
    )


def _send_header(end: Listener) -> tuple[int, str]:
    """The number of bytes that were accepted, and the status of the reply."""
    sent, piece = 0, b"a" * HEADER_BYTES
    with socket.create_connection((_reachable(end.address), end.port), REPLY_S) as connection:
        try:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
            while sent < HUGE_HEADER_BYTES:
                connection.sendall(piece)
                sent += len(piece)
        except OSError as error:
            return sent, type(error).__name__
        with suppress(OSError):
            return sent, _status(connection.recv(64))
    return sent, "no reply"


async def _stream_without_proof(target: Target) -> Outcome:
    """Sends a task instead of a proof to the replica's ports; it must not be answered."""
    task = msgspec.msgpack.encode({"type": "generate", "task": {}})
    answers = []
    for listener in tcp_listeners(REPLICA):
        reply = await _raw_reply(listener, len(task).to_bytes(4, "big") + task)
        answers.append(f"{listener.port}: {reply}")
    refused = [answer for answer in answers if answer.endswith("a challenge, then the end")]
    return Outcome(
        "stream without proof",
        "a task without proof at each port of the replica",
        ", ".join(answers) or "the replica listens nowhere",
        bool(refused) and not any("an answer" in answer for answer in answers),
    )


async def _raw_reply(listener: Listener, data: bytes) -> str:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(REPLY_S):
            reader, writer = await asyncio.open_connection(
                _reachable(listener.address), listener.port
            )
            writer.write(data)
            received = await reader.read(2**20)
            while part := await reader.read(2**20):
                received += part
        writer.close()
        if b"delta" in received or b"accepted" in received:
            return "an answer"
        return "a challenge, then the end" if b"challenge" in received else "the end"
    return "another protocol"


async def _reply(listener: Listener, request: bytes) -> str:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(REPLY_S):
            reader, writer = await asyncio.open_connection(
                _reachable(listener.address), listener.port
            )
            writer.write(request)
            reply = await reader.read(64)
        writer.close()
        return _status(reply)
    return "no reply"


def _status(reply: bytes) -> str:
    if not reply:
        return "closed"
    return reply[9:12].decode() if reply.startswith(b"HTTP/1.1 ") else "another protocol"


def _reachable(address: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
