"""Every example of the OpenAPI document: its request succeeds, and its reply has the same form."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from serve_app.api.openapi_examples import EXAMPLES, PARAMETERS
from serve_app.api.openapi_operations import JSON, NDJSON, OPERATIONS, SSE, Operation
from serve_app.messages.replica_status import ReplicaStatus
from serve_app.replica.replica import ModelReplica
from tests.loopback import serving as publishing
from tests.published import Registry
from tests.tiny_models import write_tiny_llama
from tests.unit.serve_app.api.operations import DOCUMENT, name_of, schema_of
from tests.unit.serve_app.api.test_reranking import PretendRanker
from tests.unit.serve_app.fake_replicas import http_client
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, serving
from tests.unit.serve_app.responses.fake_processes import one_process

# Operations with JSON that have no example: the document itself, and a request that is always
# refused.
WITHOUT = {"GET /openapi.json", "POST /v1/responses/{id}/cancel"}
MANAGING = ("/api/pull", "/api/create", "/api/copy", "/api/push", "/api/delete")
RANKING = ("/v1/rerank", "/v1/score")
# Values of these keys name the kind of an object; of other keys, only the type is compared.
KINDS = ("type", "object", "event")
# Objects whose keys are those of the model file.
OF_THE_FILE = ("model_info",)


@dataclass(frozen=True)
class Shown:
    """An example as the document has it. `reply`: None if the reply has no body."""

    operation: Operation
    path: str
    name: str
    media: str
    request: Any
    reply: Any

    def __str__(self) -> str:
        return f"{name_of(self.operation)} {self.name}"


def shown(operation: Operation) -> Iterator[Shown]:
    described = DOCUMENT["paths"][operation.path][operation.method.lower()]
    content = described.get("requestBody", {}).get("content", {})
    requests = content.get(JSON, {}).get("examples", {})
    replies = {
        name: (media, example["value"])
        for media, each in described["responses"]["2XX"].get("content", {}).items()
        for name, example in each.get("examples", {}).items()
    }
    path = operation.path
    for parameter in described.get("parameters", []):
        path = path.replace(f"{{{parameter['name']}}}", parameter.get("example", ""))
    for name in {**requests, **replies}:
        media, reply = replies.get(name, ("", None))
        request = requests[name]["value"] if requests else None
        yield Shown(operation, path, name, media, request, reply)


ALL = [example for operation in OPERATIONS for example in shown(operation)]
MANAGEMENT = [example for example in ALL if example.path in MANAGING]
INFERENCE = [example for example in ALL if example.path not in MANAGING]


def form(value: Any) -> Any:
    """The keys and types of a JSON value; of a list, those of its first element."""
    if isinstance(value, dict):
        return {key: value[key] if key in KINDS else form(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    if isinstance(value, bool | None):
        return type(value).__name__
    return "text" if isinstance(value, str) else "number"


def of_the_example(value: Any, example: Any) -> Any:
    """`value` without what the model file has beyond the example."""
    if not isinstance(value, dict) or not isinstance(example, dict):
        return value
    return {
        key: {name: item[name] for name in example[key] if name in item}
        if key in OF_THE_FILE and key in example
        else item
        for key, item in value.items()
    }


def events(media: str, text: str) -> list[Any]:
    """The events of a stream; of server-sent events, with their names."""
    if media == NDJSON:
        return [json.loads(line) for line in text.splitlines()]
    return [dict(map(field, event.split("\n"))) for event in text.rstrip("\n").split("\n\n")]


def field(line: str) -> tuple[str, Any]:
    name, _, value = line.partition(": ")
    return name, json.loads(value) if value.startswith("{") else value


def forms(media: str, text: str) -> list[Any]:
    """The different forms of a stream's events, in the order in which they begin."""
    found: list[Any] = []
    for event in events(media, text):
        if form(event) not in found:
            found.append(form(event))
    return found


