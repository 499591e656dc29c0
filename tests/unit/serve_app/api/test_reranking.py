"""The ranking endpoints in front of a fake model: texts in, tasks and scores out."""

import math
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.engine.request import FinishReason, Usage
from runtime.errors import CaravanError, RequestError
from serve_app.api.embeddings import GROUP
from serve_app.api.reranking import MAX_DOCUMENTS
from serve_app.messages.tasks import ChatDelta, EmbeddingTask, RawText
from tests.unit.serve_app.fake_replicas import http_client

QUERY = "what is a panda?"


class PretendRanker:
    """Scores a text by its length, and one of a query of its own by that too."""

    def __init__(self, error: CaravanError | None = None) -> None:
        self.tasks: list[EmbeddingTask] = []
        self.error = error

    async def generate(self, task: EmbeddingTask) -> AsyncGenerator[ChatDelta, None]:
        self.tasks.append(task)
        if self.error is not None:
            raise self.error
        queries = task.queries if len(task.queries) > 1 else task.queries * len(task.texts)
        scores = [
            np.float32(len(text.text) - len(query.text)).tobytes()
            for query, text in zip(queries, task.texts, strict=True)
        ]
        usage = Usage(3 * len(task.texts), 0, 0, 1_000, 2_000, 0)
        yield ChatDelta(finish=FinishReason.STOP, usage=usage, vectors=tuple(scores))


async def post(path: str, body: dict[str, Any], replica: Any = None) -> httpx.Response:
    async with http_client(replica or PretendRanker()) as client:
        return await client.post(path, json={"model": "demo", **body})


def sigmoid(text: str, query: str = QUERY) -> float:
    return 1 / (1 + math.exp(len(query) - len(text)))


async def test_rerank_sorts_documents_of_both_forms():
    documents = ["a bear", {"text": "the giant panda is a bear"}, "hi", "a black and white one"]
    reply = (await post("/v1/rerank", {"query": QUERY, "documents": documents})).json()
    assert [result["index"] for result in reply["results"]] == [1, 3, 0, 2]
    scores = [result["relevance_score"] for result in reply["results"]]
    expected = [sigmoid("the giant panda is a bear"), sigmoid(documents[3]), sigmoid("a bear")]
    assert scores[:3] == pytest.approx(expected)
    assert scores == sorted(scores, reverse=True)
    assert reply["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    assert reply["model"] == "demo" and reply["id"].startswith("rerank-")
    assert all("document" not in result for result in reply["results"])


async def test_rerank_returns_as_many_documents_as_requested():
    body = {"query": QUERY, "documents": ["a", "bb", "ccc"], "top_n": 2, "return_documents": True}
    results = (await post("/v1/rerank", body)).json()["results"]
    assert [result["document"]["text"] for result in results] == ["ccc", "bb"]
    results = (await post("/v1/rerank", {**body, "top_n": 9})).json()["results"]
    assert len(results) == 3


async def test_equal_scores_keep_the_order_of_the_documents():
    body = {"query": QUERY, "documents": ["x" * 4] * 5}
    results = (await post("/v1/rerank", body)).json()["results"]
    assert [result["index"] for result in results] == [0, 1, 2, 3, 4]


async def test_far_scores_are_finite():
    reply = await post("/v1/score", {"text_1": "", "text_2": ["x" * 3000]})
    assert reply.json()["data"][0]["score"] == 1
    reply = await post("/v1/score", {"text_1": "x" * 3000, "text_2": [""]})
    assert reply.json()["data"][0]["score"] == 0


async def test_score_keeps_the_order_and_pairs_texts():
    body = {"text_1": ["a", "bb", "c"], "text_2": ["aaa", "b", "c"]}
    reply = (await post("/v1/score", body)).json()
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    expected = [sigmoid("aaa", "a"), sigmoid("b", "bb"), sigmoid("c", "c")]
    assert [entry["score"] for entry in reply["data"]] == pytest.approx(expected)
    assert reply["object"] == "list" and reply["data"][0]["object"] == "score"


async def test_many_documents_are_sent_in_groups_with_their_queries():
    replica = PretendRanker()
    texts = ["x" * (at % 7) for at in range(2 * GROUP + 5)]
    await post("/v1/rerank", {"query": QUERY, "documents": texts}, replica)
    assert [len(task.texts) for task in replica.tasks] == [GROUP, GROUP, 5]
    assert all(task.queries == (RawText(QUERY),) for task in replica.tasks)
    replica = PretendRanker()
    await post("/v1/score", {"text_1": texts, "text_2": texts}, replica)
    assert sorted(len(task.queries) for task in replica.tasks) == [5, GROUP, GROUP]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("rerank", {"documents": ["a"]}, 'field "query" is required'),
        ("rerank", {"query": "q"}, 'field "documents" is required'),
        ("rerank", {"query": "q", "documents": []}, 'field "documents" must be a text or a list'),
        ("rerank", {"query": "q", "documents": [{"title": "a"}]}, '"documents[0]" must be a text'),
        ("rerank", {"query": "q", "documents": ["a", 3]}, '"documents[1]" must be a text'),
        ("rerank", {"query": ["q"], "documents": ["a"]}, 'field "query" must be'),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": 0}, 'field "top_n" must be'),
        (
            "rerank",
            {"query": "q", "documents": ["a"] * (MAX_DOCUMENTS + 1)},
            'field "documents" has 1,001 texts; at most 1,000 are accepted',
        ),
        (
            "rerank",
            {"query": "q", "documents": ["a"], "max_tokens_per_doc": 5},
            'field "max_tokens_per_doc" is not served yet',
        ),
        ("score", {"text_1": "a", "text_2": {}}, 'field "text_2" must be a text or a list'),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "they must be as many"),
        ("score", {"text_2": ["c"]}, 'field "text_1" is required'),
    ],
)
async def test_invalid_fields_are_refused_by_name(path, body, message):
    replica = PretendRanker()
    response = await post(f"/v1/{path}", body, replica)
    assert response.status_code == 400 and not replica.tasks
    assert message in response.json()["error"]["message"]


async def test_the_replicas_refusal_is_the_response():
    replica = PretendRanker(RequestError('"demo" does not support rerank'))
    response = await post("/v1/rerank", {"query": "q", "documents": ["a"]}, replica)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == '"demo" does not support rerank'


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
async def test_an_unknown_model_is_not_found(path):
    body = {"query": "q", "documents": ["a"], "text_1": "a", "text_2": "b"}
    async with http_client(PretendRanker()) as client:
        response = await client.post(path, json={"model": "other", **body})
    assert response.status_code == 404
