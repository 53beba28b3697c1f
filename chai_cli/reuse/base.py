"""What the loop asks a method. A method object serves one request and is then thrown away: no state survives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from chai_cli.backbones.base import Backbone, Look


OTHER_LATENTS = "the donor's entry does not hold the latents that these options read"
SIGMA_TOLERANCE = 0.05  # how far from a step's noise level a donor's latents may be and still count as of that level


@dataclass(frozen=True)
class Plan:
    """Which steps run and which latents are kept.

    Attributes:
        num_inference_steps: Steps of the schedule.
        start_step, stop_step: From 0; the first that runs, and the first that does not (None: all run).
        record: Steps whose entering latents, and the clean estimates there, are kept.
        leaps: The steps (from 0) of the schedule that run, where not all do: the solver goes from one straight to the next. Other
            numbers of steps then count these.
        given: Clean estimates of steps, [1, C, T, H, W], that are taken for the model's: there it is not called.
    """

    num_inference_steps: int
    start_step: int = 0
    stop_step: int | None = None
    record: frozenset[int] = frozenset()
    leaps: tuple[int, ...] | None = None
    given: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One solver step: sigma 1 is pure noise, 0 is clean."""

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
        estimates: What its model took for the clean latents at these steps, where they were kept.
        clean: The finished latents, where they were kept.
        similarity: Cosine of its prompt and the request's.
        others: Further donors, the next best, for a method that reads several.
        lesson: What a `Learner` made of many donors.
        prompt: The embedding of its whole prompt, [D]; with a lesson that of the request's.
    """

    steps: Mapping[int, Tensor] = field(default_factory=dict)
    sigmas: Mapping[int, float] = field(default_factory=dict)
    clean: Tensor | None = None
    similarity: float = 1.0
    others: tuple[Donor, ...] = ()
    estimates: Mapping[int, Tensor] = field(default_factory=dict)
    lesson: Any = None
    prompt: np.ndarray | None = None

    def nearest(self, sigma: float) -> int | None:
        """The kept step whose noise level is nearest; None if that is farther than `SIGMA_TOLERANCE`."""
        best = min(self.sigmas, key=lambda step: abs(self.sigmas[step] - sigma), default=None)
        return None if best is None or abs(self.sigmas[best] - sigma) > SIGMA_TOLERANCE else best


class Reuse(Protocol):
    """How a method reuses: its options, chosen for a whole run."""

    @property
    def by_prompt(self) -> float | None:
        """The cosine from which whole prompts count as related; None for methods whose donors share an entity."""

    @property
    def donors(self) -> int:
        """How many donors a hit reads, at most."""

    @property
    def keeps_clean(self) -> bool:
        """Whether hits read finished latents."""

    @property
    def latents_kept(self) -> int:
        """How many latents an entry holds, at most."""

    def schedule(self, steps: int) -> int:
        """Solver steps of the schedule on which a hit runs (it may leave out the first ones), for a request of `steps`."""

    def useless(self, steps: int) -> str:
        """Why no hit could be faster than a dense run of `steps` steps; empty if it could."""

    def kept(self, dense: Sequence[float], fast: Sequence[float]) -> frozenset[int]:
        """The steps (from 0) of a dense run whose entering latents a hit will read.

        Args:
            dense, fast: Sigmas of the two schedules, without the last 0.
        """

    def unfit(self, donor: Donor, fast: Sequence[float]) -> str:
        """Why a hit on this schedule cannot use the donor; empty if it can."""

    def check(self, backbone: Backbone) -> None:
        """Raises ChaiError if the model cannot be rendered with these options."""

    def hit(self, backbone: Backbone, donor: Donor) -> Method:
        """The method that renders one request with this donor."""


@runtime_checkable
class Learner(Reuse, Protocol):
    """A method that works something out from many donors at once, related or not; an entry holds the clean estimates too."""

    @property
    def least_donors(self) -> int:
        """How many donors it takes; `donors` is how many it reads at most, the newest."""

    def leaps(self, steps: int) -> tuple[int, ...]:
        """The steps (from 0) of a full schedule whose latents and estimates it reads."""

    @property
    def good_donors(self) -> int:
        """How many it learns well from: so many are worth rendering beforehand."""

    @property
    def openings(self) -> int:
        """How many first estimates it reads at most, besides those of its donors: hits leave theirs behind."""

    def learn(self, backbone: Backbone, look: Look, donors: Iterable[Donor], openings: Iterable[Donor] = ()) -> Lesson | None:
        """What hits of requests that are solved like this one get as `Donor.lesson`; None without donors.

        Args:
            donors: Read one at a time, and maybe more than once.
            openings: Donors that hold a prompt and the estimate of step 0, perhaps no more.
        """


class Lesson(Protocol):
    @property
    def prompts(self) -> int:
        """How many prompts' first estimates it goes by; 0 if it leaves the first step to the model."""


class Method(Protocol):
    name: str

    def plan(self, look: Look) -> Plan:
        """Decide before the first step."""

    def start(self, noise: Tensor, plan: Plan) -> Tensor:
        """Latents to begin with, [1, C, T, H, W]."""

    def around(self, step: Step) -> AbstractContextManager[Any]:
        """What holds while the model runs this step."""

    def after(self, step: Step, latents: Tensor, before: Tensor, estimate: Tensor) -> Tensor:
        """Latents to go on with.

        Args:
            latents: As the solver left them.
            before: As they entered the step.
            estimate: The clean latents that the model saw in them.
        """
