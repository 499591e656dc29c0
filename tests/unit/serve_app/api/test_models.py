"""/v1/models as Anthropic's official client reads it; as OpenAI's does, see test_openai."""

from datetime import UTC, datetime

import anthropic
import pytest

from serve_app.gateway.model_registry import ModelRegistry
from serve_app.messages.listing import ListedModel
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica, anthropic_client, http_client

VERSION = {"anthropic-version": "2023-06-01"}
NAMES = [f"m{index}" for index in range(45)]


@pytest.fixture
def many(monkeypatch) -> None:
    """The server has the models `NAMES`."""

    async def listed(self, allowed):
        return [ListedModel(name, "ab" * 32, 1, modified_at=0.0) for name in NAMES]

    monkeypatch.setattr(ModelRegistry, "listed", listed)


async def test_the_official_client_finds_a_model():
    async with anthropic_client(PretendReplica()) as client:
        one = await client.models.retrieve("demo")
        listed = await client.models.list()
        assert await client.beta.models.retrieve("demo")
    assert listed.data == [one]
    assert (listed.first_id, listed.last_id, listed.has_more) == ("demo", "demo", False)
    assert (one.type, one.id, one.display_name, one.lifecycle) == (
        "model", "demo", "demo", "active",
    )  # fmt: skip
    assert one.created_at == datetime.fromtimestamp(1_700_000_000, UTC)
    assert one.max_input_tokens == CARD.context_tokens


@pytest.mark.usefixtures("many")
async def test_the_official_client_reads_all_pages():
    async with anthropic_client(PretendReplica()) as client:
        assert [model.id async for model in client.models.list()] == NAMES
        assert [model.id async for model in client.models.list(limit=7)] == NAMES
        backwards = [model.id async for model in client.models.list(limit=7, before_id="m20")]
    assert backwards == [*NAMES[13:20], *NAMES[6:13], *NAMES[:6]]


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, NAMES[:20], True),
        ({"limit": "1000"}, NAMES, False),
        ({"after_id": "m42"}, NAMES[43:], False),
        ({"after_id": "m44"}, [], False),
        ({"before_id": "m2"}, NAMES[:2], False),
        ({"before_id": "m0"}, [], False),
    ],
)
async def test_a_page_names_its_ends(query, ids, more):
    async with http_client(PretendReplica()) as client:
        page = (await client.get("/v1/models", headers=VERSION, params=query)).json()
    assert [model["id"] for model in page.pop("data")] == ids
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    assert page == {"first_id": first, "last_id": last, "has_more": more}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"limit": "0"}, 'parameter "limit"'),
        ({"limit": "1001"}, 'parameter "limit"'),
        ({"limit": "9" * 5000}, 'parameter "limit"'),
        ({"after_id": "unknown"}, 'parameter "after_id" is not the id of a model'),
        ({"before_id": "unknown"}, 'parameter "before_id" is not the id of a model'),
        ({"before_id": "demo", "after_id": "demo"}, "only one of the parameters"),
    ],
)
async def test_pages_that_do_not_exist_are_refused(query, message):
    async with http_client(PretendReplica()) as client:
        response = await client.get("/v1/models", headers=VERSION, params=query)
    assert (response.status_code, response.json()["type"]) == (400, "error")
    assert message in response.json()["error"]["message"]


async def test_errors_have_the_form_of_the_clients_protocol():
    async with anthropic_client(PretendReplica()) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("unknown")
    assert missing.value.body["error"]["type"] == "not_found_error"
    async with http_client(PretendReplica(), api_keys=(api_key("a"),)) as client:
        for path in ("/v1/models", "/v1/models/demo"):
            refused = (await client.get(path, headers=VERSION)).json()
            assert refused["error"]["type"] == "authentication_error"
            assert "type" not in (await client.get(path)).json()
        elsewhere = await client.post("/v1/completions", headers=VERSION)
    assert "type" not in elsewhere.json()
