"""`chai gen`: a prompt file into videos."""

from __future__ import annotations

import enum
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from chai_cli.batch import Batch
    from chai_cli.render import Renderer

EXAMPLES = """
Examples:\n
  chai gen samples/prompts.txt --out videos\n
  chai gen prompts.jsonl --out videos --model wan2.1-t2v-1.3b --num-inference-steps 30\n
  echo "a red ball bounces at sunset" | chai gen - --out videos\n
  chai gen prompts.csv --out videos --limit 3 --dry-run
"""


class Scheduler(enum.StrEnum):
    euler = "euler"
    unipc = "unipc"


class Dtype(enum.StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Offload(enum.StrEnum):
    none = "none"
    model = "model"
    group = "group"


def gen(
    prompts: Annotated[str, typer.Argument(help="Prompt file: .txt (one a line), .jsonl, .csv, or - for standard input.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the videos and report.jsonl.")] = Path("videos"),
    model: Annotated[
        str, typer.Option("--model", "-m", envvar="CHAI_MODEL", help="A name from `chai models`, a folder, or a hub id.")
    ] = "embedded",
    method: Annotated[str, typer.Option(help="How to render; dense is plain full-step sampling.")] = "dense",
    num_inference_steps: Annotated[
        int | None, typer.Option("--num-inference-steps", "--steps", help="Solver steps (default: the model's).")
    ] = None,
    scheduler: Annotated[Scheduler | None, typer.Option(help="Solver (default: the model's own).")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; 1 turns it off (default: the model's).")
    ] = None,
    negative_prompt: Annotated[str, typer.Option(help="What the video should not show.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of every prompt that names none of its own.")] = 0,
    height: Annotated[int | None, typer.Option(help="Pixels (default: the model's).")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels (default: the model's).")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Frames, a multiple of 4 plus 1 (default: the model's).")] = None,
    fps: Annotated[int | None, typer.Option(help="Frames a second of the mp4 (default: the model's).")] = None,
    scale: Annotated[
        int | None, typer.Option(min=1, max=64, help="Enlarge by this whole factor (default: small clips to 256 pixels).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, mps or cpu (default: the best there is).")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="(default: bfloat16 on cuda, float16 on mps, float32 on the CPU)")] = None,
    offload: Annotated[Offload, typer.Option(help="Keep parts of the model in main memory: slower, smaller.")] = Offload.none,
    attention_backend: Annotated[str | None, typer.Option(help="A diffusers attention backend, such as sage or flash.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the transformer's blocks (slow first video).")] = False,
    vae_tiling: Annotated[bool, typer.Option("--vae-tiling", help="Decode in tiles: less memory, slower.")] = False,
    lora: Annotated[list[str] | None, typer.Option(help="LoRA weights, path or path:strength; can be repeated.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Render again what is already there.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts of the file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be rendered, and stop.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata/--no-metadata", help="Write prompt and settings into the mp4.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table: only failures.")] = False,
) -> None:
    """Render every prompt of a file into an mp4.

    Run the same command again to go on where it stopped: finished videos are skipped unless their request changed.
    Exit code 0: all rendered, 1: some failed, 2: wrong usage, 130: interrupted.
    """
    from rich.console import Console

    from chai_cli import progress
    from chai_cli.backbones.base import Placement, find_record
    from chai_cli.batch import Batch, Options
    from chai_cli.errors import ChaiError
    from chai_cli.prompts import Settings, read_prompts
    from chai_cli.reuse import METHODS

    if method not in METHODS:
        raise ChaiError(f"no method named {method!r}; there is {', '.join(METHODS)}")
    given = {
        "negative_prompt": negative_prompt,
        "seed": seed,
        "height": height,
        "width": width,
        "num_frames": num_frames,
        "fps": fps,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
    }
    settings = Settings(**{name: option(name, value) for name, value in given.items() if value is not None})
    record = find_record(model)
    requests, bad = read_prompts(prompts, settings)
    if not requests and not bad:
        raise ChaiError(f"{'standard input' if prompts == '-' else prompts} holds no prompts")
    if limit is not None:
        requests = [r for r in requests if r.index <= limit]
        bad = [b for b in bad if b.index <= limit]
    placement = Placement(device, dtype, offload, attention_backend, compile, vae_tiling, tuple(lora or ()))
    options = Options(out, record, placement, method, scheduler, scale, metadata, overwrite)
    console = Console(stderr=True)
    batch = Batch(options, progress.choose(console, quiet))
    if dry_run:
        todo, finished = batch.plan(requests)
        for job in todo:
            typer.echo(f"render {job.file}")
        for line in bad:
            console.print(f"line {line.line}: {line.why}", markup=False, highlight=False, soft_wrap=True)
        typer.echo(f"{len(todo)} to render, {len(finished)} already there, {len(bad)} bad lines")
        raise typer.Exit(1 if bad else 0)

    def load() -> Renderer:
        from chai_cli.backbones.base import load as load_backbone
        from chai_cli.render import Renderer

        if not quiet:
            console.print(f"loading {record.name} …", highlight=False)
        return Renderer(load_backbone(record, placement), method, batch.scratch, batch.scale, metadata)

    began = time.monotonic()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        batch.run(requests, bad, load)
    except KeyboardInterrupt:
        tell_if_heard(batch, console, json, quiet, began)
        console.print("interrupted; run the same command again to go on", highlight=False)
        raise typer.Exit(130) from None
    tell_if_heard(batch, console, json, quiet, began)
    raise typer.Exit(1 if any(row.status == "failed" for row in batch.rows) else 0)


def option(name: str, value: object) -> Any:
    """A checked option; complaints name it as it is written on the command line."""
    from chai_cli.errors import ChaiError
    from chai_cli.prompts import check

    try:
        return check(name, value)
    except ValueError as error:
        raise ChaiError(f"--{name.replace('_', '-')}{str(error).removeprefix(name)}") from None


def interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def tell_if_heard(batch: Batch, console: Console, json: bool, quiet: bool, began: float) -> None:
    """`tell`, but a reader that went away (`| head -1`) is no failure."""
    try:
        tell(batch, console, json, quiet, began)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(batch: Batch, console: Console, json: bool, quiet: bool, began: float) -> None:
    """Rows on stdout: as JSON lines, or as a table with totals."""
    from rich.console import Console

    from chai_cli import report

    if json:
        for row in batch.rows:
            sys.stdout.write(row.json() + "\n")
        sys.stdout.flush()
    elif not quiet:
        output = Console(width=None if sys.stdout.isatty() else 160)
        if any(row.status != "skipped" for row in batch.rows):
            output.print(report.table(batch.rows))
        output.print(report.summary(batch.rows, time.monotonic() - began), markup=False, highlight=False, soft_wrap=True)
        if any(row.status != "failed" for row in batch.rows):
            output.print(f"videos and report.jsonl are in {batch.options.out}", markup=False, highlight=False, soft_wrap=True)
