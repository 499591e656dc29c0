"""Which connections come from ranks: the handshake of the control channel, on both of its ends.

Its messages have fixed lengths, so nothing that precedes a proof takes memory: the first rank's
nonce; the other's number, nonce and proof; the first rank's proof (`handshake.py`). Where TLS is
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
# For a whole handshake, which takes a rank milliseconds.
_HANDSHAKE_S = 5.0
_MAX_HALF_OPEN = 128
_READ_BYTES = 1 << 18  # a read allocates all that it may return


class Admission:
    """The first rank's side, for all connections at the same time: none waits for another.

    One that has not finished after `_HANDSHAKE_S` is cut, and the oldest of too many. `missing`:
    the ranks that have not joined yet.
    """

    def __init__(
        self, door: socket.socket, token: str, size: int, context: ssl.SSLContext | None
    ) -> None:
        self.missing = set(range(1, size))
        self._door, self._token, self._size = door, token, size
        self._tls = context
        self._applicants: dict[_Applicant, None] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        door.setblocking(False)
        self._selector.register(door, selectors.EVENT_READ)

    def joined(self, wait_s: float) -> list[tuple[int, Connection]]:
        """Ranks that have finished their handshake since the last call, after `wait_s` at most."""
        ranks: list[tuple[int, Connection]] = []
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                ranks += self._accept(wait_s)
            elif key.data in self._applicants:  # else it has been cut meanwhile
                ranks += self._advanced(key.data)
        now = time.monotonic()
        for applicant in [each for each in self._applicants if each.deadline <= now]:
            self._cut(applicant)
        return ranks

    def close(self) -> None:
        """Cut all that have not finished; the listening socket stays open."""
        for applicant in list(self._applicants):
            self._cut(applicant)
        self._selector.close()

    def _accept(self, pause_s: float) -> list[tuple[int, Connection]]:
        try:
            line, _ = self._door.accept()
        except BlockingIOError:
            return []
        except OSError:  # such as too many open files; it stays readable
            time.sleep(pause_s)
            return []
        if len(self._applicants) >= _MAX_HALF_OPEN:
            self._cut(next(iter(self._applicants)))
        applicant = _Applicant(line, self._tls)
        self._applicants[applicant] = None
        self._selector.register(applicant.line, selectors.EVENT_READ, applicant)
        return self._advanced(applicant)

    def _advanced(self, applicant: "_Applicant") -> list[tuple[int, Connection]]:
        """The rank that this one is, if that shows now."""
        try:
            rank = applicant.proved_rank(self._token, self._size)
            if rank is None:
                return []
            if rank not in self.missing:
                raise EngineDeadError(f"Rank {rank} has joined already.")
            applicant.accept()
        except (OSError, EOFError, EngineDeadError) as error:
            if isinstance(error, ssl.SSLError):
                logger.warning("connection to the first rank refused: %s", tls.refusal(error))
            self._cut(applicant)
            return []
        self.missing.remove(rank)
        self._selector.unregister(applicant.line)
        del self._applicants[applicant]
        return [(rank, applicant.line)]

    def _cut(self, applicant: "_Applicant") -> None:
        del self._applicants[applicant]
        self._selector.unregister(applicant.line)
        applicant.line.close()


class _Applicant:
    """A connection that may come from a rank. What is sent fits into an empty socket's buffer."""

    def __init__(self, line: socket.socket, context: ssl.SSLContext | None) -> None:
        line.setblocking(False)
        self.line: Connection = line
        if context is not None:
            self.line = SecureSocket(line, context, "listener")
            self.line.settimeout(0)
        self.deadline = time.monotonic() + _HANDSHAKE_S
        self._nonce = new_nonce()
        self._challenged = False
        self._answer = bytearray()
        self._proof = b""

    def proved_rank(self, token: str, size: int) -> int | None:
        """Continues the handshake; None until the answer is whole. EOFError, OSError: the other
        side has left, or does not speak TLS. EngineDeadError: it does not know the token."""
        try:
            self._challenge()
            while len(self._answer) < _ANSWER.size:
                part = self.line.recv(_ANSWER.size - len(self._answer))
                if not part:
                    raise EOFError("its connection has ended")
                self._answer += part
        except BlockingIOError:
            return None
        rank, nonce, digest = _ANSWER.unpack(self._answer)
        handshake = Handshake(token, purpose(rank, size), self._nonce, nonce)
        if not handshake.proved("caller", digest):
            raise EngineDeadError("A connection comes from no rank of this model.")
        self._proof = handshake.proof("listener")
        return rank

    def accept(self) -> None:
        self.line.sendall(self._proof)

    def _challenge(self) -> None:
        """Once, after the handshake of TLS where there is one. BlockingIOError: not yet."""
        if self._challenged:
            return
        if isinstance(self.line, SecureSocket):
            self.line.handshake()
        self.line.sendall(self._nonce)
        self._challenged = True


def prove_rank(line: Connection, rank: int, size: int, token: str, *, deadline: float) -> None:
    """Another rank's side, until `deadline`, a time of `time.monotonic`.

    EngineDeadError: the listener does not know the token. OSError, EOFError: the connection ended
    or the handshake was not over in time.
    """
    theirs, own = read_exactly(line, NONCE_BYTES, deadline=deadline), new_nonce()
    handshake = Handshake(token, purpose(rank, size), theirs, own)
    line.sendall(_ANSWER.pack(rank, own, handshake.proof("caller")))
    answer = read_exactly(line, DIGEST_BYTES, deadline=deadline)
    if not handshake.proved("listener", answer):
        raise EngineDeadError(
            f"Rank {rank} of {size} has reached a process that is not the first rank: it does not "
            "know the token."
        )


def purpose(rank: int, size: int) -> str:
    return f"rank {rank} of {size}"


def read_exactly(line: Connection, count: int, *, deadline: float | None = None) -> bytes:
    """EOFError: the other side ended before. TimeoutError: it was not all there by `deadline`."""
    received = bytearray()
    while len(received) < count:
        if deadline is not None:
            line.settimeout(left_s(deadline))
        part = line.recv(min(count - len(received), _READ_BYTES))
        if not part:
            raise EOFError("its connection has ended")
        received += part
    return bytes(received)


def left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake was not over in time")
    return left
