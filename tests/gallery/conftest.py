"""Pages in a real headless Chromium, opened from the disk as people do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gallery.chromium import CHROMIUM, DESKTOP, READY, Open, until


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM} (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page_of(browser: Any) -> Iterator[Open]:
    """Opens the page of a folder. No error, no message, no dialog and no request beyond the folder is let pass."""
    contexts, trouble = [], []

    def open_page(folder: Path, fragment: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda sent: None if sent.url.startswith(folder.as_uri()) else trouble.append(sent.url))
        page.goto(folder.as_uri() + "/index.html" + fragment)
        until(page, READY)
        return page

    yield open_page
    told = [one.evaluate("window.pwned ?? null") for context in contexts for one in context.pages]
    for context in contexts:
        context.close()
    assert trouble == []
    assert set(told) <= {None}
