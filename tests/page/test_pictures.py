"""Pictures on the chat page: how large they may be, and removing them from a message."""

import base64
import io
import os

import PIL.Image
import pytest

from tests.page.test_chat_page import PICTURE, SEEING
from tests.unit.serve_app.fake_replicas import PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")


def noise(mode: str, width: int, height: int) -> dict[str, object]:
    """A PNG file that cannot be compressed, as the page gets it."""
    count = width * height * len(mode)
    file = io.BytesIO()
    PIL.Image.frombytes(mode, (width, height), os.urandom(count)).save(file, "PNG")
    return {"name": "noise.png", "mimeType": "image/png", "buffer": file.getvalue()}


async def test_large_pictures_are_made_smaller_and_others_sent_as_they_are(visiting):
    small = PICTURE.read_bytes()
    async with visiting(PretendReplica(), card=SEEING) as visit:
        page, sent = visit.page, []
        page.on("request", lambda made: made.url.endswith("/api/chat") and sent.append(made))
        await page.get_by_text("vision").wait_for()
        for file in (noise("RGBA", 600, 700), noise("L", 4096, 40)):
            await page.locator("#files").set_input_files([file])
        await page.locator("#files").set_input_files(PICTURE)
        await visit.ask("What is it?")  # before they have been read
        await page.get_by_text("tokens/s").wait_for()
        images = sent[0].post_data_json["messages"][0]["images"]
        assert images[2] == base64.b64encode(small).decode()
        read = [PIL.Image.open(io.BytesIO(base64.b64decode(each))) for each in images[:2]]
        assert [(each.format, each.size) for each in read] == [
            ("JPEG", (600, 700)),
            ("JPEG", (2048, 20)),
        ]
        assert visit.problems == []


async def test_pictures_that_are_too_large_can_be_removed_from_a_message(visiting):
    async with visiting(PretendReplica(), card=SEEING) as visit:
        page = visit.page
        await page.get_by_text("vision").wait_for()
        await page.locator("#files").set_input_files([noise("RGB", 1200, 1200)])
        await page.locator("#files").set_input_files(PICTURE)
        await visit.ask("What is it?")
        await page.get_by_text("is larger than").wait_for()
        await page.get_by_role("button", name="Edit").click()
        await page.get_by_role("button", name="Remove noise.png").click()
        await page.locator("article").get_by_role("button", name="Send").click()
        await page.get_by_text("tokens/s").wait_for()
        content = visit.replica.tasks[0].prompt.messages[0].content
        assert [type(part).__name__ for part in content].count("ImagePart") == 1
        assert await page.locator("article.user img").count() == 1
