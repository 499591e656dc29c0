"""An encoder with many callers: each image once, batches of one shape, bounded memory."""

import asyncio
import dataclasses
import threading

import pytest
import torch

from runtime.errors import (
    ConfigurationError,
    EngineDeadError,
    GenerationFailedError,
    RequestError,
    UnsupportedModelError,
)
from runtime.vision.encoder import ImageOutline, PreparedImage
from serve_app.transport.wire import EncodeRequest
from serve_app.vision.encoder_replica import SENT_AT_ONCE, EncoderReplica, OutgoingTower
from tests.patience import HANG_S, settled, until
from tests.unit.runtime.vision.fake_tower import PretendTower, features_of, picture
from tests.unit.serve_app.vision.served_encoders import CPU, NAME, WEIGHT_BYTES, encoder_of

LARGEST_BYTES = 8 * 16 * 2


def request(image: PreparedImage, **change) -> EncodeRequest:
    shape = tuple(image.pixels.shape)
    given = EncodeRequest(NAME, image.digest, shape, image.grid, image.rows, image.tenant)
    return EncodeRequest(
        **{name: getattr(given, name) for name in given.__struct_fields__} | change
    )


async def encode(encoder: EncoderReplica, image: PreparedImage) -> torch.Tensor:
    async def receive() -> torch.Tensor:
        return image.pixels

    return await encoder.features(request(image), receive)


def expected(image: PreparedImage) -> torch.Tensor:
    return features_of(image.digest, image.rows, 16).to(torch.bfloat16)


async def all_of(*work):
    async with asyncio.timeout(HANG_S):
        return await asyncio.gather(*work, return_exceptions=True)


class GatedEncoder:
    """An encoder whose tower waits at a gate that opens for one batch at a time."""

    def __init__(self, *, broken: frozenset[int] = frozenset(), **options) -> None:
        self.gate = threading.Semaphore(0)
        self.tower = PretendTower(gate=self.gate, broken=broken)
        self.encoder = encoder_of(self.tower, **options)

    async def __aenter__(self) -> "GatedEncoder":
        return self

    async def __aexit__(self, *_) -> None:
        self.gate.release(100)
        await asyncio.to_thread(self.encoder.close)


async def test_an_image_is_encoded_once_for_all_requests() -> None:
    async with GatedEncoder() as gated:
        gated.gate.release(100)
        image = picture(5)
        together = await all_of(*(encode(gated.encoder, image) for _ in range(10)))
        later = await encode(gated.encoder, image)
        assert all(torch.equal(features, expected(image)) for features in (*together, later))
        assert gated.tower.encoded == [5]
        statistics = gated.encoder.statistics()
        assert (statistics.images_encoded_total, statistics.images_known_total) == (1, 10)
        assert statistics.images_waiting == 0


async def test_waiting_images_of_one_shape_form_a_batch() -> None:
    async with GatedEncoder(batch_images=3) as gated:
        rows = {1: 3, 2: 3, 3: 5, 4: 3, 5: 3, 6: 5}
        images = [picture(number, count) for number, count in rows.items()]
        requests = [asyncio.create_task(encode(gated.encoder, images[0]))]
        await until(lambda: gated.tower.entered.acquire(blocking=False))
        requests += [asyncio.create_task(encode(gated.encoder, image)) for image in images[1:]]
        await until(lambda: gated.encoder.statistics().images_waiting == 6)
        await settled()
        gated.gate.release(100)
        found = await all_of(*requests)
        assert [sorted(batch) for batch in gated.tower.batches] == [[1], [2, 4, 5], [3, 6]]
        for image, features in zip(images, found, strict=True):
            assert torch.equal(features, expected(image))


async def test_tenants_are_served_in_turn() -> None:
    async with GatedEncoder(batch_images=1) as gated:
        flood = [picture(number) for number in range(1, 9)]
        requests = [asyncio.create_task(encode(gated.encoder, image)) for image in flood]
        await until(lambda: gated.tower.entered.acquire(blocking=False))
        other = dataclasses.replace(picture(9), tenant="other")
        requests.append(asyncio.create_task(encode(gated.encoder, other)))
        await until(lambda: gated.encoder.statistics().images_waiting == 9)
        gated.gate.release(100)
        await all_of(*requests)
        assert gated.tower.encoded.index(9) <= 3, "the pixels of two were received, one was next"


