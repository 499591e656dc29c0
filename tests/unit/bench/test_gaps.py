"""Gaps are measured while images arrive and are encoded beside running streams."""

from contextlib import closing

from bench.gaps import ARRIVALS, STREAMS, VisionReplica, _Gaps
from bench.vision_model import VisionModelShape, ensure_vision_model

TINY = VisionModelShape(
    layers=2, hidden=64, feed_forward=96, heads=2, tower_layers=1, tower_hidden=32,
    tower_feed_forward=64, tower_heads=2, image_side=64, patch_side=16, rows_per_image=4,
)  # fmt: skip


def test_every_arriving_image_is_encoded_while_the_streams_run(tmp_path):
    path = ensure_vision_model(tmp_path / "vision.gguf", TINY)
    with closing(VisionReplica(path, 1, TINY, target_gap_ms=100.0)) as replica:
        gap, seconds = replica.gap_beside_images()
        assert 0 < gap <= seconds
        assert replica.gap_alone(0.2) > 0
        assert replica.gap_beside_prompts() > 0
    assert replica.encoded == ARRIVALS  # statistics of a running engine are older


def test_a_stream_without_output_until_the_end_counts_as_a_gap():
    gaps = _Gaps(STREAMS)
    for stream in range(STREAMS):
        gaps.saw(stream)
    gaps.forget()
    first = gaps.longest()
    gaps.saw(0)
    assert gaps.longest() > first > 0
