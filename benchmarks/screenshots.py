"""Pictures of the page for the docs, taken in a real browser while real requests run.

    .venv/bin/python benchmarks/screenshots.py [--out docs]

Starts a server with the two built-in models, lets several people use it together, some with the
same document, and makes page.png (light), page-dark.png and page-phone.png. Needs Chromium or
Chrome (FIRN_BROWSER names another one), and Playwright, which is in firn[dev]. Takes a minute or
two.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from firn.demo.facts import FactSession, make_session, n_facts_for
from firn.demo.server import ServerProcess
from tests.browser import chrome

if TYPE_CHECKING:
    from playwright.sync_api import Browser, FloatRect, Page, ViewportSize

MODELS = ("firn-demo", "firn-demo-hybrid")
DOCUMENTS = (1200, 2400, 4000)
"""Tokens of the documents that people talk about."""
N_PEOPLE = 5
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gita")
RULES = (
    " ".join(f"Rule {n}: answer only what was asked, in one sentence." for n in range(40)) + "\n"
)
"""The beginning of every prompt about a document."""
PAUSE_S = (0.2, 2.0)
WIDE: ViewportSize = {"width": 1360, "height": 1250}
PHONE: ViewportSize = {"width": 390, "height": 844}
PHONE_TALL = 1800


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="firn-page-") as tmp:
        flags = ["--ssd-cache-dir", f"{tmp}/ssd", "--cache-memory-mb", "10", "--show-text"]
        flags += ["--cache-block-tokens", "64", "--speculation", "lookup"]
        server = ServerProcess(*MODELS, *flags, log=Path(tmp, "log"))
        try:
            with chrome.started() as browser:
                visit(server, browser, out)
        finally:
            server.stop()
    return 0


def visit(server: ServerProcess, browser: Browser, out: Path) -> None:
    page = browser.new_context(viewport=WIDE, device_scale_factor=1).new_page()
    page.emulate_media(color_scheme="light")
    page.goto(server.url)
    for model in MODELS:
        httpx.post(f"{server.url}/v1/models/{model}/load", timeout=120).raise_for_status()
    with ThreadPoolExecutor(N_PEOPLE) as people:
        done = [people.submit(person, server, seed) for seed in range(N_PEOPLE)]
        chat(page)
        for each in done:
            each.result()
    busy = ThreadPoolExecutor(2 * N_PEOPLE)
    for seed in range(2 * N_PEOPLE):  # still at work while the pictures are taken
        busy.submit(person, server, 100 + seed)
    page.locator(".call.decoding, .call.reading").first.wait_for()
    look(page)
    page.screenshot(path=out / "page.png")
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=out / "page-dark.png", full_page=True)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(PHONE)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)  # until the panels have their new widths
    tall: FloatRect = {"x": 0, "y": 0, "width": PHONE["width"], "height": PHONE_TALL}
    page.screenshot(path=out / "page-phone.png", full_page=True, clip=tall)
    busy.shutdown()


def person(server: ServerProcess, seed: int) -> None:
    """Asks about a document that others read as well."""
    chance = random.Random(seed)
    session = document(seed % len(DOCUMENTS))
    model = MODELS[seed % 4 == 3]
    for n in range(len(session.questions)):
        messages = [dict(m) for m in session.messages(n)]
        messages[0]["content"] = RULES + str(messages[0]["content"])
        messages[1]["content"] = f"({NAMES[seed % len(NAMES)]} asks.) {messages[1]['content']}"
        body = {"model": model, "messages": messages, "max_tokens": 48, "temperature": 0.7}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
        time.sleep(chance.uniform(*PAUSE_S))
    short = [{"role": "user", "content": f"Hello, I am person {seed}."}]
    for n in itertools.islice(itertools.count(), 3):
        body = {"model": model, "messages": [*short, *filler(n)], "max_tokens": 120}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


def document(number: int) -> FactSession:
    n_facts = n_facts_for(DOCUMENTS[number])
    return make_session(number, n_facts=n_facts, n_questions=6, kinds=("fact",), placement="system")


def filler(n: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for i in range(n):
        turns += [
            {"role": "assistant", "content": f"Turn {i}."},
            {"role": "user", "content": "Go on."},
        ]
    return turns


def chat(page: Page) -> None:
    """Two turns in the page's own chat box, and the beginning of a third."""
    session = document(0)
    page.get_by_label("Model", exact=True).select_option("")
    for question in session.questions[:2]:
        page.get_by_label("Message").fill(question.text)
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Send").wait_for(timeout=60_000)
    page.get_by_label("Message").fill("And what about the other one?")


def look(page: Page) -> None:
    """Selects a request and a prefix, as somebody would who wants to know more."""
    page.locator("#requests .call.done").last.focus()
    page.locator("#tree .run[aria-level='2']").first.click()
    page.locator("#tree .details").get_by_text("Saves").wait_for()
    page.mouse.move(5, 5)


if __name__ == "__main__":
    sys.exit(main())
