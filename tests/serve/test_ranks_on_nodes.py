"""A model divided among two of three nodes of a real cluster, one of which is lost."""

from typing import Any

import pytest

from tests.serve.application import Application
from tests.serve.ranks_on_nodes import LIMIT_S, answer

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture
def report(ranks_on_nodes: dict[str, Any]) -> dict[str, Any]:
    return ranks_on_nodes


def test_ranks_on_two_nodes_answer_as_one_rank(
    report: dict[str, Any], application: Application
) -> None:
    before = report["nodes"][0]
    assert len(set(before)) == len(before) == 2
    assert report["divided"] == answer(application.url) != ""


def test_all_ranks_are_replaced_when_the_node_of_one_is_lost(report: dict[str, Any]) -> None:
    before, after = report["nodes"]
    assert len(set(after)) == 2 and before[1] not in after
    assert report["again"] == report["divided"]
