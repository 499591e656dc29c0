"""Connections from rank 0 to the other ranks of a model: short messages, and lost ranks.

Tensors are exchanged by `torch.distributed`. A connection breaks when a process or its machine
ends, so no rank waits forever for a lost one.
"""

import json
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from runtime import errors, tls
from runtime.distributed.admission import Admission, left_s, prove_rank, read_exactly
from runtime.errors import CaravanError, EngineDeadError
from runtime.tls import Connection, SecureSocket

# TCP keep-alive: a machine that answers no probe for this long counts as lost.
_IDLE_S, _EVERY_S, _TRIES = 5, 2, 3
# From the first connection attempt to the end of the handshake; rank 0 may start later.
_JOIN_S = 60.0
_BACKLOG = 128
# When a rank is lost, others may report errors before its own connection breaks.
_REPORT_DELAY_S = 0.3
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank needs to join rank 0, which listens on `host` and `port`."""

    rank: int
    size: int
    host: str
    port: int
    token: str = field(repr=False)


class RankZero:
    """Rank 0: one connection to each other rank, and the first failure of one.

    `watch` is called, on a thread of its own, when the first rank fails.
    """

    def __init__(self, host: str, size: int) -> None:
        assert size > 1
        self.host, self.size = host, size
        self.watch: Callable[[], None] = lambda: None
        self._token = secrets.token_hex(32)
        self._tls = tls.context_for("listener")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._changed = threading.Condition()
        self._connections: dict[int, Connection] = {}
        self._messages: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(1, size)}
        self._failure: CaravanError | None = None
        self._closing = False

    @property
    def rank_infos(self) -> list[RankInfo]:
        """One for each other rank."""
        port = self._listener.getsockname()[1]
        return [RankInfo(r, self.size, self.host, port, self._token) for r in range(1, self.size)]

    @property
    def address(self) -> str:
        """The address of this machine that the others have connected to."""
        return self._connections[1].getsockname()[0]

    @property
    def machines(self) -> list[str]:
        """The address of each rank's machine, ordered by rank."""
        followers = (self._connections[rank].getpeername()[0] for rank in range(1, self.size))
        return [self.address, *followers]

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have joined. Raises the failure that is passed to `fail`."""
        with closing(Admission(self._listener, self._token, self.size, self._tls)) as admission:
            while admission.missing:
                self._check_open()
                for rank, connection in admission.joined(wait_s=0.2):
                    _keep_alive(connection)
                    self._connections[rank] = connection
        self._listener.close()
        for rank, connection in self._connections.items():
            name = f"rank-{rank}"
            threading.Thread(
                target=self._listen, args=(rank, connection), name=name, daemon=True
            ).start()

    def send(self, message: bytes) -> None:
        """Send to all ranks. EngineDeadError: one of them is lost."""
        for rank, connection in self._connections.items():
            try:
                connection.sendall(_LENGTH.pack(len(message)) + message)
            except OSError as error:
                self.fail(_lost_rank(rank, self.size, error.strerror or str(error)))
                self.check()

    def send_json(self, message: Mapping[str, Any]) -> None:
        self.send(json.dumps(message).encode())

    def receive_json(self) -> list[dict[str, Any]]:
        """The next message of each other rank, ordered by rank. Raises the failure of a rank if one
        has sent none before, EngineDeadError if rank 0 is closed meanwhile."""
        with self._changed:
            while not all(self._messages.values()):
                self._check_open()
                self._changed.wait()
        return [messages.pop(0) for messages in self._messages.values()]

    def check(self) -> None:
        """Raise the failure of the first rank that failed."""
        if self._failure is not None:
            raise self._failure

    def cause_of(self, error: Exception, *, wait_s: float = 10.0) -> Exception:
        """The failure of another rank that is reported within `wait_s`, else `error`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, wait_s)
        return self._failure or error

    def fail(self, failure: CaravanError) -> None:
        """Record the first failure and wake the threads that wait for ranks."""
        with self._changed:
            if self._failure is not None or self._closing:
                return
            self._failure = failure
            self._changed.notify_all()
        self.watch()

    def close(self) -> None:
        """Close the connections, which ends the other ranks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._listener.close()
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _check_open(self) -> None:
        self.check()
        if self._closing:
            raise EngineDeadError("Rank 0 was closed while it waited for the other ranks.")

    def _listen(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                message = json.loads(_received(connection))
                if "failed" in message:
                    raise _failure_of(rank, self.size, message)
                with self._changed:
                    self._messages[rank].append(message)
                    self._changed.notify_all()
        except EngineDeadError as error:
            time.sleep(_REPORT_DELAY_S)
            self.fail(error)
        except CaravanError as error:
            self.fail(error)
        except (OSError, EOFError, ValueError) as error:
            self.fail(_lost_rank(rank, self.size, str(error)))


class ControlChannel:
    """The connection of another rank to rank 0; both have proved that they know the token."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info
        self._connection = _joined(rank_info)
        _keep_alive(self._connection)

    @property
    def address(self) -> str:
        """The address of this machine that rank 0 sees."""
        return self._connection.getsockname()[0]

    def receive(self) -> bytes:
        """The next message, without a time limit; EOFError when rank 0 ends."""
        return _received(self._connection)

    def receive_json(self) -> dict[str, Any]:
        return json.loads(self.receive())

    def send_json(self, message: Mapping[str, Any]) -> None:
        encoded = json.dumps(message).encode()
        self._connection.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def fail(self, error: BaseException) -> None:
        """Report why this rank ends, if the connection still exists."""
        known = isinstance(error, CaravanError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            self.send_json({"failed": type(error).__name__ if known else None, "reason": text})

    def close(self) -> None:
        self._connection.close()


def _joined(rank_info: RankInfo) -> Connection:
    """Connects to rank 0. EngineDeadError: it cannot be reached, or another process listens."""
    deadline = time.monotonic() + _JOIN_S
    context = tls.context_for("caller")
    while True:
        try:
            return _proved(rank_info, deadline, context)
        except (OSError, EOFError) as error:
            if isinstance(error, ssl.SSLError) or time.monotonic() > deadline:
                raise EngineDeadError(
                    f"Rank {rank_info.rank} of {rank_info.size} cannot reach rank 0 at "
                    f"{rank_info.host}:{rank_info.port}: {_reason(error)}."
                ) from error
            time.sleep(0.2)


def _reason(error: OSError | EOFError) -> str:
    if isinstance(error, ssl.SSLError):
        return tls.refusal(error)
    return getattr(error, "strerror", None) or str(error)


def _proved(rank_info: RankInfo, deadline: float, context: ssl.SSLContext | None) -> Connection:
    remaining_s = max(deadline - time.monotonic(), 0.1)
    plain = socket.create_connection((rank_info.host, rank_info.port), timeout=remaining_s)
    connection = plain if context is None else SecureSocket(plain, context, "caller")
    try:
        if isinstance(connection, SecureSocket):
            connection.settimeout(left_s(deadline))
            connection.handshake()
        prove_rank(connection, rank_info.rank, rank_info.size, rank_info.token, deadline=deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _received(connection: Connection) -> bytes:
    (length,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length:,} bytes")
    return read_exactly(connection, length)


def _keep_alive(connection: Connection) -> None:
    """Detect the loss of the other machine, and send short messages immediately."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _EVERY_S),
        ("TCP_KEEPCNT", _TRIES),
        ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _EVERY_S * _TRIES)),
    ):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _lost_rank(rank: int, size: int, why: str) -> EngineDeadError:
    return EngineDeadError(f"Rank {rank} of {size} is gone: {why}.")


def _failure_of(rank: int, size: int, message: Mapping[str, Any]) -> CaravanError:
    """The exception that the rank reported, of the same class if it is a CaravanError."""
    kind = getattr(errors, str(message["failed"]), EngineDeadError)
    if not (isinstance(kind, type) and issubclass(kind, CaravanError)):
        kind = EngineDeadError
    return kind(f"Rank {rank} of {size}: {message.get('reason')}")
