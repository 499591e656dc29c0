"""Options of a pulled model: overridden by the request and the configuration, and shown."""

import dataclasses
from functools import partial
from typing import Any

import pytest

from serve_app.config.options import Options, served_options
from serve_app.messages.tasks import ChatTask, Conversation
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, http_client

OWN = Options(temperature=0.25, top_k=7, stop=("<end>",))
PULLED = dataclasses.replace(CARD, options=OWN, system="Be brief.", license="MIT")
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}

client = partial(http_client, card=PULLED, brings_options=True)

PATHS = ["/api/chat", "/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_models_own_options_apply_where_nothing_else_is_set(path) -> None:
    replica = PretendReplica()
    async with client(replica, options=Options(top_k=3)) as http:
        assert (await http.post(path, json=CHAT)).status_code == 200
    (task,) = replica.tasks
    assert (task.sampling.temperature, task.sampling.top_k, task.stop) == (0.25, 3, ("<end>",))


async def test_options_of_a_request_override_those_of_the_model() -> None:
    replica = PretendReplica()
    async with client(replica, options=Options()) as http:
        options = {"temperature": 0.75, "stop": ["."]}
        await http.post("/api/chat", json={**CHAT, "options": options})
        await http.post("/v1/completions", json={"model": "demo", "prompt": "x", "temperature": 1})
    native, openai = replica.tasks
    assert (native.sampling.temperature, native.sampling.top_k, native.stop) == (0.75, 7, (".",))
    assert (openai.sampling.temperature, openai.stop) == (1.0, ("<end>",))


async def test_a_model_from_a_file_needs_no_lookup_of_options() -> None:
    replica = PretendReplica()
    async with client(replica, options=Options(), brings_options=False) as http:
        await http.post("/api/chat", json=CHAT)
    assert replica.tasks[0].sampling.temperature == 0.8


async def test_a_models_own_options_are_shown() -> None:
    async with client(PretendReplica(), options=Options(top_k=3)) as http:
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


def _budget(task: ChatTask) -> int | None:
    assert isinstance(task.prompt, Conversation)
    return task.prompt.thinking_budget


MESSAGES = {**CHAT, "max_tokens": 5}
# A request of each protocol, and the same with a thinking budget of its own, if it has one.
BUDGETED = [
    ("/api/chat", CHAT, {**CHAT, "options": {"thinking_token_budget": 3}}),
    (
        "/api/generate",
        {"model": "demo", "prompt": "hi"},
        {"model": "demo", "prompt": "hi", "options": {"thinking_token_budget": 3}},
    ),
    ("/v1/chat/completions", CHAT, {**CHAT, "thinking_budget": 3}),
    ("/v1/messages", MESSAGES, {**MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 3}}),
    ("/v1/responses", {"model": "demo", "input": "hi"}, None),
]


@pytest.mark.parametrize(("path", "plain", "own"), BUDGETED, ids=[each[0] for each in BUDGETED])
async def test_a_model_has_a_thinking_budget_of_its_own(path, plain, own) -> None:
    replica = PretendReplica()
    options, _ = served_options({"thinking_token_budget": 40})  # of a Modelfile
    async with http_client(replica, options=options) as http:
        for body in filter(None, (plain, own)):
            assert (await http.post(path, json=body)).status_code == 200
    budgets = [_budget(task) for task in replica.tasks]
    assert budgets == ([40] if own is None else [40, 3])


async def test_a_request_lifts_the_thinking_budget_of_its_model() -> None:
    replica = PretendReplica()
    async with http_client(replica, options=Options(thinking_token_budget=40)) as http:
        await http.post("/v1/chat/completions", json={**CHAT, "thinking_token_budget": -1})
        await http.post("/api/chat", json={**CHAT, "options": {"thinking_token_budget": -1}})
    assert [_budget(task) for task in replica.tasks] == [None, None]


async def test_the_template_sees_the_budget_of_the_model_where_tokens_are_counted() -> None:
    replica = PretendReplica()
    async with http_client(replica, options=Options(thinking_token_budget=0)) as http:
        await http.post("/v1/messages/count_tokens", json=CHAT)
        await http.post("/v1/responses/input_tokens", json={"model": "demo", "input": "hi"})
        await http.post("/tokenize", json=CHAT)
        await http.post("/api/chat", json=CHAT)
    prompts: list[Any] = [task.prompt for task in replica.tasks]
    assert [(prompt.thinking_budget, prompt.thinking) for prompt in prompts] == [(0, False)] * 4
