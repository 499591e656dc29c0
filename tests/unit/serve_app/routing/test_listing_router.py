"""Serve's router of our deployments: it is found by its name, and chooses replicas for calls."""

from types import SimpleNamespace
from typing import NamedTuple

from ray.serve.config import RequestRouterConfig

from serve_app.routing.listing_router import ListingRouter, router_config, routers


class Id(NamedTuple):
    unique_id: str


class Router(ListingRouter):
    """A router without Serve. `lengths`: the known lengths of queues."""

    def __init__(self) -> None:
        self.lengths: dict[Id, int] = {}

    @property
    def replica_queue_len_cache(self):
        return self.lengths

    def on_new_queue_len_info(self, replica_id, num_ongoing_requests):
        self.lengths[replica_id] = num_ongoing_requests


def test_the_router_that_serve_unpickles_is_found_in_this_process():
    """Serve pickles router classes by value."""
    unpickled = RequestRouterConfig(**router_config("demo")).get_request_router_class()

    class Router(unpickled):
        app_name = "app"

    router = object.__new__(Router)
    router.initialize_state(deployment="unpickled")
    assert routers["app", "unpickled"] is router


async def test_control_calls_try_two_random_replicas_and_then_all():
    router = Router()
    pending = pending_call("")
    replicas = list("abcdef")
    ranks = [await router.choose_replicas(replicas, pending) for _ in range(100)]
    assert all(len(rank[0]) == 2 and rank[1] == replicas for rank in ranks)
    assert {name for rank in ranks for name in rank[0]} == set(replicas)
    assert pending.routing_context.should_backoff
    assert await router.choose_replicas(["a"], None) == [["a"], ["a"]]


async def test_a_call_that_names_a_replica_is_sent_to_no_other():
    router, a, b = Router(), replica("a"), replica("b")
    pending = pending_call("b")
    assert await router.choose_replicas([a, b], pending) == [[b]]
    assert await router.choose_replicas([a], pending) == [[]], "Serve asks again later"
    assert pending.routing_context.should_backoff


async def test_a_call_that_names_a_replica_is_sent_without_asking_for_the_length_of_its_queue():
    router, a = Router(), replica("a")
    await router.choose_replicas([a], pending := pending_call("a"))
    assert router.lengths == {a.replica_id: 0}
    router.lengths[a.replica_id] = 7
    await router.choose_replicas([a], pending_call("a"))
    assert router.lengths == {a.replica_id: 7}
    del router.lengths[a.replica_id]  # as Serve does if the replica cannot be reached
    await router.choose_replicas([a], pending)
    assert router.lengths == {}


def replica(name: str) -> SimpleNamespace:
    return SimpleNamespace(replica_id=Id(name))


def pending_call(session_id: str) -> SimpleNamespace:
    """A call as Serve shows it to a router."""
    return SimpleNamespace(
        metadata=SimpleNamespace(session_id=session_id),
        routing_context=SimpleNamespace(should_backoff=False),
    )
