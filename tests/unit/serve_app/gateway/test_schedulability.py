"""Deployments that no node can host fail at once, with the needed and the available resources."""

import asyncio
import json

import pytest

from model_zoo.chat.messages import ImagePart, Message
from runtime.engine.request import SamplingParams
from runtime.errors import ModelUnavailableError
from serve_app.config.options import Options
from serve_app.gateway.model_registry import ModelRegistry, ServedModel
from serve_app.gateway.schedulability import (
    BuildFacts,
    ClusterView,
    ReplicaResources,
    Schedulability,
    find_problem,
)
from serve_app.messages.tasks import ChatTask, Conversation, RawText, TokenIds
from serve_app.transport.wire import Address
from tests.checkout import DEMO_MODEL
from tests.patience import HANG_S, settled, until
from tests.serve_configs import deployments
from tests.unit.serve_app.fake_replicas import OneReplica

SMALL, BIG = {"CPU": 4.0, "GPU": 0.0}, {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}
PENDING = "Deployment 'm' has 1 replicas that have taken more than 30s to be scheduled."


def need(*bundles, together: bool = False, apart: bool = False) -> ReplicaResources:
    return ReplicaResources("model 'm'", "m", bundles or ({"CPU": 1, "GPU": 1},), together, apart)


def view(*nodes, running: int = 0, starting: int = 1, message: str = "", free=None) -> ClusterView:
    return ClusterView(nodes, free or {}, {"m": running}, {"m": starting}, {"m": message})


def test_the_message_names_the_needed_and_the_largest_resources():
    problem = find_problem(need({"CPU": 1, "GPU": 4}), view(SMALL, BIG))
    assert problem is not None
    assert "model 'm' cannot be scheduled: a replica needs 1 CPU and 4 GPU on one node" in problem
    assert "2 nodes the largest have 8 CPU and 2 GPU" in problem
    assert "autoscaler" in problem and "\n" not in problem


def test_requests_for_a_deployment_that_was_removed_fail():
    removed = ClusterView((BIG,), {}, {"other": 1}, {"other": 0})
    assert find_problem(need(), removed) == "model 'm' is not part of the configuration any more"
    assert find_problem(need(), ClusterView((BIG,))) is None


@pytest.mark.parametrize(
    ("stated", "nodes", "fits"),
    [
        (need(), (SMALL, BIG), True),
        (need(), (SMALL,), False),
        (need({"CPU": 0, "GPU": 0}), (SMALL,), True),
        (need({"CPU": 1, "GPU": 0}), ({"CPU": 1.0},), True),
        (need({"CPU": 0.5, "GPU": 0.5}), (BIG,), True),
        (need({"GPU": 1}, {"GPU": 1}), (BIG,), True),
        (need({"GPU": 2}, {"GPU": 2}), (BIG,), False),
        (need({"GPU": 2}, {"GPU": 2}), (BIG, BIG), True),
        (need({"GPU": 2}, {"GPU": 2}, together=True), (BIG, BIG), False),
        (need({"GPU": 1}, {"GPU": 1}, together=True), (BIG,), True),
        (need({"GPU": 1}, {"GPU": 1}, apart=True), (BIG, SMALL), False),
        (need({"GPU": 1}, {"GPU": 1}, apart=True), (BIG, BIG), True),
        (need({"CPU": 1}, {"CPU": 1}, apart=True), (BIG, SMALL), True),
        (need({"GPU": 1, "TPU": 1}), (BIG,), False),
    ],
)
def test_all_bundles_must_fit_on_the_nodes(stated, nodes, fits):
    assert (find_problem(stated, view(*nodes)) is None) == fits


def test_the_message_mentions_bundles_on_separate_nodes():
    problem = find_problem(need({"CPU": 1}, {"CPU": 1}, apart=True), view(BIG))
    assert problem is not None and "needs 2 times 1 CPU, each on a node of its own" in problem


def test_a_running_replica_means_no_problem():
    assert find_problem(need({"GPU": 9}), view(SMALL, running=1)) is None


def test_a_deployment_scaled_to_zero_has_no_problem():
    """Only starting a replica makes an autoscaler add the node that it needs."""
    assert find_problem(need({"GPU": 9}), view(SMALL, starting=0)) is None


def test_a_cluster_without_nodes_shows_no_problem():
    assert find_problem(need({"GPU": 9}), view()) is None


def test_a_replica_that_waits_for_resources_names_the_free_ones():
    problem = find_problem(need(), view(BIG, message=PENDING, free={"CPU": 3.0, "memory": 1.0}))
    assert problem is not None and "waits for resources" in problem and "3 CPU and 0 GPU" in problem
    assert "`num_cpus`" in problem
    enough = {"CPU": 3.0, "GPU": 1.0}
    assert find_problem(need(), view(BIG, message=PENDING, free=enough)) is None
    assert find_problem(need(), view(BIG, message="is taking long to initialize")) is None
    assert find_problem(need(), view(BIG, starting=0, message=PENDING)) is None


def test_a_replica_that_failed_to_start_names_the_error():
    message = "The deployment failed to start 3 times in a row. Error:\nTraceback\nValueError: no"
    found = find_problem(need(), view(BIG, starting=0, message=message))
    assert found == "model 'm' could not be started: ValueError: no"


