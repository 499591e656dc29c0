"""TLS for the cluster's own connections, configured by the variables that Ray reads for gRPC.

Each end presents its host's certificate and verifies that the cluster's CA has signed the other
one. Names in certificates are not checked: the handshake inside the connection proves the identity
of the other process (`handshake.py`).
"""

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

from runtime.distributed.handshake import Role
from runtime.errors import ConfigurationError

_CERTIFICATE, _KEY, _CA = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"

T = TypeVar("T")


def configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `RAY_USE_TLS` is set; parsed as Ray does."""
    return environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def context_for(role: Role, environment: Mapping[str, str] = os.environ) -> ssl.SSLContext | None:
    """The TLS context, with the certificates that are on disk now; None if TLS is not configured.
    Its files are read again only after a change.

    ConfigurationError: a variable is missing, or its file cannot be read.
    """
    if not configured(environment):
        return None
    for name in (_CERTIFICATE, _KEY, _CA):
        if not environment.get(name):
            raise ConfigurationError(
                f"`RAY_USE_TLS` is set, but `{name}` is not. Set {_CERTIFICATE}, {_KEY} and {_CA} "
                "to PEM files on every host."
            )
    files = tuple(environment[name] for name in (_CERTIFICATE, _KEY, _CA))
    try:
        return _context(role, files, tuple(_version(file) for file in files))
    except OSError as error:  # ssl.SSLError among them
        named = ", ".join(f"{name}={environment[name]}" for name in (_CERTIFICATE, _KEY, _CA))
        raise ConfigurationError(f"The TLS files cannot be used: {error} ({named}).") from error


@lru_cache(maxsize=4)
def _context(
    role: Role, files: tuple[str, ...], versions: tuple[tuple[int, ...], ...]
) -> ssl.SSLContext:
    """`files`: certificate, key and CA. Reading them takes a millisecond, which each connection
    would cost. `versions` are read before the files, so a change meanwhile is seen next time."""
    certificate, key, authority = files
    context = ssl.SSLContext(
        ssl.PROTOCOL_TLS_CLIENT if role == "caller" else ssl.PROTOCOL_TLS_SERVER
    )
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    return context


def _version(path: str) -> tuple[int, ...]:
    """Differs after a file was written or replaced, also by another target of a link."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def refusal(error: OSError) -> str:
    """A message that names the likely cause of a failed TLS handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the other end's certificate is refused: {error.verify_message}. All hosts need "
            f"certificates signed by the CA of `{_CA}`"
        )
    if isinstance(error, ssl.SSLError) and "UNKNOWN_CA" in (error.reason or ""):
        return (
            "the other end refuses this host's certificate: unknown CA. All hosts need "
            f"certificates signed by the CA of `{_CA}`"
        )
    if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "the other end does not speak TLS. Set `RAY_USE_TLS=1` on all hosts"
    return f"the TLS handshake failed: {error}"


class SecureSocket:
    """A blocking TLS connection that one thread may read while another one writes.

    OpenSSL connections are not thread-safe, and Python's TLS sockets have no lock. Here every call
    into OpenSSL is non-blocking and holds a lock; threads wait without it.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, role: Role) -> None:
        """Takes ownership of `connected`. Nothing is sent before `handshake`."""
        connected.setblocking(False)
        self._socket = context.wrap_socket(
            connected, server_side=role == "listener", do_handshake_on_connect=False
        )
        self._timeout_s: float | None = None
        self._lock = threading.Lock()

    def handshake(self) -> None:
        """With a timeout of 0, BlockingIOError: call again when there is more to read."""
        self._until_done(self._socket.do_handshake)

    def recv(self, count: int) -> bytes:
        return self._until_done(lambda: self._socket.recv(count))

    def sendall(self, data: bytes) -> None:
        with memoryview(data) as left:
            sent = 0
            while sent < len(left):
                sent += self._until_done(partial(self._socket.send, left[sent:]))

    def settimeout(self, timeout_s: float | None) -> None:
        """The limit of each later call; 0: calls that would wait raise BlockingIOError."""
        self._timeout_s = timeout_s

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self._socket.setsockopt(level, name, value)

    def getpeername(self) -> Any:
        return self._socket.getpeername()

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        """Shut down the TCP connection, so that a thread in `recv` returns."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        self._socket.close()

    def _until_done(self, call: Callable[[], T]) -> T:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)

    def _wait(self, event: int, deadline: float | None) -> None:
        if self._timeout_s == 0:
            raise BlockingIOError("the TLS connection is not ready")
        left_ms = None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))
        waiting = select.poll()
        waiting.register(self._socket, event)
        if not waiting.poll(left_ms):
            raise TimeoutError("timed out")


Connection = socket.socket | SecureSocket
