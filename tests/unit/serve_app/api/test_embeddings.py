"""The embedding endpoints in front of a fake model: texts in, tasks and vectors out."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncGenerator
from functools import partial

import numpy as np
import pytest

from runtime.engine.request import FinishReason, Usage
from runtime.errors import CaravanError, PromptTooLongError
from serve_app.api.embeddings import GROUP, MAX_INPUTS, openai_reply
from serve_app.api.openai import error_body
from serve_app.api.reply import WholeEncoder
from serve_app.config.options import Options
from serve_app.messages.tasks import ChatDelta, EmbeddingTask, RawText, TokenIds
from tests.unit.serve_app.fake_replicas import http_client


def vector_of(text: RawText | TokenIds) -> np.ndarray:
    """Different for each text, and of no particular length."""
    seed = len(text.text) if isinstance(text, RawText) else sum(text.ids)
    return np.arange(4, dtype="<f4") + seed


class PretendEmbedder:
    """Answers with `vector_of` each text; later groups first."""

    def __init__(self, error: CaravanError | None = None) -> None:
        self.tasks: list[EmbeddingTask] = []
        self.error = error

    async def generate(self, task: EmbeddingTask) -> AsyncGenerator[ChatDelta, None]:
        self.tasks.append(task)
        if self.error is not None:
            raise self.error
        for _ in range(20 // len(self.tasks)):  # later tasks end earlier
            await asyncio.sleep(0)
        usage = Usage(3 * len(task.texts), 0, 0, 1_000, 2_000, 0)
        vectors = tuple(vector_of(text).tobytes() for text in task.texts)
        yield ChatDelta(finish=FinishReason.STOP, usage=usage, vectors=vectors)


async def post(path, body, replica=None, **settings):
    async with http_client(replica or PretendEmbedder(), **settings) as client:
        return await client.post(path, json={"model": "demo", **body})


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


async def test_embed_returns_unit_vectors_in_the_order_of_the_texts():
    texts = ["x" * count for count in range(1, 2 * GROUP + 8)]
    replica = PretendEmbedder()
    reply = (await post("/api/embed", {"input": texts}, replica)).json()
    expected = [unit(vector_of(RawText(text))) for text in texts]
    np.testing.assert_allclose(reply["embeddings"], expected, rtol=1e-6)
    assert reply["prompt_eval_count"] == 3 * len(texts)
    assert reply["model"] == "demo"
    assert 1_000 <= reply["load_duration"] < reply["total_duration"]
    assert [len(task.texts) for task in replica.tasks] == [GROUP, GROUP, 7]
    assert all(task.truncate for task in replica.tasks)


def test_many_vectors_do_not_hold_the_event_loop_as_long_as_json_would():
    vectors = np.random.default_rng(0).standard_normal((256, 1024)).astype("<f4")
    delta = ChatDelta(vectors=tuple(vector.tobytes() for vector in vectors))
    reply = partial(openai_reply, model="demo", dimensions=None, encoding="float")
    begun = time.process_time()
    encoded = WholeEncoder(reply, error_body).whole(delta)
    took = time.process_time() - begun
    values = json.loads(encoded)
    begun = time.process_time()
    json.dumps(values)
    assert took < 0.5 * (time.process_time() - begun)
    shown = [each["embedding"] for each in values["data"]]
    np.testing.assert_allclose(shown, [unit(each) for each in vectors], rtol=1e-6, atol=1e-9)


async def test_embed_takes_one_text_and_fewer_dimensions():
    reply = (await post("/api/embed", {"input": "ab", "dimensions": 2})).json()
    np.testing.assert_allclose(reply["embeddings"], [unit(vector_of(RawText("ab"))[:2])], rtol=1e-6)


async def test_embed_ignores_more_dimensions_than_there_are():
    whole = (await post("/api/embed", {"input": "ab"})).json()
    reply = (await post("/api/embed", {"input": "ab", "dimensions": 5})).json()
    assert reply["embeddings"] == whole["embeddings"]


async def test_too_many_dimensions_are_refused_by_openais_protocol():
    response = await post("/v1/embeddings", {"input": "ab", "dimensions": 5})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "dimensions is 5; the model's vectors have 4"


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": []}])
async def test_embed_without_text_only_loads(given):
    replica = PretendEmbedder()
    response = await post("/api/embed", given, replica)
    assert response.json() == {"model": "demo", "embeddings": []}
    assert not replica.tasks


async def test_truncation_and_context_reach_the_model():
    replica = PretendEmbedder()
    body = {"input": "a", "truncate": False, "options": {"num_ctx": 64}}
    await post("/api/embed", body, replica, options=Options(num_ctx=128))
    assert (replica.tasks[0].truncate, replica.tasks[0].context_tokens) == (False, 64)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (7, 'field "input" must be a string or a list of strings'),
        ({"a": 1}, 'field "input" must be a string or a list of strings'),
        ([1, 2], 'field "input[0]" must be a string'),
        (["a", 3], 'field "input[1]" must be a string'),
    ],
)
async def test_embed_takes_texts_only(given, wanted):
    response = await post("/api/embed", {"input": given})
    assert response.status_code == 400
    assert response.json() == {"error": f"invalid input type: {wanted}"}


async def test_too_many_texts_are_refused():
    response = await post("/api/embed", {"input": ["a"] * (MAX_INPUTS + 1)})
    assert response.status_code == 400
    assert "at most 2,048" in response.json()["error"]


async def test_one_text_that_is_too_long_refuses_the_whole_request():
    replica = PretendEmbedder(PromptTooLongError("the input length exceeds the context length"))
    response = await post("/api/embed", {"input": ["a", "b"]}, replica)
    assert response.status_code == 400
    assert response.json() == {"error": "the input length exceeds the context length"}


async def test_the_older_endpoint_returns_one_vector_without_normalisation():
    reply = (await post("/api/embeddings", {"prompt": "abc"})).json()
    assert reply == {"embedding": [3.0, 4.0, 5.0, 6.0]}
    assert (await post("/api/embeddings", {})).json() == {"embedding": []}


async def test_openai_returns_a_list_with_usage():
    reply = (await post("/v1/embeddings", {"input": ["a", "bb"]})).json()
    assert (reply["object"], reply["model"]) == ("list", "demo")
    assert reply["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [(entry["object"], entry["index"]) for entry in reply["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    found = [entry["embedding"] for entry in reply["data"]]
    expected = [unit(vector_of(RawText(text))) for text in ("a", "bb")]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["base64", "BASE64"])
async def test_openai_in_base64_is_little_endian_float32(name):
    body = {"input": "abc", "encoding_format": name}
    reply = (await post("/v1/embeddings", body)).json()
    found = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(found, unit(vector_of(RawText("abc"))), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ([1, 2], (TokenIds((1, 2)),)),
        ([[1], [2, 3]], (TokenIds((1,)), TokenIds((2, 3)))),
        ("", (RawText(""),)),
    ],
)
async def test_openai_takes_token_ids_and_the_empty_text(given, texts):
    replica = PretendEmbedder()
    response = await post("/v1/embeddings", {"input": given}, replica)
    assert response.status_code == 200, response.text
    assert replica.tasks[0].texts == texts
    assert replica.tasks[0].truncate  # as Ollama's own endpoint of this name does


ANY = 'field "input" must be a string, or a list of strings, of token ids or of such lists'


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, 'field "input" is required'),
        (5, ANY),
        ([], ANY),
        ([True], ANY),
        ([1.5], ANY),
        ([-1], ANY),
        ([{}], ANY),
        (["a", 3], 'field "input[1]" must be a string'),
        (["a", [1]], 'field "input[1]" must be a string'),
        ([[]], 'field "input[0]" must be a list of token ids'),
        ([[1], "a"], 'field "input[1]" must be a list of token ids'),
        ([[1], [2, -1]], 'field "input[1]" must be a list of token ids'),
    ],
)
async def test_openai_names_the_field_and_type_of_other_inputs(given, wanted):
    response = await post("/v1/embeddings", {"input": given})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"invalid input: {wanted}"


async def test_openai_refuses_other_encodings():
    response = await post("/v1/embeddings", {"input": "a", "encoding_format": "int8"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "Invalid value for 'encoding_format' = int8. Supported values: ['float', 'base64']."
    )


async def test_a_vector_that_is_not_finite_is_an_error_of_the_server(monkeypatch):
    broken = np.array([1.0, np.nan], dtype="<f4")
    monkeypatch.setattr("tests.unit.serve_app.api.test_embeddings.vector_of", lambda text: broken)
    response = await post("/api/embed", {"input": "a"})
    assert response.status_code == 500
    assert "non-finite numbers" in response.json()["error"]
