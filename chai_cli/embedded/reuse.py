"""What reuse buys on the embedded model, and what it costs.

python -m chai_cli.embedded.reuse pairs     what the judge reads of hits whose donor differs in known attributes, beside plain sampling
python -m chai_cli.embedded.reuse cost      model calls and seconds from prompt to mp4: dense, miss, hit, control in turns
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

from chai_cli.backbones.base import Backbone, Look, Text, resolve
from chai_cli.bench.workload import value
from chai_cli.denoise import denoise
from chai_cli.donors import CacheOptions, Donors
from chai_cli.embedded.captions import full_caption
from chai_cli.embedded.evaluate import SEEDS, WEIGHTS, accuracy, markdown, prepare, stacked
from chai_cli.embedded.judge import Judge, Reading
from chai_cli.embedded.world import ATTRIBUTES, Scene, scenes
from chai_cli.prompts import Settings
from chai_cli.render import Renderer, Understood
from chai_cli.report import Report, Row
from chai_cli.reuse import reuse_of
from chai_cli.reuse.base import Donor, Learner, Method, Plan
from chai_cli.reuse.dense import Dense

app = typer.Typer(help=__doc__, no_args_is_help=True)

BATCH = 16
SOLO = (*((name,) for name in ATTRIBUTES), ("background", "colour"), ("shape", "colour"), ("background", "motion"))
ROWS = (
    "chai:fast-steps=4",
    "chai:fast-steps=4,match=final,mode=append",
    "nirvana:fast-steps=6,start-sigma=0.95,source=clean",
    "nirvana:fast-steps=6,start-sigma=0.9,source=clean",
    "nirvana:fast-steps=6,start-sigma=0.8,source=clean",
    "nirvana:fast-steps=6,start-sigma=0.9",
)


class Many:
    """A method on many requests at once: noise for each."""

    def __init__(self, method: Method, noise: Tensor) -> None:
        self.method = method
        self.noise = noise
        self.name = method.name
        self.plan, self.around, self.after = method.plan, method.around, method.after

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        return self.method.start(self.noise, plan)


def donor_scene(target: Scene, differs: Sequence[str], rng: np.random.Generator) -> Scene:
    """The target with other values of some attributes, and a seed of its own."""
    new = {name: str(rng.choice([v for v in ATTRIBUTES[name] if v != value(target, name)])) for name in differs}
    background = new.pop("background", target.background)
    return Scene(background, (replace(target.things[0], **new),), int(rng.integers(2**31)))


@dataclass
class Study:
    """Renders batches of prompts, each with its own seed, and has them read."""

    backbone: Backbone
    judge: Judge
    look: Look

    def noise(self, first: int, count: int) -> Tensor:
        return torch.cat([self.backbone.noise(replace(self.look, seed=first + i)) for i in range(count)])

    def read(self, latents: Tensor) -> list[Reading]:
        return self.judge.read(np.stack([self.backbone.decode(one, self.look) for one in latents.split(1)]))

    def text(self, scenes: Sequence[Scene]) -> Text:
        return stacked([self.backbone.encode(full_caption(scene), self.look) for scene in scenes])

    def donor(self, scenes: Sequence[Scene], first: int) -> Donor:
        """A dense run of all scenes that keeps every step."""
        every = frozenset(range(self.look.num_inference_steps))
        run = denoise(self.backbone, Dense(every, latents=self.noise(first, len(scenes))), self.look, self.text(scenes))
        return Donor(run.kept, {step: run.sigmas[step] for step in run.kept}, run.latents)


@app.command()
def pairs(
    count: Annotated[int, typer.Option(help="Prompts; the tables so far are printed every 16.")] = 64,
    row: Annotated[list[str] | None, typer.Option(help="A method with its options, as in `chai bench`.")] = None,
    differ: Annotated[
        list[str] | None, typer.Option(help="Attributes that donor and prompt differ in, with commas; can be repeated.")
    ] = None,
    plain: Annotated[str, typer.Option(help="Steps of plain sampling beside the full ones.")] = "2,3,4,6,8",
) -> None:
    """Held-out prompts with a donor that differs in exactly the named attributes: what survives of which method."""
    backbone, judge = prepare("embedded", WEIGHTS / "judge", "float32")
    study = Study(backbone, judge, resolve(backbone.record, Settings(), None))
    full = study.look.num_inference_steps
    kinds = [tuple(names.split(",")) for names in differ] if differ else list(SOLO)
    rows = {spec: reuse_of(spec) for spec in row or ROWS}
    for spec, reuse in rows.items():
        if reuse is None or isinstance(reuse, Learner):
            raise typer.BadParameter(f"{spec} has no donor that could differ; chai bench measures it", param_hint="--row")
    shown = list(islice(scenes(SEEDS["single"], 1, held=True), count))
    verdicts: dict[tuple[str, str], list[dict[str, bool]]] = {}
    for start in range(0, count, BATCH):
        part = shown[start : start + BATCH]
        noise, text = study.noise(1000 + start, len(part)), study.text(part)

        def add(label: str, kind: str, latents: Tensor, part: list[Scene] = part) -> None:
            readings = study.read(latents)
            verdicts.setdefault((label, kind), []).extend(r.right(s) for r, s in zip(readings, part, strict=True))

        for steps in [*map(int, plain.split(",")), full]:
            look = replace(study.look, num_inference_steps=steps)
            add(f"dense {steps}", "", denoise(backbone, Dense(latents=noise), look, text).latents)
        for number, kind in enumerate(kinds):
            rng = np.random.default_rng([start, number])
            donor = study.donor([donor_scene(scene, kind, rng) for scene in part], 50_000 + 1000 * number + start)
            for label, reuse in rows.items():
                assert reuse is not None
                method = Many(reuse.hit(backbone, donor), noise)
                add(label, "+".join(kind), denoise(backbone, method, study.look, text).latents)
        print(pair_tables(start + len(part), study.look, verdicts), flush=True)


def pair_tables(count: int, look: Look, verdicts: dict[tuple[str, str], list[dict[str, bool]]]) -> str:
    """Plain sampling, then a table for each kind of donor."""
    parts = [f"\n{count} prompts, scheduler {look.scheduler}"]
    for kind in dict.fromkeys(kind for _, kind in verdicts):
        rows = [(label, accuracy(found)) for (label, of), found in verdicts.items() if of == kind]
        parts.append(f"donor differs in {kind}" if kind else "plain sampling")
        parts.append(markdown(rows, "way"))
    return "\n\n".join(parts)


@app.command()
def cost(
    rounds: int = 9,
    method: Annotated[str, typer.Option(help="A method with its options, as in `chai gen`.")] = "correction:fast-steps=4",
) -> None:
    """One prompt each way in turn, in one process; medians of the whole way from prompt to mp4."""
    backbone, _ = prepare("embedded", WEIGHTS / "judge", "float32")
    look = resolve(backbone.record, Settings(), None)
    options = reuse_of(method)
    if options is None:
        raise typer.BadParameter(f"{method} reuses nothing", param_hint="--method")
    needed = options.least_donors if isinstance(options, Learner) else 1
    donor_prompt, asked = "a large red ball bounces on a snowy field", "a large red ball moves left on a snowy field"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        caches = {name: CacheOptions(scratch / name) for name in ("full", "empty")}
        donors = {name: Donors(backbone.record, backbone, options, cache) for name, cache in caches.items()}
        ways = {"dense": None, "miss": donors["empty"], "hit": donors["full"], "control": None}
        renderers = {name: Renderer(backbone, way, scratch, lambda _: 4, True) for name, way in ways.items()}
        report = Report(scratch / "report.jsonl")
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        calls: dict[str, int] = {}
        steps: dict[str, int] = {}

        def once(name: str, prompt: str) -> None:
            renderer = renderers[name]
            chosen = replace(look, num_inference_steps=steps["hit"]) if name == "control" else look
            meanings, meaning_seconds = renderer.understand([prompt])
            understood = Understood(*renderer.encode(prompt, chosen), meanings[0] if meanings else None, meaning_seconds)
            made = renderer.render(name, chosen, understood, {"prompt": prompt}, scratch / "a.mp4", lambda *_: None)
            began = time.perf_counter()
            report.append(Row("a", 1, prompt, "done", seconds=made.seconds))
            made.seconds["report"] = time.perf_counter() - began
            seconds[name].append(made.seconds)
            calls[name], steps[name] = made.model_calls, made.steps

        for number in range(needed):
            once("hit", f"{donor_prompt}, number {number}")
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
