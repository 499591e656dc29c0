"""Fields and options that no protocol defines: ignored with one log line each, or refused."""

import json
from typing import get_args, get_type_hints

import anthropic.types
import ollama
import pytest
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsBase as BetaMessageCreateParams,
)
from anthropic.types.message_create_params import MessageCreateParamsBase
from ollama import _types as native
from openai.types.chat import (
    ChatCompletionContentPartImageParam,
    ChatCompletionContentPartRefusalParam,
    ChatCompletionContentPartTextParam,
)

from serve_app.api import embeddings, ollama_management
from serve_app.api import ollama as ollama_api
from serve_app.api.anthropic import EFFORTS, THINKING, DeclaredTool, MessagesBody
from serve_app.api.anthropic_blocks import BLOCK
from serve_app.api.fields import LONGEST_NAME, MOST_LOGGED
from serve_app.api.ollama_models import ShowBody
from serve_app.api.openai_chat import PART
from tests.unit.serve_app.api.operations import (
    AnyReplica,
    Place,
    body_of,
    check_error,
    name_of,
    path_of,
    replaced,
    values_of,
    willing,
    with_bodies,
)
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

USER = [{"role": "user", "content": "hi"}]
NATIVE, OPENAI, TEXT = "/api/chat", "/v1/chat/completions", "/v1/completions"

# Fields that clients send and no reference server reads: Open WebUI's titles,
# ollama-ai-provider-v2, options that Ollama has removed, keep_alive on /v1.
IGNORED = [
    (NATIVE, {"messages": USER, "num_predict": 50}),
    (NATIVE, {"messages": USER, "temperature": 0.1, "top_p": 0.2}),
    (NATIVE, {"messages": USER, "colour": {"red": [1, None]}}),
    (NATIVE, {"messages": [{**USER[0], "name": "Bob", "colour": 1}]}),
    (NATIVE, {"messages": USER, "options": {"warmth": "hot", "tfs_z": 0.5}}),
    ("/api/generate", {"prompt": "p", "num_predict": 50, "width": 512}),
    (OPENAI, {"messages": USER, "keep_alive": "10m"}),
    (OPENAI, {"messages": USER, "colour": "red", "_debug_render_only": True}),
    (OPENAI, {"messages": [{**USER[0], "colour": 1}]}),
    (OPENAI, {"messages": USER, "stream_options": {"colour": True}}),
    (TEXT, {"prompt": "p", "keep_alive": 5}),
]


@pytest.mark.parametrize(("path", "body"), IGNORED, ids=[str(b)[:70] for _, b in IGNORED])
async def test_fields_that_the_reference_servers_ignore_have_no_effect(path, body):
    plain = {"messages": USER} if "messages" in body else {"prompt": "p"}
    replica = PretendReplica()
    async with http_client(replica) as client:
        for each in (plain, body):
            seeded = {"seed": 1, "options": {"seed": 1, **each.get("options", {})}}
            request = {"model": "demo", "stream": False, **each, **seeded}
            if path in (OPENAI, TEXT):
                del request["options"]
            response = await client.post(path, json=request)
            assert response.status_code == 200, response.text
    without, given = replica.tasks
    assert (given.sampling, given.max_tokens) == (without.sampling, without.max_tokens)
    assert given.prompt == without.prompt


@pytest.mark.parametrize("path", ["/api/show", "/api/embed", "/api/embeddings"])
async def test_other_endpoints_ignore_them_too(path):
    async with http_client(PretendReplica()) as client:
        response = await client.post(path, json={"model": "demo", "colour": "red"})
    assert response.status_code == 200, response.text


KNOWN = [
    (NATIVE, {"messages": USER, "options": {"top_k": "x"}}, "must be of type integer"),
    (OPENAI, {"messages": USER, "best_of": 2}, '"best_of" is not served yet'),
    (
        OPENAI,
        {"messages": [{**USER[0], "audio": {}, "function_call": 1}]},
        '.function_call" is not',
    ),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("path", "body", "reported"), KNOWN, ids=[t for _, _, t in KNOWN])
