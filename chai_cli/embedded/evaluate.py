"""How well the embedded model does what it is told: prompts nobody trained on, rendered with plain sampling, read by the judge.

    python -m chai_cli.embedded.evaluate ladder     single objects, every attribute named, all step counts and both solvers
    python -m chai_cli.embedded.evaluate kinds      two objects, and prompts that leave attributes out, at full steps
    python -m chai_cli.embedded.evaluate ceiling    the judge on true clips and on the autoencoder's reconstructions

Results are kept in a file as they come, so that a run can be cut short and goes on where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from chai_cli.backbones.base import Backbone, Look, Placement, Text, find_record, load, resolve
from chai_cli.denoise import denoise
from chai_cli.embedded.captions import caption, full_caption
from chai_cli.embedded.judge import Judge
from chai_cli.embedded.paint import paint
from chai_cli.embedded.world import ATTRIBUTES, Scene, scenes
from chai_cli.prompts import Settings
from chai_cli.reuse.dense import Dense

app = typer.Typer(help=__doc__, no_args_is_help=True)

WEIGHTS = Path(__file__).parent / "weights"
STEPS = (1, 2, 3, 4, 6, 8, 16, 30, 50)
FOUR = ("background", "colour", "shape", "motion")
SEEDS = {"single": 77, "two": 78, "partial": 79}
BATCH = 16

Asked = tuple[str, Scene, frozenset[str]]
ModelOption = Annotated[str, typer.Option(help="Folder of the model, or a name.")]
JudgeOption = Annotated[Path, typer.Option(help="Folder of the judge.")]
CountOption = Annotated[int, typer.Option(help="Prompts.")]
ResultsOption = Annotated[Path | None, typer.Option(help="File to keep results in and go on from.")]


def asked(kind: str, count: int) -> list[Asked]:
    """Prompts with their scenes and the attributes each names; objects in held-out combinations only."""
    stream = islice(scenes(SEEDS[kind], 2 if kind == "two" else 1, held=True), count)
    if kind != "partial":
        return [(full_caption(scene), scene, frozenset(ATTRIBUTES)) for scene in stream]
    rng = np.random.default_rng(SEEDS[kind])
    prompts = []
    for scene in stream:
        text, kept = caption(scene, rng)
        prompts.append((text, scene, kept[0]))
    return prompts


def stacked(texts: list[Text]) -> Text:
    return Text(torch.cat([t.cond for t in texts]), torch.cat([t.uncond for t in texts if t.uncond is not None]))


def sample(backbone: Backbone, prompts: list[str], seeds: list[int], look: Look) -> np.ndarray:
    """Clips uint8 [B, T, H, W, 3], denoised by the loop that `chai gen` uses, prompts of equally many tokens as one batch."""
    texts = [backbone.encode(prompt, look) for prompt in prompts]
    latents: dict[int, torch.Tensor] = {}
    for length in {text.cond.shape[1] for text in texts}:
        alike = [i for i, text in enumerate(texts) if text.cond.shape[1] == length]
        noise = torch.cat([backbone.noise(replace(look, seed=seeds[i])) for i in alike])
        run = denoise(backbone, Dense(latents=noise), look, stacked([texts[i] for i in alike]))
        latents |= dict(zip(alike, run.latents.split(1), strict=True))
    return np.stack([backbone.decode(latents[i], look) for i in range(len(prompts))])


def measure(
    backbone: Backbone, judge: Judge, kind: str, count: int, look: Look, done: dict[str, Any], keep: Path | None
) -> Iterator[dict[str, bool]]:
    """For each prompt, which of its named attributes the judge sees."""
    prompts = asked(kind, count)
    key = f"{backbone.fingerprint}/{kind}/{look.scheduler}/{look.num_inference_steps}/{look.guidance_scale}"
    missing = [i for i in range(count) if f"{key}/{i}" not in done]
    for start in range(0, len(missing), BATCH):
        part = missing[start : start + BATCH]
        clips = sample(backbone, [prompts[i][0] for i in part], [1000 + i for i in part], look)
        for i, reading in zip(part, judge.read(clips), strict=True):
            _, scene, names = prompts[i]
            done[f"{key}/{i}"] = {name: right for name, right in reading.right(scene).items() if name in names}
            if keep:
                with keep.open("a") as file:
                    file.write(json.dumps({"key": f"{key}/{i}", "right": done[f"{key}/{i}"]}) + "\n")
    yield from (done[f"{key}/{i}"] for i in range(count))


def accuracy(verdicts: Iterable[dict[str, bool]]) -> dict[str, float]:
    """Share of prompts with each attribute right, with all of the four main ones that it names, and with all five."""
    verdicts = list(verdicts)
    named = {name: [v[name] for v in verdicts if name in v] for name in ATTRIBUTES}
    found = {name: float(np.mean(values)) for name, values in named.items() if values}
    found["four"] = float(np.mean([all(v[name] for name in FOUR if name in v) for v in verdicts]))
    return found | {"all": float(np.mean([all(v.values()) for v in verdicts]))}


def markdown(rows: list[tuple[str, dict[str, float]]], first: str) -> str:
    names = [*ATTRIBUTES, "four", "all"]
    lines = [f"| {first} | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for label, found in rows:
        cells = [f"{100 * found[name]:.1f}" if name in found else "" for name in names]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kept_results(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    return {row["key"]: row["right"] for row in map(json.loads, path.read_text().splitlines())}


def prepare(model: str, judge: Path, dtype: str) -> tuple[Backbone, Judge]:
    record = find_record(model)
    if record.unknown_words is None:
        record = replace(find_record("embedded"), name=model, source=model, family=record.family)
    return load(record, Placement(device="cpu", dtype=dtype)), Judge.load(judge)


@app.command()
def ladder(
    model: ModelOption = "embedded",
    judge: JudgeOption = WEIGHTS / "judge",
    count: CountOption = 256,
    steps: Annotated[str, typer.Option(help="Step counts.")] = ",".join(map(str, STEPS)),
    schedulers: Annotated[str, typer.Option(help="Solvers.")] = "euler,unipc",
    guidance_scale: float | None = None,
    dtype: str = "float32",
    results: ResultsOption = None,
) -> None:
    """Held-out prompts with one object and every attribute named."""
    backbone, reader = prepare(model, judge, dtype)
    done = kept_results(results)
    rows = []
    for scheduler in schedulers.split(","):
        for number in map(int, steps.split(",")):
            look = resolve(backbone.record, Settings(num_inference_steps=number, guidance_scale=guidance_scale), scheduler)
            start = time.monotonic()
            found = accuracy(measure(backbone, reader, "single", count, look, done, results))
            rows.append((f"{number} {scheduler}", found))
            print(f"{number} {scheduler}: {found} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"\n{count} prompts\n\n{markdown(rows, 'steps, solver')}")


@app.command()
def kinds(
    model: ModelOption = "embedded",
    judge: JudgeOption = WEIGHTS / "judge",
    count: CountOption = 128,
    steps: int = 30,
    scheduler: str = "unipc",
    dtype: str = "float32",
    results: ResultsOption = None,
) -> None:
    """Two objects with every attribute named, and one object with attributes left out (only the named ones count)."""
    backbone, reader = prepare(model, judge, dtype)
    done = kept_results(results)
    look = resolve(backbone.record, Settings(num_inference_steps=steps), scheduler)
    rows = [(kind, accuracy(measure(backbone, reader, kind, count, look, done, results))) for kind in ("two", "partial")]
    print(f"{count} prompts each, {steps} steps, {scheduler}\n\n{markdown(rows, 'prompts')}")


@app.command()
def ceiling(
    model: ModelOption = "embedded",
    judge: JudgeOption = WEIGHTS / "judge",
    count: CountOption = 512,
) -> None:
    """The judge on held-out true clips, and on the same clips through the autoencoder."""
    backbone, reader = prepare(model, judge, "float32")
    vae = backbone.pipe.vae  # type: ignore[attr-defined]
    rows = []
    errors = []
    for things in (1, 2):
        shown = list(islice(scenes(81, things, held=True), count))
        clips = np.stack([paint(scene) for scene in shown])
        again = np.empty_like(clips)
        with torch.no_grad():
            for i, clip in enumerate(clips):
                x = torch.from_numpy(clip).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
                y = vae.decode(vae.encode(x).latent_dist.mean).sample
                errors.append(float((x - y).square().mean()))
                again[i] = ((y[0].permute(1, 2, 3, 0) + 1) * 127.5).round().byte().numpy()
        for label, kind in (("true", clips), ("reconstructed", again)):
            verdicts = [reading.right(scene) for reading, scene in zip(reader.read(kind), shown, strict=True)]
            rows.append((f"{label}, {things} object{'s' * (things > 1)}", accuracy(verdicts)))
    print(f"{count} clips each, reconstruction PSNR {10 * np.log10(4 / np.mean(errors)):.1f} dB\n\n{markdown(rows, 'clips')}")


if __name__ == "__main__":
    app()
