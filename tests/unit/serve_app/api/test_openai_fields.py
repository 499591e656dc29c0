"""Fields that only some clients of the OpenAI-compatible protocol send, and those not served."""

import json

import pytest
from openai.types import EmbeddingCreateParams
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionMessageParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
    completion_create_params,
)
from openai.types.completion_create_params import CompletionCreateParamsStreaming

from model_zoo.chat.messages import Message, ReplyStart
from serve_app.api.embeddings import EmbeddingsBody
from serve_app.api.openai_chat import MAX_VARIABLES_BYTES, ChatCompletionBody, ChatCompletionMessage
from serve_app.api.openai_completions import CompletionBody
from serve_app.config.options import Options
from serve_app.messages.tasks import Conversation, EndRules
from tests.unit.serve_app.api.test_openai import CHAT, TEXT, USER, post, task_of
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (TEXT, {"prompt": "p"})])
async def test_the_sampling_options_that_vllm_adds_reach_the_engine(path, body):
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.3}
    task = await task_of(path, {**body, **extra})
    sampling = task.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repeat_penalty) == (7, 0.1, 1.3)
    # The repeat penalty applies to prompt and answer, the others to the answer only.
    assert (sampling.repeat_last_n, task.penalise_prompt) == (None, False)


BREAKERS = {"dry_sequence_breakers": [".", "\n", "."]}
CHAIN = {
    "typical_p": 0.5, "top_n_sigma": 1.5, "xtc_probability": 0.25, "xtc_threshold": 0.2,
    "dynatemp_range": 0.75, "dynatemp_exponent": 2.0, "dry_multiplier": 0.5, "dry_base": 2.0,
    "dry_allowed_length": 3, "dry_penalty_last_n": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, **CHAIN, **BREAKERS}),
        (TEXT, {"prompt": "p", **CHAIN, **BREAKERS}),
        ("/api/chat", {"messages": USER, "options": {**CHAIN, **BREAKERS}}),
    ],
)
async def test_the_samplers_of_llama_cpp_reach_the_engine(path, body):
    sampling = (await task_of(path, body)).sampling
    assert {name: getattr(sampling, name) for name in CHAIN} == CHAIN
    assert sampling.dry_sequence_breakers == ("\n", ".")


@pytest.mark.parametrize("value", ["x", ["ab"], [""], ["é"], [1], ["x"] * 129])
async def test_sequence_breakers_are_single_characters(value):
    for path, body in (
        (CHAT, {"messages": USER, "dry_sequence_breakers": value}),
        ("/api/chat", {"messages": USER, "options": {"dry_sequence_breakers": value}}),
    ):
        response = await post(path, body)
        assert response.status_code == 400
        assert "dry_sequence_breakers" in response.text


@pytest.mark.parametrize("name", CHAIN)
async def test_a_value_outside_the_range_of_a_sampler_is_refused(name):
    response = await post(CHAT, {"messages": USER, name: -2})
    assert response.status_code == 400
    assert f'field "{name}" is -2' in response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (TEXT, {"prompt": "p"})])
