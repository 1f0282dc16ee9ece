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

from firn.api.http.auth import SHARED
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig, PageConfig
from firn.engine import EngineParts
from tests.api.real import Real, serving
from tests.api.routes.test_tree import a_long_step
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
    expect(story).to_contain_text("what is stored goes on differently")
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
    expect(chosen).to_contain_text("next: ")
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


def test_storage_has_limits_and_units(opened: Page) -> None:
    storage = opened.locator("#storage")
    expect(storage).to_contain_text(re.compile(r"in memory .*iB of 256 MiB"))
    expect(storage).to_contain_text(re.compile(r"on SSD .*iB of 1 GiB"))
    expect(storage).to_contain_text("written in 24 hours")
    expect(storage).to_contain_text("of prompt tokens")
    memory = opened.locator("#memory")
    for name in ("weights", "running requests", "prefixes", "free"):
        expect(memory).to_contain_text(name)


def storage_of(opened: Page, memory: dict[str, Any], **more: Any) -> str:
    """What the panel shows for this state of the memory tier."""
    tokens = {"prompt": 0, "by_tier": {}}
    outcomes = {"hits": {}, "misses": {}, "shortfalls": {}}
    cache = {"enabled": True, "tiers": ["memory"], "tokens": tokens, "memory": memory, **outcomes}
    script = """async (state) => {
        const { html, render } = await import("/page/vendor/htm-preact.js");
        const { Storage } = await import("/page/storage.js");
        const place = document.createElement("div");
        render(html`<${Storage} state=${state} />`, place);
        return place.textContent;
    }"""
    return str(opened.evaluate(script, {"model": "m", "cache": cache | more, "weights_bytes": 0}))


def test_what_running_requests_hold_does_not_fill_the_tier(opened: Page) -> None:
    """Records held in live rows count as stored, but not towards the memory limit."""
    memory = {"records": 5, "limit_bytes": 4 << 20, "used_bytes": 10 << 20}
    shown = storage_of(opened, memory | {"live": {"bytes": 9 << 20}})
    assert "in memory 1 MiB of 4 MiB" in shown
    assert "in running requests9 MiB" in shown


def test_memory_and_its_tier_say_the_same(opened: Page) -> None:
    """Rows that have ended lie in buffers larger than their records: those are taken up."""
    memory = {"records": 188, "limit_bytes": 400 << 20, "used_bytes": 84 << 20}
    admission = {"held_bytes": 0, "capacity_bytes": 1 << 30}
    shown = storage_of(opened, memory | {"parked": {"bytes": 106 << 20}}, admission=admission)
    assert "in memory 106 MiB of 400 MiB" in shown
    assert "prefixes106 MiB" in shown
    assert "free918 MiB" in shown


def test_the_tokens_per_second_are_those_of_the_last_seconds(opened: Page) -> None:
    """A reply that came at once, or in one piece at its end, is no reason for a figure in millions."""
    script = """async () => {
        const { Store } = await import("/page/store.js");
        const store = new Store();
        const now = Date.now() / 1000;
        store._take("hello", { version: "1", now });
        const open = { model: "m", tiers: {}, phase: "decoding", ended_s: null };
        const done = { model: "m", tiers: {}, phase: "done", arrived_at: now - 100, first_token_s: 1 };
        const written = (call) => {
            const before = store.writtenPerSecond("");
            store._take("calls", [call]);
            return store.writtenPerSecond("") - before;
        };
        return [
            written({ ...open, id: "a", arrived_at: now - 1, first_token_s: 1, reply_tokens: 18 }),
            written({ ...done, id: "b", ended_s: 100, reply_tokens: 990 }),
            written({ ...done, id: "c", ended_s: 10, reply_tokens: 9 }),
            store.writtenPerSecond("other"),
        ];
    }"""
    first, second, third, other = opened.evaluate(script)
    assert first == pytest.approx(18 / 5, abs=0.2)
    assert second == pytest.approx(10, abs=1)
    assert third == pytest.approx(0, abs=0.2)
    assert other == 0


def test_a_reply_that_came_in_one_piece_has_no_speed(opened: Page) -> None:
    script = """async () => {
        const { speed } = await import("/page/calls.js");
        const call = { arrived_at: 100, first_token_s: 2, reply_tokens: 18, ended_s: null };
        return [
            speed(call, 102), // the page's clock may be behind
            speed(call, 101.9),
            speed({ ...call, ended_s: 2.0001 }, 110),
            speed({ ...call, ended_s: 4 }, 110),
            speed(call, 103),
        ];
    }"""
    assert opened.evaluate(script) == [None, None, None, 8.5, 17]


