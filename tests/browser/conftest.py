"""One browser for all page tests of a file, which are skipped with a reason if there is none.

Not one for the whole session: while it runs, Playwright's event loop counts as the thread's, and
other tests need to run their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser import chrome

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page


PATIENCE_MS = 30_000
"""For whatever is waited for; a machine may be busy."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with chrome.started() as found:
            from playwright.sync_api import expect

            expect.set_options(timeout=PATIENCE_MS)
            yield found
    except (LookupError, ImportError) as e:
        pytest.skip(f"the page is not tested in a browser: {e}")


class Visit:
    """A window and its faults. There must be none, not even a blocked script or style."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._said)

    def _said(self, message: ConsoleMessage) -> None:
        # The browser itself reports every refused request; some tests expect a 401 or the like.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.faults.append(message.text)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = Visit(context.new_page())
    try:
        yield found
        assert found.faults == []
    finally:
        context.close()


@pytest.fixture
def page(visit: Visit) -> Page:
    return visit.page
