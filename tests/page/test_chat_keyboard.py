"""The chat page with a keyboard: where the focus is, and which keys do what."""

import pytest
from playwright.async_api import Locator

from tests.page.test_chat_page import choose_other
from tests.unit.serve_app.fake_replicas import PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")
FOCUSED = """() => {
  const { id, ariaLabel, textContent } = document.activeElement;
  return id || ariaLabel || textContent;
}"""


async def press(button: Locator) -> None:
    await button.focus()
    await button.page.keyboard.press("Enter")


async def test_the_focus_stays_where_something_is_left_to_have_it(visiting):
    replica = PretendReplica()
    async with visiting(replica) as visit:
        page, answers = visit.page, visit.page.locator("article.assistant")
        page.on("dialog", lambda dialog: dialog.accept())
        for question in ("One", "Two", "Three"):
            await page.get_by_role("button", name="New chat").click()
            await visit.ask(question)
            await page.get_by_text("tokens/s").wait_for()
        await press(page.locator("#chats .open", has_text="One"))
        await page.locator("article.user").get_by_text("One").wait_for()
        assert await page.evaluate(FOCUSED) == "One"
        replica.waits.clear()
        await page.locator("#text").fill("More")
        await press(page.locator("#send"))
        await answers.nth(1).get_by_text("Hello").wait_for()
        assert await page.evaluate(FOCUSED) == "text"
        await page.locator("#chats .open", has_text="Two").focus()
        replica.waits.set()
        await page.get_by_text("tokens/s").nth(1).wait_for()
        assert await page.evaluate(FOCUSED) == "Two"
        await press(page.get_by_role("button", name="Delete the chat Two"))
        await page.locator("#chats").get_by_text("Two").wait_for(state="detached")
        assert await page.evaluate(FOCUSED) == "Delete the chat One"


async def test_the_focus_of_removed_buttons_goes_to_what_replaces_them(visiting):
    replica = PretendReplica()
    async with visiting(replica) as visit:
        page, answer = visit.page, visit.page.locator("article.assistant")
        await visit.ask("Hi")
        await page.get_by_text("tokens/s").wait_for()
        replica.waits.clear()
        await press(page.get_by_role("button", name="Retry"))
        await answer.get_by_text("Hello").wait_for()
        assert await page.evaluate(FOCUSED) == "text"
        await press(page.locator("#stop"))
        await page.get_by_text("stopped", exact=True).wait_for()
        assert await page.evaluate(FOCUSED) == "text"
        replica.waits.set()
        await press(page.get_by_role("button", name="Retry"))
        await page.get_by_text("3 / 3").wait_for()
        await press(page.get_by_role("button", name="Previous version"))
        await page.get_by_text("2 / 3").wait_for()
        assert await page.evaluate(FOCUSED) == "Previous version"
        await press(page.get_by_role("button", name="Previous version"))
        await page.get_by_text("1 / 3").wait_for()
        assert await page.evaluate(FOCUSED) == "text"
        await press(page.get_by_role("button", name="Edit"))
        assert await page.evaluate(FOCUSED) == "Edit the message"
        await press(page.get_by_role("button", name="Cancel"))
        assert await page.evaluate(FOCUSED) == "Edit"
        await choose_other(page)
        await press(page.get_by_role("button", name="Retry"))
        await page.get_by_text("model 'other' not found").wait_for()
        assert await page.evaluate(FOCUSED) == "text"


async def test_keys_that_write_neither_stop_an_answer_nor_open_a_chat(visiting):
    press_it = """(pressed) => document.querySelector("#text").dispatchEvent(
      new KeyboardEvent("keydown", {...pressed, bubbles: true, cancelable: true}))"""
    keys = [
        {"key": "Escape", "isComposing": True},
        {"key": "Escape", "keyCode": 229},
        {"key": "ń", "code": "KeyN", "altKey": True},
        {"key": "Dead", "code": "KeyN", "altKey": True},
    ]
    replica = PretendReplica()
    replica.waits.clear()
    async with visiting(replica) as visit:
        answer = visit.page.locator("article.assistant")
        await visit.ask("Hi")
        await answer.get_by_text("Hello").wait_for()
        for key in keys:
            assert await visit.page.evaluate(press_it, key), "the browser does the usual"
        replica.waits.set()
        await visit.page.get_by_text("tokens/s").wait_for()
        assert await answer.locator(".markdown").inner_text() == "Hello, world"


async def test_a_dialog_gets_the_keys_of_the_page_below(visiting):
    async with visiting(PretendReplica()) as visit:
        await visit.ask("Hi")
        await visit.page.get_by_text("tokens/s").wait_for()
        await visit.page.get_by_role("button", name="Settings").click()
        await visit.page.keyboard.press("Alt+n")
        assert await visit.page.locator("article").count() == 2


async def test_text_that_is_pasted_with_a_picture_or_dropped_stays_text(visiting):
    give = """([kind, type, text]) => {
      const data = new DataTransfer();
      if (type) data.items.add(new File(["x"], "given", {type}));
      if (text) data.setData("text/plain", text);
      const event = kind === "paste"
        ? new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true})
        : new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true});
      return document.querySelector("#text").dispatchEvent(event);
    }"""
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await page.get_by_text("You talk with demo.").wait_for()
        assert await page.evaluate(give, ["paste", "image/png", "a\tb"])
        assert await page.evaluate(give, ["drop", "", "dragged"])
        assert await page.locator("#problem").text_content() == ""
        assert not await page.evaluate(give, ["drop", "application/pdf", ""])
        await page.get_by_text("given is not an image.").wait_for()
