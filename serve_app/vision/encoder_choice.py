"""Which vision encoders there are, and which of them is asked first for an image."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Protocol

from serve_app.gateway.replica_calls import Handle, Replicas
from serve_app.logs import get_logger
from serve_app.transport.wire import Address

FRESH_S = 5.0
SHUNNED_S = 10.0
ANSWER_TIMEOUT_S = 2.0
ADDRESS = "address"  # the method of a replica that tells it

log = get_logger()


class Directory(Protocol):
    """Knows the encoders of one deployment; may fail when there are none."""

    async def addresses(self) -> Sequence[Address]: ...


class KnownEncoders:
    """The encoders that the directory has told of lately, in the order in which to ask them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._asking = asyncio.Lock()
        self._addresses: tuple[Address, ...] = ()
        self._asked_at: float | None = None
        self._shunned: dict[Address, float] = {}

    async def ranked(self, digest: bytes) -> list[Address]:
        """Those that have failed lately last. By rendezvous hashing (Thaler and Ravishankar,
        1998): every replica ranks alike, and an encoder that comes or goes moves its images alone.
        """
        async with self._asking:
            if not self._fresh:
                await self._ask()
        now = _now()
        self._shunned = {address: until for address, until in self._shunned.items() if until > now}
        return sorted(
            self._addresses, key=lambda each: (each in self._shunned, _weight(each, digest))
        )

    def shun(self, address: Address) -> None:
        self._shunned[address] = _now() + SHUNNED_S

    def forget(self) -> None:
        """Ask the directory again before the next image is ranked."""
        self._asked_at = None

    @property
    def _fresh(self) -> bool:
        return self._asked_at is not None and _now() - self._asked_at < FRESH_S

    async def _ask(self) -> None:
        """A directory that fails leaves what was known: encoders may well be there."""
        try:
            self._addresses = tuple(await self._directory.addresses())
        except Exception as error:
            log.info("vision encoders unknown", reason=f"{type(error).__name__}: {error}")
        self._asked_at = _now()


class EncoderDirectory:
    """The replicas behind a deployment handle, which is used on `loop` alone."""

    def __init__(self, handle: Handle, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = handle
        self._replicas = Replicas(handle)
        self._loop = loop

    async def addresses(self) -> list[Address]:
        """Those of all replicas; waits until there is one. May raise whatever Serve does."""
        asked = asyncio.run_coroutine_threadsafe(self._asked(), self._loop)
        return await asyncio.wrap_future(asked)

    async def _asked(self) -> list[Address]:
        told = await self._replicas.ask(ADDRESS, timeout_s=ANSWER_TIMEOUT_S)
        if told:
            return [Address(**each) for each in told]
        # With a reservation: only then does Serve see that somebody waits, and where it had stopped
        # them all, it starts one.
        async with self._handle.choose_replica(_reserve=True) as chosen:
            return [Address(**chosen.replica_metadata)]


def _weight(address: Address, digest: bytes) -> bytes:
    name = f"{address.host}:{address.port}".encode()
    return hashlib.blake2b(digest + name, digest_size=8).digest()


def _now() -> float:
    """On the clock of the event loop, by which timeouts go too."""
    return asyncio.get_running_loop().time()
