"""A valid request for each operation of the HTTP interface, for tests that go over all of them.

Such a test fails for an operation that is missing here: add a line to `BODIES`.
"""

import base64
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import Definition
from runtime.engine.request import FinishReason
from serve_app.api.anthropic import MessagesBody
from serve_app.api.openapi import document
from serve_app.api.openapi_operations import OPERATIONS, Operation, Protocol
from serve_app.api.responses_body import ResponsesBody
from serve_app.messages.tasks import ChatDelta, ChatTask, PromptTask, PromptTokens, Task
from serve_app.on_demand.definitions import base_from_request
from tests.unit.serve_app.fake_replicas import CARD, USAGE, PretendReplica
from tests.vision_prompts import png

DOCUMENT = document("0")
TOKENS = PromptTokens((7, 8), 512, ("ho", "t"), "hot")
SCORE = np.float32(0.5).tobytes()
VECTOR = np.arange(4, dtype="<f4").tobytes()
SEEING = dataclasses.replace(CARD, capabilities=("completion", "vision"))
DIGEST = "sha256:" + "ab" * 32
PICTURE = base64.b64encode(png(4, 6)).decode()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ASKED = {"role": "user", "content": "How is it in Paris?"}
NATIVE_CALL = {"id": "a", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
OPENAI_CALL = {"id": "a", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
OPTIONS = {"temperature": 0.5, "top_k": 3, "stop": ["x"], "num_ctx": 512, "seed": 1}
PARTS = [
    {"type": "text", "text": "See"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
]
BLOCKS = [
    {"type": "text", "text": "See", "cache_control": {"type": "ephemeral"}},
    {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
    },
    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Fine."}]},
]

# By path: a body that uses most of the served fields.
USER = [{"role": "user", "content": "hi"}]
# The shortest bodies of all operations that generate.
SHORTEST: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "See", "images": [PICTURE]},
            {"role": "assistant", "content": "", "thinking": "I call", "tool_calls": [NATIVE_CALL]},
            {"role": "tool", "content": "Fine.", "tool_name": "weather"},
        ],
        "tools": [TOOL],
        "options": OPTIONS,
        "keep_alive": "5m",
        "think": "low",
        "format": SCHEMA,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/api/generate": {
        "prompt": "Hi",
        "system": "Be brief.",
        "images": [PICTURE],
        "context": [1, 2],
        "options": OPTIONS,
        "keep_alive": -1,
    },
    "/api/embed": {"input": ["hot", "cold"], "options": OPTIONS, "dimensions": 2},
    "/api/embeddings": {"prompt": "hot", "options": OPTIONS},
    "/api/show": {"verbose": True},
    "/api/pull": {"insecure": False},
    "/api/push": {"insecure": True},
    "/api/create": {
        "from": "demo",
        "parameters": OPTIONS,
        "messages": [ASKED],
        "system": "x",
        "license": ["MIT"],
    },
    "/api/copy": {"source": "demo", "destination": "other"},
    "/api/delete": {},
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": PARTS, "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]},
            {"role": "tool", "content": "Fine.", "tool_call_id": "a"},
        ],
        "tools": [TOOL],
        "n": 2,
        "stop": "x",
        "stream_options": {"include_usage": True},
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 5,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1},
    },
    "/v1/completions": {
        "prompt": ["Hi", "Ho"],
        "best_of": 2,
        "guided_choice": ["a", "b"],
        "logprobs": 1,
        "stop": ["x"],
        "temperature": 0.5,
    },
    "/v1/embeddings": {"input": "hot", "encoding_format": "base64", "dimensions": 2},
    "/tokenize": {"prompt": "Hi", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "Fine."},
        ],
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "tools": [{"type": "function", **FUNCTION}],
        "metadata": {"a": "b"},
        "top_k": 3,
        "store": False,
    },
    "/v1/rerank": {
        "query": "hot?",
        "documents": ["cold", {"text": "hot"}],
        "top_n": 1,
        "return_documents": True,
    },
    "/v1/score": {"text_1": "hot?", "text_2": ["cold", "hot"]},
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I call", "signature": ""},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {"role": "user", "content": BLOCKS},
        ],
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["x"],
        "top_k": 3,
        "metadata": {"user_id": "u"},
    },
}