async def test_pixels_are_accepted_for_two_batches_only() -> None:
    async with GatedEncoder(batch_images=2) as gated:
        encoder, holding, most = gated.encoder, 0, 0

        async def counted(image: PreparedImage) -> torch.Tensor:
            nonlocal holding

            async def receive() -> torch.Tensor:
                nonlocal holding, most
                holding += 1
                most = max(most, holding)
                return image.pixels

            features = await encoder.features(request(image), receive)
            holding -= 1
            return features

        requests = [asyncio.create_task(counted(picture(number))) for number in range(1, 12)]
        for _ in range(11):
            await settled()
            gated.gate.release()
        await all_of(*requests)
        assert most == 4 and len(gated.tower.encoded) == 11
        pixels = 4 * gated.tower.limits.largest.nbytes
        assert encoder.host_bytes == pixels + 16 * LARGEST_BYTES + SENT_AT_ONCE * LARGEST_BYTES


async def test_a_caller_that_leaves_while_waiting_frees_its_place() -> None:
    async with GatedEncoder() as gated:
        first = asyncio.create_task(encode(gated.encoder, picture(1)))
        await until(lambda: gated.tower.entered.acquire(blocking=False))
        others = [asyncio.create_task(encode(gated.encoder, picture(n))) for n in range(2, 9)]
        await until(lambda: gated.encoder.statistics().images_waiting == 8)
        for other in others:
            other.cancel()
        await all_of(*others)
        assert gated.encoder.statistics().images_waiting == 1
        gated.gate.release(100)
        assert torch.equal(await first, expected(picture(1)))
        last = picture(9)
        assert torch.equal(await encode(gated.encoder, last), expected(last))
        assert gated.tower.encoded == [1, 9]


async def test_if_the_caller_with_the_pixels_leaves_the_next_one_sends_them() -> None:
    async with GatedEncoder() as gated:
        encoder, image = gated.encoder, picture(5)
        receiving = asyncio.Event()

        async def never() -> torch.Tensor:
            receiving.set()
            return await asyncio.get_running_loop().create_future()

        first = asyncio.create_task(encoder.features(request(image), never))
        await receiving.wait()
        second = asyncio.create_task(encode(encoder, image))
        await settled()
        assert not second.done()
        first.cancel()
        gated.gate.release(100)
        assert torch.equal(await second, expected(image))
        assert gated.tower.encoded == [5]


async def test_features_of_a_caller_that_left_are_used_at_once() -> None:
    """It leaves while its image is encoded; the next caller is sending the pixels meanwhile."""
    async with GatedEncoder() as gated:
        encoder, image = gated.encoder, picture(5)
        first = asyncio.create_task(encode(encoder, image))
        await until(lambda: gated.tower.entered.acquire(blocking=False))
        first.cancel()
        await all_of(first)

        async def receive() -> torch.Tensor:
            gated.gate.release(100)
            await until(lambda: encoder.statistics().images_encoded_total == 1)
            return image.pixels

        async with asyncio.timeout(HANG_S):
            features = await encoder.features(request(image), receive)
        assert torch.equal(features, expected(image))
        assert gated.tower.encoded == [5]


async def test_an_image_that_cannot_be_encoded_fails_only_its_own_requests() -> None:
    async with GatedEncoder(batch_images=4, broken=frozenset([3])) as gated:
        gated.gate.release(100)
        images = [picture(number) for number in (1, 2, 3, 3, 4)]
        found = await all_of(*(encode(gated.encoder, image) for image in images))
        for image, features in zip(images, found, strict=True):
            if image.digest == b"\3":
                assert isinstance(features, GenerationFailedError)
                assert "upside down" in str(features)
            else:
                assert torch.equal(features, expected(image))
        gated.encoder.check()


