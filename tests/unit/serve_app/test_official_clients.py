"""The official clients against the demo model, without Ray."""

import json
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import ollama
import openai
import pytest

from serve_app.config.settings import ModelSettings
from serve_app.replica.loading import load_replica
from serve_app.replica.model_files import local_files
from serve_app.replica.replica import ModelReplica
from tests.checkout import DEMO_MODEL
from tests.unit.serve_app.fake_replicas import clients

CONTEXT_TOKENS = 128
QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]
LONG = "hot and cold " * 200
# ChatML with a question that may come from a variable, and the names of participants.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.name %}{{ m.name }}: {% endif %}"
    "{{ question | default(m.content) }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def replica() -> Iterator[ModelReplica]:
    settings = ModelSettings(
        name="demo", source=str(DEMO_MODEL), context_tokens=CONTEXT_TOKENS, max_sequences=2
    )
    origin = local_files(settings, {})
    assert origin is not None
    replica = load_replica(settings, files=replace(origin, template=TEMPLATE))
    yield replica
    replica.close()


async def said(oai: openai.AsyncOpenAI, **change) -> str:
    body = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 64, **change}
    return (await oai.chat.completions.create(**body)).choices[0].message.content


async def test_a_num_ctx_above_the_served_context_is_answered(replica):
    async with clients(replica, card=replica.describe()) as to:
        options = {"num_ctx": 8192, "temperature": 0}
        reply = await to.native.chat("demo", QUESTION, options=options)
        (running,) = (await to.native.ps()).models
        shown = await to.native.show("demo")
    assert "cold" in reply.message.content
    assert running.context_length == CONTEXT_TOKENS
    assert shown.parameters.split() == ["num_ctx", str(CONTEXT_TOKENS)]
    assert shown.modelinfo["gemma3.context_length"] > CONTEXT_TOKENS


async def test_fields_of_other_clients_change_nothing(replica):
    body = {"model": "demo", "messages": QUESTION, "stream": False, "options": {"temperature": 0}}
    extra = {"num_predict": 1, "temperature": 2, "top_p": 0.1}
    async with clients(replica, card=replica.describe()) as to:
        plain = (await to.raw.post("/api/chat", json=body)).json()["message"]
        given = (await to.raw.post("/api/chat", json=body | extra)).json()["message"]
        compatible = await said(
            to.oai, user="u", store=False, metadata={"a": "b"}, extra_body={"keep_alive": "10m"}
        )
    assert given == plain
    assert compatible == plain["content"]


async def test_choices_are_reproducible_and_the_same_streamed(replica):
    body = {"model": "demo", "prompt": ["hot", "cold"], "seed": 3, "max_tokens": 4}
    async with clients(replica, card=replica.describe()) as to:
        alone = await to.oai.completions.create(**body | {"prompt": "hot"})
        whole = await to.oai.completions.create(**body, n=3)
        stream = await to.oai.completions.create(**body, n=3, stream=True)
        streamed = [""] * 6
        async for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    texts = [choice.text for choice in whole.choices]
    assert texts == streamed
    assert texts[0] == alone.choices[0].text
    assert len(set(texts)) > 1


async def test_best_of_is_the_candidate_with_the_highest_mean_log_probability(replica):
    body = {"model": "demo", "prompt": "hot", "seed": 3, "max_tokens": 4, "logprobs": 0}
    async with clients(replica, card=replica.describe()) as to:
        candidates = (await to.oai.completions.create(**body, n=4)).choices
        best = (await to.oai.completions.create(**body, best_of=4)).choices
    means = [fmean(choice.logprobs.token_logprobs) for choice in candidates]
    assert [choice.text for choice in best] == [candidates[means.index(max(means))].text]


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1.0}])
async def test_vllms_filters_can_leave_only_the_likeliest_token(replica, extra):
    async with clients(replica, card=replica.describe()) as to:
        greedy = await said(to.oai)
        hot = [await said(to.oai, temperature=2, seed=s, extra_body=extra) for s in range(4)]
        wild = [await said(to.oai, temperature=2, seed=s) for s in range(4)]
    assert hot == [greedy] * 4
    assert wild != [greedy] * 4


async def test_vllms_repetition_penalty_counts_the_prompt(replica):
    async def drawn(oai: openai.AsyncOpenAI, **extra: float) -> set[str]:
        body = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 64}
        reply = await oai.chat.completions.create(**body, logprobs=True, extra_body=extra)
        return {entry.token for entry in reply.choices[0].logprobs.content}

    async with clients(replica, card=replica.describe()) as to:
        plain = await drawn(to.oai)
        penalised = await drawn(to.oai, repetition_penalty=100.0)
    repeated = {" of", " opposite"}  # tokens of the question
    assert repeated <= plain and not repeated & penalised


