"""A real Chromium or Chrome that is installed on this machine, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
APPS = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


def find() -> str | None:
    """Its path: FIRN_BROWSER if that is set, otherwise the first of the usual ones that exists."""
    named = os.environ.get("FIRN_BROWSER")
    if named:
        return named
    on_path = (shutil.which(name) for name in NAMES)
    return next(filter(None, (*on_path, *filter(os.path.exists, APPS))), None)


@contextmanager
def started() -> Iterator[Browser]:
    """Raises LookupError where there is no browser, ImportError where there is no Playwright."""
    from playwright.sync_api import sync_playwright

    path = find()
    if path is None:
        raise LookupError("no Chromium or Chrome is installed here")
    # Chromium's sandbox does not work as root (as in containers); the pages are our own.
    sandbox = os.geteuid() != 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, chromium_sandbox=sandbox)
        try:
            yield browser
        finally:
            browser.close()
