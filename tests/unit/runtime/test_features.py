"""The store of features: asked for once, kept while wanted, never more than its budget."""

import random
from concurrent.futures import Future

import torch

from runtime.errors import GenerationFailedError
from runtime.vision.encoder import ImageLimits, PreparedImage
from runtime.vision.feature_cache import FeatureStore
from tests.unit.runtime.vision import features_of, picture

WIDTH = 4
ROW_BYTES = 4 * WIDTH


class ManualEncoder:
    """Nothing is encoded until the test says so."""

    limits = ImageLimits(8, WIDTH, torch.float32)
    weight_bytes = workspace_bytes = 0

    def __init__(self, most_submitted: int | None = None) -> None:
        self.most_submitted = most_submitted
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


def store_of(rows: int, *, most_submitted: int | None = None) -> tuple[FeatureStore, ManualEncoder]:
    encoder = ManualEncoder(most_submitted)
    return FeatureStore(encoder, budget_bytes=rows * ROW_BYTES), encoder


def test_an_image_is_asked_for_once_however_often_it_is_wanted() -> None:
    store, encoder = store_of(20)
    one = picture(1)
    store.provide([one, one, picture(1)])
    store.provide([one])
    assert encoder.asked == [1] and store.coming == 1 and not store.ready(one.digest)
    encoder.finish(1)
    assert store.has_news
    assert store.collect() == {} and store.ready(one.digest) and store.coming == 0
    store.provide([one])
    assert encoder.asked == [1] and store.encoded == 1
    assert torch.equal(store.lookup(one.digest), features_of(one.digest, 3, WIDTH))


def test_features_that_nobody_wants_go_first_the_longest_unused_before_others() -> None:
    store, encoder = store_of(9)
    for number in (1, 2, 3):
        store.provide([picture(number)])
        encoder.finish(number)
        store.collect()
    store.provide([picture(1)])  # now 2 is the longest unused
    store.provide([picture(4)])
    assert [store.ready(bytes([n])) for n in (1, 2, 3)] == [True, False, True]


def test_features_that_have_been_of_use_go_after_others() -> None:
    store, encoder = store_of(9)
    for number in (1, 2, 3):
        store.provide([picture(number)])
        encoder.finish(number)
        store.collect()
    store.touch(b"\x01")
    store.provide([picture(4)])
    assert [store.ready(bytes([n])) for n in (1, 2, 3)] == [True, False, True]


def test_what_is_wanted_most_takes_the_place_of_what_is_wanted_less() -> None:
    store, encoder = store_of(6)
    store.provide([picture(1), picture(2)])
    encoder.finish(1)
    encoder.finish(2)
    store.collect()
    store.provide([picture(3), picture(2), picture(1)])
    assert encoder.asked == [1, 2, 3]
    assert store.ready(b"\x02") and not store.ready(b"\x01")


def test_what_nobody_wants_any_more_is_not_encoded_if_it_has_not_begun() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1), picture(2)])
    encoder.start(1)
    store.provide([])
    assert encoder.futures[2].cancelled() and store.coming == 1
    encoder.finish(1)
    store.collect()
    assert store.ready(b"\x01"), "it was too late to stop it, so it is kept"
    store.provide([picture(2)])
    assert encoder.asked == [1, 2, 2]


def test_what_becomes_urgent_later_waits_only_for_what_has_been_submitted() -> None:
    store, encoder = store_of(60, most_submitted=2)
    flood = [picture(number) for number in range(1, 9)]
    store.provide(flood)
    assert encoder.asked == [1, 2]
    encoder.finish(1)
    store.collect()
    store.provide([picture(9), *flood])
    assert encoder.asked == [1, 2, 9]


def test_a_running_encode_keeps_its_room_until_it_ends() -> None:
    store, encoder = store_of(4)
    store.provide([picture(1)])
    encoder.start(1)
    store.provide([picture(2)])
    assert encoder.asked == [1]
    encoder.finish(1)
    store.collect()
    store.provide([picture(2)])
    assert encoder.asked == [1, 2] and not store.ready(b"\x01")


def test_a_failure_is_told_once_and_the_image_may_be_asked_for_again() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1)])
    encoder.futures[1].set_exception(RuntimeError("no film"))
    assert store.collect() == {b"\x01": "RuntimeError: no film"}
    assert store.collect() == {} and not store.ready(b"\x01")
    store.provide([picture(1)])
    assert encoder.asked == [1, 1]


def test_an_error_that_is_told_in_a_sentence_is_told_as_it_is() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1)])
    encoder.futures[1].set_exception(GenerationFailedError("No encoder answers."))
    assert store.collect() == {b"\x01": "No encoder answers."}


def test_features_of_another_size_than_promised_are_a_failure() -> None:
    store, encoder = store_of(20)
    store.provide([picture(1)])
    encoder.futures[1].set_result(torch.zeros(2, WIDTH))
    [reason] = store.collect().values()
    assert "(2, 4)" in reason and "(3, 4)" in reason


def test_each_image_that_ends_wakes_the_engine() -> None:
    store, encoder = store_of(20)
    calls = []
    store.wake = lambda: calls.append(store.has_news)
    store.provide([picture(1), picture(2)])
    encoder.finish(1)
    encoder.futures[2].set_exception(RuntimeError())
    assert calls == [True, True]


def test_the_budget_holds_and_the_first_of_the_wanted_always_comes() -> None:
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
