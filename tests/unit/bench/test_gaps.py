"""Gaps are measured as told: images arrive and are encoded while all streams run."""

from contextlib import closing

from bench.gaps import ARRIVALS, STREAMS, Seeing, _Gaps
from bench.seeing_model import EyesShape, ensure_seeing_model

TINY = EyesShape(
    layers=2, hidden=64, feed_forward=96, heads=2, tower_layers=1, tower_hidden=32,
    tower_feed_forward=64, tower_heads=2, image_side=64, patch_side=16, rows_per_image=4,
)  # fmt: skip


def test_every_arriving_image_is_encoded_while_the_streams_run(tmp_path):
    path = ensure_seeing_model(tmp_path / "seeing.gguf", TINY)
    with closing(Seeing(path, 1, TINY)) as seeing:
        gap, seconds = seeing.gap_beside_images()
        assert seeing.encoded == ARRIVALS
        assert 0 < gap <= seconds
        assert seeing.gap_alone(0.2) > 0
        assert seeing.gap_beside_prompts() > 0
        assert seeing.encoded == ARRIVALS


def test_a_stream_that_stands_still_to_the_end_is_a_gap():
    gaps = _Gaps(STREAMS)
    for stream in range(STREAMS):
        gaps.saw(stream)
    gaps.forget()
    first = gaps.longest()
    gaps.saw(0)
    assert gaps.longest() > first > 0
