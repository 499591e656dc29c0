"""The sockets and memory of the server's processes, from /proc; only processes of this user."""

import asyncio
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY_PERIOD_S = 0.05
_LISTENING = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Listener:
    """`process`: the title of the process, which Ray sets."""

    process: str
    address: str
    port: int


def tcp_listeners(title: str) -> list[Listener]:
    """The listening TCP sockets of all processes whose title matches the expression."""
    found = set()
    for process, inodes in _sockets(title):
        for inode, address, port in _tcp():
            if inode in inodes:
                found.add(Listener(process, address, port))
    return sorted(found, key=lambda listener: listener.port)


def unix_sockets(title: str) -> list[Path]:
    """The paths of Unix sockets that processes with a matching title have bound."""
    inodes = {inode for _, owned in _sockets(title) for inode in owned}
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sorted({Path(each[7]) for each in fields if len(each) > 7 and each[6] in inodes})


@dataclass
class Growth:
    """`bytes`: the most by which the resident memory of any single process has exceeded that at the
    beginning; of a process that has started since, all of its memory."""

    bytes: int = 0

    def add(self, before: dict[str, int], now: dict[str, int]) -> None:
        grown = (size - before.get(process, 0) for process, size in now.items())
        self.bytes = max(self.bytes, *grown, 0)


@asynccontextmanager
async def watching_memory(title: str) -> AsyncIterator[Growth]:
    """Measures the growth of each process with a matching title until the block ends."""
    before, growth = _resident_bytes(title), Growth()

    async def watch() -> None:
        while True:
            growth.add(before, await asyncio.to_thread(_resident_bytes, title))
            await asyncio.sleep(MEMORY_PERIOD_S)

    task = asyncio.create_task(watch())
    try:
        yield growth
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        growth.add(before, _resident_bytes(title))


def _resident_bytes(title: str) -> dict[str, int]:
    """The resident memory of each process with a matching title, by its id."""
    sizes = {}
    for folder, _ in _processes(title):
        with suppress(OSError):
            pages = int((folder / "statm").read_text().split()[1])
            sizes[folder.name] = pages * os.sysconf("SC_PAGESIZE")
    return sizes


def _sockets(title: str) -> Iterator[tuple[str, set[str]]]:
    """The inodes of the sockets of each process with a matching title."""
    for folder, name in _processes(title):
        inodes = set()
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    if match := _SOCKET.fullmatch(os.readlink(link)):
                        inodes.add(match[1])
        yield name, inodes


def _processes(title: str) -> Iterator[tuple[Path, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if re.match(title, name):
                    yield folder, name


def _tcp() -> Iterator[tuple[str, str, int]]:
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f"={len(words)}I", *words)
                yield fields[9], socket.inet_ntop(family, packed), int(port, 16)
