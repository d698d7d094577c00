"""The page in a real browser, over operations on a dictionary; tests/serving has it on a real server."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from memory_operations import DIGEST, MemoryOperations, engine, listed, rejected
from playwright.async_api import Browser, Page, async_playwright, expect

from lora_plugin.admin.app import create_app
from lora_plugin.admin.callers import Tokens
from lora_plugin.admin.models import ExtentView
from lora_plugin.directory.events import EventKind, EventLog
from lora_plugin.errors import Code, Reason

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "correct horse"
MARKUP = "<img src=x onerror=\"document.title='taken'\">"


@pytest.fixture
def operations() -> MemoryOperations:
    tenants = [listed(f"tenant-{number:02}") for number in range(30)]
    reason = Reason(Code.TENSOR_UNKNOWN, f"the tensor {MARKUP} fits nothing", hint="look at its base model")
    odd = rejected("odd", reason).model_copy(update={"warnings": ("a folder in it is not looked at",)})
    made = MemoryOperations(listed("sql"), listed("busy", requests=2), odd, *tenants)
    extents = (
        ExtentView(slab=0, adapter="sql", version=DIGEST, first_row=0, rows=16, pinned=True, requests=1),
        ExtentView(slab=1, adapter="busy", version=DIGEST, first_row=80, rows=32, pinned=False, requests=2),
    )
    made.engines = (engine(*extents),)
    return made


@pytest.fixture
def log() -> EventLog:
    return EventLog()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium: dict[str, Any]) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(**chromium)
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, operations: MemoryOperations, log: EventLog) -> AsyncIterator[Page]:
    """The page, opened; whatever its console has to say fails the test."""
    async with TestServer(create_app(operations, events=log)) as server:
        opened = await browser.new_page()
        said: list[str] = []
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        await opened.goto(str(server.make_url("/")))
        await expect(opened.locator("#connection")).to_have_text("connected")
        yield opened
        # Its event stream would keep the server waiting.
        await opened.close()
    # A refusal is the page's own to show; Chromium mentions it all the same.
    assert [text for text in said if "409 (Conflict)" not in text] == []


def row(page: Page, name: str) -> Any:
    return page.locator(f'tr[data-name="{name}"]')


async def test_it_shows_and_finds_adapters(page: Page) -> None:
    await expect(page.locator("#count")).to_have_text("1 to 25 of 33")
    await expect(row(page, "sql")).to_contain_text(DIGEST[:12])
    await page.get_by_role("button", name="Next").click()
    await expect(page.locator("#count")).to_have_text("26 to 33 of 33")
    await page.get_by_label("Search").fill("tenant-07")
    await expect(page.locator("#adapters tr")).to_have_count(1)
    await page.get_by_label("Search").fill("")
    await page.get_by_label("State").select_option("rejected")
    await expect(page.locator("#count")).to_have_text("1 to 1 of 1")
    await page.get_by_label("State").select_option("")
    await page.get_by_role("button", name="Requests").click()
    await expect(page.locator("#adapters tr").first).to_have_attribute("data-name", "busy")


async def test_words_of_an_adapter_are_no_markup(page: Page) -> None:
    await expect(page.locator("tr.reason")).to_contain_text(MARKUP)
    await expect(page.locator("tr.reason")).to_contain_text("look at its base model")
    await expect(page.locator("tr.warning")).to_contain_text("a folder in it is not looked at")
    await expect(page.locator('tr[data-name="odd"] .size')).to_have_text("\u2013")
    assert await page.locator("img").count() == 0
    assert await page.title() == "LoRA adapters"


async def test_the_pool_is_drawn_to_scale(page: Page) -> None:
    slabs = page.locator(".slab")
    await expect(slabs).to_have_count(4)
    whole = await slabs.nth(1).bounding_box()
    part = await page.locator(".extent", has_text="busy").bounding_box()
    assert whole is not None
    assert part is not None
    assert (part["x"] - whole["x"]) / whole["width"] == pytest.approx(16 / 64, abs=0.01)
    assert part["width"] / whole["width"] == pytest.approx(32 / 64, abs=0.01)


async def test_what_takes_something_away_asks_first(page: Page, operations: MemoryOperations) -> None:
    await page.get_by_role("button", name="Unload sql").click()
    await page.keyboard.press("Escape")
    await expect(page.locator("#confirm")).to_be_hidden()
    assert operations.views["sql"].state == "listed"
    await page.get_by_role("button", name="Unload sql").click()
    await page.locator("#confirm-yes").click()
    await expect(row(page, "sql").locator(".state")).to_have_text("unloaded")
    await page.get_by_role("button", name="Reload sql").click()
    await expect(row(page, "sql").locator(".state")).to_have_text("listed")


async def test_a_refusal_is_shown_with_what_to_do(page: Page) -> None:
    await page.get_by_role("button", name="Pin sql", exact=True).focus()
    await page.keyboard.press("Enter")
    await expect(row(page, "sql").locator(".pinned")).to_be_visible()
    await page.get_by_role("button", name="Evict sql").click()
    await page.locator("#confirm-yes").click()
    await expect(page.get_by_role("alert")).to_contain_text("'sql' is pinned; unpin it first")


async def test_events_appear_by_themselves(page: Page, log: EventLog) -> None:
    log.record(EventKind.UPDATED, "sql", time=time.time(), version=DIGEST)
    log.deliver()
    await expect(page.locator("#events li").first).to_contain_text(f"updated sql {DIGEST[:12]}")


async def test_the_token_is_asked_for_once(browser: Browser, operations: MemoryOperations) -> None:
    async with TestServer(create_app(operations, tokens=Tokens(TOKEN))) as server:
        page = await browser.new_page()
        await page.goto(str(server.make_url("/")))
        await page.get_by_role("textbox", name="Token of the admin endpoint").fill(TOKEN)
        await page.keyboard.press("Enter")
        await expect(row(page, "sql")).to_be_visible()
        await page.reload()
        await expect(row(page, "sql")).to_be_visible()
        await expect(page.locator("#token-dialog")).to_be_hidden()
        assert TOKEN not in await page.content()
        await page.close()


async def test_a_phone_needs_no_sideways_scrolling(browser: Browser, operations: MemoryOperations) -> None:
    async with TestServer(create_app(operations)) as server:
        page = await browser.new_page(viewport={"width": 360, "height": 740})
        await page.goto(str(server.make_url("/")))
        await expect(row(page, "sql")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        await page.close()


async def test_light_and_dark_are_readable(browser: Browser, operations: MemoryOperations) -> None:
    """WCAG's contrast of 4.5 for every colour of words, on the card they stand on."""
    for scheme in ("light", "dark"):
        async with TestServer(create_app(operations)) as server:
            page = await browser.new_page(color_scheme=scheme)
            await page.goto(str(server.make_url("/")))
            card = await _colour(page, "section", "background-color")
            for words in ("h2", ".state.listed", ".state.rejected", ".facts", "thead th"):
                await expect(page.locator(words).first).to_be_visible()
                assert _contrast(await _colour(page, words, "color"), card) >= 4.5, (scheme, words)
            await page.close()


async def _colour(page: Page, selector: str, field: str) -> tuple[float, ...]:
    script = "([s, f]) => getComputedStyle(document.querySelector(s)).getPropertyValue(f)"
    text = await page.evaluate(script, [selector, field])
    return tuple(int(part) / 255 for part in re.findall(r"\d+", text)[:3])


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
