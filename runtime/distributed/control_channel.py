"""Connections between the ranks of one model: what the first tells the others, and who is gone.

Tensors go another way. These carry short messages, and break when a process or its machine ends,
so that no rank waits for another in vain.
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

# A machine that does not answer for so long is gone.
_IDLE_S, _EVERY_S, _TRIES = 5, 2, 3
# From the first try to connect to the end of the handshake; the first rank may start later.
_JOIN_S = 60.0
_BACKLOG = 128
# When one rank is gone, others may complain of it before its own connection is seen to end.
_COMPLAINT_S = 0.3
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank has to know to join the first one, which waits at `host` and `port`."""

    rank: int
    size: int
    host: str
    port: int
    token: str = field(repr=False)


class RankZero:
    """Rank 0: one connection to each of the others, and what has become of them.

    `watch` hears, on a thread of its own, of the first one that fails.
    """

    def __init__(self, host: str, size: int) -> None:
        assert size > 1
        self.host, self.size = host, size
        self.watch: Callable[[], None] = lambda: None
        self._token = secrets.token_hex(32)
        self._tls = tls.context_for("listener")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._door = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._changed = threading.Condition()
        self._lines: dict[int, Connection] = {}
        self._words: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(1, size)}
        self._failure: CaravanError | None = None
        self._closing = False

    @property
    def rank_infos(self) -> list[RankInfo]:
        """Of all ranks but this one."""
        port = self._door.getsockname()[1]
        return [RankInfo(r, self.size, self.host, port, self._token) for r in range(1, self.size)]

    @property
    def address(self) -> str:
        """That of this machine which the others reach."""
        return self._lines[1].getsockname()[0]

    @property
    def machines(self) -> list[str]:
        """The address of each rank's machine, in the order of ranks."""
        followers = (self._lines[rank].getpeername()[0] for rank in range(1, self.size))
        return [self.address, *followers]

    def gather(self) -> None:
        """Wait until all have joined. Raises what keeps them from it, which `fail` tells."""
        with closing(Admission(self._door, self._token, self.size, self._tls)) as admission:
            while admission.missing:
                self.check()
                if self._closing:
                    raise EngineDeadError("The first rank ends before all others have joined.")
                for rank, line in admission.joined(wait_s=0.2):
                    _keep_alive(line)
                    self._lines[rank] = line
        self._door.close()
        for rank, line in self._lines.items():
            name = f"rank-{rank}"
            threading.Thread(target=self._listen, args=(rank, line), name=name, daemon=True).start()

    def tell(self, message: bytes) -> None:
        """Send to all. Raises EngineDeadError where one is gone."""
        for rank, line in self._lines.items():
            try:
                line.sendall(_LENGTH.pack(len(message)) + message)
            except OSError as error:
                self.fail(_gone(rank, self.size, error.strerror or str(error)))
                self.check()

    def tell_words(self, words: Mapping[str, Any]) -> None:
        self.tell(json.dumps(words).encode())

    def words(self) -> list[dict[str, Any]]:
        """What each of the others says next. Raises why one fails instead."""
        with self._changed:
            while self._failure is None and not all(self._words.values()):
                self._changed.wait()
        self.check()
        return [said.pop(0) for said in self._words.values()]

    def check(self) -> None:
        """Raise what has become of a rank that failed."""
        if self._failure is not None:
            raise self._failure

    def explained(self, error: Exception, *, wait_s: float = 10.0) -> Exception:
        """Why something that all ranks do together has failed here: another one, perhaps."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, wait_s)
        return self._failure or error

    def fail(self, failure: CaravanError) -> None:
        """The first failure counts. Whoever waits for ranks hears of it."""
        with self._changed:
            if self._failure is not None or self._closing:
                return
            self._failure = failure
            self._changed.notify_all()
        self.watch()

    def close(self) -> None:
        """The others end when their connections do."""
        with self._changed:
            self._closing = True
        self._door.close()
        for line in self._lines.values():
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _listen(self, rank: int, line: Connection) -> None:
        try:
            while True:
                words = json.loads(_received(line))
                if "failed" in words:
                    raise _told_failure(rank, self.size, words)
                with self._changed:
                    self._words[rank].append(words)
                    self._changed.notify_all()
        except EngineDeadError as error:
            time.sleep(_COMPLAINT_S)
            self.fail(error)
        except CaravanError as error:
            self.fail(error)
        except (OSError, EOFError, ValueError) as error:
            self.fail(_gone(rank, self.size, str(error)))


class ControlChannel:
    """Another rank's connection to the first; both have proved that they know the token."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info
        self._line = _joined(rank_info)
        _keep_alive(self._line)

    @property
    def address(self) -> str:
        """That of this machine which the first rank sees."""
        return self._line.getsockname()[0]

    def received(self) -> bytes:
        """The next message, however long it takes to come; EOFError when the first rank ends."""
        return _received(self._line)

    def received_words(self) -> dict[str, Any]:
        return json.loads(self.received())

    def tell_words(self, words: Mapping[str, Any]) -> None:
        message = json.dumps(words).encode()
        self._line.sendall(_LENGTH.pack(len(message)) + message)

    def fail(self, error: BaseException) -> None:
        """Tell why this rank ends, as far as anybody listens."""
        known = isinstance(error, CaravanError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            self.tell_words({"failed": type(error).__name__ if known else None, "reason": text})

    def close(self) -> None:
        self._line.close()


def _joined(rank_info: RankInfo) -> Connection:
    """A connection to the first rank. EngineDeadError: there is none, or it is another process."""
    deadline = time.monotonic() + _JOIN_S
    context = tls.context_for("caller")
    while True:
        try:
            return _proved(rank_info, deadline, context)
        except (OSError, EOFError) as error:
            if isinstance(error, ssl.SSLError) or time.monotonic() > deadline:
                raise EngineDeadError(
                    f"Rank {rank_info.rank} of {rank_info.size} does not reach the first one at "
                    f"{rank_info.host}:{rank_info.port}: {_reason(error)}."
                ) from error
            time.sleep(0.2)


def _reason(error: OSError | EOFError) -> str:
    if isinstance(error, ssl.SSLError):
        return tls.refusal(error)
    return getattr(error, "strerror", None) or str(error)


def _proved(rank_info: RankInfo, deadline: float, context: ssl.SSLContext | None) -> Connection:
    remaining_s = max(deadline - time.monotonic(), 0.1)
    connected = socket.create_connection((rank_info.host, rank_info.port), timeout=remaining_s)
    line = connected if context is None else SecureSocket(connected, context, "caller")
    try:
        if isinstance(line, SecureSocket):
            line.settimeout(left_s(deadline))
            line.handshake()
        prove_rank(line, rank_info.rank, rank_info.size, rank_info.token, deadline=deadline)
    except BaseException:
        line.close()
        raise
    return line


def _received(line: Connection) -> bytes:
    (length,) = _LENGTH.unpack(read_exactly(line, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length:,} bytes")
    return read_exactly(line, length)


def _keep_alive(line: Connection) -> None:
    """So that the other machine's sudden end is noticed, and short messages go at once."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _EVERY_S),
        ("TCP_KEEPCNT", _TRIES),
        ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _EVERY_S * _TRIES)),
    ):
        if hasattr(socket, name):  # not on every system
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _gone(rank: int, size: int, why: str) -> EngineDeadError:
    return EngineDeadError(f"Rank {rank} of {size} is gone: {why}.")


def _told_failure(rank: int, size: int, words: Mapping[str, Any]) -> CaravanError:
    """The same kind of error as the rank met, where it is one of ours."""
    kind = getattr(errors, str(words["failed"]), EngineDeadError)
    if not (isinstance(kind, type) and issubclass(kind, CaravanError)):
        kind = EngineDeadError
    return kind(f"Rank {rank} of {size}: {words.get('reason')}")
