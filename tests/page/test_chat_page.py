"""The chat page in Chromium, with a fake model behind the whole ingress."""

import base64
import dataclasses
import json
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

from model_zoo.chat.formats.reply_format import format_of
from serve_app.messages.tasks import ReplyOpening
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import CARD, PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")
PICTURE = Path("models/demo.png")
SEEING = dataclasses.replace(CARD, capabilities=("completion", "vision", "tools"))
KEY = "key-of-a-test"
QWEN3 = ReplyOpening(format_of("tools <tool_call> <think> </think>"))
HOSTILE = (
    "<img src=x onerror='window.harmed=1'><script>window.harmed=1</script>\n\n"
    "[a](javascript:window.harmed=1) [b](https://example.org/) ![c](https://example.org/c.png)\n\n"
    "```html\n<svg onload='window.harmed=1'>\n```\n\n|<b>|\n|-|\n|<iframe src=javascript:1>|\n"
)
MARKDOWN = """# One

Two **three** *four* `five` ~~six~~ 2 * 3 * 4 snake_case_name

- a
  - b
- [x] c

3. d
4. e

> f

| g | h |
|---|--:|
| 1 | `a\\|b` |

```python
def f():  # comment
    return "text"
```
"""


async def choose_other(page: Page) -> None:
    await page.evaluate("document.querySelector('#model').add(new Option('other'))")
    await page.get_by_label("Model", exact=True).select_option("other")


async def test_an_answer_is_streamed_and_its_speed_is_shown(visiting):
    async with visiting(PretendReplica()) as visit:
        await visit.ask("Hi")
        await visit.page.get_by_text("Hello, world").wait_for()
        await visit.page.get_by_text("tokens/s").wait_for()
        assert await visit.page.locator("article.user .text").inner_text() == "Hi"
        assert await visit.page.locator("#chats .open").all_inner_texts() == ["Hi"]
        assert visit.problems == []


async def test_pictures_are_attached_by_button_paste_and_drop(visiting):
    give = """async ([kind, data]) => {
      const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], `${kind}.png`, {type: "image/png"}));
      const event = kind === "paste"
        ? new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true, cancelable: true})
        : new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true});
      document.querySelector("#text").dispatchEvent(event);
    }"""
    encoded = base64.b64encode(PICTURE.read_bytes()).decode()
    async with visiting(PretendReplica(), card=SEEING) as visit:
        page = visit.page
        await page.get_by_text("vision").wait_for()
        await page.locator("#files").set_input_files(PICTURE)
        await page.evaluate(give, ["paste", encoded])
        await page.evaluate(give, ["drop", encoded])
        await page.get_by_role("button", name="Remove drop.png").wait_for()
        await page.get_by_role("button", name="Remove paste.png").click()
        await visit.ask("What is it?")
        await page.get_by_text("Hello, world").wait_for()
        shown = page.locator("article.user img")
        assert await shown.count() == 2
        assert await shown.first.evaluate("image => image.naturalWidth") > 0
        images = visit.replica.tasks[0].prompt.messages[0].content
        assert [type(part).__name__ for part in images].count("ImagePart") == 2
        assert visit.problems == []


async def test_a_message_that_is_sent_before_stored_chats_are_read_is_answered(visiting):
    early = """document.addEventListener("DOMContentLoaded", () => {
        document.getElementById("text").value = "Hi";
        document.getElementById("form").requestSubmit();
    })"""
    async with visiting(PretendReplica()) as visit:
        await visit.page.add_init_script(early)
        await visit.page.reload()
        await visit.page.get_by_text("Hello, world").wait_for()
        assert [task.prompt.messages[0].text for task in visit.replica.tasks] == ["Hi"]
        assert visit.problems == []


