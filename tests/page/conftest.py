"""Chromium, and the ingress with a fake model on a port."""

import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

from tests.patience import HANG_S
from tests.unit.serve_app.fake_replicas import PretendReplica, ingress
from tests.unit.serve_app.sockets import listening

# The shell takes half of the processor time.
NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# Chromium has no sandbox for root.
ARGUMENTS = ["--no-sandbox"] if os.geteuid() == 0 else []


class Visit:
    """A page on a server of its own. `problems`: errors of scripts, and foreign requests."""

    def __init__(self, page: Page, replica: PretendReplica, address: str) -> None:
        self.page, self.replica, self.address = page, replica, address
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self._console(message.type, message.text))
        page.on("request", lambda request: self._requested(request.url))

    def _console(self, kind: str, text: str) -> None:
        if kind == "error":
            self.problems.append(text)

    def _requested(self, url: str) -> None:
        if not url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"request to {url}")

    async def ask(self, text: str) -> None:
        await self.page.get_by_label("Message", exact=True).last.fill(text)
        await self.page.keyboard.press("Enter")

    async def answered(self) -> None:
        await self.page.get_by_role("button", name="Send", exact=True).wait_for()


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    async with (
        async_playwright() as tool,
        await tool.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS) as launched,
    ):
        yield launched


@pytest.fixture
def visiting(browser: Browser) -> Callable[..., AbstractAsyncContextManager[Visit]]:
    """`async with visiting(replica, path=..., context=..., clock=..., **access)`: a `Visit` in a
    browser context of its own, by default to the chat page. `context`: as Playwright has it;
    `clock`: whether `page.clock` can run ahead; `access`: as `ingress` has it."""
    return partial(_visit, browser)


@asynccontextmanager
async def _visit(
    browser: Browser,
    replica: PretendReplica,
    *,
    path: str = "/",
    context: dict[str, Any] | None = None,
    clock: bool = False,
    **access: Any,
) -> AsyncIterator[Visit]:
    async with (
        ingress(replica, max_body_bytes=2**20, **access) as app,
        listening(app) as port,
        await browser.new_context(**(context or {})) as opened,
    ):
        page = await opened.new_page()
        opened.set_default_timeout(HANG_S * 1000)
        visit = Visit(page, replica, f"http://127.0.0.1:{port}")
        if clock:
            await page.clock.install()
        await page.goto(visit.address + path)
        yield visit
