"""What has no place in the cluster is told so at once, with what it needs and what there is."""

import asyncio

import pytest

from model_zoo.chat.messages import ImagePart, Message
from runtime.engine.request import SamplingParams
from runtime.errors import ModelUnavailableError
from serve_app.gateway.directory import ModelDirectory
from serve_app.gateway.schedulability import Need, Schedulability, View, problem_of
from serve_app.gateway.tasks import ChatTask, Conversation, RawText, TokenIds
from serve_app.transport.wire import Address
from tests.patience import HANG_S
from tests.unit.serve_app.pretend import Loaded, OneReplica

SMALL, BIG = {"CPU": 4.0, "GPU": 0.0}, {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}
PENDING = "Deployment 'm' has 1 replicas that have taken more than 30s to be scheduled."


def need(*bundles, together: bool = False, apart: bool = False) -> Need:
    return Need("model 'm'", "m", bundles or ({"CPU": 1, "GPU": 1},), together, apart)


def view(*nodes, running: int = 0, starting: int = 1, told: str = "", free=None) -> View:
    return View(nodes, free or {}, {"m": running}, {"m": starting}, {"m": told})


def test_what_no_node_has_is_told_with_what_the_largest_has():
    told = problem_of(need({"CPU": 1, "GPU": 4}), view(SMALL, BIG))
    assert told is not None
    assert "model 'm' has no place: a replica needs 1 CPU and 4 GPU on one node" in told
    assert "2 nodes the largest have 8 CPU and 2 GPU" in told
    assert "autoscaler" in told and "\n" not in told


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
def test_bundles_have_to_find_room_on_the_nodes(stated, nodes, fits):
    assert (problem_of(stated, view(*nodes)) is None) == fits


def test_ranks_on_nodes_of_their_own_say_so():
    told = problem_of(need({"CPU": 1}, {"CPU": 1}, apart=True), view(BIG))
    assert told is not None and "needs 2 times 1 CPU, each on a node of its own" in told


def test_a_replica_that_runs_is_proof_enough():
    assert problem_of(need({"GPU": 9}), view(SMALL, running=1)) is None


def test_what_sleeps_may_be_woken_though_no_node_has_room_for_it_yet():
    """Only what is to be started makes an autoscaler add the node that it needs."""
    assert problem_of(need({"GPU": 9}), view(SMALL, starting=0)) is None


def test_nothing_is_known_of_a_cluster_without_nodes():
    assert problem_of(need({"GPU": 9}), view()) is None


def test_what_waits_for_others_to_leave_is_told_what_is_free():
    told = problem_of(need(), view(BIG, told=PENDING, free={"CPU": 3.0, "memory": 1.0}))
    assert told is not None and "waits for a place" in told and "3 CPU and 0 GPU" in told
    enough = {"CPU": 3.0, "GPU": 1.0}
    assert problem_of(need(), view(BIG, told=PENDING, free=enough)) is None
    assert problem_of(need(), view(BIG, told="is taking long to initialize")) is None
    assert problem_of(need(), view(BIG, starting=0, told=PENDING)) is None


def test_what_could_not_be_started_is_told_why():
    told = "The deployment failed to start 3 times in a row. Error:\nTraceback\nValueError: no"
    found = problem_of(need(), view(BIG, starting=0, told=told))
    assert found == "model 'm' could not be started: ValueError: no"


class Cluster:
    def __init__(self, *views: View) -> None:
        self.views = list(views)

    async def look(self) -> View:
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if view.nodes == ():
            raise RuntimeError("no controller")
        return view


async def test_who_waits_for_a_replica_hears_at_once_that_there_can_be_none():
    placement = Schedulability({"m": need()}, Cluster(view(SMALL)))

    async def wait() -> None:
        async with placement.schedulable("m"):
            await asyncio.Event().wait()

    async with asyncio.timeout(HANG_S):
        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0.01)
        watching = asyncio.create_task(placement.watch())
        for each in waiting:
            with pytest.raises(ModelUnavailableError, match="has no place"):
                await each
        with pytest.raises(ModelUnavailableError, match="has no place"):
            await wait()
        watching.cancel()


async def test_who_waits_for_another_one_is_left_alone(monkeypatch):
    placement = Schedulability({"m": need(), "n": need({"CPU": 1})}, Cluster(view(SMALL)))
    placement.note(view(SMALL))
    for name in ("n", "unknown"):
        async with placement.schedulable(name):
            await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), placement.schedulable("n"):
            await asyncio.Event().wait()


async def test_a_place_that_comes_is_seen_and_a_failed_look_changes_nothing(monkeypatch):
    monkeypatch.setattr("serve_app.gateway.schedulability.LOOK_S", 0.01)
    monkeypatch.setattr("serve_app.gateway.schedulability.CALM_LOOK_S", 0.01)
    cluster = Cluster(view(SMALL), View(), view(SMALL, BIG))
    placement = Schedulability({"m": need()}, cluster)
    async with asyncio.timeout(HANG_S):
        watching = asyncio.create_task(placement.watch())
        while placement.problem("m") is None:
            await asyncio.sleep(0.001)
        while placement.problem("m") is not None:
            await asyncio.sleep(0.001)
        watching.cancel()


async def test_images_that_nobody_can_encode_are_refused_and_texts_are_answered():
    placement = Schedulability(
        {"m": need({"CPU": 1}), "eyes": need({"GPU": 9})}, Cluster(view(SMALL))
    )
    placement.note(view(SMALL))
    address = Address("127.0.0.1", 1, "token")
    directory = ModelDirectory(
        OneReplica(address), {"m": Loaded()}, encoders={"m": "eyes"}, placement=placement
    )
    picture = ImagePart(b"picture")
    blind = [
        Conversation((Message("user", "hi"),)),
        RawText("hi"),
        TokenIds((1, 2)),
    ]
    seeing = [
        Conversation((Message("user", ("hi", picture)), Message("user", "hi"))),
        RawText("[img-0]", (picture,)),
    ]
    for prompt in blind:
        assert await directory.choose(ChatTask("t", "m", prompt, SamplingParams())) == address
    for prompt in seeing:
        with pytest.raises(ModelUnavailableError, match="has no place"):
            await directory.choose(ChatTask("t", "m", prompt, SamplingParams()))
    placement.note(view(BIG, running=1))
    for prompt in seeing:
        assert await directory.choose(ChatTask("t", "m", prompt, SamplingParams())) == address
