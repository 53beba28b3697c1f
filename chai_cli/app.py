"""The Typer app: wires the commands, and turns a ChaiError into one sentence and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from chai_cli.commands import bench, cache, gen, models, show, stats, warm
from chai_cli.errors import ChaiError

app = typer.Typer(
    name="chai",
    help="Render a file of prompts into videos on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: chai gen samples/prompts.txt --out videos",
)
app.command("gen", epilog=gen.EXAMPLES)(gen.gen)
cache.app.command("warm", epilog=warm.EXAMPLES)(warm.warm)
app.add_typer(cache.app, name="cache")
app.command("stats")(stats.stats)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("show")(show.show)
app.command("models")(models.models)


def print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"chai {version('chai-cli')}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Render a file of prompts into videos on your own machine."""


def main() -> None:
    try:
        app()
    except ChaiError as error:
        print(f"chai: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
