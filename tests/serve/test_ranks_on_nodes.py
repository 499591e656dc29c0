"""A model divided among two nodes, on a real cluster of three, of which one is lost."""

from typing import Any

import pytest

from tests.serve.three_nodes import LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture
def told(three_nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return three_nodes["spread"]


def test_ranks_on_two_nodes_answer_as_one_rank_does(told: dict[str, Any]) -> None:
    before = told["nodes"][0]
    assert len(set(before)) == len(before) == 2
    assert told["divided"] == told["whole"] != ""


def test_when_the_node_of_a_rank_is_lost_all_ranks_are_replaced(told: dict[str, Any]) -> None:
    before, after = told["nodes"]
    assert len(set(after)) == 2 and before[1] not in after
    assert told["again"] == told["divided"]
