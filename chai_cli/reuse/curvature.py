"""A short Euler run that takes over how a donor's path bends.

Few steps are wrong because the path from noise to video is curved and each step goes straight. A donor's full run knows by how much its own
path bent within each of these steps: the mean velocity over the step less the velocity at its beginning. Where request and donor
agree their paths bend alike if they begin with the same noise, so a hit starts from the donor's noise and adds that difference to
each of its steps. It costs no model call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chai_cli.errors import ChaiError
from chai_cli.reuse.base import OTHER_LATENTS, Donor, Plan, Step

if TYPE_CHECKING:
    from torch import Tensor

    from chai_cli.backbones.base import Backbone, Look


@dataclass(frozen=True)
class CurvatureOptions:
    """How a hit bends.

    Attributes:
        fast_steps: Solver steps of its schedule.
        strength: Share of the donor's bend that is added.
        skip: First steps that are left out: the run begins with the donor's latents of that noise level.
    """

    fast_steps: int = 4
    strength: float = 1.0
    skip: int = 0

    def __post_init__(self) -> None:
        if self.fast_steps < 1:
            raise ChaiError(f"fast steps must be at least 1, not {self.fast_steps}")
        if not 0 <= self.skip < self.fast_steps:
            raise ChaiError(f"skip must leave a step of {self.fast_steps}, not {self.skip}")

    @property
    def by_prompt(self) -> None:
        return None

    @property
    def donors(self) -> int:
        return 1

    @property
    def keeps_clean(self) -> bool:
        return True

    @property
    def latents_kept(self) -> int:
        return 2 * (self.fast_steps - self.skip) + 1

    def schedule(self, steps: int) -> int:
        return min(self.fast_steps, steps)

    def useless(self, steps: int) -> str:
        return f"a hit takes {self.fast_steps} steps, and this takes no more" if steps <= self.fast_steps else ""

    def kept(self, dense: Sequence[float], fast: Sequence[float]) -> frozenset[int]:
        places = [bracket(dense, sigma) for sigma in fast[self.skip :]]
        return frozenset(step for place in places for step in (place, place + 1) if step < len(dense))

    def unfit(self, donor: Donor, fast: Sequence[float]) -> str:
        if donor.clean is None:
            return OTHER_LATENTS
        levels = sorted(donor.sigmas.values(), reverse=True)
        reached = [any(abs(level - sigma) < 1e-3 for level in levels) or inside(levels, sigma) for sigma in fast[self.skip :]]
        return "" if all(reached) else OTHER_LATENTS

    def check(self, backbone: Backbone) -> None:
        pass

    def hit(self, backbone: Backbone, donor: Donor) -> Curvature:
        return Curvature(backbone, donor, self)


def bracket(sigmas: Sequence[float], sigma: float) -> int:
    """The last step (from 0) at this noise level or above."""
    falling = [-level for level in sigmas]
    return max(0, bisect_right(falling, -sigma + 1e-6) - 1)


def inside(levels: Sequence[float], sigma: float) -> bool:
    return bool(levels) and levels[0] >= sigma >= levels[-1]


class Curvature:
    """The run of a hit."""

    name = "curvature"

    def __init__(self, backbone: Backbone, donor: Donor, options: CurvatureOptions) -> None:
        self.backbone = backbone
        self.donor = donor
        self.options = options
        self.sigmas: list[float] = []
        assert donor.clean is not None
        self.points = [(donor.sigmas[step], donor.steps[step]) for step in sorted(donor.steps)] + [(0.0, donor.clean)]

    def plan(self, look: Look) -> Plan:
        steps = self.options.schedule(look.num_inference_steps)
        scheduler = self.backbone.schedule(replace(look, num_inference_steps=steps))
        self.sigmas = [float(sigma) for sigma in scheduler.sigmas]
        return Plan(steps, self.options.skip)

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        return self.at(self.sigmas[plan.start_step])[0].to(noise)

    def at(self, sigma: float) -> tuple[Tensor, Tensor]:
        """The donor's latents at a noise level, between two that were kept, and its velocity there."""
        levels = [level for level, _ in self.points]
        place = min(bracket(levels, sigma), len(levels) - 2)
        (high, before), (low, after) = self.points[place], self.points[place + 1]
        velocity = (before.float() - after.float()) / (high - low)
        return before.float() + (sigma - high) * velocity, velocity

    def around(self, step: Step) -> AbstractContextManager[Any]:
        return nullcontext()

    def after(self, step: Step, latents: Tensor) -> Tensor:
        here, there = self.sigmas[step.index], self.sigmas[step.index + 1]
        begin, velocity = self.at(here)
        end, _ = self.at(there)
        bend = (end - begin) - (there - here) * velocity
        return latents + self.options.strength * bend.to(latents)
