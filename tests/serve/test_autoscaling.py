"""From zero replicas to several on other nodes and back, on a real cluster of three nodes."""

from typing import Any

import pytest

from tests.serve.scaling_on_nodes import BURST, GPUS, REPLICAS
from tests.serve.three_nodes import LIMIT_S

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture
def report(three_nodes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return three_nodes["scaling"]


def test_listing_models_starts_no_replica(report: dict[str, Any]) -> None:
    assert report["listed"] == ["demo:latest"]
    assert report["after_listing"] == [0]


def test_a_request_for_a_model_without_replicas_waits_and_is_answered(
    report: dict[str, Any],
) -> None:
    assert report["first_answer"]["status"] == 200
    assert report["first_answer"]["eval_count"] > 0
    assert report["after_the_first"] == [0, 1]


def test_a_burst_of_long_prompts_starts_all_needed_replicas_in_one_decision(
    report: dict[str, Any],
) -> None:
    assert report["statuses"] == [200] * BURST
    assert report["counts"][1:3] == [1, REPLICAS]


def test_queued_requests_are_shared_with_new_replicas(report: dict[str, Any]) -> None:
    """All requests were sent at once, when there was one replica."""
    assert report["answering"] == REPLICAS


def test_replicas_start_on_nodes_with_gpus(report: dict[str, Any]) -> None:
    """Each needs one GPU; no node has enough for all, and the head has none."""
    assert max(GPUS) < REPLICAS
    assert report["free_gpus"] == sum(GPUS) - REPLICAS


def test_idle_replicas_are_stopped_and_not_started_again(report: dict[str, Any]) -> None:
    after = report["counts"][2:]
    assert after == sorted(after, reverse=True)
    assert after[-1] == 0
