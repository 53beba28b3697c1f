"""The browser in which pages are tested, and how to wait in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = Path("/usr/bin/chromium")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
READY = "performance.getEntriesByName('ready').length"
Open = Callable[..., Any]


def until(page: Any, said: str) -> None:
    """Wait for something to be true. (Playwright's own way evaluates strings in the page, which the page's policy forbids.)"""
    end = time.monotonic() + 10
    while not page.evaluate(said):
        assert time.monotonic() < end, said
        page.wait_for_timeout(20)
