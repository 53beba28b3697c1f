"""Options that commands share: the model and where it runs, how a video looks, the cache, reuse."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from chai_cli.backbones.base import Backbone, ModelRecord
    from chai_cli.donors import CacheOptions, Donors
    from chai_cli.progress import Progress
    from chai_cli.prompts import BadLine, Request, Settings
    from chai_cli.reuse.base import Reuse

MODEL = "The model and where it runs"
LOOK = "How videos look"
CACHE = "The cache"
REUSE = "How a hit reuses its donor"


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


class Policy(enum.StrEnum):
    lru = "lru"
    lfu = "lfu"
    lcbfu = "lcbfu"


class Numbers(enum.StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    int8 = "int8"


Match = enum.StrEnum("Match", {"index": "index", "sigma": "sigma", "final": "final"})
CacheMode = enum.StrEnum("CacheMode", {"replace": "replace", "append": "append"})


class CacheSides(enum.StrEnum):
    cond = "cond"
    both = "both"


def models_like(incomplete: str) -> list[str]:
    """Names and folders, for the shell."""
    import glob

    from chai_cli.backbones.base import RECORDS

    folders = (folder for folder in glob.glob(f"{glob.escape(incomplete)}*/") if incomplete)
    return [*(name for name in RECORDS if name.startswith(incomplete)), *folders]


def methods_like(incomplete: str) -> list[str]:
    """For the shell."""
    from chai_cli.reuse import names

    return [name for name in names() if name.startswith(incomplete)]


def sizes_like(table: str) -> Callable[[str], list[str]]:
    """Names out of a table of the families that have sizes by name, for the shell."""

    def names(incomplete: str) -> list[str]:
        from chai_cli.backbones.base import FAMILIES

        presets = [family.load(family.presets) for family in FAMILIES.values() if family.presets]
        return [name for sizes in presets for name in getattr(sizes, table) if name.startswith(incomplete)]

    return names


PromptsArgument = Annotated[str, typer.Argument(help="Prompt file: .txt (one a line), .jsonl, .csv, or - for standard input.")]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="CHAI_MODEL",
        help="A name from `chai models`, a folder, or a hub id.",
        rich_help_panel=MODEL,
        autocompletion=models_like,
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cuda, cuda:1, mps or cpu (default: the best there is).", rich_help_panel=MODEL)
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="(default: bfloat16 on cuda, float16 on mps, float32 on the CPU)", rich_help_panel=MODEL),
]
OffloadOption = Annotated[
    Offload, typer.Option(help="Keep parts of the model in main memory: slower, smaller.", rich_help_panel=MODEL)
]
AttentionOption = Annotated[
    str | None, typer.Option(help="A diffusers attention backend, such as sage or flash.", rich_help_panel=MODEL)
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the transformer's blocks (slow first video).", rich_help_panel=MODEL)
]
TilingOption = Annotated[
    bool, typer.Option("--vae-tiling", help="Decode in tiles: less memory, slower.", rich_help_panel=MODEL)
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(help="LoRA weights, path or path:strength; can be repeated.", rich_help_panel=MODEL),
]
StepsOption = Annotated[
    int | None,
    typer.Option("--num-inference-steps", "--steps", help="Solver steps (default: the model's).", rich_help_panel=LOOK),
]
SchedulerOption = Annotated[Scheduler | None, typer.Option(help="Solver (default: the model's own).", rich_help_panel=LOOK)]
GuidanceOption = Annotated[
    float | None,
    typer.Option(help="Classifier-free guidance; 1 turns it off (default: the model's).", rich_help_panel=LOOK),
]
NegativeOption = Annotated[str, typer.Option(help="What the video should not show.", rich_help_panel=LOOK)]
SeedOption = Annotated[int, typer.Option(help="Seed of every prompt that names none of its own.", rich_help_panel=LOOK)]
PixelsOption = Annotated[int | None, typer.Option(help="Pixels (default: the model's).", rich_help_panel=LOOK)]
FramesOption = Annotated[
    int | None, typer.Option(help="Frames; Wan: a multiple of 4 plus 1 (default: the model's).", rich_help_panel=LOOK)
]
ResolutionOption = Annotated[
    str | None,
    typer.Option(
        help="Open-Sora: 144p, 240p, 360p, 480p or 720p, instead of height and width.",
        rich_help_panel=LOOK,
        autocompletion=sizes_like("SIZES"),
    ),
]
AspectOption = Annotated[
    str | None, typer.Option(help="Open-Sora: width:height, such as 16:9 (the default), 1:1 or 9:16.", rich_help_panel=LOOK)
]
DurationOption = Annotated[
    str | None,
    typer.Option(
        help="Open-Sora: 2s, 4s, 8s or 16s, instead of a number of frames.",
        rich_help_panel=LOOK,
        autocompletion=sizes_like("DURATIONS"),
    ),
]
AestheticOption = Annotated[
    float | None,
    typer.Option(help="Open-Sora: the score that prompts are marked with (default: 6.5; 0 for none).", rich_help_panel=LOOK),
]
FpsOption = Annotated[int | None, typer.Option(help="Frames a second (default: the model's).", rich_help_panel=LOOK)]
ScaleOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=64, help="Enlarge by this whole factor (default: small clips to 256 pixels).", rich_help_panel=LOOK
    ),
]
CacheOption = Annotated[
    Path | None,
    typer.Option(envvar="CHAI_CACHE", help="Folder of the cache (default: in your user cache).", rich_help_panel=CACHE),
]
BudgetOption = Annotated[
    str, typer.Option(help="Bytes on disk, such as 500MB or 2GiB; old entries make room.", rich_help_panel=CACHE)
]
PolicyOption = Annotated[Policy, typer.Option(help="Which entries make room first.", rich_help_panel=CACHE)]
NumbersOption = Annotated[Numbers, typer.Option(help="How latents are stored.", rich_help_panel=CACHE)]
TenantOption = Annotated[str, typer.Option(help="Label of a user; tenants never share entries.", rich_help_panel=CACHE)]
SimilarityOption = Annotated[
    float | None,
    typer.Option(
        min=-1, max=1, help="Cosine from which two entities are the same (default: the embedder's).", rich_help_panel=CACHE
    ),
]
CoverageOption = Annotated[
    float,
    typer.Option(min=0, max=1, help="Share of a prompt's entities that a donor must have.", rich_help_panel=CACHE),
]
EmbedderOption = Annotated[
    str | None,
    typer.Option(
        help="open_clip model that compares prompts: a name or a folder (default: the model's).", rich_help_panel=CACHE
    ),
]
FastStepsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Solver steps of a hit (default: 8, of the bundled model 4; nirvana: those of the request).",
        rich_help_panel=REUSE,
    ),
]
MatchOption = Annotated[
    Match | None,
    typer.Option(
        help="The donor's latents of the same step, of the nearest noise level, or its final ones (default: index).",
        rich_help_panel=REUSE,
    ),
]
CacheStepsOption = Annotated[
    str | None, typer.Option(help="Steps that read the donor, from 1 (default: 2,3,4).", rich_help_panel=REUSE)
]
CacheBlocksOption = Annotated[str | None, typer.Option(help="Blocks that read it, from 1 (default: 1).", rich_help_panel=REUSE)]
CacheModeOption = Annotated[
    CacheMode | None,
    typer.Option(
        help="The donor's keys and values instead of the current ones, or beside them (default: replace).",
        rich_help_panel=REUSE,
    ),
]
CacheSidesOption = Annotated[
    CacheSides | None, typer.Option(help="Sides of guidance that read it (default: both).", rich_help_panel=REUSE)
]
METHOD = "correction"
METHOD_HELP = (
    "correction takes few steps and mends them by what full renders in the cache teach; chai attends to a related render, "
    "nirvana starts from it; dense is plain full-step sampling. Options of a method may stand behind it: nirvana:source=clean."
)


def end_politely() -> None:
    """A kill that asks, or a terminal that goes away, ends a run like Ctrl-C (`nohup` keeps it going)."""
    import signal

    signal.signal(signal.SIGTERM, interrupt)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is signal.SIG_DFL:
        signal.signal(hangup, interrupt)


def interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`2,3,4` as numbers from 1, in order, without doubles."""
    from chai_cli.errors import ChaiError

    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise ChaiError(f"{option} takes numbers from 1 with commas, such as 2,3,4, not {text!r}")
    return tuple(found)


