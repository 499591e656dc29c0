"""Division among ranks: complete, nearly even, at block boundaries."""

from itertools import chain

import pytest

from runtime.distributed.ranks import ALONE, Split, Unconnected, by_blocks, evenly, split_heads


def ranges(split: Split) -> list[range]:
    return [range(*part) for part in split.parts]


@pytest.mark.parametrize("count", [1, 7, 64, 90])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_even_parts_cover_everything_once_and_differ_by_one_at_most(count, size) -> None:
    split = evenly(count, Unconnected(size))
    assert list(chain(*ranges(split))) == list(range(count))
    assert max(split.widths) - min(split.widths) <= 1


def test_each_rank_has_its_own_part() -> None:
    parts = [evenly(10, Unconnected(3, rank)) for rank in range(3)]
    assert [(part.begin, part.end, part.count) for part in parts] == [
        (0, 4, 4),
        (4, 7, 3),
        (7, 10, 3),
    ]
    assert parts[1].times(8).begin == 32 and parts[1].beginning_at(100).end == 107


def test_a_single_rank_has_everything() -> None:
    split = evenly(10, ALONE)
    assert split.whole and (split.begin, split.end) == (0, 10)
    assert not evenly(10, Unconnected(2)).whole


def test_nearly_even_parts_are_whole_blocks() -> None:
    # 56 blocks of 256, as in a feed-forward of 14,336.
    assert by_blocks(14336, 256, Unconnected(8)).widths == (1792,) * 8
    # 90 blocks of 32 among four: 23 or 22 each.
    split = by_blocks(2880, 32, Unconnected(4))
    assert split.falls_on(32) and sorted(split.widths) == [704, 704, 736, 736]


@pytest.mark.parametrize("count, block, size", [(768, 256, 2), (768, 256, 4), (100, 32, 2)])
def test_blocks_too_coarse_for_even_parts_are_ignored(count, block, size) -> None:
    split = by_blocks(count, block, Unconnected(size))
    assert max(split.widths) - min(split.widths) <= 1 and not split.falls_on(block)
    assert sum(split.widths) == count


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (28, 4), (14, 2), (6, 3), (4, 1)])
@pytest.mark.parametrize("size", range(1, 9))
def test_query_heads_are_on_the_rank_of_their_key_head(
    heads: int, kv_heads: int, size: int
) -> None:
    if size > heads:
        return
    group = heads // kv_heads
    split = split_heads(heads, kv_heads, Unconnected(size))
    assert list(chain(*ranges(split.heads))) == list(range(heads))
    for queries, keys in zip(ranges(split.heads), ranges(split.kv_heads), strict=True):
        assert {query // group for query in queries} == set(keys)
        # Kernels give each key of a rank as many queries as any other.
        assert len(queries) % len(keys) == 0
        assert all(
            key - keys.start == (query - queries.start) // (len(queries) // len(keys))
            for query in queries
            for key in [query // group]
        )


def test_more_ranks_than_keys_share_them() -> None:
    split = split_heads(8, 2, Unconnected(4))
    assert split.kv_heads.parts == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert split.heads.widths == (2, 2, 2, 2)
