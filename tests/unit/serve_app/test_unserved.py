"""A model that could not be loaded says why, and is tried again after a while."""

import pytest

from runtime.engine.request import SamplingParams
from runtime.errors import EngineDeadError, ModelUnavailableError
from serve_app.api.refusals import refusal
from serve_app.gateway.tasks import ChatTask, RawText
from serve_app.replica.unserved import RETRY_S, UnservedReplica
from serve_app.transport import wire


async def test_every_request_is_told_the_reason():
    replica = UnservedReplica("big", "it needs 5 bytes; 3 are there")
    task = ChatTask("t", "big", RawText("hi"), SamplingParams(seed=1))
    with pytest.raises(ModelUnavailableError, match="'big' cannot be served: it needs 5 bytes"):
        await anext(replica.generate(task))
    with pytest.raises(ModelUnavailableError, match="it needs 5 bytes"):
        replica.describe()


def test_it_counts_as_healthy_until_it_is_time_for_another_try():
    now = [0.0]
    replica = UnservedReplica("big", "no room", clock=lambda: now[0])
    replica.check()
    now[0] = RETRY_S - 1
    replica.check()
    now[0] = RETRY_S + 1
    with pytest.raises(EngineDeadError, match="is tried again: no room"):
        replica.check()


def test_the_reason_travels_and_becomes_a_503_that_says_when_to_try_again():
    told = wire.error_of(wire.failed(ModelUnavailableError("no room")))
    assert isinstance(told, ModelUnavailableError)
    refused = refusal(told)
    assert (refused.status, refused.message) == (503, "no room")
    assert int(refused.headers["retry-after"]) > 1
