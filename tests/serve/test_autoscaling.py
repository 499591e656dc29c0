"""From no replica to several on other nodes and back, on a real cluster of three nodes."""

from typing import Any

import pytest

from tests.serve.elastic import BURST, GPUS, REPLICAS
from tests.serve.three_nodes import LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture
def told(three_nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return three_nodes["elastic"]


def test_a_list_of_models_wakes_none(told: dict[str, Any]) -> None:
    assert told["listed"] == ["demo:latest"]
    assert told["after_listing"] == [0]


def test_a_request_for_a_model_that_sleeps_is_held_and_answered(told: dict[str, Any]) -> None:
    assert told["woken"]["status"] == 200
    assert told["woken"]["eval_count"] > 0
    assert told["after_waking"] == [0, 1]


def test_a_burst_of_long_prompts_starts_all_that_it_takes_in_one_decision(
    told: dict[str, Any],
) -> None:
    assert told["statuses"] == [200] * BURST
    assert told["counts"][1:3] == [1, REPLICAS]


def test_what_waits_is_shared_with_those_that_come(told: dict[str, Any]) -> None:
    """All of it was asked at once, when there was one."""
    assert told["answering"] == REPLICAS


def test_replicas_go_where_the_gpus_are(told: dict[str, Any]) -> None:
    """Each takes one; no node has as many, and the head has none."""
    assert max(GPUS) < REPLICAS
    assert told["free_gpus"] == sum(GPUS) - REPLICAS


def test_when_all_is_answered_they_go_and_none_comes_back(told: dict[str, Any]) -> None:
    after = told["counts"][2:]
    assert after == sorted(after, reverse=True)
    assert after[-1] == 0
