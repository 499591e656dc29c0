"""The handshake of the control channel, on both of its ends.

Its messages have fixed lengths, so a peer without proof cannot make a rank allocate memory: rank
0's nonce; the other rank's number, nonce and proof; rank 0's proof (`handshake.py`). Where TLS is
configured, its handshake precedes them.
"""

import logging
import selectors
import socket
import ssl
import struct
import time

from runtime import tls
from runtime.distributed.handshake import DIGEST_BYTES, NONCE_BYTES, Handshake, new_nonce
from runtime.errors import EngineDeadError
from runtime.tls import Connection, SecureSocket

logger = logging.getLogger(__name__)

_ANSWER = struct.Struct(f"<I{NONCE_BYTES}s{DIGEST_BYTES}s")
# Limit of a whole handshake, which takes milliseconds.
_HANDSHAKE_S = 5.0
_MAX_HALF_OPEN = 128
_READ_BYTES = 1 << 18  # recv allocates as many bytes as it may return


class Admission:
    """Rank 0's side, for all connections concurrently.

    A connection is closed if its handshake takes longer than `_HANDSHAKE_S`, and so is the oldest
    one when there are too many. `missing`: the ranks that have not joined yet.
    """

    def __init__(
        self, listener: socket.socket, token: str, size: int, context: ssl.SSLContext | None
    ) -> None:
        self.missing = set(range(1, size))
        self._listener, self._token, self._size = listener, token, size
        self._tls = context
        self._pending: dict[_PendingConnection, None] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def joined(self, wait_s: float) -> list[tuple[int, Connection]]:
        """Ranks that finish their handshake; waits for at most `wait_s`."""
        ranks: list[tuple[int, Connection]] = []
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                ranks += self._accept(wait_s)
            elif key.data in self._pending:  # else it has been closed meanwhile
                ranks += self._advanced(key.data)
        now = time.monotonic()
        for pending in [each for each in self._pending if each.deadline <= now]:
            self._cut(pending)
        return ranks

    def close(self) -> None:
        """Close the unfinished connections; the listening socket stays open."""
        for pending in list(self._pending):
            self._cut(pending)
        self._selector.close()

    def _accept(self, pause_s: float) -> list[tuple[int, Connection]]:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return []
        except OSError:  # such as too many open files; the socket stays readable
            time.sleep(pause_s)
            return []
        try:
            pending = _PendingConnection(connection, self._tls)
        except OSError:  # the peer has reset the connection
            connection.close()
            return []
        if len(self._pending) >= _MAX_HALF_OPEN:
            self._cut(next(iter(self._pending)))
        self._pending[pending] = None
        self._selector.register(pending.connection, selectors.EVENT_READ, pending)
        return self._advanced(pending)

    def _advanced(self, pending: "_PendingConnection") -> list[tuple[int, Connection]]:
        """The rank and its connection, if its handshake is complete now."""
        try:
            rank = pending.proved_rank(self._token, self._size)
            if rank is None:
                return []
            if rank not in self.missing:
                raise EngineDeadError(f"Rank {rank} has joined already.")
            pending.accept()
        except (OSError, EOFError, EngineDeadError) as error:
            if isinstance(error, ssl.SSLError):
                logger.warning("connection to rank 0 refused: %s", tls.refusal(error))
            self._cut(pending)
            return []
        self.missing.remove(rank)
        self._selector.unregister(pending.connection)
        del self._pending[pending]
        return [(rank, pending.connection)]

    def _cut(self, pending: "_PendingConnection") -> None:
        del self._pending[pending]
        self._selector.unregister(pending.connection)
        pending.connection.close()


class _PendingConnection:
    """A connection during its handshake. All that is sent fits into an empty socket buffer."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext | None) -> None:
        connection.setblocking(False)
        self.connection: Connection = connection
        if context is not None:
            self.connection = SecureSocket(connection, context, "listener")
            self.connection.settimeout(0)
        self.deadline = time.monotonic() + _HANDSHAKE_S
        self._nonce = new_nonce()
        self._challenged = False
        self._answer = bytearray()
        self._proof = b""

    def proved_rank(self, token: str, size: int) -> int | None:
        """Continue the handshake; None until the answer is complete.

        EOFError, OSError: the peer has closed the connection or does not speak TLS.
        EngineDeadError: it does not know the token.
        """
        try:
            self._challenge()
            while len(self._answer) < _ANSWER.size:
                part = self.connection.recv(_ANSWER.size - len(self._answer))
                if not part:
                    raise EOFError("its connection has ended")
                self._answer += part
        except BlockingIOError:
            return None
        rank, nonce, digest = _ANSWER.unpack(self._answer)
        handshake = Handshake(token, purpose(rank, size), self._nonce, nonce)
        if not handshake.proved("caller", digest):
            raise EngineDeadError("The connection is not from a rank of this model.")
        self._proof = handshake.proof("listener")
        return rank

    def accept(self) -> None:
        self.connection.sendall(self._proof)

    def _challenge(self) -> None:
        """Send the nonce once, after any TLS handshake. BlockingIOError: not possible yet."""
        if self._challenged:
            return
        if isinstance(self.connection, SecureSocket):
            self.connection.handshake()
        self.connection.sendall(self._nonce)
        self._challenged = True


def prove_rank(
    connection: Connection, rank: int, size: int, token: str, *, deadline: float
) -> None:
    """The other ranks' side of the handshake. `deadline`: a time of `time.monotonic`.

    EngineDeadError: the listener does not know the token. OSError, EOFError: the connection was
    closed, or the handshake was not complete in time.
    """
    theirs, own = read_exactly(connection, NONCE_BYTES, deadline=deadline), new_nonce()
    handshake = Handshake(token, purpose(rank, size), theirs, own)
    connection.sendall(_ANSWER.pack(rank, own, handshake.proof("caller")))
    answer = read_exactly(connection, DIGEST_BYTES, deadline=deadline)
    if not handshake.proved("listener", answer):
        raise EngineDeadError(
            f"Rank {rank} of {size} has reached a process that is not rank 0: it does not "
            "know the token."
        )


def purpose(rank: int, size: int) -> str:
    return f"rank {rank} of {size}"


def read_exactly(connection: Connection, count: int, *, deadline: float | None = None) -> bytes:
    """EOFError: the peer closed the connection. TimeoutError: `deadline` has passed."""
    received = bytearray()
    while len(received) < count:
        if deadline is not None:
            connection.settimeout(left_s(deadline))
        part = connection.recv(min(count - len(received), _READ_BYTES))
        if not part:
            raise EOFError("its connection has ended")
        received += part
    return bytes(received)


def left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake was not complete in time")
    return left
