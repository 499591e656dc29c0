"""Examples of OpenAI's protocol, and of vLLM's additions to it."""

from typing import Any

from serve_app.api.examples.example import Example, Examples

_QUESTION = "What is 17 + 25?"
_ANSWER = "17 + 25 = 42."
_CREATED = 1767605400
_CHAT = {"model": "demo", "messages": [{"role": "user", "content": _QUESTION}]}
_TEXT = {"model": "demo", "prompt": "The opposite of hot is", "max_tokens": 8}
_CHUNK = {
    "id": "chatcmpl-0a92a78f9ad84e9d91c261fb6909bb6c",
    "created": _CREATED,
    "model": "demo",
    "object": "chat.completion.chunk",
    "system_fingerprint": "fp_caravan",
}
_COMPLETION = {
    "id": "cmpl-c0f1e371b9fc4fd191e3ea7e42243234",
    "created": _CREATED,
    "model": "demo",
    "object": "text_completion",
    "system_fingerprint": "fp_caravan",
}
_DONE = "[DONE]"
_RANKER = "For models that rank texts, here with the name `reranker`."
_MODEL = {
    "id": "demo",
    "object": "model",
    "created": _CREATED,
    "owned_by": "library",
    "max_model_len": 4096,
}
_VECTORS = [[-0.7759, -0.2937, 0.1909, -0.5247], [0.5827, -0.6416, -0.4502, -0.2147]]


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _chunk(delta: dict[str, Any], **end: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None} | end
    return {**_CHUNK, "choices": [choice]}


def _piece(text: str, **end: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None} | end
    return {**_COMPLETION, "choices": [choice]}


_END = {"finish_reason": "stop", "stop_reason": None}

EXAMPLES: Examples = {
    "POST /v1/chat/completions": (
        Example(
            _CHAT,
            {
                **_CHUNK,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": _ANSWER},
                        **_END,
                        "logprobs": None,
                    }
                ],
                "usage": _usage(18, 12),
            },
        ),
        Example(
            {**_CHAT, "stream": True},
            [
                _chunk({"role": "assistant", "content": "17"}),
                _chunk({"content": " + 25 = 42."}),
                _chunk({}, **_END),
                _DONE,
            ],
        ),
    ),
    "POST /v1/completions": (
        Example(
            _TEXT,
            {**_piece(" cold.", **_END), "usage": _usage(6, 4)},
        ),
        Example(
            {**_TEXT, "stream": True},
            [_piece(" col"), _piece("d."), _piece("", **_END), _DONE],
        ),
    ),
    "POST /v1/embeddings": (
        Example(
            {"model": "demo", "input": ["hot", "cold"], "dimensions": 4},
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "embedding": vector, "index": index}
                    for index, vector in enumerate(_VECTORS)
                ],
                "model": "demo",
                "usage": {"prompt_tokens": 4, "total_tokens": 4},
            },
        ),
    ),
    "POST /v1/rerank": (
        Example(
            {
                "model": "reranker",
                "query": "What is a panda?",
                "documents": ["Paris is a city.", "The panda is a bear."],
                "return_documents": True,
            },
            {
                "id": "rerank-3f6d1c0e0b2a4c8f9e7d5a1b2c3d4e5f",
                "model": "reranker",
                "usage": {"prompt_tokens": 26, "total_tokens": 26},
                "results": [
                    {
                        "index": 1,
                        "relevance_score": 0.9938,
                        "document": {"text": "The panda is a bear."},
                    },
                    {
                        "index": 0,
                        "relevance_score": 0.0002,
                        "document": {"text": "Paris is a city."},
                    },
                ],
            },
            _RANKER,
        ),
    ),
    "POST /v1/score": (
        Example(
            {
                "model": "reranker",
                "text_1": "What is a panda?",
                "text_2": ["Paris is a city.", "The panda is a bear."],
            },
            {
                "id": "score-7b1e4d2f8c6a4f0d9b3a5e7c1d2f4a6b",
                "object": "list",
                "created": _CREATED,
                "model": "reranker",
                "data": [
                    {"index": 0, "object": "score", "score": 0.0002},
                    {"index": 1, "object": "score", "score": 0.9938},
                ],
                "usage": {"prompt_tokens": 26, "total_tokens": 26},
            },
            _RANKER,
        ),
    ),
    "POST /tokenize": (
        Example(
            {"model": "demo", "prompt": _QUESTION},
            {
                "count": 10,
                "max_model_len": 768,
                "tokens": [307, 274, 223, 19, 25, 305, 223, 20, 23, 33],
                "token_strs": None,
            },
        ),
    ),
    "POST /detokenize": (
        Example(
            {"model": "demo", "tokens": [307, 274, 223, 19, 25, 305, 223, 20, 23, 33]},
            {"prompt": _QUESTION},
        ),
    ),
    "GET /v1/models": (Example(reply={"object": "list", "data": [_MODEL]}),),
    "GET /v1/models/{model}": (Example(reply=_MODEL),),
}
