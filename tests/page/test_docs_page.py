"""The page of the APIs in Chromium: it shows all of /openapi.json."""

import pytest

from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.api.operations import DOCUMENT
from tests.unit.serve_app.fake_replicas import PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMAS = DOCUMENT["components"]["schemas"]


async def test_every_operation_and_type_is_shown(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await page.goto(f"{visit.address}/docs")
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
        await groups.last.get_by_text("/healthz").wait_for()
        assert await page.locator("#about code").inner_text() == "strict_fields"
        assert visit.problems == []


async def test_links_open_the_types_that_they_name(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await page.goto(f"{visit.address}/docs")
        await page.get_by_text("/api/chat", exact=True).click()
        await page.get_by_role("link", name="OllamaChatBody").click()
        await page.locator("#schema-OllamaChatBody").get_by_text("keep_alive").wait_for()
        links = await page.evaluate("[...document.querySelectorAll('main a')].map((a) => a.hash)")
        assert set(links) <= {f"#schema-{name}" for name in SCHEMAS}
        await page.goto(f"{visit.address}/docs#schema-OpenAIError")
        await page.reload()
        await page.locator("#schema-OpenAIError").get_by_text("error (required)").wait_for()


async def test_a_search_shows_only_entries_with_all_words(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await page.goto(f"{visit.address}/docs")
        await page.locator(".operation").first.wait_for()
        everything = await page.locator(".operation").count()
        await page.get_by_label("Find").fill("POST embed one")
        await page.get_by_text("1 operations", exact=True).wait_for()
        assert await page.locator(".operation:visible").count() == 1
        await page.get_by_label("Find").fill("")
        await page.get_by_text(f"{everything} operations").wait_for()


async def test_a_server_with_keys_asks_for_one(visiting):
    async with visiting(PretendReplica(), api_keys=(api_key("one"),)) as visit:
        await visit.page.goto(f"{visit.address}/docs")
        await visit.page.get_by_label("Key", exact=True).fill("one")
        await visit.page.get_by_role("button", name="Save").click()
        await visit.page.get_by_text("Answer a chat").first.wait_for()
