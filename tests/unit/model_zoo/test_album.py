"""The album: one budget for the images of requests and for those that may come again."""

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


def test_files_room_to_come_and_images_are_counted_until_the_loan_is_closed() -> None:
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


def test_an_image_that_was_here_before_is_found_and_counted_once() -> None:
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


def test_of_two_who_make_the_same_image_at_once_both_get_the_first_one() -> None:
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


def test_images_that_nobody_has_make_room_the_longest_unused_first() -> None:
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


def test_what_others_have_is_told_as_busy_and_room_comes_back_with_them() -> None:
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


def test_what_no_request_may_take_is_a_fault_of_the_request_however_empty_it_is() -> None:
    image_cache = ImageCache(budget_bytes=100)
    with pytest.raises(RequestError, match="101 bytes, as files and as pixels; at most 100"):
        image_cache.lease(101)
    lease = image_cache.lease(50)
    put(lease, 1)
    with pytest.raises(RequestError, match="101 bytes"):
        lease.reserve(11)
    lease.close()
    assert image_cache.used_bytes == 0


def test_a_refusal_takes_nothing_and_drops_nothing() -> None:
    image_cache = ImageCache(budget_bytes=120)
    kept = image_cache.lease()
    put(kept, 1)
    kept.close()
    image_cache.lease(70)
    with pytest.raises(OverloadedError):
        image_cache.lease(60)
    assert (image_cache.used_bytes, image_cache.held_bytes) == (70, 110)


def test_a_thread_that_works_for_somebody_who_left_is_stopped_and_then_gives_back() -> None:
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


def test_the_budget_holds_whatever_comes_and_nothing_is_lost() -> None:
    r = random.Random(7)
    image_cache = ImageCache(budget_bytes=400)
    loans: list[ImageLease] = []
    refused = 0
    for _ in range(5000):
        if loans and r.random() < 0.4:
            loans.pop(r.randrange(len(loans))).close()
            continue
        try:
            loans.append(image_cache.lease(r.randrange(50)))
            for number in r.choices(range(12), k=r.randrange(4)):
                if loans[-1].find(bytes([number])) is None:
                    put(loans[-1], number, 4 * (1 + 5 * number))
        except (OverloadedError, RequestError):
            refused += 1
        assert image_cache.used_bytes <= image_cache.held_bytes <= 400
    for lease in loans:
        lease.close()
    assert refused > 100 and image_cache.used_bytes == 0 and image_cache.held_bytes > 0


def test_one_tenant_s_requests_leave_room_for_others() -> None:
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


def test_one_request_alone_may_take_all_room_in_pieces() -> None:
    image_cache = ImageCache(budget_bytes=100)
    lease = image_cache.lease(40, tenant="one")
    lease.reserve(60)
    lease.close()
    lease.close()
    assert image_cache.used_bytes == 0
    image_cache.lease(100, tenant="one")