async def test_a_failed_device_fails_the_encoder() -> None:
    class FailingTower(PretendTower):
        def encode(self, pixels, grid, pause):
            raise torch.AcceleratorError("unspecified launch failure")

    encoder = encoder_of(FailingTower())
    with pytest.raises(EngineDeadError, match="unspecified launch failure"):
        await encode(encoder, picture(1))
    with pytest.raises(EngineDeadError):
        encoder.check()
    with pytest.raises(EngineDeadError):
        await encode(encoder, picture(2))
    await asyncio.to_thread(encoder.close)


async def test_a_stalled_encoder_fails_its_check() -> None:
    now_s = 0.0
    async with GatedEncoder(clock=lambda: now_s) as gated:
        encoding = asyncio.create_task(encode(gated.encoder, picture(1)))
        await until(lambda: gated.tower.entered.acquire(blocking=False))
        now_s += 299.0
        gated.encoder.check()
        now_s += 2.0
        with pytest.raises(EngineDeadError, match="no part of an image was encoded for 300 s"):
            gated.encoder.check()
        gated.gate.release(100)
        await encoding
        gated.encoder.check()


async def test_an_image_may_take_longer_than_a_stall_while_its_parts_are_encoded() -> None:
    now_s = 0.0
    async with GatedEncoder(clock=lambda: now_s) as gated:
        gated.tower.parts = 4
        encoding = asyncio.create_task(encode(gated.encoder, picture(1)))
        for _ in range(gated.tower.parts):
            await until(lambda: gated.tower.entered.acquire(blocking=False))
            now_s += 299.0
            gated.encoder.check()
            gated.gate.release()
        await encoding


async def test_the_cache_keeps_its_budget_and_evicts_the_least_recently_used() -> None:
    each = 3 * 16 * 2
    async with GatedEncoder(cache_bytes=3 * each) as gated:
        gated.gate.release(100)
        for number in (1, 2, 3, 1, 4, 1, 5, 1):
            await encode(gated.encoder, picture(number))
        assert gated.tower.encoded == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        {"tower": b"another file"},
        {"rows": 9},
        {"shape": (9,)},
        {"shape": (2**24, 2**24, 2**24)},
    ],
)
async def test_an_unsuitable_image_is_refused_before_its_pixels_are_sent(change) -> None:
    async with GatedEncoder() as gated:
        with pytest.raises(RequestError, match="vision encoder"):
            await gated.encoder.features(request(picture(1), **change), pytest.fail)


def test_a_cache_that_cannot_hold_one_image_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"`vision.cache_bytes` is 255;.* 256\."):
        encoder_of(PretendTower(), cache_bytes=LARGEST_BYTES - 1)


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float16])
def test_features_are_sent_in_16_bits(computed) -> None:
    tower = PretendTower()
    tower.limits = dataclasses.replace(tower.limits, dtype=computed)
    numbers = torch.tensor([[[1.0, -3e4, 2e-4], [1 + 2**-10, 7.0, 0.1]]]).to(computed)
    tower.encode = lambda pixels, grid, pause: numbers
    outgoing = OutgoingTower(tower)
    found = outgoing.encode(torch.zeros(1, 2), (1, 2))
    assert found.dtype is outgoing.limits.dtype and found.dtype.itemsize == 2
    if computed is torch.float32:
        assert torch.allclose(found.float(), numbers, rtol=2**-8, atol=0)
    else:
        assert torch.equal(found, numbers)


def test_numbers_beyond_float16_stay_finite() -> None:
    tower = PretendTower()
    tower.encode = lambda pixels, grid, pause: torch.full((1, 1, 16), 1e6)
    assert OutgoingTower(tower).encode(torch.zeros(1, 1), (1, 1)).isfinite().all()


def test_warm_up_encodes_the_largest_batch() -> None:
    tower = PretendTower()
    encoder = encoder_of(tower, batch_images=3)
    encoder.warm_up()
    assert encoder.statistics().batches_total == 1
    assert encoder.device_bytes >= tower.activation_bytes(3) + 3 * LARGEST_BYTES
    assert encoder.weight_bytes == WEIGHT_BYTES
    tower.limits = dataclasses.replace(tower.limits, largest=ImageOutline((9,), (1, 9), 9))
    with pytest.raises(UnsupportedModelError, match="8 rows of 16 numbers are planned for"):
        encoder_of(tower, device=CPU).warm_up()
    encoder.close()
