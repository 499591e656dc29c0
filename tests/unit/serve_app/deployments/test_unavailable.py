"""A model that could not be loaded: its requests get the reason, and it is loaded again later."""

import asyncio

import pytest

from runtime.engine.request import SamplingParams
from runtime.errors import EngineDeadError, ModelUnavailableError
from serve_app.api.refusals import refusal
from serve_app.deployments.unavailable import OTHERS_S, RETRY_S, UnavailableReplica, any_serves
from serve_app.messages.tasks import ChatTask, RawText
from serve_app.routing.replica_calls import Replicas
from serve_app.transport import wire
from tests.patience import pass_time, settled
from tests.unit.serve_app.fake_calls import FakeCalls


async def test_every_request_fails_with_the_reason():
    replica = UnavailableReplica("model 'big'", "it needs 5 bytes; 3 are there")
    task = ChatTask("t", "big", RawText("hi"), SamplingParams(seed=1))
    with pytest.raises(ModelUnavailableError, match="'big' cannot be served: it needs 5 bytes"):
        await anext(replica.generate(task))
    with pytest.raises(ModelUnavailableError, match="it needs 5 bytes"):
        replica.describe()


def test_the_health_check_passes_until_the_next_attempt():
    now = [0.0]
    replica = UnavailableReplica("model 'big'", "no memory", clock=lambda: now[0])
    replica.check()
    now[0] = RETRY_S - 1
    replica.check()
    now[0] = RETRY_S + 1
    with pytest.raises(EngineDeadError, match="is to load model 'big': no memory"):
        replica.check()


def test_the_ingress_answers_503_with_the_reason_and_retry_after():
    received = wire.error_of(wire.failed(ModelUnavailableError("no memory")))
    assert isinstance(received, ModelUnavailableError)
    refused = refusal(received)
    assert (refused.status, refused.message) == (503, "no memory")
    assert int(refused.headers["retry-after"]) > 1


@pytest.mark.parametrize(
    ("answers", "serves"),
    [
        ({}, False),
        ({"unserved": ModelUnavailableError("no memory")}, False),
        ({"unserved": ModelUnavailableError("no memory"), "loaded": "card"}, True),
    ],
)
async def test_replicas_that_have_loaded_the_model_serve_it(answers, serves):
    replicas = Replicas(FakeCalls({}, next_answers=answers))
    assert await any_serves(replicas, "describe") == serves


async def test_replicas_that_hang_are_not_waited_for():
    replicas = Replicas(FakeCalls({}, next_answers={"hangs": asyncio.Event()}))
    asking = asyncio.create_task(any_serves(replicas, "describe"))
    await settled()
    await pass_time(OTHERS_S)
    assert not await asking
