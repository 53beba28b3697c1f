"""What the loop asks a method. A method object serves one request and is then thrown away: no state survives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from chai_cli.backbones.base import Backbone, Look


@dataclass(frozen=True)
class Plan:
    """Which steps run and which latents are kept.

    Attributes:
        num_inference_steps: Steps of the schedule.
        start_step, stop_step: From 0; the first that runs, and the first that does not (None: all run).
        record: Steps whose entering latents are kept.
    """

    num_inference_steps: int
    start_step: int = 0
    stop_step: int | None = None
    record: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """One solver step about to run: sigma 1 is pure noise, 0 is clean."""

    index: int
    total: int
    sigma: float
    timestep: Tensor


@dataclass(frozen=True)
class Donor:
    """What an earlier render left behind.

    Attributes:
        steps: Latents as they entered some steps (from 0) of its run, [1, C, T, H, W].
        sigmas: Their noise levels, by step.
        clean: The finished latents, where they were kept.
    """

    steps: Mapping[int, Tensor] = field(default_factory=dict)
    sigmas: Mapping[int, float] = field(default_factory=dict)
    clean: Tensor | None = None


class Reuse(Protocol):
    """How a method reuses: its options, chosen for a whole run."""

    @property
    def fast_steps(self) -> int:
        """Solver steps of a hit."""

    @property
    def keeps_clean(self) -> bool:
        """Whether hits read finished latents."""

    @property
    def latents_kept(self) -> int:
        """How many latents an entry holds, at most."""

    def kept(self, dense: Sequence[float], fast: Sequence[float]) -> frozenset[int]:
        """The steps (from 0) of a dense run whose entering latents a hit will read.

        Args:
            dense, fast: Sigmas of the two schedules, without the last 0.
        """

    def fits(self, donor: Donor, fast: Sequence[float]) -> bool:
        """Whether the donor has all that a hit on this schedule reads."""

    def check(self, backbone: Backbone) -> None:
        """Raises ChaiError if the model cannot be rendered with these options."""

    def hit(self, backbone: Backbone, donor: Donor) -> Method:
        """The method that renders one request with this donor."""


class Method(Protocol):
    name: str

    def plan(self, look: Look) -> Plan:
        """Decide before the first step."""

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        """Latents to begin with, [1, C, T, H, W]."""

    def around(self, step: Step) -> AbstractContextManager[Any]:
        """What holds while the model runs this step."""

    def after(self, step: Step, latents: Tensor) -> Tensor:
        """Latents to go on with."""
