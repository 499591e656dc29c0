"""A tower on its own thread: images do not affect each other."""

import threading
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch

from runtime.errors import UnsupportedModelError
from runtime.vision.encoder import ImageOutline, LocalEncoder, Pause, PlannedEncoder, PreparedImage
from tests.memory_profile import peak_bytes, recorded_memory
from tests.patience import HANG_S
from tests.thread_counts import torch_threads
from tests.unit.runtime.vision.fake_tower import PretendTower, features_of, picture

CPU = torch.device("cpu")


@pytest.fixture
def encoder_of():
    """A function from a tower to its encoder, which is closed after the test."""
    made = []

    def build(tower: PretendTower, **options) -> LocalEncoder:
        made.append(LocalEncoder(tower, device=CPU, weight_bytes=0, **options))
        return made[-1]

    yield build
    for encoder in made:
        encoder.close()


def test_features_come_from_another_thread_for_each_image_its_own(encoder_of) -> None:
    tower = PretendTower()
    encoder = encoder_of(tower)
    futures = [encoder.submit(picture(number)) for number in (5, 7, 5)]
    for number, future in zip((5, 7, 5), futures, strict=True):
        assert torch.equal(future.result(HANG_S), features_of(bytes([number]), 3, 16))
    assert tower.batches == [[5], [7], [5]]
    assert threading.get_ident() not in tower.threads


def test_a_tower_computes_with_the_threads_of_where_its_encoder_was_created(
    encoder_of, monkeypatch
) -> None:
    tower, counts = PretendTower(), []
    encode = tower.encode
    monkeypatch.setattr(
        tower, "encode", lambda *given: (counts.append(torch.get_num_threads()), encode(*given))[1]
    )
    with torch_threads(3):
        encoder = encoder_of(tower)
    with torch_threads(1):
        encoder.submit(picture(5)).result(HANG_S)
    assert counts == [3]


def test_images_of_one_shape_are_batched_and_others_keep_their_order(encoder_of) -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    encoder = encoder_of(tower, batch_images=2)
    futures = [encoder.submit(picture(1))]
    assert tower.entered.acquire(timeout=HANG_S)
    sizes = {2: 3, 3: 5, 4: 3, 5: 3, 6: 5}
    futures += [encoder.submit(picture(number, rows)) for number, rows in sizes.items()]
    gate.release(100)
    results = [future.result(HANG_S) for future in futures]
    assert tower.batches == [[1], [2, 4], [3, 6], [5]]
    for number, result in enumerate(results, 1):
        assert torch.equal(result, features_of(bytes([number]), sizes.get(number, 3), 16))


def test_an_image_that_fails_does_not_fail_others_of_its_batch(encoder_of) -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate, broken=frozenset([3]))
    encoder = encoder_of(tower, batch_images=4)
    futures = {number: encoder.submit(picture(number)) for number in (1, 2, 3, 4)}
    gate.release(100)
    for number, future in futures.items():
        if number == 3:
            with pytest.raises(ValueError, match="upside down"):
                future.result(HANG_S)
        else:
            assert torch.equal(future.result(HANG_S), features_of(bytes([number]), 3, 16))


def test_a_cancelled_image_is_never_encoded(encoder_of) -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    encoder = encoder_of(tower)
    first, second, third = (encoder.submit(picture(number)) for number in (1, 2, 3))
    assert tower.entered.acquire(timeout=HANG_S)
    assert not first.cancel(), "it is being encoded"
    assert second.cancel()
    gate.release(100)
    third.result(HANG_S)
    assert tower.encoded == [1, 3]


def test_closing_cancels_waiting_images() -> None:
    gate = threading.Semaphore(0)
    tower = PretendTower(gate=gate)
    encoder = LocalEncoder(tower, device=CPU, weight_bytes=0)
    first, second = encoder.submit(picture(1)), encoder.submit(picture(2))
    assert tower.entered.acquire(timeout=HANG_S)
    closing = threading.Thread(target=encoder.close)
    closing.start()
    with pytest.raises(CancelledError):
        second.result(HANG_S)
    gate.release()
    closing.join(HANG_S)
    assert first.done() and tower.encoded == [1]


def test_a_largest_image_beyond_the_planned_rows_is_refused_at_start(encoder_of) -> None:
    tower = PretendTower(rows=8)
    tower.limits = replace(tower.limits, largest=ImageOutline((9,), (1, 9), 9))
    with pytest.raises(UnsupportedModelError, match="at most 8 rows of 16 numbers are planned for"):
        encoder_of(tower).warm_up()


def test_features_of_another_shape_than_declared_are_refused_at_start(encoder_of) -> None:
    tower = PretendTower(rows=8)
    tower.encode = lambda pixels, grid, pause: pixels.new_zeros(len(pixels), 8, 15)
    with pytest.raises(UnsupportedModelError, match=r"an image of 8 rows .* of shape \(8, 15\)"):
        encoder_of(tower).warm_up()


def test_the_largest_image_may_have_fewer_rows_than_are_planned_for(encoder_of) -> None:
    """No rectangle has as many rows as the largest area allows."""
    tower = PretendTower(rows=8)
    tower.limits = replace(tower.limits, largest=ImageOutline((7,), (1, 7), 7))
    encoder_of(tower).warm_up()


def test_the_workspace_includes_the_pixels_of_a_batch(encoder_of) -> None:
    """The batch is copied to the device; an image may have more pixels than `largest`."""

    class Plain(PretendTower):
        def activation_bytes(self, images: int) -> int:
            return 4 * images * 8 * self.limits.width

        def encode(self, pixels: torch.Tensor, grid: tuple[int, int], pause: Pause) -> torch.Tensor:
            return pixels.new_zeros(*pixels.shape[:2], self.limits.width)

    tower = Plain(rows=8)
    tower.limits = replace(tower.limits, largest=ImageOutline((7, 5000), (1, 7), 7))
    encoder = encoder_of(tower, batch_images=3)
    worst = [PreparedImage(torch.zeros(8, 5000), (1, 8), b"worst", 8)] * 3
    encoder._encode_and_wait(worst)
    with recorded_memory() as recorded:
        encoder._encode_and_wait(worst)
    kept = 3 * 8 * tower.limits.row_bytes  # features, which count as such
    assert 3 * 8 * 5000 * 4 <= peak_bytes(recorded) <= encoder.workspace_bytes + kept
    planned = PlannedEncoder.of(tower, CPU, weight_bytes=0)
    assert planned.workspace_bytes == encoder_of(tower).workspace_bytes
