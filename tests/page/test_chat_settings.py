"""The settings of the chat page in Chromium: models, what they can do, keys and dialogs."""

import dataclasses

import pytest
from playwright.async_api import Page, Route

from tests.page.test_chat_page import KEY, PICTURE, SEEING, choose_other
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_only_models_that_think_get_the_setting_of_it(visiting):
    card = dataclasses.replace(CARD, capabilities=("completion", "thinking"))
    async with visiting(PretendReplica(), card=card) as visit:
        page, sent = visit.page, []
        page.on("request", lambda made: made.url.endswith("/api/chat") and sent.append(made))
        await page.locator("#capabilities").get_by_text("thinking").wait_for()
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Thinking").select_option("off")
        await page.get_by_role("button", name="Save").last.click()
        await visit.ask("Hi")
        await page.get_by_text("tokens/s").wait_for()
        await describe(page, ["completion"])
        await choose_other(page)
        await page.get_by_role("button", name="Retry").click()
        await page.get_by_text("model 'other' not found").wait_for()
        assert [request.post_data_json.get("think") for request in sent] == [False, None]


async def describe(page: Page, capabilities: list[str]) -> None:
    """From now on the page reads these capabilities of any model."""

    async def answer(route: Route) -> None:
        await route.fulfill(json={"capabilities": capabilities})

    await page.route("**/api/show", answer)


async def test_attached_pictures_go_to_no_other_chat_or_model_without_vision(visiting):
    async with visiting(PretendReplica(), card=SEEING) as visit:
        page = visit.page
        await page.get_by_text("vision").wait_for()
        await page.locator("#files").set_input_files(PICTURE)
        remove = page.get_by_role("button", name="Remove demo.png")
        await remove.wait_for()
        await page.get_by_role("button", name="New chat").click()
        assert await remove.count() == 0
        await page.locator("#files").set_input_files(PICTURE)
        await remove.wait_for()
        await describe(page, ["completion"])
        await choose_other(page)
        await visit.ask("What is it?")
        await page.get_by_text("other cannot see images.").wait_for()
        assert await page.locator("article").count() == 0
        await remove.click()
        await visit.ask("Hi")
        await page.get_by_text("model 'other' not found").wait_for()


async def test_a_server_with_keys_asks_for_one(visiting):
    async with visiting(PretendReplica(), api_keys=(api_key(KEY),)) as visit:
        await visit.page.get_by_text("This server needs an API key.").wait_for()
        await visit.page.get_by_label("Key", exact=True).fill(KEY)
        await visit.page.get_by_role("button", name="Save").last.click()
        await visit.ask("Hi")
        await visit.page.get_by_text("Hello, world").wait_for()
        stored = "[localStorage, sessionStorage].map((store) => Object.values({...store}).join())"
        local, session = await visit.page.evaluate(stored)
        assert KEY not in local
        assert KEY in session


async def test_a_message_that_lacked_a_key_can_be_sent_again(visiting):
    async with visiting(PretendReplica(), api_keys=(api_key(KEY),)) as visit:
        page, reason = visit.page, visit.page.get_by_text("This server needs an API key.")
        await reason.wait_for()
        await page.keyboard.press("Escape")
        await visit.ask("Hi")
        await reason.wait_for()
        await page.get_by_label("Key", exact=True).fill(KEY)
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Try again").click()
        await page.get_by_text("Hello, world").wait_for()
        assert await page.locator("article.user").count() == 1


@pytest.mark.parametrize("how", ["message", "visible"])
async def test_models_are_requested_again_after_a_failure(visiting, how):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await page.route("**/api/tags", lambda route: route.abort())
        await page.reload()
        await page.get_by_text("The server cannot be reached").wait_for()
        await page.unroute("**/api/tags")
        if how == "visible":
            await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            await page.get_by_text("You talk with demo.").wait_for()
            assert not await page.get_by_text("The server cannot be reached").is_visible()
        await visit.ask("Hi")
        await page.get_by_text("Hello, world").wait_for()
        assert await page.get_by_label("Model", exact=True).input_value() == "demo"


async def test_enter_saves_a_dialog_and_cancel_does_not(visiting):
    async with visiting(PretendReplica(), api_keys=(api_key(KEY),)) as visit:
        page = visit.page
        key, seed = page.get_by_label("Key", exact=True), page.get_by_label("Seed")
        await key.fill("another")
        await page.get_by_role("button", name="Cancel").click()
        await page.get_by_role("button", name="API key").click()
        assert await key.input_value() == ""
        await key.fill(KEY)
        await key.press("Enter")
        await page.get_by_text("You talk with demo.").wait_for()
        settings = page.get_by_role("button", name="Settings")
        await settings.click()
        await seed.fill("42")
        await seed.press("Enter")
        await settings.click()
        assert await seed.input_value() == "42"
        await seed.fill("43")
        await page.get_by_role("button", name="Cancel").click()
        await settings.click()
        assert await seed.input_value() == "42"
