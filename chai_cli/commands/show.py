"""`chai show`: the command that repeats a video."""

from __future__ import annotations

import json as json_module
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

OPTIONS = (
    "model",
    "num_inference_steps",
    "scheduler",
    "guidance_scale",
    "negative_prompt",
    "seed",
    "height",
    "width",
    "num_frames",
    "fps",
    "aesthetic_score",
    "scale",
    "dtype",
)


def command(comment: dict[str, Any]) -> str:
    """A shell line that renders the same video again; the prompt goes in as one JSON line, whatever is in it.

    What reuse makes of it depends on the cache: with `--no-cache` it is what the prompt gives by itself.
    """
    words = ["chai", "gen", "-", "--out", "repeated"]
    for name in OPTIONS:
        value = comment.get(name)
        if value not in (None, "", "default"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if "method" in comment:
        words += ["--method", spec(comment["method"], comment.get("reuse", {}))]
    for lora in comment.get("lora", []):
        words += ["--lora", lora]
    prompt = json_module.dumps({"prompt": comment["prompt"]}, ensure_ascii=False)
    return f"printf '%s\\n' {shlex.quote(prompt)} | {shlex.join(words)}"


def spec(method: str, options: dict[str, Any]) -> str:
    """A method with all its options, as `chai_cli.reuse.reuse_of` reads it."""
    if "first" in options:  # of two methods; an option that both have is the first one's
        options = {**options["second"], **options["first"]}
    told = {key: "/".join(map(str, value)) if isinstance(value, list) else value for key, value in options.items()}
    words = ",".join(f"{key.replace('_', '-')}={value}" for key, value in told.items() if value is not None)
    return f"{method}:{words}" if words else method


def show(
    file: Annotated[Path, typer.Argument(help="An mp4 that chai wrote.")],
    json: Annotated[bool, typer.Option("--json", help="Print the settings as JSON instead.")] = False,
) -> None:
    """Print the command that repeats a video."""
    from chai_cli.video import read_comment

    comment = read_comment(file)
    typer.echo(json_module.dumps(comment, ensure_ascii=False) if json else command(comment))