async def test_chat_template_variables_and_names_are_rendered(replica):
    other = [{"role": "user", "content": "Hello"}]
    variables = {"chat_template_kwargs": {"question": QUESTION[0]["content"]}}
    async with clients(replica, card=replica.describe()) as to:
        plain = await said(to.oai)
        asked = await said(to.oai, messages=other, extra_body=variables)
        body = {"model": "demo", "max_tokens": 1}
        costs = [
            (await to.oai.chat.completions.create(messages=m, **body)).usage.prompt_tokens
            for m in (QUESTION, [QUESTION[0] | {"name": "Ann"}])
        ]
        with pytest.raises(openai.BadRequestError, match="cannot be set by a request"):
            await said(to.oai, extra_body={"chat_template_kwargs": {"messages": []}})
    assert asked == plain
    assert costs[1] > costs[0]


async def test_texts_of_any_length_are_embedded_unless_truncation_is_off(replica):
    texts = ["hot", "", LONG]
    async with clients(replica, card=replica.describe()) as to:
        native = (await to.native.embed("demo", texts)).embeddings
        reply = await to.oai.embeddings.create(model="demo", input=texts)
        alone = await to.oai.embeddings.create(model="demo", input="")
        with pytest.raises(ollama.ResponseError, match="exceeds the context length") as caught:
            await to.native.embed("demo", texts, truncate=False)
    assert caught.value.status_code == 400
    assert len({tuple(vector) for vector in native}) == 3
    for entry, vector in zip(reply.data, native, strict=True):
        assert entry.embedding == pytest.approx(vector, abs=1e-5)
    assert alone.data[0].embedding == pytest.approx(native[1], abs=1e-5)
    # Two tokens of "hot" and BOS or EOS for nothing at least, and one whole context.
    assert CONTEXT_TOKENS + 2 <= reply.usage.prompt_tokens <= CONTEXT_TOKENS + 5


async def test_a_request_may_bring_its_template_and_a_text_to_insert_before(replica):
    ordered = (
        "{{ if .Suffix }}{{ .Suffix }}{{ .Prompt }}{{ else }}{{ .System }}{{ .Prompt }}{{ end }}"
    )
    options = {"temperature": 0, "num_predict": 4}
    async with clients(replica, card=replica.describe()) as each:
        raw = await each.native.generate("demo", "hot cold", raw=True, options=options)
        inserted = await each.native.generate(
            "demo", " cold", suffix="hot", template=ordered, options=options
        )
        rendered = await each.native.generate(
            "demo", " cold", system="hot", template=ordered, options=options
        )
        assert raw.response == inserted.response == rendered.response != ""
        with pytest.raises(ollama.ResponseError, match='"demo" does not support insert'):
            await each.native.generate("demo", "a", suffix="b")
        with pytest.raises(openai.BadRequestError, match="does not support insert"):
            await each.oai.completions.create(model="demo", prompt="a", suffix="b")


async def test_long_chats_are_shortened_for_ollamas_clients_only(replica):
    turn = [QUESTION[0], {"role": "assistant", "content": "The opposite of hot is cold."}]
    talk = turn * 50 + QUESTION
    async with clients(replica, card=replica.describe()) as each:
        answer = await each.native.chat("demo", talk, options={"temperature": 0})
        assert "cold" in answer.message.content
        assert 0 < answer.prompt_eval_count < CONTEXT_TOKENS
        with pytest.raises(openai.BadRequestError, match="exceeds the context length"):
            await each.oai.chat.completions.create(model="demo", messages=talk)


@pytest.mark.parametrize("shift", [None, False])
async def test_a_chat_goes_on_when_the_context_is_full(replica, shift):
    """For 10 contexts, as in Ollama, within one value of JSON."""
    number = {"type": "integer", "minimum": 0, "maximum": 999}
    array = {"type": "array", "items": number, "minItems": 2000}
    body = {"model": "demo", "messages": QUESTION, "stream": False, "format": array}
    body |= {"shift": shift, "options": {"seed": 1}}
    async with clients(replica, card=replica.describe()) as to:
        reply = (await to.raw.post("/api/chat", json=body)).json()
    left = CONTEXT_TOKENS - reply["prompt_eval_count"]
    assert reply["eval_count"] == (10 * CONTEXT_TOKENS if shift is None else left)
    assert reply["done_reason"] == "length"
    complete, comma, _ = reply["message"]["content"].rpartition(",")
    assert comma
    numbers = json.loads(complete + "]")
    assert all(isinstance(each, int) and 0 <= each <= 999 for each in numbers)


async def test_a_message_that_fills_the_context_says_so(replica):
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
    form = {"format": {"type": "json_schema", "schema": numbers}}
    body = {"model": "demo", "messages": QUESTION, "output_config": form}
    async with clients(replica) as to:
        cut, full = [
            (await to.raw.post("/v1/messages", json=body | {"max_tokens": most})).json()
            for most in (2, 4096)
        ]
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    assert full["stop_reason"] == "model_context_window_exceeded"
