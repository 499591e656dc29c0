"""What other users of the host can reach: HAProxy's sockets and ports, keys in logs."""

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
    """By the modes alone: each directory must let others through, the socket let them write."""
    try:
        modes = [folder.stat().st_mode for folder in path.parents]
        return all(mode & stat.S_IXOTH for mode in modes) and bool(path.stat().st_mode & 0o002)
    except FileNotFoundError:
        return False  # bound once, removed since


def _ports() -> Outcome:
    """With `host: 127.0.0.1`, as here, nothing may listen elsewhere."""
    listeners = tcp_listeners(HAPROXY)
    told = ", ".join(f"{each.address}:{each.port}" for each in listeners)
    outside = [each for each in listeners if not ip_address(each.address).is_loopback]
    return Outcome(
        "HAProxy's ports",
        "another host connects to HAProxy, its statistics or its metrics",
        f"listens at {told or 'nothing'}",
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
