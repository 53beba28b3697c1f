"""`chai models`: what chai can run by name."""

from __future__ import annotations

import dataclasses
import json as json_module
from typing import Annotated

import typer


def models(json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False) -> None:
    """List the models known by name. Any folder or hub id of the same families works with --model too."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from chai_cli.backbones.base import RECORDS, on_disk

    records = [make() for make in RECORDS.values()]
    if json:
        for record in records:
            row = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "unknown_words"}
            typer.echo(json_module.dumps(row | {"on_disk": on_disk(record)}))
        return
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 0, 0, 0),
        caption="Models that are not on this disk are downloaded when first used.",
    )
    for heading in ("name", "family", "licence", "params", "size×frames@fps", "steps", "memory", "disk"):
        table.add_column(heading, no_wrap=True)
    for record in records:
        size = f"{record.width}x{record.height}x{record.num_frames}@{record.fps}"
        memory = f"{record.memory:g} GiB" if record.memory else "?"
        there = "yes" if on_disk(record) else "no"
        steps = str(record.num_inference_steps)
        table.add_row(record.name, record.family, record.licence, record.parameters, size, steps, memory, there)
    Console().print(table)
