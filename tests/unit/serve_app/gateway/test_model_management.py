"""Progress of operations that run once for each store, merged into one sequence of steps."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from model_zoo.sources.pull import PullProgress
from runtime.errors import ModelUnavailableError, OverloadedError
from serve_app.gateway import model_management
from serve_app.gateway.model_management import ModelManagement
from serve_app.gateway.model_registry import ON_DEMAND
from serve_app.gateway.schedulability import ClusterView, ReplicaResources, Schedulability
from serve_app.on_demand.report import CallResult, OperationProgress
from tests.patience import HANG_S, pass_time, settled

STEPS = tuple(map(PullProgress, ("pulling manifest", "pulling layer", "success")))


class FakeStores:
    """`counts`: of each store, how many steps it has done at each poll; the store is lost after.
    `steps`: of stores that take others than `STEPS`. `changes`: the calls that change stores or
    processes, in order."""

    def __init__(self, counts: dict[str, Sequence[int]], **steps: Sequence[PullProgress]) -> None:
        self.changes: list[str] = []
        self._steps = {name: steps.get(name, STEPS) for name in counts}
        self._counts: dict[str, Iterator[int]] = {name: iter(each) for name, each in counts.items()}

    async def store_replicas(self) -> list[str]:
        return [*self._counts]

    async def call(self, replicas: list[str], method: str, *arguments: Any) -> list[CallResult]:
        if method != "operations.follow":
            self.changes.append(method)
            return [CallResult(replica) for replica in replicas]
        _, after = arguments
        counts = {replica: next(self._counts[replica], None) for replica in replicas}
        return [
            CallResult(replica, _progress(self._steps[replica], after, count))
            for replica, count in counts.items()
            if count is not None
        ]

    async def unload(self, name: str) -> None:
        self.changes.append("unload")

    def forget(self) -> None:
        """Nothing is cached."""


def _progress(steps: Sequence[PullProgress], after: int, count: int) -> OperationProgress:
    return OperationProgress(steps[after:count], count, count == len(steps))


class StartingStores(FakeStores):
    """No process has started yet."""

    async def store_replicas(self) -> list[str]:
        await asyncio.Event().wait()
        return []


def managing(stores: FakeStores, **stated: Any) -> ModelManagement:
    return ModelManagement(stores, [], **{"start_timeout_s": HANG_S, **stated})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(model_management, "POLL_S", 0.0)


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
    management = managing(FakeStores(counts))
    assert [step async for step in management.pull("x")] == [*STEPS]


async def test_an_operation_ends_with_success_where_one_store_takes_fewer_steps_than_others():
    stores = FakeStores({"fetching": [1, 2, 3], "complete": [1, 1, 1]}, complete=STEPS[-1:])
    assert [step async for step in managing(stores).pull("x")] == [*STEPS]


async def test_an_operation_fails_if_the_process_of_a_store_is_lost():
    management = managing(FakeStores({"kept": [1, 1, 3], "lost": [1]}))
    with pytest.raises(OverloadedError, match="ended or hung during the operation"):
        async for _ in management.pull("x"):
            pass


async def test_a_model_is_removed_before_it_is_unloaded_so_that_none_loads_it_again():
    stores = FakeStores({"only": []})
    await managing(stores).delete("x")
    assert stores.changes == ["remove", "unload", "remove_unmapped"]


@pytest.mark.parametrize("operation", ["pull", "copy", "delete", "has_blob"])
async def test_an_operation_does_not_wait_longer_for_a_process_than_a_request(operation):
    management = managing(StartingStores({}), start_timeout_s=5)
    waiting = asyncio.create_task(operate(management, operation))
    await settled()
    await pass_time(5)
    with pytest.raises(OverloadedError, match="has answered within 5 seconds"):
        await waiting


async def test_an_operation_fails_at_once_if_no_node_can_host_a_process():
    need = ReplicaResources("`on_demand`", "OnDemand:models", ({"CPU": 1.0, "GPU": 4.0},))
    schedulability = Schedulability({ON_DEMAND: need}, None)  # type: ignore[arg-type]
    management = managing(StartingStores({}), schedulability=schedulability)
    waiting = asyncio.create_task(operate(management, "pull"))
    await settled()
    starting = {need.deployment: 1}
    schedulability.update(ClusterView([{"CPU": 4.0, "GPU": 0.0}], starting=starting))
    with pytest.raises(ModelUnavailableError, match="4 GPU"):
        await waiting


async def operate(management: ModelManagement, operation: str) -> None:
    match operation:
        case "pull":
            async for _ in management.pull("x"):
                pass
        case "copy":
            await management.copy("x", "y")
        case "delete":
            await management.delete("x")
        case "has_blob":
            await management.has_blob(f"sha256:{'0' * 64}")
