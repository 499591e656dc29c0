"""Two real replicas are called one by one through Serve's router, also while one hangs."""

import asyncio
import os
import signal

from ray import serve
from ray.serve.context import _RequestContext, _serve_request_context

from serve_app.routing.listing_router import routers
from serve_app.routing.named_replicas import NamedReplicas
from tests.patience import HANG_S
from tests.serve.pair.application import NAME, pids_of


async def test_a_replica_that_hangs_delays_no_call_of_another(url: str) -> None:
    replicas = NamedReplicas(serve.get_deployment_handle("demo", NAME))
    pids = await pids_of(replicas)
    assert len(set(pids.values())) == 2
    hanging, other = pids
    router = routers[NAME, "demo"]
    os.kill(pids[hanging], signal.SIGSTOP)
    try:
        for replica in [*router.curr_replicas]:  # as after ten seconds without a call
            router.replica_queue_len_cache.invalidate_key(replica)
        waiting = [asyncio.create_task(replicas.call(hanging, "describe")) for _ in range(9)]
        for _ in range(20):
            assert (await replicas.call(other, "describe")).pid == pids[other]
        assert not any(each.done() for each in waiting)
    finally:
        os.kill(pids[hanging], signal.SIGCONT)
    assert {card.pid for card in await asyncio.gather(*waiting)} == {pids[hanging]}


async def test_calls_of_one_http_request_at_once_reach_their_replicas(url: str) -> None:
    replicas = NamedReplicas(serve.get_deployment_handle("demo", NAME))
    pids = await pids_of(replicas)
    _serve_request_context.set(_RequestContext(_internal_request_id="as in Serve's replicas"))
    for _ in range(5):
        calls = [replicas.call(name, "describe") for name in [*pids] * 3]
        cards = await asyncio.wait_for(asyncio.gather(*calls), HANG_S)
        assert [card.pid for card in cards] == [*pids.values()] * 3
