"""What reuse buys on the embedded model, and what it costs.

python -m chai_cli.embedded.reuse fidelity     what the judge reads: dense, dense in as few steps (the control), hits
python -m chai_cli.embedded.reuse cost         model calls and seconds from prompt to mp4: dense, miss, hit, control in turns
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from chai_cli.backbones.base import Backbone, Look, resolve
from chai_cli.denoise import denoise
from chai_cli.donors import CacheOptions, Donors
from chai_cli.embedded.captions import full_caption
from chai_cli.embedded.evaluate import SEEDS, WEIGHTS, accuracy, markdown, prepare, stacked
from chai_cli.embedded.judge import Judge, Reading
from chai_cli.embedded.world import ATTRIBUTES, Scene, scenes
from chai_cli.prompts import Settings
from chai_cli.render import Renderer, Understood
from chai_cli.report import Report, Row
from chai_cli.reuse.base import Donor, Plan
from chai_cli.reuse.cache_attention import CacheAttention, CacheAttentionOptions
from chai_cli.reuse.dense import Dense

app = typer.Typer(help=__doc__, no_args_is_help=True)

BATCH = 16
DONOR_SEEDS = {"object": 91, "place": 92, "both": 93}
SHARED = {"object": ("shape", "colour", "size"), "place": ("background",), "both": ("background", "shape", "colour", "size")}
VARIANTS = {
    "match sigma": {"match": "sigma"},
    "match final": {"match": "final"},
    "append": {"mode": "append"},
    "sides cond": {"sides": "cond"},
    "all steps": {"steps": tuple(range(1, 9)), "match": "sigma"},
}


class Batched(CacheAttention):
    """Many requests at once: noise for each."""

    def __init__(self, backbone: Backbone, donor: Donor, options: CacheAttentionOptions, noise: Tensor) -> None:
        super().__init__(backbone, donor, options)
        self.noise = noise

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        return self.noise


def donor_scene(target: Scene, kind: str, number: int) -> Scene:
    """A scene that shares with the target exactly what the kind says; all else differs."""
    for scene in scenes(DONOR_SEEDS[kind] * 100_003 + number, 1):
        thing, wanted = scene.things[0], target.things[0]
        same = {name: getattr(wanted, name) for name in SHARED[kind] if name != "background"}
        background = target.background if "background" in SHARED[kind] else scene.background
        made = Scene(background, (replace(thing, **same),), scene.seed)
        others = [name for name in ATTRIBUTES if name not in SHARED[kind]]
        if all(value(made, name) != value(target, name) for name in others if name != "size"):
            return made
    raise AssertionError


def value(scene: Scene, name: str) -> str:
    return scene.background if name == "background" else getattr(scene.things[0], name)


@dataclass
class Study:
    """Renders batches of prompts, each with its own seed, and has them read."""

    backbone: Backbone
    judge: Judge
    look: Look

    def noise(self, first: int, count: int) -> Tensor:
        return torch.cat([self.backbone.noise(replace(self.look, seed=first + i)) for i in range(count)])

    def read(self, latents: Tensor) -> list[Reading]:
        return self.judge.read(np.stack([self.backbone.decode(one) for one in latents.split(1)]))

    def donor(self, prompts: list[str], first: int) -> Donor:
        """A dense run of all prompts that keeps every step."""
        text = stacked([self.backbone.encode(prompt, self.look) for prompt in prompts])
        every = frozenset(range(self.look.num_inference_steps))
        run = denoise(self.backbone, Dense(every, latents=self.noise(first, len(prompts))), self.look, text)
        return Donor(run.kept, {step: run.sigmas[step] for step in run.kept}, run.latents)


@app.command()
def fidelity(
    count: Annotated[int, typer.Option(help="Prompts; the tables so far are printed every 16.")] = 64,
    fast_steps: int = 8,
    variants: Annotated[bool, typer.Option(help="Also the other ways of reading a donor.")] = False,
) -> None:
    """Held-out prompts with one object, every attribute named; donors share the object, the place, or both, never the motion."""
    backbone, judge = prepare("embedded", WEIGHTS / "judge", "float32")
    study = Study(backbone, judge, resolve(backbone.record, Settings(), None))
    few = replace(study.look, num_inference_steps=fast_steps)
    shown = list(islice(scenes(SEEDS["single"], 1, held=True), count))
    verdicts: dict[str, list[dict[str, bool]]] = {}
    drift: dict[str, list[dict[str, bool]]] = {}
    for start in range(0, count, BATCH):
        part = shown[start : start + BATCH]
        noise = study.noise(1000 + start, len(part))
        text = stacked([backbone.encode(full_caption(scene), study.look) for scene in part])

        def add(name: str, latents: Tensor, part: list[Scene] = part, givers: Sequence[Scene] = ()) -> None:
            readings = study.read(latents)
            verdicts.setdefault(name, []).extend(r.right(scene) for r, scene in zip(readings, part, strict=True))
            drift.setdefault(name, []).extend(r.right(scene) for r, scene in zip(readings, givers, strict=bool(givers)))

        add(f"dense {study.look.num_inference_steps}", denoise(backbone, Dense(latents=noise), study.look, text).latents)
        add(f"dense {fast_steps} (control)", denoise(backbone, Dense(latents=noise), few, text).latents)
        for kind in SHARED:
            givers = [donor_scene(scene, kind, 1000 * start + i) for i, scene in enumerate(part)]
            donor = study.donor([full_caption(scene) for scene in givers], 50_000 + start)
            tried = {"": {}, **(VARIANTS if variants and kind == "object" else {})}
            for name, options in tried.items():
                method = Batched(backbone, donor, CacheAttentionOptions(fast_steps, **options), noise)  # type: ignore[arg-type]
                label = f"hit {fast_steps}, same {kind}{', ' if name else ''}{name}"
                latents = denoise(backbone, method, study.look, text).latents
                add(label, latents, givers=givers)
        print(fidelity_tables(start + len(part), study.look, verdicts, drift), flush=True)


def fidelity_tables(
    count: int, look: Look, verdicts: dict[str, list[dict[str, bool]]], drift: dict[str, list[dict[str, bool]]]
) -> str:
    """What the judge reads in each way of rendering, and in how many hits it reads the donor instead."""
    right = markdown([(label, accuracy(found)) for label, found in verdicts.items()], "way, steps")
    theirs = markdown([(label, accuracy(found)) for label, found in drift.items() if found], "way, steps")
    return (
        f"\n{count} prompts, scheduler {look.scheduler}: attributes of the prompt\n\n{right}\n\n"
        f"The same hits: attributes of the donor (those that it does not share should be near zero)\n\n{theirs}"
    )


@app.command()
def cost(rounds: int = 9) -> None:
    """One prompt each way in turn, in one process; medians of the whole way from prompt to mp4."""
    backbone, _ = prepare("embedded", WEIGHTS / "judge", "float32")
    look = resolve(backbone.record, Settings(), None)
    options = CacheAttentionOptions()
    donor_prompt, asked = "a large red ball bounces on a snowy field", "a large red ball moves left on a snowy field"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        caches = {name: CacheOptions(scratch / name) for name in ("full", "empty")}
        donors = {name: Donors(backbone.record, backbone, options, cache) for name, cache in caches.items()}
        ways = {"dense": None, "miss": donors["empty"], "hit": donors["full"], "control": None}
        renderers = {name: Renderer(backbone, way, scratch, lambda _: 4, True) for name, way in ways.items()}
        report = Report(scratch / "report.jsonl")
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        calls = {}

        def once(name: str, prompt: str) -> None:
            renderer = renderers[name]
            chosen = replace(look, num_inference_steps=options.fast_steps) if name == "control" else look
            meanings, meaning_seconds = renderer.understand([prompt])
            understood = Understood(*renderer.encode(prompt, chosen), meanings[0] if meanings else None, meaning_seconds)
            made = renderer.render(name, chosen, understood, {"prompt": prompt}, scratch / "a.mp4", lambda *_: None)
            began = time.perf_counter()
            report.append(Row("a", 1, prompt, "done", seconds=made.seconds))
            made.seconds["report"] = time.perf_counter() - began
            seconds[name].append(made.seconds)
            calls[name] = made.model_calls

        once("hit", donor_prompt)
        for name in ways:
            once(name, donor_prompt if name == "miss" else asked)
            seconds[name].clear()
        seconds["hit"].clear()
        for turn in range(rounds):
            for name in ways:
                donors["empty"].store.clear()
                # A text that is new each time: nothing is remembered.
                once(name, f"{asked}, take {turn}" if name != "miss" else f"a small blue star sways, take {turn}")
        for one in donors.values():
            one.close()
    total = {name: statistics.median(s["total"] + s["report"] for s in some) for name, some in seconds.items()}
    print("| way | model calls | seconds | share of dense |\n| --- | ---: | ---: | ---: |")
    for name, median in total.items():
        print(f"| {name} | {calls[name]} | {median:.2f} | {median / total['dense']:.3f} |")
    extra = ("retrieval", "store", "report")
    for name in ("miss", "hit"):
        parts = {key: statistics.median(s[key] for s in seconds[name]) for key in extra}
        told = ", ".join(f"{key} {1000 * value:.1f} ms" for key, value in parts.items())
        print(f"{name}: {told}: {100 * sum(parts.values()) / total['dense']:.2f} % of a dense render")
    print(f"medians of {rounds} rounds; hits are {total['dense'] / total['hit']:.2f}x as fast as dense")


if __name__ == "__main__":
    app()