async def test_known_unsupported_fields_are_refused_by_name(path, body, reported, strict):
    async with http_client(PretendReplica(), strict_fields=strict) as client:
        response = await client.post(path, json={"model": "demo", **body})
    assert response.status_code == 400
    assert reported in response.text.replace('\\"', '"')


STRICT = [
    (NATIVE, {"messages": USER, "colour": 1}, 'field "colour" is not known'),
    (NATIVE, {"messages": USER, "num_predict": 50}, 'field "num_predict" is not known'),
    (NATIVE, {"messages": [*USER, {**USER[0], "colour": 1}]}, '"messages[1].colour" is not known'),
    (NATIVE, {"messages": USER, "options": {"warmth": 1}}, 'option "warmth" is not known'),
    (NATIVE, {"messages": USER, "options": {"tfs_z": 0.5}}, 'option "tfs_z" is not known'),
    (OPENAI, {"messages": USER, "keep_alive": 5}, 'field "keep_alive" is not known'),
    (
        OPENAI,
        {"messages": USER, "stream_options": {"include": 1}},
        'field "stream_options.include" is not known',
    ),
    ("/api/embed", {"input": "a", "options": {"warmth": 1}}, 'option "warmth" is not known'),
]


@pytest.mark.parametrize(("path", "body", "reported"), STRICT, ids=[t for _, _, t in STRICT])
async def test_a_strict_server_refuses_unknown_fields_by_name(path, body, reported):
    replica = PretendReplica()
    async with http_client(replica, strict_fields=True) as client:
        response = await client.post(path, json={"model": "demo", **body})
    assert response.status_code == 400
    assert reported in response.text.replace('\\"', '"')
    assert "strict_fields" in response.text
    assert replica.tasks == []


# Objects whose fields clients choose: schemas, values, variables, labels, records.
FREE = {"parameters", "input_schema", "arguments", "input", "chat_template_kwargs", "metadata"}
FREE |= {"documents"}
# Objects of several shapes, which are read by their keys.
FREE |= {"format", "response_format", "tool_choice"}


@pytest.mark.parametrize("operation", with_bodies(), ids=name_of)
async def test_a_strict_server_refuses_an_unknown_field_of_every_object(operation):
    body, path = body_of(operation), path_of(operation)
    objects = [
        (place, value) for place, value in values_of(body)
        if isinstance(value, dict) and not FREE.intersection(place)
    ]  # fmt: skip
    async with http_client(AnyReplica(), strict_fields=True, **willing()) as client:
        plain = await client.request(operation.method, path, json=body)
        assert plain.status_code == 200, plain.text
        for place, value in objects:
            changed = replaced(body, place, value | {"colour": 1})
            response = await client.request(operation.method, path, json=changed)
            assert response.status_code == 400, (place, response.text)
            reported = check_error(operation.protocol, response.text)
            assert f'{spelled(place)}colour" is not known' in reported


def spelled(place: Place) -> str:
    """As in errors; options are named without their place."""
    if place == ("options",):
        return ""
    steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return "".join(steps).removeprefix(".") + "." * bool(place)


NATIVE_REQUESTS = [
    (native.ChatRequest, ollama_api.ChatBody),
    (native.GenerateRequest, ollama_api.GenerateBody),
    (native.EmbedRequest, embeddings.EmbedBody),
    (native.EmbeddingsRequest, embeddings.OlderBody),
    (native.CreateRequest, ollama_management.CreateBody),
    (native.PullRequest, ollama_management.TransferBody),
    (native.PushRequest, ollama_management.TransferBody),
    (native.CopyRequest, ollama_management.CopyBody),
    (native.DeleteRequest, ollama_management.DeleteBody),
    (native.ShowRequest, ShowBody),
    (native.Message, ollama_api.ChatMessage),
]
SERVED_BLOCKS = ("Text", "Image", "ToolUse", "ToolResult", "Thinking", "RedactedThinking")


@pytest.mark.parametrize(("request_type", "body"), NATIVE_REQUESTS)
def test_every_field_of_ollamas_client_is_known(request_type, body):
    asked = {name.removesuffix("_") for name in request_type.model_fields}
    assert not asked - {info.alias or name for name, info in body.model_fields.items()}