async def test_biases_and_the_rules_of_the_end_reach_the_engine(path, body):
    extra = {
        "logit_bias": {"5": -100, "17": 2.5}, "min_tokens": 2, "stop_token_ids": [9, 3],
        "ignore_eos": True, "include_stop_str_in_output": True, "max_tokens": 2,
        "bad_words": ["sea", " blue sky"], "allowed_token_ids": [33, 2, 0, 2],
    }  # fmt: skip
    task = await task_of(path, {**body, **extra})
    assert task.sampling.logit_bias == ((5, -100.0), (17, 2.5))
    assert task.ending == EndRules(2, (9, 3), ignore_model=True, keep_match=True)
    assert task.bad_words == ("sea", " blue sky")
    assert task.sampling.allowed == bytes([5, 0, 0, 0, 2, 0, 0, 0])


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": USER}), (TEXT, {"prompt": "p"})])
@pytest.mark.parametrize(
    ("given", "biases"),
    [
        ([], ()),
        ([[5, False], [17, 2.5]], ((5, -100.0), (17, 2.5))),
        ({"5": False}, ((5, -100.0),)),
    ],
    ids=str,
)
async def test_biases_may_have_the_form_of_llama_cpp(path, body, given, biases):
    task = await task_of(path, {**body, "logit_bias": given})
    assert task.sampling.logit_bias == biases


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (CHAT, {"messages": USER, "max_tokens": -1}),
        (CHAT, {"messages": USER, "max_completion_tokens": -1, "max_tokens": 3}),
        (TEXT, {"prompt": "p", "max_tokens": -1}),
        (TEXT, {"prompt": "p", "max_tokens": -1, "echo": True}),
        ("/v1/responses", {"input": "p", "max_output_tokens": -1}),
    ],
    ids=str,
)
async def test_a_limit_of_minus_one_means_no_limit_as_in_llama_cpp(path, extra):
    task = await task_of(path, extra, options=Options(num_predict=7))
    assert task.max_tokens is None


WINDOWS = [
    ({}, {"repeat_penalty": 1.2}, 64),
    ({"presence_penalty": 0, "repetition_penalty": 1.0}, {"repeat_penalty": 1.2}, 64),
    ({"presence_penalty": 0.5}, {"repeat_penalty": 1.2}, None),
    ({"repetition_penalty": 1.1}, {}, None),
    ({"frequency_penalty": 0.5}, {"repeat_last_n": 32}, 32),
    ({"repeat_penalty": 1.3}, {}, 64),
    ({"repeat_penalty": 1.3, "repeat_last_n": 20}, {}, 20),
    ({"repetition_penalty": 1.3, "repeat_last_n": 20}, {}, 20),
    ({"repeat_penalty": 1.3, "repeat_last_n": -1}, {}, None),
]


@pytest.mark.parametrize(("fields", "options", "window"), WINDOWS)
async def test_only_penalties_of_openai_and_vllm_read_the_whole_sequence(fields, options, window):
    task = await task_of(CHAT, {"messages": USER, **fields}, options=Options(**options))
    assert task.sampling.repeat_last_n == window


async def test_the_repeat_penalty_of_llama_cpp_reaches_the_engine():
    sampling = (await task_of(CHAT, {"messages": USER, "repeat_penalty": 1.3})).sampling
    assert sampling.repeat_penalty == 1.3
    both = {"messages": USER, "repeat_penalty": 1.3, "repetition_penalty": 1.3}
    response = await post(CHAT, both)
    assert response.status_code == 400
    assert "mean the same" in response.json()["error"]["message"]


async def test_a_negative_top_k_keeps_all_tokens():
    assert (await task_of(CHAT, {"messages": USER, "top_k": -1})).sampling.top_k == 0


@pytest.mark.parametrize(
    ("fields", "reply"),
    [
        ({}, ReplyStart.NEW),
        ({"add_generation_prompt": False}, ReplyStart.NONE),
        ({"add_generation_prompt": False, "continue_final_message": True}, ReplyStart.CONTINUED),
    ],
)
async def test_a_request_chooses_what_the_prompt_ends_with(fields, reply):
    assert (await task_of(CHAT, {"messages": USER, **fields})).prompt.reply is reply


async def test_an_answer_is_a_new_turn_or_continues_one():
    response = await post(CHAT, {"messages": USER, "continue_final_message": True})
    assert response.status_code == 400
    assert '"continue_final_message" needs' in response.json()["error"]["message"]


BUDGETS = [
    "thinking_token_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
    "thinking_budget",
]


