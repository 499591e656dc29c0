"""Readiness: reached when the models have started, kept when one fails later; without a key."""

import asyncio
from dataclasses import dataclass

from serve_app.gateway.readiness import CHECK_S, Readiness
from tests.patience import pass_time
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

PATIENCE_S = 900.0


@dataclass
class Model:
    serving: bool = False


async def reached(readiness: Readiness) -> bool:
    await pass_time(2 * CHECK_S)
    return readiness.reached


async def test_it_is_reached_when_every_model_has_a_replica_and_stays():
    first, second = Model(), Model()
    readiness = Readiness([first, second], patience_s=PATIENCE_S, others=False)
    watching = asyncio.create_task(readiness.watch())
    assert not await reached(readiness)
    first.serving = True
    assert not await reached(readiness)
    second.serving = True
    assert await reached(readiness)
    first.serving = False
    assert await reached(readiness)
    await watching


async def test_a_model_that_does_not_start_holds_back_the_others_for_a_time_only():
    alone, broken, loaded = Model(), Model(), Model(serving=True)
    of_one = Readiness([alone], patience_s=PATIENCE_S, others=False)
    of_two = Readiness([broken, loaded], patience_s=PATIENCE_S, others=False)
    watching = [asyncio.create_task(each.watch()) for each in (of_one, of_two)]
    assert not await reached(of_two)
    await pass_time(PATIENCE_S)
    assert await reached(of_two)
    assert not await reached(of_one), "no model can be used"
    alone.serving = True
    assert await reached(of_one)
    await asyncio.gather(*watching)


async def test_models_that_start_on_request_can_be_used_beside_one_that_does_not_start():
    readiness = Readiness([Model()], patience_s=PATIENCE_S, others=True)
    watching = asyncio.create_task(readiness.watch())
    assert not await reached(readiness)
    await pass_time(PATIENCE_S)
    assert await reached(readiness)
    await watching


async def test_a_server_without_models_is_ready():
    assert Readiness([], patience_s=PATIENCE_S, others=False).reached


async def test_readyz_answers_anyone_by_any_name():
    readiness = Readiness([Model()], patience_s=PATIENCE_S, others=False)
    for keys in (None, (api_key("good"),)):
        async with http_client(PretendReplica(), api_keys=keys, readiness=readiness) as client:
            for reached, status in ((False, 503), (True, 200)):
                readiness.reached = reached
                for path in ("/readyz", "/health"):
                    answer = await client.get(path, headers={"host": "lb.test"})
                    assert answer.status_code == status
                assert (await client.get("/healthz")).status_code == 200