def test_every_field_of_anthropics_client_is_known():
    for request in (MessageCreateParamsBase, BetaMessageCreateParams):
        assert (
            not request.__annotations__.keys() - MessagesBody.model_fields - {"betas"}
        )  # a header
    assert not get_type_hints(anthropic.types.ToolParam).keys() - DeclaredTool.model_fields
    for name in SERVED_BLOCKS:
        block = getattr(anthropic.types, f"{name}BlockParam")
        assert not get_type_hints(block).keys() - BLOCK


def test_every_kind_of_thinking_of_anthropics_client_is_known():
    configs = get_args(anthropic.types.ThinkingConfigParam)
    kinds = {kind for each in configs for kind in get_args(get_type_hints(each)["type"])}
    efforts = get_args(get_type_hints(anthropic.types.OutputConfigParam)["effort"])[0]
    assert kinds == set(THINKING)
    assert set(get_args(efforts)) == set(EFFORTS)


def test_every_field_of_openais_parts_is_known():
    for part in (
        ChatCompletionContentPartTextParam,
        ChatCompletionContentPartImageParam,
        ChatCompletionContentPartRefusalParam,
    ):
        assert not get_type_hints(part).keys() - PART


async def test_every_option_of_the_official_client_is_known():
    values = dict.fromkeys(ollama.Options.model_fields)
    set_ones = {"embedding_only": True, "low_vram": True, "num_gpu": 1, "numa": True, "tfs_z": 1}
    body = {"model": "demo", "messages": USER, "options": values | set_ones}
    async with http_client(PretendReplica(), strict_fields=True) as client:
        response = await client.post(NATIVE, json=body)
    assert response.status_code == 200, response.text


async def test_a_strict_server_accepts_all_known_fields():
    body = {"model": "demo", "messages": USER, "keep_alive": "5m", "truncate": True, "tools": None}
    async with http_client(PretendReplica(), strict_fields=True) as client:
        response = await client.post(NATIVE, json={**body, "options": {"top_k": 4, "tfs_z": 1}})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("num_ctx", [0, -1])
async def test_a_num_ctx_below_one_leaves_the_context_to_the_server(num_ctx):
    replica = PretendReplica()
    body = {"model": "demo", "messages": USER, "options": {"num_ctx": num_ctx}}
    async with http_client(replica) as client:
        response = await client.post(NATIVE, json=body)
    assert response.status_code == 200, response.text
    assert [task.context_tokens for task in replica.tasks] == [None]


def ignored(capsys) -> list[str]:
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [line["field"] for line in lines if line["event"] == "unknown field ignored"]


async def test_each_name_is_logged_once_whatever_the_number_of_requests(capsys):
    messages = [{**USER[0], "colour": 1}, {**USER[0], "colour": 2}]
    body = {"model": "demo", "messages": messages, "options": {"warmth": 1}, "num_predict": 9}
    async with http_client(PretendReplica()) as client:
        for _ in range(3):
            await client.post(NATIVE, json=body)
            await client.post(NATIVE, json={**body, "shape": 1})
    assert ignored(capsys) == ["num_predict", "messages[].colour", "options.warmth", "shape"]


async def test_invented_names_of_fields_fill_neither_the_log_nor_memory(capsys):
    async with http_client(PretendReplica(), max_body_bytes=1 << 20) as client:
        for each in range(5):
            made_up = {f"name {each}/{n}": n for n in range(300)}
            body = {"model": "demo", "messages": USER, **made_up, "options": made_up}
            assert (await client.post(NATIVE, json=body)).status_code == 200
    assert len(ignored(capsys)) == MOST_LOGGED


async def test_a_long_name_is_cut(capsys):
    async with http_client(PretendReplica()) as client:
        body = {"model": "demo", "messages": USER, "x" * 5000: 1}
        await client.post(NATIVE, json=body)
    (name,) = ignored(capsys)
    assert name == "x" * LONGEST_NAME
