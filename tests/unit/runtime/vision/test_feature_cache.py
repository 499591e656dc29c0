"""The feature cache: images are submitted once, kept while needed, within the budget."""

import random
from concurrent.futures import Future

import torch

from runtime.errors import GenerationFailedError, ModelUnavailableError
from runtime.vision.encoder import ImageLimits, ImageOutline, PreparedImage
from runtime.vision.feature_cache import FeatureStore
from tests.unit.runtime.vision.fake_tower import features_of, picture

WIDTH = 4
ROW_BYTES = 4 * WIDTH


class ManualEncoder:
    """Images are encoded when the test requests it."""

    limits = ImageLimits(8, ImageOutline((8,), (1, 8), 8), WIDTH, torch.float32)
    weight_bytes = workspace_bytes = 0
    progressed_at: float | None = 0.0

    def __init__(self, max_submitted: int | None = None) -> None:
        self.max_submitted = max_submitted
        self.asked: list[int] = []
        self.futures: dict[int, Future] = {}
        self.images: dict[int, PreparedImage] = {}

    def warm_up(self) -> None:
        pass

    def submit(self, image: PreparedImage) -> Future:
        number = image.digest[0]
        self.asked.append(number)
        self.images[number] = image
        self.futures[number] = Future()
        return self.futures[number]

    def start(self, number: int) -> None:
        assert self.futures[number].set_running_or_notify_cancel()

    def finish(self, number: int) -> None:
        image = self.images[number]
        self.futures[number].set_result(features_of(image.digest, image.rows, WIDTH))

    def close(self) -> None:
        pass


def store_of(rows: int, *, max_submitted: int | None = None) -> tuple[FeatureStore, ManualEncoder]:
    encoder = ManualEncoder(max_submitted)
    return FeatureStore(encoder, budget_bytes=rows * ROW_BYTES), encoder


def test_an_image_is_submitted_once() -> None:
    store, encoder = store_of(20)
    one = picture(1)
    store.provide([one, one, picture(1)])
    store.provide([one])
    assert encoder.asked == [1] and store.pending == 1 and not store.ready(one.digest)
    encoder.finish(1)
    assert store.has_finished
    assert store.collect() == {} and store.ready(one.digest) and store.pending == 0
    store.provide([one])
    assert encoder.asked == [1] and store.encoded == 1
    assert torch.equal(store.lookup(one.digest), features_of(one.digest, 3, WIDTH))


def test_unreferenced_features_are_evicted_least_recently_used_first() -> None:
    store, encoder = store_of(9)
    for number in (1, 2, 3):
        store.provide([picture(number)])
        encoder.finish(number)
        store.collect()
    store.provide([picture(1)])  # now 2 is the longest unused
    store.provide([picture(4)])
    assert [store.ready(bytes([n])) for n in (1, 2, 3)] == [True, False, True]


def test_touched_features_are_evicted_last() -> None:
    store, encoder = store_of(9)
    for number in (1, 2, 3):
        store.provide([picture(number)])
        encoder.finish(number)
        store.collect()
    store.touch(b"\x01")
    store.provide([picture(4)])
    assert [store.ready(bytes([n])) for n in (1, 2, 3)] == [True, False, True]


def test_more_urgent_images_evict_less_urgent_ones() -> None:
    store, encoder = store_of(6)
    store.provide([picture(1), picture(2)])
    encoder.finish(1)
    encoder.finish(2)
    store.collect()
    store.provide([picture(3), picture(2), picture(1)])
    assert encoder.asked == [1, 2, 3]
    assert store.ready(b"\x02") and not store.ready(b"\x01")


def test_an_image_that_is_no_longer_needed_is_cancelled_before_it_starts() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1), picture(2)])
    encoder.start(1)
    store.provide([])
    assert encoder.futures[2].cancelled() and store.pending == 1
    encoder.finish(1)
    store.collect()
    assert store.ready(b"\x01"), "it was too late to stop it, so it is kept"
    store.provide([picture(2)])
    assert encoder.asked == [1, 2, 2]


def test_a_later_urgent_image_waits_only_for_submitted_ones() -> None:
    store, encoder = store_of(60, max_submitted=2)
    flood = [picture(number) for number in range(1, 9)]
    store.provide(flood)
    assert encoder.asked == [1, 2]
    encoder.finish(1)
    store.collect()
    store.provide([picture(9), *flood])
    assert encoder.asked == [1, 2, 9]


def test_a_running_encode_keeps_its_memory_until_it_ends() -> None:
    store, encoder = store_of(4)
    store.provide([picture(1)])
    encoder.start(1)
    store.provide([picture(2)])
    assert encoder.asked == [1]
    encoder.finish(1)
    store.collect()
    store.provide([picture(2)])
    assert encoder.asked == [1, 2] and not store.ready(b"\x01")


def test_a_failure_is_reported_once_and_the_image_may_be_requested_again() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1)])
    encoder.futures[1].set_exception(RuntimeError("no film"))
    (error,) = store.collect().values()
    assert isinstance(error, GenerationFailedError) and str(error) == "RuntimeError: no film"
    assert store.collect() == {} and not store.ready(b"\x01")
    store.provide([picture(1)])
    assert encoder.asked == [1, 1]


def test_an_error_of_the_project_is_kept() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1)])
    error = ModelUnavailableError("No encoder answers.")
    encoder.futures[1].set_exception(error)
    assert store.collect() == {b"\x01": error}


def test_features_of_an_unexpected_shape_are_a_failure() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1)])
    encoder.futures[1].set_result(torch.zeros(2, WIDTH))
    [error] = store.collect().values()
    assert "[2, 4]" in str(error) and "[3, 4]" in str(error)


def test_each_image_that_ends_wakes_the_engine() -> None:
    store, encoder = store_of(20)
    calls = []
    store.wake = lambda: calls.append(store.has_finished)
    store.provide([picture(1), picture(2)])
    encoder.finish(1)
    encoder.futures[2].set_exception(RuntimeError())
    assert calls == [True, True]


def test_the_budget_holds_and_the_first_needed_image_is_always_encoded() -> None:
    r = random.Random(3)
    store, encoder = store_of(12)
    first_came = 0
    for _ in range(3000):
        wanted = [picture(r.randint(1, 9), r.randint(1, 8)) for _ in range(r.randint(0, 5))]
        wanted = [picture(i.digest[0], 1 + i.digest[0] % 8) for i in wanted]
        for number, future in list(encoder.futures.items()):
            if not future.done() and r.random() < 0.3:
                if not future.running():
                    encoder.start(number)
                if r.random() < 0.6:
                    encoder.finish(number)
        assert store.collect() == {}
        store.provide(wanted)
        assert store.held_bytes <= 12 * ROW_BYTES
        running = [n for n, f in encoder.futures.items() if f.running()]
        if wanted and not running:
            first = wanted[0]
            assert store.ready(first.digest) or not encoder.futures[first.digest[0]].cancelled()
            first_came += store.ready(first.digest)
    assert first_came > 100


def test_only_an_encoder_of_its_own_is_expected_to_make_progress() -> None:
    encoder, now_s = ManualEncoder(), 5.0
    store = FeatureStore(encoder, budget_bytes=20 * ROW_BYTES, clock=lambda: now_s)
    encoder.progressed_at = 4.0
    assert store.waiting_since is None
    store.provide([picture(1)])
    now_s = 6.0
    assert not store.collect()
    assert store.waiting_since == 5.0
    encoder.progressed_at = 7.0
    assert store.waiting_since == 7.0
    encoder.progressed_at = None
    assert store.waiting_since is None
