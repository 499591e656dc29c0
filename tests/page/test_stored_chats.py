"""Chats in the browser's store, with a chat page in one tab and in two."""

import pytest
from playwright.async_api import Page

from tests.unit.serve_app.fake_replicas import PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")
QUESTIONS = "article.user .text"
# As Chromium reports a large value whose file is lost.
LOSE = """(lost) => {
  const get = IDBObjectStore.prototype.get;
  IDBObjectStore.prototype.get = function (id) {
    const request = get.call(this, id);
    if (lost(id)) {
      Object.defineProperty(request, "error", {get: () => new DOMException("lost", "DataError")});
      this.transaction.abort();
    }
    return request;
  };
  const all = IDBObjectStore.prototype.getAll;
  IDBObjectStore.prototype.getAll = function () {
    this.transaction.abort();
    return all.call(this);
  };
}"""


async def chats_of(page: Page) -> list[str]:
    return await page.locator("#chats .open").all_inner_texts()


async def test_a_chat_that_the_browser_has_lost_leaves_the_others(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        page.on("dialog", lambda dialog: dialog.accept())
        await visit.ask("One")
        await page.get_by_text("tokens/s").wait_for()
        await page.get_by_role("button", name="New chat").click()
        await visit.ask("Two")
        await page.get_by_text("tokens/s").wait_for()
        (two, _one) = await page.evaluate(
            "import('/page/store.js').then((store) => store.allChats())"
        )
        await page.add_init_script(f"({LOSE})((id) => id === '{two['id']}')")
        await page.reload()
        await page.locator(QUESTIONS).get_by_text("One").wait_for()
        await visit.ask("More")
        await page.locator(QUESTIONS).get_by_text("More").wait_for()
        lost = "(a chat that cannot be read)"
        assert await chats_of(page) == ["One", lost]
        assert await page.get_by_role("button", name=lost, exact=True).is_disabled()
        await page.get_by_role("button", name=f"Delete the chat {lost}").click()
        assert await chats_of(page) == ["One"]
        assert visit.problems == []


async def test_a_store_that_cannot_be_read_is_reported_and_the_page_works(visiting):
    broken = """IDBObjectStore.prototype.getAllKeys = IDBObjectStore.prototype.getAll = () => {
      throw new DOMException("damaged", "UnknownError");
    }"""
    async with visiting(PretendReplica()) as visit:
        await visit.page.add_init_script(broken)
        await visit.page.reload()
        await visit.page.get_by_text("The stored chats cannot be read: damaged").wait_for()
        await visit.ask("Hi")
        await visit.page.get_by_text("Hello, world").wait_for()
        assert visit.problems == []


async def test_tabs_show_what_others_store_and_delete(visiting):
    async with visiting(PretendReplica()) as visit:
        first, second = visit.page, await visit.page.context.new_page()
        await visit.ask("One")
        await first.get_by_text("tokens/s").wait_for()
        await second.goto(visit.address)
        await second.get_by_text("Hello, world").wait_for()
        await second.locator("#text").fill("Two")
        await second.keyboard.press("Enter")
        await first.get_by_text("tokens/s").nth(1).wait_for()
        assert await first.locator(QUESTIONS).all_inner_texts() == ["One", "Two"]
        await visit.ask("Three")
        await second.get_by_text("tokens/s").nth(2).wait_for()
        await second.reload()
        await second.get_by_text("tokens/s").nth(2).wait_for()
        assert await second.locator(QUESTIONS).all_inner_texts() == ["One", "Two", "Three"]
        first.on("dialog", lambda dialog: dialog.accept())
        await first.get_by_role("button", name="Delete the chat One").click()
        await second.locator("article").first.wait_for(state="detached")
        await second.locator("#text").fill("Four")
        await second.keyboard.press("Enter")
        await first.locator("#chats").get_by_text("Four").wait_for()
        assert await chats_of(first) == ["Four"]
        assert visit.problems == []


async def test_two_tabs_that_answer_in_one_chat_keep_both_versions(visiting):
    replica = PretendReplica()
    async with visiting(replica) as visit:
        first, second = visit.page, await visit.page.context.new_page()
        await visit.ask("One")
        await first.get_by_text("tokens/s").wait_for()
        await second.goto(visit.address)
        await second.get_by_text("Hello, world").wait_for()
        replica.waits.clear()
        await visit.ask("First")
        await first.locator("article.assistant").nth(1).get_by_text("Hello").wait_for()
        await second.locator(QUESTIONS).get_by_text("First").wait_for()
        await second.bring_to_front()  # others draw no frames
        await second.locator("#text").fill("Second")
        await second.keyboard.press("Enter")
        await second.locator(QUESTIONS).get_by_text("Second").wait_for()
        await second.locator("article.assistant").last.get_by_text("Hello").wait_for()
        replica.waits.set()
        for page in (first, second):
            await page.get_by_text("tokens/s").nth(1).wait_for()
        await first.locator("#chats").get_by_text("One (copy)").wait_for()
        await second.locator("#chats").get_by_text("One (copy)").wait_for()
        await first.reload()
        shown = []
        for chat in await first.locator("#chats .open").all():
            await chat.click()
            await first.get_by_text("tokens/s").nth(1).wait_for()
            shown.append(await first.locator(QUESTIONS).all_inner_texts())
        assert sorted(shown) == [["One", "First"], ["One", "First", "Second"]]
        assert visit.problems == []


@pytest.mark.parametrize("how", ["time", "hidden"])
async def test_an_answer_is_stored_before_it_ends(visiting, how):
    hide = """Object.defineProperty(document, "hidden", {value: true});
      document.dispatchEvent(new Event("visibilitychange"));"""
    replica = PretendReplica()
    replica.waits.clear()
    async with visiting(replica) as visit:
        page = visit.page
        await page.clock.install()
        await page.reload()
        await page.get_by_text("You talk with demo.").wait_for()
        await visit.ask("Hi")
        await page.locator("article.assistant").get_by_text("Hello").wait_for()
        if how == "time":
            await page.clock.run_for(5000)
        else:
            await page.evaluate(hide)
        other = await page.context.new_page()
        await other.goto(visit.address)
        await other.locator("article.assistant").get_by_text("Hello").wait_for()
