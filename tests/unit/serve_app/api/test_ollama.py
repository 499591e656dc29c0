"""Ollama's protocol in front of a fake model: requests in, tasks and lines of JSON out."""

import dataclasses
import json
import tomllib
from functools import partial

import pytest

from model_zoo.chat.messages import Message, ReplyStart
from serve_app.api.ollama_models import parameter_size
from serve_app.config.options import Options
from serve_app.messages.tasks import Conversation, Infill, RawText, Truncation
from tests.checkout import ROOT
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, http_client

USER = [{"role": "user", "content": "hi"}]
conversation = partial(Conversation, default_template="{{ .Prompt }}")


async def post(path, body, replica=None, **settings):
    async with http_client(replica or PretendReplica(), **settings) as client:
        return await client.post(path, json=body)


async def task_of(path, body, **settings):
    replica = PretendReplica()
    response = await post(path, {"model": "demo", "stream": False, **body}, replica, **settings)
    assert response.status_code == 200, response.text
    return replica.tasks[0]


def lines(response):
    return [json.loads(line) for line in response.text.splitlines()]


async def test_chat_streams_by_default_one_json_object_per_line():
    response = await post("/api/chat", {"model": "demo", "messages": USER})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(response)
    assert "".join(piece["message"]["content"] for piece in pieces) == "Hello, world"
    assert not any(piece["done"] for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", "demo")
    assert (last["prompt_eval_count"], last["eval_count"]) == (7, 3)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (2_000, 3_000)
    assert last["total_duration"] > 0


async def test_chat_without_streaming_is_one_object():
    response = await post("/api/chat", {"model": "demo:latest", "messages": USER, "stream": False})
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    reply = response.json()
    assert reply["message"]["content"] == "Hello, world"
    assert (reply["done"], reply["done_reason"], reply["model"]) == (True, "stop", "demo:latest")


async def test_generate_renders_system_and_prompt_with_the_template():
    task = await task_of("/api/generate", {"prompt": "p", "system": "s"})
    assert task.prompt == conversation((Message("system", "s"), Message("user", "p")))


async def test_generate_returns_text_in_the_field_response():
    response = await post("/api/generate", {"model": "demo", "prompt": "p"})
    assert "".join(line["response"] for line in lines(response)) == "Hello, world"


async def test_raw_text_is_not_rendered_with_the_template():
    assert (await task_of("/api/generate", {"prompt": "p", "raw": True})).prompt == RawText("p")


async def test_think_false_reaches_the_template():
    task = await task_of("/api/chat", {"messages": USER, "think": False})
    assert task.prompt == conversation((Message("user", "hi"),), thinking=False)


@pytest.mark.parametrize(("given", "role"), [("User", "user"), ("Developer", "system")])
async def test_roles_are_read_in_lower_case_and_developer_becomes_system(given, role):
    task = await task_of("/api/chat", {"messages": [{"role": given, "content": "x"}]})
    assert task.prompt.messages == (Message(role, "x"),)


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
BEGUN = {"role": "assistant", "content": "The opposite"}


@pytest.mark.parametrize(
    ("messages", "reply"),
    [
        ([*USER, BEGUN], ReplyStart.CONTINUED),
        ([BEGUN, *USER], ReplyStart.NEW),
        ([*USER, CALL], ReplyStart.NEW),
        ([*USER, CALL, {"role": "tool", "content": "x"}], ReplyStart.NEW),
    ],
)
async def test_the_answer_continues_a_last_message_of_the_assistant(messages, reply):
    assert (await task_of("/api/chat", {"messages": messages})).prompt.reply is reply


async def test_options_reach_the_engine():
    options = {
        "temperature": 0.5, "top_k": 7.0, "top_p": 0.8, "min_p": 0.1, "seed": 42,
        "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4,
        "repeat_last_n": -1, "num_predict": 5, "num_ctx": 100, "stop": ["a", "b"],
        "num_thread": 4, "num_gpu": 1, "seed_unused": None,
    }  # fmt: skip
    task = await task_of("/api/chat", {"messages": USER, "options": options})
    sampling = task.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.8)
    assert (sampling.min_p, sampling.seed, sampling.repeat_last_n) == (0.1, 42, None)
    assert (sampling.repeat_penalty, sampling.presence_penalty) == (1.2, 0.3)
    assert sampling.frequency_penalty == 0.4
    assert (task.max_tokens, task.context_tokens, task.stop) == (5, 100, ("a", "b"))


