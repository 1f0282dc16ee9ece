"""The page through what happens to servers and users: reloads, restarts, keys, several models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from firn.api.http.auth import Keys
from tests.api.live import GREETING, serve
from tests.fleet.fronts import ECHO, Running, config, fronting

pytest.importorskip("playwright.sync_api", reason="the page is tested with Playwright")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Visit

HI = {"messages": [{"role": "user", "content": "Hi"}]}


def aside(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` on another thread, while the test looks at the page."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_reload_in_mid_stream(page: Page) -> None:
    with serve() as live:
        live.engine.hold("decode", after=3)
        page.goto(live.url)
        page.get_by_label("Message").fill("Tell me")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".call.decoding")).to_be_visible()
        expect(page.locator(".turn.assistant")).to_contain_text("Hel")
        answer = aside(lambda: httpx.post(f"{live.url}/v1/chat/completions", json=HI, timeout=60))
        expect(page.locator(".call.decoding")).to_have_count(2)
        page.reload()
        # The reload ended the page's own reply; the other one goes on, and is shown again.
        expect(page.locator(".call.gone")).to_have_count(1)
        expect(page.locator(".call.decoding")).to_have_count(1)
        expect(page.locator(".turn.assistant")).to_contain_text("loaded again")
        live.engine.release("decode")
        assert answer.result(30).status_code == 200
        expect(page.locator(".call.done")).to_have_count(1)


def test_a_new_chat_while_a_reply_is_being_written(page: Page) -> None:
    with serve() as live:
        live.engine.hold("decode", after=3)
        page.goto(live.url)
        page.get_by_label("Message").fill("Tell me")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.assistant")).to_contain_text("Hel")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".call.gone")).to_have_count(1)
        expect(page.locator("#chat .turn")).to_have_count(0)
        live.engine.release("decode")
        page.get_by_label("Message").fill("Tell me again")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.assistant")).to_contain_text(GREETING)
        expect(page.locator("#chat .turn")).to_have_count(2)


def test_a_question_that_was_refused_spoils_no_later_one(page: Page) -> None:
    with serve(context_length=200) as live:
        page.goto(live.url)
        replies = page.locator(".turn.assistant")
        page.get_by_label("Message").fill("far too long " * 40)
        page.get_by_role("button", name="Send").click()
        expect(replies).to_have_text("No reply, and the question is left out of what follows.")
        expect(page.locator("#chat .warn")).to_contain_text("maximum context length is 200 tokens")
        page.get_by_label("Message").fill("Hello?")
        page.get_by_role("button", name="Send").click()
        expect(replies.nth(1)).to_contain_text(GREETING)
        expect(page.locator("#chat .warn")).to_have_count(0)


def test_a_server_that_ends_and_comes_back(page: Page) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(serve())
        page.goto(first.url)
        httpx.post(f"{first.url}/v1/chat/completions", json=HI, timeout=60)
        expect(page.locator(".call.done")).to_have_count(1)
        port = first.port
        first.engine.hold("decode")
        lost = aside(lambda: httpx.post(f"{first.url}/v1/chat/completions", json=HI, timeout=60))
        expect(page.locator(".call.reading, .call.decoding")).to_have_count(1)
        stack.close()
        expect(page.locator(".banner.lost")).to_be_visible()
        expect(page.locator(".line")).to_have_text("connection lost")
        expect(page.locator(".call.done")).to_have_count(1)
        assert lost.exception(30) or lost.result().status_code >= 500
        again = stack.enter_context(serve(port=port))
        expect(page.locator(".line")).to_have_text("live")
        expect(page.locator(".banner.lost")).to_have_count(0)
        httpx.post(f"{again.url}/v1/chat/completions", json=HI, timeout=60)
        expect(page.locator(".call.done")).to_have_count(2)
        expect(page.locator(".call.reading, .call.decoding")).to_have_count(0)


def test_keys(page: Page) -> None:
    with serve(keys=Keys(["alice", "bob"], admin=["root"])) as live:
        httpx.post(
            f"{live.url}/v1/chat/completions", json=HI, headers={"x-api-key": "bob"}, timeout=60
        )
        page.goto(live.url)
        expect(page.get_by_role("alert")).to_have_text("This server needs a key.")
        field = page.get_by_label("API key")
        field.fill("mallory")
        field.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This API key is not known here.")
        field.fill("alice")
        field.press("Enter")
        expect(page.locator(".line")).to_have_text("live")
        expect(page.locator("#requests .empty")).to_contain_text("Every request will be a bar")
        expect(page.locator("#storage")).to_contain_text("Only the operator sees")
        page.get_by_label("Message").fill("Hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".call")).to_have_count(1)
        page.reload()
        expect(page.locator(".call")).to_have_count(1)
        page.get_by_role("button", name="Forget the key").click()
        page.get_by_label("API key").fill("root")
        page.get_by_role("button", name="Enter").click()
        expect(page.locator(".call")).to_have_count(2)
        assert page.evaluate("document.cookie") == ""
        assert page.evaluate("Object.values(localStorage).join()") == ""


def test_an_idle_night_and_no_cache(page: Page) -> None:
    with serve() as live:
        page.goto(live.url)
        expect(page.locator("#requests .empty")).to_contain_text("Every request will be a bar")
        expect(page.locator("#tree .empty, #storage .empty").first).to_be_visible()
        for panel in ("#rates", "#first", "#drafts", "#models"):
            expect(page.locator(panel)).to_have_count(0)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tmp: Path = tmp_path_factory.mktemp("front")
    with fronting(config("one", "two", "three", tmp=tmp), command=ECHO) as running:
        yield running


def test_models_are_loaded_and_unloaded_by_buttons(page: Page, front: Running) -> None:
    page.goto(front.url)
    models = page.locator("#models")
    expect(models.locator("li")).to_have_count(3)
    page.get_by_role("button", name="Load two").click()
    row = models.locator("li").nth(1)
    expect(row.locator(".state")).to_have_text("loaded")
    assert front.states()["two"] == "loaded"
    page.get_by_role("button", name="Unload two").click()
    expect(row.locator(".state")).to_have_text("unloaded")
    page.get_by_label("Model", exact=True).select_option("three")
    expect(page.locator("#chat .note")).to_have_text("three")
    expect(page.locator("#probe")).to_contain_text("the first message loads it")


def test_another_page_cannot_do_what_ours_can(visit: Visit, front: Running) -> None:
    """The other page comes from another server on this machine, in the same browser."""
    page = visit.page
    with serve() as other:
        page.goto(other.url)
        expect(page.locator(".line")).to_have_text("live")
        done = page.evaluate(
            """async (url) => {
                try { await fetch(url, { method: "POST", mode: "no-cors" }); return "sent"; }
                catch (error) { return "blocked"; }
            }""",
            f"{front.url}/v1/models/one/load",
        )
        assert done == "blocked", "our own policy lets our page reach nobody else"
        assert "connect-src 'self'" in visit.faults.pop(0)
        visit.faults.clear()
    refused = httpx.post(f"{front.url}/v1/models/one/load", headers={"origin": other.url})
    assert refused.status_code == 403
    assert front.states()["one"] == "unloaded"
