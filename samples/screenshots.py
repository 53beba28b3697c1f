"""Make the pictures of README: the gallery of a folder of videos, and what the terminal shows of a run.

    chai gen samples/related.txt --out videos
    python samples/screenshots.py videos

Needs playwright and a Chromium (`--chromium`, by default Debian's).
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS = 178


def pages(folder: Path, chromium: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=str(chromium), args=["--no-sandbox"])
        for name, width, height, scheme, fragment in (
            ("gallery", 1280, 900, "light", ""),
            ("gallery-detail", 1280, 900, "dark", "open"),
        ):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto((folder / "index.html").resolve().as_uri())
            page.wait_for_timeout(500)
            if fragment:
                page.locator(".card").last.click()
            page.wait_for_timeout(1500)
            page.screenshot(path=HERE / f"{name}.png")
            page.close()
        browser.close()


def terminal() -> None:
    """A real run, as a picture of text."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["chai", "gen", "samples/related.txt", "--out", "videos"]
        real = [sys.executable, "-m", "chai_cli", *command[1:-1], f"{scratch}/videos", "--cache", f"{scratch}/cache"]
        told = subprocess.run(real, capture_output=True, text=True, cwd=HERE.parent, check=True).stdout
        told = told.replace(f"{scratch}/videos", "videos")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {' '.join(command)}", style="bold"))
    console.print(Text.from_ansi(told), soft_wrap=True)
    console.save_svg(str(HERE / "terminal.svg"), title="chai")


def main(
    folder: Annotated[Path, typer.Argument(help="A folder that chai gen wrote its videos to.")],
    chromium: Path = Path("/usr/bin/chromium"),
) -> None:
    pages(folder, chromium)
    terminal()


if __name__ == "__main__":
    typer.run(main)