async def test_defaults_are_those_of_the_protocol_unless_configured():
    task = await task_of("/api/chat", {"messages": USER})
    assert (task.sampling.temperature, task.sampling.top_k, task.sampling.top_p) == (0.8, 40, 0.9)
    assert task.max_tokens is None
    configured = Options(temperature=0.1, num_predict=3)
    task = await task_of("/api/chat", {"messages": USER}, options=configured)
    assert (task.sampling.temperature, task.sampling.top_k, task.max_tokens) == (0.1, 40, 3)


@pytest.mark.parametrize("seed", [None, -1])
async def test_no_seed_is_a_new_seed_each_time(seed):
    options = {} if seed is None else {"seed": seed}
    seeds = {
        (await task_of("/api/chat", {"messages": USER, "options": options})).sampling.seed
        for _ in range(4)
    }
    assert len(seeds) == 4


async def test_a_negative_top_k_keeps_all_tokens():
    task = await task_of("/api/chat", {"messages": USER, "options": {"top_k": -1}})
    assert task.sampling.top_k == 0


@pytest.mark.parametrize("count", [-1, -2, 0])
async def test_without_a_limit_the_answer_may_fill_the_context(count):
    body = {"messages": USER, "options": {"num_predict": count}}
    assert (await task_of("/api/chat", body)).max_tokens is None


