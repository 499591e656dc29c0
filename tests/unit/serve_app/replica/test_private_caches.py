"""Caches reveal nothing about the requests of other API keys, unless the caches are shared."""

import base64
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from serve_app.config.settings import read_settings
from serve_app.replica.replica import ModelReplica
from tests.tiny_vision_model import write_tiny_vision_model
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client
from tests.unit.serve_app.loaded_replicas import loaded
from tests.vision_prompts import png

TEXT = "a secret that one tenant tells the model, long enough for a few pages of its cache " * 2
KEYS = ("first", "second")


@pytest.fixture
def replica(tmp_path) -> Iterator[ModelReplica]:
    write_tiny_vision_model(tmp_path / "demo.gguf")
    with loaded(tmp_path / "demo.gguf", context_tokens=512) as replica:
        yield replica


def client_of(
    replica: Any, *, private_caches: bool
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    keys = tuple(map(api_key, KEYS))
    return http_client(
        replica, api_keys=keys, private_caches=private_caches, card=replica.describe()
    )


async def cached_tokens(client: httpx.AsyncClient, key: str, content: Any) -> int:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
    }
    answer = await client.post(
        "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def text_and_image() -> list[dict[str, Any]]:
    address = "data:image/png;base64," + base64.b64encode(png(40, 30)).decode()
    image = {"type": "image_url", "image_url": {"url": address}}
    return [{"type": "text", "text": TEXT}, image]


async def test_cached_prompts_of_one_key_are_not_used_for_another(replica: ModelReplica) -> None:
    async with client_of(replica, private_caches=True) as client:
        assert await cached_tokens(client, "first", TEXT) == 0
        own = await cached_tokens(client, "first", TEXT)
        assert own > 100
        assert await cached_tokens(client, "second", TEXT) == 0
        assert await cached_tokens(client, "second", TEXT) == own


async def test_shared_caches_are_shared_among_keys(replica: ModelReplica) -> None:
    async with client_of(replica, private_caches=False) as client:
        assert await cached_tokens(client, "first", TEXT) == 0
        assert await cached_tokens(client, "second", TEXT) > 100


@pytest.mark.parametrize("private", [True, False])
async def test_images_are_encoded_again_for_another_key(
    replica: ModelReplica, private: bool
) -> None:
    async with client_of(replica, private_caches=private) as client:
        for key, encoded in (("first", 1), ("first", 1), ("second", 1 + private)):
            await cached_tokens(client, key, text_and_image())
            assert replica.statistics().images_encoded_total == encoded


async def test_the_context_of_an_answer_does_not_depend_on_the_key(replica: ModelReplica) -> None:
    async with client_of(replica, private_caches=True) as client:
        contexts = []
        for key in KEYS:
            body = {"model": "demo", "prompt": "hello", "stream": False}
            options = {"temperature": 0, "num_predict": 3}
            answer = await client.post(
                "/api/generate",
                json=body | {"options": options},
                headers={"authorization": f"Bearer {key}"},
            )
            contexts.append(answer.json()["context"])
        assert contexts[0] == contexts[1]


async def test_tasks_have_a_salt_only_if_caches_are_private() -> None:
    for private in (False, True):
        replica = PretendReplica()
        async with http_client(
            replica, api_keys=tuple(map(api_key, KEYS)), private_caches=private
        ) as client:
            for key in (*KEYS, *KEYS):
                headers = {"authorization": f"Bearer {key}"}
                body = {"model": "demo", "prompt": "hello", "stream": False}
                await client.post("/api/generate", json=body, headers=headers)
        first, second, third, _ = replica.tasks
        assert first.tenant == third.tenant != second.tenant
        salts = [task.cache_salt for task in replica.tasks]
        assert salts == [task.tenant if private else "" for task in replica.tasks]


@pytest.mark.parametrize(
    "keyed, share_caches, private",
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_caches_are_private_with_api_keys(keyed: bool, share_caches: bool, private: bool) -> None:
    models = [{"name": "demo", "source": "demo.gguf"}]
    settings = read_settings({"models": models, "share_caches": share_caches})
    assert settings.caches_are_private(keyed=keyed) is private
