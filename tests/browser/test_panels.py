"""Every panel of the page with real traffic from a built-in model, in a real browser.

Slow: a browser starts, and one test makes ten thousand records for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from firn.api.auth import SHARED
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig, PageConfig
from firn.engine import EngineParts
from tests.api.real import Real, serving
from tests.cache.admin.test_browse import store

pytest.importorskip("playwright.sync_api", reason="the page is tested with Playwright")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

MANUAL = "Snow that has lain for a summer is called firn. " * 30


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    config = Config(
        model=ModelConfig(path="firn-demo"),
        engine=EngineConfig(speculation="lookup"),
        cache=CacheConfig(
            ssd_cache_dir=tmp_path_factory.mktemp("ssd"),
            cache_memory_mb=256,
            cache_block_tokens=16,
            ssd_cache_max_gb=1.0,
        ),
        page=PageConfig(show_text=True),
    )
    with serving(Path(), config=config) as running:
        for last in ("one", "two", "three"):
            say(running, MANUAL + last)
        yield running


def say(real: Real, text: str, **options: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **options}
    answer = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def opened(real: Real, page: Page) -> Page:
    page.goto(real.url)
    expect(page.locator(".line")).to_have_text("live")
    return page


def test_the_headline_says_what_was_reused(opened: Page) -> None:
    reused = opened.locator(".headline dd").first
    expect(reused).to_contain_text(re.compile(r"\d.*%"))
    expect(reused).to_contain_text("prompt tokens")
    expect(opened.locator("footer")).to_contain_text("firn")


def test_requests_are_bars_that_tell_their_story(opened: Page) -> None:
    bars = opened.locator("#requests .call")
    expect(bars.nth(2)).to_be_visible()
    assert "reused" in str(bars.nth(2).get_attribute("aria-label"))
    bars.nth(2).hover()
    story = opened.locator("#requests .details")
    expect(story).to_contain_text("firn-demo")
    expect(story).to_contain_text("from memory")
    expect(story).to_contain_text("differs from everything stored")
    expect(story.locator("q")).to_contain_text("three")
    # By keyboard: the bars are one tab stop, and the arrows move from one to the next.
    bars.nth(2).focus()
    opened.keyboard.press("ArrowLeft")
    expect(bars.nth(1)).to_be_focused()
    expect(story.locator("q")).to_contain_text("two")
    opened.locator("#requests summary").click()
    expect(opened.locator("#requests tbody tr").nth(2)).to_contain_text("cold")


def test_a_new_request_appears_by_itself(opened: Page, real: Real) -> None:
    bars = opened.locator("#requests .call")
    expect(bars.first).to_be_visible()
    before = bars.count()
    say(real, "Something new")
    expect(bars).to_have_count(before + 1)


def test_the_tree_pins_and_forgets(opened: Page, real: Real) -> None:
    say(real, MANUAL + "to be forgotten, every word of it, in this test and no other")
    opened.reload()
    runs = opened.locator("#tree .run")
    trunk = opened.locator("#tree .run[aria-level='2']").first
    expect(trunk).to_be_visible()
    expect(trunk).to_have_attribute("aria-label", re.compile(r"shared by \d+, last used"))
    trunk.click()
    chosen = opened.locator("#tree .details")
    expect(chosen).to_contain_text("Saves")
    expect(chosen).to_contain_text("each time")
    expect(chosen.locator("q")).to_contain_text("Snow that has lain")
    opened.get_by_role("button", name="Pin", exact=True).click()
    expect(chosen.get_by_role("button", name="Unpin")).to_be_visible()
    expect(chosen.locator(".message")).to_contain_text("Pinned")
    chosen.get_by_role("button", name="Unpin").click()
    expect(chosen.get_by_role("button", name="Pin", exact=True)).to_be_visible()
    # Down to a leaf by keyboard, and forget it.
    trunk.focus()
    opened.keyboard.press("ArrowDown")
    expect(chosen).to_contain_text("shared by")
    before = runs.count()
    chosen.get_by_role("button", name="Forget …").click()
    chosen.get_by_role("button", name="Forget it").click()
    expect(runs).not_to_have_count(before)


def test_tiers_and_memory_have_limits_and_units(opened: Page) -> None:
    tiers = opened.locator("#tiers")
    expect(tiers).to_contain_text(re.compile(r"Memory .*iB of 256 MiB"))
    expect(tiers).to_contain_text(re.compile(r"SSD .*iB of 1 GiB"))
    expect(tiers).to_contain_text("Wear in 24 hours")
    expect(tiers).to_contain_text("of prompt tokens")
    memory = opened.locator("#memory")
    for name in ("weights", "live requests", "records", "free"):
        expect(memory).to_contain_text(name)


def test_what_running_requests_hold_does_not_fill_the_tier(opened: Page) -> None:
    """Records held in live rows count as stored, but not towards the memory limit."""
    memory = {
        "records": 5,
        "limit_bytes": 4 << 20,
        "used_bytes": 10 << 20,
        "live": {"bytes": 9 << 20},
    }
    tokens = {"prompt": 0, "by_tier": {}}
    cache = {"enabled": True, "tiers": ["memory"], "tokens": tokens, "memory": memory}
    script = """async (state) => {
        const { html, render } = await import("/page/vendor/htm-preact.js");
        const { Tiers } = await import("/page/tiers.js");
        const place = document.createElement("div");
        render(html`<${Tiers} state=${state} />`, place);
        return place.querySelector(".tier").textContent;
    }"""
    shown = opened.evaluate(script, {"model": "m", "cache": cache})
    assert "Memory 1 MiB of 4 MiB" in shown
    assert "in running requests9 MiB" in shown


def test_times_keep_two_digits(opened: Page) -> None:
    script = """async (times) => {
        const { seconds } = await import("/page/format.js");
        return times.map(seconds);
    }"""
    shown = opened.evaluate(script, [0.0042, 9.5, 99, 100, 140, 300, 900, 7200])
    assert shown == ["4.2 ms", "9.5 s", "99 s", "1.7 min", "2.3 min", "5 min", "15 min", "2 h"]


def test_speeds_first_tokens_and_guesses(opened: Page, real: Real) -> None:
    say(real, "Say snow, snow, snow, snow", max_tokens=24)
    expect(opened.locator("#rates .fill").first).to_be_attached()
    expect(opened.locator("#first .dot").first).to_be_visible()
    expect(opened.locator("#guesses")).to_contain_text("tokens per step since the start")
    opened.locator("#first summary").click()
    expect(opened.locator("#first tbody")).to_contain_text("90 % and more")


def test_one_model_is_listed_without_buttons(opened: Page) -> None:
    models = opened.locator("#models")
    expect(models).to_contain_text("firn-demo")
    expect(models).to_contain_text("loaded")
    expect(models.get_by_role("button")).to_have_count(0)


def test_a_chat_shows_the_reuse_of_each_turn(opened: Page) -> None:
    draft = opened.get_by_label("Message")
    draft.fill("Hello, what is firn?")
    expect(opened.locator("#probe")).to_contain_text("would be reused")
    draft.press("Enter")
    reuse = opened.locator("#chat .turn.assistant .reuse")
    expect(reuse.first).to_contain_text(re.compile(r"% reused"))
    expect(opened.get_by_role("button", name="Send")).to_be_visible()
    draft.fill("And how old does it get?")
    expect(opened.locator("#probe")).to_contain_text("from memory")
    draft.press("Enter")
    expect(reuse).to_have_count(2)
    expect(reuse.nth(1)).to_contain_text(re.compile(r"[1-9]\d* %? ?reused|[1-9][\d.]* % reused"))
    opened.reload()
    expect(opened.locator("#chat .turn")).to_have_count(4)
    opened.get_by_role("button", name="New chat").click()
    expect(opened.locator("#chat .turn")).to_have_count(0)


def test_light_dark_and_phone(opened: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    opened.emulate_media(color_scheme="light")
    light = opened.evaluate(ground)
    opened.emulate_media(color_scheme="dark")
    dark = opened.evaluate(ground)
    assert light != dark
    opened.get_by_label("Theme").select_option("light")
    assert opened.evaluate(ground) == light
    opened.reload()
    assert opened.evaluate(ground) == light, "the choice is kept"
    opened.get_by_label("Theme").select_option("system")
    assert opened.evaluate(ground) == dark
    opened.set_viewport_size({"width": 360, "height": 740})
    expect(opened.locator("#tree .run").first).to_be_visible()
    page = "document.documentElement"
    opened.wait_for_function(f"{page}.scrollWidth <= {page}.clientWidth")  # nothing is wider


def test_ten_thousand_nodes(page: Page) -> None:
    """The page draws at most what it was sent, and fetches more on demand."""
    config = Config(
        model=ModelConfig(path="firn-demo"),
        cache=CacheConfig(no_ssd_cache=True, cache_memory_mb=256, cache_block_tokens=4),
    )

    def fill(parts: EngineParts) -> None:
        cache: Any = parts.cache
        for i in range(2500):
            trunk = [1 + i % 50] * 4
            leaf = [1 + i // 50, i % 50, 5, 6]
            store(cache, [*trunk, *leaf, *[7] * 4, *[8] * 4, *[9] * 4], SHARED)

    with serving(Path(), config=config) as real:
        real.server.engine.call(fill).result(60)
        page.goto(real.url)
        expect(page.locator("#tree .note")).to_contain_text("10,051 blocks")
        runs = page.locator("#tree .run")
        expect(runs.first).to_be_visible()
        assert runs.count() <= 600
        # Descend into one of fifty branches: the page responds, and the server still serves others.
        branch = page.locator("#tree .run[aria-level='2']").first
        branch.dblclick()
        expect(page.locator("#tree .crumbs")).to_contain_text("tokens 0–4")
        expect(page.locator("#tree .note")).to_contain_text("201 blocks")
        assert say(real, "Hello")["choices"]
        page.get_by_role("button", name="everything").click()
        expect(page.locator("#tree .note")).to_contain_text(re.compile(r"10,0\d\d blocks"))