def settings_of(**given: Any) -> Settings:
    """Checked settings of a command line; complaints name an option as it is written there."""
    from chai_cli.errors import ChaiError
    from chai_cli.prompts import Settings, check

    found = {}
    for name, value in given.items():
        if value is not None:
            try:
                found[name] = check(name, value)
            except ValueError as error:
                raise ChaiError(f"--{name.replace('_', '-')}{str(error).removeprefix(name)}") from None
    return Settings(**found)


def preset(
    record: ModelRecord,
    resolution: str | None,
    aspect_ratio: str | None,
    duration: str | None,
    height: int | None,
    width: int | None,
    num_frames: int | None,
    aesthetic_score: float | None,
) -> dict[str, float | None]:
    """Settings that only some families know: sizes by name (as height, width and frames), and the score of prompts.

    Raises:
        ChaiError: a name that it does not have, or the same thing said twice.
    """
    from chai_cli.backbones.base import FAMILIES
    from chai_cli.errors import ChaiError

    family = FAMILIES[record.family]
    named = {"--resolution": resolution, "--aspect-ratio": aspect_ratio, "--duration": duration}
    given = [option for option, value in named.items() if value is not None]
    if given and not record.named_sizes:
        raise ChaiError(f"{record.name} has no sizes by name: give --height, --width and --num-frames instead of {given[0]}")
    if aesthetic_score is not None and record.aesthetic_score is None:
        raise ChaiError(f"{record.name} has no aesthetic score; leave out --aesthetic-score")
    if (resolution or aspect_ratio) and (height or width):
        raise ChaiError(f"give either --height and --width or {given[0]}")
    if duration and num_frames:
        raise ChaiError("give either --num-frames or --duration")
    if record.named_sizes and family.presets:
        sizes = family.load(family.presets)
        if resolution or aspect_ratio:
            height, width = sizes.size_of(resolution or sizes.RESOLUTION, aspect_ratio or sizes.ASPECT_RATIO)
        if duration:
            num_frames = sizes.frames_of(duration)
    return {"height": height, "width": width, "num_frames": num_frames, "aesthetic_score": aesthetic_score}