class Cluster:
    def __init__(self, *views: ClusterView) -> None:
        self.views = list(views)

    async def view(self) -> ClusterView:
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if view.nodes == ():
            raise RuntimeError("no controller")
        return view


async def test_waiting_requests_fail_as_soon_as_no_node_can_host_a_replica():
    schedulability = Schedulability({"m": need()}, Cluster(view(SMALL)))

    async def wait() -> None:
        async with schedulability.wait_schedulable("m"):
            await asyncio.Event().wait()

    async with asyncio.timeout(HANG_S):
        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await settled()
        watching = asyncio.create_task(schedulability.watch())
        for each in waiting:
            with pytest.raises(ModelUnavailableError, match="cannot be scheduled"):
                await each
        with pytest.raises(ModelUnavailableError, match="cannot be scheduled"):
            await wait()
        watching.cancel()


async def test_the_log_names_the_model_that_cannot_be_scheduled(capsys):
    """By which `caravan serve` knows that its start does not wait for it."""
    model = {"name": "m:1b", "source": str(DEMO_MODEL), "num_gpus": 9}
    needs = deployments({"models": [model]})["Ingress"].init_args[3].needs
    capsys.readouterr()
    cluster_view = ClusterView((SMALL,), {}, {"m_1b": 0}, {"m_1b": 1})
    Schedulability(needs, Cluster(cluster_view)).update(cluster_view)
    (logged,) = capsys.readouterr().err.splitlines()
    assert json.loads(logged)["model"] == "m:1b"


async def test_requests_of_other_deployments_keep_waiting(monkeypatch):
    schedulability = Schedulability({"m": need(), "n": need({"CPU": 1})}, Cluster(view(SMALL)))
    schedulability.update(view(SMALL))
    for name in ("n", "unknown"):
        async with schedulability.wait_schedulable(name):
            await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), schedulability.wait_schedulable("n"):
            await asyncio.Event().wait()
    schedulability.update(view({"CPU": 0.5}))  # requests that have ended are not refused
    assert is_refused(schedulability, "n")


async def test_new_nodes_are_detected_and_failed_polls_change_nothing(monkeypatch):
    monkeypatch.setattr("serve_app.gateway.schedulability.POLL_S", 0.01)
    monkeypatch.setattr("serve_app.gateway.schedulability.IDLE_POLL_S", 0.01)
    cluster = Cluster(view(SMALL), ClusterView(), view(SMALL, BIG))
    schedulability = Schedulability({"m": need()}, cluster)
    async with asyncio.timeout(HANG_S):
        watching = asyncio.create_task(schedulability.watch())
        await until(lambda: is_refused(schedulability, "m"))
        await until(lambda: not is_refused(schedulability, "m"))
        watching.cancel()


def is_refused(schedulability: Schedulability, name: str) -> bool:
    try:
        schedulability.check(name)
    except ModelUnavailableError:
        return True
    return False


async def test_a_request_that_ends_slowly_does_not_stop_the_polls():
    """Requests for other deployments are still refused in the same poll."""
    schedulability = Schedulability({"m": need(), "n": need()}, Cluster(view(SMALL)))
    may_end, cancelled = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        async with schedulability.wait_schedulable("m"):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
                await may_end.wait()

    async def waiting() -> None:
        async with schedulability.wait_schedulable("n"):
            await asyncio.Event().wait()

    ending = asyncio.create_task(slow())
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        schedulability.update(view(SMALL))
        await cancelled.wait()
        schedulability.update(view(SMALL, BIG))
        other = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        schedulability.update(view(SMALL))
        may_end.set()
        for task in (ending, other):
            with pytest.raises(ModelUnavailableError):
                await task


async def test_images_without_a_schedulable_encoder_are_refused_but_texts_are_not():
    schedulability = Schedulability(
        {"m": need({"CPU": 1}), "encoder": need({"GPU": 9})}, Cluster(view(SMALL))
    )
    schedulability.update(view(SMALL))
    address = Address("127.0.0.1", 1, "token")
    registry = ModelRegistry(
        [ServedModel("m", Options())],
        {"m": OneReplica(address)},
        facts=BuildFacts(encoders={"m": "encoder"}),
        schedulability=schedulability,
    )
    picture = ImagePart(b"picture")
    texts = [
        Conversation((Message("user", "hi"),)),
        RawText("hi"),
        TokenIds((1, 2)),
    ]
    with_images = [
        Conversation((Message("user", ("hi", picture)), Message("user", "hi"))),
        RawText("[img-0]", (picture,)),
    ]
    for prompt in texts:
        assert await registry.choose(ChatTask("t", "m", prompt, SamplingParams())) == address
    for prompt in with_images:
        with pytest.raises(ModelUnavailableError, match="cannot be scheduled"):
            await registry.choose(ChatTask("t", "m", prompt, SamplingParams()))
    schedulability.update(view(BIG, running=1))
    for prompt in with_images:
        assert await registry.choose(ChatTask("t", "m", prompt, SamplingParams())) == address
