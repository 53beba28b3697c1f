"""The Typer app: wires the commands, and turns a ChaiError into one sentence and exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from chai_cli.commands import bench, cache, config, doctor, gen, models, report, show, stats, warm
from chai_cli.config import collect, default_map
from chai_cli.errors import ChaiError

WITHOUT = {"config", "doctor", "-h", "--help", "--version"}
COMPLETING = "_CHAI_COMPLETE"

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
app.command("report")(report.report)
app.command("show")(show.show)
app.command("models")(models.models)
app.command("config")(config.config)
app.command("doctor")(doctor.doctor)


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


def names_torchvision(error: BaseException | None) -> bool:
    """Whether torchvision is what an import, or one that led to it, stumbled over."""
    while error is not None:
        if "torchvision" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def main() -> None:
    try:
        command = typer.main.get_command(app)
        try:
            defaults = default_map(collect(command))
        except ChaiError:
            if not WITHOUT & {*sys.argv[1:]} and COMPLETING not in os.environ:
                raise
            defaults = {}  # what helps to find out what is wrong works all the same
        command(default_map=defaults)
    except ChaiError as error:
        print(f"chai: {error}", file=sys.stderr)
        sys.exit(2)
    except (ImportError, RuntimeError) as error:
        if not names_torchvision(error):
            raise
        told = "torch and torchvision are missing or do not belong together; install both from one place: pip install -U torch torchvision"
        print(f"chai: {told}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
