"""The OpenAI-compatible protocol in front of a fake model."""

import json

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import FinishReason
from serve_app.api.openai_completions import CompletionChoice
from serve_app.config.options import Options
from serve_app.messages.tasks import (
    Candidate,
    ChatDelta,
    Conversation,
    EchoedPrompt,
    Infill,
    RawText,
    TokenIds,
    TokenLogprob,
)
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import CARD, USAGE, PretendReplica, http_client

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def post(path, body, replica=None, **settings):
    async with http_client(replica or PretendReplica(), **settings) as client:
        return await client.post(path, json={"model": "demo", **body})


async def task_of(path, body, **settings):
    replica = PretendReplica()
    response = await post(path, body, replica, **settings)
    assert response.status_code == 200, response.text
    return replica.tasks[0]


def events(response):
    *data, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(entry) for entry in data]


async def test_chat_is_not_streamed_by_default():
    reply = (await post(CHAT, {"messages": USER})).json()
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world"}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert (reply["object"], reply["model"]) == ("chat.completion", "demo")
    assert reply["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason():
    response = await post(CHAT, {"messages": USER, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (TEXT, {"prompt": "p"})])
async def test_usage_is_sent_in_its_own_chunk_on_request(path, body):
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *others, last = events(await post(path, body))
    assert not any(chunk.get("usage") for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 10


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (TEXT, {"prompt": "p"})])
async def test_each_chunk_has_the_usage_so_far_on_request(path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await post(path, {**body, "stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] > 0
    assert counts == sorted(counts)
    assert chunks[-2]["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    options = {"continuous_usage_stats": True}
    chunks = events(await post(path, {**body, "stream": True, "stream_options": options}))
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [(CHAT, {"messages": USER}, "chatcmpl"), (TEXT, {"prompt": "p"}, "cmpl")],
)
async def test_the_id_of_a_reply_has_the_request_id_of_the_client(path, body, prefix):
    assert (await post(path, body | {"request_id": "mine"})).json()["id"] == f"{prefix}-mine"


async def test_a_reply_without_text_is_complete():
    replica = PretendReplica(())
    chunks = events(await post(CHAT, {"messages": USER, "stream": True}, replica))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_options_reach_the_engine():
    body = {
        "messages": USER, "temperature": 0.5, "top_p": 0.8, "seed": 42, "presence_penalty": 0.3,
        "frequency_penalty": 0.4, "max_tokens": 9, "max_completion_tokens": 5, "stop": "end",
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": 1,
        "logit_bias": {}, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
    }  # fmt: skip
    task = await task_of(CHAT, body)
    sampling = task.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.8, 42)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.4)
    assert (task.max_tokens, task.stop) == (5, ("end",))


async def test_a_top_p_of_0_is_accepted():
    assert (await task_of(CHAT, {"messages": USER, "top_p": 0})).sampling.top_p == 0


async def test_defaults_are_those_of_the_protocol_unless_configured():
    sampling = (await task_of(CHAT, {"messages": USER})).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    sampling = (await task_of(CHAT, {"messages": USER}, options=Options(top_k=5))).sampling
    assert (sampling.temperature, sampling.top_k) == (1.0, 5)


async def test_text_parts_are_joined_by_blank_lines_and_developer_becomes_system():
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    prompt = (await task_of(CHAT, {"messages": messages})).prompt
    assert prompt == Conversation(
        (Message("system", "be"), Message("user", "a\n\nb"), Message("assistant", ""))
    )


async def test_a_refusal_in_the_history_is_text():
    refusal = {"type": "refusal", "refusal": "I cannot."}
    messages = [*USER, {"role": "assistant", "content": [refusal]}, *USER]
    prompt = (await task_of(CHAT, {"messages": messages})).prompt
    assert prompt.messages[1] == Message("assistant", "I cannot.")


async def test_reasoning_none_reaches_the_template():
    prompt = (await task_of(CHAT, {"messages": USER, "reasoning_effort": "none"})).prompt
    assert prompt.thinking is False


async def test_chat_logprobs_have_the_protocols_shape():
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
    choice = (await post(CHAT, body)).json()["choices"][0]
    entry = choice["logprobs"]["content"][1]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == (", ", -1.0, [44, 32])
    assert [top["token"] for top in entry["top_logprobs"]] == [", "]
    chunks = events(await post(CHAT, {**body, "stream": True}))
    choices = [chunk["choices"][0] for chunk in chunks]
    entries = [e for choice in choices for e in (choice.get("logprobs") or {}).get("content", [])]
    assert [entry["token"] for entry in entries] == ["Hello", ", ", "world"]


@pytest.mark.parametrize(
    ("prompt", "source"),
    [
        ("text", RawText("text")),
        (["text"], RawText("text")),
        ([1, 2, 3], TokenIds((1, 2, 3))),
        ([[1, 2, 3]], TokenIds((1, 2, 3))),
    ],
)
async def test_a_completion_prompt_is_text_or_token_ids(prompt, source):
    assert (await task_of(TEXT, {"prompt": prompt})).prompt == source


async def test_a_completion_with_a_suffix_is_inserted_between_two_texts():
    task = await task_of(TEXT, {"prompt": "a", "suffix": "b"})
    assert (task.prompt, task.truncation) == (Infill("a", "b"), None)
    assert (await task_of(TEXT, {"prompt": "a", "suffix": ""})).prompt == RawText("a")


async def test_a_completion_without_max_tokens_has_the_limit_of_the_model():
    assert (await task_of(TEXT, {"prompt": "p"})).max_tokens is None
    task = await task_of(TEXT, {"prompt": "p"}, options=Options(num_predict=9))
    assert task.max_tokens == 9


async def test_a_completion_returns_text():
    reply = (await post(TEXT, {"prompt": "p"})).json()
    assert reply["object"] == "text_completion"
    (choice,) = reply["choices"]
    assert (choice["index"], choice["text"]) == (0, "Hello, world")
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    chunks = events(await post(TEXT, {"prompt": "p", "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completion_logprobs_have_the_older_shape_streamed_or_not():
    body = {"prompt": "p", "logprobs": 1}
    whole = (await post(TEXT, body)).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["Hello", ", ", "world"],
        "token_logprobs": [-0.5, -1.0, -1.5],
        "top_logprobs": [{"Hello": -0.5}, {", ": -1.0}, {"world": -1.5}],
        "text_offset": [0, 5, 7],
    }
    chunks = events(await post(TEXT, {**body, "stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for part in parts if part for offset in part["text_offset"]] == [0, 5, 7]


def test_tokens_that_are_incomplete_text_are_shown_as_bytes():
    def entry(raw: bytes) -> TokenLogprob:
        drawn = Candidate(raw.decode(errors="replace"), raw, -0.5)
        return TokenLogprob(drawn, (drawn,))

    camel = "🐪".encode()
    entries = tuple(map(entry, [b"a", camel[:2], camel[2:], b"b"]))
    delta = ChatDelta("a🐪b", (1, 2, 3, 4), entries, FinishReason.STOP, USAGE)
    logprobs = CompletionChoice(0).whole(delta)["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x90\\xaa", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][1] == {"bytes:\\xf0\\x9f": -0.5}


def test_the_most_likely_tokens_of_a_completion_include_the_sampled_one():
    drawn, best, second = (Candidate(text, text.encode(), -n) for n, text in enumerate("cab"))
    sampled = TokenLogprob(drawn, (best, second))
    echo = EchoedPrompt("cc", (sampled, sampled))
    delta = ChatDelta("cc", (1, 2), (sampled, TokenLogprob(drawn)), FinishReason.STOP, echo=echo)
    whole = {"a": -1, "b": -2, "c": 0}
    expected = [None, whole, whole, {"c": 0}]
    assert CompletionChoice(0).whole(delta)["logprobs"]["top_logprobs"] == expected


BAD_CHAT = [
    ({"model": ""}, "model is required"),
    ({"messages": []}, "[] is too short - 'messages'"),
    ({"messages": None}, 'field "messages" is required'),
    (
        {"messages": [{"role": "user", "content": 5}]},
        'field "messages[0].content" must be a string or a list',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2049}]},
        'field "messages[0].content" has more than 2,048 items',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        'invalid image input: field "messages[0].content[0].image_url" must be a URL',
    ),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "must be an object with a type"),
    ({"messages": [{"role": "function", "content": "x"}]}, 'is "function", which is not served'),
    (
        {"tools": [{"type": "web_search"}]},
        "\"tools[0].type\" is \"web_search\"; it must be 'function' or 'custom'",
    ),
    (
        {"tools": [{"function": {"name": "a b"}}]},
        'field "tools[0].function.name" must match the pattern ^[a-zA-Z0-9_.:/-]{1,256}$',
    ),
    ({"messages": [{"role": "user", "content": "", "name": 5}]}, '"messages[0].name" must be'),
    (
        {"messages": [{"role": "user", "content": "", "name": "x" * 257}]},
        "at most 256 are",
    ),
    ({"tools": [{"type": "function"}]}, 'field "tools[0].function" is required'),
    ({"logit_bias": "5"}, 'field "logit_bias" must be an object or a list of pairs'),
    ({"logit_bias": [[7, 1], 5]}, 'field "logit_bias[1]" must be a token id and its bias'),
    ({"logit_bias": [["7", 1]]}, 'field "logit_bias[0]" must be a token id and its bias'),
    ({"logit_bias": [[7, 1], [7, 2]]}, 'field "logit_bias" has the token id 7 twice'),
    ({"logit_bias": [[7, True]]}, 'field "logit_bias.7" must be of type float32'),
    ({"logit_bias": {"05": 1}}, 'field "logit_bias" has the key "05", which is no token id'),
    ({"logit_bias": {"9" * 99: 1}}, "which is no token id"),
    ({"logit_bias": {"5": 100.5}}, 'field "logit_bias.5" is 100.5; it must be at least -100'),
    ({"logit_bias": {"5": "1"}}, 'field "logit_bias.5" must be of type float32'),
    ({"logit_bias": {str(n): 1 for n in range(301)}}, "has 301 tokens; at most 300 are accepted"),
    ({"stop_token_ids": ["x"]}, 'field "stop_token_ids" must be a list of token ids'),
    ({"stop_token_ids": [-1]}, 'field "stop_token_ids" must be a list of token ids'),
    ({"stop_token_ids": [1] * 129}, "has 129 tokens; at most 128 are accepted"),
    ({"bad_words": "sea"}, 'field "bad_words" must be a list of strings'),
    ({"bad_words": [5]}, 'field "bad_words" must be a list of strings'),
    ({"bad_words": ["sea", " "]}, 'field "bad_words" has a string without a word'),
    ({"bad_words": ["x"] * 129}, "at most 128 strings of 256 characters"),
    ({"bad_words": ["x" * 257]}, "at most 128 strings of 256 characters"),
    ({"allowed_token_ids": []}, 'field "allowed_token_ids" must be a list of token ids'),
    ({"allowed_token_ids": [1, -1]}, 'field "allowed_token_ids" must be a list of token ids'),
    ({"allowed_token_ids": [1, 2**20]}, "has 2 tokens up to 1,048,576; at most 262,144 up to"),
    ({"min_tokens": -1}, 'field "min_tokens" is -1; it must be at least 0'),
    ({"min_tokens": 3, "max_tokens": 2}, 'it must be at most "max_tokens", which is 2'),
    ({"ignore_eos": 1}, 'field "ignore_eos" must be'),
    ({"request_id": "a b"}, 'field "request_id" must match'),
    ({"audio": {"voice": "x"}}, 'field "audio" is not served yet'),
    ({"reasoning_effort": "huge"}, "invalid reasoning value: 'huge'"),
    ({"reasoning": {"effort": "huge"}}, "invalid reasoning value: 'huge'"),
    ({"reasoning": {"effort": ["low"]}}, 'field "reasoning.effort" must be a string'),
    ({"reasoning": "high"}, 'field "reasoning" must be an object'),
    ({"temperature": -0.1}, 'field "temperature" is -0.1; it must be at least 0 and at most 2'),
    ({"temperature": 2.1}, 'field "temperature" is 2.1'),
    ({"top_p": -0.1}, 'field "top_p" is -0.1'),
    ({"top_k": -2}, 'field "top_k" is -2; it must be at least -1'),
    ({"min_p": 1.1}, 'field "min_p" is 1.1'),
    ({"repetition_penalty": 0}, 'field "repetition_penalty" is 0'),
    ({"repetition_penalty": "1"}, 'field "repetition_penalty" must be of type float32'),
    ({"max_tokens": 0}, 'field "max_tokens" is 0; it must be at least 1'),
    ({"max_completion_tokens": -2}, 'field "max_completion_tokens" is -2; it must be'),
    ({"max_tokens": 1.5}, 'field "max_tokens" is 1.5; it must be an integer'),
    ({"max_tokens": "ten"}, 'field "max_tokens" must be of type integer'),
    ({"max_tokens": 2**63}, "it must be at most 9,223,372,036,854,775,807"),
    ({"presence_penalty": 3}, 'field "presence_penalty" is 3'),
    ({"top_logprobs": 5}, 'field "top_logprobs" needs "logprobs": true'),
    ({"logprobs": True, "top_logprobs": 21}, 'field "top_logprobs" is 21'),
    ({"logprobs": 2}, 'field "logprobs" must be'),
    ({"stop": [1]}, 'field "stop" must be of an array of strings'),
    ({"stop": ""}, "empty string"),
    ({"stream": 1}, 'field "stream" must be'),
]
BAD_TEXT = [
    ({"prompt": None}, 'field "prompt" must be a string or a list of token ids'),
    ({"prompt": []}, 'field "prompt" must be'),
    ({"prompt": [[[1]]]}, 'field "prompt[0]" must be a string or a list of token ids'),
    ({"prompt": [1, "a"]}, 'field "prompt" must be'),
    ({"prompt": [True]}, 'field "prompt" must be'),
    ({"prompt": [-1]}, 'field "prompt" must be'),
    ({"prompt": [2**70]}, 'field "prompt" must be'),
    ({"suffix": ["s"]}, 'field "suffix" must be'),
    ({"prompt": ["a", [1]], "suffix": "s"}, 'field "prompt[1]" must be a string if there is'),
    ({"suffix": "s", "echo": True}, 'the fields "echo" and "suffix" are not served together'),
    ({"echo": 1}, 'field "echo" must be'),
    ({"max_tokens": 0}, 'field "max_tokens" is 0; it must be at least 1'),
    ({"max_tokens": -2, "echo": True}, 'field "max_tokens" is -2; it must be at least 0, or -1'),
    ({"logprobs": 21}, 'field "logprobs" is 21'),
    ({"logprobs": True}, 'field "logprobs" must be of type integer'),
]
BAD = [(CHAT, {"messages": USER, **c}, m) for c, m in BAD_CHAT]
BAD += [(TEXT, {"prompt": "p", **c}, m) for c, m in BAD_TEXT]


@pytest.mark.parametrize(("path", "body", "message"), BAD, ids=[str(b)[:90] for _, b, _ in BAD])
async def test_a_bad_request_is_refused_with_the_reason(path, body, message):
    replica = PretendReplica()
    response = await post(path, body, replica)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None or f'"{error["param"]}"' in message
    assert error["code"] == ("invalid_value" if "image input" in message else None)
    assert replica.tasks == []


async def test_models_are_listed_and_found():
    async with http_client(PretendReplica()) as client:
        listed = (await client.get("/v1/models")).json()
        assert (await client.get("/v1/models/")).json() == listed
        one = (await client.get("/v1/models/demo")).json()
        missing = await client.get("/v1/models/nobody")
    assert listed == {"object": "list", "data": [one]}
    assert one == {
        "id": "demo", "object": "model", "created": 1_700_000_000, "owned_by": "library",
        "max_model_len": CARD.context_tokens,
    }  # fmt: skip
    assert missing.status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_endpoint_that_is_not_served_is_named_with_those_that_are(method):
    async with http_client(PretendReplica()) as client:
        response = await client.request(method, "/v1/audio/speech", json={"model": "demo"})
        long = await client.request(method, "/v1/" + "x" * 10_000)
    assert response.status_code == long.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("not_found_error", None, None)
    unserved, served = error["message"].split("; ")
    assert f"{method} /v1/audio/speech is not served" in unserved
    assert served == (
        "the endpoints are /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank, "
        "/v1/score, /v1/models, /v1/models/{model}, /v1/responses, "
        "/v1/responses/input_tokens, /v1/responses/{id}, "
        "/v1/responses/{id}/cancel, /v1/responses/{id}/input_items, /v1/messages, "
        "/v1/messages/count_tokens"
    )
    assert len(long.json()["error"]["message"]) < 600


@pytest.mark.parametrize("keys", [None, (api_key("secret"),)])
async def test_below_a_prefix_errors_and_open_paths_are_the_same(keys) -> None:
    async with http_client(PretendReplica(), api_keys=keys, prefix="/below") as client:
        response = await client.post("/v1/chat/completions", json={})
        assert response.status_code == (400 if keys is None else 401)
        assert response.json()["error"]["type"].endswith("_error")
        assert isinstance((await client.post("/api/chat", json={})).json()["error"], str)
        assert (await client.get("/healthz")).status_code == 200
