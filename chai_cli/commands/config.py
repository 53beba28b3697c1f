"""`chai config`: which defaults are not chai's own, and where they come from."""

from __future__ import annotations

import json as json_module
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from chai_cli.config import Setting
from chai_cli.errors import ChaiError


def config(context: typer.Context, json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False) -> None:
    """Show the options that are set outside the command line, and the files that were looked for.

    What counts, most first: the command line, CHAI_* variables, chai.toml of this folder or of one above it, your own file.
    """
    from chai_cli.config import PREFIX, PROJECT, collect, project_file, unknown_variables, user_file

    trouble: ChaiError | None = None
    try:
        found = collect(context.find_root().command)
    except ChaiError as error:
        found, trouble = [], error
    if json and trouble is None:
        for one in found:
            typer.echo(json_module.dumps(asdict(one), ensure_ascii=False))
        return
    project, own = project_file(), user_file()
    typer.echo("What counts, most first:")
    typer.echo("  the command line")
    typer.echo(f"  the environment: {PREFIX} and an option's name, such as {PREFIX}NUM_INFERENCE_STEPS=20")
    typer.echo(f"  the project: {project or f'no {PROJECT} in this folder or above it'}")
    typer.echo(f"  your own file: {own}{'' if own.is_file() else ' (not there)'}")
    for told in unknown_variables(context.find_root().command):
        typer.echo(told)
    if trouble:
        raise trouble
    if not found:
        typer.echo("nothing is set: every option has chai's own default")
        return
    for (option, told, source), commands in together(found).items():
        typer.echo(f"--{option} {told}  ({', '.join(commands)}; from {source})")


def together(found: Sequence[Setting]) -> dict[tuple[str, str, str], list[str]]:
    """The commands of each option, value and source."""
    made: dict[tuple[str, str, str], list[str]] = {}
    for one in sorted(found, key=lambda one: (one.option, one.command)):
        told = shlex.join(one.value) if isinstance(one.value, list) else shlex.quote(str(one.value))
        made.setdefault((one.option, told, one.source), []).append(one.command)
    return made
