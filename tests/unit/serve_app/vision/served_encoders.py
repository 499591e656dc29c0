"""Encoders with fake towers behind real sockets, and pools of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from runtime.vision.encoder import PreparedImage
from serve_app.transport.stream_server import StreamServer
from serve_app.transport.wire import Address
from serve_app.vision.encoder_pool import PoolEncoder, PoolRules
from serve_app.vision.encoder_replica import EncoderReplica
from serve_app.vision.feature_transfer import feature_server
from tests.patience import HANG_S
from tests.unit.runtime.vision.fake_tower import PretendTower, features_of

CPU = torch.device("cpu")
NAME = b"the file with the weights"
WEIGHT_BYTES = 1000
# No time limit is reached, and the pause between two rounds is short.
FAST_RETRIES = PoolRules(timeout_s=HANG_S, silence_s=HANG_S, pause_s=0.01, longest_pause_s=0.05)


class ListedEncoders(list[Address]):
    """An EncoderSource whose list the test writes; counts how often it is read."""

    listings = 0

    async def addresses(self) -> Sequence[Address]:
        self.listings += 1
        return list(self)


def encoder_of(tower: PretendTower, **options) -> EncoderReplica:
    return EncoderReplica(
        tower, **{"name": NAME, "device": CPU, "weight_bytes": WEIGHT_BYTES, **options}
    )


@asynccontextmanager
async def served(
    encoder: EncoderReplica, *, stall_s: float = HANG_S
) -> AsyncIterator[tuple[StreamServer, Address]]:
    server = feature_server(encoder, stall_s=stall_s)
    address = await server.start("127.0.0.1")
    try:
        yield server, address
    finally:
        await server.close(drain_s=0)
        await asyncio.to_thread(encoder.close)


@asynccontextmanager
async def pool_of(
    source: ListedEncoders,
    tower: PretendTower,
    *,
    rules: PoolRules = FAST_RETRIES,
    name: bytes = NAME,
) -> AsyncIterator[PoolEncoder]:
    """`tower`: one like those in the pool, from the file `name`."""
    pool = PoolEncoder(tower.limits, source, tower=name, device=CPU, rules=rules)
    try:
        yield pool
    finally:
        await asyncio.to_thread(pool.close)


async def encoded(pool: PoolEncoder, image: PreparedImage) -> torch.Tensor:
    async with asyncio.timeout(HANG_S):
        return await asyncio.wrap_future(pool.submit(image))


def rounded(image: PreparedImage, width: int = 16) -> torch.Tensor:
    """The features that the fake tower computes, as they are received."""
    return features_of(image.digest, image.rows, width).to(torch.bfloat16).float()