def test_the_latest_requests_fill_the_chart(opened: Page) -> None:
    """The time that is drawn fits the traffic, without what was before a long pause."""
    script = """async () => {
        const { latest } = await import("/page/calls.js");
        const call = (at, s) => ({ arrived_at: at, ended_s: s });
        const old = [call(1000, 5), call(1003, 1)];
        const burst = Array.from({ length: 30 }, (_, i) => call(5000 + i, 0.5));
        const span = ({ from, to }) => [to - from, to];
        return [
            span(latest([...old, ...burst], 5030)),
            span(latest([...old, ...burst], 9000)),
            span(latest(old, 9000)),
            span(latest([...old, call(8000, null)], 9000)),
        ];
    }"""
    assert opened.evaluate(script) == [[30, 5030], [30, 5029.5], [10, 1005], [1200, 9000]]


def test_times_keep_two_digits(opened: Page) -> None:
    script = """async (times) => {
        const { seconds } = await import("/page/format.js");
        return times.map(seconds);
    }"""
    shown = opened.evaluate(script, [0.0042, 9.5, 99, 100, 140, 300, 900, 7200])
    assert shown == ["4.2 ms", "9.5 s", "99 s", "1.7 min", "2.3 min", "5 min", "15 min", "2 h"]


def test_speeds_first_tokens_and_guesses(opened: Page, real: Real) -> None:
    fact = "The serial number of the Norrix printer is 4711-0815-2342. "
    say(real, f"{fact * 3}What is the serial number of the Norrix printer?", max_tokens=24)
    expect(opened.locator("#rates .fill").first).to_be_attached()
    expect(opened.locator("#first .dot").first).to_be_visible()
    expect(opened.locator("#drafts")).to_contain_text("tokens per step since the start")
    opened.locator("#first summary").click()
    expect(opened.locator("#first tbody")).to_contain_text("90 % and more")


def test_the_first_screen_says_what_is_served_and_how_to_reach_it(opened: Page, real: Real) -> None:
    connect = opened.locator(".connect")
    expect(connect.get_by_role("heading")).to_have_text("firn-demo")
    expect(connect.locator(".address code")).to_have_text(f"{real.url}/v1")
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    connect.get_by_role("button", name="Copy the API address").click()
    expect(connect.locator(".address .copy")).to_have_text("Copied")
    assert opened.evaluate("navigator.clipboard.readText()") == f"{real.url}/v1"
    button = connect.get_by_role("button", name="Claude Code")
    button.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    expect(connect.locator("pre")).to_contain_text(f"export ANTHROPIC_BASE_URL={real.url}\n")
    connect.get_by_role("button", name="Python").click()
    expect(connect.locator("pre")).to_contain_text(f'base_url="{real.url}/v1"')
    connect.get_by_role("button", name="Python").click()
    expect(connect.locator("pre")).to_have_count(0)
    expect(opened.locator("#models")).to_have_count(0)
    for panel in (".headline", "#chat", "#requests"):
        expect(opened.locator(panel)).to_be_in_viewport()


def test_a_page_that_is_opened_during_a_long_step_shows_what_is_known(
    page: Page, real: Real
) -> None:
    with a_long_step(real):
        page.goto(real.url)
        expect(page.locator(".line")).to_have_text("live")
        expect(page.locator(".connect h2")).to_have_text("firn-demo")
        expect(page.locator("#requests .call").first).to_be_visible()
        expect(page.locator(".headline dd").first).to_contain_text(re.compile(r"\d.*%"))
        expect(page.locator("#storage")).to_contain_text("MiB")
        page.get_by_label("Message").fill("Who waits?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".headline")).to_contain_text("1 waiting")
        expect(page.locator("#requests")).to_contain_text("1 waiting")
        expect(page.locator("#requests")).not_to_contain_text("running")


def test_prefixes_are_named_by_where_they_part(opened: Page, real: Real) -> None:
    for last in ("zebra", "yak"):
        say(real, MANUAL + last)
    opened.reload()
    leaf = opened.locator("#tree .run[aria-label*='zebra']").first
    expect(leaf).to_have_attribute("aria-label", re.compile("“… [^“]*zebra"))


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
