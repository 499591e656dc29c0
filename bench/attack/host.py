"""Attacks by other users of the host: HAProxy's sockets and ports, and keys in logs."""

import asyncio
import stat
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

from bench.attack.outcome import Outcome
from bench.attack.processes import tcp_listeners, unix_sockets
from bench.attack.target import Target

HAPROXY = r"\S*haproxy "
MAX_LOG_BYTES = 256 * 2**20


async def attack(target: Target) -> Iterable[Outcome]:
    if target.session is None:
        return []
    outcomes = [_sockets(), _ports()]
    if target.keys is not None:
        outcomes.append(await asyncio.to_thread(_keys_in_logs, target))
    return outcomes


def _sockets() -> Outcome:
    sockets = unix_sockets(HAPROXY)
    open_ones = [path for path in sockets if _others_may_connect(path)]
    return Outcome(
        "HAProxy's sockets",
        f"another user connects to {', '.join(map(str, sockets)) or 'none'}",
        f"{len(open_ones)} of {len(sockets)} may be reached",
        bool(sockets) and not open_ones,
    )


def _others_may_connect(path: Path) -> bool:
    """Whether the modes let other users connect: they need execute permission on each directory and
    write permission on the socket."""
    try:
        modes = [folder.stat().st_mode for folder in path.parents]
        return all(mode & stat.S_IXOTH for mode in modes) and bool(path.stat().st_mode & 0o002)
    except FileNotFoundError:
        return False  # the socket's file has been removed


def _ports() -> Outcome:
    """HAProxy must listen on loopback addresses only, since `host` is 127.0.0.1."""
    listeners = tcp_listeners(HAPROXY)
    addresses = ", ".join(f"{each.address}:{each.port}" for each in listeners)
    outside = [each for each in listeners if not ip_address(each.address).is_loopback]
    return Outcome(
        "HAProxy's ports",
        "another host connects to HAProxy, its statistics or its metrics",
        f"listens at {addresses or 'nothing'}",
        bool(listeners) and not outside,
    )


def _keys_in_logs(target: Target) -> Outcome:
    assert target.session is not None and target.keys is not None
    keys = [key.encode() for key in (target.keys.alice, target.keys.bob, target.keys.manager)]
    read_bytes, found = 0, []
    for path in sorted((target.session / "logs").rglob("*")):
        if not path.is_file() or read_bytes > MAX_LOG_BYTES:
            continue
        data = path.read_bytes()
        read_bytes += len(data)
        if any(key in data for key in keys):
            found.append(path.name)
    return Outcome(
        "keys in Ray's logs",
        f"search {read_bytes / 2**20:.1f} MiB of logs for the API keys",
        f"found in {', '.join(found) or 'none'}",
        read_bytes > 0 and not found,
    )
