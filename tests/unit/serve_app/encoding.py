"""Encoders behind real sockets, with pretend towers, for tests of what stands before and behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from runtime.vision.encoder import PreparedImage
from serve_app.transport.feature_server import FeatureServer
from serve_app.transport.wire import Address
from serve_app.vision.encoder import EncoderReplica
from serve_app.vision.encoder_pool import PoolEncoder, PoolRules
from tests.patience import HANG_S
from tests.unit.runtime.vision import PretendTower, features_of

CPU = torch.device("cpu")
NAME = b"the file with the weights"
# Nothing is given up, and little time passes between two tries.
HASTY = PoolRules(timeout_s=HANG_S, patience_s=HANG_S, pause_s=0.01, longest_pause_s=0.05)


class Encoders(list[Address]):
    """A directory that the test writes itself; notes how often it is asked."""

    asked = 0

    async def addresses(self) -> Sequence[Address]:
        self.asked += 1
        return list(self)


def encoder_of(tower: PretendTower, **options) -> EncoderReplica:
    return EncoderReplica(tower, **{"name": NAME, "device": CPU, **options})


@asynccontextmanager
async def served(
    encoder: EncoderReplica, *, patience_s: float = HANG_S
) -> AsyncIterator[tuple[FeatureServer, Address]]:
    server = FeatureServer(encoder, patience_s=patience_s)
    address = await server.start("127.0.0.1")
    try:
        yield server, address
    finally:
        await server.close(drain_s=0)
        await asyncio.to_thread(encoder.close)


@asynccontextmanager
async def pool_of(
    directory: Encoders, tower: PretendTower, *, rules: PoolRules = HASTY, name: bytes = NAME
) -> AsyncIterator[PoolEncoder]:
    """`tower`: one like those in the pool, from the file `name`."""
    pool = PoolEncoder(tower.limits, directory, tower=name, device=CPU, rules=rules)
    try:
        yield pool
    finally:
        await asyncio.to_thread(pool.close)


async def encoded(pool: PoolEncoder, image: PreparedImage) -> torch.Tensor:
    async with asyncio.timeout(HANG_S):
        return await asyncio.wrap_future(pool.submit(image))


def rounded(image: PreparedImage, width: int = 16) -> torch.Tensor:
    """What the pretend tower makes of it, as it arrives."""
    return features_of(image.digest, image.rows, width).to(torch.bfloat16).float()
