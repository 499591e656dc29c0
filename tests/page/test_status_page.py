"""The status page in Chromium, with replicas whose state the test sets."""

import dataclasses

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Route

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.api import monitoring
from serve_app.messages.replica_status import ReplicaStatus
from tests.unit.serve_app.api.api_keys import api_key
from tests.unit.serve_app.fake_replicas import PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")
KEY = "key-of-a-test"
EVERY_MS = 2000  # between the requests of the page
ENGINE = EngineStatistics(
    running=3,
    waiting=2,
    slots=16,
    pages_total=200,
    pages_owned=50,
    queued_tokens=900,
    prompt_tokens_total=1000,
    cached_tokens_total=400,
    computed_tokens_total=600,
    completion_tokens_total=5000,
)


def state(engine: EngineStatistics, replica: str = "abcd1234") -> ReplicaStatus:
    return ReplicaStatus(replica, {"demo": dataclasses.asdict(engine)})


@pytest.fixture
def fresh(monkeypatch):
    """Each request of the page reaches the replicas."""
    monkeypatch.setattr(monitoring, "KEPT_S", 0.0)


async def test_numbers_and_plots_follow_the_replicas(visiting, fresh):
    statuses = [state(ENGINE)]
    options = {"statuses": statuses, "path": "/status", "clock": True}
    async with visiting(PretendReplica(), **options) as visit:
        page = visit.page
        await page.get_by_text("Models: 1. Replicas: 1. Requests: 3 running, 2 waiting.").wait_for()
        cells = await page.locator("tbody td").all_inner_texts()
        assert cells == ["abcd1234", "3 of 16", "2", "900", "50 of 200", "0", "5,000", "0"]
        await page.get_by_role(
            "img", name="Cache of demo: now used 25%, prefix hits 40%"
        ).wait_for()
        statuses[0] = state(dataclasses.replace(ENGINE, completion_tokens_total=6000, running=9))
        await page.clock.run_for(EVERY_MS)
        await page.get_by_role("img", name="Requests of demo: now running 9").wait_for()
        await page.locator("tbody").get_by_text("6,000").wait_for()
        outline = page.locator("figure", has_text="Requests").locator(".line-0").last
        assert "L" in (await outline.get_attribute("d"))
        statuses.append(state(ENGINE, "second"))
        await page.clock.run_for(EVERY_MS)
        await page.get_by_text("2 replicas, 32 slots").wait_for()
        statuses.clear()
        await page.clock.run_for(EVERY_MS)
        await page.get_by_text("No replica answers.").wait_for()
        assert visit.problems == []


async def test_the_speed_is_what_was_generated_between_two_answers(visiting, fresh):
    statuses = [state(ENGINE)]
    options = {"statuses": statuses, "path": "/status", "clock": True}
    async with visiting(PretendReplica(), **options) as visit:
        page = visit.page
        plot = page.locator("figure", has_text="Tokens per second").get_by_role("img")
        await page.get_by_role("img", name="generated 0,").wait_for()
        for total in range(10_000, 10_000_000, 5000):  # a late answer has no rate
            statuses[0] = state(dataclasses.replace(ENGINE, completion_tokens_total=total))
            await page.clock.run_for(EVERY_MS)
            await page.get_by_text(f"{total:,} tokens generated").wait_for()
            if not (await plot.get_attribute("aria-label")).endswith("highest 0"):
                break
        else:
            pytest.fail("no rate was shown")


@pytest.mark.parametrize("step_s", [3600, -3600])
async def test_answers_of_hosts_with_other_clocks_have_no_rates(visiting, fresh, step_s):
    sent = 0

    async def answer(route: Route) -> None:
        nonlocal sent
        sent += 1
        body = await (await route.fetch()).json()
        body["at"] = 1e9 + sent * step_s
        body["models"][0]["replicas"][0] |= {
            "completion_tokens_total": sent,
            "running": min(sent, 2),
        }
        await route.fulfill(json=body)

    async with visiting(PretendReplica(), statuses=[state(ENGINE)], clock=True) as visit:
        page = visit.page
        await page.route("**/status.json", answer)
        await page.goto(f"{visit.address}/status")
        await page.get_by_text("Requests: 1 running").wait_for()
        await page.clock.run_for(EVERY_MS)
        await page.get_by_text("Requests: 2 running").wait_for()
        await page.get_by_role("img", name="now generated –, prompts –; highest 0").wait_for()


