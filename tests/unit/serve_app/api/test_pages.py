"""The pages for browsers and their files."""

import pytest

from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import PretendReplica, http_client

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("keys", [None, (api_key("one"),)])
async def test_browsers_get_the_page_and_other_clients_the_greeting(keys):
    async with http_client(PretendReplica(), api_keys=keys) as client:
        page = await client.get("/", headers=BROWSER)
        assert page.headers["content-type"].startswith("text/html")
        assert "<title>Caravan</title>" in page.text
        for accepted in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
            greeting = await client.get("/", headers=accepted)
            assert greeting.text == "Ollama is running"
            assert "Accept" in greeting.headers["vary"]
        assert (
            (await client.get("/page/chat.js"))
            .headers["content-type"]
            .startswith("text/javascript")
        )


@pytest.mark.parametrize(("path", "title"), [("/status", "status"), ("/docs", "APIs")])
async def test_the_other_pages_need_no_key_and_are_found_below_a_prefix(path, title):
    async with http_client(PretendReplica(), api_keys=(api_key("one"),), prefix="/app") as client:
        page = await client.get(path)
    assert page.headers["content-type"].startswith("text/html")
    assert f"<title>Caravan: {title}</title>" in page.text


@pytest.mark.parametrize("path", ["/pages", "/page", "/statuses", "/docs/x", "/healthz2"])
async def test_paths_that_begin_like_those_of_pages_need_a_key(path):
    async with http_client(PretendReplica(), api_keys=(api_key("one"),)) as client:
        assert (await client.get(path)).status_code == 401


async def test_the_pages_may_use_their_own_server_only():
    async with http_client(PretendReplica()) as client:
        for path in ("/", "/status", "/docs", "/page/chat.js"):
            headers = (await client.get(path, headers=BROWSER)).headers
            policy = dict(
                part.split(" ", 1) for part in headers["content-security-policy"].split("; ")
            )
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == "'self'"
            assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/page/../auth.py", "/page/%2e%2e/api/auth.py", "/page/", "/page/x.js"]
)
async def test_other_files_are_not_found(path):
    async with http_client(PretendReplica()) as client:
        assert (await client.get(path)).status_code == 404


async def test_an_unchanged_file_is_not_sent_again():
    async with http_client(PretendReplica()) as client:
        tag = (await client.get("/page/chat.js")).headers["etag"]
        again = await client.get("/page/chat.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