@pytest.mark.parametrize("how", ["button", "key"])
async def test_an_answer_can_be_stopped(visiting, how):
    replica = PretendReplica()
    replica.waits.clear()
    async with visiting(replica) as visit:
        await visit.ask("Hi")
        await visit.page.locator("article.assistant").get_by_text("Hello").wait_for()
        if how == "button":
            await visit.page.get_by_role("button", name="Stop").click()
        else:
            await visit.page.keyboard.press("Escape")
        await visit.page.get_by_text("stopped", exact=True).wait_for()
        assert await visit.page.locator("article.assistant .markdown").inner_text() == "Hello"
        await visit.page.reload()
        await visit.page.locator("article.assistant").get_by_text("Hello").wait_for()
    assert replica.left == 1


async def test_an_answer_is_kept_when_another_chat_is_opened(visiting):
    replica = PretendReplica()
    replica.waits.clear()
    async with visiting(replica) as visit:
        page, chats = visit.page, visit.page.locator("#chats .open")
        answer = page.locator("article.assistant .markdown")
        await visit.ask("Hi")
        await answer.get_by_text("Hello").wait_for()
        await page.get_by_role("button", name="New chat").click()
        await page.locator("#announce").get_by_text("stopped").wait_for()
        assert await chats.all_inner_texts() == ["Hi"]
        await chats.click()
        assert await answer.inner_text() == "Hello"
        await page.reload()
        await answer.get_by_text("Hello").wait_for()
        assert await chats.all_inner_texts() == ["Hi"]
        assert visit.problems == []


async def test_a_chat_that_is_deleted_during_an_answer_stays_deleted(visiting):
    replica = PretendReplica()
    replica.waits.clear()
    async with visiting(replica) as visit:
        page, chats = visit.page, visit.page.locator("#chats .open")
        page.on("dialog", lambda dialog: dialog.accept())
        await visit.ask("Hi")
        await page.locator("article.assistant").get_by_text("Hello").wait_for()
        await page.get_by_role("button", name="Delete the chat Hi").click()
        await page.locator("#announce").get_by_text("stopped").wait_for()
        assert await chats.count() == 0
        await page.reload()
        await page.get_by_text("You talk with demo.").wait_for()
        assert await chats.count() == 0
        assert await page.locator("article").count() == 0


async def test_the_end_of_an_answer_neither_scrolls_nor_closes_anything(visiting):
    long = "<think>\nhm</think>\n\n" + "line\n\n" * 200
    replica = PretendReplica((long, "end"), QWEN3)
    replica.waits.clear()
    async with visiting(replica) as visit:
        page = visit.page
        await visit.ask("Hi")
        await page.get_by_text("Thinking", exact=True).click()
        selected = page.locator("article.assistant .markdown p").first
        await selected.select_text()
        await page.locator("#main").evaluate("main => main.scrollTop = 1")
        replica.waits.set()
        await page.get_by_text("tokens/s").wait_for()
        assert await page.locator("#main").evaluate("main => main.scrollTop") == 1
        assert await page.get_by_text("hm", exact=True).is_visible()
        assert await page.evaluate("getSelection().toString()") == "line"
        await page.get_by_role("button", name="Retry").click()
        await page.get_by_text("2 / 2").wait_for()
        distance = "main => main.scrollHeight - main.scrollTop - main.clientHeight"
        assert await page.locator("#main").evaluate(distance) < 2, "it follows from the end"


