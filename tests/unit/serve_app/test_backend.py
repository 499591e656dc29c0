"""The backend: which replica is asked, and what the loss of one means."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest

from runtime.engine.request import SamplingParams
from runtime.errors import (
    EngineDeadError,
    GenerationFailedError,
    ModelNotFoundError,
    ModelUnavailableError,
    OverloadedError,
    RequestError,
)
from serve_app.api.keys import ALL_MODELS
from serve_app.gateway.backend import ChatBackend
from serve_app.gateway.directory import ModelDirectory
from serve_app.gateway.tasks import ChatTask, RawText, merge
from serve_app.transport.server import StreamServer
from serve_app.transport.wire import Address
from tests.patience import HANG_S
from tests.unit.serve_app.pretend import (
    CARD,
    Loaded,
    OneReplica,
    PretendReplica,
    backend_of,
)

TASK = ChatTask("t1", "demo", RawText("hi"), SamplingParams(seed=7))
NOBODY = Address("127.0.0.1", 1, "token")


class Addresses:
    """Hands out its addresses in turn, the last one for ever."""

    def __init__(self, *addresses: Address) -> None:
        self.addresses = list(addresses)
        self.asked = 0

    async def choose(self, task, *, avoid: frozenset[str] = frozenset()) -> Address:
        self.asked += 1
        return self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]

    async def better(self, task, *, avoid: frozenset[str] = frozenset()) -> None:
        return None

    async def describe(self, model: str, *, verbose: bool):
        return CARD


class NoReplica:
    """A directory that waits for a replica which never comes."""

    async def choose(self, task, *, avoid: frozenset[str] = frozenset()) -> Address:
        return await asyncio.Event().wait()

    async def describe(self, model: str, *, verbose: bool):
        return await asyncio.Event().wait()


@asynccontextmanager
async def serving(replica: PretendReplica):
    server = StreamServer(replica.generate)
    try:
        yield server, await server.start("127.0.0.1")
    finally:
        await server.close(drain_s=0)


def backend(directory, start_timeout_s=HANG_S) -> ChatBackend:
    return backend_of(directory, start_timeout_s=start_timeout_s)


async def answered(chat: ChatBackend):
    async with asyncio.timeout(HANG_S), aclosing(chat.generate(TASK)) as deltas:
        return merge([delta async for delta in deltas])


async def test_a_replica_that_cannot_be_reached_is_passed_over():
    async with serving(PretendReplica()) as (_, address):
        directory = Addresses(NOBODY, NOBODY, address)
        assert (await answered(backend(directory))).text == "Hello, world"
    assert directory.asked == 3


async def test_a_replica_lost_before_its_first_delta_is_replaced():
    slow = PretendReplica()
    asked = asyncio.Event()

    async def silent(task):
        asked.set()
        await asyncio.Event().wait()
        yield

    slow.generate = silent
    async with serving(slow) as (dying, first), serving(PretendReplica()) as (_, second):
        answer = asyncio.create_task(answered(backend(Addresses(first, second))))
        async with asyncio.timeout(HANG_S):
            await asked.wait()
        await dying.close(drain_s=0)
        assert (await answer).text == "Hello, world"


@pytest.mark.parametrize("directory", [Addresses(NOBODY), NoReplica()])
async def test_waiting_for_a_replica_ends(directory):
    with pytest.raises(OverloadedError, match="no replica of model 'demo'"):
        await answered(backend(directory, start_timeout_s=0.3))


async def test_waiting_for_a_description_ends():
    chat = backend(NoReplica(), start_timeout_s=0.1)
    with pytest.raises(OverloadedError):
        await chat.card(await chat.model("demo", ALL_MODELS))


async def test_waiting_for_somebody_who_loads_ends():
    chat = backend(NoReplica(), start_timeout_s=0.1)
    with pytest.raises(OverloadedError):
        async with asyncio.timeout(HANG_S):
            await chat.load(await chat.model("demo", ALL_MODELS), None, tenant="")


async def test_a_model_is_described_by_a_replica_that_has_it_where_another_could_not_load_it():
    class Some(Loaded):
        async def ask(self, method, *arguments, timeout_s):
            assert (method, arguments) == ("describe", (False,))
            return [CARD] if self.there else []

    class Unserved(OneReplica):
        async def describe(self, model, *, verbose):
            raise ModelUnavailableError("it does not fit")

    replicas = Some()
    directory = ModelDirectory(Unserved(NOBODY), {"demo": replicas})
    replicas.there = True
    assert await directory.describe("demo", verbose=False) == CARD
    replicas.there = False
    with pytest.raises(ModelUnavailableError, match="does not fit"):
        await directory.describe("demo", verbose=False)


async def test_models_that_sleep_are_listed_as_far_as_they_are_known():
    """Whoever chooses from a list could not wake them otherwise."""

    class Sleeper(Loaded):
        awake = False

        async def ask(self, method, *arguments, timeout_s):
            return await super().ask(method, timeout_s=timeout_s) if self.awake else []

    sleeper = Sleeper()
    directory = ModelDirectory(OneReplica(NOBODY), {"demo": sleeper})
    (never,) = await directory.configured()
    assert (never.name, never.file_bytes) == ("demo", 0)
    assert len(never.digest) == 64, "`ollama list` cuts twelve characters off and fails at fewer"
    sleeper.awake = True
    (awake,) = await directory.configured()
    assert awake.file_bytes == CARD.file_bytes
    sleeper.awake = False
    assert await directory.configured() == [awake]
    assert await directory.loaded() == []


async def test_a_model_with_a_silent_replica_is_loaded_as_was_last_told():
    class Freezing(Loaded):
        frozen = False

        async def ask(self, method, *arguments, timeout_s):
            if self.frozen:
                raise TimeoutError
            return await super().ask(method, timeout_s=timeout_s)

    freezing = Freezing()
    directory = ModelDirectory(OneReplica(NOBODY), {"demo": freezing})
    told = await directory.loaded()
    assert [each.model.name for each in told] == ["demo"]
    freezing.frozen = True
    assert await directory.loaded() == told


async def test_a_replicas_refusal_is_final():
    replica = PretendReplica()
    replica.error = RequestError("no")
    async with serving(replica) as (_, address):
        with pytest.raises(RequestError, match="no"):
            await answered(backend(Addresses(address)))
    assert len(replica.tasks) == 1


async def test_a_request_that_fails_is_not_asked_again():
    replica = PretendReplica()
    replica.fails_after = 0
    async with serving(replica) as (_, address):
        with pytest.raises(GenerationFailedError, match="the engine broke"):
            await answered(backend(Addresses(address)))
    assert len(replica.tasks) == 1


async def test_a_dead_engine_is_no_loss_before_the_first_delta():
    dead, alive = PretendReplica(), PretendReplica()
    dead.error = EngineDeadError("dead")
    async with serving(dead) as (_, first), serving(alive) as (_, second):
        answer = await answered(backend(Addresses(first, second)))
    assert answer.text == "Hello, world"
    assert (len(dead.tasks), len(alive.tasks)) == (1, 1)


async def test_models_are_found_whatever_the_spelling():
    chat = backend(Addresses(NOBODY))
    for name in ("demo", "DEMO", "demo:latest"):
        assert (await chat.model(name, ALL_MODELS)).name == "demo"
    with pytest.raises(ModelNotFoundError, match="model 'demo:7b' not found"):
        await chat.model("demo:7b", ALL_MODELS)
    with pytest.raises(RequestError, match="model is required"):
        await chat.model("", ALL_MODELS)
