"""`chai cache warm`: render donors for a prompt file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from chai_cli.commands import options as o

if TYPE_CHECKING:
    from chai_cli.backbones.base import Backbone
    from chai_cli.report import Row

EXAMPLES = """
Examples:\n
  chai cache warm prompts.txt --limit 20\n
  chai cache warm prompts.txt --budget 500MB --model wan2.1-t2v-1.3b
"""


def warm(
    prompts: o.PromptsArgument,
    limit: Annotated[int | None, typer.Option(min=1, help="Render at most so many donors.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which prompts would be rendered, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only failures.")] = False,
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
    cache: o.CacheOption = None,
    budget: Annotated[
        str,
        typer.Option("--budget", "--cache-budget", help="Bytes on disk, such as 500MB or 2GiB.", rich_help_panel=o.CACHE),
    ] = "1GB",
    cache_policy: o.PolicyOption = o.Policy.lru,
    cache_dtype: o.NumbersOption = o.Numbers.bfloat16,
    tenant: o.TenantOption = "",
    min_similarity: o.SimilarityOption = None,
    min_coverage: o.CoverageOption = 0.0,
    embedder: o.EmbedderOption = None,
    method: Annotated[
        str,
        typer.Option(help="What the donors are for, as in `chai gen`.", rich_help_panel=o.CACHE, autocompletion=o.methods_like),
    ] = o.METHOD,
    fast_steps: o.FastStepsOption = None,
    match: o.MatchOption = None,
    cache_steps: o.CacheStepsOption = None,
    cache_blocks: o.CacheBlocksOption = None,
    model: o.ModelOption = "embedded",
    device: o.DeviceOption = None,
    dtype: o.DtypeOption = None,
    offload: o.OffloadOption = o.Offload.none,
    attention_backend: o.AttentionOption = None,
    compile: o.CompileOption = False,
    vae_tiling: o.TilingOption = False,
    lora: o.LoraOption = None,
) -> None:
    """Render what a run of a file will reuse. Stop it at any time; the same command goes on.

    For --method correction that is 16 prompts from all over the file, for other methods those that give the most others a donor.

    Give the settings of the `chai gen` that follows: latents of another size, model or dtype are no donors for it.
    """
    from rich.console import Console

    from chai_cli import progress
    from chai_cli.backbones.base import Placement, find_record, load, read_files
    from chai_cli.donors import Donors
    from chai_cli.errors import ChaiError

    record = find_record(model)
    settings = o.settings_of(
        negative_prompt=negative_prompt,
        seed=seed,
        **o.preset(record, resolution, aspect_ratio, duration, height, width, num_frames, aesthetic_score),
        fps=fps,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
    reuse = o.method_of(method, record, fast_steps, match, cache_steps, cache_blocks)
    if reuse is None:
        raise ChaiError(f"--method {method} reuses nothing and needs no donors")
    caching = o.cache_options(cache, budget, cache_policy, cache_dtype, tenant, min_similarity, embedder, False, min_coverage)
    requests, bad = o.requests_of(prompts, settings)
    placement = Placement(device, dtype, offload, attention_backend, compile, vae_tiling, tuple(lora or ()))
    console = Console(stderr=True)
    for line in bad:
        console.print(f"line {line.line}: {line.why}", markup=False, highlight=False, soft_wrap=True)
    loaded: list[Backbone] = []
    files = read_files(record, placement)
    if files is None:  # it has to be downloaded first
        loaded.append(load(record, placement))
        files = loaded[0]
    donors = Donors(record, files, reuse, caching)
    if donors.trouble:
        raise ChaiError(donors.trouble)

    from chai_cli.render import Renderer
    from chai_cli.warm import choose
    from chai_cli.warm import warm as render_donors

    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        if json:
            sys.stdout.write(row.json() + "\n")
            sys.stdout.flush()

    o.end_politely()
    try:
        choice = choose(requests, record, scheduler, donors, limit)
        typer.echo(choice.words(), err=json)
        if dry_run or not choice.chosen:
            for request, _, _ in choice.chosen:
                typer.echo(f"render {request.name}", err=json)
            raise typer.Exit(1 if bad else 0)
        backbone = loaded[0] if loaded else load(record, placement)
        reuse.check(backbone)
        renderer = Renderer(backbone, donors, caching.path, lambda look: 1, False)
        render_donors(choice, renderer, progress.choose(console, quiet), report)
        entries = len(donors.store)
    except KeyboardInterrupt:
        console.print("interrupted; run the same command again to go on", highlight=False)
        raise typer.Exit(130) from None
    finally:
        donors.close()
    failed = sum(row.status == "failed" for row in rows)
    if not (json or quiet):
        typer.echo(f"{len(rows) - failed} stored, {failed} failed; {entries} entries in {caching.path}")
    raise typer.Exit(1 if failed or bad else 0)