class AnyReplica(PretendReplica):
    """Answers tasks of all kinds."""

    async def generate(self, task: Task) -> AsyncGenerator[ChatDelta, None]:  # type: ignore[override]
        if isinstance(task, ChatTask):
            async for delta in super().generate(task):
                yield delta
            return
        if self.error is not None:
            raise self.error
        if isinstance(task, PromptTask):
            yield ChatDelta(finish=FinishReason.STOP, prompt_tokens=TOKENS)
            return
        vectors = tuple(SCORE if task.queries else VECTOR for _ in task.texts)
        yield ChatDelta(finish=FinishReason.STOP, usage=USAGE, vectors=vectors)


class WillingManagement:
    """Every operation succeeds at once."""

    async def pull(self, name: str, *, insecure: bool = False) -> AsyncIterator[PullProgress]:
        yield PullProgress("success")

    async def push(self, name: str, *, insecure: bool = False) -> AsyncIterator[PullProgress]:
        yield PullProgress("success")

    def base_of(self, text: str) -> Definition:
        return base_from_request(text)

    async def create(self, name: str, definition: object) -> AsyncIterator[PullProgress]:
        yield PullProgress("success")

    async def copy(self, source: str, destination: str) -> None:
        pass

    async def delete(self, name: str) -> None:
        pass

    async def has_blob(self, digest: str) -> bool:
        return True

    async def upload(self, digest: str, size: int | None, data: Any, *, tenant: str) -> bool:
        async for _ in data:
            pass
        return True


def willing() -> dict[str, Any]:
    """Arguments of `ingress` by which all of `BODIES` succeed."""
    return {"card": SEEING, "management": WillingManagement()}


def with_bodies() -> list[Operation]:
    return [operation for operation in OPERATIONS if operation.body is not None]


def name_of(operation: Operation) -> str:
    return f"{operation.method} {operation.path}"


def path_of(operation: Operation) -> str:
    return (
        operation.path.replace("{digest}", DIGEST)
        .replace("{model}", "demo")
        .replace("{id}", "resp_1")
    )


def body_of(operation: Operation) -> dict[str, Any]:
    """A valid body. The error for an operation without one says what to add."""
    if operation.body is MessagesBody:
        return {"model": "demo", **BODIES["/v1/messages"]}
    if operation.body is ResponsesBody:
        return {"model": "demo", **BODIES["/v1/responses"]}
    assert operation.path in BODIES, f"add a body for {operation.path} to {__name__}.BODIES"
    named = operation.body is not None and "model" in operation.body.model_fields
    return ({"model": "demo"} if named else {}) | BODIES[operation.path]


def schema_of(operation: Operation) -> dict[str, Any]:
    """The schema of the operation's body, with the definitions that it refers to."""
    described = DOCUMENT["paths"][operation.path][operation.method.lower()]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    return {**schema, "components": DOCUMENT["components"]}


Place = tuple[str | int, ...]


def values_of(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """All values in a JSON value, itself included, with their places as keys and indices."""
    yield place, value
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from values_of(value[key], (*place, key))


def replaced(value: Any, place: Place, new: Any) -> Any:
    """A copy with `new` at `place`; the same value if it has no such place."""
    if not place:
        return new
    key, *rest = place
    if isinstance(value, dict) and key in value:
        return value | {key: replaced(value[key], tuple(rest), new)}
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return [*value[:key], replaced(value[key], tuple(rest), new), *value[key + 1 :]]
    return value


def check_error(protocol: Protocol, text: str) -> str:
    """Asserts that `text` is an error body of the protocol; returns its message."""
    error = json.loads(text)
    schema = DOCUMENT["components"]["schemas"][f"{protocol}Error"]
    Draft202012Validator(schema).validate(error)
    message = error["error"]["message"] if isinstance(error["error"], dict) else error["error"]
    assert message
    return message
