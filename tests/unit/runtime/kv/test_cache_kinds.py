"""Cache kinds: what rows attend to, what a sequence fills and holds, and how layers form groups."""

import random

import pytest

from runtime.engine.request import ImageSpan
from runtime.kv.cache_kinds import (
    CacheKind,
    Chunked,
    Cross,
    Full,
    Sliding,
    Symmetric,
    images_within,
)
from runtime.kv.cache_layout import CacheLayout, LayerCache
from runtime.kv.states import Recurrent

POSITIONS = [Full(), Sliding(1), Sliding(6), Symmetric(0), Symmetric(4), Chunked(5), Chunked(8)]


def image(start: int, rows: int, *, length: int = 1, padding: int = 0, name: bytes = b"a"):
    return ImageSpan(start, length, False, name, rows, padding)


def layout_of(*kinds: CacheKind, page_tokens: int = 4) -> CacheLayout:
    return CacheLayout.of([LayerCache(kind, 1, 2, 2) for kind in kinds], page_tokens=page_tokens)


@pytest.mark.parametrize("kind", POSITIONS)
def test_the_first_visible_index_is_monotonic_and_starts_what_a_row_sees(kind) -> None:
    firsts = [kind.first_visible(position) for position in range(50)]
    assert firsts == sorted(firsts)
    begins, ends = kind.seen(7, 50)
    assert begins == firsts[7:] and ends == list(range(8, 51))


@pytest.mark.parametrize("kind", [*POSITIONS, Cross(4, 16)])
def test_a_row_alone_sees_what_it_sees_among_others(kind) -> None:
    assert kind.seen_by(range(50)) == kind.seen(0, 50)


@pytest.mark.parametrize("kind", [*POSITIONS, Cross(4, 16), Recurrent()])
def test_a_row_sees_what_a_step_of_it_alone_sees(kind) -> None:
    for position in range(50):
        assert kind.seen_by([position]) == kind.seen(position, position + 1)


@pytest.mark.parametrize("seed", range(20))
def test_images_within_positions_are_those_that_have_one_of_them(seed) -> None:
    draw, images, end = random.Random(seed), [], 0
    for _ in range(draw.randrange(8)):
        start = end + draw.randrange(3)
        images.append(image(start, 0, length=draw.randrange(1, 5)))
        end = images[-1].end
    for begin in range(end + 2):
        for stop in range(begin + 1, end + 3):
            some = [one for one in images if one.start < stop and begin < one.end]
            assert list(images_within(images, begin, stop)) == some


def test_windows_and_chunks_count_the_row_itself() -> None:
    assert [Sliding(3).first_visible(p) for p in range(6)] == [0, 0, 0, 1, 2, 3]
    assert [Chunked(3).first_visible(p) for p in range(7)] == [0, 0, 0, 3, 3, 3, 6]


def test_a_symmetric_window_ends_with_the_image_of_the_row() -> None:
    images = (ImageSpan(2, 6, whole=True, digest=b"a"), ImageSpan(9, 3, whole=False, digest=b"b"))
    begins, ends = Symmetric(2).seen(1, 12, images)
    assert begins == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ends == [2, 5, 6, 7, 8, 8, 8, 9, 10, 11, 12]


def test_a_row_sees_the_images_of_the_last_run_as_far_as_they_have_begun() -> None:
    cross = Cross(4, 16, alignment=8)
    images = (image(2, 5), image(3, 6), image(7, 4))
    begins, ends = cross.seen(0, 10, images)
    seen = list(zip(begins, ends, strict=True))
    assert seen[:2] == [(0, 0)] * 2
    assert seen[2] == (0, 5)
    assert seen[3:7] == [(0, 11)] * 4
    assert seen[7:] == [(16, 20)] * 3  # a multiple of the alignment
    assert [cross.first_visible(p, images) for p in (0, 6, 7, 99)] == [0, 0, 16, 16]


def test_rows_of_images_are_filled_when_their_run_begins_and_only_then() -> None:
    cross = Cross(4, 16, alignment=8)
    images = (image(2, 5), image(3, 6), image(7, 4))
    assert [cross.extent(end, images) for end in (0, 2, 3, 4, 7, 8, 50)] == [
        0,
        0,
        16,
        16,
        16,
        24,
        24,
    ]
    assert [place.rows for place in cross.filled_images(0, 3, images)] == [range(5), range(5, 11)]
    assert cross.filled_images(3, 7, images) == ()
    assert [place.rows for place in cross.filled_images(7, 8, images)] == [range(16, 20)]


def test_a_cross_group_ignores_images_without_cross_rows() -> None:
    cross = Cross(4, 16)
    images = (ImageSpan(1, 3, False, b"tokens only"),)
    assert cross.seen(0, 6, images) == ([0] * 6, [0] * 6)
    assert cross.extent(6, images) == 0 and cross.filled_images(0, 6, images) == ()