async def test_logprobs_are_sent_with_their_text():
    body = {"model": "demo", "messages": USER, "logprobs": True, "top_logprobs": 2}
    first = lines(await post("/api/chat", body))[0]
    entry = first["logprobs"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("Hello", -0.5, list(b"Hello"))
    assert [top["token"] for top in entry["top_logprobs"]] == ["Hello", "Hello"]


async def test_a_request_without_messages_loads_the_model():
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        reply = (await post(path, {"model": "demo", **body})).json()
        assert (reply["done"], reply["done_reason"]) == (True, "load")


BAD = [
    ({"model": ""}, "model is required"),
    ({"model": 5}, 'field "model" must be'),
    ({"messages": "hi"}, 'field "messages" must be'),
    ({"messages": [{"content": "x"}]}, 'field "messages[0].role" is required'),
    ({"messages": [{"role": "user", "content": 1}]}, 'field "messages[0].content" must be'),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, '"tools[0].type" is "retrie'),
    ({"tools": [{"function": {"name": "f"}}] * 2}, 'field "tools" has the name "f" twice'),
    (
        {
            "messages": [
                {"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}
            ]
        },
        '"messages[0].tool_calls[0].function.arguments" must be',
    ),
    ({"messages": [{"role": "user", "images": ["aGk="]}]}, "data required for image input"),
    ({"stream": "yes"}, 'field "stream" must be'),
    ({"tools": [{"type": "function"}]}, 'field "tools[0].function" is required'),
    ({"think": "a lot"}, 'invalid think value: "a lot"'),
    ({"think": 5}, 'field "think" must be a boolean or a string'),
    ({"options": {"temperature": 2e6}}, "it must be at least 0 and at most 1,000,000"),
    ({"options": {"repeat_penalty": 1e-46}}, 'option "repeat_penalty" is 1e-46'),
    ({"options": {"stop": ["x"] * 65}}, "at most 64 strings"),
    ({"options": {"stop": ["x" * 1025]}}, "1,024 characters"),
    ({"options": {"stop": [[[]] * 2]}}, "array of strings"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be between 0 and 20"),
    ({"keep_alive": "soon"}, 'invalid keep_alive "soon"'),
    ({"keep_alive": []}, "Unsupported type"),
    ({"options": []}, 'field "options" must be'),
    ({"options": {"temperature": "hot"}}, 'option "temperature" must be of type float32'),
    ({"options": {"top_p": True}}, 'option "top_p" must be of type float32'),
    ({"options": {"top_k": 40.7}}, 'option "top_k" is 40.7; it must be an integer'),
    ({"options": {"top_k": True}}, 'option "top_k" must be of type integer'),
    ({"options": {"repeat_penalty": 0}}, 'option "repeat_penalty" is 0'),
    ({"options": {"num_predict": -3}}, 'option "num_predict" is -3'),
    ({"options": {"seed": 2**63}}, 'option "seed" is'),
    ({"options": {"top_k": 10**400}}, 'option "top_k" is 1000'),
    ({"options": {"stop": "x"}}, 'option "stop" must be of type array'),
    ({"options": {"stop": [1]}}, 'option "stop" must be of an array of strings'),
    ({"options": {"stop": [""]}}, "empty string"),
    ({"options": {"typical_p": -0.1}}, 'option "typical_p" is -0.1; it must be at least 0 and at'),
    ({"options": {"top_n_sigma": -2}}, 'option "top_n_sigma" is -2'),
    ({"options": {"xtc_probability": 1.1}}, 'option "xtc_probability" is 1.1'),
    ({"options": {"xtc_threshold": "x"}}, 'option "xtc_threshold" must be of type float32'),
    ({"options": {"dynatemp_range": 1e9}}, 'option "dynatemp_range" is 1000000000.0'),
    ({"options": {"dynatemp_exponent": -1}}, 'option "dynatemp_exponent" is -1'),
]


CLAMPED = [
    ({"temperature": -1}, "temperature", 0.0),
    ({"top_k": -2}, "top_k", 0),
    ({"top_p": 0}, "top_p", 0.0),
    ({"top_p": -0.5}, "top_p", 0.0),
    ({"top_p": 1.5}, "top_p", 1.0),
    ({"min_p": -1}, "min_p", 0.0),
    ({"min_p": 2}, "min_p", 1.0),
    ({"typical_p": 0}, "typical_p", 0.0),
]


@pytest.mark.parametrize(("options", "name", "value"), CLAMPED)
async def test_values_that_ollama_clamps_are_clamped(options, name, value):
    replica = PretendReplica()
    body = {"model": "demo", "messages": USER, "options": options}
    response = await post("/api/chat", body, replica)
    assert response.status_code == 200, response.text
    assert getattr(replica.tasks[0].sampling, name) == value


@pytest.mark.parametrize(("change", "message"), BAD, ids=[json.dumps(c)[:60] for c, _ in BAD])
async def test_a_bad_request_is_refused_with_the_reason(change, message):
    replica = PretendReplica()
    response = await post("/api/chat", {"model": "demo", "messages": USER, **change}, replica)
    assert response.status_code == 400
    assert message in response.json()["error"]
    assert replica.tasks == []


@pytest.mark.parametrize("depth", [400, 700, 2000])
async def test_deep_nesting_is_a_bad_request(depth):
    body = {"model": "demo", "messages": USER, "tools": "DEEP"}
    text = json.dumps(body).replace('"DEEP"', "[" * depth + "1" + "]" * depth)
    async with http_client(PretendReplica()) as client:
        response = await client.post("/api/chat", content=text)
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shift": "on"}, 'field "shift" must be'),
        ({"suffix": 1}, 'field "suffix" must be'),
        ({"template": []}, 'field "template" must be'),
        ({"truncate": "yes"}, 'field "truncate" must be'),
        ({"suffix": "s", "raw": True}, "suffix does not support raw mode"),
        ({"suffix": "s", "context": [1]}, "suffix does not support raw mode, context"),
        ({"template": "{{ .Prompt }}", "raw": True}, "raw mode does not support template"),
        ({"options": {"num_keep": "4"}}, 'option "num_keep" must be of type integer'),
    ],
)
async def test_generate_refuses_unsupported_fields_by_name(change, message):
    replica = PretendReplica()
    response = await post("/api/generate", {"model": "demo", "prompt": "p", **change}, replica)
    assert response.status_code == 400
    assert message in response.json()["error"]
    assert replica.tasks == []


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"suffix": "s"}, Infill("p", "s")),
        ({"suffix": "s", "system": "x", "template": "t"}, Infill("p", "s", "t")),
        ({"template": "t"}, conversation((Message("user", "p"),), template="t")),
        ({"suffix": "", "template": ""}, conversation((Message("user", "p"),))),
    ],
)
async def test_suffix_and_template_reach_the_replica(body, prompt):
    assert (await task_of("/api/generate", {"prompt": "p", **body})).prompt == prompt


