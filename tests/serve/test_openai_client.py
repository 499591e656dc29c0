"""The official `openai` client against the running application."""

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]


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


def test_the_model_is_listed(oai):
    assert [model.id for model in oai.models.list()] == ["demo"]
    assert oai.models.retrieve("demo").object == "model"


BAD = [
    ({"model": "nobody"}, openai.NotFoundError, "model 'nobody' not found"),
    ({"temperature": 3}, openai.BadRequestError, '"temperature" is 3'),
    (
        {"messages": [{"role": "user", "content": "word " * 2000}]},
        openai.BadRequestError,
        "context",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "kind", "message"), BAD, ids=[m for _, _, m in BAD])
def test_errors_are_those_of_the_clients_library(oai, change, kind, message, stream):
    with pytest.raises(kind) as caught:
        ask(oai, stream=stream, **change)
    assert message in caught.value.message


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
