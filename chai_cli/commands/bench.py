"""`chai bench`: what reuse buys, on the embedded world or on your own prompts."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from chai_cli.commands import options as o

EXAMPLES = """
Examples:\n
  chai bench --limit 16\n
  chai bench --policy hits --donors 64 --row correction:fast-steps=4 --row chai --row nirvana:scheduler=euler\n
  chai bench --prompts prompts.txt --policy warm --donors 20 --model wan2.1-t2v-1.3b\n
  chai bench --compare bench/bench.json other/bench.json
"""
ROWS = ("correction:fast-steps=4", "chai", "nirvana:scheduler=euler")
WORKLOAD, MEASURE = "The workload", "What is measured"


def require_extra() -> None:
    """Say at once what is missing, not after hours."""
    from importlib.util import find_spec

    from chai_cli.errors import ChaiError

    missing = [name for name in ("scipy", "torchmetrics") if find_spec(name) is None]
    if missing:
        raise ChaiError(f"chai bench needs {' and '.join(missing)}: pip install 'chai-cli[bench]'")


class WorkloadPolicy(enum.StrEnum):
    cold = "cold"
    warm = "warm"
    hits = "hits"


def bench(
    prompts: Annotated[
        str | None,
        typer.Option(help="Your own prompt file instead of the embedded world.", rich_help_panel=WORKLOAD),
    ] = None,
    policy: Annotated[
        WorkloadPolicy,
        typer.Option(
            help="cold: empty cache; warm: --donors rendered before; both keep misses. hits: only the donors are in it.",
            rich_help_panel=WORKLOAD,
        ),
    ] = WorkloadPolicy.cold,
    donors: Annotated[int, typer.Option(min=0, help="Prompts rendered before.", rich_help_panel=WORKLOAD)] = 0,
    count: Annotated[int, typer.Option(min=1, help="Requests drawn from the world.", rich_help_panel=WORKLOAD)] = 256,
    fresh: Annotated[
        float, typer.Option(min=0, max=1, help="World: share of requests about something new.", rich_help_panel=WORKLOAD)
    ] = 0.25,
    popularity: Annotated[
        float, typer.Option(min=0, help="World: Zipf's exponent of how often subjects come back.", rich_help_panel=WORKLOAD)
    ] = 1.0,
    changes: Annotated[
        str, typer.Option(help="World: shares of returns with 1, 2 and 3 attributes changed.", rich_help_panel=WORKLOAD)
    ] = "0.5,0.35,0.15",
    seeds: Annotated[
        str,
        typer.Option(
            help="World: own, every request has its noise; shared, all begin with the same, as the prompts of a text file do.",
            rich_help_panel=WORKLOAD,
        ),
    ] = "own",
    workload_seed: Annotated[int, typer.Option(help="World: seed of the stream.", rich_help_panel=WORKLOAD)] = 0,
    row: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A method with its options, such as chai:match=sigma,steps=1/2/3; can be repeated (default: {', '.join(ROWS)}). "
            "scheduler=euler or unipc goes with any.",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Rows that answer a question: correction, published, variants or starts.", rich_help_panel=MEASURE
        ),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also the in-request caches of diffusers and cache-dit.", rich_help_panel=MEASURE)
    ] = False,
    frontier_steps: Annotated[
        str, typer.Option(help="Steps of plain sampling, beside full ones.", rich_help_panel=MEASURE)
    ] = "1,2,3,4,6,8,12,16",
    frontier_schedulers: Annotated[
        str, typer.Option(help="Solvers of plain sampling.", rich_help_panel=MEASURE)
    ] = "euler,unipc",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first N requests; run again with more to go on.", rich_help_panel=MEASURE),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for bench.json, plots and what a later run goes on from.")
    ] = Path("bench"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget what an earlier run measured.")] = False,
    videos: Annotated[bool, typer.Option("--videos", help="Keep every clip as an mp4.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two bench.json and stop.", metavar="A.json B.json")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of tables.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print one table in Markdown instead.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Also print when reuse fails, and gates against it.")] = False,
    num_inference_steps: o.StepsOption = None,
    guidance_scale: o.GuidanceOption = None,
    negative_prompt: o.NegativeOption = "",
    seed: o.SeedOption = 0,
    height: o.PixelsOption = None,
    width: o.PixelsOption = None,
    num_frames: o.FramesOption = None,
    min_similarity: o.SimilarityOption = None,
    min_coverage: o.CoverageOption = 0.0,
    embedder: o.EmbedderOption = None,
    cache_dtype: o.NumbersOption = o.Numbers.bfloat16,
    model: o.ModelOption = "embedded",
    device: o.DeviceOption = None,
    dtype: o.DtypeOption = None,
    offload: o.OffloadOption = o.Offload.none,
    attention_backend: o.AttentionOption = None,
    compile: o.CompileOption = False,
    vae_tiling: o.TilingOption = False,
    lora: o.LoraOption = None,
) -> None:
    """Measure methods side by side on the same requests, and beside plain sampling with fewer steps.

    Every row is held against the best that plain sampling gives for the same seconds: a method that does not lie above that is
    worth nothing, however fast. Stop it at any time; the same command goes on.
    """
    import json as json_module
    from dataclasses import asdict

    from rich.console import Console

    from chai_cli.bench import output

    if compare is not None:
        typer.echo(output.compare(*compare))
        return
    settings = o.settings_of(
        negative_prompt=negative_prompt,
        seed=seed,
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
    require_extra()
    from chai_cli.backbones.base import Placement, find_record, load
    from chai_cli.bench import workload as w
    from chai_cli.errors import ChaiError

    record = find_record(model)
    if prompts is None:
        if record.unknown_words is None:
            raise ChaiError("the built-in workload is of the embedded models' world; give --prompts FILE for another model")
        law = w.WorldLaw(fresh, popularity, w.parse_changes(changes), workload_seed)
        if any(size is not None for size in (height, width, num_frames)):
            raise ChaiError(
                "the judge of the embedded world reads clips of its own size only; leave out the size, or give --prompts"
            )
        work = w.world(count, policy.value, donors, law, settings, seeds)
    else:
        requests, bad = o.requests_of(prompts, settings)
        for line in bad:
            typer.echo(f"line {line.line}: {line.why}", err=True)
        work = w.from_requests(prompts, requests, policy.value, donors)
    from chai_cli.bench import gates
    from chai_cli.bench.fidelity import critic_for
    from chai_cli.bench.rows import SETS, frontier, row_of
    from chai_cli.bench.run import REFERENCE, Bench, open_folder
    from chai_cli.bench.summary import Table
    from chai_cli.donors import CacheOptions
    from chai_cli.embed import load_embedder
    from chai_cli.gallery.bench import write_bench

    specs = [REFERENCE, *(row or (() if set_ else ROWS))]
    for name in set_ or ():
        if name not in SETS:
            raise ChaiError(f"--set is one of {', '.join(SETS)}, not {name!r}")
        specs += SETS[name]
    if peers:
        from chai_cli.bench.peers import CURVES

        specs += CURVES
    rows = [row_of(spec) for spec in dict.fromkeys(specs)]
    few = o.numbers("--frontier-steps", frontier_steps)
    solvers = [name.strip() for name in frontier_schedulers.split(",") if name.strip()]
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    placement = Placement(device, dtype, offload, attention_backend, compile, vae_tiling, tuple(lora or ()))
    backbone = load(record, placement)
    tower = embedder or record.embedder
    texts = load_embedder(tower)
    asked = {
        "fingerprint": backbone.fingerprint,
        "workload": work.identity(),
        "settings": asdict(settings),
        "cache": [texts.name, min_similarity, min_coverage, cache_dtype.value],
        "placement": asdict(placement),
        "machine": output.machine(backbone),
    }
    open_folder(out, asked, overwrite)
    caching = CacheOptions(
        out, numbers=cache_dtype.value, min_similarity=min_similarity, embedder=embedder, min_coverage=min_coverage
    )
    critic = critic_for(prompts is None, tower, str(backbone.device))
    made = Bench(backbone, critic, texts, work, rows, out, caching, say, videos)
    steps = [made.look(case, None).num_inference_steps for case in work.cases]
    known = {one.label for one in rows}
    made.rows += [one for one in frontier(max(steps), made.own_scheduler(), few, solvers) if one.label not in known]
    say(output.workload_words(work))
    o.end_politely()
    interrupted = False
    try:
        measured = made.run(limit)
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        interrupted, measured = True, made.found(limit)
    table = Table(work, made.rows, {(m.row, m.case): m for m in measured}, made.entry_bytes, made.own_scheduler())
    summaries = table.summaries()
    document = output.document(table, summaries, backbone, asked)
    (out / "bench.json").write_text(json_module.dumps(document, default=str))
    if json:
        sys.stdout.write(json_module.dumps([asdict(one) for one in summaries]) + "\n")
    elif markdown:
        typer.echo(output.markdown(table, summaries))
    else:
        output.print_tables(table, summaries)
    if why:
        typer.echo("\n" + gates.words(gates.gates(table), gates.changes(table)))
    try:
        pictures = output.plots(table, summaries, out) if table.cases else []
    except ChaiError as error:
        say(str(error))
        pictures = []
    try:
        pages = [write_bench(out, document)] if table.cases else []
    except ChaiError as error:
        say(str(error))
        pages = []
    say(f"written: {', '.join(str(path) for path in [out / 'bench.json', *pictures, *pages])}")
    for text in output.warnings(table):
        say(text)
    raise typer.Exit(130 if interrupted else 1 if table.errors or table.dropped else 0)
