"""From zero replicas to more than fit and back, on nodes that Ray's autoscaler adds under load and
removes without."""

from itertools import pairwise
from typing import Any

import pytest

from tests.serve.node_scaling import BURST, FITTING, FULL, LIMIT_S, REPLICAS, Counts

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

SCALED_TO_ZERO: Counts = (0, 0, 1)


@pytest.fixture
def report(node_scaling: dict[str, Any]) -> dict[str, Any]:
    return node_scaling


def counts(report: dict[str, Any], name: str) -> list[Counts]:
    return [(running, starting, nodes) for running, starting, nodes in report[name]]


def wanted(seen: list[Counts]) -> list[int]:
    """Each change of the number of replicas that run or start."""
    totals = [running + starting for running, starting, _ in seen]
    return [totals[0], *(total for before, total in pairwise(totals) if total != before)]


def test_listing_models_starts_no_replica(report: dict[str, Any]) -> None:
    assert report["listed"] == ["demo:latest"]
    assert counts(report, "after_listing") == [SCALED_TO_ZERO]


def test_a_request_starts_one_replica(report: dict[str, Any]) -> None:
    assert set(wanted(counts(report, "after_the_first"))) == {0, 1}


def test_a_burst_of_long_prompts_starts_all_needed_replicas_in_one_decision(
    report: dict[str, Any],
) -> None:
    totals = wanted(counts(report, "seen"))
    assert set(totals[: totals.index(REPLICAS)]) == {0, 1}


def test_a_node_is_added_for_a_pending_replica(report: dict[str, Any]) -> None:
    assert FULL in counts(report, "seen"), "a third replica is wanted, and there is no third node"


def test_all_requests_are_answered(report: dict[str, Any]) -> None:
    assert report["statuses"] == [200] * BURST


def test_queued_requests_are_shared_with_a_new_replica(report: dict[str, Any]) -> None:
    """All were sent at once, when there was one replica. Each needs a GPU, and a node has one."""
    nodes = report["nodes_answering"]
    assert len(set(nodes)) == len(nodes) == FITTING


def test_without_load_the_pending_replica_the_idle_ones_and_the_node_are_released(
    report: dict[str, Any],
) -> None:
    seen = counts(report, "seen")
    after = seen[len(seen) - seen[::-1].index(FULL) :]
    assert after[-1] == SCALED_TO_ZERO
    assert all(starting == 0 for _, starting, _ in after), "no running replica goes before it"
    running = [running for running, _, _ in after]
    assert running == sorted(running, reverse=True), "none is started again"
