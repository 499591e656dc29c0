"""The official `openai` client against the running application."""

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]
RENDERED = "<|im_start|>user\nWhat is the opposite of hot?<|im_end|>\n<|im_start|>assistant\n"


def ask(oai, **change):
    body = {"model": "demo", "messages": QUESTION, "temperature": 0, **change}
    return oai.chat.completions.create(**body)


def test_a_streamed_chat_says_the_same_as_a_whole_one(oai):
    whole = ask(oai)
    chunks = list(ask(oai, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert "cold" in text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason == "stop"
    assert not any(reasons[:-1])
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens > 0
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_repeated_prompt_is_reported_as_cached(oai):
    messages = [
        {"role": "system", "content": "Be brief, and remember that this text is long enough."},
        {"role": "user", "content": "Say this again: the quick brown fox sees a lazy dog."},
    ]
    ask(oai, messages=messages)
    usage = ask(oai, messages=messages).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_max_tokens_limits_an_answer(oai):
    for name in ("max_tokens", "max_completion_tokens"):
        reply = ask(oai, **{name: 2})
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == 2


def test_a_seed_repeats_an_answer(oai):
    def tell(seed: int) -> str:
        reply = oai.completions.create(
            model="demo", prompt="Hello", temperature=2.0, seed=seed, max_tokens=24
        )
        return reply.choices[0].text

    assert tell(5) == tell(5)
    assert len({tell(seed) for seed in range(4)}) > 1


def test_chat_logprobs_cover_the_answer(oai):
    choice = ask(oai, logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith(choice.message.content)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.logprob <= 0 for entry in entries)


def test_a_completion_takes_text_as_it_is(oai):
    reply = oai.completions.create(model="demo", prompt=RENDERED, temperature=0)
    assert reply.choices[0].text == ask(oai).choices[0].message.content
    stream = oai.completions.create(model="demo", prompt=RENDERED, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == reply.choices[0].text


def test_a_completion_takes_token_ids_as_they_are(oai):
    ids = [5, 6, 7, 8]
    reply = oai.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=4)
    assert reply.usage.prompt_tokens == len(ids)


def test_completion_logprobs_are_parallel_lists(oai):
    reply = oai.completions.create(
        model="demo", prompt=RENDERED, temperature=0, max_tokens=4, logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.text_offset[0] == 0
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == pytest.approx(logprob, abs=1e-5)
        assert logprob == max(top.values())


def test_the_model_is_listed(oai):
    assert [model.id for model in oai.models.list()] == ["demo"]
    assert oai.models.retrieve("demo").object == "model"


BAD = [
    ({"model": "nobody"}, openai.NotFoundError, "model 'nobody' not found"),
    ({"temperature": 3}, openai.BadRequestError, '"temperature" is 3'),
    ({"n": 17}, openai.BadRequestError, '"n" is 17'),
    ({"messages": []}, openai.BadRequestError, "[] is too short"),
    ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type"),
    (
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        openai.BadRequestError,
        '"tools[0].type" is "custom"',
    ),
    (
        {"messages": [{"role": "user", "content": "word " * 2000}]},
        openai.BadRequestError,
        "context",
    ),
    (
        {"extra_body": {"chat_template_kwargs": {"bos_token": "x"}}},
        openai.BadRequestError,
        '"chat_template_kwargs.bos_token" cannot be set',
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "kind", "message"), BAD, ids=[m for _, _, m in BAD])
def test_errors_are_those_of_the_clients_library(oai, change, kind, message, stream):
    with pytest.raises(kind) as caught:
        ask(oai, stream=stream, **change)
    assert message in caught.value.message


def test_fields_of_other_servers_are_applied_or_ignored(oai):
    plain = ask(oai).choices[0].message.content
    extra = {"top_k": 1, "chat_template_kwargs": {"enable_thinking": False}, "colour": "red"}
    reply = ask(oai, temperature=2, extra_body=extra, messages=[QUESTION[0] | {"name": "Ann"}])
    assert reply.choices[0].message.content == plain


def test_a_token_id_outside_the_vocabulary_is_refused(oai):
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        oai.completions.create(model="demo", prompt=[10**6])


def test_texts_become_vectors(oai, native):
    texts = ["What is the opposite of hot?", "What is 23 + 14?"]
    reply = oai.embeddings.create(model="demo", input=texts)  # asks for base64 by default
    expected = native.embed("demo", texts)
    assert [entry.index for entry in reply.data] == [0, 1]
    for entry, vector in zip(reply.data, expected.embeddings, strict=True):
        assert entry.embedding == pytest.approx(vector, abs=1e-5)
    assert reply.usage.prompt_tokens == expected.prompt_eval_count
    floats = oai.embeddings.create(model="demo", input=texts[0], encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(reply.data[0].embedding, abs=1e-5)


def test_vectors_can_be_shorter(oai):
    reply = oai.embeddings.create(model="demo", input="hot", dimensions=8)
    vector = reply.data[0].embedding
    assert len(vector) == 8
    assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-5)