def test_text_that_may_look_ahead_sees_everything_and_later_text_no_padding() -> None:
    cross = Cross(4, 16, lead_in=True, alignment=8)
    images = (image(2, 5, padding=3), image(9, 6, padding=1))
    begins, ends = cross.seen(0, 11, images)
    seen = list(zip(begins, ends, strict=True))
    assert seen == [(0, 15)] * 2 + [(4, 9)] * 7 + [(9, 15)] * 2
    assert cross.extent(1, images) == 16
    places = cross.filled_images(0, 1, images)
    assert [(place.rows, place.padding) for place in places] == [
        (range(4, 9), range(3)),
        (range(9, 15), range(3, 4)),
    ]
    assert cross.filled_images(1, 11, images) == ()


def test_without_text_before_it_an_image_s_padding_is_never_filled() -> None:
    cross = Cross(4, 16, lead_in=True, alignment=8)
    images = (image(0, 5, padding=3), image(9, 6, padding=1))
    assert cross.seen(0, 2, images) == ([0, 0], [5, 5])
    assert [len(place.padding) for place in cross.filled_images(0, 11, images)] == [0, 0]
    assert cross.lead_in_key(images) == b""


def test_prefixes_differ_where_text_has_seen_other_images_ahead() -> None:
    ahead, plain = Cross(4, 16, lead_in=True), Cross(4, 16)
    one, two = (image(2, 5),), (image(2, 5), image(9, 5, name=b"b"))
    assert ahead.lead_in_key(one) != ahead.lead_in_key(two) != b""
    assert plain.lead_in_key(one) == plain.lead_in_key(two) == b""


def test_the_content_of_rows_names_images_their_order_and_where_they_lie() -> None:
    cross = Cross(4, 16, alignment=4)
    a, b = image(2, 3), image(3, 5, name=b"b")
    swapped = (image(2, 5, name=b"b"), image(3, 3))
    first = cross.content(0, 4, (a, b))
    assert first != cross.content(4, 8, (a, b)) != cross.content(0, 4, swapped) != first
    moved = (image(8, 3), image(9, 5, name=b"b"))
    assert first == cross.content(0, 4, moved), "what comes before a run is nothing to it"
    # The same image lies elsewhere behind its padding.
    ahead = Cross(4, 16, lead_in=True, alignment=4)
    late, early = (image(1, 3, padding=4),), (image(0, 3, padding=4),)
    assert ahead.content(0, 4, late) != ahead.content(0, 4, early)


@pytest.mark.parametrize("seed", range(30))
def test_no_sequence_holds_more_pages_than_its_cache_kind_states(seed) -> None:
    r = random.Random(seed)
    page_tokens = r.choice([2, 4])
    kinds = [Sliding(r.randint(1, 30)), Chunked(r.randint(1, 30)), Full(), Cross(3, 9, alignment=4)]
    layout = layout_of(*kinds, page_tokens=page_tokens)
    context, in_flight = r.randint(2, 120), r.randint(1, 20)
    images = tuple(image(start, 9) for start in sorted(r.sample(range(200), 3)))
    held = layout.held_pages(context, in_flight)
    for kind, most in zip(kinds, held, strict=True):
        for confirmed in range(context):
            end = min(context, confirmed + in_flight)
            first = kind.first_visible(confirmed, images) // page_tokens
            assert -(-kind.extent(end, images) // page_tokens) - first <= most


@pytest.mark.parametrize("seed", range(30))
def test_a_sequence_holds_no_more_pages_at_once_than_its_positions_and_images_demand(seed) -> None:
    draw, images = random.Random(seed), []
    kind = draw.choice([Full(), Sliding(6), Chunked(8), Symmetric(4), Recurrent(), Cross(4, 8)])
    if draw.random() < 0.7:
        kind = Cross(4, 8, lead_in=draw.random() < 0.5, alignment=4)
        starts = sorted(draw.sample(range(30), draw.randint(0, 4)))
        images = [image(at, draw.randint(1, 6), padding=draw.randint(0, 2)) for at in starts]
    start, end, in_flight = draw.randrange(20), 30, draw.randint(1, 8)

    def held(position: int) -> int:
        pages = -(-kind.extent(min(position + in_flight, end), images) // 4)
        return pages - kind.first_visible(position, images) // 4

    sizes = {"in_flight": in_flight, "page_tokens": 4, "images": images}
    bound, most = kind.pages_at_once(start, end, **sizes), max(map(held, range(start, end)))
    assert bound == most if kind.by_image else bound >= most


def test_a_window_longer_than_the_context_takes_no_more_than_the_context() -> None:
    layout = layout_of(Sliding(4096), Chunked(8192), Full())
    assert layout.held_pages(100, 64) == (25, 25, 25)


def test_a_layout_knows_how_many_images_and_rows_a_sequence_may_bring() -> None:
    plain = layout_of(Full(), Sliding(4))
    assert plain.image_rows == 0 and plain.most_images is None
    cross = layout_of(Full(), Cross(3, 70, alignment=64))
    assert cross.image_rows == 3 * 128 and cross.most_images == 3
    assert cross.capacity_pages(40) == (10, 96)
