"""From no replica to several on other nodes and back, on a real cluster of three nodes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.serve.application import ROOT
from tests.serve.elastic_cluster import BURST, GPUS, REPLICAS

# Minutes where the machine has much else to do.
LIMIT_S = 500
pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What has happened there. Its Ray keeps its files apart from that of the other tests."""
    with TemporaryDirectory(prefix="ray") as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "tests.serve.elastic_cluster", str(report)],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert report.exists(), done.stderr
        return json.loads(report.read_text())


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


def test_replicas_go_where_the_gpus_are(told: dict[str, Any]) -> None:
    """Each takes one; no node has as many, and the head has none."""
    assert max(GPUS.values()) < REPLICAS
    assert told["free_gpus"] == sum(GPUS.values()) - REPLICAS


def test_when_all_is_answered_they_go_and_none_comes_back(told: dict[str, Any]) -> None:
    after = told["counts"][2:]
    assert after == sorted(after, reverse=True)
    assert after[-1] == 0
