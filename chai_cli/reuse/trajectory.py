"""Starting from a donor's latents instead of noise, as NIRVANA does (NSDI 2024, arXiv 2312.04429): the first steps are left out.

With Euler a run that starts from its own latents of a step equals the uninterrupted one exactly; a multistep solver starts there
without history, so that its first step is one of first order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chai_cli.backbones.base import noise_levels
from chai_cli.errors import ChaiError
from chai_cli.reuse.base import OTHER_LATENTS, Donor, Plan, Step

if TYPE_CHECKING:
    from torch import Tensor

    from chai_cli.backbones.base import Backbone, Look

SOURCES = ("steps", "clean")
# Cosine of the prompts from which, and the share of the steps that is left out then: NIRVANA's table of 5 to 25 of 50 steps.
LEVELS = ((0.65, 0.1), (0.75, 0.2), (0.85, 0.3), (0.9, 0.4), (0.95, 0.5))


@dataclass(frozen=True)
class TrajectoryOptions:
    """Where a hit starts.

    Attributes:
        fast_steps: Steps of the schedule that it joins; None for those of the request. It runs those that are left of it.
        source: The donor's latents of the step nearest in noise level (`steps`), or its finished ones with the request's own noise
            added (`clean`), which fits any level.
        start_sigma: Join before the first step at this noise level or below; None for NIRVANA's table, by similarity.
    """

    fast_steps: int | None = None
    source: str = "steps"
    start_sigma: float | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ChaiError(f"source must be one of {', '.join(SOURCES)}, not {self.source!r}")
        if self.fast_steps is not None and self.fast_steps < 2:
            raise ChaiError(f"fast steps must be at least 2 to leave one out, not {self.fast_steps}")
        if self.start_sigma is not None and not 0 < self.start_sigma < 1:
            raise ChaiError(f"start sigma lies between 0 (clean) and 1 (noise), not {self.start_sigma}")

    @property
    def by_prompt(self) -> float:
        return LEVELS[0][0] if self.start_sigma is None else -1.0

    @property
    def donors(self) -> int:
        return 1

    @property
    def keeps_clean(self) -> bool:
        return self.source == "clean"

    @property
    def latents_kept(self) -> int:
        return 1 if self.source == "clean" or self.start_sigma is not None else len(LEVELS)

    def schedule(self, steps: int) -> int:
        return min(self.fast_steps or steps, steps)

    def useless(self, steps: int) -> str:
        return f"{steps} steps are too few to leave some out" if self.schedule(steps) < 2 else ""

    def starts(self, fast: Sequence[float]) -> list[int]:
        """The steps (from 0) of a schedule at which a hit may start, one for each level of similarity."""
        if self.start_sigma is not None:
            return [next((step for step, sigma in enumerate(fast) if sigma <= self.start_sigma), 0)]
        return [min(round(share * len(fast)), len(fast) - 1) for _, share in LEVELS]

    def start(self, similarity: float, fast: Sequence[float]) -> int:
        """Where a hit with so similar a donor starts: the first step that runs, 0 if none can be left out."""
        if self.start_sigma is not None:
            return self.starts(fast)[0]
        fitting = [step for (least, _), step in zip(LEVELS, self.starts(fast), strict=True) if similarity >= least]
        return max(fitting, default=0)

    def kept(self, dense: Sequence[float], fast: Sequence[float]) -> frozenset[int]:
        if self.source == "clean":
            return frozenset()
        nearest = (min(range(len(dense)), key=lambda i: abs(dense[i] - fast[step])) for step in self.starts(fast))
        return frozenset(nearest) - {0}

    def unfit(self, donor: Donor, fast: Sequence[float]) -> str:
        step = self.start(donor.similarity, fast)
        if step < 1:
            return f"the prompts are too little alike ({donor.similarity:.2f}) to leave out a step of {len(fast)}"
        return OTHER_LATENTS if self.latents(donor, fast[step], None) is None else ""

    def latents(self, donor: Donor, sigma: float, noise: Tensor | None) -> Tensor | None:
        """The donor at a noise level, or None if it was not kept."""
        if self.source == "steps":
            step = donor.nearest(sigma)
            return None if step is None else donor.steps[step]
        if donor.clean is None or noise is None:
            return donor.clean
        return (1 - sigma) * donor.clean.to(noise) + sigma * noise

    def check(self, backbone: Backbone) -> None:
        pass

    def hit(self, backbone: Backbone, donor: Donor) -> FromTrajectory:
        return FromTrajectory(backbone, donor, self)


class FromTrajectory:
    """The rest of a run that a donor began."""

    name = "nirvana"

    def __init__(self, backbone: Backbone, donor: Donor, options: TrajectoryOptions) -> None:
        self.backbone = backbone
        self.donor = donor
        self.options = options
        self.sigma = 1.0

    def plan(self, look: Look) -> Plan:
        steps = self.options.schedule(look.num_inference_steps)
        fast = noise_levels(self.backbone, look, steps)
        start = self.options.start(self.donor.similarity, fast)
        self.sigma = fast[start]
        return Plan(steps, start)

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        latents = self.options.latents(self.donor, self.sigma, noise)
        return noise if latents is None else latents.to(noise)

    def around(self, step: Step) -> AbstractContextManager[Any]:
        return nullcontext()

    def after(self, step: Step, latents: Tensor, before: Tensor, estimate: Tensor) -> Tensor:
        return latents
