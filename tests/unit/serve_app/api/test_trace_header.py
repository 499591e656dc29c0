"""Which API keys may trace requests, on every route that generates."""

import pytest

from serve_app.api.trace_header import HEADER
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import SHORTEST
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

KEYS = (api_key("trusted", trace=True), api_key("other"))


@pytest.mark.parametrize("path", SHORTEST)
@pytest.mark.parametrize(
    "key, value, status, traced",
    [
        ("trusted", "1", 200, True),
        ("trusted", "0", 200, False),
        ("trusted", None, 200, False),
        ("trusted", "yes", 400, None),
        ("other", "1", 403, None),
        ("other", "0", 200, False),
        ("other", None, 200, False),
        ("unknown", "1", 401, None),
    ],
)
async def test_a_key_needs_the_right(
    path: str, key: str, value: str | None, status: int, traced: bool | None
) -> None:
    replica = PretendReplica()
    headers = {"authorization": f"Bearer {key}"} | ({} if value is None else {HEADER: value})
    async with http_client(replica, api_keys=KEYS) as client:
        answer = await client.post(path, json={"model": "demo", **SHORTEST[path]}, headers=headers)
    assert answer.status_code == status, answer.text
    assert [task.trace for task in replica.tasks] == ([] if traced is None else [traced])
    if status == 403:
        assert "trace: true" in str(answer.json()["error"])


@pytest.mark.parametrize("allowed, status", [(False, 403), (True, 200)])
async def test_without_keys_the_configuration_decides(allowed: bool, status: int) -> None:
    replica = PretendReplica()
    body = {"model": "demo", **SHORTEST["/api/chat"]}
    async with http_client(replica, trace_without_keys=allowed) as client:
        answer = await client.post("/api/chat", json=body, headers={HEADER: "1"})
    assert answer.status_code == status
    assert [task.trace for task in replica.tasks] == [True] * allowed
