"""The image cache: one budget for images of running requests and cached ones."""

import random
from concurrent.futures import CancelledError

import pytest
import torch

from model_zoo.multimodal.image_cache import ImageCache, ImageLease
from runtime.errors import OverloadedError, RequestError
from runtime.vision.encoder import PreparedImage


def image(number: int, nbytes: int = 40) -> PreparedImage:
    return PreparedImage(torch.zeros(nbytes // 4), (1, 1), bytes([number]), 1)


def put(lease: ImageLease, number: int, nbytes: int = 40) -> PreparedImage:
    lease.reserve(nbytes)
    return lease.add(bytes([number]), image(number, nbytes))


def test_files_reservations_and_images_count_until_the_lease_is_closed() -> None:
    image_cache = ImageCache(budget_bytes=1000)
    lease = image_cache.lease(100)
    lease.reserve(80)
    assert image_cache.used_bytes == 180
    lease.add(b"a", image(1))
    assert image_cache.used_bytes == 180
    lease.close()
    assert (image_cache.used_bytes, image_cache.held_bytes) == (0, 40)
    lease.close()
    assert (image_cache.used_bytes, image_cache.held_bytes) == (0, 40)


def test_a_cached_image_is_found_and_counted_once() -> None:
    image_cache = ImageCache(budget_bytes=1000)
    first, second = image_cache.lease(), image_cache.lease()
    made = put(first, 1)
    assert second.find(b"\x01") is made and image_cache.used_bytes == 40
    first.close()
    assert image_cache.used_bytes == 40
    second.close()
    assert (image_cache.used_bytes, image_cache.held_bytes) == (0, 40)
    assert image_cache.lease().find(b"\x01") is made
    assert image_cache.used_bytes == 40
    assert image_cache.lease().find(b"\x02") is None


def test_an_image_that_one_lease_finds_again_is_counted_once() -> None:
    image_cache = ImageCache(budget_bytes=100)
    lease = image_cache.lease()
    made = put(lease, 1)
    other = image_cache.lease()
    for _ in range(3):
        assert lease.find(b"\x01") is made and other.find(b"\x01") is made
    assert image_cache.used_bytes == 40
    lease.reserve(60)
    with pytest.raises(RequestError, match="101 bytes"):
        lease.reserve(1)
    lease.close()
    assert (image_cache.used_bytes, image_cache.held_bytes) == (40, 40)
    other.close()
    assert (image_cache.used_bytes, image_cache.held_bytes) == (0, 40)


def test_two_requests_that_prepare_the_same_image_share_the_first_one() -> None:
    image_cache = ImageCache(budget_bytes=1000)
    one, other = image_cache.lease(), image_cache.lease()
    one.reserve(40)
    other.reserve(40)
    first = one.add(b"a", image(1))
    assert other.add(b"a", image(1)) is first
    assert image_cache.used_bytes == 40
    one.close()
    other.close()
    assert (image_cache.used_bytes, image_cache.held_bytes) == (0, 40)


def test_unused_images_are_evicted_least_recently_used_first() -> None:
    image_cache = ImageCache(budget_bytes=120)
    for number in (1, 2, 3):
        lease = image_cache.lease()
        put(lease, number)
        lease.close()
    again = image_cache.lease()
    assert again.find(b"\x01") is not None  # now 2 is the longest unused
    put(again, 4)
    assert image_cache.held_bytes == 120
    found = [image_cache.lease().find(bytes([number])) is not None for number in (1, 2, 3, 4)]
    assert found == [True, False, True, True]


def test_memory_of_other_requests_is_an_overload_until_they_end() -> None:
    image_cache = ImageCache(budget_bytes=100)
    other = image_cache.lease(30)
    put(other, 1)
    lease = image_cache.lease(20)
    with pytest.raises(OverloadedError, match="90 bytes; `image_memory_bytes` is 100"):
        lease.reserve(40)
    with pytest.raises(OverloadedError, match="no room for 11 more"):
        image_cache.lease(11)
    other.close()
    put(lease, 2)


def test_a_request_beyond_the_whole_budget_is_a_request_error() -> None:
    image_cache = ImageCache(budget_bytes=100)
    with pytest.raises(RequestError, match="101 bytes, as files and as pixels; at most 100"):
        image_cache.lease(101)
    lease = image_cache.lease(50)
    put(lease, 1)
    with pytest.raises(RequestError, match="101 bytes"):
        lease.reserve(11)
    lease.close()
    assert image_cache.used_bytes == 0


def test_a_refusal_reserves_and_evicts_nothing() -> None:
    image_cache = ImageCache(budget_bytes=120)
    kept = image_cache.lease()
    put(kept, 1)
    kept.close()
    image_cache.lease(70)
    with pytest.raises(OverloadedError):
        image_cache.lease(60)
    assert (image_cache.used_bytes, image_cache.held_bytes) == (70, 110)


def test_a_thread_of_a_closed_lease_is_cancelled_before_memory_is_released() -> None:
    image_cache = ImageCache(budget_bytes=1000)
    lease = image_cache.lease(100)
    lease.begin_work()
    put(lease, 1)
    lease.reserve(40)
    lease.close()
    assert image_cache.used_bytes == 180, "the thread still has it all"
    with pytest.raises(CancelledError):
        lease.add(b"b", image(2))
    with pytest.raises(CancelledError):
        lease.find(b"a")
    with pytest.raises(CancelledError):
        lease.reserve(1)
    lease.end_work()
    assert (image_cache.used_bytes, image_cache.held_bytes) == (0, 40)


def test_the_budget_is_kept_in_random_use() -> None:
    r = random.Random(7)
    image_cache = ImageCache(budget_bytes=400)
    leases: list[ImageLease] = []
    refused = 0
    for _ in range(5000):
        if leases and r.random() < 0.4:
            leases.pop(r.randrange(len(leases))).close()
            continue
        try:
            leases.append(image_cache.lease(r.randrange(50)))
            for number in r.choices(range(12), k=r.randrange(4)):
                if leases[-1].find(bytes([number])) is None:
                    put(leases[-1], number, 4 * (1 + 5 * number))
        except (OverloadedError, RequestError):
            refused += 1
        assert image_cache.used_bytes <= image_cache.held_bytes <= 400
    for lease in leases:
        lease.close()
    assert refused > 100 and image_cache.used_bytes == 0 and image_cache.held_bytes > 0


def test_the_requests_of_one_tenant_leave_memory_for_others() -> None:
    image_cache = ImageCache(budget_bytes=100)
    first = image_cache.lease(60, tenant="flood")
    with pytest.raises(OverloadedError, match="other requests of this client take 60 bytes"):
        image_cache.lease(1, tenant="flood")
    other = image_cache.lease(40, tenant="other")
    first.close()
    for _ in range(3):
        image_cache.lease(10, tenant="flood")
    with pytest.raises(OverloadedError, match="of this client"):
        image_cache.lease(10, tenant="flood")
    other.close()
    image_cache.lease(10, tenant="other")


def test_a_single_request_may_reserve_the_whole_budget_in_steps() -> None:
    image_cache = ImageCache(budget_bytes=100)
    lease = image_cache.lease(40, tenant="one")
    lease.reserve(60)
    lease.close()
    lease.close()
    assert image_cache.used_bytes == 0
    image_cache.lease(100, tenant="one")


def test_images_that_a_request_releases_no_longer_count_for_its_tenant() -> None:
    image_cache = ImageCache(budget_bytes=100)
    first = image_cache.lease(tenant="one")
    for number in (1, 2):
        put(first, number, 40)
    with pytest.raises(OverloadedError, match="of this client"):
        image_cache.lease(20, tenant="one")
    first.keep_only([b"\x01"])
    second = image_cache.lease(20, tenant="one")
    for lease in (first, second):
        lease.close()
    assert image_cache.used_bytes == 0
    image_cache.lease(100, tenant="one")