async def test_pause_stops_the_requests(visiting, fresh):
    count = "window.asked = 0; const ask = fetch; window.fetch = (...a) => (asked++, ask(...a)); 0"
    options = {"statuses": [state(ENGINE)], "path": "/status", "clock": True}
    async with visiting(PretendReplica(), **options) as visit:
        page = visit.page
        await page.get_by_text("Requests: 3 running").wait_for()
        pause = page.get_by_role("button", name="Pause")
        await pause.click()
        await page.evaluate(count)
        assert await pause.get_attribute("aria-pressed") == "true"
        await page.clock.run_for(10_000)
        assert await page.evaluate("asked") == 0
        await pause.click()
        await page.clock.run_for(EVERY_MS)
        assert await page.evaluate("asked") > 0


async def test_a_pause_is_a_gap_in_the_plots(visiting, fresh):
    statuses = [state(ENGINE)]
    options = {"statuses": statuses, "path": "/status", "clock": True}
    async with visiting(PretendReplica(), **options) as visit:
        page = visit.page
        plot = page.locator("figure", has_text="Requests")
        pause = page.get_by_role("button", name="Pause")
        for running in (4, 5):
            statuses[0] = state(dataclasses.replace(ENGINE, running=running))
            await page.clock.run_for(EVERY_MS)
            await plot.get_by_text(f"running {running}", exact=True).wait_for()
        await pause.click()
        await page.clock.run_for(60_000)
        await pause.click()
        statuses[0] = state(dataclasses.replace(ENGINE, running=6))
        await page.clock.run_for(EVERY_MS)
        await plot.get_by_text("running 6", exact=True).wait_for()
        outline = await plot.locator(".line-0").last.get_attribute("d")
        _, before, after = outline.split("M")
        assert "L" in before
        gap = float(after.split()[0]) - float(before.split("L")[-1].split()[0])
        assert round(gap / 300 * 149) == 30


async def test_a_server_with_keys_asks_for_one(visiting, fresh):
    options = {"api_keys": (api_key(KEY),), "statuses": [state(ENGINE)]}
    async with visiting(PretendReplica(), path="/status", **options) as visit:
        await visit.page.get_by_text("This server needs an API key.").wait_for()
        await visit.page.get_by_label("Key", exact=True).fill(KEY)
        await visit.page.get_by_role("button", name="Save").click()
        await visit.page.get_by_text("Requests: 3 running").wait_for()


async def test_without_a_key_nothing_is_requested_until_one_is_given(visiting, fresh):
    options = {"api_keys": (api_key(KEY),), "statuses": [state(ENGINE)]}
    async with visiting(PretendReplica(), **options) as visit:
        page, asked = visit.page, []
        page.on("request", lambda made: made.url.endswith("/status.json") and asked.append(made))
        await page.clock.install()
        await page.goto(f"{visit.address}/status")
        await page.get_by_text("This server needs an API key.").wait_for()
        await page.keyboard.press("Escape")
        await page.get_by_text("No values without a valid API key").wait_for()
        await page.clock.run_for(10_000)
        assert len(asked) == 1
        assert await page.get_by_role("dialog").count() == 0
        await page.get_by_role("button", name="API key").click()
        await page.get_by_label("Key", exact=True).fill(KEY)
        await page.keyboard.press("Enter")
        await page.get_by_text("Requests: 3 running").wait_for()
        assert not await page.locator("#problem").is_visible()


@pytest.mark.parametrize("path", ["/status", "/docs"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious_on_a_phone(visiting, path, scheme):
    options = {"color_scheme": scheme, "viewport": {"width": 360, "height": 740}}
    statuses = [state(ENGINE)]
    async with visiting(PretendReplica(), path=path, context=options, statuses=statuses) as visit:
        page = visit.page
        await page.get_by_text("demo" if path == "/status" else "Answer a chat").first.wait_for()
        if path == "/docs":
            await page.get_by_text("/v1/chat/completions", exact=True).click()
            await page.get_by_text("/v1/responses", exact=True).click()
        found = (await Axe().run(page)).response["violations"]
        assert [each for each in found if each["impact"] in ("serious", "critical")] == []
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        assert visit.problems == []


async def test_everything_can_be_reached_with_the_keyboard(visiting, fresh):
    focused = "document.activeElement.ariaLabel ?? document.activeElement.textContent.trim()"
    async with visiting(PretendReplica(), statuses=[state(ENGINE)], path="/status") as visit:
        page = visit.page
        await page.get_by_text("Requests: 3 running").wait_for()
        reached = set()
        for _ in range(12):
            await page.keyboard.press("Tab")
            reached.add(await page.evaluate(focused))
        assert {
            "Skip to the content", "Chat", "Status", "APIs", "Pause", "Theme", "API key",
            "Replicas of demo",
        } <= reached  # fmt: skip


async def test_the_theme_is_that_of_the_other_pages(visiting, fresh):
    async with visiting(PretendReplica(), context={"color_scheme": "light"}) as visit:
        page = visit.page
        await page.get_by_role("button", name="Theme").click()
        await page.goto(f"{visit.address}/status")
        await page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