def part_of(small: Any, whole: Any) -> bool:
    """Whether a form has only keys that `whole` has, with the same values."""
    if not isinstance(small, dict) or not isinstance(whole, dict):
        if isinstance(small, list) and isinstance(whole, list) and small and whole:
            return part_of(small[0], whole[0])
        return small == whole
    return all(key in whole and part_of(small[key], whole[key]) for key in small)


def check(example: Shown, response: httpx.Response) -> None:
    assert response.status_code == 200, response.text
    if example.reply is None:
        assert response.content == b""
        return
    assert response.headers["content-type"].partition(";")[0] == example.media
    if example.media == JSON:
        reply = of_the_example(response.json(), example.reply)
        assert form(reply) == form(example.reply)
        return
    real, stated = forms(example.media, response.text), forms(example.media, example.reply)
    assert real == [each for each in stated if each in real]
    for index, missing in enumerate(stated):
        # Texts that wait are sent together: a short answer may be in the event that begins it.
        assert missing in real or (index and part_of(missing, stated[index - 1]))


async def sent(
    client: httpx.AsyncClient, example: Shown, names: Mapping[str, str]
) -> httpx.Response:
    """The response to the example; `names`: what to put in place of names in it."""
    path, body = example.path, json.dumps(example.request)
    for name, other in names.items():
        path, body = path.replace(name, other), body.replace(name, other)
    content = None if example.request is None else body
    return await client.request(example.operation.method, path, content=content)


@pytest.mark.parametrize("example", INFERENCE, ids=str)
async def test_the_example_of_a_request_is_answered_as_the_example_of_its_reply(
    example: Shown, demo_replica: ModelReplica
):
    statuses = [ReplicaStatus("a", {"demo": asdict(demo_replica.statistics())})]
    served: dict[str, Any] = {"card": demo_replica.describe(), "statuses": statuses}
    ranks = example.path in RANKING
    answering: Any = PretendRanker() if ranks else demo_replica
    async with http_client(answering, stored=one_process(), **served) as client:
        names = {"reranker": "demo"} if ranks else {}
        if PARAMETERS["id"] in example.path:
            (create,) = (each for each in ALL if str(each) == "POST /v1/responses whole")
            names[PARAMETERS["id"]] = (await sent(client, create, {})).json()["id"]
        check(example, await sent(client, example, names))


async def test_the_examples_of_managing_models_are_answered_as_their_replies(tmp_path):
    """In the order of `MANAGING`, in which a user can send them."""
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    published = Registry()
    published.publish("library/llama3.2:1b", [("model", (tmp_path / "tiny.gguf").read_bytes())])
    with publishing(published) as server:
        pulled = f"{server.host}/library/llama3.2:1b"
        names = {"llama3.2:1b": pulled, "registry.example": server.host}
        async with (
            cluster_of(tmp_path / "store", pull_hosts=[server.host]) as cluster,
            serving(cluster) as client,
        ):
            for path in MANAGING:
                (example,) = (each for each in MANAGEMENT if each.path == path)
                check(example, await sent(client, example, names))


@pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
def test_operations_with_json_or_streams_have_examples(operation: Operation):
    media = {*operation.media_types} & {JSON, NDJSON, SSE}
    found = [example for example in ALL if example.operation is operation]
    stated = EXAMPLES.get(name_of(operation), ())
    assert len(found) == len(stated), "at most one is streamed, and at most one is not"
    if name_of(operation) not in WITHOUT:
        assert bool(found) == bool(media or operation.body)
        assert media - {JSON} <= {example.media for example in found}


def test_every_entry_of_the_table_is_an_operation():
    assert EXAMPLES.keys() <= {name_of(operation) for operation in OPERATIONS}


@pytest.mark.parametrize("example", [each for each in ALL if each.request is not None], ids=str)
def test_the_example_of_a_request_satisfies_its_schema(example: Shown):
    Draft202012Validator(schema_of(example.operation)).validate(example.request)
