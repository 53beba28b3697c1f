"""Full-step rendering with no reuse: the reference for quality and time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from chai_cli.backbones.base import Look
from chai_cli.reuse.base import Plan, Step


class Dense:
    """Every step from noise to clean.

    Args:
        record: Steps whose entering latents are kept.
        stop_step: Stop before this step.
        latents: Go on at `start_step` from these latents instead of noise.
    """

    name = "dense"

    def __init__(
        self,
        record: frozenset[int] = frozenset(),
        stop_step: int | None = None,
        start_step: int = 0,
        latents: Tensor | None = None,
    ) -> None:
        self.record = record
        self.stop_step = stop_step
        self.start_step = start_step
        self.latents = latents

    def plan(self, look: Look) -> Plan:
        return Plan(look.num_inference_steps, self.start_step, self.stop_step, self.record)

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        return noise if self.latents is None else self.latents.to(noise)

    def around(self, step: Step) -> AbstractContextManager[Any]:
        return nullcontext()

    def after(self, step: Step, latents: Tensor, before: Tensor, estimate: Tensor) -> Tensor:
        return latents
