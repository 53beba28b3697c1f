"""`chai report`: the page of a folder of videos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that chai gen or chai bench wrote to.")],
) -> None:
    """Make a folder's index.html again from its report.jsonl or bench.json, and print where it is."""
    if (folder / "bench.json").is_file():
        from chai_cli.gallery.bench import build_bench

        typer.echo(build_bench(folder))
        return
    from chai_cli.gallery import build

    typer.echo(build(folder))
