"""Nodes that Ray's autoscaler adds under load and removes without."""

from typing import Any

import pytest

from tests.serve.node_scaling import LIMIT_S

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

# Replicas that run, replicas that start, nodes.
SCALED_TO_ZERO, FULL = [0, 0, 1], [2, 1, 2]


@pytest.fixture
def report(node_scaling: dict[str, Any]) -> dict[str, Any]:
    return node_scaling


def test_a_node_is_added_for_a_pending_replica(report: dict[str, Any]) -> None:
    seen = report["seen"]
    assert seen[0] == SCALED_TO_ZERO
    assert FULL in seen, "a third replica is wanted, and there is no third node"


def test_all_requests_are_answered(report: dict[str, Any]) -> None:
    assert report["statuses"] and set(report["statuses"]) == {200}


def test_without_load_the_pending_replica_the_idle_ones_and_the_node_are_released(
    report: dict[str, Any],
) -> None:
    seen = report["seen"]
    after = seen[len(seen) - seen[::-1].index(FULL) :]
    assert after[-1] == SCALED_TO_ZERO
    assert all(starting == 0 for _, starting, _ in after), "no running replica goes before it"