@pytest.mark.parametrize("name", BUDGETS)
async def test_a_budget_of_thinking_reaches_the_model(name):
    extra = {name: 40, "reasoning_budget_message": " Enough.", "reasoning_effort": "high"}
    prompt = (await task_of(CHAT, {"messages": USER, **extra})).prompt
    assert (prompt.thinking_budget, prompt.budget_message) == (40, " Enough.")
    assert prompt.thinking == "high"
    none = (await task_of(CHAT, {"messages": USER, **extra, name: 0})).prompt
    assert (none.thinking_budget, none.thinking) == (0, False)
    unlimited = (await task_of(CHAT, {"messages": USER, name: -1})).prompt
    assert (unlimited.thinking_budget, unlimited.thinking) == (None, None)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"thinking_token_budget": -2}, 'field "thinking_token_budget" is -2'),
        ({"thinking_budget": 1.5}, 'field "thinking_budget" is 1.5; it must be an integer'),
        ({"thinking_budget_tokens": "9"}, 'field "thinking_budget_tokens" must be of type integer'),
        (
            {"thinking_budget": 1, "thinking_token_budget": 1},
            'fields "thinking_token_budget" and "thinking_budget" mean the same',
        ),
        ({"reasoning_budget_message": "x" * 1025}, "has more than 1,024 characters"),
    ],
    ids=str,
)
async def test_a_wrong_budget_is_refused_by_name(extra, reason):
    response = await post(CHAT, {"messages": USER, **extra})
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


UNSERVED = [
    ("use_beam_search", True),
    ("skip_special_tokens", False), ("truncate_prompt_tokens", 5), ("prompt_logprobs", 1),
    ("logits_processors", ["x"]), ("return_token_ids", True), ("cache_salt", "x"),
    ("return_tokens_as_token_ids", True), ("samplers", ["top_k"]), ("min_keep", 2),
    ("n_predict", 5), ("n_probs", 2), ("t_max_predict_ms", 9), ("reasoning_format", "none"),
]  # fmt: skip
UNSERVED_CHAT = [
    ("documents", [{"text": "x"}]), ("chat_template", "x"),
    ("mm_processor_kwargs", {"x": 1}), ("audio", {"voice": "x"}),
    ("web_search_options", {}),
    ("web_search_options", {"user_location": {}}),
    ("moderation", {"model": "m"}), ("modalities", ["text", "audio"]),
    ("functions", [{"name": "f"}]), ("best_of", 2), ("echo", True),
]  # fmt: skip
CASES = [(path, *case) for path in (CHAT, TEXT) for case in UNSERVED]
CASES += [(CHAT, *case) for case in UNSERVED_CHAT] + [(TEXT, "thinking_token_budget", 5)]


@pytest.mark.parametrize(("path", "name", "value"), CASES, ids=[f"{p}-{n}" for p, n, _ in CASES])
async def test_unsupported_fields_that_change_the_answer_are_refused_by_name(path, name, value):
    body = {"messages": USER} if path == CHAT else {"prompt": "p"}
    response = await post(path, {**body, name: value})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f'field "{name}" is not served yet'


OFF = {
    "stop_token_ids": [], "ignore_eos": False, "min_tokens": 0, "bad_words": [], "n": 1,
    "include_stop_str_in_output": False, "use_beam_search": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "length_penalty": 1.0, "prompt_logprobs": None,
    "add_generation_prompt": True, "continue_final_message": False, "echo": False,
    "add_special_tokens": False, "documents": None, "return_token_ids": False, "priority": 0,
    "request_id": "r", "include_reasoning": True, "parallel_tool_calls": True, "user": "u",
    "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k",
    "safety_identifier": "s", "verbosity": "high", "prediction": {"type": "content"},
    "prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h",
    "stream_options": {"include_obfuscation": False, "continuous_usage_stats": False},
    "reasoning": {"effort": "none", "summary": None}, "return_tokens_as_token_ids": False,
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc",
                 "temperature"],
    "min_keep": 0, "n_probs": 0, "cache_prompt": True, "id_slot": -1, "n_keep": 4, "grammar": "",
    "thinking_token_budget": -1, "reasoning_budget_message": "",
    "reasoning_format": "auto", "t_max_predict_ms": -1, "lora": [], "n_predict": -1,
}  # fmt: skip