@pytest.mark.parametrize(
    ("path", "body", "truncation"),
    [
        ("/api/chat", {"messages": USER}, Truncation(turns=True)),
        ("/api/chat", {"messages": USER, "truncate": False}, None),
        ("/api/generate", {"prompt": "p"}, Truncation(keep=4)),
        ("/api/generate", {"prompt": "p", "options": {"num_keep": -1}}, Truncation(keep=-1)),
        ("/api/generate", {"prompt": "p", "raw": True, "truncate": None}, Truncation(keep=4)),
        ("/api/generate", {"prompt": "p", "truncate": False}, None),
        ("/api/generate", {"prompt": "p", "suffix": "s"}, None),
    ],
)
async def test_long_prompts_are_truncated_unless_the_request_disables_it(path, body, truncation):
    assert (await task_of(path, body)).truncation == truncation


@pytest.mark.parametrize(
    ("body", "keep"),
    [
        ({}, 4),
        ({"shift": None}, 4),
        ({"shift": True, "options": {"num_keep": -1}}, -1),
        ({"shift": True, "options": {"num_keep": 0}}, 0),
        ({"shift": False, "options": {"num_keep": 9}}, None),
    ],
)
@pytest.mark.parametrize(
    ("path", "prompt"), [("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "p"})]
)
async def test_a_full_context_shifts_unless_the_request_disables_it(path, prompt, body, keep):
    assert (await task_of(path, prompt | body)).shift_keep == keep


@pytest.mark.parametrize("stream", [True, False])
async def test_generate_returns_a_context_and_continues_from_one(stream):
    replica = PretendReplica()
    body = {"model": "demo", "prompt": "p", "context": [1, 2], "stream": stream}
    response = await post("/api/generate", body, replica)
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert lines[-1]["context"] == [7, 8, 0, 1, 2, 99]
    assert all("context" not in line for line in lines[:-1])
    assert replica.tasks[0].prompt.after == (1, 2)


async def test_raw_excludes_context_and_returns_none():
    body = {"model": "demo", "prompt": "p", "raw": True, "stream": False}
    assert "context" not in (await post("/api/generate", body)).json()
    response = await post("/api/generate", {**body, "context": [1]})
    assert response.status_code == 400


async def test_raw_excludes_system():
    body = {"model": "demo", "prompt": "p", "raw": True, "system": "s"}
    response = await post("/api/generate", body)
    assert response.json()["error"].startswith("raw mode does not support")


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": []}, {"format": ""}, {"format": None}, {"keep_alive": "5m"}, {"keep_alive": -1},
        {"think": False}, {"truncate": False}, {"truncate": True}, {"shift": False},
        {"keep_alive": 10**320}, {"options": None},
        {"options": {"typical_p": 1.0, "tfs_z": 1, "num_keep": 4}},
    ],
)  # fmt: skip
async def test_fields_without_effect_are_accepted(extra):
    await task_of("/api/chat", {"messages": USER, **extra})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "missing request body"),
        (b"{", "invalid JSON"),
        (b"[]", "it must be a JSON object"),
        (b'{"model": NaN}', "invalid JSON"),
        (b'{"options": {"top_k": 1e400}}', "invalid JSON"),
        (b"\xff\xfe", "invalid JSON"),
        (b'{"model": "\\ud800"}', "invalid JSON"),
        (b"[" * 30_000, "invalid JSON"),
    ],
)
async def test_a_body_that_is_no_object_is_refused(content, message):
    async with http_client(PretendReplica(), max_body_bytes=200_000) as client:
        response = await client.post("/api/chat", content=content)
    assert response.status_code == 400
    assert message in response.json()["error"]


async def test_the_shown_template_of_a_model_without_one_is_the_default():
    card = dataclasses.replace(CARD, chat_template=None)
    shown = (await post("/api/show", {"model": "demo"}, card=card)).json()
    assert shown["template"] == "{{ .Prompt }}"
    assert "TEMPLATE" not in shown["modelfile"]


