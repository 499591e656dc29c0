"""The encoders of a deployment, and the order in which they are tried for an image."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Protocol

from runtime.errors import ModelUnavailableError
from serve_app.logs import get_logger
from serve_app.routing.replica_calls import Replicas
from serve_app.transport.wire import Address

FRESH_S = 5.0
AVOIDED_S = 10.0
ANSWER_TIMEOUT_S = 2.0
ADDRESS = "address"  # the method of an encoder's deployment that returns it

log = get_logger()


class EncoderSource(Protocol):
    """Lists the encoders of one deployment. May fail while there are none, and raises
    ModelUnavailableError with the reason if they could not be loaded."""

    async def addresses(self) -> Sequence[Address]: ...


class DeploymentEncoders:
    """The encoders that are the replicas of a deployment, which are called in `loop` only."""

    def __init__(self, replicas: Replicas, loop: asyncio.AbstractEventLoop) -> None:
        self._replicas = replicas
        self._loop = loop

    async def addresses(self) -> list[Address]:
        """Addresses of the replicas that answer in time. Waits for the first one if there is none;
        TimeoutError if all hang, ModelUnavailableError if they could not be loaded."""
        listing = asyncio.run_coroutine_threadsafe(self._list(), self._loop)
        return await asyncio.wrap_future(listing)

    async def _list(self) -> list[Address]:
        found = await self._replicas.ask_all(ADDRESS, timeout_s=ANSWER_TIMEOUT_S)
        if not found:
            await self._replicas.await_one()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                found = [await self._replicas.ask_any(ADDRESS, patience_s=ANSWER_TIMEOUT_S)]
        return [Address(**each) for each in found]


class EncoderRanking:
    """Ranks the encoders of `source` for each image; lists them again every FRESH_S."""

    def __init__(self, source: EncoderSource) -> None:
        self._source = source
        self._listing = asyncio.Lock()
        self._addresses: tuple[Address, ...] = ()
        self._listed_at: float | None = None
        self._avoided_until: dict[Address, float] = {}

    async def ranked(self, digest: bytes) -> list[Address]:
        """All encoders, those that failed within AVOIDED_S last. ModelUnavailableError as from the
        source.

        The order is that of rendezvous hashing (Thaler and Ravishankar, 1998): all model replicas
        rank alike, and adding or removing an encoder changes the order of its own images only.
        """
        async with self._listing:
            if self._listed_at is None or _now() - self._listed_at >= FRESH_S:
                await self._list()
        now = _now()
        self._avoided_until = {
            address: until for address, until in self._avoided_until.items() if until > now
        }
        return sorted(
            self._addresses, key=lambda each: (each in self._avoided_until, _weight(each, digest))
        )

    def avoid(self, address: Address) -> None:
        """Rank a failed encoder last for AVOIDED_S."""
        self._avoided_until[address] = _now() + AVOIDED_S

    def expire(self) -> None:
        """List the encoders again before the next image is ranked."""
        self._listed_at = None

    async def _list(self) -> None:
        """List the encoders. Keeps the previous list if the source fails, because they may still
        run."""
        try:
            self._addresses = tuple(await self._source.addresses())
        except ModelUnavailableError:
            self._addresses = ()
            raise
        except Exception as error:
            log.info("vision encoders unknown", reason=f"{type(error).__name__}: {error}")
        self._listed_at = _now()


def _weight(address: Address, digest: bytes) -> bytes:
    name = f"{address.host}:{address.port}".encode()
    return hashlib.blake2b(digest + name, digest_size=8).digest()


def _now() -> float:
    """The event loop's clock, which timeouts use as well."""
    return asyncio.get_running_loop().time()
