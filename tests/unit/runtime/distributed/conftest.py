"""Rank 0 of three ranks, none of which has joined."""

from collections.abc import Iterator

import pytest

from runtime.distributed.control_channel import RankZero


@pytest.fixture
def rank_zero() -> Iterator[RankZero]:
    rank_zero = RankZero("127.0.0.1", 3)
    yield rank_zero
    rank_zero.close()
