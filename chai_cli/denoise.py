"""The only denoising loop: every family, every method."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from chai_cli.backbones.base import Backbone, Look, Text
from chai_cli.reuse.base import Method, Step


@dataclass
class Trajectory:
    """One render, as far as it went.

    Attributes:
        latents: [1, C, T, H, W], float32: clean unless the plan stopped early.
        sigmas: Noise level before each step of the schedule, then the last.
        kept: Latents as they entered the recorded steps (0-based), on the CPU.
        estimates: What the model took for the clean latents at these steps.
        seconds: Wall time of each step that ran.
        calls: Transformer forwards in all.
        step_calls: Of a step that asks the model.
    """

    latents: Tensor
    sigmas: list[float]
    kept: dict[int, Tensor] = field(default_factory=dict)
    estimates: dict[int, Tensor] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    calls: int = 0
    step_calls: int = 0


@contextmanager
def timed(device: torch.device, record: Callable[[float], None]) -> Iterator[None]:
    """Wall time of a block, with the device's queue empty at both ends."""
    synchronise(device)
    start = time.perf_counter()
    yield
    synchronise(device)
    record(time.perf_counter() - start)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def leap(scheduler: Any, steps: Sequence[int]) -> None:
    """Leave only some steps (from 0, rising) of a scheduler whose timesteps are set: it goes from each straight to the next."""
    chosen = list(steps)
    scheduler.timesteps = scheduler.timesteps[chosen]
    scheduler.sigmas = torch.cat([scheduler.sigmas[chosen], scheduler.sigmas[-1:]])
    scheduler.num_inference_steps = len(chosen)


@torch.no_grad()
def denoise(
    backbone: Backbone,
    method: Method,
    look: Look,
    text: Text,
    on_step: Callable[[int, int, Tensor], None] = lambda done, total, estimate: None,
) -> Trajectory:
    """Render one request's latents.

    The plan may begin at a later step (from latents that `method.start` supplies) and stop before the last one; with
    the Euler scheduler a run that goes on from its own latents of step k equals the uninterrupted one exactly. A
    multistep scheduler starts there without history.

    Args:
        on_step: Told the steps done, the steps there are, and the clean estimate, after each.
    """
    plan = method.plan(look)
    scheduler = backbone.schedule(replace(look, num_inference_steps=plan.num_inference_steps))
    if plan.leaps is not None:
        leap(scheduler, plan.leaps)
    scheduler.set_begin_index(plan.start_step)
    sigmas = [float(s) for s in scheduler.sigmas]
    trajectory = Trajectory(method.start(backbone.noise(look), plan), sigmas)
    total = len(scheduler.timesteps)
    stop = total if plan.stop_step is None else min(plan.stop_step, total)
    for index in range(plan.start_step, stop):
        step = Step(index, total, sigmas[index], scheduler.timesteps[index])
        before = trajectory.latents
        with timed(backbone.device, trajectory.seconds.append), method.around(step):
            context = {"step_index": index, "sigma": step.sigma, "num_inference_steps": total}
            if index in plan.given:
                velocity, calls = (before - plan.given[index].to(before)) / step.sigma, 0
            else:
                velocity, calls = backbone.velocity(before, step.timestep, text, look, context)
            stepped = scheduler.step(velocity, step.timestep, before, return_dict=False)[0]
            estimate = before - step.sigma * velocity
            trajectory.latents = method.after(step, stepped, before, estimate)
        if index in plan.record:
            trajectory.kept[index], trajectory.estimates[index] = before.cpu().clone(), estimate.cpu()
        trajectory.calls += calls
        trajectory.step_calls = max(trajectory.step_calls, calls)
        on_step(index + 1 - plan.start_step, stop - plan.start_step, estimate)
    return trajectory
