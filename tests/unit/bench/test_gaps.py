"""Gaps are measured while images and prompts arrive beside running streams."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from bench.gap_replica import STREAMS, EncoderProcess, GapReplica, Gaps
from bench.vision_model import VisionModelShape, ensure_vision_model

TINY = VisionModelShape(
    layers=2, hidden=64, feed_forward=96, heads=2, tower_layers=1, tower_hidden=32,
    tower_feed_forward=64, tower_heads=2, image_side=64, patch_side=16, rows_per_image=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_vision_model(tmp_path_factory.mktemp("model") / "vision.gguf", TINY)


@pytest.fixture
def cpu():
    """One processor, as long as the test runs."""
    all_cpus = os.sched_getaffinity(0)
    yield min(all_cpus)
    os.sched_setaffinity(0, all_cpus)


def test_images_and_prompts_arrive_while_the_streams_run(path: Path, cpu: int) -> None:
    with closing(GapReplica(path, [cpu], target_gap_ms=100.0)) as replica:
        images = replica.beside_images(3, TINY.image_side)
        assert len(images.first_tokens) == 3 and min(images.first_tokens) > 0
        assert len(images.gaps) > STREAMS and min(images.gaps) > 0
        prompts = replica.beside_clients(2, 2, tokens=40)
        assert len(prompts.first_tokens) == 4 and prompts.gaps
        assert len(replica.beside_prompts(2, tokens=40).first_tokens) == 2
        assert replica.alone(0.1).first_tokens == ()
    assert replica.encoded == 3  # statistics of a running engine are older


def test_images_are_encoded_by_an_encoder_elsewhere(path: Path, cpu: int) -> None:
    with (
        closing(EncoderProcess(path, [cpu])) as encoder,
        closing(GapReplica(path, [cpu], None, encoder.address())) as replica,
    ):
        assert len(replica.beside_images(2, TINY.image_side).first_tokens) == 2
        assert encoder._encoder.statistics().images_encoded_total == 2


def test_a_stream_without_output_until_the_end_has_a_gap() -> None:
    gaps = Gaps(STREAMS)
    for stream in range(STREAMS):
        gaps.saw(stream)
    gaps.forget()
    assert len(gaps.found()) == STREAMS
    gaps.saw(0)
    gaps.ended(1)  # another answer begins, and its first output ends no gap
    gaps.saw(1)
    assert len(gaps.found()) == STREAMS + 1
    assert gaps.all_begun.is_set()