async def test_tags_show_and_ps_describe_the_model():
    async with http_client(PretendReplica(), options=Options(stop=("a", "b"), top_k=3)) as client:
        (tag,) = (await client.get("/api/tags")).json()["models"]
        (running,) = (await client.get("/api/ps")).json()["models"]
        shown = (await client.post("/api/show", json={"model": "demo"})).json()
    assert (tag["name"], tag["size"], tag["digest"]) == ("demo:latest", 4_421_088, "ab" * 32)
    assert tag["details"]["parameter_size"] == "4.50M"
    assert (tag["details"]["family"], tag["details"]["quantization_level"]) == ("llama", "Q8_0")
    assert tag["modified_at"].startswith("2023-11-14T22:13:20.25")
    assert (running["size"], running["size_vram"]) == (10_000_000, 0)
    assert shown["capabilities"] == ["completion"]
    assert shown["template"] == "{{ messages }}"
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "llama.block_count": 4,
        "general.parameter_count": 4_500_000,
    }
    assert shown["tensors"] == [{"name": "token_embd.weight", "type": "Q8_0", "shape": [64, 512]}]
    assert shown["parameters"].splitlines() == [
        f"{'top_k':<30} 3", f"{'num_ctx':<30} 512", f"{'stop':<30} \"a\"", f"{'stop':<30} \"b\"",
    ]  # fmt: skip


@pytest.mark.parametrize(("configured", "shown_tokens"), [(None, 256), (100, 100), (8192, 256)])
async def test_show_and_ps_report_the_served_context_beside_the_trained_one(
    configured, shown_tokens
):
    card = dataclasses.replace(
        CARD, context_tokens=256, context_length=2048, metadata={"llama.context_length": 2048}
    )
    options = Options(num_ctx=configured)
    async with http_client(PretendReplica(), options=options, card=card) as client:
        (running,) = (await client.get("/api/ps")).json()["models"]
        shown = (await client.post("/api/show", json={"model": "demo"})).json()
    assert running["context_length"] == 256
    assert shown["parameters"].split() == ["num_ctx", str(shown_tokens)]
    assert shown["model_info"]["llama.context_length"] == 2048
    assert ("PARAMETER num_ctx" in shown["modelfile"]) == (configured is not None)


async def test_show_of_an_unknown_model_is_not_found():
    assert (await post("/api/show", {"model": "x"})).status_code == 404
    assert (await post("/api/show", {})).json() == {"error": "model is required"}


async def test_plain_routes_answer():
    async with http_client(PretendReplica()) as client:
        assert (await client.get("/")).text == "Ollama is running"
        for path in ("/", "/api/version", "/api/tags"):
            assert (await client.head(path)).status_code == 200
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/api/chat")).status_code == 405
        assert (await client.post("/api/unheard", json={})).status_code == 404


async def test_the_version_is_that_of_ollamas_api_and_ours_stands_beside_it():
    async with http_client(PretendReplica()) as client:
        reported = (await client.get("/api/version")).json()
    # VS Code's Copilot reads numbers between dots, Codex a semantic version.
    numbers = tuple(map(int, reported["version"].split(".")))
    assert len(numbers) == 3
    assert numbers >= (0, 6, 4), "what VS Code asks for"
    assert numbers >= (0, 13, 4), "what Codex asks for"
    assert numbers < (0, 14, 0), "which has /v1/messages, and we do not"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert reported["caravan"] == project["version"]


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (1000, "1K"), (10**6, "1.00M"), (10**9, "1.0B")]
)
def test_numbers_of_parameters_have_a_unit_from_a_thousand_on(count, text):
    assert parameter_size(count) == text


async def test_a_key_is_required_where_keys_are_configured():
    async with http_client(
        PretendReplica(), api_keys=(api_key("secret"), api_key("other"))
    ) as client:
        for path in ("/api/tags", "/v1/models", "/api/version"):
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                refused = await client.get(path, headers=header)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            for key in ("secret", "other"):
                for header in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    assert (await client.get(path, headers=header)).status_code == 200
        assert "error" in (await client.get("/api/tags")).json()
        error = (await client.get("/v1/models")).json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        absent = await client.get("/v1/models/absent", headers={"x-api-key": "secret"})
        assert absent.status_code == 404 and "www-authenticate" not in absent.headers
        assert (await client.get("/healthz")).status_code == 200
