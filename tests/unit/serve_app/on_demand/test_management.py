"""Progress of operations that run once for each store, merged into one sequence of steps."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from model_zoo.sources.pull import PullProgress
from runtime.errors import OverloadedError
from serve_app.on_demand import management as management_module
from serve_app.on_demand.management import ModelManagement
from serve_app.on_demand.report import CallResult, OperationProgress

STEPS = tuple(map(PullProgress, ("pulling manifest", "pulling layer", "success")))


class FakeStores:
    """`counts`: of each store, how many steps it has done at each poll; the store is lost after."""

    def __init__(self, counts: dict[str, Sequence[int]]) -> None:
        self._counts: dict[str, Iterator[int]] = {name: iter(each) for name, each in counts.items()}

    async def store_replicas(self) -> list[str]:
        return [*self._counts]

    async def call(self, replicas: list[str], method: str, *arguments: Any) -> list[CallResult]:
        if method != "operations.follow":
            return [CallResult(replica) for replica in replicas]
        _, after = arguments
        counts = {replica: next(self._counts[replica], None) for replica in replicas}
        return [
            CallResult(replica, OperationProgress(STEPS[after:count], count, count == len(STEPS)))
            for replica, count in counts.items()
            if count is not None
        ]

    def forget(self) -> None:
        """Nothing is cached."""


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(management_module, "POLL_S", 0.0)


@pytest.mark.parametrize(
    "counts",
    [
        {"only": [1, 2, 3]},
        {"early": [2, 2, 3], "late": [0, 3, 3]},
        {"early": [3, 3, 3, 3], "late": [0, 1, 2, 3]},
        {"first": [1, 2, 3], "second": [2, 2, 3]},
    ],
)
async def test_every_step_is_reported_once_whichever_store_is_the_slowest(counts):
    management = ModelManagement(FakeStores(counts), [])  # type: ignore[arg-type]
    assert [step async for step in management.pull("x")] == [*STEPS]


async def test_an_operation_fails_if_the_process_of_a_store_is_lost():
    management = ModelManagement(FakeStores({"kept": [1, 1, 3], "lost": [1]}), [])  # type: ignore[arg-type]
    with pytest.raises(OverloadedError, match="ended during the operation"):
        async for _ in management.pull("x"):
            pass