async def test_a_reload_keeps_the_chat_and_its_settings(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Temperature").fill("0.25")
        await page.get_by_role("button", name="Save").last.click()
        await visit.ask("Hi")
        await visit.answered()
        await page.get_by_text("tokens/s").wait_for()
        await page.reload()
        await page.get_by_text("Hello, world").wait_for()
        await visit.ask("Again")
        await page.locator("article.assistant").nth(1).get_by_text("Hello, world").wait_for()
        task = visit.replica.tasks[-1]
        assert [message.role for message in task.prompt.messages] == [
            "system", "user", "assistant", "user",
        ]  # fmt: skip
        assert task.sampling.temperature == 0.25
        assert visit.problems == []


async def test_an_answer_cannot_put_elements_or_scripts_into_the_page(visiting):
    async with visiting(PretendReplica((HOSTILE,))) as visit:
        await visit.ask(HOSTILE)
        await visit.page.get_by_text("tokens/s").wait_for()
        messages = visit.page.locator("#messages")
        assert await messages.locator("img, script, svg, iframe, b").count() == 0
        links = messages.locator("a")
        addresses = [await link.get_attribute("href") for link in await links.all()]
        assert addresses == ["https://example.org/", "https://example.org/c.png"]
        assert await visit.page.evaluate("window.harmed") is None
        assert visit.problems == []


async def test_text_from_right_to_left_is_shown_so_and_code_is_not(visiting):
    answer = (
        "مرحبا hello\n\n- واحد\n\n> اثنان\n\n| ثلاثة |\n|-|\n\n1. one `שלום`\n\n```\nשלום\n```\n"
    )
    directions = """(selectors) => selectors.map((each) =>
      getComputedStyle(document.querySelector(each)).direction).join(" ")"""
    right = ["p", "ul > li", "blockquote", "table", "ul span"]
    async with visiting(PretendReplica((answer,))) as visit:
        await visit.ask("!שלום")
        await visit.page.get_by_text("tokens/s").wait_for()
        await visit.page.locator("#text").fill("مرحبا")
        found = [f".markdown {each}" for each in right] + ["#text", ".user .text", "#chats .open"]
        assert await visit.page.evaluate(directions, found) == " ".join(["rtl"] * len(found))
        left = ["ol li", "ol code", "figure", "pre", "pre code"]
        assert await visit.page.evaluate(directions, left) == " ".join(["ltr"] * len(left))


async def test_an_edited_message_and_another_answer_are_branches(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await visit.ask("First")
        await page.get_by_text("tokens/s").wait_for()
        await page.get_by_role("button", name="Retry").click()
        await page.get_by_text("2 / 2").wait_for()
        await page.get_by_role("button", name="Edit").click()
        await page.get_by_label("Edit the message").fill("Second")
        await page.locator("article.user").get_by_role("button", name="Send").click()
        await page.locator("article.user").get_by_text("2 / 2").wait_for()
        assert await page.locator("article.user .text").inner_text() == "Second"
        await page.locator("article.user").get_by_label("Previous version").click()
        assert await page.locator("article.user .text").inner_text() == "First"
        assert await page.get_by_text("2 / 2").count() == 1, "the answers of the first"
        sent = [task.prompt.messages[-1].text for task in visit.replica.tasks]
        assert sent == ["First", "First", "Second"]


async def test_thinking_is_folded_and_calls_take_results(visiting):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    replica = PretendReplica(("<think>\nhm</think>\n\n", call), QWEN3)
    tools = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'
    async with visiting(replica, card=SEEING) as visit:
        page = visit.page
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Tools, a JSON list").fill("[")
        await page.get_by_role("button", name="Save").last.click()
        await page.get_by_text("Tools: ").wait_for()
        await page.get_by_label("Tools, a JSON list").fill(tools)
        await page.get_by_role("button", name="Save").last.click()
        await visit.ask("Hi")
        await page.get_by_text("Calls add").wait_for()
        assert not await page.get_by_text("hm", exact=True).is_visible()
        await page.get_by_text("Thinking", exact=True).first.click()
        assert await page.get_by_text("hm", exact=True).is_visible()
        await page.get_by_label("Result of add").fill("4\n  2")
        replica.words, replica.opening = ("Done",), None
        await page.get_by_role("button", name="Send the result").click()
        await page.get_by_text("Done").wait_for()
        assert await page.locator("article.tool .text").inner_text() == "4\n  2"
        messages = replica.tasks[-1].prompt.messages
        assert [message.role for message in messages] == ["user", "assistant", "tool"]
        assert (messages[1].tool_calls[0].name, messages[2].text) == ("add", "4\n  2")


async def test_an_edited_result_waits_for_the_others(visiting):
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    replica = PretendReplica((f"{call % 'one'}\n{call % 'two'}",), QWEN3)
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    async with visiting(replica, card=SEEING) as visit:
        page = visit.page
        await page.get_by_role("button", name="Settings").click()
        await page.get_by_label("Tools, a JSON list").fill(json.dumps(tools))
        await page.get_by_role("button", name="Save").last.click()
        await visit.ask("Hi")
        await page.get_by_label("Result of one").fill("1")
        replica.words, replica.opening = ("Done",), None
        await page.get_by_role("button", name="Send the result").click()
        await page.get_by_label("Result of two").wait_for()
        await page.locator("article.tool").get_by_role("button", name="Edit").click()
        await page.get_by_label("Edit the message").fill("1.0")
        await page.locator("article.tool").get_by_role("button", name="Send").click()
        await page.locator("article.tool").get_by_text("2 / 2").wait_for()
        await page.get_by_label("Result of two").fill("2")
        await page.get_by_role("button", name="Send the result").click()
        await page.get_by_text("Done").wait_for()
        assert [len(task.prompt.messages) for task in replica.tasks] == [1, 4]
        assert [each.text for each in replica.tasks[-1].prompt.messages[2:]] == ["1.0", "2"]


async def test_enter_of_an_input_method_sends_nothing(visiting):
    press = """() => document.querySelector("#text").dispatchEvent(
      new KeyboardEvent("keydown", {key: "Enter", keyCode: 229, bubbles: true}))"""
    async with visiting(PretendReplica()) as visit:
        await visit.page.get_by_label("Message", exact=True).last.fill("H")
        await visit.page.evaluate(press)
        await visit.ask("Hi")
        await visit.page.get_by_text("Hello, world").wait_for()
        assert [task.prompt.messages[0].text for task in visit.replica.tasks] == ["Hi"]


async def test_a_browser_that_blocks_site_data_has_all_but_that(visiting):
    blocked = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
      Object.defineProperty(window, name, {get() {
        throw new DOMException("denied", "SecurityError");
      }});
    }
    window.BroadcastChannel = class {
      constructor() { throw new DOMException("denied", "SecurityError"); }
    };"""
    async with visiting(PretendReplica(), api_keys=(api_key(KEY),)) as visit:
        page = visit.page
        await page.add_init_script(blocked)
        await page.reload()
        await page.get_by_label("Key", exact=True).fill(KEY)
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Theme").click()
        await page.wait_for_function("document.documentElement.dataset.theme")
        await visit.ask("Hi")
        await page.get_by_text("Hello, world").wait_for()
        assert await page.locator("#chats .open").all_inner_texts() == ["Hi"]


async def test_a_chat_is_exported_as_markdown(visiting):
    async with visiting(PretendReplica()) as visit:
        await visit.ask("Hi there")
        await visit.page.get_by_text("tokens/s").wait_for()
        async with visit.page.expect_download() as started:
            await visit.page.get_by_role("button", name="Export").click()
        download = await started.value
        assert download.suggested_filename == "Hi-there.md"
        text = Path(await download.path()).read_text()
        assert text == "# Hi there\n\n## You\n\nHi there\n\n## demo\n\nHello, world\n"


async def test_a_failing_answer_is_reported_and_can_be_repeated(visiting):
    replica = PretendReplica()
    replica.fails_after = 0
    async with visiting(replica) as visit:
        await visit.ask("Hi")
        await visit.page.get_by_text("the engine broke").wait_for()
        assert await visit.page.locator("article.assistant").count() == 0
        await visit.answered()
        assert await visit.page.locator("#announce").text_content() == ""
        replica.fails_after = None
        await visit.page.get_by_role("button", name="Try again").click()
        await visit.page.get_by_text("Hello, world").wait_for()
        assert not await visit.page.get_by_text("the engine broke").is_visible()
        assert await visit.page.locator("article.user").count() == 1


async def test_an_empty_chat_says_what_can_be_done_and_suggests_questions(visiting):
    async with visiting(PretendReplica(), card=SEEING) as visit:
        page = visit.page
        await page.get_by_text("You talk with demo. Drop or paste a picture").wait_for()
        await page.get_by_role("button", name="What is 17 + 25?").click()
        await page.get_by_text("Hello, world").wait_for()
        assert not await page.get_by_text("You talk with demo.").is_visible()
        assert visit.replica.tasks[0].prompt.messages[-1].text == "What is 17 + 25?"
        await page.get_by_role("button", name="New chat").click()
        assert await page.get_by_text("You talk with demo.").is_visible()


async def test_an_answer_keeps_the_name_of_its_model(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await visit.ask("Hi")
        await page.get_by_text("tokens/s").wait_for()
        await choose_other(page)
        await page.get_by_role("button", name="Retry").click()
        await page.get_by_text("model 'other' not found").wait_for()
        await page.locator("article.assistant h2", has_text="demo").wait_for()


async def test_code_is_copied_where_the_browser_offers_no_clipboard(visiting):
    async with visiting(PretendReplica((MARKDOWN,))) as visit:
        page = visit.page
        await page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        await visit.ask("Hi")
        await page.get_by_text("tokens/s").wait_for()
        await page.locator("figure.code").get_by_role("button", name="Copy").click()
        await page.locator("figure.code").get_by_role("button", name="Copied").wait_for()
        await page.get_by_label("Message", exact=True).last.focus()
        await page.keyboard.press("Control+v")
        pasted = await page.get_by_label("Message", exact=True).last.input_value()
        assert pasted == 'def f():  # comment\n    return "text"'


async def test_a_phone_shows_everything_within_its_width(visiting):
    size = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    wide = (
        "| "
        + " | ".join(["column"] * 12)
        + " |\n"
        + "|-" * 12
        + "|\n\n```\n"
        + "x" * 300
        + "\n```\n"
    )
    async with visiting(PretendReplica((wide, "y" * 300)), context=size) as visit:
        page = visit.page
        await visit.ask("Hi" * 200)
        await page.get_by_text("tokens/s").wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        send = await page.get_by_role("button", name="Send", exact=True).bounding_box()
        assert send["x"] + send["width"] <= 360
        assert send["y"] + send["height"] <= 740
        await page.get_by_role("button", name="Open the list of chats").click()
        await page.get_by_role("button", name="New chat").click()
        assert await page.locator("article").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(visiting, scheme):
    async with visiting(PretendReplica((MARKDOWN,)), context={"color_scheme": scheme}) as visit:
        await visit.ask("Hi")
        await visit.page.get_by_text("tokens/s").wait_for()
        for opened in (None, "Settings", "API key"):
            if opened is not None:
                await visit.page.get_by_role("button", name=opened).click()
            found = (await Axe().run(visit.page)).response["violations"]
            serious = [each for each in found if each["impact"] in ("serious", "critical")]
            assert serious == [], opened
            await visit.page.keyboard.press("Escape")


async def test_everything_can_be_reached_with_the_keyboard(visiting):
    async with visiting(PretendReplica()) as visit:
        page = visit.page
        await visit.ask("Hi")
        await page.get_by_text("tokens/s").wait_for()
        reached, focused = set(), "document.activeElement.id || document.activeElement.textContent"
        for _ in range(40):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate(focused))
        expected = {"new-chat", "model", "messages", "text", "send", "export", "open-settings"}
        assert expected | {"Hi", "Edit", "Retry", "Copy", "theme", "open-key"} <= reached
        await page.keyboard.press("Alt+n")
        assert await page.locator("article").count() == 0
        assert await page.evaluate(focused) == "text"
