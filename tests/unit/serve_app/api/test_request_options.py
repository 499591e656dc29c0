"""Options of a pulled model: overridden by the request and the configuration, and shown."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from serve_app.api.bodies import BodyLimits
from serve_app.api.ingress import IngressOptions, ingress_app
from serve_app.api.request_images import ImageRules
from serve_app.config.options import Options, served_options
from serve_app.gateway.model_registry import ServedModel
from serve_app.messages.model_card import ModelCard
from serve_app.transport.generation import generation_server
from tests.unit.serve_app.fake_replicas import CARD, OneReplica, PretendReplica, backend_of

BROUGHT = Options(temperature=0.25, top_k=7, stop=("<end>",))
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


class Bringing(OneReplica):
    async def describe(self, *, verbose: bool) -> ModelCard:
        return dataclasses.replace(CARD, options=BROUGHT, system="Be brief.", license="MIT")


@asynccontextmanager
async def client(
    replica: PretendReplica, *, configured: Options, brings_options: bool = True
) -> AsyncIterator[httpx.AsyncClient]:
    server = generation_server(replica.generate)
    directory = Bringing(await server.start("127.0.0.1"))
    backend = backend_of(directory, ServedModel("demo", configured, brings_options))
    app = ingress_app(
        backend,
        IngressOptions(api_keys=None, body_limits=BodyLimits(65536), image_rules=ImageRules()),
    )
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        backend.close()
        await server.close(drain_s=1.0)


PATHS = ["/api/chat", "/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_models_own_options_apply_where_nothing_else_is_set(path) -> None:
    replica = PretendReplica()
    async with client(replica, configured=Options(top_k=3)) as http:
        assert (await http.post(path, json=CHAT)).status_code == 200
    (task,) = replica.tasks
    assert (task.sampling.temperature, task.sampling.top_k, task.stop) == (0.25, 3, ("<end>",))


async def test_options_of_a_request_override_those_of_the_model() -> None:
    replica = PretendReplica()
    async with client(replica, configured=Options()) as http:
        options = {"temperature": 0.75, "stop": ["."]}
        await http.post("/api/chat", json={**CHAT, "options": options})
        await http.post("/v1/completions", json={"model": "demo", "prompt": "x", "temperature": 1})
    native, openai = replica.tasks
    assert (native.sampling.temperature, native.sampling.top_k, native.stop) == (0.75, 7, (".",))
    assert (openai.sampling.temperature, openai.stop) == (1.0, ("<end>",))


async def test_a_model_from_a_file_needs_no_lookup_of_options() -> None:
    replica = PretendReplica()
    async with client(replica, configured=Options(), brings_options=False) as http:
        await http.post("/api/chat", json=CHAT)
    assert replica.tasks[0].sampling.temperature == 0.8


async def test_a_models_own_options_are_shown() -> None:
    async with client(PretendReplica(), configured=Options(top_k=3)) as http:
        shown = (await http.post("/api/show", json={"model": "demo"})).json()
    assert (shown["system"], shown["license"]) == ("Be brief.", "MIT")
    parameters = [line.split(maxsplit=1) for line in shown["parameters"].splitlines()]
    assert parameters == [
        ["temperature", "0.25"], ["top_k", "3"], ["num_ctx", "512"], ["stop", '"<end>"'],
    ]  # fmt: skip


def test_unsupported_parameters_are_logged_and_the_others_kept() -> None:
    raw = {"temperature": -1, "tfs_z": 2, "repeat_penalty": 0, "unheard_of": 1, "num_gpu": 99}
    options, refused = served_options({**raw, "stop": ["a", "b"]})
    assert options == Options(temperature=0, stop=("a", "b"))
    assert [reason.split('"')[1] for reason in refused] == ["tfs_z", "repeat_penalty", "unheard_of"]