def requests_of(prompts: str, settings: Settings) -> tuple[list[Request], list[BadLine]]:
    """The prompts of a file; one that holds none is wrong usage."""
    from chai_cli.errors import ChaiError
    from chai_cli.prompts import read_prompts

    requests, bad = read_prompts(prompts, settings)
    if not requests and not bad:
        raise ChaiError(f"{'standard input' if prompts == '-' else prompts} holds no prompts")
    return requests, bad


def method_of(
    method: str,
    record: ModelRecord,
    fast_steps: int | None,
    match: Match | None,
    steps: str | None,
    blocks: str | None,
    mode: CacheMode | None = None,
    sides: CacheSides | None = None,
) -> Reuse | None:
    """The method of a command line; None for one that reuses nothing."""
    from chai_cli.reuse import reuse_of

    named = {"steps": "--cache-steps", "blocks": "--cache-blocks", "mode": "--cache-mode", "sides": "--cache-sides"}
    measured = record.fast_steps if method.partition(":")[0] == METHOD else None
    given = {
        "fast_steps": measured if fast_steps is None else fast_steps,
        "match": match and match.value,
        "steps": steps and numbers("--cache-steps", steps),
        "blocks": blocks and numbers("--cache-blocks", blocks),
        "mode": mode and mode.value,
        "sides": sides and sides.value,
    }
    return reuse_of(method, given, named)


def cache_options(
    cache: Path | None,
    budget: str,
    policy: Policy,
    dtype: Numbers,
    tenant: str,
    min_similarity: float | None,
    embedder: str | None,
    readonly: bool,
    min_coverage: float,
) -> CacheOptions:
    from chai_cli.cache import folder, parse_bytes
    from chai_cli.donors import CacheOptions

    return CacheOptions(
        folder(cache), parse_bytes(budget), policy.value, dtype.value, readonly, tenant, min_similarity, embedder, min_coverage
    )


def open_donors(backbone: Backbone, reuse: Reuse | None, options: CacheOptions, progress: Progress) -> Donors | None:
    """The cache for a run; a cache that cannot be used is told about, and costs no video."""
    if reuse is None:
        return None
    from chai_cli.donors import Donors

    reuse.check(backbone)
    donors = Donors(backbone.record, backbone, reuse, options)
    if donors.trouble:
        progress.note(f"no reuse: {donors.trouble}")
    return donors
