"""The page of the APIs in Chromium: it shows all of /openapi.json."""

import json
import re
import shlex
from typing import Any

import pytest

from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import DOCUMENT
from tests.unit.serve_app.fake_replicas import PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")
SCHEMAS = DOCUMENT["components"]["schemas"]


async def test_every_operation_and_type_is_shown(visiting):
    async with visiting(PretendReplica(), path="/docs") as visit:
        page = visit.page
        await page.locator(".schema").first.wait_for(state="attached")
        shown = await page.locator(".operation > summary").all_text_contents()
        described = [
            f"{method.upper()} {path} — {operation['summary']}"
            for path, item in DOCUMENT["paths"].items()
            for method, operation in item.items()
        ]
        assert sorted(shown) == sorted(described)
        assert await page.locator(".schema > summary").all_text_contents() == [*SCHEMAS]
        cells = page.locator("#schema-OllamaChatBody tbody td:first-child")
        assert await cells.all_text_contents() == [*SCHEMAS["OllamaChatBody"]["properties"]]
        groups = page.locator("#operations section")
        assert await groups.locator("h2").all_text_contents() == [
            "Ollama", "OpenAI", "Anthropic", "Caravan",
        ]  # fmt: skip
        await groups.last.get_by_text("/healthz", exact=True).wait_for()
        assert await page.locator("#about code").inner_text() == "strict_fields"
        assert visit.problems == []


async def test_links_open_the_types_that_they_name(visiting):
    async with visiting(PretendReplica(), path="/docs") as visit:
        page = visit.page
        await page.get_by_text("/api/chat", exact=True).click()
        await page.get_by_role("link", name="OllamaChatBody").click()
        await page.locator("#schema-OllamaChatBody").get_by_text("keep_alive").wait_for()
        links = await page.evaluate("[...document.querySelectorAll('main a')].map((a) => a.hash)")
        assert set(links) <= {f"#schema-{name}" for name in SCHEMAS}
        await page.goto(f"{visit.address}/docs#schema-OpenAIError")
        await page.reload()
        await page.locator("#schema-OpenAIError").get_by_text("error (required)").wait_for()


async def test_a_search_shows_only_entries_with_all_words(visiting):
    async with visiting(PretendReplica(), path="/docs") as visit:
        page = visit.page
        await page.locator(".operation").first.wait_for()
        everything = await page.locator(".operation").count()
        await page.get_by_label("Find").fill("POST embed one")
        await page.get_by_text("1 operations", exact=True).wait_for()
        assert await page.locator(".operation:visible").count() == 1
        await page.get_by_label("Find").fill("")
        await page.get_by_text(f"{everything} operations").wait_for()


def examples_of(described: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Requests and replies of an operation; None for what it lacks."""
    content = described.get("requestBody", {}).get("content", {}).get("application/json", {})
    requests = {name: each["value"] for name, each in content.get("examples", {}).items()}
    replies = {
        name: example["value"]
        for media in described["responses"]["2XX"].get("content", {}).values()
        for name, example in media.get("examples", {}).items()
    }
    return [(requests.get(name), replies.get(name)) for name in {**requests, **replies}]


def sent(command: str, address: str) -> tuple[str, str, Any]:
    """Method, path and JSON body of a command for curl."""
    program, *words = shlex.split(command)
    assert program == "curl"
    method = words.pop(words.index("-X") + 1) if "-X" in words else None
    data = words.pop(words.index("-d") + 1) if "-d" in words else None
    (url,) = (word for word in words if word.startswith(address))
    body = None if data is None else json.loads(data)
    return method or ("GET" if data is None else "POST"), url.removeprefix(address), body


def filled(path: str, described: dict[str, Any]) -> str:
    named = {each["name"]: each.get("example") for each in described.get("parameters", [])}
    return re.sub(r"\{(\w+)\}", lambda found: str(named[found[1]]), path)


async def test_every_example_is_a_command_with_its_reply(visiting):
    async with visiting(PretendReplica(), path="/docs") as visit:
        page = visit.page
        await page.locator(".schema").first.wait_for(state="attached")
        for path, item in DOCUMENT["paths"].items():
            for method, described in item.items():
                figures = page.locator(f"#{described['operationId']} figure")
                titles = await figures.locator("figcaption span").all_text_contents()
                texts = [
                    *zip(titles, await figures.locator("pre").all_text_contents(), strict=True)
                ]
                commands = [text for title, text in texts if title.startswith("Request")]
                replies = [text for title, text in texts if title.startswith("Reply")]
                assert len(commands) + len(replies) == len(texts)
                place, stated = filled(path, described), examples_of(described)
                expected = [(method.upper(), place, request) for request, _ in stated]
                assert [sent(command, visit.address) for command in commands] == expected
                stated_replies = [reply for _, reply in stated if reply is not None]
                assert [*map(parsed, replies)] == [*map(parsed, stated_replies)]
        assert visit.problems == []


def parsed(reply: Any) -> Any:
    """JSON as a value, a stream as its text without the end of the last line."""
    try:
        return json.loads(reply) if isinstance(reply, str) else reply
    except json.JSONDecodeError:
        return reply.rstrip("\n")


async def test_the_parts_of_an_example_have_names_and_can_be_copied(visiting):
    options = {"permissions": ["clipboard-read", "clipboard-write"]}
    async with visiting(PretendReplica(), context=options, path="/docs") as visit:
        page = visit.page
        await page.get_by_text("/v1/chat/completions", exact=True).click()
        names = ["Request, not streamed", "Reply, not streamed", "Request, streamed"]
        for name in names:
            await page.get_by_role("figure", name=name, exact=True).wait_for()
        request = page.get_by_role("figure", name=names[0], exact=True)
        await request.get_by_role("button", name="Copy").click()
        await request.get_by_role("button", name="Copied").wait_for()
        copied = await page.evaluate("navigator.clipboard.readText()")
        assert copied == await request.locator("pre").text_content()
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == copied


async def test_commands_have_a_key_only_where_one_is_needed(visiting):
    async with visiting(PretendReplica(), api_keys=(api_key("one"),), path="/docs") as visit:
        page = visit.page
        await page.get_by_label("Key", exact=True).fill("one")
        await page.get_by_role("button", name="Save").click()
        await page.locator(".schema").first.wait_for(state="attached")
        texts = await page.locator("figure pre").all_text_contents()
        commands = [shlex.split(text) for text in texts if text.startswith("curl ")]
        assert len(commands) > 20
        open_to_all = {f"{visit.address}/{name}" for name in ("healthz", "readyz", "health")}
        for words in commands:
            keyed = "Authorization: Bearer $CARAVAN_API_KEY" in words
            assert keyed != bool(open_to_all.intersection(words))
    async with visiting(PretendReplica(), path="/docs") as visit:
        await visit.page.locator(".schema").first.wait_for(state="attached")
        assert "Authorization" not in await visit.page.locator("main").text_content()


async def test_a_server_with_keys_asks_for_one(visiting):
    async with visiting(PretendReplica(), api_keys=(api_key("one"),), path="/docs") as visit:
        await visit.page.get_by_label("Key", exact=True).fill("one")
        await visit.page.get_by_role("button", name="Save").click()
        await visit.page.get_by_text("Answer a chat").first.wait_for()
