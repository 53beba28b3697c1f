"""`chai doctor`: what a bug report needs, and whether this machine can render at all."""

from __future__ import annotations

import json as json_module
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from chai_cli.commands.cache import CacheOption
from chai_cli.commands.options import DeviceOption
from chai_cli.errors import ChaiError, first_line
from chai_cli.machine import processor, versions

PACKAGES = (
    "chai-cli",
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "open_clip_torch",
    "spacy",
    "lmdb",
    "imageio-ffmpeg",
    "typer",
    "numpy",
)
OPTIONAL = ("peft", "cache-dit", "xformers", "flash-attn")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        fine: False if chai cannot work as it should because of it.
    """

    what: str
    found: str
    fine: bool = True


def doctor(
    cache: CacheOption = None,
    device: DeviceOption = None,
    render: Annotated[bool, typer.Option(help="Also render a tiny clip with the bundled model.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Look at everything that a run needs, and render a tiny clip. Paste what it prints into a bug report.

    Exit code 0: all is well, 1: something is not.
    """
    looked: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("system", system),
        ("packages", packages),
        ("devices", devices),
        ("ffmpeg", ffmpeg),
        ("spaCy", language),
        ("settings", settings),
        ("cache", lambda: cached(cache)),
    ]
    if render:
        looked.append(("render", lambda: rendered(device)))
    bad = 0
    for what, look in looked:
        for one in seen(what, look):
            bad += not one.fine
            if json:
                typer.echo(json_module.dumps(asdict(one), ensure_ascii=False))
            else:
                typer.echo(f"{'ok ' if one.fine else 'BAD'} {one.what}: {one.found}")
    raise typer.Exit(1 if bad else 0)


def seen(what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a look finds; whatever goes wrong in it is a finding too."""
    try:
        yield from look()
    except Exception as error:
        said = first_line(error)
        yield Finding(what, said if isinstance(error, ChaiError) else f"{type(error).__name__}: {said}", fine=False)


def system() -> Iterator[Finding]:
    yield Finding("system", f"{platform.platform()}, Python {platform.python_version()} ({sys.executable})")
    memory = total_memory()
    yield Finding("processor", f"{processor()}, {os.cpu_count()} cores{f', {memory:.0f} GB of memory' if memory else ''}")


def total_memory() -> float | None:
    """GB, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, ValueError, OSError):
        return None


def packages() -> Iterator[Finding]:
    found = versions((*PACKAGES, *OPTIONAL))
    for name in (*PACKAGES, *OPTIONAL):
        if name in found:
            yield Finding(name, found[name])
        elif name in PACKAGES:
            yield Finding(name, "not installed; run: pip install chai-cli", fine=False)


def devices() -> Iterator[Finding]:
    import torch

    for number in range(torch.cuda.device_count()):
        own = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        yield Finding(f"cuda:{number}", f"{own.name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, CUDA {torch.version.cuda}")
    if torch.backends.mps.is_available():
        yield Finding("mps", "Apple GPU")
    yield Finding("cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")


def ffmpeg() -> Iterator[Finding]:
    import imageio_ffmpeg

    yield Finding("ffmpeg", f"{imageio_ffmpeg.get_ffmpeg_version()} ({imageio_ffmpeg.get_ffmpeg_exe()})")


def language() -> Iterator[Finding]:
    from chai_cli.tagging import pipeline

    model = pipeline()
    yield Finding("spaCy model", f"{model.meta['lang']}_{model.meta['name']} {model.meta['version']}")


def settings() -> Iterator[Finding]:
    from chai_cli.app import app
    from chai_cli.config import collect, project_file, user_file

    files = [str(file) for file in (project_file(), user_file()) if file and file.is_file()]
    found = collect(typer.main.get_command(app))
    told = ", ".join(sorted({f"{one.option} from {one.source}" for one in found})) or "none outside the command line"
    yield Finding("settings", told if found else f"{told}{f' (in {files})' if files else ''}")


def cached(cache: Path | None) -> Iterator[Finding]:
    from chai_cli.cache import folder, format_bytes
    from store import LatentStore

    path = folder(cache)
    if not (path / "data.mdb").exists():
        yield Finding("cache", f"{path}: empty")
        return
    store = LatentStore(path, readonly=True)
    try:
        ids = store.ids()
        told = f"{path}: {len(ids)} entries, {format_bytes(store.used())} used of {format_bytes(store.file_bytes())}"
        whole = all(store.entry(id) and store.latents(id) for id in {*ids[:1], *ids[-3:]})
    except KeyError:
        whole = False
    finally:
        store.close()
    hint = "the newest are sound" if whole else "some are damaged; when no run is using it: chai cache verify"
    yield Finding("cache", f"{told}; {hint if ids else 'empty'}", whole)


def rendered(device: str | None) -> Iterator[Finding]:
    import tempfile
    from dataclasses import replace

    from chai_cli.backbones.base import Placement, find_record, load, resolve
    from chai_cli.denoise import denoise
    from chai_cli.prompts import Settings
    from chai_cli.reuse.dense import Dense
    from chai_cli.video import read_frames, write_mp4

    began = time.monotonic()
    record = find_record("embedded")
    backbone = load(record, Placement(device=device))
    loaded = time.monotonic()
    look = replace(resolve(record, Settings(), None), num_inference_steps=2, num_frames=5)
    run = denoise(backbone, Dense(), look, backbone.encode("a red ball in a forest", look))
    frames = backbone.decode(run.latents, look)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.mp4"
        write_mp4(frames, file, look.fps, 4, None)
        shape = read_frames(file).shape
    words = f"{shape[2]}x{shape[1]}x{shape[0]} on {backbone.device}"
    yield Finding("render", f"{words}: loaded in {loaded - began:.1f} s, made in {time.monotonic() - loaded:.1f} s")
