"""`chai gen`: a prompt file into videos."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chai_cli.commands import options as o
from chai_cli.errors import ChaiError

if TYPE_CHECKING:
    from rich.console import Console

    from chai_cli.batch import Batch
    from chai_cli.render import Renderer

STDERR = 2
EXAMPLES = """
Examples:\n
  chai gen samples/prompts.txt --out videos\n
  chai gen prompts.jsonl --out videos --model wan2.1-t2v-1.3b --num-inference-steps 30\n
  echo "a red ball bounces at sunset" | chai gen - --out videos\n
  chai gen prompts.csv --out videos --limit 3 --dry-run
"""


def gen(
    prompts: o.PromptsArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the videos and report.jsonl.")] = Path("videos"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Render again what is already there.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts of the file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be rendered or hit, and stop.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata/--no-metadata", help="Write prompt and settings into the mp4.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines instead of a table.")] = False,
    gallery: Annotated[bool, typer.Option("--gallery/--no-gallery", help="Write index.html, a page of all clips.")] = True,
    preview: Annotated[bool, typer.Option("--preview", help="Show the clip in the making in preview.gif.")] = False,
    notify: Annotated[
        str | None, typer.Option(help="A shell command to run at the end; CHAI_RUN_* tell it how it went.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table: only failures.")] = False,
    num_inference_steps: o.StepsOption = None,
    scheduler: o.SchedulerOption = None,
    guidance_scale: o.GuidanceOption = None,
    negative_prompt: o.NegativeOption = "",
    seed: o.SeedOption = 0,
    height: o.PixelsOption = None,
    width: o.PixelsOption = None,
    num_frames: o.FramesOption = None,
    resolution: o.ResolutionOption = None,
    aspect_ratio: o.AspectOption = None,
    duration: o.DurationOption = None,
    fps: o.FpsOption = None,
    aesthetic_score: o.AestheticOption = None,
    scale: o.ScaleOption = None,
    method: Annotated[
        str,
        typer.Option(help=o.METHOD_HELP, rich_help_panel=o.CACHE, autocompletion=o.methods_like),
    ] = o.METHOD,
    cache: o.CacheOption = None,
    cache_budget: o.BudgetOption = "1GB",
    cache_policy: o.PolicyOption = o.Policy.lru,
    cache_dtype: o.NumbersOption = o.Numbers.bfloat16,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Neither read nor fill it: the same as --method dense.", rich_help_panel=o.CACHE),
    ] = False,
    read_only_cache: Annotated[
        bool, typer.Option("--read-only-cache", help="Reuse, but keep nothing.", rich_help_panel=o.CACHE)
    ] = False,
    tenant: o.TenantOption = "",
    min_similarity: o.SimilarityOption = None,
    min_coverage: o.CoverageOption = 0.0,
    embedder: o.EmbedderOption = None,
    fast_steps: o.FastStepsOption = None,
    match: o.MatchOption = None,
    cache_steps: o.CacheStepsOption = None,
    cache_blocks: o.CacheBlocksOption = None,
    cache_mode: o.CacheModeOption = None,
    cache_sides: o.CacheSidesOption = None,
    model: o.ModelOption = "embedded",
    device: o.DeviceOption = None,
    dtype: o.DtypeOption = None,
    offload: o.OffloadOption = o.Offload.none,
    attention_backend: o.AttentionOption = None,
    compile: o.CompileOption = False,
    vae_tiling: o.TilingOption = False,
    lora: o.LoraOption = None,
) -> None:
    """Render every prompt of a file into an mp4.

    Run the same command again to go on where it stopped: finished videos are skipped unless their request changed.
    Exit code 0: all rendered, 1: some failed, 2: wrong usage, 130: interrupted.
    """
    from rich.console import Console

    from chai_cli import progress
    from chai_cli.backbones.base import Placement, find_record
    from chai_cli.batch import Batch, Options

    record = find_record(model)
    reuse = o.method_of(method, record, fast_steps, match, cache_steps, cache_blocks, cache_mode, cache_sides)
    if no_cache and read_only_cache:
        raise ChaiError("--no-cache reads nothing either; give it or --read-only-cache")
    if no_cache:
        reuse = None
    caching = o.cache_options(
        cache, cache_budget, cache_policy, cache_dtype, tenant, min_similarity, embedder, read_only_cache, min_coverage
    )
    settings = o.settings_of(
        negative_prompt=negative_prompt,
        seed=seed,
        **o.preset(record, resolution, aspect_ratio, duration, height, width, num_frames, aesthetic_score),
        fps=fps,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
    requests, bad = o.requests_of(prompts, settings)
    if limit is not None:
        requests = [r for r in requests if r.index <= limit]
        bad = [b for b in bad if b.index <= limit]
    placement = Placement(device, dtype, offload, attention_backend, compile, vae_tiling, tuple(lora or ()))
    options = Options(
        out,
        record,
        placement,
        reuse,
        method.partition(":")[0] if reuse else "dense",
        scheduler,
        scale,
        metadata,
        overwrite,
        gallery,
        preview,
    )
    console = Console(stderr=True)
    batch = Batch(options, progress.choose(console, quiet))
    if dry_run:
        todo, finished = batch.plan(requests)
        misfits = batch.misfits(todo)
        found = batch.predict(todo, caching)
        hits = 0
        for job in todo:
            lookup = found.get(job.file)
            hit = lookup is not None and lookup.donor is not None and job.file not in misfits
            hits += hit
            what = "fail" if job.file in misfits else "hit" if hit else "render"
            why = misfits.get(job.file) or (lookup.why if lookup else "")
            if (out / job.file).exists() and job.file not in misfits:
                why = f"{why}; replaces the video that is there".removeprefix("; ")
            if json:
                sys.stdout.write(
                    json_module.dumps({"file": job.file, "prompt": job.request.prompt, "outcome": what, "why": why}) + "\n"
                )
            else:
                typer.echo(f"{what} {job.file}{why and f': {why}'}")
        for line in bad:
            console.print(f"line {line.line}: {line.why}", markup=False, highlight=False, soft_wrap=True)
        predicted = f" ({hits} of them hits on the present cache)" if reuse else ""
        failing = f", {len(misfits)} that cannot be rendered" if misfits else ""
        parts = f"{len(todo) - len(misfits)} to render{predicted}{failing}, {len(finished)} already there, {len(bad)} bad lines"
        typer.echo(parts, err=json)
        raise typer.Exit(1 if bad or misfits else 0)

    def load() -> Renderer:
        from chai_cli.backbones.base import load as load_backbone
        from chai_cli.render import Renderer

        if not quiet:
            console.print(f"loading {record.name} …", highlight=False)
        backbone = load_backbone(record, placement)
        return Renderer(backbone, o.open_donors(backbone, reuse, caching, batch.progress), batch.scratch, batch.scale, metadata)

    began = time.monotonic()
    o.end_politely()
    try:
        batch.run(requests, bad, load)
        code = 1 if any(row.status == "failed" for row in batch.rows) else 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if notify:
            run_notify(notify, batch, 2 if isinstance(error, ChaiError) else 1, began, console)
        raise
    tell_if_heard(batch, console, json, quiet, began)
    if code == 130:
        console.print("interrupted; run the same command again to go on", highlight=False)
    if notify:
        run_notify(notify, batch, code, began, console)
    raise typer.Exit(code)


def run_notify(command: str, batch: Batch, code: int, began: float, console: Console) -> None:
    """Run the user's command; what becomes of it does not change the exit code."""
    from chai_cli import report
    from chai_cli.batch import STATUSES

    told = {
        "OUT": str(batch.options.out),
        "EXIT": str(code),
        "SECONDS": f"{time.monotonic() - began:.0f}",
        "SUMMARY": report.summary(batch.rows, time.monotonic() - began),
        **{status.upper(): str(sum(row.status == status for row in batch.rows)) for status in STATUSES},
    }
    environment = {**os.environ, **{f"CHAI_RUN_{name}": text for name, text in told.items()}}
    try:  # what it says does not go among the rows
        made = subprocess.run(command, shell=True, env=environment, stdin=subprocess.DEVNULL, stdout=STDERR)
    except (OSError, ValueError, KeyboardInterrupt) as error:
        console.print(f"the --notify command did not run: {error or 'interrupted'}", markup=False, highlight=False)
        return
    if made.returncode:
        console.print(f"the --notify command ended with exit code {made.returncode}", highlight=False)


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
        output = Console(width=None if sys.stdout.isatty() else 176)
        if any(row.status != "skipped" for row in batch.rows):
            output.print(report.table(batch.rows))
        for line in (report.gains(batch.rows), report.summary(batch.rows, time.monotonic() - began)):
            if line:
                output.print(line, markup=False, highlight=False, soft_wrap=True)
        if any(row.status != "failed" for row in batch.rows):
            page = batch.options.gallery and not (batch.gallery and batch.gallery.trouble)
            what = f"videos and report.jsonl are in {batch.options.out}"
            what += f"; look at them in {batch.options.out / 'index.html'}" if page else ""
            output.print(what, markup=False, highlight=False, soft_wrap=True)
