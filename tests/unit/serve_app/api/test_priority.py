"""Which API keys may set the priority of requests, and the allowed values."""

import pytest

from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import SHORTEST
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

KEYS = (api_key("trusted", priority=True), api_key("other"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "key, priority, status",
    [
        ("trusted", -1000, 200),
        ("trusted", 1000, 200),
        ("trusted", None, 200),
        ("trusted", 1001, 400),
        ("trusted", -1001, 400),
        ("trusted", True, 400),
        ("trusted", "high", 400),
        ("other", 0, 200),
        ("other", None, 200),
        ("other", 1, 403),
        ("other", -1, 403),
        ("other", 10**30, 400),
        (None, 0, 200),
        (None, -1, 403),
    ],
)
async def test_a_key_needs_the_right(
    path: str, key: str | None, priority: object, status: int
) -> None:
    replica = PretendReplica()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": "demo", **SHORTEST[path], "priority": priority}
    async with http_client(replica, api_keys=None if key is None else KEYS) as client:
        answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert [task.priority for task in replica.tasks] == [priority or 0] * (status == 200)
    if status != 200:
        assert "priority" in answer.json()["error"]["message"]
