"""Command line of the training: every part resumes from its checkpoint in the run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from chai_cli.embedded.train.loop import Plan, Task, train

app = typer.Typer(
    help="Train the parts of the embedded model, in the order vae, judge, clip, dit, stdit.", no_args_is_help=True
)

RunOption = Annotated[Path, typer.Option(help="Folder for clips, checkpoints and logs.")]
OutOption = Annotated[Path | None, typer.Option(help="Write the weights as they ship into this model folder.")]
StepsOption = Annotated[int, typer.Option(help="Stop after this many optimiser steps in all.")]
DecayOption = Annotated[int, typer.Option(help="Lower the learning rate to zero over this many last steps.")]
WorkersOption = Annotated[int, typer.Option(help="Training processes, one thread each.")]


def paint(run: Path, shards: int) -> None:
    """Paint what is missing before the workers start, so that they do not race for the same files."""
    from chai_cli.embedded.train.clips import TEST_SEED, TRAIN_SEED, clip_shards

    clip_shards(run.parent / "clips", TEST_SEED, 2)
    clip_shards(run.parent / "clips", TRAIN_SEED, shards)


def on_latents(name: str, build: Callable[[Plan, int], Task], plan: Plan, vae: Path, shards: int) -> None:
    """Train a transformer on the latents that an autoencoder makes of the painted clips."""
    from chai_cli.embedded.train.latents import latent_shards

    paint(plan.run, shards)
    latent_shards(plan.run.parent / "clips", plan.run / "latents", vae, shards)
    train(name, build, replace(plan, extra={**plan.extra, "vae": vae, "shards": shards}))


@app.callback()
def parts() -> None:
    """Keeps `vae` a subcommand, however many parts there are."""


@app.command()
def vae(
    run: RunOption,
    out: OutOption = None,
    steps: StepsOption = 4500,
    decay: DecayOption = 1500,
    workers: WorkersOption = 2,
    seed: int = 0,
    shards: int = 32,
    batch: int = 4,
    lr: float = 2e-3,
    muon_lr: float = 2e-2,
) -> None:
    """The video autoencoder."""
    from chai_cli.embedded.train.vae import VaeTask

    paint(run, shards)
    extra: dict[str, object] = {"shards": shards, "batch": batch}
    plan = Plan(run, steps, lr, muon_lr, decay=decay, seed=seed, workers=workers, out=out, extra=extra)
    train("vae", VaeTask, plan)


@app.command()
def judge(
    run: RunOption,
    out: OutOption = None,
    steps: StepsOption = 2500,
    decay: DecayOption = 1000,
    workers: WorkersOption = 2,
    seed: int = 0,
    shards: int = 32,
    batch: int = 16,
    lr: float = 1e-3,
    muon_lr: float = 1e-2,
) -> None:
    """The classifier that reads clips."""
    from chai_cli.embedded.train.judge import JudgeTask

    paint(run, shards)
    extra: dict[str, object] = {"shards": shards, "batch": batch}
    train("judge", JudgeTask, Plan(run, steps, lr, muon_lr, decay=decay, seed=seed, workers=workers, out=out, extra=extra))


@app.command()
def clip(
    run: RunOption,
    out: OutOption = None,
    steps: StepsOption = 1500,
    decay: DecayOption = 500,
    workers: WorkersOption = 1,
    seed: int = 0,
    shards: int = 32,
    batch: int = 128,
    lr: float = 1e-3,
    muon_lr: float = 1e-2,
) -> None:
    """The small open_clip model."""
    from chai_cli.embedded.train.clip import ClipTask

    paint(run, shards)
    extra: dict[str, object] = {"shards": shards, "batch": batch}
    train("clip", ClipTask, Plan(run, steps, lr, muon_lr, decay=decay, seed=seed, workers=workers, out=out, extra=extra))


@app.command()
def dit(
    run: RunOption,
    vae: Annotated[Path, typer.Option(help="Folder of the trained autoencoder, as exported.")],
    out: OutOption = None,
    start: Annotated[Path | None, typer.Option(help="Begin from the weights of this model folder.")] = None,
    steps: StepsOption = 20_000,
    decay: DecayOption = 0,
    workers: WorkersOption = 2,
    seed: int = 0,
    shards: int = 32,
    batch: int = 24,
    still_steps: Annotated[int, typer.Option(help="Train on single frames only for this many first steps.")] = 1200,
    lr: float = 1e-3,
    muon_lr: float = 1e-2,
    compile: Annotated[bool, typer.Option(help="Compile the blocks: a third faster.")] = True,
) -> None:
    """The transformer and its text encoder, on latents of the painted clips."""
    from chai_cli.embedded.train.dit import DitTask

    extra: dict[str, object] = {"batch": batch, "start": start, "still_steps": still_steps, "compile": compile}
    plan = Plan(run, steps, lr, muon_lr, decay=decay, seed=seed, workers=workers, out=out, extra=extra)
    on_latents("dit", DitTask, plan, vae, shards)


@app.command()
def stdit(
    run: RunOption,
    out: OutOption = None,
    start: Annotated[Path | None, typer.Option(help="Begin from the weights of this model folder.")] = None,
    steps: StepsOption = 4000,
    decay: DecayOption = 0,
    workers: WorkersOption = 2,
    seed: int = 0,
    shards: int = 32,
    batch: int = 24,
    still_steps: Annotated[int, typer.Option(help="Train on single frames only for this many first steps.")] = 800,
    teacher: Annotated[bool, typer.Option(help="Learn from the embedded Wan instead of from the truth.")] = False,
    lr: float = 1e-3,
    muon_lr: float = 1e-2,
    compile: Annotated[bool, typer.Option(help="Compile the blocks.")] = True,
) -> None:
    """The transformer of the small Open-Sora, on the same latents, with the shipped autoencoder and text encoder."""
    from chai_cli.embedded.train.stdit import WEIGHTS, StditTask

    extra: dict[str, object] = {"batch": batch, "start": start, "still_steps": still_steps, "compile": compile}
    extra["teacher"] = teacher
    plan = Plan(run, steps, lr, muon_lr, decay=decay, seed=seed, workers=workers, out=out, extra=extra)
    on_latents("stdit", StditTask, plan, WEIGHTS / "vae", shards)


if __name__ == "__main__":
    app()
