"""The backend and the registry: choice of replicas, lists of models, errors."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from runtime.errors import (
    EngineDeadError,
    GenerationFailedError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
)
from serve_app.config.options import Options
from serve_app.gateway.allowed_models import ALL_MODELS, AllowedModels
from serve_app.gateway.model_registry import LOADED_LIFE_S, ModelRegistry, ServedModel
from serve_app.messages.listing import ListedModel
from serve_app.transport.generation import generation_server
from serve_app.transport.wire import Address
from tests.patience import HANG_S, pass_time
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.fake_replicas import (
    CARD,
    OneReplica,
    PretendReplica,
    backend_of,
)
from tests.unit.serve_app.transport.peer import listening

UNREACHABLE = Address("127.0.0.1", 1, "token")


class Addresses:
    """Returns its addresses in turn; the last one is repeated."""

    def __init__(self, *addresses: Address) -> None:
        self.addresses = list(addresses)
        self.choices = 0

    async def choose(self, task, *, avoid: frozenset[str] = frozenset(), identity=None) -> Address:
        self.choices += 1
        return self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]

    async def describe(self, *, verbose: bool):
        return CARD


class NoReplica:
    """Waits for a replica that never starts."""

    async def choose(self, task, *, avoid: frozenset[str] = frozenset(), identity=None) -> Address:
        return await asyncio.Event().wait()

    async def describe(self, *, verbose: bool):
        return await asyncio.Event().wait()


def serving(replica: PretendReplica) -> AbstractAsyncContextManager[Address]:
    return listening(generation_server(replica.generate))


async def test_an_unreachable_replica_is_skipped():
    async with serving(PretendReplica()) as address:
        replicas = Addresses(UNREACHABLE, UNREACHABLE, address)
        assert (await answer_of(backend_of(replicas))).text == "Hello, world"
    assert replicas.choices == 3


async def test_a_replica_lost_before_its_first_delta_is_replaced():
    slow = PretendReplica()
    asked = asyncio.Event()

    async def silent(task):
        asked.set()
        await asyncio.Event().wait()
        yield

    slow.generate = silent
    dying = generation_server(slow.generate)
    async with listening(dying) as first, serving(PretendReplica()) as second:
        answer = asyncio.create_task(answer_of(backend_of(Addresses(first, second))))
        async with asyncio.timeout(HANG_S):
            await asked.wait()
        await dying.close(drain_s=0)
        assert (await answer).text == "Hello, world"


@pytest.mark.parametrize("replicas", [Addresses(UNREACHABLE), NoReplica()])
async def test_waiting_for_a_replica_times_out(replicas):
    with pytest.raises(OverloadedError, match="no replica of model 'demo'"):
        await answer_of(backend_of(replicas, start_timeout_s=0.3))


async def test_waiting_for_a_description_times_out():
    chat = backend_of(NoReplica(), start_timeout_s=0.1)
    with pytest.raises(OverloadedError):
        await chat.card(await chat.model("demo", ALL_MODELS))


async def test_waiting_for_a_replica_to_load_times_out():
    chat = backend_of(NoReplica(), start_timeout_s=0.1)
    with pytest.raises(OverloadedError):
        async with asyncio.timeout(HANG_S):
            await chat.load(await chat.model("demo", ALL_MODELS), None, tenant="")


def registry(replicas) -> ModelRegistry:
    return ModelRegistry([ServedModel("demo", Options())], {"demo": replicas})


async def test_models_without_replicas_are_listed():
    """Otherwise a client that chooses from a list could never start them."""

    class ScaledToZero(OneReplica):
        started = False

        async def ask_all(self, method, *arguments, timeout_s):
            return await super().ask_all(method, timeout_s=timeout_s) if self.started else []

    replicas = ScaledToZero(UNREACHABLE)
    models = registry(replicas)
    (unpulled,) = await models.listed(ALL_MODELS)
    assert (unpulled.name, unpulled.file_bytes) == ("demo", 0)
    assert len(unpulled.digest) == 64, "`ollama list` cuts twelve characters off and fails at fewer"
    replicas.started = True
    await pass_time(2 * LOADED_LIFE_S)
    (started,) = await models.listed(ALL_MODELS)
    assert started.file_bytes == CARD.file_bytes
    replicas.started = False
    await pass_time(2 * LOADED_LIFE_S)
    assert await models.listed(ALL_MODELS) == [started]
    assert await models.loaded(ALL_MODELS) == []


async def test_models_that_are_not_allowed_are_neither_found_nor_listed():
    models = registry(OneReplica(UNREACHABLE))
    for pattern, names in (("d*", ["demo"]), ("other", [])):
        allowed = AllowedModels((pattern,))
        assert [each.name for each in await models.listed(allowed)] == names
        assert [each.model.name for each in await models.loaded(allowed)] == names
    with pytest.raises(ModelNotFoundError):
        await models.find("demo", allowed)


async def test_loaded_models_of_silent_replicas_are_those_last_reported():
    class Frozen(OneReplica):
        frozen = False

        async def ask_all(self, method, *arguments, timeout_s):
            if self.frozen:
                raise TimeoutError
            return await super().ask_all(method, timeout_s=timeout_s)

    replicas = Frozen(UNREACHABLE)
    models = registry(replicas)
    loaded = await models.loaded(ALL_MODELS)
    assert [each.model.name for each in loaded] == ["demo"]
    replicas.frozen = True
    await pass_time(2 * LOADED_LIFE_S)
    assert await models.loaded(ALL_MODELS) == loaded


async def test_lists_that_clients_poll_share_the_calls_of_replicas():
    class Counting(OneReplica):
        calls = 0

        async def ask_all(self, method, *arguments, timeout_s):
            self.calls += 1
            await asyncio.sleep(0)
            return await super().ask_all(method, timeout_s=timeout_s)

    replicas = Counting(UNREACHABLE)
    models = registry(replicas)
    leaving = asyncio.create_task(models.loaded(ALL_MODELS))
    lists = asyncio.gather(*(models.listed(ALL_MODELS) for _ in range(9)))
    await asyncio.sleep(0)
    leaving.cancel()
    assert all(each == [ListedModel.of(CARD)] for each in await lists)
    await models.loaded(ALL_MODELS)
    assert replicas.calls == 1
    await pass_time(2 * LOADED_LIFE_S)
    await models.loaded(ALL_MODELS)
    assert replicas.calls == 2


async def test_a_request_error_is_final():
    replica = PretendReplica()
    replica.error = RequestError("no")
    async with serving(replica) as address:
        with pytest.raises(RequestError, match="no"):
            await answer_of(backend_of(Addresses(address)))
    assert len(replica.tasks) == 1


async def test_a_failed_generation_is_not_repeated():
    replica = PretendReplica()
    replica.fails_after = 0
    async with serving(replica) as address:
        with pytest.raises(GenerationFailedError, match="the engine broke"):
            await answer_of(backend_of(Addresses(address)))
    assert len(replica.tasks) == 1


async def test_another_replica_answers_if_an_engine_has_failed():
    dead, alive = PretendReplica(), PretendReplica()
    dead.error = EngineDeadError("dead")
    async with serving(dead) as first, serving(alive) as second:
        answer = await answer_of(backend_of(Addresses(first, second)))
    assert answer.text == "Hello, world"
    assert (len(dead.tasks), len(alive.tasks)) == (1, 1)


async def test_models_are_found_by_any_spelling_of_their_name():
    chat = backend_of(Addresses(UNREACHABLE))
    for name in ("demo", "DEMO", "demo:latest"):
        assert (await chat.model(name, ALL_MODELS)).name == "demo"
    with pytest.raises(ModelNotFoundError, match="model 'demo:7b' not found"):
        await chat.model("demo:7b", ALL_MODELS)
    with pytest.raises(RequestError, match="model is required"):
        await chat.model("", ALL_MODELS)