async def test_fields_at_their_neutral_values_and_those_without_effect_are_known():
    async with http_client(PretendReplica(), strict_fields=True) as client:
        response = await client.post(CHAT, json={"model": "demo", "messages": USER, **OFF})
    assert response.status_code == 200, response.text


def test_every_field_of_the_official_client_is_known():
    chat = completion_create_params.CompletionCreateParamsStreaming.__annotations__
    assert not chat.keys() - ChatCompletionBody.model_fields
    text = CompletionCreateParamsStreaming.__annotations__
    assert not text.keys() - CompletionBody.model_fields
    embeddings = EmbeddingCreateParams.__annotations__
    assert not embeddings.keys() - EmbeddingsBody.model_fields
    messages = [
        ChatCompletionUserMessageParam, ChatCompletionSystemMessageParam,
        ChatCompletionDeveloperMessageParam, ChatCompletionAssistantMessageParam,
        ChatCompletionToolMessageParam, ChatCompletionFunctionMessageParam,
    ]  # fmt: skip
    for message in messages:
        assert not message.__annotations__.keys() - ChatCompletionMessage.model_fields


async def test_a_participants_name_reaches_the_template():
    messages = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "system", "content": [{"type": "text", "text": "be"}], "name": "example"},
    ]
    prompt = (await task_of(CHAT, {"messages": messages})).prompt
    assert prompt.messages == (
        Message("user", "hi", name="Ann"), Message("system", "be", name="example"),
    )  # fmt: skip


async def test_chat_template_variables_reach_the_template():
    given = {"enable_thinking": False, "date_string": None, "custom_tools": [{"name": "f"}]}
    prompt = (await task_of(CHAT, {"messages": USER, "chat_template_kwargs": given})).prompt
    assert prompt == Conversation((Message("user", "hi"),), variables=given)


BAD_VARIABLES = [
    ([1], 'field "chat_template_kwargs" must be'),
    ({"messages": []}, 'chat_template_kwargs.messages" cannot be set'),
    ({"tools": []}, 'chat_template_kwargs.tools" cannot be set'),
    ({"bos_token": "x"}, 'chat_template_kwargs.bos_token" cannot be set'),
    ({"eos_token": "x"}, 'chat_template_kwargs.eos_token" cannot be set'),
    ({"add_generation_prompt": False}, 'add_generation_prompt" cannot be set'),
    ({"chat_template": "x"}, 'chat_template_kwargs.chat_template" cannot be set'),
    ({"x": "y" * MAX_VARIABLES_BYTES}, f"at most {MAX_VARIABLES_BYTES:,}"),
    ({"x": 2**64}, 'field "chat_template_kwargs" has a number of'),
]


@pytest.mark.parametrize(("given", "reported"), BAD_VARIABLES, ids=[t for _, t in BAD_VARIABLES])
async def test_chat_template_variables_are_limited_and_cannot_replace_the_servers_own(
    given, reported
):
    replica = PretendReplica()
    body = {"messages": USER, "chat_template_kwargs": given}
    response = await post(CHAT, body, replica, max_body_bytes=1 << 20)
    assert response.status_code == 400
    assert reported in response.json()["error"]["message"]
    assert replica.tasks == []


@pytest.mark.parametrize("depth", [100, 900])
async def test_deep_chat_template_variables_are_refused(depth):
    body = {"model": "demo", "messages": USER, "chat_template_kwargs": {"x": "DEEP"}}
    text = json.dumps(body).replace('"DEEP"', "[" * depth + "1" + "]" * depth)
    async with http_client(PretendReplica()) as client:
        response = await client.post(CHAT, content=text)
    assert response.status_code == 400
